// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "attention/block_attention.h"
#include "attention/cuda/block_attention.h"
#include "attention/cuda/sm90/scheduler/tile_scheduler.h"
#include "attention/tensor_params.h"
#include "catch.h"
#include "reference.h"
#include "skipped_tests.h"

// Launches over a list of key segments: problems, what is launched, and what to expect of it.

namespace ringattn::testing {

constexpr double kScale = 0.11;
constexpr int64_t kBatch = 2;
inline const double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Shape {
  int64_t num_keys;
  int64_t diagonal;     // kAll: no mask
  int64_t first_query;  // rows before it see nothing
  // The keys lie behind those of the segment before: where that is remote they come with it.
  bool is_behind = false;
};
constexpr int64_t kAll = 1 << 20;

struct Heads {
  int64_t query = 8;
  int64_t kv = 4;
};

struct Segment {
  at::Tensor k, v;  // [B, S_k, H_kv, D], with NaN behind them
  int64_t diagonal;
  int64_t first_query;
  at::Tensor source = {};   // [H_kv, 2, B, at least S_k, D]: k and v are fetched from there
  at::Tensor ranges = {};   // int32 [S_q, 2]: the keys that each row sees, instead of a diagonal
  at::Tensor parts = {};    // int32 [parts, 4]: RemotePart, where rows of the source are apart
  int64_t keys_behind = 0;  // of the next segment, where they lie behind
};

/// x with rows of NaN behind those of each batch entry.
inline at::Tensor with_poison(const at::Tensor& x) {
  at::Tensor poisoned =
      at::full({x.size(0), x.size(1) + 200, x.size(2), x.size(3)}, kNaN, x.options());
  poisoned.narrow(1, 0, x.size(1)).copy_(x);
  return poisoned.narrow(1, 0, x.size(1));
}

/// A head dimension and, where its kernel has tiles of several sizes, which of them.
struct Dim {
  Dim(int64_t head_dim, int32_t tile_rows = 0) : head_dim(head_dim), tile_rows(tile_rows) {}

  int64_t head_dim;
  int32_t tile_rows;
};
inline const std::vector<Dim> kPairedDims = {{72, 128}, {72, 192}, {128, 128}, {128, 192}, 256};
inline const std::vector<Dim> kDims = {64, {72, 128}, {72, 192}, {128, 128}, {128, 192}, 256};

struct Problem {
  at::Tensor q;  // [B, S_q, H, D]
  std::vector<Segment> segments;
  int32_t tile_rows;
  double scale = kScale;
  double softcap = 0.0;
  at::Tensor sinks = {};  // [H], float32

  Problem(int64_t num_queries, const std::vector<Shape>& shapes, Dim dim, at::ScalarType dtype,
          Heads heads = {})
      : tile_rows(dim.tile_rows) {
    const int64_t head_dim = dim.head_dim;
    const auto options = at::TensorOptions(at::kCUDA).dtype(dtype);
    const auto random = [&](int64_t rows, int64_t num_heads) {
      return at::randn({kBatch, rows, num_heads, head_dim}, options);
    };
    q = random(num_queries, heads.query);
    for (const Shape& shape : shapes) {
      if (shape.is_behind) segments.back().keys_behind = shape.num_keys;
      segments.push_back({with_poison(random(shape.num_keys, heads.kv)),
                          with_poison(random(shape.num_keys, heads.kv)),
                          std::clamp(shape.diagonal, -num_queries, shape.num_keys),
                          shape.first_query});
    }
  }

  Heads heads() const { return {q.size(2), segments.front().k.size(2)}; }
  at::TensorOptions wide() const { return q.options().dtype(at::kFloat); }
};

/// What a call leaves behind, everything that it did not write being NaN.
struct Results {
  at::Tensor out;    // [B, S_q, H, D], q's dtype
  at::Tensor state;  // [B, S_q, H, D], float32
  at::Tensor lse;    // [B, H, S_q]

