// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attention/cuda/query_bounds.h"
#include "attention/cuda/sm80/backward_tile.cuh"
#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/group_parts.h"
#include "attention/cuda/sm80/launch.h"
#include "attention/cuda/sm80/query_gradients.cuh"
#include "attention/cuda/sm80/tile_products.cuh"
#include "attention/cuda/softcap.cuh"
#include "attention/params.h"

// The backward of block attention for compute capability 8.0 and later, after FlashAttention-2
// (Dao, arXiv:2307.08691): a thread block keeps kBlockK keys of a KV head, and walks over the
// queries of the group's heads, or a part of these, in tiles of kBlockQ. dk and dv stay in
// registers to the end; each tile's share of dq is added to global memory.

namespace ringattn::cuda::sm80 {

/// What a query row adds to its scores, in powers of two, and to the gradients of P. Rows that have
/// no share in the result get probabilities of 0.
struct RowStats {
  float minus_lse;  // -inf: no share
  float delta;
};

/// The steps of a thread block. Each derives its part from threadIdx.x anew: little is left in
/// registers beside the sums of dk and dv.
template <typename Tile>
struct BackwardSteps {
  using Element = typename Tile::Element;
  using Scores = typename Tile::Scores;
  using KeyGradients = typename Tile::KeyGradients;

  const BlockAttentionBackwardParams& p;
  KeyTileWork& work;
  unsigned char* const shared;

  // Shared memory: k, v, P, dS, ranges of the keys; and for each stage q, grad_out, and statistics
  // of the rows.
  static constexpr int kV = Tile::CopyK::kBytes, kP = 2 * kV,
                       kScoreGradients = kP + (Tile::kSharesScores ? 0 : Tile::kScoresBytes),
                       kRanges = kScoreGradients + Tile::kScoresBytes,
                       kStages = kRanges + Tile::kBlockK * sizeof(QueryRange),
                       kGradOut = Tile::CopyQ::kBytes, kStats = 2 * kGradOut;  // of a stage
  static_assert(kStages == Tile::kSharedBytes && kStages % kLineBytes == 0);
  static_assert(kStats + Tile::kBlockQ * sizeof(RowStats) == Tile::kStageBytes);

  __device__ uint32_t address(int offset) const { return shared_address(shared) + offset; }
  __device__ QueryRange* ranges() const { return reinterpret_cast<QueryRange*>(shared + kRanges); }
  __device__ RowStats* row_stats(int stage) const {
    return reinterpret_cast<RowStats*>(shared + stage + kStats);
  }

  __device__ __forceinline__ void find_work() const {
    const QueryBounds bounds = QueryBounds::of(p);
    if (threadIdx.x == 0) {
      // Key tiles in ascending order: under a diagonal, those with the most rows first. No thread
      // block waits for one of a higher index.
      const int parts = p.num_kv_heads * p.group_parts, planes = p.batch * parts;
      work.key_tile = blockIdx.x / planes;
      work.batch = blockIdx.x % planes / parts;
      work.kv_head = blockIdx.x % parts / p.group_parts;
      work.part = blockIdx.x % p.group_parts;
      work.num_heads = p.num_heads / parts;
      work.first_head = blockIdx.x % parts * work.num_heads;
      work.some = {p.num_queries, 0};
      work.all = {0, p.num_queries};
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Tile::kBlockK; i += Tile::kThreads) {
      const QueryRange rows = ranges()[i] = bounds.range(work.key_tile * Tile::kBlockK + i);
      atomicMax(&work.all.begin, rows.begin);
      atomicMin(&work.all.end, rows.empty() ? 0 : rows.end);
      if (rows.empty()) continue;
      atomicMin(&work.some.begin, rows.begin);
      atomicMax(&work.some.end, rows.end);
    }
    __syncthreads();
    if (work.some.empty()) return;
    if (p.deterministic) find_turn(work, bounds, Tile::kBlockK);
  }

  __device__ __forceinline__ void load_keys() const {
    // A key that no row sees may be anything.
    const auto is_seen = [&](int key) { return !ranges()[key].empty(); };
    const auto load = [&](const Strided& x, int to) {
      const typename Tile::CopyK copy(static_cast<const Element*>(x.data) +
                                          work.batch * x.batch_stride +
                                          work.kv_head * x.head_stride,
                                      x.row_stride, p.head_dim);
      copy.load_where(address(to), work.key_tile * Tile::kBlockK, is_seen);
    };
    load(p.k, 0);
    load(p.v, kV);
  }

