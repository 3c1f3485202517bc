// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention/cuda/sm90/block_attention_kernel.cuh"
#include "attention/cuda/sm90/device_limits.h"
#include "attention/cuda/sm90/kernel_params.h"
#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/scheduler/makespan.h"
#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_selection.h"
#include "attention/cuda/sm90/tensor_map.h"
#include "attention/cuda/softcap.cuh"
#include "core/lru_cache.h"

// The host's side of one instantiation: tile order, tensor maps, launch.

namespace ringattn::cuda::sm90 {

template <typename Tile, Variant kVariant>
constexpr int shared_bytes() {
  constexpr int kBytes =
      kVariant == Variant::kDiagonal ? Tile::kSharedBytes : Tile::kGeneralSharedBytes;
  static_assert(kBytes <= Tile::kMaxSharedBytes);
  return kBytes;
}

/// A launch of `blocks` thread blocks in clusters; without the cluster attribute, which costs 1 %,
/// where a cluster is one block. `dependent`: a programmatic dependent launch
/// (trigger_next_kernel). `attributes` must outlive the launch.
template <typename Tile, Variant kVariant>
cudaLaunchConfig_t launch_config(int blocks, int cluster, bool dependent,
                                 std::array<cudaLaunchAttribute, 2>& attributes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = shared_bytes<Tile, kVariant>();
  config.attrs = attributes.data();
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs] = {};
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (cluster > 1) {
    add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  if (dependent) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  return config;
}

/// Raises the kernel's limit of shared memory on the current device. `pairs`: how many clusters of
/// two can run at the same time.
template <auto kKernel, typename Tile, Variant kVariant>
cudaError_t prepare(int device, int& pairs) {
  static thread_local int prepared_device = -1, known_pairs = 0;
  if (device != prepared_device) {
    cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             shared_bytes<Tile, kVariant>());
    if (error != cudaSuccess) return error;
    if constexpr (Tile::kInPairs) {
      std::array<cudaLaunchAttribute, 2> attributes;
      const cudaLaunchConfig_t config = launch_config<Tile, kVariant>(2, 2, false, attributes);
      if (cudaOccupancyMaxActiveClusters(&known_pairs, kKernel, &config) != cudaSuccess) {
        known_pairs = 0;     // a part of a device, perhaps: blocks work unpaired too
        cudaGetLastError();  // not reported by the next call
      }
    }
    prepared_device = device;
  }
  pairs = known_pairs;
  return cudaSuccess;
}

/// Pairs where all thread blocks can be in pairs.
template <typename Tile>
WorkTileShape choose_work_tile_shape(const BlockAttentionParams& p, int max_blocks, int pairs) {
  const bool possible = Tile::kInPairs && max_blocks % 2 == 0 && 2 * pairs >= max_blocks;
  if (!possible) return {};
  const WorkTileShape shape = pair_shape(p, Tile::kBlockQ, Tile::kBlockK);
  // Under a table, neighbouring row tiles may see little in common.
  return p.is_general() && shape.row_tiles > 1 ? WorkTileShape{} : shape;
}