  explicit Results(const Problem& problem)
      : out(at::full_like(problem.q, kNaN)),
        state(at::full(problem.q.sizes(), kNaN, problem.wide())),
        lse(at::full({kBatch, problem.q.size(2), problem.q.size(1)}, kNaN, problem.wide())) {}
};

/// Rows of Launch::signals; the phase takes the first element of its row.
enum Signal {
  kStaged,
  kReadByThisRank,
  kReadByPeer,
  kPhase,
  kStagedMirrorByPeer,
  kReadMirrorByThisRank,
  kNumSignals
};

/// Parameters of a launch over a list, beside its tensors.
struct Launch {
  int64_t final_begin = 0, final_end = 0;
  bool fold = false;
  bool with_state = true;  // false: all rows are final
  at::Tensor scratch;      // int32 [kFirstArrival + num_arrivals]
  at::Tensor failed;       // int32 [1]
  at::Tensor given_up;     // int32 [1], of the host's
  at::Tensor signals;      // int32 [6, peers]: see Signal
  uint32_t delay_seed = 0;
  int32_t max_blocks = std::numeric_limits<int32_t>::max();
};

inline std::vector<KeySegment> segments_of(const Problem& problem) {
  std::vector<KeySegment> segments;
  for (const Segment& from : problem.segments) {
    KeySegment& segment = segments.emplace_back();
    segment.k = ringattn::strided(from.k);
    segment.v = ringattn::strided(from.v);
    segment.num_keys = from.k.size(1);
    segment.diagonal = from.diagonal;
    segment.first_query = from.first_query;
    if (from.source.defined()) {
      segment.source = {from.source.data_ptr(), from.source.size(3)};
      segment.keys_behind = from.keys_behind;
    }
    if (from.parts.defined()) {
      segment.source.parts = static_cast<const RemotePart*>(from.parts.const_data_ptr());
      segment.source.num_parts = static_cast<int32_t>(from.parts.size(0));
    }
    if (from.ranges.defined()) segment.key_ranges = from.ranges.data_ptr<int32_t>();
  }
  return segments;
}

/// What a call over `segments` is about.
inline BlockAttentionParams params_of(const Problem& problem,
                                      const std::vector<KeySegment>& segments) {
  BlockAttentionParams params;
  static_cast<AttentionShape&>(params) =
      ringattn::attention_shape(problem.q, problem.heads().kv, problem.scale);
  params.q = ringattn::strided(problem.q);
  params.segments = segments.data();
  params.num_segments = segments.size();
  params.tile_rows = problem.tile_rows;
  params.softcap = static_cast<float>(problem.softcap);
  if (problem.sinks.defined()) params.sinks = problem.sinks.data_ptr<float>();
  return params;
}

/// Whether two thread blocks that share keys and values take two row tiles of a head.
inline bool pairs_row_tiles(const Problem& problem) {
  const std::vector<KeySegment> segments = segments_of(problem);
  const BlockAttentionParams params = params_of(problem, segments);
  const int rows = params.tile_rows == 192 ? 192 : 128;
  const int keys = params.tile_rows == 128 ? 128 : 80;
  return cuda::sm90::pair_shape(params, rows, keys).row_tiles == 2;
}

/// Whether a call is fetch-bound.
inline bool is_fetch_bound(const Problem& problem) {
  const std::vector<KeySegment> segments = segments_of(problem);
  return cuda::sm90::is_fetch_bound(params_of(problem, segments));
}

inline cudaError_t attend_list(const Problem& problem, const Launch& launch, Results& results) {
  const auto pointer_to = [](const at::Tensor& x) {
    return reinterpret_cast<uint32_t*>(x.data_ptr());
  };
  RemoteFetch remote_fetch;
  if (launch.scratch.defined()) {
    remote_fetch.scratch.data = pointer_to(launch.scratch);
    remote_fetch.scratch.num_arrivals = launch.scratch.numel() - LaunchScratch::kFirstArrival;
  }
  if (launch.failed.defined()) remote_fetch.failed = pointer_to(launch.failed);
  if (launch.given_up.defined()) remote_fetch.given_up = pointer_to(launch.given_up);
  if (launch.signals.defined()) {
    PeerSignals& signals = remote_fetch.signals;
    for (int64_t peer = 0; peer < launch.signals.size(1); ++peer) {
      signals.staged_by_peer[peer] = pointer_to(launch.signals[kStaged][peer]);
      signals.read_by_this_rank[peer] = pointer_to(launch.signals[kReadByThisRank][peer]);
      signals.read_by_peer[peer] = pointer_to(launch.signals[kReadByPeer][peer]);
      signals.staged_mirror_by_peer[peer] = pointer_to(launch.signals[kStagedMirrorByPeer][peer]);
      signals.read_mirror_by_this_rank[peer] =
          pointer_to(launch.signals[kReadMirrorByThisRank][peer]);
    }
    signals.num_peers = launch.signals.size(1);
    signals.phase = pointer_to(launch.signals[kPhase]);
    signals.phase_working = 5;
    signals.phase_until_staged = 6;
    signals.phase_until_read = 7;
    signals.phase_until_mirrored = 8;
  }
  remote_fetch.delay_seed = launch.delay_seed;
  const std::vector<KeySegment> segments = segments_of(problem);
  BlockAttentionParams params = params_of(problem, segments);
  params.out = ringattn::strided(results.out);
  if (launch.with_state) params.state = ringattn::strided(results.state);
  params.lse = results.lse.data_ptr<float>();
  params.lse_batch_stride = results.lse.stride(0);
  params.lse_head_stride = results.lse.stride(1);
  if (launch.scratch.defined()) params.scheduling = Scheduling::kDynamic;
  if (launch.failed.defined()) params.fetch = Fetch::kRemote;
  params.remote_fetch = remote_fetch;
  params.final_begin = launch.final_begin;
  params.final_end = launch.final_end;
  params.fold = launch.fold;
  params.max_blocks = launch.max_blocks;
  return ringattn::cuda::block_attention(params, ringattn::current_stream(problem.q));
}

/// One call for each segment, folded one into the other: the state over all of them.
inline Results attend_chain(const Problem& problem) {
  Results results(problem);
  results.state.zero_();
  results.lse.fill_(-std::numeric_limits<double>::infinity());
  for (const Segment& segment : problem.segments) {
    const int64_t first = segment.first_query, rows = problem.q.size(1) - first;
    if (rows == 0) continue;
    AttentionResult part;
    part.state = results.state.narrow(1, first, rows);
    part.lse = results.lse.narrow(2, first, rows);
    part.fold = true;
    ringattn::block_attention(problem.q.narrow(1, first, rows),
                              {key_block(segment.k, segment.v, segment.diagonal + first)}, kScale,
                              part);
  }
  return results;
}

/// Results in float64, and what rounding the probabilities may cost each of them.
struct Expected {
  at::Tensor out;    // [B, S_q, H, D], 0 for a row that sees nothing
  at::Tensor lse;    // [B, H, S_q], -inf
  at::Tensor bound;  // [B, S_q, H, D]: u * sum_j p_j |v_j|, u being the half unit of a 16-bit type

