// SPDX-License-Identifier: Apache-2.0
#include <torch/library.h>

#include "ops/dispatch_rules.h"

// Every operator of this package. Kernels are registered beside their code, in the file of the same
// name; gradients, autocast and vmap in dispatch_rules.cpp; shapes for tracing in
// python/ringattn/_ops.py.
//
//   q [B, S_q, H, D]; k, v [B, S_k, H_kv, D]; out like q; lse [B, H, S_q], float32 (float64 for
//   float64). diagonal as in torch.tril, none: no mask. group_name: a process group's name, "" is a
//   single rank.
//   key_ranges int32 [S_q, 2]: row i sees keys [begin, end); not with a diagonal. softcap: scores
//   become softcap * tanh(score / softcap); 0: off. sinks [H]: a logit of each head that joins the
//   denominator.
//   cu_seqlens int64 [documents + 1], on the CPU: boundaries of packed documents in the sequence.
//   pieces int64 [n, 3], on the CPU, with layout "pieces": rank, start and stop of each.
//   key_lengths, key_order, key_layout, key_pieces: of the keys, whose last ones are at the
//   positions of the queries; none: those of the queries.

TORCH_LIBRARY(ringattn, m) {
  m.def(
      "block_attention(Tensor q, Tensor k, Tensor v, float scale, SymInt? diagonal,"
      " Tensor? key_ranges=None, float softcap=0.0, Tensor? sinks=None)"
      " -> (Tensor out, Tensor lse)");
  // Gradients of its results -> those of its arguments; dsinks is empty without sinks.
  m.def(
      "block_attention_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v,"
      " Tensor out, Tensor lse, float scale, SymInt? diagonal, Tensor? key_ranges=None,"
      " float softcap=0.0, Tensor? sinks=None)"
      " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  // Folds into a state: out [B, S_q, H, D] and lse, float32 (float64 for float64 inputs).
  m.def(
      "block_attention_(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, float scale,"
      " SymInt? diagonal, float softcap=0.0) -> ()");
  m.def("merge_states_(Tensor(a!) out, Tensor(b!) lse, Tensor other_out, Tensor other_lse) -> ()");
  // q, k, v: this rank's rows, in position order: q of the queries' partition, k and v of the
  // keys'.
  m.def(
      "ring_forward(Tensor q, Tensor k, Tensor v, SymInt[] lengths, int[] order, str layout, bool "
      "causal, float scale, str group_name, str transport, int? depth, int window_left=-1,"
      " int window_right=-1, float softcap=0.0, Tensor? sinks=None, Tensor? cu_seqlens=None,"
      " Tensor? pieces=None, SymInt[]? key_lengths=None, int[]? key_order=None,"
      " str? key_layout=None, Tensor? key_pieces=None) -> (Tensor out, Tensor lse)");
  // The same for the results of ring_forward, of this rank's rows. dsinks are of these rows alone.
  m.def(
      "ring_backward(Tensor grad_out, Tensor? grad_lse, Tensor q, Tensor k, Tensor v, Tensor out,"
      " Tensor lse, SymInt[] lengths, int[] order, str layout, bool causal, float scale,"
      " str group_name, str transport, int? depth, int window_left=-1, int window_right=-1,"
      " float softcap=0.0, Tensor? sinks=None, Tensor? cu_seqlens=None, Tensor? pieces=None,"
      " SymInt[]? key_lengths=None, int[]? key_order=None, str? key_layout=None,"
      " Tensor? key_pieces=None) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsinks)");
  // kv [2, B, S_r, H_kv, D] -> that of the rank before this one in the order, cyclic; filled by the
  // side stream.
  m.def(
      "rotate_kv(Tensor kv, SymInt[] lengths, int[] order, str group_name, str transport) -> "
      "Tensor");
  // Orders the current stream after the transfer, keeps `sent` alive until then, returns
  // `received`.
  m.def("wait_kv(Tensor received, Tensor sent) -> Tensor");
  // q [B, T, H, D], the same on all ranks; k, v: the keys that this rank holds, any number.
  // key_lengths int32 [B]: row b sees this rank's first key_lengths[b] keys; none: all of them.
  // key_begins int32 [B]: but not those before key_begins[b]. sinks [H], of any float type.
  // wide: out is a state, float32 (float64 for float64 inputs), not of q's dtype.
  m.def(
      "decode_attention(Tensor q, Tensor k, Tensor v, float scale, str group_name,"
      " Tensor? key_lengths=None, Tensor? key_begins=None, float softcap=0.0, Tensor? sinks=None,"
      " bool wide=False) -> (Tensor out, Tensor lse)");
  // Between the products of one decoded token, on CUDA. x, delta [..., E]; weight [E].
  m.def(
      "add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps)"
      " -> (Tensor sum, Tensor normed)");
  // gate_up [..., 2 * F], gate first -> [..., F]
  m.def("gated_silu(Tensor gate_up) -> Tensor");
  // qkv [B, 1, (H + 2 * H_kv) * D] -> q [B, 1, H, D], rotated; the rotated keys and the values go
  // to row `slot` (int32 [1]; negative: nowhere) of keys and values [B, N, H_kv, D]. cos, sin:
  // float32, D elements, the first half of sin negated.
  m.def(
      "rotate_into_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values,"
      " Tensor slot) -> Tensor");
  // rows [S_r, ...] of this rank -> those of every rank, each padded to the longest,
  // [W, max S_r, ...]. dim: the dimension of the caller's tensor that the rows come from.
  m.def(
      "gather(Tensor rows, SymInt[] lengths, int[] order, str layout, int dim, str group_name,"
      " Tensor? pieces=None) -> Tensor");
  // mine of this rank -> those of all ranks, which have one shape, [W, ...]. operation: its name in
  // errors. facts: lines "name=value" that the ranks must agree on.
  m.def("all_gather(Tensor mine, str operation, str facts, str group_name) -> Tensor");
  ringattn::register_dispatch_rules(m);
}