/// The remote segments, and the order in which they are fetched.
template <typename Tile, int kSegments, Variant kVariant>
cudaError_t add_remote_segments(const BlockAttentionParams& p, int64_t heads_per_group,
                                SegmentedParams<kSegments, kVariant>& params) {
  constexpr int64_t kElementBytes = 2;
  params.remote_fetch = p.remote_fetch;
  FetchOrder& fetch_order = params.fetch_order;
  fetch_order.num_kv_heads = p.num_kv_heads;
  fetch_order.heads_per_group = static_cast<uint32_t>(heads_per_group);
  fetch_order.planes_per_head = 2 * p.batch;
  const int64_t room =
      std::max(p.remote_fetch.scratch.num_arrivals / std::max(p.num_segments, 1), 1);
  const int64_t heads_per_arrival = ceil_div(p.num_kv_heads, room);
  fetch_order.heads_per_arrival = static_cast<uint32_t>(heads_per_arrival);
  int64_t chunks_per_head = 0;
  int segment = 0, num_arrivals = 0;
  for (int i = 0; i < p.num_segments; ++i) {
    const KeySegment& from = p.segments[i];
    if (from.num_keys == 0) continue;
    auto& remote = params.remote[segment++];
    if (!from.is_remote()) continue;
    const int64_t row_vectors = p.head_dim * kElementBytes / kVectorBytes;
    const int64_t plane_vectors = from.num_fetched() * row_vectors;
    int64_t chunks_per_plane = ceil_div(plane_vectors, kVectorsPerChunk<Tile>);
    if constexpr (params.kGeneral) {
      remote.parts = from.source.parts;
      remote.row_vectors = static_cast<uint32_t>(row_vectors);
      if (remote.parts != nullptr) chunks_per_plane = from.source.num_parts;
    } else if (from.source.parts != nullptr) {
      return cudaErrorInvalidConfiguration;
    }
    const int64_t segment_chunks = chunks_per_plane * fetch_order.planes_per_head;
    if (from.source.num_rows * row_vectors > INT32_MAX) return cudaErrorInvalidConfiguration;
    remote.from = static_cast<const uint4*>(from.source.data);
    remote.to = static_cast<uint4*>(from.k.data);
    remote.from_pitch = static_cast<uint32_t>(from.source.num_rows * row_vectors);
    remote.plane_vectors = static_cast<uint32_t>(plane_vectors);
    remote.chunks_per_plane = static_cast<uint32_t>(chunks_per_plane);
    remote.chunks_per_head = static_cast<uint32_t>(segment_chunks);
    remote.arrivals = p.remote_fetch.scratch.arrivals() + num_arrivals;
    num_arrivals += static_cast<int>(ceil_div(p.num_kv_heads, heads_per_arrival));
    chunks_per_head += segment_chunks;
  }
  // Chunk numbers are 32 bits wide, including one past the end for each thread block.
  if (chunks_per_head * p.num_kv_heads > INT32_MAX) return cudaErrorInvalidConfiguration;
  fetch_order.chunks_per_group = static_cast<uint32_t>(chunks_per_head * heads_per_group);
  fetch_order.chunks = static_cast<uint32_t>(chunks_per_head * p.num_kv_heads);
  params.remote_fetch.scratch.num_arrivals = num_arrivals;  // those that are used
  return cudaSuccess;
}

/// Tensor maps of queries, results and state.
inline cudaError_t make_query_maps(const BlockAttentionParams& p, KernelParams& params) {
  const auto map = [&](const Strided& x, DataType dtype, CUtensorMap& to) {
    return make_tensor_map(x, dtype, p.batch, p.num_queries, p.num_heads, p.head_dim, kConsumerRows,
                           to);
  };
  cudaError_t error = map(p.q, p.dtype, params.q);
  if (error == cudaSuccess && p.final_begin < p.final_end) {
    error = map(p.out, p.dtype, params.out);
  }
  if (error == cudaSuccess && p.state.data != nullptr) {
    error = map(p.state, DataType::kFloat32, params.state);
  }
  return error;
}

/// The segments that have keys. Each has tensor maps of its own, which end with its keys: memory
/// behind them is never read.
template <typename Tile, int kSegments, Variant kVariant>
cudaError_t add_segments(const BlockAttentionParams& p,
                         SegmentedParams<kSegments, kVariant>& params) {
  for (int i = 0; i < p.num_segments; ++i) {
    const KeySegment& from = p.segments[i];
    if (from.num_keys == 0) continue;
    const auto map = [&](const Strided& x, CUtensorMap& to) {
      return make_tensor_map(x, p.dtype, p.batch, from.num_keys, p.num_kv_heads, p.head_dim,
                             Tile::kBlockK, to);
    };
    const int segment = params.num_segments++;
    cudaError_t error = map(from.k, params.maps[segment].k);
    if (error == cudaSuccess) error = map(from.v, params.maps[segment].v);
    if (error != cudaSuccess) return error;
    if constexpr (params.kGeneral) {
      params.keys[segment] = KeyBounds::of(from);
    } else {
      params.keys[segment] = {from.num_keys, from.diagonal, from.first_query};
    }
  }
  return cudaSuccess;
}

/// Everything that the durations of a call's work tiles, and their order, depend on: what is
/// computed from them, in a part of a millisecond, is kept.
inline std::vector<int> shape_key(const BlockAttentionParams& p) {
  std::vector<int> key = {p.batch, p.num_queries, p.num_heads, p.num_kv_heads, p.head_dim};
  for (int i = 0; i < p.num_segments; ++i) {
    const KeySegment& keys = p.segments[i];
    key.insert(key.end(), {keys.num_keys, keys.diagonal, keys.first_query, keys.num_fetched()});
  }
  return key;
}

