// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "attention/cuda/sm90/epilogue.cuh"
#include "attention/cuda/sm90/interval_consumer.cuh"
#include "attention/cuda/sm90/kernel_params.h"
#include "attention/cuda/sm90/producer.cuh"
#include "attention/cuda/sm90/products.cuh"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/registers.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/recompute_scores.cuh"
#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/sm90/tile.cuh"

// Block attention for Hopper, after FlashAttention-3 (Shah et al., arXiv:2407.08608). The kernel is
// persistent: one thread block on each SM. Its first warpgroup, the producer, copies; each consumer
// warpgroup keeps 64 query rows and processes the keys in tiles of kBlockK, last tile first, so
// that the tiles under the mask come first. The scores of tile j and the values of tile j + 1 are
// issued together; the softmax of tile j runs under the products of the other consumers
// (ping-pong):
//
//   consumer 0   q k(j), p v(j+1) | softmax(j) ........... | q k(j-1), p v(j) | softmax(j-1)
//   consumer 1   ... softmax(j+1) | q k(j), p v(j+1)       | softmax(j) ..... | q k(j-1), p v(j)
//   copies       k(j-1)  v(j)  k(j-2)  v(j-1) ...

namespace ringattn::cuda::sm90 {

/// A consumer warpgroup: attends its 64 rows of one query tile after the other.
template <typename Element, typename Tile, int kSegments>
__device__ __forceinline__ void consume(const SegmentedParams<kSegments, Variant::kDiagonal>& p,
                                        const SharedMemory<Tile>& shared, int consumer) {
  const bool is_first_thread = threadIdx.x % kWarpgroupSize == 0;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  const int lane_row = consumer * kConsumerRows + threadIdx.x % kWarpgroupSize / 32 * 16 +
                       threadIdx.x % 32 / 4;  // within the tile
  const uint32_t queries = shared.queries(consumer);
  const int own_barrier = kWarpgroupBarrier + consumer;

  // Ping-pong: for each tile of keys a consumer waits for its barrier, issues its products and
  // arrives at the next consumer's barrier, so that products run under another consumer's softmax.
  constexpr int kPingPongThreads = 2 * kWarpgroupSize;  // one consumer waits, another arrives
  const int own_ping_pong = kPingPongBarrier + consumer;
  const int next_ping_pong = kPingPongBarrier + (consumer + 1) % Tile::kConsumers;
  if (consumer == 0) named_barrier_arrive(own_ping_pong, kPingPongThreads);

  RingPosition<Tile::kKeyStages> keys_at;
  RingPosition<Tile::kValueStages> values_at;
  uint32_t queries_parity = 0;
  // Each warp for itself: it may have read keys outside the products of its warpgroup.
  const auto free_keys = [&] {
    __syncwarp();
    if (is_first_lane) arrive(shared.free(kKeys, keys_at.stage));
    keys_at.advance();
  };
  const auto free_values = [&] {
    if (is_first_thread) arrive(shared.free(kValues, values_at.stage));
    values_at.advance();
  };
  /// Skips tiles of keys that only other consumers attend. They are freed after the ping-pong
  /// barrier, where all warps wait: a warp that came later would miss the phase of a buffer that is
  /// full again.
  const auto skip = [&](int key_tiles) {
#pragma unroll 1
    for (; key_tiles > 0; --key_tiles) {
      wait(shared.full(kKeys, keys_at.stage), keys_at.parity);
      wait(shared.full(kValues, values_at.stage), values_at.parity);
      named_barrier_wait(own_ping_pong, kPingPongThreads);
      named_barrier_arrive(next_ping_pong, kPingPongThreads);
      free_keys();
      free_values();
    }
  };

  for (;;) {
    wait(shared.queries_full(consumer), queries_parity);
    QueryTile tile = shared.tile(consumer, queries_parity);
    int segment;
    VisibleTiles visible = shared.first_visible(consumer, queries_parity, segment);
    if (!tile.exists()) break;
    const int first_row = tile.first_row + consumer * kConsumerRows;
    float out[Tile::kHeadDim / 2] = {};
    OnlineSoftmax softmax;
    RowResults rows;
    const auto finish_rows = [&] {
      bool failed = false;
      if constexpr (p.kFetches) {
        failed =
            p.remote_fetch.failed != nullptr && load_relaxed_system(p.remote_fetch.failed) != 0;
      }
      if (is_first_thread) wait_for_stores_to_read();  // of the previous tile
      rows.finish(p, tile, tile.first_row + lane_row, softmax, failed);
      // From here on all threads may overwrite the previous results, and these queries.
      named_barrier_wait(own_barrier, kWarpgroupSize);
    };
    if (p.fold) prefetch_lse(p, tile, tile.first_row + lane_row);
    const bool sees_keys = segment < p.num_segments;
    /// Not where results leave through the memory of the queries.
    const auto free_queries = [&] {
      __syncwarp();  // all lanes have read the tile
      if (is_first_lane &&
          (!sees_keys || Tile::kSeparateOut || !goes_through_shared<Tile>(p, tile))) {
        arrive(shared.queries_free(consumer));
      }
    };
    if (sees_keys && first_row < tile.rows_end) {
      uint32_t probabilities[Tile::kBlockK / 4];
      if (p.negative_scale) negate_queries<Tile>(queries, own_barrier);

      const auto mask = [&](float(&scores)[Tile::kBlockK / 2], int key_tile) {
        const int first_key = key_tile * Tile::kBlockK;
        mask_scores(scores, tile.first_row + lane_row + p.keys[segment].diagonal - first_key,
                    p.keys[segment].num_keys - first_key);
      };

      // The first tile of keys: there is nothing to overlap it with.
      int key_tile = max(visible.own, 1) - 1;
      skip(visible.tiles - 1 - key_tile);
      {
        float scores[Tile::kBlockK / 2];
        wait(shared.full(kKeys, keys_at.stage), keys_at.parity);
        named_barrier_wait(own_ping_pong, kPingPongThreads);
        issue_scores<Element, Tile>(scores, queries, shared.buffer(kKeys, keys_at.stage));
        wait_for_products<0>();
        named_barrier_arrive(next_ping_pong, kPingPongThreads);
        free_keys();
        if (key_tile >= visible.unmasked) mask(scores, key_tile);
        softmax.exponentiate(scores, p.scale_log2);
        round_probabilities<Element>(scores, probabilities);
        --key_tile;
      }

      // Scores of this tile of keys, and values of the previous one.
      const auto attend = [&](int key_tile, auto masked) {
        float scores[Tile::kBlockK / 2];
        const uint32_t keys = shared.buffer(kKeys, keys_at.stage);
        wait(shared.full(kKeys, keys_at.stage), keys_at.parity);
        named_barrier_wait(own_ping_pong, kPingPongThreads);
        issue_scores<Element, Tile>(scores, queries, keys);
        wait(shared.full(kValues, values_at.stage), values_at.parity);
        issue_values<Element, Tile>(out, probabilities, shared.buffer(kValues, values_at.stage));
        named_barrier_arrive(next_ping_pong, kPingPongThreads);
        wait_for_products<1>();

        if constexpr (decltype(masked)::value) {
          mask(scores, key_tile);
          softmax.exponentiate(scores, p.scale_log2);
          wait_for_products<0>();
          free_values();
          round_probabilities<Element>(scores, probabilities);
          scale_accumulators(out, softmax.decay);
        } else {
          RowPair sums = softmax.exponentiate_untested(scores, p.scale_log2);
          wait_for_products<0>();
          free_values();
          if (__any_sync(0xffffffff, softmax.has_risen(sums))) {
            const RowFlags overflowed = OnlineSoftmax::overflowed(sums);
            if (__any_sync(0xffffffff, overflowed[0] || overflowed[1])) {
              recompute_scores<Element, Tile::kHeadDim>(
                  scores, overflowed, queries, Tile::kQueryBlockBytes, keys, Tile::kKeyBlockBytes);
              softmax.restart(scores, sums, overflowed, p.scale_log2);
              scale_accumulators(out, softmax.decay);
            }
            softmax.recentre(scores, sums, out, p.scale_log2);
          }
          softmax.add(sums);
          round_probabilities<Element>(scores, probabilities);
        }
        free_keys();
      };
      for (;;) {
#pragma unroll 1
        for (; key_tile >= visible.unmasked; --key_tile) attend(key_tile, std::true_type{});
#pragma unroll 1
        for (; key_tile >= 0; --key_tile) attend(key_tile, std::false_type{});
        if constexpr (kSegments == 1) break;
        segment = visible_segment<Tile>(p, tile, segment + 1);
        if (segment == p.num_segments) break;
        visible = visible_tiles<Tile>(p.keys[segment], tile, first_row);
        key_tile = visible.tiles - 1;
      }

      tile = shared.tile(consumer, queries_parity);  // read again: it need not stay in registers
      free_queries();
      wait(shared.full(kValues, values_at.stage), values_at.parity);
      issue_values<Element, Tile>(out, probabilities, shared.buffer(kValues, values_at.stage));
      finish_rows();  // while the products run
      wait_for_products<0>();
      free_values();
      rows.clear_empty(out);
    } else {
      for (; segment < p.num_segments; ++segment) {
        skip(visible_key_tiles<Tile>(p.keys[segment], tile, tile.work_tile_end));
      }
      free_queries();
      finish_rows();
    }

    if (sees_keys && goes_through_shared<Tile>(p, tile)) {
      store_through_shared<Element>(p, tile, shared, consumer, rows, out);
      if (!Tile::kSeparateOut && is_first_lane) {
        wait_for_stores_to_read();  // of this thread, if it has issued any
        arrive(shared.queries_free(consumer));
      }
    } else {
      store_directly<Element, Tile>(p, tile, rows, out);
    }
    queries_parity ^= 1;
  }
  if (is_first_thread) wait_for_stores_to_read();  // shared memory is freed with the thread block
}

template <typename Element, typename Tile, int kSegments, Variant kVariant>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    block_attention_kernel(const __grid_constant__ SegmentedParams<kSegments, kVariant> p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const SharedMemory<Tile> shared(dynamic_shared);
  // The shuffle tells the compiler that it is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroupSize, 0);

  if (threadIdx.x == 0) shared.init_barriers();
  if (cluster_size() > 1) {
    cluster_barrier();
  } else {
    __syncthreads();
  }

  if (warpgroup == 0) {
    release_registers<Tile::kCopyRegisters>();
    copy<Tile>(p, shared);
  } else {
    take_registers<Tile::kConsumerRegisters>();
    if constexpr (p.kGeneral) {
      consume_intervals<Element, Tile>(p, shared, warpgroup - 1);
    } else {
      consume<Element, Tile>(p, shared, warpgroup - 1);
    }
  }
  // Shared memory is freed with the thread block, and the other thread block may still arrive
  // there.
  if (cluster_size() > 1) cluster_barrier();
}

}  // namespace ringattn::cuda::sm90
