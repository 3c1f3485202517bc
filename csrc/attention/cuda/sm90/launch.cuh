// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "attention/cuda/sm90/block_attention_kernel.cuh"
#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/scheduler/makespan.h"
#include "attention/cuda/sm90/scheduler/tile_cost.h"
#include "attention/cuda/sm90/scheduler/tile_selection.h"
#include "attention/cuda/sm90/tensor_map.h"

// The host's side of one instantiation: tile order, tensor maps, launch.

namespace ringattn::cuda::sm90 {

struct DeviceLimits {
  int multiprocessors = 0;
  int l2_bytes = 0;
};

inline cudaError_t device_limits(int device, DeviceLimits& limits) {
  // Asked for in every call, and always the same: what this thread asked for last is kept.
  static thread_local int known_device = -1;
  static thread_local DeviceLimits known;
  if (device != known_device) {
    DeviceLimits asked;
    cudaError_t error =
        cudaDeviceGetAttribute(&asked.multiprocessors, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&asked.l2_bytes, cudaDevAttrL2CacheSize, device);
    if (error != cudaSuccess) return error;
    known = asked;
    known_device = device;
  }
  limits = known;
  return cudaSuccess;
}

/// A launch of as many thread blocks in clusters; without that attribute where a cluster is one
/// block, which would cost 1 %. `early`: it begins when the kernel before it lets it
/// (let_next_kernel_begin). `attributes` must live as long.
template <typename Tile>
cudaLaunchConfig_t launch_config(int blocks, int cluster, bool early,
                                 std::array<cudaLaunchAttribute, 2>& attributes) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(Tile::kThreads);
  config.dynamicSmemBytes = Tile::kSharedBytes;
  config.attrs = attributes.data();
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs] = {};
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (cluster > 1) {
    add(cudaLaunchAttributeClusterDimension).clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  if (early) {
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed =
        1;
  }
  return config;
}

/// Of the current device: the kernel's shared memory is allowed. `pairs`: so many clusters of two
/// can run at one time.
template <auto kKernel, typename Tile>
cudaError_t prepare(int device, int& pairs) {
  static thread_local int prepared_device = -1, known_pairs = 0;
  if (device != prepared_device) {
    cudaError_t error = cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                             Tile::kSharedBytes);
    if (error != cudaSuccess) return error;
    if constexpr (Tile::kInPairs) {
      std::array<cudaLaunchAttribute, 2> attributes;
      const cudaLaunchConfig_t config = launch_config<Tile>(2, 2, false, attributes);
      if (cudaOccupancyMaxActiveClusters(&known_pairs, kKernel, &config) != cudaSuccess) {
        known_pairs = 0;     // a part of a device, perhaps: blocks work alone too
        cudaGetLastError();  // it is not the next caller's
      }
    }
    prepared_device = device;
  }
  pairs = known_pairs;
  return cudaSuccess;
}

/// Pairs, where all blocks can be in pairs.
template <typename Tile>
TurnShape choose_turn_shape(const BlockAttentionParams& p, int most_blocks, int pairs) {
  const bool possible = Tile::kInPairs && most_blocks % 2 == 0 && 2 * pairs >= most_blocks;
  return possible ? shape_of_pairs(p, Tile::kBlockQ, Tile::kBlockK) : TurnShape{};
}