/// The order of the tail, where work tiles are dispatched dynamically.
template <typename Tile, int kSegments, Variant kVariant>
void order_tail(const BlockAttentionParams& p, bool fetch_bound, int blocks,
                SegmentedParams<kSegments, kVariant>& params) {
  params.first_tail_tile = INT32_MAX;
  if (has_unknown_tables(p)) return;  // the durations are not known here
  constexpr int kMaxTiles = 1 << 14;  // with more, idle time at the end hardly matters
  const TileScheduler& scheduler = params.scheduler;
  if (p.scheduling == Scheduling::kStatic || scheduler.num_tiles > kMaxTiles) return;
  const int clusters = blocks / scheduler.shape.blocks();
  const int64_t max_tail = max_tail_tiles(scheduler.num_tiles, clusters);
  if (max_tail == 0) return;

  const int heads_per_group = static_cast<int>(params.fetch_order.heads_per_group);
  std::vector<int> key = shape_key(p);
  key.insert(key.end(),
             {blocks, scheduler.num_tiles, scheduler.shape.heads, scheduler.shape.row_tiles,
              scheduler.bundles_per_group, heads_per_group, static_cast<int>(fetch_bound)});
  for (int i = 0; i < p.num_segments; ++i) {
    const int64_t number = p.segments[i].host_table.number;
    key.insert(key.end(), {static_cast<int>(number >> 32), static_cast<int>(number)});
  }
  static thread_local LruCache<std::vector<int>, std::vector<uint16_t>> known;
  const std::vector<uint16_t>& tail = known.find_or_compute(std::move(key), [&] {
    const std::vector<WorkTile> tiles = timed_work_tiles(p, scheduler, heads_per_group, fetch_bound,
                                                         Tile::kBlockQ, Tile::kBlockK, blocks);
    return has_tables(p) ? longest_first_tail(tiles, clusters, max_tail)
                         : rebalance_tail(tiles, clusters, max_tail);
  });
  if (tail.empty()) return;
  params.first_tail_tile = scheduler.num_tiles - static_cast<int>(tail.size());
  std::copy(tail.begin(), tail.end(), params.tail_order);
}

