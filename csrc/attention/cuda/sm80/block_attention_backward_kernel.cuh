// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/cuda/query_bounds.h"
#include "attention/cuda/sm80/backward_tile.cuh"
#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/launch.h"
#include "attention/cuda/sm80/query_gradients.cuh"
#include "attention/cuda/sm80/tile_products.cuh"
#include "attention/cuda/softcap.cuh"
#include "attention/params.h"

// The backward of block attention for compute capability 8.0 and later, after FlashAttention-2
// (Dao, arXiv:2307.08691): a thread block keeps kBlockK keys of a KV head, and walks over the
// queries of the group's heads in tiles of kBlockQ. dk and dv stay in registers to the end; each
// tile's share of dq is added to global memory.

namespace ringattn::cuda::sm80 {

/// The order in which thread blocks take (key tile, KV head): groups of heads whose queries fit L2
/// together; within a group key tiles in ascending order. Under a diagonal those are the longest
/// first, and no thread block waits for one of a higher index (query_gradients.cuh).
struct KeyTileOrder {
  int key_tiles;
  int heads;            // B * H_kv
  int heads_per_group;  // of KV heads

  __device__ void find(KeyTileWork& work, int num_kv_heads, int block) const {
    const int group_blocks = key_tiles * heads_per_group;
    const int group_head = block / group_blocks * heads_per_group;
    const int group_heads = min(heads_per_group, heads - group_head);
    const int in_group = block % group_blocks;
    work.key_tile = in_group / group_heads;
    work.batch = (group_head + in_group % group_heads) / num_kv_heads;
    work.kv_head = (group_head + in_group % group_heads) % num_kv_heads;
  }
};

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

  // Shared memory: k, v, q, grad_out, P, dS, ranges of the keys, statistics of the rows.
  static constexpr int kV = Tile::CopyK::kBytes, kQ = 2 * kV, kGradOut = kQ + Tile::CopyQ::kBytes,
                       kP = kGradOut + Tile::CopyQ::kBytes,
                       kScoreGradients = kP + (Tile::kSharesScores ? 0 : Tile::kScoresBytes),
                       kRanges = kScoreGradients + Tile::kScoresBytes,
                       kStats = kRanges + Tile::kBlockK * sizeof(QueryRange);
  static_assert(kStats + Tile::kBlockQ * sizeof(RowStats) == Tile::kSharedBytes);

  __device__ uint32_t address(int offset) const { return shared_address(shared) + offset; }
  __device__ QueryRange* ranges() const { return reinterpret_cast<QueryRange*>(shared + kRanges); }
  __device__ RowStats* row_stats() const { return reinterpret_cast<RowStats*>(shared + kStats); }

