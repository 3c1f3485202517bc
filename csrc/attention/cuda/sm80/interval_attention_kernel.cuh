// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "attention/cuda/key_bounds.h"
#include "attention/cuda/sm80/block_attention_kernel.cuh"
#include "attention/cuda/softcap.cuh"

// Block attention of general calls (params.h): every row sees the keys of one interval; with sinks
// and softcap. The same walk as in block_attention_kernel.cuh, over the tiles that some row of the
// thread block sees.

namespace ringattn::cuda::sm80 {

/// 16 rows a warp: registers are left for bounds and softcap, the kernels compile in half the time,
/// and less of a tile is masked at the ends of a window.
template <typename Element, int kHeadDim>
struct IntervalTileFor : BlockAttentionTile<Element, kHeadDim, 64, (kHeadDim <= 128) ? 64 : 32, 4,
                                            1, (kHeadDim <= 96) ? 3 : 2> {};
template <int kHeadDim>
struct IntervalTileFor<float, kHeadDim>
    : BlockAttentionTile<float, kHeadDim, 64, (kHeadDim <= 192) ? 32 : 16, 4, 1, 2> {};

/// The keys that a lane's rows see. A row that sees none has an empty range at key 0.
template <int kM>
struct LaneRanges {
  KeyRange of[kM][2];

  /// first_row: this lane's. Rows past last_row, which do not exist, see what that one sees.
  __device__ __forceinline__ LaneRanges(const KeySegment& keys, int first_row, int last_row) {
    const KeyBounds bounds = {keys.num_keys, keys.diagonal, keys.first_query,
                              reinterpret_cast<const KeyRange*>(keys.key_ranges)};
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        of[m][half] = bounds.range(min(first_row + 16 * m + 8 * half, last_row));
        if (of[m][half].begin >= of[m][half].end) of[m][half] = {0, 0};
      }
  }

  /// Whether the row sees some of the keys [begin, end).
  __device__ __forceinline__ bool meets(int m, int half, int begin, int end) const {
    return of[m][half].begin < end && begin < of[m][half].end;
  }

  /// Whether all rows of the warp see all of the keys [begin, end).
  __device__ __forceinline__ bool all_see(int begin, int end) const {
    bool all = true;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        all = all && of[m][half].begin <= begin && end <= of[m][half].end;
    return __all_sync(0xffffffff, all);
  }

  /// Where the last key before `limit` that some row of the warp sees ends; 0: there is none.
  __device__ __forceinline__ int end_before(int limit) const {
    int end = 0;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        if (of[m][half].begin < limit) end = max(end, min(of[m][half].end, limit));
    return __reduce_max_sync(0xffffffff, end);
  }
};

