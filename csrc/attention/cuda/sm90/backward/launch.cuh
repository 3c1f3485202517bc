// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm90/backward/cluster_choice.h"
#include "attention/cuda/sm90/backward/kernel.cuh"
#include "attention/cuda/sm90/backward/launch.h"
#include "attention/cuda/sm90/device_limits.h"
#include "attention/cuda/sm90/tensor_map.h"
#include "attention/cuda/softcap.cuh"

// The host's side of one instantiation: tensor maps, order of tiles, launch.

namespace ringattn::cuda::sm90 {

template <typename Tile>
cudaError_t make_tensor_maps(const BlockAttentionBackwardParams& p, BackwardKernelParams& params) {
  const auto of_queries = [&](const Strided& x, DataType dtype, int box_rows, CUtensorMap& map) {
    return make_tensor_map(x, dtype, p.batch, p.num_queries, p.num_heads, p.head_dim, box_rows,
                           map);
  };
  const auto of_keys = [&](const Strided& x, CUtensorMap& map) {
    return make_tensor_map(x, p.dtype, p.batch, p.num_keys, p.num_kv_heads, p.head_dim,
                           Tile::kBlockK, map);
  };
  const cudaError_t errors[] = {
      of_queries(p.q, p.dtype, Tile::kBlockQ, params.q),
      of_queries(p.grad_out, p.dtype, Tile::kBlockQ, params.grad_out),
      of_queries(p.dq, DataType::kFloat32, kGradRows, params.dq),
      of_keys(p.k, params.k),
      of_keys(p.v, params.v),
  };
  for (const cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

template <typename Tile>
cudaLaunchConfig_t grads_config(int blocks, int ranks, cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.attrs = attributes;
  if (ranks > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {static_cast<unsigned>(ranks), 1, 1};
  }
  return config;
}

/// Raises the kernel's limit of shared memory on the current device, and asks what fits there.
template <auto kKernel, typename Tile>
cudaError_t prepare_grads(int device, Residency& resident) {
  static thread_local int prepared_device = -1;
  static thread_local Residency known;
  if (device != prepared_device) {
    cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             Tile::kSharedBytes);
    if (error != cudaSuccess) return error;
    DeviceLimits limits;
    if ((error = device_limits(device, limits)) != cudaSuccess) return error;
    known.of_one = limits.multiprocessors;
    for (const int ranks : {2, 4}) {
      cudaLaunchAttribute attributes[2] = {};
      const cudaLaunchConfig_t config = grads_config<Tile>(ranks, ranks, attributes);
      int& clusters = ranks == 2 ? known.of_two : known.of_four;
      if (cudaOccupancyMaxActiveClusters(&clusters, kKernel, &config) != cudaSuccess) {
        clusters = 0;        // a part of a device, perhaps
        cudaGetLastError();  // not reported by the next call
      }
    }
    prepared_device = device;
  }
  resident = known;
  return cudaSuccess;
}

template <typename Element, typename Tile, bool kSoftcap>
cudaError_t launch_grads(const BlockAttentionBackwardParams& p, cudaStream_t stream) {
  constexpr auto kKernel = block_attention_backward_kernel<Element, Tile, kSoftcap>;
  int device = 0;
  Residency resident;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  if ((error = prepare_grads<kKernel, Tile>(device, resident)) != cudaSuccess) return error;
  if (p.leaves_room) resident = resident.within(resident.of_one - 1);

  BackwardKernelParams params = {};
  const bool has_table = p.query_ranges != nullptr;
  const WorkTiles tiles = work_tiles_of<Tile>(p);
  int sharing = 1;  // thread blocks that share the heads of a group
  if constexpr (!Tile::kByTicket && (!Tile::kPair || Tile::kSplit)) {
    // The order of a table's tiles in deterministic calls is that of tickets, of others that of
    // rounds.
    const bool by_ticket = p.semaphores != nullptr && (has_table || !p.deterministic);
    if constexpr (std::is_same_v<Tile, BackwardTile128> && !kSoftcap) {
      if (!by_ticket && resident.of_two == resident.of_one / 2 &&
          wants_pairs<BackwardTile128, BackwardPair128>(p, resident.of_one)) {
        error = launch_grads<Element, BackwardPair128, kSoftcap>(p, stream);
        if (error != cudaErrorNotSupported) return error;
      }
    }
    if (!Tile::kPair && (!has_table || !p.deterministic))
      sharing = choose_ranks(tiles, resident, by_ticket);
    if (by_ticket && sharing == 1)
      return launch_grads<Element, ByTicket<Tile>, kSoftcap>(p, stream);
  }
  params.ranks = sharing;
  const int blocks = Tile::kPair ? 2 : sharing;  // of a cluster
  const int clusters = resident.clusters(blocks);
  if (clusters == 0) return cudaErrorNotSupported;
  params.num_key_tiles = tiles.num_key_tiles;
  params.heads_per_kv_head = tiles.heads;
  params.heads_per_rank = tiles.heads / sharing;
  // Each slice begins with waits for turns. A table's tiles even out over several rounds; of split
  // roles, whose rows are read half as often, slices of few gain nothing.
  const int least_rounds = p.deterministic || has_table || Tile::kSplit ? 4 : 1;
  params.planes_per_slice = Tile::kByTicket
                                ? planes_per_slice_by_ticket(tiles, resident.of_one)
                                : choose_planes_per_slice(tiles, sharing, clusters, least_rounds);
  if (Tile::kByTicket) params.next_ticket = p.semaphores;
  if (p.deterministic) params.progress = p.semaphores + 1;

  if ((error = make_tensor_maps<Tile>(p, params)) != cudaSuccess) return error;
  params.lse = p.lse;
  params.delta = p.delta;
  params.lse_batch_stride = p.lse_batch_stride;
  params.lse_head_stride = p.lse_head_stride;
  params.dk = p.dk;
  params.dv = p.dv;
  params.rounds_key_grads = p.rounds_key_gradients;
  params.bounds = QueryBounds::of(p);
  params.batch = p.batch;
  params.num_kv_heads = p.num_kv_heads;
  params.head_dim = p.head_dim;
  params.scale = p.scale;
  if constexpr (kSoftcap) {
    const float softcap = std::clamp(p.softcap, kSmallestSoftcap, kLargestSoftcap);
    params.softcap_inner = std::clamp(p.scale / softcap, -FLT_MAX, FLT_MAX);
    params.score_log2 = softcap * kLog2E;
  } else {
    // Not 0: the score of a masked pair is infinite, and lse is divided by it.
    params.score_log2 = p.scale == 0.0f ? kSmallestScale : p.scale * kLog2E;
    params.lse_to_term = -kLog2E / params.score_log2;
  }
  params.masked_score = params.score_log2 > 0.0f ? -INFINITY : INFINITY;

  const int64_t work_tiles = int64_t{params.planes_per_slice} * params.num_key_tiles;
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = grads_config<Tile>(
      blocks * static_cast<int>(std::min<int64_t>(clusters, work_tiles)), blocks, attributes);
  if (p.deterministic && !Tile::kByTicket) {
    // Thread blocks wait for each other: an error where they do not run at one time.
    cudaLaunchAttribute& cooperative = attributes[config.numAttrs++];
    cooperative.id = cudaLaunchAttributeCooperative;
    cooperative.val.cooperative = 1;
  }
  config.stream = stream;
  error = cudaLaunchKernelEx(&config, kKernel, params);
  if (error != cudaErrorCooperativeLaunchTooLarge) return error;
  cudaGetLastError();  // not reported by the next call
  return cudaErrorNotSupported;
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention_backward(const BlockAttentionBackwardParams& p,
                                            cudaStream_t stream) {
  using Tile =
      std::conditional_t<kHeadDim <= 64, BackwardTile64,
                         std::conditional_t<kHeadDim <= 128, BackwardTile128, BackwardTile256>>;
  using SoftcapTile = std::conditional_t<kHeadDim == 64, BackwardSoftcapTile64, Tile>;
  return p.softcap == 0.0f ? launch_grads<Element, Tile, false>(p, stream)
                           : launch_grads<Element, SoftcapTile, true>(p, stream);
}

}  // namespace ringattn::cuda::sm90
