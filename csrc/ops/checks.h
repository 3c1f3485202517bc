// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <vector>

#include "attention/block_attention.h"
#include "core/shape.h"
#include "partition/partition.h"
#include "transport/group/group_context.h"
#include "transport/p2p_transport.h"

// The rules for the arguments of operators. They are checked here, and nowhere below this folder.
// A refusal reads "subject must rule, got value". The prefix marks it, for the Python layer, as an
// error of the caller.
#define RINGATTN_CHECK(condition, ...) TORCH_CHECK(condition, "ringattn: ", __VA_ARGS__)

namespace ringattn {

/// As Python writes it: torch.float32.
std::string dtype_name(at::ScalarType dtype);

/// Every environment variable that C++ reads has a valid value.
void check_environment();

/// q [B, S_q, H, D] and k, v [B, S_k, H_kv, D] fit each other and a kernel.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);

/// (out, lse) is a state: [B, S, H, D] and [B, H, S], float32, on CPU float64 too.
void check_state(const at::Tensor& out, const at::Tensor& lse);
/// The same, over the rows of q.
void check_state(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& q);

/// Whether x, meant to be [B, S, H, D], has the strides of a transposed [B, H, S, D].
bool has_heads_first(const at::Tensor& x);

/// The partition that these arguments describe, over `world_size` ranks. `pieces`: with layout
/// "pieces" alone, int64 [n, 3] on the CPU. `name`: of the caller's argument.
Partition check_partition(const std::vector<int64_t>& lengths, const std::vector<int64_t>& order,
                          const std::string& layout, int64_t world_size,
                          const std::optional<at::Tensor>& pieces = {},
                          const char* name = "partition");

/// Whether x is int64 on the CPU and contiguous: how documents and pieces come.
bool is_host_integers(const at::Tensor& x);
/// The values of such a tensor.
at::IntArrayRef values_of(const at::Tensor& host_integers);

/// The arguments that say which keys of the sequence a query sees.
struct MaskArguments {
  bool causal = true;
  int64_t window_left = Mask::kUnlimited;
  int64_t window_right = Mask::kUnlimited;
  const std::optional<at::Tensor>& cu_seqlens;  // int64 [documents + 1], on the CPU
};

/// Their mask over a sequence of `seq_len` tokens.
Mask check_mask(const MaskArguments& mask, int64_t seq_len);

/// x itself where it is contiguous and its address a multiple of `bytes`, as kernels read it; else
/// a copy.
at::Tensor aligned(const at::Tensor& x, size_t bytes);

/// softcap is finite and not negative; sinks, where there are any, are floats [H] on q's device.
void check_scoring(const at::Tensor& q, double softcap, const std::optional<at::Tensor>& sinks);

/// Arguments that have been checked.
Scoring make_scoring(const at::Tensor& q, double scale, double softcap,
                     const std::optional<at::Tensor>& sinks);

/// x [B, S_r, H, D] has the rows of `rank`. The refusal of whole tensors, and of [B, H, S_r, D],
/// names the expression to pass instead. `partition_name`: of the caller's argument.
void check_rows(const at::Tensor& x, const char* name, const Partition& partition, int64_t rank,
                const char* partition_name = "partition");

/// Where the current stream is captured in a CUDA graph: the ranks have agreed on `signature`
/// before, because they cannot exchange anything under capture, and the transport can be captured.
/// Calls `transport` under capture only.
void check_capture(const GroupContext& group, const Signature& signature, c10::Device device,
                   c10::function_ref<const MessageTransport&()> transport);

/// Returns what `check` makes of this rank's arguments. Where `check` throws, the refusal is
/// published to the other ranks.
template <typename Check>
auto check_call(GroupContext& group, const Check& check) {
  group.failures().throw_if_failed();
  try {
    return check();
  } catch (const std::exception& error) {  // of any type: peers wait for this rank
    group.refuse_call(reason_of(error));
    throw;
  }
}

}  // namespace ringattn
