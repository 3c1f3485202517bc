// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <climits>

#include "attention/cuda/sm90/launch.h"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/tile.cuh"
#include "peer_sync/dependent_launch.cuh"
#include "peer_sync/memory_order.cuh"
#include "peer_sync/peer_signals.cuh"
#include "peer_sync/spin_wait.cuh"

// Keys that a launch brings from other devices while it attends to others: a thread of every block
// brings piece after piece, whoever is free the next one, and counts it; who needs a head's keys
// waits for their count, and so for nothing but thread blocks that run. Of other devices that
// thread waits for what is being staged there while this launch begins; for what takes longer, that
// they have read, only the last warp of all.

namespace ringattn::cuda::sm90 {

constexpr uint32_t kUnitBytes = 16;
/// Of a plane: what one thread brings before it asks for more.
template <typename Tile>
constexpr uint32_t kUnitsPerPiece = 8 * Tile::kParcelBytes / kUnitBytes;

/// What the copying thread knows to have arrived: of the KV heads counted together that it is at, a
/// bit for each segment.
template <int kSegments>
struct SeenArrivals {
  static_assert(kSegments <= 32);
  uint32_t segments = 0;
  uint32_t heads = 0xffffffff;

  __device__ __forceinline__ void go_to(uint32_t next_heads) {
    if (next_heads != heads) segments = 0;
    heads = next_heads;
  }

  /// Until these heads have arrived.
  __device__ __forceinline__ void wait_for(const SegmentedParams<kSegments>& p, int segment) {
    const BroughtKeys& keys = p.brought[segment];
    if (keys.from == nullptr || (segments >> segment & 1) != 0) return;
    wait_for_count(keys.arrivals + heads,
                   p.bring.heads_of(heads, p.bring.heads_per_arrival) * keys.pieces_per_head);
    fence_async_global();
    segments |= 1u << segment;
  }
};

/// A part of a plane: keys or values of a head of a batch entry.
struct Piece {
  const uint4* from;
  uint4* to;
  uint32_t bytes;
  uint32_t* arrival;  // counts it
};

template <typename Tile, int kSegments>
__device__ __forceinline__ Piece piece(const SegmentedParams<kSegments>& p, uint32_t number) {
  const BringOrder& bring = p.bring;
  const uint32_t slice = number / bring.pieces_per_slice;
  const uint32_t heads = bring.heads_of(slice, bring.heads_per_slice);
  uint32_t in_part = number - slice * bring.pieces_per_slice;
  int segment = 0;
  for (;; ++segment) {
    const uint32_t pieces = heads * p.brought[segment].pieces_per_head;
    if (in_part < pieces) break;
    in_part -= pieces;
  }
  const BroughtKeys& keys = p.brought[segment];
  const uint32_t plane_in_part = in_part / keys.pieces_per_plane;
  const uint32_t unit = (in_part - plane_in_part * keys.pieces_per_plane) * kUnitsPerPiece<Tile>;
  const uint32_t plane = slice * bring.heads_per_slice * bring.planes_per_head + plane_in_part;
  return {keys.from + int64_t{plane} * keys.from_pitch + unit,
          keys.to + int64_t{plane} * keys.plane_units + unit,
          min(keys.plane_units - unit, kUnitsPerPiece<Tile>) * kUnitBytes,
          keys.arrivals + plane / bring.planes_per_head / bring.heads_per_arrival};
}

/// Pieces that one thread brings, parcel by parcel through shared memory, as many under way as
/// there is room for.
template <typename Tile>
class Parcels {
 public:
  __device__ __forceinline__ explicit Parcels(const SharedMemory<Tile>& shared) : shared_(shared) {
    set_number(kCounted, 0);
    set_number(kStaged, 0);
  }