template <typename Element, typename Tile, int kSegments, Variant kVariant>
cudaError_t launch_segmented(const BlockAttentionParams& p, bool fetch_bound, cudaStream_t stream) {
  if (p.num_segments > kSegments || !modes_are_valid(p)) return cudaErrorInvalidValue;
  const int64_t query_tiles = ceil_div(p.num_queries, Tile::kBlockQ) + 1;
  // Tile numbers are 32 bits wide, including the missing tiles of pairs and the first one past the
  // end.
  if (query_tiles * p.batch * p.num_heads > INT32_MAX / 2) return cudaErrorInvalidConfiguration;

  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  DeviceLimits limits;
  error = device_limits(device, limits);
  if (error != cudaSuccess) return error;
  SegmentedParams<kSegments, kVariant> params = {};
  error = make_query_maps(p, params);
  if (error == cudaSuccess) error = add_segments<Tile>(p, params);
  if (error != cudaSuccess) return error;

  constexpr auto kKernel = block_attention_kernel<Element, Tile, kSegments, kVariant>;
  int pairs = 0;
  error = prepare<kKernel, Tile, kVariant>(device, pairs);
  if (error != cudaSuccess) return error;
  const int max_blocks = std::min(limits.multiprocessors, p.max_blocks);
  const WorkTileShape shape = choose_work_tile_shape<Tile>(p, max_blocks, pairs);
  const int cluster = shape.blocks();
  int64_t heads_at_once = 0;
  params.scheduler =
      make_tile_scheduler(p, shape, Tile::kBlockQ, limits.l2_bytes, max_blocks, heads_at_once);
  // The first tiles need the segments of all their heads one after the other. Where that takes
  // long, ranks that fetch unequal amounts fall out of step, and several read one owner while
  // another is idle. In groups of one head, each rank returns to every owner often.
  error = add_remote_segments<Tile>(p, fetch_bound ? 1 : heads_at_once, params);
  if (error != cudaSuccess) return error;
  params.out_memory = p.out;
  params.state_memory = p.state;
  params.lse = p.lse;
  params.lse_batch_stride = p.lse_batch_stride;
  params.lse_head_stride = p.lse_head_stride;
  params.batch = p.batch;
  params.num_queries = p.num_queries;
  params.heads_per_kv_head = p.num_heads / p.num_kv_heads;
  params.head_dim = p.head_dim;
  params.final_begin = p.final_begin;
  params.final_end = p.final_end;
  // Not 0, so that a masked score (-inf) times it is -inf. Queries carry the sign.
  params.scale_log2 = std::max(std::fabs(p.scale) * kLog2E, FLT_MIN);
  params.negative_scale = p.scale < 0.0f;
  params.fold = p.fold;
  if constexpr (params.kGeneral) {
    params.sinks = p.sinks;
    const float softcap = std::clamp(p.softcap, kSmallestSoftcap, kLargestSoftcap);
    params.softcap_inner = std::min(std::fabs(p.scale) / softcap, FLT_MAX);
    params.softcap_log2 = softcap * kLog2E;
  }

  // Thread blocks without a work tile can still fetch keys.
  const int fetching_blocks = static_cast<int>(
      std::min<int64_t>(max_blocks, ceil_div(params.fetch_order.chunks, cluster) * cluster));
  const int blocks =
      std::max(std::min(max_blocks, params.scheduler.num_tiles * cluster), fetching_blocks);
  if constexpr (params.kReorders) order_tail<Tile>(p, fetch_bound, blocks, params);
  std::array<cudaLaunchAttribute, 2> attributes;
  const bool dependent = params.kFetches && p.remote_fetch.follows_staging;
  cudaLaunchConfig_t config = launch_config<Tile, kVariant>(blocks, cluster, dependent, attributes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

/// Whether a call takes small tiles; for head dimensions from 65 to 128.
inline cudaError_t choose_tile_size(const BlockAttentionParams& p, bool& small) {
  small = p.tile_rows == kSmallTile.rows;
  if (p.tile_rows != 0 || p.num_queries == 0 || has_many_tiles(p)) return cudaSuccess;
  int device = 0;
  DeviceLimits limits;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = device_limits(device, limits);
  if (error != cudaSuccess) return error;
  std::vector<int> key = shape_key(p);
  key.insert(key.end(), {limits.multiprocessors, limits.l2_bytes});
  static thread_local LruCache<std::vector<int>, bool> known;
  small = known.find_or_compute(std::move(key), [&] {
    return small_tiles_are_faster(p, limits.l2_bytes, limits.multiprocessors);
  });
  return cudaSuccess;
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  const bool fetch_bound = is_fetch_bound(p);
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    constexpr Variant kDiagonal = Variant::kDiagonal;
    return p.num_segments == 1 && p.fetch == Fetch::kNone
               ? launch_segmented<Element, Tile, 1, kDiagonal>(p, fetch_bound, stream)
               : launch_segmented<Element, Tile, kMaxSegments, kDiagonal>(p, fetch_bound, stream);
  };
  if constexpr (kHeadDim <= 64) {
    return launch(Tile64{});
  } else if constexpr (kHeadDim <= 128) {
    bool small = false;
    const cudaError_t error = choose_tile_size(p, small);
    if (error != cudaSuccess) return error;
    if (p.state.data != nullptr) {
      return small ? launch(SmallTile128WithState{}) : launch(Tile128WithState{});
    }
    if (!fetch_bound) return small ? launch(SmallTile128{}) : launch(Tile128{});
    const auto launch_fetch_bound = [&](auto tile) {
      return launch_segmented<Element, decltype(tile), kMaxSegments, Variant::kDiagonal>(
          p, fetch_bound, stream);
    };
    return small ? launch_fetch_bound(SmallTile128FetchBound{})
                 : launch_fetch_bound(Tile128FetchBound{});
  } else {
    return launch(Tile256{});
  }
}

template <typename Element, int kHeadDim>
cudaError_t launch_general_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  using Tile =
      std::conditional_t<kHeadDim <= 64, GeneralTile64,
                         std::conditional_t<kHeadDim <= 128, GeneralTile128, GeneralTile256>>;
  using SoftcapTile = std::conditional_t<kHeadDim == 128, GeneralSoftcapTile128, Tile>;
  const bool fetch_bound = is_fetch_bound(p);
  if (p.softcap != 0.0f) {
    return launch_segmented<Element, SoftcapTile, kMaxSegments, Variant::kIntervalsSoftcap>(
        p, fetch_bound, stream);
  }
  if constexpr (kHeadDim == 128) {
    if (p.num_segments == 1 && p.fetch == Fetch::kNone) {
      return launch_segmented<Element, Tile, 1, Variant::kIntervals>(p, fetch_bound, stream);
    }
  }
  return launch_segmented<Element, Tile, kMaxSegments, Variant::kIntervals>(p, fetch_bound, stream);
}

}  // namespace ringattn::cuda::sm90
