// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>

#include "attention/cuda/exchange_partials.h"
#include "attention/cuda/merge_row.cuh"
#include "core/ceil_div.h"
#include "peer_sync/dependent_launch.cuh"
#include "peer_sync/launch.cuh"
#include "peer_sync/memory_order.cuh"
#include "peer_sync/spin_wait.cuh"

// One kernel gives a rank's partial to all ranks and merges those of all ranks. The protocol is in
// peer_sync/partial_exchange.h.

namespace ringattn::cuda {

constexpr int kExchangeWarps = 4;  // rows that a thread block merges at a time
constexpr int kExchangeThreads = kExchangeWarps * kWarpSize;
static_assert(PartialExchange::kMaxRanks <= kWarpSize);

struct ExchangeLaunch : ExchangePartialsParams {
  int32_t num_rows = 0;        // B * S_q * H
  int32_t rows_per_chunk = 0;  // the same on all ranks, whatever their devices are
  int32_t num_chunks = 0;      // at least 1: ranks without rows wait for each other, too
};

/// A row of `out`, and where its lse is.
struct ExchangedRow {
  int32_t batch, query, head;

  __device__ ExchangedRow(const ExchangeLaunch& p, int32_t row)
      : batch(row / (p.num_queries * p.num_heads)),
        query(row / p.num_heads % p.num_queries),
        head(row % p.num_heads) {}
  __device__ int64_t lse(const ExchangeLaunch& p) const {
    return (int64_t{batch} * p.num_heads + head) * p.num_queries + query;
  }
};

/// Copies rows [begin, end) of this rank's partial to the slots that it has on all ranks.
__device__ __forceinline__ void give_rows(const ExchangeLaunch& p, uint32_t number, int32_t begin,
                                          int32_t end) {
  const PartialExchange& exchange = p.exchange;
  const int64_t slot = exchange.slot(number, exchange.rank);
  const int row_vectors = p.head_dim / 4;
  for (int32_t i = begin * row_vectors + threadIdx.x; i < end * row_vectors;
       i += kExchangeThreads) {
    const float4 x = reinterpret_cast<const float4*>(p.partial)[i];
    for (int rank = 0; rank < exchange.num_ranks; ++rank) {
      reinterpret_cast<float4*>(exchange.slots[rank] + slot)[i] = x;
    }
  }
  const int64_t first_lse = int64_t{p.num_rows} * p.head_dim;
  for (int32_t row = begin + threadIdx.x; row < end; row += kExchangeThreads) {
    const int64_t i = first_lse + ExchangedRow(p, row).lse(p);
    const float lse = p.partial[i];
    for (int rank = 0; rank < exchange.num_ranks; ++rank) exchange.slots[rank][slot + i] = lse;
  }
}

/// Whether a peer makes a ring in place of this exchange: it is staging, and its signal, which it
/// would have sent before, has not come.
__device__ __forceinline__ bool makes_a_ring(const PartialExchange& exchange, int peer,
                                             const uint64_t* signal, uint32_t number) {
  return load_acquire_system(exchange.staged_by_peer[peer]) != 0 &&
         number_of(load_acquire_system(signal)) != number;
}

/// Waits until a chunk of a peer has arrived. False: the group has failed, it will not come.
__device__ __forceinline__ bool wait_for_chunk(const ExchangeLaunch& p, int peer, uint32_t number,
                                               int32_t chunk) {
  // `failed` lies in the same memory as the signal: reading it each time would double the time
  // after which a signal is noticed.
  constexpr uint32_t kPollsPerLook = 16;
  static_assert(kPollsPerHostRead % kPollsPerLook == 0);
  const PartialExchange& exchange = p.exchange;
  const uint64_t* const signal =
      exchange.signals[exchange.rank] + exchange.signal(number, peer, chunk);
  uint64_t value;
  bool is_other_call = false;
#pragma unroll 1
  for (uint32_t polls = 1; number_of(value = load_acquire_system(signal)) != number; ++polls) {
    if (polls % kPollsPerLook != 0) continue;
    if (has_failed(exchange.failed, exchange.given_up, polls)) return false;
    if (polls % kPollsPerHostRead == 0) {
      is_other_call = makes_a_ring(exchange, peer, signal, number);
      if (is_other_call) break;
      store_relaxed_system(exchange.words + kLateChunks, p.num_chunks);
      store_relaxed_system(
          exchange.phase,
          exchange.phase_until_partial + exchange.phase_per_exchange * exchange_shown(number));
    }
    __nanosleep(64);
  }
  if (!is_other_call && tag_of(value) == exchange.tag) return true;
  if (set_if_zero(exchange.failed, kCallMismatch) == 0) {
    store_relaxed_system(exchange.mismatch, 1 + peer - (peer > exchange.rank ? 1 : 0));
  }
  return false;
}

/// Merges rows [begin, end) of the partials of all ranks; each row by one warp.
template <typename Out>
__device__ __forceinline__ void merge_rows(const ExchangeLaunch& p, uint32_t number, int32_t begin,
                                           int32_t end) {
  const PartialExchange& exchange = p.exchange;
  MergeStatesParams merge;
  merge.batch = p.batch;
  merge.num_queries = p.num_queries;
  merge.num_heads = p.num_heads;
  merge.head_dim = p.head_dim;
  float* const first = exchange.slots[exchange.rank] + exchange.slot(number, 0);
  merge.set_contiguous(p.out, p.lse, first, first + int64_t{p.num_rows} * p.head_dim);
  merge.next_state = merge.next_state_lse = PartialExchange::kSlotFloats;
  merge.num_states = exchange.num_ranks;
  for (int32_t row = begin + threadIdx.x / kWarpSize; row < end; row += kExchangeWarps) {
    const ExchangedRow at(p, row);
    merge_row<Out, 4>(merge, at.batch, at.query, at.head);
  }
}

/// Fills rows [begin, end) with NaN.
template <typename Out>
__device__ __forceinline__ void poison_rows(const ExchangeLaunch& p, int32_t begin, int32_t end) {
  for (int32_t i = begin * p.head_dim + threadIdx.x; i < end * p.head_dim; i += kExchangeThreads) {
    static_cast<Out*>(p.out)[i] = Out(NAN);
  }
  for (int32_t row = begin + threadIdx.x; row < end; row += kExchangeThreads) {
    p.lse[ExchangedRow(p, row).lse(p)] = NAN;
  }
}

template <typename Out>
__global__ void __launch_bounds__(kExchangeThreads, 1)
    exchange_partials_kernel(const __grid_constant__ ExchangeLaunch p) {
  const PartialExchange& exchange = p.exchange;
  wait_for_previous_kernel();
  const uint32_t number = load_relaxed_system(exchange.words + kNumber);
  const bool failed_before = load_relaxed_system(exchange.failed) != 0;
  const int thread = static_cast<int>(threadIdx.x);
  const bool has_peer = thread < exchange.num_ranks && thread != exchange.rank;

  for (int32_t chunk = blockIdx.x; chunk < p.num_chunks; chunk += gridDim.x) {
    const int32_t begin = chunk * p.rows_per_chunk;
    if (!failed_before) give_rows(p, number, begin, min(begin + p.rows_per_chunk, p.num_rows));
    if (exchange.delay_seed != 0 && thread == 0) {
      const uint32_t random = (chunk ^ exchange.delay_seed ^ number) * 2654435761u;
      if (random >> 30 == 0) __nanosleep(random >> 13 & 0x1ffff);
    }
    if (!__syncthreads_or(failed_before) && has_peer) {
      store_release_system(exchange.signals[thread] + exchange.signal(number, exchange.rank, chunk),
                           signal_value(number, exchange.tag));
    }
  }
  for (int32_t chunk = blockIdx.x; chunk < p.num_chunks; chunk += gridDim.x) {
    const int32_t begin = chunk * p.rows_per_chunk;
    const int32_t end = min(begin + p.rows_per_chunk, p.num_rows);
    const bool in_vain = failed_before || (has_peer && !wait_for_chunk(p, thread, number, chunk));
    if (__syncthreads_or(in_vain)) {
      poison_rows<Out>(p, begin, end);
    } else {
      merge_rows<Out>(p, number, begin, end);
    }
  }

  // The last thread block ends the exchange. What all threads have stored comes before.
  __syncthreads();
  uint32_t* const words = exchange.words;
  if (thread != 0 || add_acquire_release(words + kBlocksDone, 1) != gridDim.x - 1) return;
  if (load_relaxed_system(words + kLateChunks) != 0) {
    store_relaxed_system(words + kLateChunks, 0);
    store_relaxed_system(exchange.phase, exchange.phase_working);
  }
  store_relaxed_system(words + kBlocksDone, 0);
  store_relaxed_system(words + kNumber, next_exchange(number));
}

template <typename Out>
cudaError_t launch_exchange_partials(const ExchangePartialsParams& params, cudaStream_t stream) {
  const int64_t rows = int64_t{params.batch} * params.num_queries * params.num_heads;
  if (rows * (params.head_dim + 1) > PartialExchange::kSlotFloats) {
    return cudaErrorInvalidConfiguration;
  }
  int multiprocessors = 0;
  const cudaError_t error = count_multiprocessors(multiprocessors);
  if (error != cudaSuccess) return error;
  ExchangeLaunch p{params};
  p.num_rows = static_cast<int32_t>(rows);
  const int64_t rounds = ceil_div(rows, int64_t{kExchangeWarps} * kMaxPartialChunks);
  p.rows_per_chunk = static_cast<int32_t>(kExchangeWarps * std::max<int64_t>(rounds, 1));
  p.num_chunks = static_cast<int32_t>(std::max<int64_t>(ceil_div(rows, p.rows_per_chunk), 1));
  const int64_t blocks = std::min<int64_t>(
      {p.num_chunks, kMaxExchangeBlocks, num_copying_multiprocessors(multiprocessors)});
  return launch<exchange_partials_kernel<Out>>(p, blocks, kExchangeThreads, /*dependent=*/true,
                                               stream);
}

}  // namespace ringattn::cuda