/// What is brought, and in which order: `heads_per_slice` KV heads, then the next ones.
template <typename Tile, int kSegments>
cudaError_t add_sources(const BlockAttentionParams& p, int64_t heads_per_slice,
                        SegmentedParams<kSegments>& params) {
  constexpr int64_t kElementBytes = 2;
  params.bringing = p.bringing;
  BringOrder& bring = params.bring;
  bring.num_kv_heads = p.num_kv_heads;
  bring.heads_per_slice = static_cast<uint32_t>(heads_per_slice);
  bring.planes_per_head = 2 * p.batch;
  const int64_t room = std::max(p.bringing.words.num_arrivals / std::max(p.num_segments, 1), 1);
  const int64_t heads_per_arrival = ceil_div(p.num_kv_heads, room);
  bring.heads_per_arrival = static_cast<uint32_t>(heads_per_arrival);
  int64_t pieces_per_head = 0;
  int segment = 0, num_arrivals = 0;
  for (int i = 0; i < p.num_segments; ++i) {
    const KeySegment& from = p.segments[i];
    if (from.num_keys == 0) continue;
    BroughtKeys& keys = params.brought[segment++];
    if (from.source.data == nullptr) continue;
    const int64_t row_units = p.head_dim * kElementBytes / kUnitBytes;
    const int64_t plane_units = from.num_keys * row_units;
    const int64_t pieces_per_plane = ceil_div(plane_units, kUnitsPerPiece<Tile>);
    const int64_t pieces = pieces_per_plane * bring.planes_per_head;
    if (from.source.num_rows * row_units > INT32_MAX) return cudaErrorInvalidConfiguration;
    keys.from = static_cast<const uint4*>(from.source.data);
    keys.to = static_cast<uint4*>(from.k.data);
    keys.from_pitch = static_cast<uint32_t>(from.source.num_rows * row_units);
    keys.plane_units = static_cast<uint32_t>(plane_units);
    keys.pieces_per_plane = static_cast<uint32_t>(pieces_per_plane);
    keys.pieces_per_head = static_cast<uint32_t>(pieces);
    keys.arrivals = p.bringing.words.arrivals() + num_arrivals;
    num_arrivals += static_cast<int>(ceil_div(p.num_kv_heads, heads_per_arrival));
    pieces_per_head += pieces;
  }
  // Counted in 32 bits, and everybody counts once past the end.
  if (pieces_per_head * p.num_kv_heads > INT32_MAX) return cudaErrorInvalidConfiguration;
  bring.pieces_per_slice = static_cast<uint32_t>(pieces_per_head * heads_per_slice);
  bring.pieces = static_cast<uint32_t>(pieces_per_head * p.num_kv_heads);
  params.bringing.words.num_arrivals = num_arrivals;  // of the room that there is, this much
  return cudaSuccess;
}

/// Maps of queries, results and state.
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

/// The segments that have keys. Each has maps of its own, which end where it ends: what lies behind
/// it is never read.
template <typename Tile, int kSegments>
cudaError_t add_segments(const BlockAttentionParams& p, SegmentedParams<kSegments>& params) {
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
    params.keys[segment] = {from.num_keys, from.diagonal, from.first_query};
  }
  return cudaSuccess;
}

/// What was found for the latest kinds of launches; each takes a part of a millisecond to find.
template <typename Found>
class LatestKinds {
 public:
  template <typename Find>
  const Found& find(std::vector<int> kind, const Find& find_it) {
    const auto known = std::find_if(kinds_.begin(), kinds_.end(),
                                    [&](const auto& some) { return some.first == kind; });
    if (known != kinds_.end()) return known->second;
    if (kinds_.size() == kMostKinds) kinds_.pop_front();
    kinds_.emplace_back(std::move(kind), find_it());
    return kinds_.back().second;
  }

 private:
  static constexpr size_t kMostKinds = 32;
  std::deque<std::pair<std::vector<int>, Found>> kinds_;
};

/// What decides how long the turns of a call are, and in which order they lie.
inline std::vector<int> kind_of(const BlockAttentionParams& p) {
  std::vector<int> kind = {p.batch, p.num_queries, p.num_heads, p.num_kv_heads, p.head_dim};
  for (int i = 0; i < p.num_segments; ++i) {
    const KeySegment& keys = p.segments[i];
    kind.insert(kind.end(), {keys.num_keys, keys.diagonal, keys.first_query,
                             static_cast<int>(keys.source.data != nullptr)});
  }
  return kind;
}

/// An order of the last turns, where they are handed out, with which all end at about the same
/// time.
template <typename Tile, int kSegments>
void order_last_turns(const BlockAttentionParams& p, bool much, int blocks,
                      SegmentedParams<kSegments>& params) {
  params.first_last_turn = INT32_MAX;
  constexpr int kMostTurns = 1 << 14;  // of so many, how the last ones end hardly matters
  const TileOrder& order = params.order;
  if (params.bringing.words.data == nullptr || order.turns > kMostTurns) return;
  const int clusters = blocks / order.shape.blocks();
  const int64_t most = most_last_turns(order.turns, clusters);
  if (most == 0) return;

  const int heads_per_slice = static_cast<int>(params.bring.heads_per_slice);
  std::vector<int> kind = kind_of(p);
  kind.insert(kind.end(), {blocks, order.turns, order.shape.heads, order.shape.row_tiles,
                           order.bundles_per_slice, heads_per_slice, static_cast<int>(much)});
  static thread_local LatestKinds<std::vector<uint16_t>> known;
  const std::vector<uint16_t>& last = known.find(std::move(kind), [&] {
    const std::vector<Turn> turns =
        turns_in_order(p, order, heads_per_slice, much, Tile::kBlockQ, Tile::kBlockK, blocks);
    return order_of_last_turns(turns, clusters, most);
  });
  if (last.empty()) return;
  params.first_last_turn = order.turns - static_cast<int>(last.size());
  std::copy(last.begin(), last.end(), params.last_turns);
}

