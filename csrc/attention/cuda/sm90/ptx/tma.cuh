// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

// The bulk tensor copy engine (TMA). One thread names a box of a tensor map; the engine moves it
// between global and shared memory, fills with zeros what lies outside the tensor on the way in and
// leaves it out on the way back. Coordinates are (column, row, head, batch).

namespace ringattn::cuda::sm90 {

/// How long lines should stay in L2: keys and values are read by many tiles, queries by one.
enum class L2Policy : uint64_t {
  kNormal = 0x1000000000000000,
  kEvictFirst = 0x12F0000000000000,
  kEvictLast = 0x14F0000000000000,
};

struct BoxOrigin {
  int column;
  int row;
  int head;
  int batch;
};

/// Has the engine fetch a map ahead of its first use.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap& map, BoxOrigin at,
                                         uint32_t barrier, L2Policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// Part of the issuing thread's current group of stores.
__device__ __forceinline__ void store_box(const CUtensorMap& map, BoxOrigin at, uint32_t from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], "
      "[%1];" ::"l"(&map),
      "r"(from), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

/// store_box that adds to what is there, in float32. Adds of several thread blocks to one element
/// happen in any order.
__device__ __forceinline__ void add_box(const CUtensorMap& map, BoxOrigin at, uint32_t from,
                                        L2Policy policy) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group.L2::cache_hint "
      "[%0, {%2, %3, %4, %5}], [%1], %6;" ::"l"(&map),
      "r"(from), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

/// Into L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, BoxOrigin at) {
  asm volatile(
      "cp.async.bulk.prefetch.tensor.4d.L2.global.tile [%0, {%1, %2, %3, %4}];" ::"l"(&map),
      "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

/// Bytes that lie together: a multiple of 16, so aligned.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// Part of the issuing thread's current group of stores.
__device__ __forceinline__ void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void commit_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

/// Waits until the calling thread's stores have read their shared memory.
__device__ __forceinline__ void wait_for_stores_to_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

/// Waits until all but the last kGroups groups of the calling thread's stores have been done.
template <int kGroups>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kGroups) : "memory");
}

/// Orders this thread's ordinary accesses to shared memory before later ones of the copy engine and
/// of the tensor cores. Comes before the barrier that tells the issuing thread.
__device__ __forceinline__ void fence_async_shared() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/// Orders this thread's ordinary accesses to global memory and those of the copy engine that it
/// issues, earlier ones before later ones: what an acquire has made visible is visible to the
/// engine. What the engine has stored needs none: its completion is one (wait_for_stores).
__device__ __forceinline__ void fence_async_global() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace ringattn::cuda::sm90
