// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>

#include "attention/cuda/sm90/block_attention_kernel.cuh"
#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/tensor_map.h"

// The host's side of one instantiation: tile order, tensor maps, launch.

namespace ringattn::cuda::sm90 {

struct DeviceLimits {
  int multiprocessors = 0;
  int l2_bytes = 0;
};

inline cudaError_t device_limits(DeviceLimits& limits) {
  int device = 0;
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) return error;
  const cudaError_t error =
      cudaDeviceGetAttribute(&limits.multiprocessors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return cudaDeviceGetAttribute(&limits.l2_bytes, cudaDevAttrL2CacheSize, device);
}

/// Slices of equal numbers of key heads whose keys and values take a third of L2 or less.
template <typename Tile>
TileOrder tile_order(const BlockAttentionParams& p, const DeviceLimits& limits) {
  constexpr int kElementBytes = 2;
  const int64_t kv_head_bytes = int64_t{2} * p.num_keys * p.head_dim * kElementBytes;
  const int64_t kv_heads = int64_t{p.batch} * p.num_kv_heads;
  const int64_t fitting = std::clamp<int64_t>(limits.l2_bytes / 3 / kv_head_bytes, 1, kv_heads);
  const int64_t slices = (kv_heads + fitting - 1) / fitting;
  const int64_t kv_heads_per_slice = (kv_heads + slices - 1) / slices;

  TileOrder order;
  order.query_tiles = (p.num_queries + Tile::kBlockQ - 1) / Tile::kBlockQ;
  order.heads = p.batch * p.num_heads;
  order.heads_per_slice = static_cast<int>(kv_heads_per_slice) * (p.num_heads / p.num_kv_heads);
  order.slices = (order.heads + order.heads_per_slice - 1) / order.heads_per_slice;
  order.slice_tiles = order.query_tiles * order.heads_per_slice;
  order.tiles = order.query_tiles * order.heads;
  return order;
}

template <typename Tile>
cudaError_t make_tensor_maps(const BlockAttentionParams& p, KernelParams& params) {
  const auto map = [&](const Strided& x, DataType dtype, int rows, int heads, int box_rows,
                       CUtensorMap& to) {
    return make_tensor_map(x, dtype, p.batch, rows, heads, p.head_dim, box_rows, to);
  };
  cudaError_t error = map(p.q, p.dtype, p.num_queries, p.num_heads, Tile::kBlockQ, params.q);
  if (error == cudaSuccess) {
    error = map(p.k, p.dtype, p.num_keys, p.num_kv_heads, Tile::kBlockK, params.k);
  }
  if (error == cudaSuccess) {
    error = map(p.v, p.dtype, p.num_keys, p.num_kv_heads, Tile::kBlockK, params.v);
  }
  if (error == cudaSuccess && p.final_begin < p.final_end && !p.fold) {
    error = map(p.out, p.dtype, p.num_queries, p.num_heads, 64, params.out);
  }
  if (error == cudaSuccess && p.fold) {
    error =
        map(p.state, DataType::kFloat32, p.num_queries, p.num_heads, Tile::kBlockQ, params.state);
  }
  return error;
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  using Tile = TileFor<kHeadDim>;
  const int64_t query_tiles = (int64_t{p.num_queries} + Tile::kBlockQ - 1) / Tile::kBlockQ;
  // Numbers of tiles are 32 bits wide, the first one past the end of a block's turns included.
  if (query_tiles * p.batch * p.num_heads > INT32_MAX / 2) return cudaErrorInvalidConfiguration;

  DeviceLimits limits;
  cudaError_t error = device_limits(limits);
  if (error != cudaSuccess) return error;
  KernelParams params = {};
  error = make_tensor_maps<Tile>(p, params);
  if (error != cudaSuccess) return error;

  params.order = tile_order<Tile>(p, limits);
  params.segment = {p.num_keys, p.diagonal};
  params.out_memory = p.out;
  params.state_memory = p.state;
  params.lse = p.lse;
  params.lse_batch_stride = p.lse_batch_stride;
  params.lse_head_stride = p.lse_head_stride;
  params.num_queries = p.num_queries;
  params.num_heads = p.num_heads;
  params.heads_per_kv_head = p.num_heads / p.num_kv_heads;
  params.head_dim = p.head_dim;
  params.final_begin = p.final_begin;
  params.final_end = p.final_end;
  // Away from 0, so that a masked score (-inf) times it is -inf. Queries carry the sign.
  params.scale_log2 = std::max(std::fabs(p.scale) * kLog2E, FLT_MIN);
  params.negative_scale = p.scale < 0.0f;
  params.fold = p.fold;

  const auto kernel = block_attention_kernel<Element, Tile>;
  error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Tile::kSharedBytes);
  if (error != cudaSuccess) return error;
  const int blocks = std::min(limits.multiprocessors, params.order.tiles);
  kernel<<<blocks, Tile::kThreads, Tile::kSharedBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace ringattn::cuda::sm90