  __device__ int num_steps() const {
    const int end = (work.some.end + Tile::kBlockQ - 1) / Tile::kBlockQ;
    return (end - work.some.begin / Tile::kBlockQ) * work.num_heads;
  }

  __device__ __forceinline__ void load_queries(int stage, int step) const {
    const QueryRange rows = work.some;
    // Downwards: under a diagonal all thread blocks begin at the same rows, which stay in L2.
    const int last_tile = (rows.end - 1) / Tile::kBlockQ * Tile::kBlockQ;
    KeyTileWork::Step at = {work.first_head, last_tile};
    if (step > 0) {
      at = work.steps[(step - 1) % 2];
      at = at.first_row > rows.begin ? KeyTileWork::Step{at.head, at.first_row - Tile::kBlockQ}
                                     : KeyTileWork::Step{at.head + 1, last_tile};
    }
    const int thread = thread_index_again();
    if (thread == 0) work.steps[step % 2] = at;
    const auto load = [&](const Strided& x, int to) {
      Tile::load_queries(address(to),
                         static_cast<const Element*>(x.data) + work.batch * x.batch_stride +
                             at.head * x.head_stride,
                         x.row_stride, p.head_dim, at.first_row, rows.begin, rows.end);
    };
    load(p.q, stage);
    load(p.grad_out, stage + kGradOut);
    if (thread >= Tile::kBlockQ) return;
    const int row = at.first_row + thread;
    if (row >= rows.begin && row < rows.end) {
      const int64_t from = work.batch * p.lse_batch_stride + at.head * p.lse_head_stride + row;
      const uint32_t to = address(stage + kStats) + thread * sizeof(RowStats);
      copy_float_async(to, p.lse + from);
      copy_float_async(to + sizeof(float), p.delta + from);
    } else {
      row_stats(stage)[thread] = {INFINITY, 0.0f};
    }
  }

  /// When the tile's own copies have arrived: lse becomes minus_lse of its rows. And a barrier.
  __device__ __forceinline__ void prepare_rows(int stage) const {
    const int thread = thread_index_again();
    bool is_empty = false;  // a row that sees no key
    if (thread < Tile::kBlockQ) {
      RowStats& stats = row_stats(stage)[thread];
      is_empty = stats.minus_lse == -INFINITY;
      stats.minus_lse *= is_empty ? kLog2E : -kLog2E;
      if (is_empty) stats.delta = 0.0f;
    }
    // The tile has arrived, and no thread reads P and dS of the previous one any more.
    if (!__syncthreads_or(is_empty)) return;
    // Whatever such a row holds, it must not reach a sum: 0 * NaN is NaN.
    for (int row = 0; row < Tile::kBlockQ; ++row) {
      if (row_stats(stage)[row].minus_lse != -INFINITY) continue;
      for (int i = thread * sizeof(int); i < Tile::kInputPitch; i += Tile::kThreads * sizeof(int)) {
        for (const int x : {0, kGradOut}) {
          *reinterpret_cast<int*>(shared + stage + x + row * Tile::kInputPitch + i) = 0;
        }
      }
    }
    __syncthreads();
  }

  /// s = P = exp(scale * q @ k.T - lse), ds = P * (grad_out @ v.T - delta), without the mask.
  __device__ __forceinline__ void find_scores(typename Scores::Sums& s, typename Scores::Sums& ds,
                                              int stage) const {
    Scores::add_both(s, ds, address(stage), Tile::score_row(), kGradOut, address(0),
                     Tile::score_column(), kV);
    const int lane_row = thread_index_again() % kWarpSize / 4;
    const RowStats* stats = row_stats(stage) + Tile::score_row() + lane_row;
    const auto for_each = [&](const auto& use) {
#pragma unroll
      for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const RowStats row = stats[16 * m + 8 * half];
#pragma unroll
          for (int n = 0; n < Tile::kScoreN; ++n)
#pragma unroll
            for (int c = 2 * half; c < 2 * half + 2; ++c) use(s[m][n][c], ds[m][n][c], row);
        }
    };
    if (p.softcap == 0.0f) {
      const float scale_log2 = p.scale * kLog2E;
      for_each([&](float& score, float& gradient, const RowStats& row) {
        score = exp2_approx(fmaf(score, scale_log2, row.minus_lse));
        gradient = score * (gradient - row.delta);
      });
    } else {
      Softcap softcap(fabsf(p.scale), p.softcap);
      softcap.inner = copysignf(softcap.inner, p.scale);
      for_each([&](float& score, float& gradient, const RowStats& row) {
        const float capped = softcap(score);
        score = exp2_approx(fmaf(capped, softcap.outer_log2, row.minus_lse));
        gradient = score * (gradient - row.delta) * fmaf(-capped, capped, 1.0f);
      });
    }
  }

