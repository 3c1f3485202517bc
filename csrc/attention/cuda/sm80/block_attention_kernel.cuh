// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/epilogue.cuh"
#include "attention/cuda/sm80/launch.h"
#include "attention/cuda/sm80/products.cuh"
#include "attention/cuda/sm80/softmax.cuh"
#include "attention/params.h"

// Block attention for compute capability 8.0 and later, after FlashAttention-2 (Dao,
// arXiv:2307.08691): a thread block keeps kBlockQ queries and walks over the keys in tiles of
// kBlockK, last tile first, so that the tiles under the mask come first. Each warp owns 16 * kM
// rows from beginning to end.

namespace ringattn::cuda::sm80 {

/// Tile shapes. With two stages a tile of keys and values arrives while the one before it is
/// attended; with one, values arrive under q @ k.T and the next keys under p @ v. All fit 99 KB,
/// what the smaller chips have.
template <typename Element, int kHeadDim_, int kBlockQ_, int kBlockK_, int kWarps_, int kStages_,
          int kBlocksPerSm_>
struct BlockAttentionTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockQ = kBlockQ_;
  static constexpr int kBlockK = kBlockK_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kStages = kStages_;
  static constexpr int kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kThreads = kWarps * kWarpSize;
  static constexpr int kM = kBlockQ / kWarps / 16;
  static_assert(kBlockQ == kWarps * kM * 16);

  using CopyQ = TileCopy<Element, kBlockQ, kHeadDim, kThreads>;
  using CopyK = TileCopy<Element, kBlockK, kHeadDim, kThreads>;
  static constexpr int kStageBytes = 2 * CopyK::kBytes;
  static constexpr int kSharedBytes = CopyQ::kBytes + kStages * kStageBytes;
  static_assert(kSharedBytes <= 99 * 1024);
};

template <typename Element, int kHeadDim>
struct TileFor;
template <typename Element>
struct TileFor<Element, 64> : BlockAttentionTile<Element, 64, 128, 96, 4, 1, 2> {};
template <typename Element>
struct TileFor<Element, 96> : BlockAttentionTile<Element, 96, 128, 80, 4, 1, 2> {};
template <typename Element>
struct TileFor<Element, 128> : BlockAttentionTile<Element, 128, 128, 64, 4, 1, 2> {};
template <typename Element>
struct TileFor<Element, 192> : BlockAttentionTile<Element, 192, 64, 64, 4, 1, 2> {};
template <typename Element>
struct TileFor<Element, 256> : BlockAttentionTile<Element, 256, 64, 64, 4, 1, 2> {};
template <>
struct TileFor<float, 64> : BlockAttentionTile<float, 64, 128, 32, 4, 2, 2> {};
template <>
struct TileFor<float, 96> : BlockAttentionTile<float, 96, 64, 32, 4, 2, 2> {};
template <>
struct TileFor<float, 128> : BlockAttentionTile<float, 128, 64, 32, 4, 2, 2> {};
template <>
struct TileFor<float, 192> : BlockAttentionTile<float, 192, 64, 32, 4, 1, 2> {};
template <>
struct TileFor<float, 256> : BlockAttentionTile<float, 256, 64, 16, 4, 1, 2> {};

/// The order in which thread blocks take (query tile, head): groups of heads whose keys and values
/// fit L2 together; within a group the longest tiles first; then the heads of a KV head next to
/// each other.
struct TileOrder {
  int query_tiles;
  int heads;            // B * H
  int heads_per_group;  // a multiple of H / H_kv
};

/// blockIdx.x, hidden from the compiler: values derived from it are recomputed where they are
/// needed and keep no registers in the loop.
__device__ __forceinline__ int block_index_again() {
  int block;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(block));
  return block;
}

struct TilePosition {
  int batch;
  int head;
  int query_tile;

  __device__ __forceinline__ TilePosition(const BlockAttentionParams& p, const TileOrder& order,
                                          int block) {
    const int group_blocks = order.query_tiles * order.heads_per_group;
    const int group_head = block / group_blocks * order.heads_per_group;
    const int group_heads = min(order.heads_per_group, order.heads - group_head);
    const int in_group = block % group_blocks;
    query_tile = order.query_tiles - 1 - in_group / group_heads;
    batch = (group_head + in_group % group_heads) / p.num_heads;
    head = (group_head + in_group % group_heads) % p.num_heads;
  }
};

