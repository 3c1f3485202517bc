// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/shape.h"
#include "peer_sync/protocol.h"

// Parameters of the kernels. Plain data without torch or CUDA types, so that every kernel family
// and its host code can include it.

namespace ringattn {

enum class DataType : int8_t { kFloat16, kBFloat16, kFloat32 };

/// A larger softcap leaves scores of float32 as they are, a smaller one makes all of them 0.
constexpr float kLargestSoftcap = 1e30f, kSmallestSoftcap = 1e-30f;

/// Strided memory of shape [B, S, H, D]; strides in elements, the stride of D is 1.
struct Strided {
  void* data = nullptr;
  int64_t batch_stride = 0;
  int64_t row_stride = 0;
  int64_t head_stride = 0;
};

/// What every kernel of attention computes with.
struct AttentionShape {
  int32_t batch = 0;         // B
  int32_t num_queries = 0;   // S_q
  int32_t num_heads = 0;     // H
  int32_t num_kv_heads = 0;  // H_kv
  int32_t head_dim = 0;      // D: a multiple of 8, at most 256
  float scale = 1.0f;        // finite, any sign, 0 included
  DataType dtype = DataType::kBFloat16;
};

/// How the thread blocks of a persistent kernel get their work tiles.
enum class Scheduling : int8_t {
  kStatic,   // assigned beforehand: faster where nothing else runs on the device
  kDynamic,  // by the blocks that are free; needs RemoteFetch::scratch
};

/// Which keys a launch fetches by itself.
enum class Fetch : int8_t {
  kNone,    // all segments are local
  kRemote,  // those of remote segments. The launch gives the signals of peer_sync/protocol.h, also
            // where there is no remote segment. Needs kDynamic, an arrival counter for each segment
            // and RemoteFetch::failed
};

/// How a launch computes it: no result depends on them, but for the rounding of general calls of
/// one segment, which may have a kernel of their own where nothing is fetched.
struct LaunchOptions {
  /// Persistent kernels have one thread block on each multiprocessor: at most so many.
  int32_t max_blocks = INT32_MAX;
  /// Rows of a query tile, for kernels with tiles of several sizes. 0: the kernel chooses.
  int32_t tile_rows = 0;
  Scheduling scheduling = Scheduling::kStatic;
  Fetch fetch = Fetch::kNone;
};

/// A copy of KeySegment::key_ranges in host memory.
struct HostTable {
  const int32_t* ranges = nullptr;  // [S_q, 2]; null: there is none
  int64_t number = 0;               // no other table has it
};

/// Keys, and which of them each query row sees: under one diagonal, or by a table.
struct KeySegment {
  Strided k;                // [B, S_k, H_kv, D], dtype
  Strided v;                // [B, S_k, H_kv, D], dtype
  int32_t num_keys = 0;     // S_k
  int32_t diagonal = 0;     // row i sees key j when j - i <= diagonal; in [-S_q, S_k]; S_k: no mask
  int32_t first_query = 0;  // rows before it see none of the keys; 0, or the same value in all
                            // segments of a call in which it is not 0
  /// With data, a remote segment: the launch fetches the keys from there to `k` and `v`, the planes
  /// of one buffer [H_kv, 2, B, num_fetched(), D]. Without: a local segment.
  RemoteBlock source;
  /// Of a remote segment: so many keys lie behind its own, and are fetched with them. Later
  /// segments of the list may have these as local ones, for rows that see a key of this one.
  int32_t keys_behind = 0;
  /// With data, int32 [S_q, 2] in device memory, aligned to 8 bytes: row i sees keys [begin, end),
  /// clamped to [0, num_keys], none where begin >= end. Neither column decreases. `diagonal` and
  /// `first_query` are 0 then. A table that decreases gives an unspecified result and reads no
  /// other memory.
  const int32_t* key_ranges = nullptr;
  /// From which the order of work tiles is made; no result depends on it.
  HostTable host_table = {};

