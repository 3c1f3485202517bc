// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <climits>
#include <cstdint>
#include <type_traits>

#include "attention/cuda/sm90/epilogue.cuh"
#include "attention/cuda/sm90/kernel_params.h"
#include "attention/cuda/sm90/products.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/named_barrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/recompute_scores.cuh"
#include "attention/cuda/sm90/softmax.cuh"
#include "attention/cuda/sm90/tile.cuh"
#include "attention/cuda/softcap.cuh"
#include "peer_sync/memory_order.cuh"

// The consumer of general variants, in which each row sees a range of a segment's keys. Of the
// tiles that the work tile walks, those above and below the rows of one consumer are of no use to
// it. It skips them, in every segment:
//
//   tiles of a segment, last first   | above | masked ... | unmasked ... | masked ... | below |
//   the consumer                     | skip  | attend     | attend       | attend     | skip  |
//
// Values of a tile are multiplied under the scores of the next one. Before tiles that are skipped
// nothing is next, so they are multiplied alone. So are those of tiles far from the keys of some
// rows (two documents, rows of two pieces of a sequence): the product of a probability 0 and a NaN
// must not reach these rows. Tiles that no row sees lie between them, and are skipped.
//
// With a single segment, maxima are looked for above unmasked tiles alone, and the lowest and the
// highest tile are computed in part if rows see no more. Values of the highest are multiplied in
// part only where the tile below is masked. With several, that costs more than it saves.

namespace ringattn::cuda::sm90 {

/// Keys [kBegin, kEnd) of a tile, of which scores are computed. The probabilities of others are 0.
template <int kBegin_, int kEnd>
struct PartOfTile {
  static constexpr int kBegin = kBegin_, kKeys = kEnd - kBegin;
  static constexpr int kOffset = kBegin * kColumnBlockPitch;  // bytes
  static_assert(kBegin % 8 == 0);                             // a row of the swizzle
};

/// A consumer warpgroup of a general variant: `consume` (block_attention_kernel.cuh), with tiles
/// that are skipped and masked at both ends.
template <typename Element, typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ void consume_intervals(const SegmentedParams<kSegments, kVariant>& p,
                                                  const SharedMemory<Tile>& shared, int consumer) {
  const bool is_first_thread = threadIdx.x % kWarpgroupSize == 0;
  const bool is_first_lane = threadIdx.x % 32 == 0;
  // Within the tile. Computed again in each use: registers are few.
  const auto lane_row_of = [consumer] {
    uint32_t thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return static_cast<int>(consumer * kConsumerRows + thread % kWarpgroupSize / 32 * 16 +
                            thread % 32 / 4);
  };
  const uint32_t queries = shared.queries(consumer);
  const int own_barrier = kWarpgroupBarrier + consumer;

  // Ping-pong, as in `consume`: every consumer has a turn for every tile, also one that it skips.
  constexpr int kPingPongThreads = 2 * kWarpgroupSize;
  const int own_ping_pong = kPingPongBarrier + consumer;
  const int next_ping_pong = kPingPongBarrier + (consumer + 1) % Tile::kConsumers;
  if (consumer == 0) named_barrier_arrive(own_ping_pong, kPingPongThreads);

  RingPosition<Tile::kKeyStages> keys_at;
  RingPosition<Tile::kValueStages> values_at;
  uint32_t queries_parity = 0;
  const auto free_keys = [&] {
    __syncwarp();
    if (is_first_lane) arrive(shared.free(kKeys, keys_at.stage));
    keys_at.advance();
  };
  const auto free_values = [&] {
    if (is_first_thread) arrive(shared.free(kValues, values_at.stage));
    values_at.advance();
  };
  /// Tiles are freed after the ping-pong barrier, where all warps wait: a warp that came later
  /// would miss the phase of a buffer that is full again. No values may be pending.
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
  constexpr bool kLooksAtEnds = kSegments == 1;
  constexpr int kPart = kLooksAtEnds ? kPartKeys<Tile> : Tile::kBlockK;
  constexpr PartOfTile<0, Tile::kBlockK> kAllKeys;
  constexpr PartOfTile<0, kPart> kFirstKeys;
  constexpr PartOfTile<Tile::kBlockK - kPart, Tile::kBlockK> kLastKeys;
  const auto cap = [&]<int kScores>(float(&scores)[kScores]) {
    if constexpr (p.kSoftcap) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) {
        scores[i] = tanh_by_exp2(p.softcap_inner * scores[i]);
      }
    }
  };

  for (;;) {
    wait(shared.queries_full(consumer), queries_parity);
    QueryTile tile = shared.tile(consumer, queries_parity);
    uint32_t segments = shared.segments(consumer, queries_parity);  // not yet come to
    if (!tile.exists()) break;
    const bool sees_keys = segments != 0;
    float sink = 0.0f;
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
      rows.finish(p, tile, tile.first_row + lane_row_of(), softmax, failed, sink);
      // From here on all threads may overwrite the previous results, and these queries.
      named_barrier_wait(own_barrier, kWarpgroupSize);
    };
    if (p.fold) prefetch_lse(p, tile, tile.first_row + lane_row_of());
    /// Not where results leave through the memory of the queries.
    const auto free_queries = [&] {
      sink = shared.sink(consumer, queries_parity);
      __syncwarp();  // all lanes have read the tile
      if (is_first_lane &&
          (!sees_keys || Tile::kSeparateOut || !goes_through_shared<Tile>(p, tile))) {
        arrive(shared.queries_free(consumer));
      }
    };

    // The tile is read again where it is needed, until the queries are free: registers are few.
    const auto rows_see = [&](int segment, KeyRange(&seen)[2]) {
      load_ranges(p.keys[segment], shared.tile(consumer, queries_parity), lane_row_of(), seen);
    };
    const auto first_key = [&](int key_tile) {
      return (kSegments == 1 ? shared.origin(consumer, queries_parity) : 0) +
             key_tile * Tile::kBlockK;
    };
    uint32_t probabilities[Tile::kBlockK / 4];
    bool values_pending = false;  // those of the latest tile have not been multiplied yet
    int between = 0;              // tiles to skip, of which these rows see nothing
    if (sees_keys && p.negative_scale) negate_queries<Tile>(queries, own_barrier);