template <typename Element, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    block_attention_kernel(const __grid_constant__ BlockAttentionParams p,
                           const __grid_constant__ KeySegment keys, const TileOrder order) {
  constexpr int kM = Tile::kM;
  using Gemm = Products<Element, kM, Tile::kBlockK, Tile::kHeadDim>;
  extern __shared__ __align__(128) unsigned char shared[];

  const TilePosition at(p, order, blockIdx.x);
  const int first_row = at.query_tile * Tile::kBlockQ;
  const int kv_head = at.head / (p.num_heads / p.num_kv_heads);
  const int num_rows = min(Tile::kBlockQ, p.num_queries - first_row);
  // What the last row sees, which sees most; keys after it count as zeros here, whatever they are.
  const int visible_keys = min(keys.num_keys, first_row + num_rows + keys.diagonal);
  const int key_tiles = visible_keys <= 0 ? 0 : (visible_keys + Tile::kBlockK - 1) / Tile::kBlockK;

  const int warp = threadIdx.x / kWarpSize;
  const int warp_row = warp * kM * 16;
  const int lane_row = first_row + warp_row + threadIdx.x % kWarpSize / 4;
  const float scale_log2 = scale_in_powers_of_two(p.scale);

  typename Gemm::Out out = {};
  OnlineSoftmax<kM> softmax;

  const uint32_t shared_q = shared_address(shared);
  const uint32_t shared_kv = shared_q + Tile::CopyQ::kBytes;
  const typename Tile::CopyK copy_k(static_cast<const Element*>(keys.k.data) +
                                        at.batch * keys.k.batch_stride +
                                        kv_head * keys.k.head_stride,
                                    keys.k.row_stride, p.head_dim);
  const typename Tile::CopyK copy_v(static_cast<const Element*>(keys.v.data) +
                                        at.batch * keys.v.batch_stride +
                                        kv_head * keys.v.head_stride,
                                    keys.v.row_stride, p.head_dim);
  const auto stage = [&](int tile) { return shared_kv + tile % Tile::kStages * Tile::kStageBytes; };
  const auto load_k = [&](int tile) {
    copy_k.load(stage(tile), tile * Tile::kBlockK, visible_keys);
  };
  const auto load_v = [&](int tile) {
    copy_v.load(stage(tile) + Tile::CopyK::kBytes, tile * Tile::kBlockK, visible_keys);
  };

  if (key_tiles > 0) {
    const typename Tile::CopyQ copy_q(static_cast<const Element*>(p.q.data) +
                                          at.batch * p.q.batch_stride + at.head * p.q.head_stride,
                                      p.q.row_stride, p.head_dim);
    copy_q.load(shared_q, first_row, p.num_queries);
    load_k(key_tiles - 1);
    if constexpr (Tile::kStages == 2) load_v(key_tiles - 1);
    commit_copies();
    if (p.scale < 0.0f) {
      wait_for_copies<0>();
      copy_q.negate(shared);
    }
  }

  for (int tile = key_tiles - 1; tile >= 0; --tile) {
    wait_for_copies<0>();
    __syncthreads();  // this tile has arrived, and no thread reads the previous one any more
    if constexpr (Tile::kStages == 1) {
      load_v(tile);
    } else if (tile > 0) {
      load_k(tile - 1);
      load_v(tile - 1);
    }
    commit_copies();
    if (tile == 0 && p.fold) {
      const TilePosition to(p, order, block_index_again());
      prefetch_state<Tile::kBlockQ, Tile::kThreads>(p, to.batch, to.head,
                                                    to.query_tile * Tile::kBlockQ);
    }

    typename Gemm::Scores scores;
    Gemm::scores(scores, shared_q + warp_row * Tile::CopyQ::kRowPitch, stage(tile), p.head_dim);
    if constexpr (Tile::kStages == 1) {
      wait_for_copies<0>();
      __syncthreads();  // the values have arrived, and no thread reads the keys any more
      if (tile > 0) load_k(tile - 1);
      commit_copies();
    }

    const int first_key = tile * Tile::kBlockK;
    const int last_key = first_key + Tile::kBlockK - 1;
    if (last_key > first_row + warp_row + keys.diagonal || last_key >= keys.num_keys) {
      mask_scores(scores, lane_row + keys.diagonal - first_key, keys.num_keys - first_key);
    }
    float decay[kM][2];
    softmax.update(scores, scale_log2, decay);
    Gemm::accumulate(out, decay, scores, stage(tile) + Tile::CopyK::kBytes, p.head_dim);
  }

  // A warp's queries are read by itself alone: their place is free for its results.
  const TilePosition to(p, order, block_index_again());
  store_results<Element, kM, Tile::kHeadDim, Gemm>(
      p, /*sinks=*/nullptr, to.batch, to.head, to.query_tile * Tile::kBlockQ + warp_row, out,
      softmax, scale_log2, shared + warp_row * Tile::CopyQ::kRowPitch);
}

/// Heads whose keys and values take a third of L2 or less, whole groups of them.
inline cudaError_t heads_per_group(const BlockAttentionParams& p, int element_bytes, int& heads) {
  int device = 0, l2_bytes = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error = cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device);
  if (error != cudaSuccess) return error;
  const int64_t kv_head_bytes = int64_t{2} * p.segments[0].num_keys * p.head_dim * element_bytes;
  const int64_t kv_heads = int64_t{p.batch} * p.num_kv_heads;
  const int64_t fitting = l2_bytes / 3 / (kv_head_bytes > 0 ? kv_head_bytes : 1);
  heads = static_cast<int>(fitting < 1          ? 1
                           : fitting > kv_heads ? kv_heads
                                                : fitting) *
          (p.num_heads / p.num_kv_heads);
  return cudaSuccess;
}

template <typename Element, typename Tile, auto kKernel>
cudaError_t launch_tile(const BlockAttentionParams& p, cudaStream_t stream) {
  TileOrder order;
  order.query_tiles = (p.num_queries + Tile::kBlockQ - 1) / Tile::kBlockQ;
  order.heads = p.batch * p.num_heads;
  cudaError_t error = heads_per_group(p, sizeof(Element), order.heads_per_group);
  if (error != cudaSuccess) return error;
  const int64_t blocks = int64_t{order.query_tiles} * order.heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  kKernel<<<static_cast<unsigned>(blocks), Tile::kThreads, Tile::kSharedBytes, stream>>>(
      p, p.segments[0], order);
  return cudaGetLastError();
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  using Tile = TileFor<Element, kHeadDim>;
  constexpr auto kDataType = sizeof(Element) == 4 ? DataType::kFloat32 : DataType::kBFloat16;
  constexpr AttentionTile kTile = attention_tile(kDataType, kHeadDim);
  static_assert(kTile.rows == Tile::kBlockQ && kTile.keys == Tile::kBlockK);
  return launch_tile<Element, Tile, block_attention_kernel<Element, Tile>>(p, stream);
}

}  // namespace ringattn::cuda::sm80