  /// `between` is called before each parcel.
  template <typename Between>
  __device__ __forceinline__ void bring(const Piece& piece, const Between& between) {
    // Parcels under way are of this piece and the one before.
#pragma unroll 1
    while (next_bytes_ > 0) store();
    note_next(piece);
    if (left_ == 0) go_to_next();
    const auto* from = reinterpret_cast<const unsigned char*>(piece.from);
#pragma unroll 1
    for (uint32_t left = piece.bytes; left > 0;) {
      const uint32_t bytes = min(left, static_cast<uint32_t>(Tile::kParcelBytes));
      left -= bytes;
      between();
      if (under_way() == Tile::kParcels) store();
      const uint32_t full = shared_.parcel_full(sent_ % Tile::kParcels);
      arrive_expecting(full, bytes);
      load_bytes(shared_.parcel(sent_ % Tile::kParcels), from, bytes, full);
      ++sent_;
      from += bytes;
    }
  }

  __device__ __forceinline__ void bring_all_the_rest() {
#pragma unroll 1
    while (under_way() > 0) store();
    wait_for_stores<0>();
    if (uncounted()) count_stored();
  }

  /// A piece has come. What the copy engine has stored is visible when it is known to be done.
  __device__ __forceinline__ void count(uint32_t* arrival) {
    add_release(arrival, 1);
    set_number(kCounted, number(kCounted) + 1);
  }
  __device__ __forceinline__ uint32_t counted() const { return number(kCounted); }

  /// Every peer has staged the pieces up to this one, as far as is known.
  __device__ __forceinline__ void set_staged(uint32_t end) const { set_number(kStaged, end); }
  __device__ __forceinline__ uint32_t staged() const { return number(kStaged); }

 private:
  __device__ __forceinline__ uint32_t under_way() const { return sent_ - stored_; }

  // The one that has been under way for longest.
  __device__ __forceinline__ void store() {
    wait(shared_.parcel_full(stored_ % Tile::kParcels), stored_ / Tile::kParcels % 2);
    const uint32_t bytes = min(left_, static_cast<uint32_t>(Tile::kParcelBytes));
    store_bytes(to_, shared_.parcel(stored_ % Tile::kParcels), bytes);
    commit_stores();
    to_ += bytes;
    left_ -= bytes;
    // A piece is counted a little after its last parcel, when its stores have been done for long.
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
      set_word(kUncounted, word<uint32_t>(kStoring));
      stored_since_ = 0;
      go_to_next();
    }
    wait_for_stores_to_read();
    ++stored_;
  }

  // Of the last piece that has been stored.
  __device__ __forceinline__ bool uncounted() const { return stored_since_ >= 0; }
  __device__ __forceinline__ void count_stored() {
    count(word<uint32_t>(kUncounted));
    stored_since_ = kNoneStored;
  }

  __device__ __forceinline__ void note_next(const Piece& piece) {
    set_word(kNextTo, piece.to);
    set_word(kNext, piece.arrival);
    next_bytes_ = piece.bytes;
  }
  __device__ __forceinline__ void go_to_next() {
    set_word(kStoring, word<uint32_t>(kNext));
    to_ = word<unsigned char>(kNextTo);
    left_ = next_bytes_;
    next_bytes_ = 0;
  }

  // Registers are few: in shared memory lie where the next piece goes, and what counts it, the one
  // that is being stored, and the one before that; and numbers of pieces.
  enum Word { kNextTo, kNext, kStoring, kUncounted, kCounted, kStaged };
  static_assert(8 * (kStaged + 1) <= Tile::kPieceWordBytes);
  __device__ __forceinline__ uint32_t at(Word i) const { return shared_.piece_words() + 8 * i; }
  __device__ __forceinline__ void set_word(Word i, const void* value) const {
    asm volatile("st.shared.u64 [%0], %1;" ::"r"(at(i)), "l"(value) : "memory");
  }
  template <typename T>
  __device__ __forceinline__ T* word(Word i) const {
    T* value;
    asm volatile("ld.shared.u64 %0, [%1];" : "=l"(value) : "r"(at(i)) : "memory");
    return value;
  }
  __device__ __forceinline__ void set_number(Word i, uint32_t value) const {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(at(i)), "r"(value) : "memory");
  }
  __device__ __forceinline__ uint32_t number(Word i) const {
    uint32_t value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(at(i)) : "memory");
    return value;
  }

  static constexpr int kStoresBehind = 2;
  static constexpr int kNoneStored = INT_MIN;
  const SharedMemory<Tile>& shared_;
  uint32_t sent_ = 0, stored_ = 0;  // parcels
  unsigned char* to_ = nullptr;  // of the piece that is being stored: where what is left of it goes
  uint32_t left_ = 0;            // bytes
  uint32_t next_bytes_ = 0;      // of the next one, if it has been begun
  int stored_since_ = kNoneStored;  // parcels stored after a piece that has not been counted yet
};