  /// Largest share of the bound that an error takes, with room for float32 sums.
  ///   roundings: those of the probabilities, and one if the result is rounded too
  double share_of_bound(const at::Tensor& result, int roundings) const {
    return shares_of_bound(result, roundings).max().item<double>();
  }
  at::Tensor shares_of_bound(const at::Tensor& result, int roundings) const {
    return (result.to(at::kDouble) - out).abs() / (bound * roundings + 5e-6);
  }
};

/// Values of keys that no row sees may be NaN.
///   is_final  the sinks have joined
inline Expected expected(const Problem& problem, bool is_final = false) {
  const int64_t num_queries = problem.q.size(1);
  std::vector<at::Tensor> keys, values, hidden;
  const at::Tensor i = at::arange(num_queries, problem.q.options().dtype(at::kLong)).unsqueeze(1);
  for (const Segment& segment : problem.segments) {
    keys.push_back(segment.k.to(at::kDouble));
    values.push_back(segment.v.to(at::kDouble).nan_to_num(0.0));
    const at::Tensor j = at::arange(segment.k.size(1), i.options()).unsqueeze(0);
    if (segment.ranges.defined()) {
      const at::Tensor begin = segment.ranges.slice(1, 0, 1), end = segment.ranges.slice(1, 1, 2);
      hidden.push_back(j.lt(begin).logical_or(j.ge(end)));
    } else {
      hidden.push_back((j - i).gt(segment.diagonal).logical_or(i.lt(segment.first_query)));
    }
  }
  const int64_t heads_per_kv_head = problem.heads().query / problem.heads().kv;
  const auto heads_first = [&](const std::vector<at::Tensor>& x) {
    return at::cat(x, 1).repeat_interleave(heads_per_kv_head, 2).transpose(1, 2);
  };
  const at::Tensor k = heads_first(keys), v = heads_first(values);  // [B, H, keys, D]
  const at::Tensor q = problem.q.to(at::kDouble).transpose(1, 2);
  at::Tensor scores = at::matmul(q, k.transpose(2, 3)) * problem.scale;
  if (problem.softcap != 0.0) scores = at::tanh(scores / problem.softcap) * problem.softcap;
  scores = scores.masked_fill(at::cat(hidden, 1), -std::numeric_limits<double>::infinity());
  at::Tensor lse = at::logsumexp(scores, {3});
  if (is_final && problem.sinks.defined()) {
    lse = at::logaddexp(lse, problem.sinks.to(at::kDouble).reshape({1, -1, 1}).expand_as(lse));
  }
  const at::Tensor weights = at::exp(scores - lse.unsqueeze(3)).nan_to_num(0.0);
  const double unit = problem.q.scalar_type() == at::kHalf ? 0x1p-11 : 0x1p-8;
  return {at::matmul(weights, v).transpose(1, 2), lse,
          at::matmul(weights, v.abs()).transpose(1, 2) * unit};
}

/// Cases run where the device has kernels for lists.
inline bool can_run() {
  if (at::hasCUDA() && at::detail::getCUDAHooks().deviceCount() > 0) {
    AttentionShape shape;
    shape.head_dim = 64;
    if (ringattn::cuda::supports_segment_lists(shape)) return true;
  }
  skipped_tests.add();
  return false;
}

/// Own rows under the diagonal; a block nested inside, seen by the tail; one outside, its head half
/// seen by all; none; one key.
inline const std::vector<Shape> kZigzag = {{300, 0, 0},  {211, kAll, 141}, {130, kAll, 0},
                                           {0, kAll, 0}, {1, kAll, 141},   {256, kAll, 141}};
/// The same, with keys enough for thread blocks that share them.
inline const std::vector<Shape> kLongZigzag = {{900, 0, 0},  {811, kAll, 141}, {130, kAll, 0},
                                               {0, kAll, 0}, {1, kAll, 141},   {756, kAll, 141}};
/// For 1338 rows, in tiles of 128 as of 192 an odd number before the split: row tiles in pairs, the
/// last one of which has no other; of the pair behind the split the first one sees nothing of one
/// segment.
inline const std::vector<Shape> kOddZigzag = {
    {1338, 0, 0}, {6000, kAll, 570}, {129, -770, 0}, {130, kAll, 0}, {5000, kAll, 570}};
/// A chunk of a prompt behind 711 of the rank's earlier rows; of a block nested inside, all see the
/// earlier rows, and the tail the others; one outside; one nested of a key in each part.
inline const std::vector<Shape> kChunk = {{1011, 711, 0}, {870, kAll, 0}, {150, kAll, 141, true},
                                          {333, kAll, 0}, {1, kAll, 0},   {1, kAll, 141, true}};
/// Diagonals that begin and end inside tiles, above and below; the first segment is seen by few.
inline const std::vector<Shape> kDiagonals = {
    {400, -290, 0}, {500, 77, 0}, {129, -100, 200}, {64, -300, 0}, {300, 0, 200}};

inline at::Tensor zero_scratch(int64_t num_arrivals = 0) {
  return at::zeros({LaunchScratch::kFirstArrival + num_arrivals},
                   at::TensorOptions(at::kCUDA).dtype(at::kInt));
}

inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  return a.view(at::kByte).equal(b.view(at::kByte));
}

}  // namespace ringattn::testing
