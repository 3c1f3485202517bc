// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>

#include "attention/cuda/sm90/kernel_params.h"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/tile.cuh"
#include "peer_sync/dependent_launch.cuh"
#include "peer_sync/memory_order.cuh"
#include "peer_sync/peer_signals.cuh"
#include "peer_sync/spin_wait.cuh"

// Fetches keys from peers while the launch attends to others: one thread of every thread block
// takes chunk after chunk from one list, fetches it and counts it. A thread that needs a head's
// keys waits for their count, and so only for thread blocks that run. Of peers, the fetching thread
// waits for what they are staging already when this launch starts; only the last warp of all waits
// for what takes longer, that they have read this rank's block. (kernel_params.h: sizes;
// peer_sync/protocol.h: signals)

namespace ringattn::cuda::sm90 {

constexpr uint32_t kVectorBytes = 16;
/// The size of a chunk: what one thread fetches before it takes more.
template <typename Tile>
constexpr uint32_t kVectorsPerChunk = 8 * Tile::kFetchBufferBytes / kVectorBytes;

/// Segments that a loading thread knows to have arrived, one bit for each, for the KV heads of one
/// counter.
template <int kSegments>
struct KnownArrivals {
  static_assert(kSegments <= 32);
  uint32_t segments = 0;
  uint32_t heads = 0xffffffff;

  __device__ __forceinline__ void go_to(uint32_t next_heads) {
    if (next_heads != heads) segments = 0;
    heads = next_heads;
  }

  /// Waits until these heads of the segment have arrived.
  template <Variant kVariant>
  __device__ __forceinline__ void wait_for(const SegmentedParams<kSegments, kVariant>& p,
                                           int segment) {
    const RemoteSegment& remote = p.remote[segment];
    if (remote.from == nullptr || (segments >> segment & 1) != 0) return;
    wait_for_count(
        remote.arrivals + heads,
        p.fetch_order.heads_in(heads, p.fetch_order.heads_per_arrival) * remote.chunks_per_head);
    fence_async_global();
    segments |= 1u << segment;
  }
};

/// A part of a plane.
struct Chunk {
  const uint4* from;
  uint4* to;
  uint32_t bytes;
  uint32_t* arrival;  // its counter
};

template <typename Tile, int kSegments, Variant kVariant>
__device__ __forceinline__ Chunk chunk_at(const SegmentedParams<kSegments, kVariant>& p,
                                          uint32_t number) {
  const FetchOrder& fetch_order = p.fetch_order;
  const uint32_t group = number / fetch_order.chunks_per_group;
  const uint32_t heads = fetch_order.heads_in(group, fetch_order.heads_per_group);
  uint32_t in_group = number - group * fetch_order.chunks_per_group;
  int segment = 0;
  for (;; ++segment) {
    const uint32_t chunks = heads * p.remote[segment].chunks_per_head;
    if (in_group < chunks) break;
    in_group -= chunks;
  }
  const auto& remote = p.remote[segment];
  const uint32_t plane_in_group = in_group / remote.chunks_per_plane;
  const uint32_t in_plane = in_group - plane_in_group * remote.chunks_per_plane;
  const uint32_t plane =
      group * fetch_order.heads_per_group * fetch_order.planes_per_head + plane_in_group;
  if constexpr (p.kGeneral) {
    if (remote.parts != nullptr) {
      // Through L2: this launch may run beside the kernel before it. One integer at a time, because
      // this thread has few registers.
      const RemotePart* part = remote.parts + in_plane;
      Chunk chunk = {
          remote.from + int64_t{plane} * remote.from_pitch,
          remote.to + int64_t{plane} * remote.plane_vectors, 0,
          remote.arrivals + plane / fetch_order.planes_per_head / fetch_order.heads_per_arrival};
      chunk.from += __ldcg(&part->from) * remote.row_vectors;
      chunk.to += __ldcg(&part->to) * remote.row_vectors;
      chunk.bytes = __ldcg(&part->rows) * remote.row_vectors * kVectorBytes;
      return chunk;
    }
  }
  const uint32_t vector = in_plane * kVectorsPerChunk<Tile>;
  return {remote.from + int64_t{plane} * remote.from_pitch + vector,
          remote.to + int64_t{plane} * remote.plane_vectors + vector,
          min(remote.plane_vectors - vector, kVectorsPerChunk<Tile>) * kVectorBytes,
          remote.arrivals + plane / fetch_order.planes_per_head / fetch_order.heads_per_arrival};
}

/// The chunks that one thread fetches, through the fetch buffers in shared memory, as many copies
/// in flight as there are buffers.
template <typename Tile>
class FetchPipeline {
 public:
  __device__ __forceinline__ explicit FetchPipeline(const SharedMemory<Tile>& shared)
      : shared_(shared) {
    set_number(kNumCounted, 0);
    set_number(kStagedEnd, 0);
  }