/// `much`: brings_much.
template <typename Element, typename Tile, int kSegments>
cudaError_t launch_segmented(const BlockAttentionParams& p, bool much, cudaStream_t stream) {
  const int64_t query_tiles = ceil_div(p.num_queries, Tile::kBlockQ) + 1;
  // Numbers of tiles are 32 bits wide, those that pairs lack and the first one past the end of a
  // block's turns included.
  if (query_tiles * p.batch * p.num_heads > INT32_MAX / 2) return cudaErrorInvalidConfiguration;
  // Without words nobody would bring keys, or tell the others.
  if ((brings(p) || p.bringing.failed != nullptr) &&
      (p.bringing.failed == nullptr || p.bringing.words.data == nullptr ||
       p.bringing.words.num_arrivals < p.num_segments)) {
    return cudaErrorInvalidValue;
  }

  int device = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error != cudaSuccess) return error;
  DeviceLimits limits;
  error = device_limits(device, limits);
  if (error != cudaSuccess) return error;
  SegmentedParams<kSegments> params = {};
  error = make_query_maps(p, params);
  if (error == cudaSuccess) error = add_segments<Tile>(p, params);
  if (error != cudaSuccess) return error;

  constexpr auto kKernel = block_attention_kernel<Element, Tile, kSegments>;
  int pairs = 0;
  error = prepare<kKernel, Tile>(device, pairs);
  if (error != cudaSuccess) return error;
  const int most_blocks = std::min(limits.multiprocessors, p.max_blocks);
  const TurnShape shape = choose_turn_shape<Tile>(p, most_blocks, pairs);
  const int cluster = shape.blocks();
  int64_t heads_at_once = 0;
  params.order = tile_order(p, shape, Tile::kBlockQ, limits.l2_bytes, most_blocks, heads_at_once);
  // The first tiles want the segments of all their heads one after the other. Where that takes
  // long, ranks that bring unequal parts fall out of step, and several read one owner while nobody
  // reads another: of a head at a time, they come to all owners again and again.
  error = add_sources<Tile>(p, much ? 1 : heads_at_once, params);
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
  // Away from 0, so that a masked score (-inf) times it is -inf. Queries carry the sign.
  params.scale_log2 = std::max(std::fabs(p.scale) * kLog2E, FLT_MIN);
  params.negative_scale = p.scale < 0.0f;
  params.fold = p.fold;

  // Who has no tile left to take can bring keys.
  const int bringers = static_cast<int>(
      std::min<int64_t>(most_blocks, ceil_div(params.bring.pieces, cluster) * cluster));
  const int blocks = std::max(std::min(most_blocks, params.order.turns * cluster), bringers);
  if constexpr (params.kBringing) order_last_turns<Tile>(p, much, blocks, params);
  std::array<cudaLaunchAttribute, 2> attributes;
  const bool early = params.kBringing && p.bringing.follows_staging;
  cudaLaunchConfig_t config = launch_config<Tile>(blocks, cluster, early, attributes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kKernel, params);
}

/// Which tiles a call takes, of head dimensions from 65 to 128.
inline cudaError_t choose_tile_size(const BlockAttentionParams& p, bool& small) {
  small = p.tile_rows == kSmallTile.rows;
  if (p.tile_rows != 0 || p.num_queries == 0 || has_many_tiles(p)) return cudaSuccess;
  int device = 0;
  DeviceLimits limits;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = device_limits(device, limits);
  if (error != cudaSuccess) return error;
  std::vector<int> kind = kind_of(p);
  kind.insert(kind.end(), {limits.multiprocessors, limits.l2_bytes});
  static thread_local LatestKinds<bool> known;
  small = known.find(std::move(kind), [&] {
    return small_tiles_are_faster(p, limits.l2_bytes, limits.multiprocessors);
  });
  return cudaSuccess;
}

template <typename Element, int kHeadDim>
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  const bool much = brings_much(p);
  const auto launch = [&](auto tile) {
    using Tile = decltype(tile);
    return p.num_segments == 1 && p.bringing.failed == nullptr
               ? launch_segmented<Element, Tile, 1>(p, much, stream)
               : launch_segmented<Element, Tile, kMaxSegments>(p, much, stream);
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
    if (!much) return small ? launch(SmallTile128{}) : launch(Tile128{});
    const auto launch_bringing = [&](auto tile) {
      return launch_segmented<Element, decltype(tile), kMaxSegments>(p, much, stream);
    };
    return small ? launch_bringing(SmallTile128WithRoom{}) : launch_bringing(Tile128WithRoom{});
  } else {
    return launch(Tile256{});
  }
}

}  // namespace ringattn::cuda::sm90