  __device__ __forceinline__ void find_work(const KeyTileOrder& order) const {
    const QueryBounds bounds = QueryBounds::of(p);
    if (threadIdx.x == 0) {
      order.find(work, p.num_kv_heads, blockIdx.x);
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

  __device__ __forceinline__ void load_queries(int head, int tile) const {
    const int first_row = tile * Tile::kBlockQ;
    const QueryRange rows = work.some;
    const auto load = [&](const Strided& x, int to) {
      Tile::load_queries(
          address(to),
          static_cast<const Element*>(x.data) + work.batch * x.batch_stride + head * x.head_stride,
          x.row_stride, p.head_dim, first_row, rows.begin, rows.end);
    };
    load(p.q, kQ);
    load(p.grad_out, kGradOut);
    const int thread = thread_index_again();
    const int row = first_row + thread;
    if (thread < Tile::kBlockQ && row >= rows.begin && row < rows.end) {
      const int64_t at = work.batch * p.lse_batch_stride + head * p.lse_head_stride + row;
      const uint32_t to = address(kStats) + thread * sizeof(RowStats);
      copy_float_async(to, p.lse + at);
      copy_float_async(to + sizeof(float), p.delta + at);
    }
  }

  /// When the tile's own copies have arrived: statistics of its rows, and a barrier.
  __device__ __forceinline__ void prepare_rows(int tile) const {
    const int thread = thread_index_again();
    bool is_empty = false;  // a row that sees no key
    if (thread < Tile::kBlockQ) {
      RowStats& stats = row_stats()[thread];
      const int row = tile * Tile::kBlockQ + thread;
      const bool exists = row >= work.some.begin && row < work.some.end;
      is_empty = exists && stats.minus_lse == -INFINITY;
      if (!exists || is_empty) {
        stats = {-INFINITY, 0.0f};
      } else {
        stats.minus_lse *= -kLog2E;
      }
    }
    // The tile has arrived, and no thread reads P and dS of the previous one any more.
    if (!__syncthreads_or(is_empty)) return;
    // Whatever such a row holds, it must not reach a sum: 0 * NaN is NaN.
    for (int row = 0; row < Tile::kBlockQ; ++row) {
      if (row_stats()[row].minus_lse != -INFINITY) continue;
      for (int i = thread * sizeof(int); i < Tile::kInputPitch; i += Tile::kThreads * sizeof(int)) {
        for (const int x : {kQ, kGradOut}) {
          *reinterpret_cast<int*>(shared + x + row * Tile::kInputPitch + i) = 0;
        }
      }
    }
    __syncthreads();
  }

  /// s = P = exp(scale * q @ k.T - lse), ds = P * (grad_out @ v.T - delta), without the mask.
  __device__ __forceinline__ void find_scores(typename Scores::Sums& s, typename Scores::Sums& ds,
                                              int first_row, int first_column) const {
    Scores::add(s, address(kQ), first_row, address(0), first_column);
    Scores::add(ds, address(kGradOut), first_row, address(kV), first_column);
    const RowStats* stats = row_stats() + first_row + thread_index_again() % kWarpSize / 4;
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
                                       int first_row, int first_column) const {
    const int lane = thread_index_again() % kWarpSize;
    const QueryRange* seen_by = ranges() + first_column + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < Tile::kScoreN; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int begin = seen_by[8 * n + c].begin - first_row - lane / 4;
        const int end = seen_by[8 * n + c].end - first_row - lane / 4;
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

  __device__ bool all_see(int tile) const {
    const int first_row = max(tile * Tile::kBlockQ, work.some.begin);
    const int rows_end = min((tile + 1) * Tile::kBlockQ, work.some.end);
    return work.all.begin <= first_row && rows_end <= work.all.end;
  }

  /// dv += P.T @ grad_out, dk += dS.T @ q, and dS in shared memory.
  __device__ __forceinline__ void add_key_gradients(typename KeyGradients::Sums& dk,
                                                    typename KeyGradients::Sums& dv,
                                                    int tile) const {
    typename Scores::Sums s = {}, ds = {};
    const int warp = thread_index_again() / kWarpSize;
    const int score_row = warp / Tile::kScoreWarpsK * Tile::kScoreM * 16;
    const int score_column = warp % Tile::kScoreWarpsK * Tile::kScoreN * 8;
    const bool scores = Tile::kScoreWarps == Tile::kWarps || warp < Tile::kScoreWarps;
    if (scores) {
      find_scores(s, ds, score_row, score_column);
      if (!all_see(tile)) mask(s, ds, tile * Tile::kBlockQ + score_row, score_column);
      Tile::store_scores(shared + kP, s, score_row, score_column);
      if constexpr (!Tile::kSharesScores) {
        Tile::store_scores(shared + kScoreGradients, ds, score_row, score_column);
      }
    }
    __syncthreads();
    const int key_row = Tile::key_row(warp), key_column = Tile::key_column(warp);
    KeyGradients::add(dv, address(kP), key_row, address(kGradOut), key_column);
    if constexpr (Tile::kSharesScores) {
      __syncthreads();
      if (scores) Tile::store_scores(shared + kScoreGradients, ds, score_row, score_column);
      __syncthreads();
    }
    KeyGradients::add(dk, address(kScoreGradients), key_row, address(kQ), key_column);
  }

  /// Also of keys that no row sees, which got nothing.
  __device__ __forceinline__ void store_key_gradients(const Strided& x,
                                                      const typename KeyGradients::Sums& sums,
                                                      float scale) const {
    const int warp = thread_index_again() / kWarpSize;
    const int first_key = work.key_tile * Tile::kBlockK + Tile::key_row(warp);
    const int first_column = Tile::key_column(warp);
    float* const to = static_cast<float*>(x.data) + work.batch * x.batch_stride +
                      work.kv_head * x.head_stride;
    KeyGradients::for_each(sums, [&](int row, int column, auto values) {
      const int key = first_key + row;
      if (key >= p.num_keys || first_column + column >= p.head_dim) return;
      *reinterpret_cast<decltype(values)*>(to + key * x.row_stride + first_column + column) =
          scaled(values, scale);
    });
  }
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    block_attention_backward_kernel(const __grid_constant__ BlockAttentionBackwardParams p,
                                    const KeyTileOrder order) {
  using Steps = BackwardSteps<Tile>;
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ KeyTileWork work;
  const Steps steps = {p, work, shared};
  steps.find_work(order);

  const int heads_per_kv_head = p.num_heads / p.num_kv_heads;
  const auto first_head = [&] { return work.kv_head * heads_per_kv_head; };
  const auto first_tile = [&] { return work.some.begin / Tile::kBlockQ; };
  typename Tile::KeyGradients::Sums dk = {}, dv = {};
  if (!work.some.empty()) {
    int head = first_head(), tile = first_tile();
    steps.load_keys();
    steps.load_queries(head, tile);
    commit_copies();
    while (true) {
      wait_for_copies<0>();
      steps.prepare_rows(tile);
      steps.add_key_gradients(dk, dv, tile);
      __syncthreads();  // no thread reads the queries any more
      const int this_head = head, this_tile = tile;
      if (++tile * Tile::kBlockQ >= work.some.end) {
        tile = first_tile();
        ++head;
      }
      const bool is_last = head == first_head() + heads_per_kv_head;
      if (!is_last) steps.load_queries(head, tile);
      commit_copies();
      // dq += scale * dS @ k
      add_query_gradients<Tile>(p, work, this_head, this_tile, steps.address(Steps::kScoreGradients),
                                steps.address(0));
      if (is_last) break;
    }
  }
  steps.store_key_gradients(p.dv, dv, 1.0f);
  steps.store_key_gradients(p.dk, dk, p.scale);
}

/// KV heads whose groups' queries and their gradients take half of L2 or less.
inline cudaError_t kv_heads_per_group(const BlockAttentionBackwardParams& p, int element_bytes,
                                      int& heads) {
  int device = 0, l2_bytes = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  const int64_t row_bytes = int64_t{2} * element_bytes + sizeof(float);  // of a column
  const int64_t head_bytes =
      row_bytes * p.num_queries * p.head_dim * (p.num_heads / p.num_kv_heads);
  const int64_t kv_heads = int64_t{p.batch} * p.num_kv_heads;
  const int64_t fitting = l2_bytes / 2 / (head_bytes > 0 ? head_bytes : 1);
  heads = static_cast<int>(fitting < 1 ? 1 : fitting > kv_heads ? kv_heads : fitting);
  return cudaSuccess;
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention_backward(const BlockAttentionBackwardParams& p,
                                            cudaStream_t stream) {
  using Tile = BackwardTile<BackwardTileShape<Element, kHeadDim>>;
  constexpr auto kKernel = block_attention_backward_kernel<Tile>;
  KeyTileOrder order;
  order.key_tiles = (p.num_keys + Tile::kBlockK - 1) / Tile::kBlockK;
  order.heads = p.batch * p.num_kv_heads;
  cudaError_t error = kv_heads_per_group(p, sizeof(Element), order.heads_per_group);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{order.key_tiles} * order.heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(blocks), Tile::kThreads, Tile::kSharedBytes, stream>>>(p, order);
  return cudaGetLastError();
}

}  // namespace ringattn::cuda::sm80