template <typename Element, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    interval_attention_kernel(const __grid_constant__ BlockAttentionParams p,
                              const __grid_constant__ KeySegment keys, const TileOrder order) {
  constexpr int kM = Tile::kM;
  constexpr int kBlockK = Tile::kBlockK;
  using Gemm = Products<Element, kM, kBlockK, Tile::kHeadDim>;
  static_assert(Tile::kStages == 1);
  extern __shared__ __align__(128) unsigned char shared[];
  __shared__ int warp_ends[Tile::kWarps];

  const TilePosition at(p, order, blockIdx.x);
  const int first_row = at.query_tile * Tile::kBlockQ;
  const int kv_head = at.head / (p.num_heads / p.num_kv_heads);
  const int warp = threadIdx.x / kWarpSize;
  const int warp_row = warp * kM * 16;
  const LaneRanges<kM> ranges(keys, first_row + warp_row + threadIdx.x % kWarpSize / 4,
                              p.num_queries - 1);

  // Keys before `limit` that some row of the thread block sees end here. All threads call both,
  // with a barrier between them.
  const auto share_end = [&](int limit) {
    const int end = ranges.end_before(limit);
    if (threadIdx.x % kWarpSize == 0) warp_ends[warp] = end;
  };
  const auto shared_end = [&] {
    int end = 0;
#pragma unroll
    for (int i = 0; i < Tile::kWarps; ++i) end = max(end, warp_ends[i]);
    return end;
  };
  const auto tile_before = [&](int end) { return (end + kBlockK - 1) / kBlockK - 1; };
  share_end(keys.num_keys);
  __syncthreads();
  const int visible_keys = shared_end();  // keys after it count as zeros, whatever they are
  const bool has_final = first_row < p.final_end && first_row + Tile::kBlockQ > p.final_begin;
  if (visible_keys == 0 && p.fold && !has_final) return;  // the state is the result

  float scale_log2 = scale_in_powers_of_two(p.scale);
  if (p.softcap != 0.0f) scale_log2 = Softcap(fabsf(p.scale), p.softcap).outer_log2;
  typename Gemm::Out out = {};
  OnlineSoftmax<kM> softmax;

  const uint32_t shared_q = shared_address(shared);
  const uint32_t shared_k = shared_q + Tile::CopyQ::kBytes;
  const uint32_t shared_v = shared_k + Tile::CopyK::kBytes;
  const typename Tile::CopyK copy_k(static_cast<const Element*>(keys.k.data) +
                                        at.batch * keys.k.batch_stride +
                                        kv_head * keys.k.head_stride,
                                    keys.k.row_stride, p.head_dim);
  const typename Tile::CopyK copy_v(static_cast<const Element*>(keys.v.data) +
                                        at.batch * keys.v.batch_stride +
                                        kv_head * keys.v.head_stride,
                                    keys.v.row_stride, p.head_dim);

  int tile = tile_before(visible_keys);
  if (tile >= 0) {
    const typename Tile::CopyQ copy_q(static_cast<const Element*>(p.q.data) +
                                          at.batch * p.q.batch_stride + at.head * p.q.head_stride,
                                      p.q.row_stride, p.head_dim);
    copy_q.load(shared_q, first_row, p.num_queries);
    copy_k.load(shared_k, tile * kBlockK, visible_keys);
    commit_copies();
    if (p.scale < 0.0f) {
      wait_for_copies<0>();
      copy_q.negate(shared);
    }
  }

  while (tile >= 0) {
    const int first_key = tile * kBlockK;
    const int keys_end = first_key + kBlockK;
    wait_for_copies<0>();
    __syncthreads();  // the keys have arrived, and no thread reads the previous values any more
    copy_v.load(shared_v, first_key, visible_keys);
    commit_copies();
    share_end(first_key);

    bool sees[kM][2];  // some key of the tile
    bool some = false;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        sees[m][half] = ranges.meets(m, half, first_key, keys_end);
        some = some || sees[m][half];
      }
    const bool warp_attends = __any_sync(0xffffffff, some);
    typename Gemm::Scores scores;
    if (warp_attends) {
      Gemm::scores(scores, shared_q + warp_row * Tile::CopyQ::kRowPitch, shared_k, p.head_dim);
    }
    wait_for_copies<0>();
    __syncthreads();  // the values have arrived, and no thread reads the keys any more
    tile = tile_before(shared_end());
    if (tile >= 0) {
      copy_k.load(shared_k, tile * kBlockK, visible_keys);
    } else if (p.fold) {
      const TilePosition to(p, order, block_index_again());
      prefetch_state<Tile::kBlockQ, Tile::kThreads>(p, to.batch, to.head,
                                                    to.query_tile * Tile::kBlockQ);
    }
    commit_copies();
    if (!warp_attends) continue;

    if (p.softcap != 0.0f) cap_scores(scores, Softcap(fabsf(p.scale), p.softcap));
    if (!ranges.all_see(first_key, keys_end)) mask_scores(scores, ranges.of, first_key);
    float decay[kM][2];
    softmax.update(scores, scale_log2, decay);
    Gemm::accumulate_where(sees, out, decay, scores, shared_v, p.head_dim);
  }

  // A warp's queries are read by itself alone: their place is free for its results.
  const TilePosition to(p, order, block_index_again());
  store_results<Element, kM, Tile::kHeadDim, Gemm>(
      p, p.sinks, to.batch, to.head, to.query_tile * Tile::kBlockQ + warp_row, out, softmax,
      scale_log2, shared + warp_row * Tile::CopyQ::kRowPitch);
}

template <typename Element, int kHeadDim>
cudaError_t launch_interval_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  using Tile = IntervalTileFor<Element, kHeadDim>;
  return launch_tile<Element, Tile, interval_attention_kernel<Element, Tile>>(p, stream);
}

}  // namespace ringattn::cuda::sm80
