// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <random>
#include <vector>

#include "attention/cuda/sm90/ptx/cluster.cuh"
#include "attention/cuda/sm90/tensor_map.h"
#include "catch.h"
#include "device.h"
#include "swizzle.h"

// Clusters of two thread blocks: ranks, boxes that are loaded into several of them, values and
// arrivals from one to the other.

namespace {

using namespace ringattn;
using namespace ringattn::cuda::sm90;

constexpr int kThreads = 64;
constexpr int kRows = 64, kColumns = kSwizzledColumns;
constexpr int kBytes = kRows * kColumns * 2;
constexpr int kAlignment = 1024;  // of the swizzle
constexpr uint16_t kPoison = 0x7F7F;
constexpr uint32_t kValue = 0xABCD1234;

/// What each rank reports.
struct Report {
  uint32_t rank, size;
  uint32_t value;      // that rank 0 sent, in rank 1
  int came_too_early;  // something passed a wait before it could have
};

/// Rank 0 loads a box into the ranks whose bit is set, and sends a value, each behind a late start;
/// rank 1 answers with an arrival.
__global__ void reach(const __grid_constant__ CUtensorMap map, uint16_t ranks, Report* reports,
                      uint16_t* loaded, volatile int* started) {
  extern __shared__ unsigned char dynamic[];
  __shared__ uint64_t barriers[3];
  __shared__ uint32_t value;
  const uint32_t unaligned = shared_address(dynamic);
  auto* const box =
      reinterpret_cast<uint16_t*>(dynamic + (kAlignment - unaligned % kAlignment) % kAlignment);
  const uint32_t box_full = shared_address(&barriers[0]), value_full = shared_address(&barriers[1]),
                 answered = shared_address(&barriers[2]), rank = cluster_rank();
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) box[i] = kPoison;
  fence_async_shared();
  if (threadIdx.x == 0) {
    value = 0;
    for (uint32_t barrier : {box_full, value_full, answered}) init_barrier(barrier, 1);
    publish_barriers();
  }
  __syncthreads();
  cluster_barrier();
  Report mine = {rank, cluster_size(), 0, 0};
  if (threadIdx.x == 0) {
    if (ranks >> rank & 1) arrive_expecting(box_full, kBytes);
    if (rank == 0) {
      __nanosleep(2000);
      started[0] = 1;
      __threadfence();
      load_box_in_ranks(shared_address(box), map, {0, 3, 0, 0}, box_full, ranks,
                        L2Policy::kEvictLast);
    }
    if (ranks >> rank & 1) {
      wait(box_full, 0);
      mine.came_too_early |= started[0] == 0;
    }
    if (rank == 0) {
      const uint32_t full = address_in_rank(value_full, 1);
      arrive_expecting_in_cluster(full, sizeof(value));
      __nanosleep(2000);
      send_value(address_in_rank(shared_address(&value), 1), kValue, full);
      wait(answered, 0);
      mine.came_too_early |= started[1] == 0;
    } else {
      wait(value_full, 0);
      mine.value = *const_cast<volatile uint32_t*>(&value);
      __nanosleep(2000);
      started[1] = 1;
      __threadfence();
      arrive_in_cluster(address_in_rank(answered, 0));
    }
    reports[rank] = mine;
  }
  __syncthreads();
  cluster_barrier();
  for (int i = threadIdx.x; i < kRows * kColumns; i += kThreads) {
    loaded[rank * kRows * kColumns + i] = box[i];
  }
}

}  // namespace

TEST_CASE("sm90: a box arrives at each named rank, values and arrivals at another rank") {
  if (!has_hopper()) return;
  const uint16_t ranks = GENERATE(1, 2, 3);
  CAPTURE(ranks);
  std::vector<uint16_t> tensor(100 * kColumns);
  std::mt19937 generator(8);
  for (uint16_t& bits : tensor) bits = static_cast<uint16_t>(generator());
  const DeviceArray<uint16_t> memory(tensor),
      loaded(std::vector<uint16_t>(2 * kRows * kColumns, 1));
  const DeviceArray<Report> reports(std::vector<Report>(2));
  const DeviceArray<int> started(std::vector<int>(2, 0));
  CUtensorMap map;
  REQUIRE(make_tensor_map({memory.data(), 100 * kColumns, kColumns, kColumns}, DataType::kBFloat16,
                          1, 100, 1, kColumns, kRows, map) == cudaSuccess);

  cudaLaunchAttribute clusters = {};
  clusters.id = cudaLaunchAttributeClusterDimension;
  clusters.val.clusterDim = {2, 1, 1};
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(2);
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kBytes + kAlignment;
  config.attrs = &clusters;
  config.numAttrs = 1;
  REQUIRE(cudaLaunchKernelEx(&config, reach, map, ranks, reports.data(), loaded.data(),
                             static_cast<volatile int*>(started.data())) == cudaSuccess);
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

  std::vector<uint16_t> expected(2 * kRows * kColumns, kPoison);
  for (int rank = 0; rank < 2; ++rank)
    for (int row = 0; row < kRows && (ranks >> rank & 1) != 0; ++row)
      for (int column = 0; column < kColumns; ++column) {
        expected[rank * kRows * kColumns + swizzled(row, column)] =
            tensor[(3 + row) * kColumns + column];
      }
  CHECK((loaded.values() == expected));
  const std::vector<Report> results = reports.values();
  for (uint32_t rank = 0; rank < 2; ++rank) {
    CHECK(results[rank].rank == rank);
    CHECK(results[rank].size == 2);
    CHECK(results[rank].came_too_early == 0);
  }
  CHECK(results[1].value == kValue);
}
