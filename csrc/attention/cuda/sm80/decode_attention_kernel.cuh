// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/launch.h"
#include "attention/cuda/sm80/products.cuh"
#include "attention/cuda/sm80/softmax.cuh"
#include "attention/cuda/softcap.cuh"
#include "attention/params.h"
#include "peer_sync/dependent_launch.cuh"

// Decode attention: the tokens and heads that share a key head are packed into the 16 rows of one
// product, so keys and values are read once for all of them. A thread block takes one split of the
// keys; its warps take chunks of 16 keys in rotation, each with a ring of stages of its own, and
// synchronise only to merge at the end. The splits divide the keys that are visible, which the
// kernel reads from key_begins and key_lengths: a captured launch goes on dividing them evenly as
// they grow.

namespace ringattn::cuda::sm80 {

template <typename Element, int kHeadDim_>
struct DecodeTile {
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kRowPitch = kPitch<Element, kHeadDim>;
  static constexpr int kRows = 16;
  static constexpr int kKeys = 16;
  static constexpr int kWarps = kRowPitch <= 256 ? 4 : kRowPitch <= 512 ? 2 : 1;
  static constexpr int kStages = kRowPitch <= 128 ? 4 : 2;
  static constexpr int kThreads = kWarps * kWarpSize;

  using Copy = TileCopy<Element, kKeys, kHeadDim, kWarpSize>;
  using Gemm = Products<Element, 1, kKeys, kHeadDim>;
  static constexpr int kQueryBytes = kRows * kRowPitch;
  static constexpr int kStageBytes = 2 * Copy::kBytes;
  static constexpr int kWarpBytes = kStages * kStageBytes;
  static constexpr int kLseBytes = kWarps * kRows * sizeof(float);
  static constexpr int kSharedBytes = kQueryBytes + kWarps * kWarpBytes + kLseBytes;
  static_assert(kSharedBytes <= 99 * 1024);
  static_assert(kRows * kHeadDim * sizeof(float) <=
                kWarpBytes);  // a warp's results take the place of its stages
};

template <typename Element, typename Tile>
__global__ void __launch_bounds__(Tile::kThreads)
    decode_attention_kernel(const __grid_constant__ DecodeAttentionParams p) {
  using Gemm = typename Tile::Gemm;
  constexpr int kChunksPerRow = Tile::kHeadDim * static_cast<int>(sizeof(Element)) / kChunkBytes;
  constexpr int kElementsPerChunk = kChunkBytes / sizeof(Element);
  extern __shared__ __align__(128) unsigned char shared[];

  trigger_next_kernel();  // it waits for this one's end before it reads
  const int split = blockIdx.y;
  const int group = p.num_heads / p.num_kv_heads;
  const int row_tiles = (group * p.num_queries + Tile::kRows - 1) / Tile::kRows;
  const int kv_head = blockIdx.x / row_tiles % p.num_kv_heads;
  const int64_t batch = blockIdx.x / row_tiles / p.num_kv_heads;
  const int first_row = blockIdx.x % row_tiles * Tile::kRows;
  const int num_rows = min(Tile::kRows, group * p.num_queries - first_row);
  // Keys before `begin`, and at `end` and later, are never read: they may be uninitialised memory.
  const int visible_end =
      p.key_lengths == nullptr ? p.num_keys : max(0, min(p.key_lengths[batch], p.num_keys));
  const int visible_begin =
      p.key_begins == nullptr ? 0 : max(0, min(p.key_begins[batch], visible_end));
  const int visible = visible_end - visible_begin;
  constexpr int kRound = Tile::kWarps * Tile::kKeys;  // whole rounds of the warps
  const int keys_per_split = ((visible - 1) / static_cast<int>(gridDim.y) / kRound + 1) * kRound;
  // The last splits may stay empty.
  const int begin = visible_begin + min(split * keys_per_split, visible);
  const int end = min(begin + keys_per_split, visible_end);

  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const Softcap softcap(fabsf(p.scale), p.softcap);
  const float scale_log2 = p.softcap != 0.0f ? softcap.outer_log2 : scale_in_powers_of_two(p.scale);

  unsigned char* warp_shared = shared + Tile::kQueryBytes + warp * Tile::kWarpBytes;
  float* all_lse =
      reinterpret_cast<float*>(shared + Tile::kQueryBytes + Tile::kWarps * Tile::kWarpBytes);
  const uint32_t stages = shared_address(warp_shared);
  const typename Tile::Copy copy_k(
      static_cast<const Element*>(p.k.data) + batch * p.k.batch_stride + kv_head * p.k.head_stride,
      p.k.row_stride, p.head_dim);
  const typename Tile::Copy copy_v(
      static_cast<const Element*>(p.v.data) + batch * p.v.batch_stride + kv_head * p.v.head_stride,
      p.v.row_stride, p.head_dim);
  const int first_key = begin + warp * Tile::kKeys;
  constexpr int kStride = Tile::kWarps * Tile::kKeys;
  const auto load = [&](int key, int stage) {
    if (key < end) {
      const uint32_t to = stages + stage * Tile::kStageBytes;
      copy_k.load(to, key, end);
      copy_v.load(to + Tile::Copy::kBytes, key, end);
    }
    commit_copies();
  };
#pragma unroll
  for (int stage = 0; stage < Tile::kStages - 1; ++stage) load(first_key + stage * kStride, stage);

  // Row r of the queries is token r / group, head r % group of the key head's; negative scales go
  // into their sign.
  for (int i = threadIdx.x; i < Tile::kRows * kChunksPerRow; i += Tile::kThreads) {
    const int row = i / kChunksPerRow, chunk = i % kChunksPerRow;
    uint4 x = make_uint4(0, 0, 0, 0);
    if (row < num_rows && chunk * kElementsPerChunk < p.head_dim) {
      const int64_t token = (first_row + row) / group,
                    head = kv_head * group + (first_row + row) % group;
      x = *reinterpret_cast<const uint4*>(static_cast<const Element*>(p.q.data) +
                                          batch * p.q.batch_stride + token * p.q.row_stride +
                                          head * p.q.head_stride + chunk * kElementsPerChunk);
    }
    const uint32_t signs = p.scale >= 0.0f ? 0u : sizeof(Element) == 2 ? 0x80008000u : 0x80000000u;
    *reinterpret_cast<uint4*>(shared + Tile::Copy::offset(row, chunk)) =
        make_uint4(x.x ^ signs, x.y ^ signs, x.z ^ signs, x.w ^ signs);
  }
  __syncthreads();

  typename Gemm::Out out = {};
  OnlineSoftmax<1> softmax;
  int stage = 0;
  for (int key = first_key; key < end; key += kStride) {
    wait_for_copies<Tile::kStages - 2>();
    __syncwarp();  // this chunk has arrived, and no lane reads the previous one any more
    load(key + (Tile::kStages - 1) * kStride, (stage + Tile::kStages - 1) % Tile::kStages);
    const uint32_t k = stages + stage * Tile::kStageBytes;
    typename Gemm::Scores scores;
    Gemm::scores(scores, shared_address(shared), k, p.head_dim);
    if (p.softcap != 0.0f) cap_scores(scores, softcap);
    if (key + Tile::kKeys > end) mask_scores(scores, Tile::kKeys, end - key);
    float decay[1][2];
    softmax.update(scores, scale_log2, decay);
    Gemm::accumulate(out, decay, scores, k + Tile::Copy::kBytes, p.head_dim);
    stage = (stage + 1) % Tile::kStages;
  }
  wait_for_copies<0>();
  __syncwarp();

  // Each warp's state: out [16, kHeadDim] where its stages were, lse beside it.
  float* results = reinterpret_cast<float*>(warp_shared);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = lane / 4 + 8 * half;
    const float sum = softmax.row_sum(0, half);
    const bool empty = sum == 0.0f;  // then a NaN among the values has no weight
    const float norm = reciprocal(sum);
    if (lane % 4 == 0) all_lse[warp * Tile::kRows + row] = softmax.lse(0, half, sum, scale_log2);
#pragma unroll
    for (int n = 0; n < Gemm::kOutTiles; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        results[row * Tile::kHeadDim + Gemm::out_column(n, c, lane % 4)] =
            empty ? 0.0f : out[0][n][2 * half + c] * norm;
      }
  }
  __syncthreads();

