// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"

// The sum of dk and dv over the thread blocks of a cluster, which have the same keys and a part of
// the query heads each. A thread's accumulators are four quarters: the columns of dk below and from
// kHeadDim / 2 on, then those of dv. Each rank receives the others' for the quarters that it owns
// into the memory of its query tiles and score gradients, and writes them: in a fixed order,
// without memory beside.

namespace ringattn::cuda::sm90 {

/// Which quarters a rank writes.
struct OwnedQuarters {
  int rank;
  int count;  // 4 / ranks

  __device__ __forceinline__ explicit OwnedQuarters(const BackwardKernelParams& p)
      : rank(p.ranks > 1 ? cluster_rank() : 0), count(4 / p.ranks) {}
  __device__ __forceinline__ int owner(int quarter) const { return quarter / count; }
  __device__ __forceinline__ bool has(int quarter) const { return owner(quarter) == rank; }
};

/// One lane arrives at the barrier of every other rank, for its warp.
__device__ __forceinline__ void arrive_in_other_ranks(uint32_t barrier, int rank, int ranks) {
  __syncwarp();
  if (threadIdx.x % 32 != 0) return;
  for (int other = 0; other < ranks; ++other) {
    if (other != rank) arrive_in_cluster(address_in_rank(barrier, other));
  }
}

/// By all consumers, when their products are done. Their query stages are free again only after it.
template <typename Tile, int kSize>
__device__ __forceinline__ void sum_over_cluster(const BackwardShared<Tile>& shared,
                                                 const OwnedQuarters& owned, int ranks,
                                                 uint32_t parity, float (&dk)[kSize],
                                                 float (&dv)[kSize]) {
  constexpr int kVectors = kSize / 8;  // of a quarter
  constexpr int kVectorPitch = kGradConsumers * kGradWarpgroup * 16;
  static_assert(3 * kVectors * kVectorPitch <= Tile::kDq - Tile::kQueries);
  const int thread = threadIdx.x - kGradWarpgroup;
  const auto slot = [&](int base, int sender, int quarter) {
    return base + (sender * owned.count + quarter % owned.count) * (kVectors * kVectorPitch) +
           thread * 16;
  };

  arrive_in_other_ranks(shared.exchange_free(), owned.rank, ranks);
  wait(shared.exchange_free(), parity);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    if (owned.has(quarter)) continue;
    const float* x = (quarter < 2 ? dk : dv) + quarter % 2 * 4 * kVectors;
    const int owner = owned.owner(quarter);
    const uint32_t to =
        slot(address_in_rank(shared.exchange(), owner), owned.rank - (owned.rank > owner), quarter);
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * kVectorPitch),
                   "f"(x[4 * i]), "f"(x[4 * i + 1]), "f"(x[4 * i + 2]), "f"(x[4 * i + 3])
                   : "memory");
    }
  }
  fence_cluster();
  arrive_in_other_ranks(shared.exchange_full(), owned.rank, ranks);

  wait(shared.exchange_full(), parity);
  fence_cluster();
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    if (!owned.has(quarter)) continue;
    float* x = (quarter < 2 ? dk : dv) + quarter % 2 * 4 * kVectors;
#pragma unroll 1
    for (int sender = 0; sender < ranks - 1; ++sender) {
      const uint32_t from = slot(shared.exchange(), sender, quarter);
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        float4 y;
        asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(y.x), "=f"(y.y), "=f"(y.z), "=f"(y.w)
                     : "r"(from + i * kVectorPitch)
                     : "memory");
        x[4 * i] += y.x;
        x[4 * i + 1] += y.y;
        x[4 * i + 2] += y.z;
        x[4 * i + 3] += y.w;
      }
    }
  }
  fence_async_shared();  // the copy engine writes there next
}

}  // namespace ringattn::cuda::sm90
