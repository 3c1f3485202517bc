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

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    block_attention_backward_kernel(const __grid_constant__ BlockAttentionBackwardParams p,
                                    const KeyTileOrder order) {
  using Element = typename Tile::Element;
  using Scores = typename Tile::Scores;
  using KeyGradients = typename Tile::KeyGradients;
  extern __shared__ __align__(128) unsigned char shared[];
  const uint32_t shared_k = shared_address(shared);
  const uint32_t shared_v = shared_k + Tile::CopyK::kBytes;
  const uint32_t shared_q = shared_v + Tile::CopyK::kBytes;
  const uint32_t shared_grad_out = shared_q + Tile::CopyQ::kBytes;
  constexpr int kInputBytes = 2 * Tile::CopyK::kBytes + 2 * Tile::CopyQ::kBytes;
  unsigned char* const probabilities = shared + kInputBytes;
  unsigned char* const score_gradients =
      probabilities + (Tile::kSharesScores ? 0 : Tile::kScoresBytes);
  auto* const ranges = reinterpret_cast<QueryRange*>(score_gradients + Tile::kScoresBytes);
  auto* const row_stats = reinterpret_cast<RowStats*>(ranges + Tile::kBlockK);

  __shared__ KeyTileWork work;
  {
    const QueryBounds bounds = QueryBounds::of(p);
    if (threadIdx.x == 0) {
      order.find(work, p.num_kv_heads, blockIdx.x);
      const int first_key = work.key_tile * Tile::kBlockK;
      work.rows = bounds.visible(first_key, first_key + Tile::kBlockK);
      if (p.deterministic) find_turn(work, bounds, Tile::kBlockK);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < Tile::kBlockK; i += Tile::kThreads) {
      ranges[i] = bounds.range(work.key_tile * Tile::kBlockK + i);
    }
    __syncthreads();
  }
  const int heads_per_kv_head = p.num_heads / p.num_kv_heads;
  const int first_head = work.kv_head * heads_per_kv_head;
  const int first_tile = work.rows.some.begin / Tile::kBlockQ;
  const int tiles_end = (work.rows.some.end + Tile::kBlockQ - 1) / Tile::kBlockQ;

  const int thread = threadIdx.x, warp = thread / kWarpSize;
  const int g = thread % kWarpSize / 4, t = thread % 4;
  const int score_row = warp / Tile::kScoreWarpsK * Tile::kScoreM * 16;
  const int score_column = warp % Tile::kScoreWarpsK * Tile::kScoreN * 8;
  const int key_row = warp / Tile::kKeyWarpsD * Tile::kKeyM * 16;
  const int key_column = warp % Tile::kKeyWarpsD * Tile::kKeyN * 8;

  typename KeyGradients::Sums dk = {}, dv = {};
  const auto load_queries = [&](const Strided& x, uint32_t to, int head, int tile) {
    const typename Tile::CopyQ copy(
        static_cast<const Element*>(x.data) + work.batch * x.batch_stride + head * x.head_stride,
        x.row_stride, p.head_dim);
    const int first_row = tile * Tile::kBlockQ;
    copy.load_where(to, first_row, [&](int row) {
      return first_row + row >= work.rows.some.begin && first_row + row < work.rows.some.end;
    });
  };
  const auto load_stats = [&](int head, int tile) {
    RowStats stats = {-INFINITY, 0.0f};
    const int row = tile * Tile::kBlockQ + thread;
    if (thread < Tile::kBlockQ && row >= work.rows.some.begin && row < work.rows.some.end) {
      const int64_t offset = work.batch * p.lse_batch_stride + head * p.lse_head_stride + row;
      stats.minus_lse = -p.lse[offset];
      stats.delta = p.delta[offset];
    }
    return stats;
  };

  RowStats stats;
  if (work.rows.some.begin < work.rows.some.end) {
    // A key that no row sees may be anything.
    const auto is_seen = [&](int key) { return !ranges[key].empty(); };
    const auto load_keys = [&](const Strided& x, uint32_t to) {
      const typename Tile::CopyK copy(static_cast<const Element*>(x.data) +
                                          work.batch * x.batch_stride + work.kv_head * x.head_stride,
                                      x.row_stride, p.head_dim);
      copy.load_where(to, work.key_tile * Tile::kBlockK, is_seen);
    };
    load_keys(p.k, shared_k);
    load_keys(p.v, shared_v);
    load_queries(p.q, shared_q, first_head, first_tile);
    load_queries(p.grad_out, shared_grad_out, first_head, first_tile);
    commit_copies();
    stats = load_stats(first_head, first_tile);
  }
  const float scale_log2 = p.scale * kLog2E;

  for (int head = first_head; head < first_head + heads_per_kv_head; ++head) {
    for (int tile = first_tile; tile < tiles_end; ++tile) {
      const int first_row = tile * Tile::kBlockQ;
      if (thread < Tile::kBlockQ) {
        // The lse of a row that sees no key is -inf; -inf - -inf would be NaN.
        const bool none = fabsf(stats.minus_lse) == INFINITY;
        row_stats[thread] = {none ? -INFINITY : stats.minus_lse * kLog2E,
                             none ? 0.0f : stats.delta};
      }
      wait_for_copies<0>();
      // The tile has arrived, and no thread reads P and dS of the previous one any more.
      const bool has_empty_rows = __syncthreads_or(
          thread < Tile::kBlockQ && first_row + thread >= work.rows.some.begin &&
          first_row + thread < work.rows.some.end && stats.minus_lse == INFINITY);
      if (has_empty_rows) {
        // Whatever such a row holds, it must not reach a sum: 0 * NaN is NaN.
        for (int row = 0; row < Tile::kBlockQ; ++row) {
          if (row_stats[row].minus_lse != -INFINITY) continue;
          for (int i = thread * 4; i < Tile::CopyQ::kRowPitch; i += Tile::kThreads * 4) {
            *reinterpret_cast<uint32_t*>(shared + 2 * Tile::CopyK::kBytes +
                                         row * Tile::CopyQ::kRowPitch + i) = 0;
            *reinterpret_cast<uint32_t*>(shared + 2 * Tile::CopyK::kBytes + Tile::CopyQ::kBytes +
                                         row * Tile::CopyQ::kRowPitch + i) = 0;
          }
        }
        __syncthreads();
      }

      typename Scores::Sums s = {}, ds = {};
      if (warp < Tile::kScoreWarps) {
        // P = exp(scale * q @ k.T - lse), dS = P * (grad_out @ v.T - delta)
        Scores::add(s, shared_q, score_row, shared_k, score_column);
        Scores::add(ds, shared_grad_out, score_row, shared_v, score_column);
        const RowStats* own_stats = row_stats + score_row + g;
        if (p.softcap == 0.0f) {
#pragma unroll
          for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const RowStats row = own_stats[16 * m + 8 * half];
#pragma unroll
              for (int n = 0; n < Tile::kScoreN; ++n)
#pragma unroll
                for (int c = 2 * half; c < 2 * half + 2; ++c) {
                  s[m][n][c] = exp2_approx(fmaf(s[m][n][c], scale_log2, row.minus_lse));
                  ds[m][n][c] = s[m][n][c] * (ds[m][n][c] - row.delta);
                }
            }
        } else {
          Softcap softcap(fabsf(p.scale), p.softcap);
          softcap.inner = copysignf(softcap.inner, p.scale);
#pragma unroll
          for (int m = 0; m < Tile::kScoreM; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              const RowStats row = own_stats[16 * m + 8 * half];
#pragma unroll
              for (int n = 0; n < Tile::kScoreN; ++n)
#pragma unroll
                for (int c = 2 * half; c < 2 * half + 2; ++c) {
                  const float capped = softcap(s[m][n][c]);
                  s[m][n][c] = exp2_approx(fmaf(capped, softcap.outer_log2, row.minus_lse));
                  ds[m][n][c] =
                      s[m][n][c] * (ds[m][n][c] - row.delta) * fmaf(-capped, capped, 1.0f);
                }
            }
        }
        const bool all_see = work.rows.all.begin <= max(first_row, work.rows.some.begin) &&
                             min(first_row + Tile::kBlockQ, work.rows.some.end) <= work.rows.all.end;
        if (!all_see) {
          // Replaced, not multiplied: a NaN behind the mask stays there.
#pragma unroll
          for (int n = 0; n < Tile::kScoreN; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
              const QueryRange seen_by = ranges[score_column + 8 * n + 2 * t + c];
              const int begin = seen_by.begin - first_row - score_row - g;
              const int end = seen_by.end - first_row - score_row - g;
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
        Tile::store_scores(probabilities, s, score_row, score_column);
        if constexpr (!Tile::kSharesScores) {
          Tile::store_scores(score_gradients, ds, score_row, score_column);
        }
      }
      __syncthreads();

      // dv += P.T @ grad_out, dk += dS.T @ q
      KeyGradients::add(dv, shared_address(probabilities), key_row, shared_grad_out, key_column);
      if constexpr (Tile::kSharesScores) {
        __syncthreads();
        if (warp < Tile::kScoreWarps) {
          Tile::store_scores(score_gradients, ds, score_row, score_column);
        }
        __syncthreads();
      }
      KeyGradients::add(dk, shared_address(score_gradients), key_row, shared_q, key_column);

      __syncthreads();  // no thread reads the queries any more
      const bool last_of_head = tile + 1 == tiles_end;
      const int next_head = head + last_of_head;
      const int next_tile = last_of_head ? first_tile : tile + 1;
      if (next_head < first_head + heads_per_kv_head) {
        load_queries(p.q, shared_q, next_head, next_tile);
        load_queries(p.grad_out, shared_grad_out, next_head, next_tile);
        stats = load_stats(next_head, next_tile);
      }
      commit_copies();

      // dq += scale * dS @ k
      add_query_gradients<Tile>(p, work, head, tile, shared_address(score_gradients), shared_k);
    }
  }

  // Keys that no row sees got nothing.
  const auto store = [&](const Strided& x, const typename KeyGradients::Sums& sums, float scale) {
    float* const to = static_cast<float*>(x.data) + work.batch * x.batch_stride +
                      work.kv_head * x.head_stride;
    KeyGradients::for_each(sums, [&](int row, int column, auto values) {
      const int key = work.key_tile * Tile::kBlockK + key_row + row;
      if (key < p.num_keys && key_column + column < p.head_dim) {
        *reinterpret_cast<decltype(values)*>(to + key * x.row_stride + key_column + column) =
            scaled(values, scale);
      }
    });
  };
  store(p.dv, dv, 1.0f);
  store(p.dk, dk, p.scale);
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
