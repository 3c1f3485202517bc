// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstdint>

#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

// Clusters: thread blocks that run at one time on neighbouring SMs and reach each other's shared
// memory. A thread block on its own is a cluster of one.

namespace ringattn::cuda::sm90 {

/// The rank of this thread block within its cluster.
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ __forceinline__ uint32_t cluster_size() {
  uint32_t size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

/// Waits for all threads of the cluster that have not ended. Relaxed: it does not order memory.
/// Published barriers and the work of copy engines need no more.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile(
      "barrier.cluster.arrive.relaxed;\n"
      "barrier.cluster.wait;" ::
          : "memory");
}

/// Orders memory between thread blocks of the cluster.
__device__ __forceinline__ void fence_cluster() {
  asm volatile("fence.acq_rel.cluster;" ::: "memory");
}

/// The address in the shared memory of `rank` that corresponds to `address` in the caller's.
__device__ __forceinline__ uint32_t address_in_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}

// Arrivals at a barrier of any thread block of the cluster (address_in_rank).

__device__ __forceinline__ void arrive_in_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void arrive_expecting_in_cluster(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cluster.b64 _, [%0], %1;" ::"r"(barrier),
               "r"(bytes)
               : "memory");
}

/// Stores 4 bytes, which are counted at a barrier of the destination's thread block.
__device__ __forceinline__ void send_value(uint32_t to, uint32_t value, uint32_t barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
      "r"(value), "r"(barrier)
      : "memory");
}

/// Copies bytes of this thread block's shared memory to a rank's: a multiple of 16, counted at a
/// barrier of that rank.
__device__ __forceinline__ void send_bytes(uint32_t to, uint32_t from, uint32_t bytes,
                                           uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, "
      "[%3];" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

/// load_box with multicast: the box is read once and written to the same address in each rank whose
/// bit is set, and its bytes are counted at the same barrier of each.
__device__ __forceinline__ void load_box_in_ranks(uint32_t to, const CUtensorMap& map, BoxOrigin at,
                                                  uint32_t barrier, uint16_t ranks,
                                                  L2Policy policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(to),
      "l"(&map), "r"(barrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "h"(ranks),
      "l"(static_cast<uint64_t>(policy))
      : "memory");
}

}  // namespace ringattn::cuda::sm90