  /// `between` is called before each copy.
  template <typename Between>
  __device__ __forceinline__ void fetch(const Chunk& chunk, const Between& between) {
    // Copies in flight belong to this chunk and the previous one.
#pragma unroll 1
    while (next_bytes_ > 0) store();
    set_next(chunk);
    if (left_ == 0) start_next();
    const auto* from = reinterpret_cast<const unsigned char*>(chunk.from);
#pragma unroll 1
    for (uint32_t left = chunk.bytes; left > 0;) {
      const uint32_t bytes = min(left, static_cast<uint32_t>(Tile::kFetchBufferBytes));
      left -= bytes;
      between();
      if (in_flight() == Tile::kFetchBuffers) store();
      const uint32_t full = shared_.fetch_buffer_full(sent_ % Tile::kFetchBuffers);
      arrive_expecting(full, bytes);
      load_bytes(shared_.fetch_buffer(sent_ % Tile::kFetchBuffers), from, bytes, full);
      ++sent_;
      from += bytes;
    }
  }

  __device__ __forceinline__ void drain() {
#pragma unroll 1
    while (in_flight() > 0) store();
    wait_for_stores<0>();
    if (uncounted()) count_stored();
  }

  /// Counts an arrived chunk. What the copy engine has stored is visible once its stores are
  /// complete.
  __device__ __forceinline__ void count(uint32_t* arrival) {
    add_release(arrival, 1);
    set_number(kNumCounted, number(kNumCounted) + 1);
  }
  __device__ __forceinline__ uint32_t num_counted() const { return number(kNumCounted); }

  /// Chunks before `end` are known to be staged by every peer.
  __device__ __forceinline__ void set_staged_end(uint32_t end) const {
    set_number(kStagedEnd, end);
  }
  __device__ __forceinline__ uint32_t staged_end() const { return number(kStagedEnd); }

 private:
  __device__ __forceinline__ uint32_t in_flight() const { return sent_ - stored_; }

  // Stores the oldest copy in flight.
  __device__ __forceinline__ void store() {
    wait(shared_.fetch_buffer_full(stored_ % Tile::kFetchBuffers),
         stored_ / Tile::kFetchBuffers % 2);
    const uint32_t bytes = min(left_, static_cast<uint32_t>(Tile::kFetchBufferBytes));
    store_bytes(to_, shared_.fetch_buffer(stored_ % Tile::kFetchBuffers), bytes);
    commit_stores();
    to_ += bytes;
    left_ -= bytes;
    // A chunk is counted a little after its last store, which is complete by then.
    ++stored_since_;
    if (uncounted() && (stored_since_ == kStoresBehind || left_ == 0)) {
      if (stored_since_ == kStoresBehind) {
        wait_for_stores<kStoresBehind>();
      } else {
        wait_for_stores<1>();
      }
      count_stored();
    }
    if (left_ == 0) {
      set_pointer(kUncountedArrival, pointer<uint32_t>(kStoringArrival));
      stored_since_ = 0;
      start_next();
    }
    wait_for_stores_to_read();
    ++stored_;
  }

  // Whether the last stored chunk has not been counted yet.
  __device__ __forceinline__ bool uncounted() const { return stored_since_ >= 0; }
  __device__ __forceinline__ void count_stored() {
    count(pointer<uint32_t>(kUncountedArrival));
    stored_since_ = kNoneStored;
  }

  __device__ __forceinline__ void set_next(const Chunk& chunk) {
    set_pointer(kNextTo, chunk.to);
    set_pointer(kNextArrival, chunk.arrival);
    next_bytes_ = chunk.bytes;
  }
  __device__ __forceinline__ void start_next() {
    set_pointer(kStoringArrival, pointer<uint32_t>(kNextArrival));
    to_ = pointer<unsigned char>(kNextTo);
    left_ = next_bytes_;
    next_bytes_ = 0;
  }

  // In shared memory, since registers are few: the destination of the next chunk, the counters of
  // the next chunk, of the one that is being stored and of the one before that, and two numbers.
  enum Field { kNextTo, kNextArrival, kStoringArrival, kUncountedArrival, kNumCounted, kStagedEnd };
  static_assert(8 * (kStagedEnd + 1) <= Tile::kFetchStateBytes);
  __device__ __forceinline__ uint32_t at(Field i) const { return shared_.fetch_state() + 8 * i; }
  __device__ __forceinline__ void set_pointer(Field i, const void* value) const {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(at(i)), "l"(value) : "memory");
  }
  template <typename T>
  __device__ __forceinline__ T* pointer(Field i) const {
    T* value;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(at(i)) : "memory");
    return value;
  }
  __device__ __forceinline__ void set_number(Field i, uint32_t value) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at(i)), "r"(value) : "memory");
  }
  __device__ __forceinline__ uint32_t number(Field i) const {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at(i)) : "memory");
    return value;
  }

  static constexpr int kStoresBehind = 2;
  static constexpr int kNoneStored = INT_MIN;
  const SharedMemory<Tile>& shared_;
  uint32_t sent_ = 0, stored_ = 0;  // copies into and out of fetch buffers
  unsigned char* to_ = nullptr;     // destination of the next store
  uint32_t left_ = 0;               // bytes of the chunk that is being stored
  uint32_t next_bytes_ = 0;         // bytes of the chunk after it, if it has been started
  int stored_since_ = kNoneStored;  // stores after a chunk that has not been counted yet
};