#pragma unroll 1
    for (; segments != 0; segments = kSegments == 1 ? 0 : segments & (segments - 1)) {
      const int segment = first_segment<kSegments>(segments);
      ConsumerTiles visible;
      if (kSegments == 1 || segments == shared.segments(consumer, queries_parity)) {
        visible = shared.first_tiles(consumer, queries_parity);
      } else {
        const QueryTile at = shared.tile(consumer, queries_parity);
        const KeyBounds& keys = p.keys[segment];
        visible =
            consumer_tiles<Tile>(visible_keys(keys, at).some, consumer_keys(keys, at, consumer));
      }
      const KeyTiles& own = visible.own;
      // No NaN of a value may reach a row that sees nothing of this segment, and may see others.
      // (Of a single segment, such a row is cleared.)
      if (kSegments > 1 && visible.disjoint) {
        const QueryTile at = shared.tile(consumer, queries_parity);
        const int first_row = at.first_row + consumer * kConsumerRows + threadIdx.x % 32;
        bool sees_nothing = false;
#pragma unroll
        for (int i = 0; i < kConsumerRows; i += 32) {
          const KeyRange seen = p.keys[segment].range(min(first_row + i, at.rows_end - 1));
          sees_nothing |= seen.begin >= seen.end;
        }
        if (__any_sync(0xffffffff, sees_nothing)) visible.near_end = 0;
      }

      // A tile of keys behind skipped ones: there is nothing to overlap it with.
      const auto attend_first = [&](int key_tile, auto part) {
        KeyRange seen[2];
        rows_see(segment, seen);
        float scores[part.kKeys / 2];
        wait(shared.full(kKeys, keys_at.stage), keys_at.parity);
        named_barrier_wait(own_ping_pong, kPingPongThreads);
        issue_scores<Element, Tile>(scores, queries,
                                    shared.buffer(kKeys, keys_at.stage) + part.kOffset);
        wait_for_products<0>();
        named_barrier_arrive(next_ping_pong, kPingPongThreads);
        free_keys();
        cap(scores);
        mask_scores(scores, p.keys[segment], seen, first_key(key_tile) + part.kBegin);
        softmax.exponentiate(scores, p.softmax_scale());
        round_probabilities<Element, part.kBegin / 4>(scores, probabilities);
        scale_accumulators(out, softmax.decay);
      };

      // Scores of this tile of keys, and values of the previous one.
      //   masked        whether some row may not see it wholly
      //   finds_maxima  whether the largest scores are looked for
      const auto attend = [&](int key_tile, auto masked, auto finds_maxima, auto part) {
        constexpr bool kFindsMaxima = decltype(finds_maxima)::value;
        KeyRange seen[2];
        if constexpr (decltype(masked)::value) {
          rows_see(segment, seen);
        }
        float scores[part.kKeys / 2];
        const uint32_t keys = shared.buffer(kKeys, keys_at.stage) + part.kOffset;
        wait(shared.full(kKeys, keys_at.stage), keys_at.parity);
        named_barrier_wait(own_ping_pong, kPingPongThreads);
        issue_scores<Element, Tile>(scores, queries, keys);
        wait(shared.full(kValues, values_at.stage), values_at.parity);
        const uint32_t values = shared.buffer(kValues, values_at.stage);
        // Read again, as the tile is: no register holds the flag meanwhile.
        if (kLooksAtEnds && kFindsMaxima && key_tile == own.end - 2 &&
            shared.first_tiles(consumer, queries_parity).ends_early) {
          issue_values<Element, Tile, 0, kPart / 16>(out, probabilities, values);
        } else {
          issue_values<Element, Tile>(out, probabilities, values);
        }
        named_barrier_arrive(next_ping_pong, kPingPongThreads);
        wait_for_products<1>();

        cap(scores);
        if constexpr (decltype(masked)::value) {
          mask_scores(scores, p.keys[segment], seen, first_key(key_tile) + part.kBegin);
        }
        if constexpr (kFindsMaxima) {
          softmax.exponentiate(scores, p.softmax_scale());
          wait_for_products<0>();
          free_values();
          round_probabilities<Element, part.kBegin / 4>(scores, probabilities);
          scale_accumulators(out, softmax.decay);
        } else {
          RowPair sums = softmax.exponentiate_untested(scores, p.softmax_scale());
          wait_for_products<0>();
          free_values();
          if (__any_sync(0xffffffff, softmax.has_risen(sums))) {
            const RowFlags overflowed = OnlineSoftmax::overflowed(sums);
            if (__any_sync(0xffffffff, overflowed[0] || overflowed[1])) {
              recompute_scores<Element, Tile::kHeadDim>(
                  scores, overflowed, queries, Tile::kQueryBlockBytes, keys, Tile::kKeyBlockBytes);
              if constexpr (p.kSoftcap) {
#pragma unroll
                for (int i = 0; i < part.kKeys / 2; ++i) {
                  if (overflowed[i / 2 % 2]) scores[i] = tanh_by_exp2(p.softcap_inner * scores[i]);
                }
              }
              if constexpr (decltype(masked)::value) {
                rows_see(segment, seen);
                mask_scores(scores, p.keys[segment], seen, first_key(key_tile) + part.kBegin,
                            overflowed);
              }
              softmax.restart(scores, sums, overflowed, p.softmax_scale());
              scale_accumulators(out, softmax.decay);
            }
            softmax.recentre(scores, sums, out, p.softmax_scale());
          }
          softmax.add(sums);
          round_probabilities<Element, part.kBegin / 4>(scores, probabilities);
        }
        free_keys();
      };

      /// A tile in a gap between the keys of some rows and those of others. A row that sees a tile
      /// also sees those below it down to its first key, of which the table need not be asked.
      int seen_from = INT_MAX;
      const auto is_unseen = [&](int key_tile) {
        if (key_tile >= seen_from) return false;
        const QueryTile at = shared.tile(consumer, queries_parity);
        const int first_row = at.first_row + consumer * kConsumerRows + threadIdx.x % 32;
        const int begin = first_key(key_tile);
        int lowest = INT_MAX;
#pragma unroll
        for (int i = 0; i < kConsumerRows; i += 32) {
          const KeyRange seen = p.keys[segment].range(min(first_row + i, at.rows_end - 1));
          if (seen.meets(begin, begin + Tile::kBlockK)) lowest = min(lowest, seen.begin);
        }
        seen_from = (__reduce_min_sync(0xffffffff, lowest) - first_key(0)) / Tile::kBlockK;
        return key_tile < seen_from;
      };
      /// Values of the latest tile, where some rows see no key near it.
      const auto add_apart = [&](int key_tile) {
        wait(shared.full(kValues, values_at.stage), values_at.parity);
        add_values_to_rows<Element>(out, probabilities, shared.buffer(kValues, values_at.stage),
                                    Tile::kKeyBlockBytes, [&] {
                                      KeyRange seen[2];
                                      rows_see(segment, seen);
                                      const int begin = first_key(key_tile);
                                      RowFlags sees;
#pragma unroll
                                      for (int half = 0; half < 2; ++half) {
                                        const KeyRange keys = p.keys[segment].clamped(seen[half]);
                                        sees.of[half] = keys.meets(begin, begin + Tile::kBlockK);
                                      }
                                      return sees;
                                    });
        free_values();
      };

      between += visible.above;
      int key_tile = own.end - 1;
#pragma unroll 1
      while (key_tile >= own.begin) {
        const bool near = key_tile >= visible.near_begin && key_tile < visible.near_end;
        if (!near && is_unseen(key_tile)) {
          ++between;
          --key_tile;
        } else if (!near || between > 0 || !values_pending) {
          if (values_pending) {
            wait(shared.full(kValues, values_at.stage), values_at.parity);
            issue_values<Element, Tile>(out, probabilities,
                                        shared.buffer(kValues, values_at.stage));
            wait_for_products<0>();
            free_values();
          }
          skip(between);
          between = 0;
          if (kLooksAtEnds && key_tile == own.end - 1 &&
              shared.first_tiles(consumer, queries_parity).ends_early) {
            attend_first(key_tile, kFirstKeys);
          } else {
            attend_first(key_tile, kAllKeys);
          }
          values_pending = near;
          if (!near) add_apart(key_tile);
          --key_tile;
        } else if (key_tile >= own.unmasked_end ||
                   (!kLooksAtEnds && key_tile < own.unmasked_begin)) {
          attend(key_tile, std::true_type{}, std::true_type{}, kAllKeys);
          --key_tile;
        } else if (kLooksAtEnds && key_tile < own.unmasked_begin) {
          if (key_tile == own.begin && shared.first_tiles(consumer, queries_parity).begins_late) {
            attend(key_tile, std::true_type{}, std::false_type{}, kLastKeys);
          } else {
            attend(key_tile, std::true_type{}, std::false_type{}, kAllKeys);
          }
          --key_tile;
        } else {
          // Without the tests above: unmasked tiles are near, and no others lie between them.
#pragma unroll 1
          for (; key_tile >= own.unmasked_begin; --key_tile) {
            attend(key_tile, std::false_type{}, std::false_type{}, kAllKeys);
          }
        }
      }
      between += visible.below;
    }

    if (values_pending) {
      wait(shared.full(kValues, values_at.stage), values_at.parity);
      const uint32_t values = shared.buffer(kValues, values_at.stage);
      // These are of the lowest tile: the first row sees it, where any values are pending.
      if (kLooksAtEnds && shared.first_tiles(consumer, queries_parity).begins_late) {
        issue_values<Element, Tile, kLastKeys.kBegin / 16>(out, probabilities, values);
      } else {
        issue_values<Element, Tile>(out, probabilities, values);
      }
      tile = shared.tile(consumer, queries_parity);
      free_queries();
      finish_rows();  // while the products run
      wait_for_products<0>();
      free_values();
      skip(between);
    } else {
      skip(between);
      free_queries();
      finish_rows();
      if (!sees_keys && none_final(p, tile)) rows.leave_states();
    }
    rows.clear_empty(out);

    if (sees_keys && goes_through_shared<Tile>(p, tile)) {
      store_through_shared<Element>(p, tile, shared, consumer, rows, out);
      if (!Tile::kSeparateOut && is_first_lane) {
        wait_for_stores_to_read();  // of this thread, if it has issued any
        arrive(shared.queries_free(consumer));
      }
    } else {
      // More loads in flight would spill at D 256.
      store_directly<Element, Tile, 8>(p, tile, rows, out);
    }
    queries_parity ^= 1;
  }
  if (is_first_thread) wait_for_stores_to_read();  // shared memory is freed with the thread block
}

}  // namespace ringattn::cuda::sm90