  /// 0 where a row does not see a key. Replaced, not multiplied: a NaN behind the mask stays there.
  __device__ __forceinline__ void mask(typename Scores::Sums& s, typename Scores::Sums& ds,
                                       int first_row) const {
    const int lane = thread_index_again() % kWarpSize;
    const int lane_row = first_row + Tile::score_row() + lane / 4;
    const uint32_t seen_by =
        address(kRanges) + (Tile::score_column() + lane % 4 * 2) * sizeof(QueryRange);
#pragma unroll
    for (int n = 0; n < Tile::kScoreN; ++n) {
      const auto [first, second] = load_ranges(seen_by + 8 * n * sizeof(QueryRange));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int begin = (c == 0 ? first : second).begin - lane_row;
        const int end = (c == 0 ? first : second).end - lane_row;
#pragma unroll
        for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int row = 16 * m + 8 * half;
            if (row >= begin && row < end) continue;
            s[m][n][2 * half + c] = ds[m][n][2 * half + c] = 0.0f;
          }
      }
    }
  }

  struct RangesOfTwo {
    QueryRange first, second;
  };
  /// Note: volatile, or the compiler loads all of them first, which takes too many registers.
  __device__ static __forceinline__ RangesOfTwo load_ranges(uint32_t address) {
    RangesOfTwo two;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(two.first.begin), "=r"(two.first.end), "=r"(two.second.begin),
                   "=r"(two.second.end)
                 : "r"(address));
    return two;
  }

  __device__ bool all_see(int first_row) const {
    return work.all.begin <= max(first_row, work.some.begin) &&
           min(first_row + Tile::kBlockQ, work.some.end) <= work.all.end;
  }

  /// dv += P.T @ grad_out, dk += dS.T @ q, and dS in shared memory.
  __device__ __forceinline__ void add_key_gradients(typename KeyGradients::Sums& dk,
                                                    typename KeyGradients::Sums& dv, int stage,
                                                    int step) const {
    typename Scores::Sums s = {}, ds = {};
    if (Tile::has_scores()) {
      find_scores(s, ds, stage);
      const int first_row = work.steps[step % 2].first_row;
      if (!all_see(first_row)) mask(s, ds, first_row);
      Tile::store_scores(shared + kP, s);
      if constexpr (!Tile::kSharesScores) Tile::store_scores(shared + kScoreGradients, ds);
    }
    __syncthreads();
    if constexpr (Tile::kSharesScores) {
      KeyGradients::add(dv, address(kP), Tile::key_row(), address(stage + kGradOut),
                        Tile::key_column());
      __syncthreads();
      if (Tile::has_scores()) Tile::store_scores(shared + kScoreGradients, ds);
      __syncthreads();
      KeyGradients::add(dk, address(kScoreGradients), Tile::key_row(), address(stage),
                        Tile::key_column());
    } else {
      KeyGradients::add_both(dv, dk, address(kP), Tile::key_row(), kScoreGradients - kP,
                             address(stage + kGradOut), Tile::key_column(), -kGradOut);
    }
  }

  /// Also of keys that no row sees, which got nothing.
  __device__ __forceinline__ void store_key_gradients(const Strided& x,
                                                      const typename KeyGradients::Sums& sums,
                                                      float scale) const {
    const int first_key = work.key_tile * Tile::kBlockK + Tile::key_row();
    const int first_column = Tile::key_column();
    const int64_t first = work.part * p.next_part + work.batch * x.batch_stride +
                          work.kv_head * x.head_stride + first_column;
    const auto store = [&](auto* to, const auto& convert) {
      KeyGradients::for_each(sums, [&](int row, int column, auto values) {
        const int key = first_key + row;
        if (key >= p.num_keys || first_column + column >= p.head_dim) return;
        const auto converted = convert(scaled(values, scale));
        *reinterpret_cast<std::remove_const_t<decltype(converted)>*>(
            to + first + key * x.row_stride + column) = converted;
      });
    };
    using Element = typename Tile::Element;
    if constexpr (!std::is_same_v<Element, float>) {
      if (p.rounds_key_gradients) {
        return store(static_cast<Element*>(x.data),
                     [](const float2& pair) { return pack<Element>(pair.x, pair.y); });
      }
    }
    store(static_cast<float*>(x.data), [](const auto& values) { return values; });
  }
};