/// Fetches all chunks, by one thread of every thread block. `between` is called first, before each
/// copy and before each poll.
template <typename Tile, int kSegments, Variant kVariant, typename Between>
__device__ __forceinline__ void fetch_chunks(const SegmentedParams<kSegments, kVariant>& p,
                                             const SharedMemory<Tile>& shared,
                                             const Between& between) {
  const RemoteFetch& remote_fetch = p.remote_fetch;
  between();
  if (blockIdx.x == 0 && remote_fetch.signals.phase != nullptr) {
    store_relaxed_system(remote_fetch.signals.phase, remote_fetch.signals.phase_working);
  }
  uint32_t* const taken = remote_fetch.scratch.data + LaunchScratch::kChunksTaken;
  FetchPipeline<Tile> pipeline(shared);
  uint32_t number = atomicAdd(taken, 1), failed = load_relaxed_system(remote_fetch.failed);
  while (number < p.fetch_order.chunks) {
    if (number >= pipeline.staged_end()) {
      pipeline.drain();  // a waiting thread keeps no chunk from the others
      const FetchOrder& fetch_order = p.fetch_order;
      const uint32_t group = number / fetch_order.chunks_per_group;
      const uint32_t wanted =
          min((group + 1) * fetch_order.heads_per_group, fetch_order.num_kv_heads);
      const uint32_t heads = wait_until_staged(remote_fetch, wanted, between);
      fence_async_global();
      pipeline.set_staged_end(heads >= fetch_order.num_kv_heads
                                  ? fetch_order.chunks
                                  : heads / fetch_order.heads_per_group *
                                        fetch_order.chunks_per_group);
      failed = load_relaxed_system(remote_fetch.failed);
    }
    // Both arrive while the chunk is fetched.
    const uint32_t next = atomicAdd(taken, 1);
    const uint32_t next_failed = load_relaxed_system(remote_fetch.failed);
    if (remote_fetch.delay_seed != 0) {
      const uint32_t random = (number ^ remote_fetch.delay_seed) * 2654435761u;
      if (random >> 30 == 0) __nanosleep(random >> 14 & 0x7fff);
    }
    const Chunk chunk = chunk_at<Tile>(p, number);
    if (failed == 0) {
      pipeline.fetch(chunk, between);
    } else {
      pipeline.count(chunk.arrival);  // not read: the owner and its memory may be gone
    }
    number = next;
    failed = next_failed;
  }
  pipeline.drain();
  // Added only now, when no chunk is left to take: the other thread blocks are as far.
  const uint32_t counted = pipeline.num_counted();
  bool is_last = p.fetch_order.chunks == 0 && blockIdx.x == 0;
  if (counted > 0) {
    uint32_t* const total = remote_fetch.scratch.data + LaunchScratch::kChunksFetched;
    is_last = add_acquire_release(total, counted) + counted == p.fetch_order.chunks;
  }
  if (is_last) {
    wait_until_staged(remote_fetch, p.fetch_order.num_kv_heads, between);
    wait_until_mirrored(remote_fetch, /*first=*/0, /*threads=*/1, between);
    clear_staged_and_signal_read(remote_fetch, /*first=*/0, /*threads=*/1);
  }
}

/// Called by the last `warps` producer warps of each thread block when they are done. The last warp
/// of all resets the scratch and waits for the peers.
template <int kSegments, Variant kVariant>
__device__ __forceinline__ void finish_launch(const SegmentedParams<kSegments, kVariant>& p,
                                              uint32_t warps) {
  const LaunchScratch& scratch = p.remote_fetch.scratch;
  if (scratch.data == nullptr) return;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  if (lane == 0) before = add_acquire_release(scratch.data + LaunchScratch::kWarpsDone, 1);
  if (__shfl_sync(0xffffffff, before, 0) != warps * gridDim.x - 1) return;
  if (lane < LaunchScratch::kFirstArrival) scratch.data[lane] = 0;
  if constexpr (p.kFetches) {
    for (int i = lane; i < scratch.num_arrivals; i += 32) scratch.arrivals()[i] = 0;
    // This thread block's cluster stays for it, on one SM or two; other launches have the rest.
    wait_until_read(p.remote_fetch);
    wait_for_previous_kernel();  // so that what follows this launch also follows that kernel
  }
}

}  // namespace ringattn::cuda::sm90