  constexpr bool is_remote() const { return source.data != nullptr; }
  constexpr int32_t num_fetched() const { return is_remote() ? num_keys + keys_behind : 0; }
};

/// One call of block attention: S_q query rows against a list of key segments, in the order of the
/// list, folded into a state where there is one.
///
/// Every row's result goes to exactly one place: rows in [final_begin, final_end) are rounded to
/// `dtype` and written to `out`; the others are written to `state`, in float32. With `fold`, state
/// and lse hold the result over earlier keys, and each row's result is merged with it first, also
/// where the row is then written to `out`.
struct BlockAttentionParams : AttentionShape, LaunchOptions {
  Strided q;    // [B, S_q, H, D], dtype
  Strided out;  // [B, S_q, H, D], dtype; null data when no row is final
  Strided
      state;  // [B, S_q, H, D], float32; null data when nothing is folded and every row is final
  float* lse = nullptr;  // [B, H, S_q], stride of S_q is 1
  int64_t lse_batch_stride = 0;
  int64_t lse_head_stride = 0;
  const KeySegment* segments = nullptr;  // [num_segments], host memory, read during the call
  int32_t num_segments = 0;

  /// What `scheduling` and `fetch` need, and no more: device code takes the modes from `scratch`
  /// and `failed` being null or not.
  RemoteFetch remote_fetch;

  int32_t final_begin = 0;
  int32_t final_end = 0;
  bool fold = false;

  /// Scores become softcap * tanh(score / softcap) after the scale and before the mask; 0: off.
  float softcap = 0.0f;
  /// [H], device memory; null: none. A logit of each head, neither scaled nor capped, that joins
  /// the softmax's denominator of final rows, once, after the earlier state: a final row's out and
  /// lse contain it, and a final row that sees no key has out 0 and lse = sink. -inf is no sink.
  const float* sinks = nullptr;

  /// Whether more than diagonals decides what a row computes.
  constexpr bool is_general() const {
    bool tables = false;
    for (int32_t i = 0; i < num_segments; ++i) tables |= segments[i].key_ranges != nullptr;
    return tables || softcap != 0.0f || sinks != nullptr;
  }
};

/// The backward of block attention: S_q query rows against one block of keys, whose rows they see
/// as in the forward. With P = exp(score - lse), G the gradient of out:
///
///   dv += P^T G,  dS = P * (G v^T - delta),  dk += scale * dS^T q,  dq += scale * dS k
///
/// where dS is multiplied by 1 - (score / softcap)^2 under a softcap. `lse` is that of all keys
/// that the rows see, of other blocks and sinks too. A row with lse -inf has gradient 0, and adds
/// none.
struct BlockAttentionBackwardParams : AttentionShape {
  Strided q;                   // [B, S_q, H, D], dtype
  Strided k;                   // [B, S_k, H_kv, D], dtype
  Strided v;                   // [B, S_k, H_kv, D], dtype
  Strided grad_out;            // [B, S_q, H, D], dtype
  const float* lse = nullptr;  // [B, H, S_q], stride of S_q is 1, natural log
  const float* delta =
      nullptr;  // [B, H, S_q]: rowsum(G * out) - the gradient of lse; strides of lse
  int64_t lse_batch_stride = 0;
  int64_t lse_head_stride = 0;
  Strided dq;  // [B, S_q, H, D], float32: added to
  Strided dk;  // [B, S_k, H_kv, D]: written, not added to, of keys that no row sees too
  Strided dv;  // [B, S_k, H_kv, D]: likewise
  bool rounds_key_gradients = false;  // dk and dv have dtype, not float32
  /// With more than one, each part of the heads of a group has dk and dv of its own, float32,
  /// `next_part` elements apart: their sums over the parts are the gradients.
  int32_t group_parts = 1;  // divides H / H_kv
  int64_t next_part = 0;
  int32_t num_keys = 0;     // S_k
  int32_t diagonal = 0;     // as in KeySegment
  int32_t first_query = 0;  // as in KeySegment
  /// With data, int32 [S_k, 2] in device memory, aligned to 8 bytes: key j is seen by the rows
  /// [begin, end), clamped to [0, S_q], by none where begin >= end. Neither column decreases.
  /// `diagonal` and `first_query` are 0 then. A table that decreases gives an unspecified result
  /// and reads and writes no other memory.
  const int32_t* query_ranges = nullptr;
  float softcap = 0.0f;  // as in BlockAttentionParams
  /// A persistent kernel leaves one multiprocessor to short kernels of other streams.
  bool leaves_room = false;
  /// The sums into dq are made in a fixed order: the same inputs give the same bits. (Those of dk
  /// and dv always are.)
  bool deterministic = false;
  /// Rows of dq that take turns together.
  static constexpr int32_t kTurnRows = 64;
  /// [num_semaphores()] in device memory, 0 before the launch, unspecified after it. Needed with
  /// `deterministic`. Without it one is enough: thread blocks take work when they are free.
  int32_t* semaphores = nullptr;