  // The block's state, of split `split`: warps are merged in their order.
  float* split_out = static_cast<float*>(p.out);
  float* split_lse = p.lse;
  const int64_t lse_floats = int64_t{p.batch} * p.num_heads * p.num_queries;
  if (p.workspace != nullptr) {
    split_out = p.workspace + split * lse_floats * p.head_dim;
    split_lse = p.workspace + gridDim.y * lse_floats * p.head_dim + split * lse_floats;
  }
  constexpr int kVectorsPerRow = Tile::kHeadDim / 4;
  for (int i = threadIdx.x; i < num_rows * kVectorsPerRow; i += Tile::kThreads) {
    const int row = i / kVectorsPerRow, column = i % kVectorsPerRow * 4;
    const int64_t token = (first_row + row) / group,
                  head = kv_head * group + (first_row + row) % group;
    // The first split's state contains the sink: one more state, without a value.
    const float sink = p.sinks != nullptr && split == 0 ? p.sinks[head] : -INFINITY;
    float max = sink;
    bool empty = sink == -INFINITY;
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
      const float lse = all_lse[w * Tile::kRows + row];
      max = fmaxf(max, lse);
      empty = empty && lse == -INFINITY;
    }
    float total = sink == -INFINITY ? 0.0f : exp2_approx((sink - max) * kLog2E);
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int w = 0; w < Tile::kWarps; ++w) {
      const float weight =
          empty ? 0.0f : exp2_approx((all_lse[w * Tile::kRows + row] - max) * kLog2E);
      const float4 x =
          *reinterpret_cast<const float4*>(shared + Tile::kQueryBytes + w * Tile::kWarpBytes +
                                           (row * Tile::kHeadDim + column) * sizeof(float));
      total += weight;
      sum.x = fmaf(weight, x.x, sum.x);
      sum.y = fmaf(weight, x.y, sum.y);
      sum.z = fmaf(weight, x.z, sum.z);
      sum.w = fmaf(weight, x.w, sum.w);
    }
    const float norm = empty ? 0.0f : reciprocal(total);
    if (column == 0) {
      split_lse[(batch * p.num_heads + head) * p.num_queries + token] =
          empty ? -INFINITY : max + log2_approx(total) * kLn2;
    }
    if (column < p.head_dim) {
      *reinterpret_cast<float4*>(
          split_out + ((batch * p.num_queries + token) * p.num_heads + head) * p.head_dim +
          column) = make_float4(sum.x * norm, sum.y * norm, sum.z * norm, sum.w * norm);
    }
  }
}

template <typename Element, int kHeadDim>
cudaError_t launch_decode_attention(const DecodeAttentionParams& p, int splits,
                                    cudaStream_t stream) {
  using Tile = DecodeTile<Element, kHeadDim>;
  const int row_tiles =
      (p.num_heads / p.num_kv_heads * p.num_queries + Tile::kRows - 1) / Tile::kRows;
  // Blocks next to each other read the same tokens, of different heads.
  const int64_t blocks = int64_t{row_tiles} * p.num_kv_heads * p.batch;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto kernel = decode_attention_kernel<Element, Tile>;
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const dim3 grid(static_cast<unsigned>(blocks), splits);
  kernel<<<grid, Tile::kThreads, Tile::kSharedBytes, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace ringattn::cuda::sm80