/// By one thread of every block. `between` is called first of all, and again and again.
template <typename Tile, int kSegments, typename Between>
__device__ __forceinline__ void bring_pieces(const SegmentedParams<kSegments>& p,
                                             const SharedMemory<Tile>& shared,
                                             const Between& between) {
  const Bringing& bringing = p.bringing;
  between();
  if (blockIdx.x == 0 && bringing.notices.phase != nullptr) {
    store_relaxed_system(bringing.notices.phase, bringing.notices.phase_working);
  }
  uint32_t* const taken = bringing.words.data + LaunchWords::kPiecesTaken;
  Parcels<Tile> parcels(shared);
  uint32_t number = atomicAdd(taken, 1), failed = load_relaxed_system(bringing.failed);
  while (number < p.bring.pieces) {
    if (number >= parcels.staged()) {
      parcels.bring_all_the_rest();  // who waits keeps nothing back
      const BringOrder& bring = p.bring;
      const uint32_t slice = number / bring.pieces_per_slice;
      const uint32_t wanted = min((slice + 1) * bring.heads_per_slice, bring.num_kv_heads);
      const uint32_t heads = wait_until_staged(bringing, wanted, between);
      fence_async_global();
      parcels.set_staged(heads >= bring.num_kv_heads
                             ? bring.pieces
                             : heads / bring.heads_per_slice * bring.pieces_per_slice);
      failed = load_relaxed_system(bringing.failed);
    }
    // The answers come meanwhile.
    const uint32_t next = atomicAdd(taken, 1);
    const uint32_t next_failed = load_relaxed_system(bringing.failed);
    if (bringing.lateness != 0) {
      const uint32_t random = (number ^ bringing.lateness) * 2654435761u;
      if (random >> 30 == 0) __nanosleep(random >> 14 & 0x7fff);
    }
    const Piece now = piece<Tile>(p, number);
    if (failed == 0) {
      parcels.bring(now, between);
    } else {
      parcels.count(now.arrival);  // its owner may be gone, and the memory
    }
    number = next;
    failed = next_failed;
  }
  parcels.bring_all_the_rest();
  // Added up only now, when there is nothing left to take: the others are as far.
  const uint32_t mine = parcels.counted();
  bool is_last = p.bring.pieces == 0 && blockIdx.x == 0;
  if (mine > 0) {
    uint32_t* const brought = bringing.words.data + LaunchWords::kPiecesBrought;
    is_last = add_acquire_release(brought, mine) + mine == p.bring.pieces;
  }
  if (is_last) {
    wait_until_staged(bringing, p.bring.num_kv_heads, between);
    wait_until_told(bringing, /*first=*/0, /*threads=*/1, between);
    give_notice(bringing, /*first=*/0, /*threads=*/1);
  }
}

/// Called by each copying warp that takes part in it when it has done everything. The last one of
/// `warps` in each thread block sets the words back.
template <int kSegments>
__device__ __forceinline__ void finish(const SegmentedParams<kSegments>& p, uint32_t warps) {
  const LaunchWords& words = p.bringing.words;
  if (words.data == nullptr) return;
  const int lane = threadIdx.x % 32;
  uint32_t before = 0;
  if (lane == 0) before = add_acquire_release(words.data + LaunchWords::kWarpsDone, 1);
  if (__shfl_sync(0xffffffff, before, 0) != warps * gridDim.x - 1) return;
  if (lane < LaunchWords::kFirstArrival) words.data[lane] = 0;
  if constexpr (p.kBringing) {
    for (int i = lane; i < words.num_arrivals; i += 32) words.arrivals()[i] = 0;
    // This thread block's cluster stays for it, on one SM or two; whatever else is launched has the
    // rest.
    wait_until_read(p.bringing);
    wait_for_kernel_before();  // what follows this launch follows that kernel, too
  }
}

}  // namespace ringattn::cuda::sm90