  int64_t num_semaphores() const {
    // A tile of 256 keys has two thread blocks, one of 128 keys at most as many as a group has
    // heads. Each adds two parts of dq.
    constexpr int64_t kTiles = 4, kTileRows = kTiles * kTurnRows;
    const int64_t rows = num_queries > num_keys ? num_queries : num_keys;
    return 1 + int64_t{batch} * num_heads * kTiles * ((rows + kTileRows - 1) / kTileRows);
  }
};

/// What comes before a backward, in one pass over the rows: delta = rowsum(grad_out * out) -
/// grad_lse, and zeros to which dq is added.
struct AttentionDeltaParams {
  Strided grad_out;                 // [B, S_q, H, D], dtype; null data: absent, which is 0
  Strided out;                      // [B, S_q, H, D], dtype; not read where grad_out is absent
  const float* grad_lse = nullptr;  // [B, H, S_q], any strides; null: absent
  int64_t grad_lse_batch_stride = 0;
  int64_t grad_lse_head_stride = 0;
  int64_t grad_lse_row_stride = 0;
  float* delta = nullptr;  // [B, H, S_q], contiguous
  float* dq = nullptr;     // [B, S_q, H, D], contiguous: becomes 0
  int32_t batch = 0;
  int32_t num_queries = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  DataType dtype = DataType::kBFloat16;
};

/// Few queries, many keys, visible to all queries of their batch row: keys are split over thread
/// blocks and the partial results merged in a fixed order. The result is a float32 state, or its
/// out rounded.
struct DecodeAttentionParams : AttentionShape {
  Strided q;                             // [B, S_q, H, D], dtype
  Strided k;                             // [B, S_k, H_kv, D], dtype
  Strided v;                             // [B, S_k, H_kv, D], dtype
  const int32_t* key_lengths = nullptr;  // [B]: batch row b sees its first key_lengths[b] keys,
                                         // clamped to [0, S_k]; null: all of them
  void* out = nullptr;                   // [B, S_q, H, D], out_dtype, contiguous
  float* lse = nullptr;                  // [B, H, S_q], contiguous
  float* workspace = nullptr;            // decode_workspace_floats() floats, contents irrelevant
  int32_t num_keys = 0;                  // S_k
  DataType out_dtype = DataType::kFloat32;

  const int32_t* key_begins = nullptr;  // [B]: batch row b does not see the keys before
                                        // key_begins[b], clamped likewise; null: from the first on
  float softcap = 0.0f;                 // as in BlockAttentionParams
  const float* sinks = nullptr;         // [H], likewise: every row of the result contains it
};

/// Folds `num_states` states, in order, into one: the merge of decode across ranks, whose states
/// are adjacent in memory, and merge_states_.
struct MergeStatesParams {
  Strided out;           // [B, S_q, H, D], out_dtype
  float* lse = nullptr;  // [B, H, S_q], may be null: not written
  int64_t lse_batch_stride = 0;
  int64_t lse_head_stride = 0;
  bool fold = false;  // out (then float32) and lse hold a state that precedes the first of `states`

  Strided states;                     // [B, S_q, H, D], float32, the first state
  const float* states_lse = nullptr;  // [B, H, S_q], of the first state
  int64_t states_lse_batch_stride = 0;
  int64_t states_lse_head_stride = 0;
  int64_t next_state = 0;      // elements from one state's out to the next one's
  int64_t next_state_lse = 0;  // and from lse to lse
  int32_t num_states = 0;

  int32_t batch = 0;
  int32_t num_queries = 0;
  int32_t num_heads = 0;
  int32_t head_dim = 0;
  DataType out_dtype = DataType::kFloat32;
  /// The states are splits that the previous kernel of the stream writes, which triggers this
  /// launch (peer_sync/dependent_launch.cuh). Without fold.
  bool follows_closely = false;

  /// For contiguous memory, the shape being set: the result, and the first state.
  constexpr void set_contiguous(void* result, float* result_lse, float* state,
                                const float* state_lse) {
    out.data = result;
    out.head_stride = head_dim;
    out.row_stride = out.head_stride * num_heads;
    out.batch_stride = out.row_stride * num_queries;
    lse = result_lse;
    lse_head_stride = states_lse_head_stride = num_queries;
    lse_batch_stride = states_lse_batch_stride = lse_head_stride * num_heads;
    states = out;
    states.data = state;
    states_lse = state_lse;
  }
};

}  // namespace ringattn
