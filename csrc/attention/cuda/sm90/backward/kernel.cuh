// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "attention/cuda/sm90/backward/consumer.cuh"
#include "attention/cuda/sm90/backward/kernel_params.h"
#include "attention/cuda/sm90/backward/producer.cuh"
#include "attention/cuda/sm90/backward/split_consumers.cuh"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/ptx/registers.cuh"

namespace ringattn::cuda::sm90 {

template <typename Element, typename Tile, bool kSoftcap>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    block_attention_backward_kernel(const __grid_constant__ BackwardKernelParams p) {
  extern __shared__ __align__(1024) unsigned char dynamic_shared[];
  const BackwardShared<Tile> shared{shared_address(dynamic_shared)};
  // The shuffle tells the compiler that it is the same in all lanes.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / kGradWarpgroup, 0);

  if (threadIdx.x == 0) shared.init_barriers(p.ranks);
  // By the warp that loads queries: in a cluster, whose barrier does not order memory, consumers
  // see the ones because they wait for queries.
  if (Tile::kOnesInShared && threadIdx.x < 32) {
    store_ones(shared.ones());
    fence_async_shared();
  }
  static_assert(!kSoftcap || Tile::kHasLse);
  const bool in_cluster = Tile::kPair || p.ranks > 1;
  if (in_cluster) {
    cluster_barrier();
  } else {
    __syncthreads();
  }

  if (warpgroup == 0) {
    release_registers<Tile::kCopyRegisters>();
    copy_grads<Tile, kSoftcap>(p, shared);
  } else if constexpr (Tile::kSplit) {
    split_consumers<Element, Tile, kSoftcap>(p, shared, warpgroup - 1);
  } else {
    take_registers<Tile::kConsumerRegisters>();
    consume_grads<Element, Tile, kSoftcap>(p, shared, warpgroup - 1);
  }
  // Shared memory is freed with the thread block, and the others may still arrive there. The fence
  // orders this thread's arrivals before the barrier, which is relaxed.
  if (in_cluster) {
    fence_cluster();
    cluster_barrier();
  }
}

}  // namespace ringattn::cuda::sm90