/// num_stages: 1 or 2, of queries: with two, a tile arrives while the one before it is computed.
template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    block_attention_backward_kernel(const __grid_constant__ BlockAttentionBackwardParams p,
                                    const int num_stages) {
  using Steps = BackwardSteps<Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ KeyTileWork work;
  const Steps steps = {p, work, shared};
  steps.find_work();

  const auto stage = [&](int step) {
    return Steps::kStages + (num_stages == 2 ? step % 2 : 0) * Tile::kStageBytes;
  };
  const auto load_queries = [&](int step) {
    if (step < steps.num_steps()) steps.load_queries(stage(step), step);
    commit_copies();
  };
  typename Tile::KeyGradients::Sums dk = {}, dv = {};
  if (!work.some.empty()) {
    steps.load_keys();
    load_queries(0);
    for (int step = 0; step < steps.num_steps(); ++step) {
      wait_for_copies<0>();
      steps.prepare_rows(stage(step));
      if (p.deterministic && step > 0) end_turn<Tile>(p, work, step - 1);
      if (num_stages == 2) load_queries(step + 1);
      steps.add_key_gradients(dk, dv, stage(step), step);
      if (num_stages == 1) {
        __syncthreads();  // no thread reads the queries any more
        load_queries(step + 1);
      }
      // dq += scale * dS @ k
      add_query_gradients<Tile>(p, work, step, steps.address(Steps::kScoreGradients),
                                steps.address(0));
    }
    if (p.deterministic) {
      __syncthreads();
      end_turn<Tile>(p, work, steps.num_steps() - 1);
    }
  }
  steps.store_key_gradients(p.dv, dv, 1.0f);
  steps.store_key_gradients(p.dk, dk, p.scale);
}

/// Bytes of dynamic shared memory that a thread block may have.
struct SharedMemory {
  int most;          // of the only thread block of a multiprocessor
  int of_processor;  // of all its thread blocks together
  int reserved;      // of these, for each one's other needs

  cudaError_t find() {
    int device = 0;
    cudaError_t error = cudaGetDevice(&device);
    const auto get = [&](int& value, cudaDeviceAttr attribute) {
      if (error == cudaSuccess) error = cudaDeviceGetAttribute(&value, attribute, device);
    };
    get(most, cudaDevAttrMaxSharedMemoryPerBlockOptin);
    get(of_processor, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
    get(reserved, cudaDevAttrReservedSharedMemoryPerBlock);
    reserved += kLineBytes;  // static shared memory
    return error;
  }
  bool fits(int bytes, int blocks) const {
    return bytes + kLineBytes <= most && (bytes + reserved) * blocks <= of_processor;
  }
};

template <typename Shape>
cudaError_t launch_backward_tile(const BlockAttentionBackwardParams& p, const SharedMemory& memory,
                                 cudaStream_t stream) {
  using Tile = BackwardTile<Shape>;
  static_assert(sizeof(KeyTileWork) <= kLineBytes);
  static_assert(Tile::kBlockK * Tile::kBlocksPerSm ==
                keys_of_multiprocessor(sizeof(typename Tile::Element) == 4, Tile::kHeadDim));
  constexpr auto kKernel = block_attention_backward_kernel<Tile>;
  const int64_t key_tiles = (int64_t{p.num_keys} + Tile::kBlockK - 1) / Tile::kBlockK;
  const int64_t blocks = key_tiles * p.batch * p.num_kv_heads * p.group_parts;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int num_stages = memory.fits(Tile::shared_bytes(2), Tile::kBlocksPerSm) ? 2 : 1;
  const int bytes = Tile::shared_bytes(num_stages);
  const cudaError_t error =
      cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(blocks), Tile::kThreads, bytes, stream>>>(p, num_stages);
  return cudaGetLastError();
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention_backward(const BlockAttentionBackwardParams& p,
                                            cudaStream_t stream) {
  SharedMemory memory;
  const cudaError_t error = memory.find();
  if (error != cudaSuccess) return error;
  using Small = BackwardTileShape<Element, kHeadDim>;
  using Large = LargeBackwardTileShape<Element, kHeadDim>;
  if constexpr (!std::is_base_of_v<Small, Large>) {
    if (memory.fits(BackwardTile<Large>::shared_bytes(1), Large::kBlocksPerSm)) {
      return launch_backward_tile<Large>(p, memory, stream);
    }
  }
  return launch_backward_tile<Small>(p, memory, stream);
}

}  // namespace ringattn::cuda::sm80
