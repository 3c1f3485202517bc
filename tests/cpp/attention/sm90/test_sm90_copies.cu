// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/stmatrix.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/tensor_map.h"
#include "catch.h"
#include "device.h"
#include "swizzle.h"

// Boxes between global and shared memory, bit by bit: where the elements lie in shared memory, what
// is filled in and what is left out at the edges of a tensor, and what is left alone around it.

namespace {

using namespace ringattn;
using namespace ringattn::cuda::sm90;

constexpr int kThreads = 128;
constexpr int kBoxColumns = kSwizzledColumns;
constexpr int kAlignment = 1024;  // of the swizzle
constexpr int kGuardBytes = 1024;
constexpr unsigned char kPoison = 0x7F;  // 0x7F7F: a NaN in float16, no number that is used here

__device__ unsigned char* aligned(unsigned char* dynamic) {
  return dynamic + (kAlignment - shared_address(dynamic) % kAlignment) % kAlignment;
}

/// Loads a box behind a late start, and returns what shared memory holds then, a guard behind the
/// box included.
__global__ void load(const __grid_constant__ CUtensorMap map, BoxOrigin at, L2Policy policy,
                     int bytes, unsigned char* loaded, int* waited_too_little) {
  extern __shared__ unsigned char dynamic[];
  __shared__ uint64_t barrier_memory;
  __shared__ int started;
  unsigned char* const shared = aligned(dynamic);
  const uint32_t barrier = shared_address(&barrier_memory);
  for (int i = threadIdx.x; i < bytes + kGuardBytes; i += kThreads) shared[i] = kPoison;
  fence_async_shared();
  if (threadIdx.x == 0) {
    started = 0;
    init_barrier(barrier, 1);
    publish_barriers();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    prefetch_map(map);
    prefetch_box(map, at);
    arrive_expecting(barrier, bytes);
    __nanosleep(2000);
    *const_cast<volatile int*>(&started) = 1;
    load_box(shared_address(shared), map, at, barrier, policy);
  }
  wait(barrier, 0);
  if (*const_cast<volatile int*>(&started) == 0) *waited_too_little = 1;
  for (int i = 8 * threadIdx.x; i < bytes + kGuardBytes; i += 8 * kThreads) {
    *reinterpret_cast<float2*>(loaded + i) = load_shared_pair(shared_address(shared) + i);
  }
}

/// Stores a box that ordinary instructions wrote, and overwrites its shared memory at once.
__global__ void store(const __grid_constant__ CUtensorMap map, BoxOrigin at, int bytes,
                      const unsigned char* image) {
  extern __shared__ unsigned char dynamic[];
  unsigned char* const shared = aligned(dynamic);
  for (int i = 8 * threadIdx.x; i < bytes; i += 8 * kThreads) {
    store_shared_pair(shared_address(shared) + i, *reinterpret_cast<const float2*>(image + i));
  }
  fence_async_shared();
  __syncthreads();
  if (threadIdx.x == 0) {
    store_box(map, at, shared_address(shared));
    commit_stores();
    wait_for_stores_to_read();
  }
  __syncthreads();
  const uint4 poison = make_uint4(~0u, ~0u, ~0u, ~0u);
  for (int i = threadIdx.x; i < bytes / 16; i += kThreads) {
    reinterpret_cast<uint4*>(shared)[i] = poison;
  }
}

__global__ void store_in_matrices(const uint32_t* registers, const int* row_of_lane,
                                  uint32_t* stored) {
  __shared__ __align__(16) uint32_t rows[32][4];  // 16 bytes each
  const int lane = threadIdx.x;
  for (int i = 0; i < 4; ++i) rows[lane][i] = ~0u;
  __syncwarp();
  store_matrices(shared_address(rows[row_of_lane[lane]]), registers[4 * lane],
                 registers[4 * lane + 1], registers[4 * lane + 2], registers[4 * lane + 3]);
  __syncwarp();
  for (int i = 0; i < 4; ++i) stored[4 * lane + i] = rows[lane][i];
}

/// A tensor [batch, rows, heads, head_dim] of random bits in poisoned memory.
template <typename Bits>
struct Tensor {
  int batch, rows, heads, head_dim;
  int64_t batch_stride, row_stride, head_stride;
  std::vector<Bits> memory;

  /// Heads inside rows or rows inside heads; some elements unused behind each.
  Tensor(int batch, int rows, int heads, int head_dim, bool rows_inside_heads, int seed)
      : batch(batch), rows(rows), heads(heads), head_dim(head_dim) {
    const int64_t pitch = head_dim + 24;
    row_stride = rows_inside_heads ? pitch : pitch * heads + 8;
    head_stride = rows_inside_heads ? pitch * rows + 16 : pitch;
    batch_stride = rows_inside_heads ? head_stride * heads + 8 : row_stride * rows + 16;
    std::memset(&poison_, kPoison, sizeof(Bits));
    memory.assign(batch_stride * batch, poison_);
    std::mt19937 generator(seed);
    for (int b = 0; b < batch; ++b)
      for (int row = 0; row < rows; ++row)
        for (int head = 0; head < heads; ++head)
          for (int column = 0; column < head_dim; ++column) {
            memory[index(column, {0, row, head, b})] = static_cast<Bits>(generator());
          }
  }

  /// Of element (at.column + column) of row at.row.
  int64_t index(int column, const BoxOrigin& at) const {
    return at.batch * batch_stride + at.row * row_stride + at.head * head_stride + at.column +
           column;
  }
  bool holds(const BoxOrigin& at) const { return at.row < rows && at.column < head_dim; }
  Bits poison() const { return poison_; }

  Strided strided(Bits* data) const { return {data, batch_stride, row_stride, head_stride}; }
  CUtensorMap map(Bits* data, DataType dtype, int box_rows) const {
    CUtensorMap map;
    REQUIRE(make_tensor_map(strided(data), dtype, batch, rows, heads, head_dim, box_rows, map) ==
            cudaSuccess);
    return map;
  }

 private:
  Bits poison_;
};

/// Columns of a box: 128 bytes.
template <typename Bits>
constexpr int kColumnsOf = kBoxColumns * 2 / int{sizeof(Bits)};

/// Where an element of a box lies in shared memory: chunks of 16 bytes are swizzled.
template <typename Bits>
int place(int row, int column) {
  constexpr int kHalves = int{sizeof(Bits)} / 2;  // the swizzle counts 16-bit elements
  return swizzled(row, column * kHalves) / kHalves;
}

/// Loads the box at every interesting place: whole, over each edge, and beyond the last row.
template <typename Bits>
void check_loads(const Tensor<Bits>& x, DataType dtype, int box_rows, L2Policy policy) {
  constexpr int kColumns = kColumnsOf<Bits>;
  const DeviceArray<Bits> memory(x.memory);
  const CUtensorMap map = x.map(memory.data(), dtype, box_rows);
  const int elements = box_rows * kColumns, bytes = elements * int{sizeof(Bits)};
  const int guard = kGuardBytes / int{sizeof(Bits)};
  const int shared_bytes = bytes + kGuardBytes + kAlignment;
  REQUIRE(cudaFuncSetAttribute(load, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes) ==
          cudaSuccess);

  for (int first_row : {0, 5, x.rows - box_rows, x.rows - 1, x.rows, x.rows + box_rows})
    for (int first_column = 0; first_column < x.head_dim + kColumns; first_column += kColumns) {
      if (first_row < 0) continue;
      const BoxOrigin at = {first_column, first_row, x.heads - 1, x.batch - 1};
      CAPTURE(x.rows, x.head_dim, box_rows, first_row, first_column);
      const DeviceArray<Bits> loaded(std::vector<Bits>(elements + guard, 1));
      const DeviceArray<int> waited_too_little(std::vector<int>{0});
      load<<<1, kThreads, shared_bytes>>>(map, at, policy, bytes,
                                          reinterpret_cast<unsigned char*>(loaded.data()),
                                          waited_too_little.data());
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

      std::vector<Bits> expected(elements + guard, x.poison());
      for (int row = 0; row < box_rows; ++row)
        for (int column = 0; column < kColumns; ++column) {
          const BoxOrigin element = {first_column + column, first_row + row, at.head, at.batch};
          expected[place<Bits>(row, column)] =
              x.holds(element) ? x.memory[x.index(0, element)] : Bits{0};
        }
      CHECK((loaded.values() == expected));
      CHECK(waited_too_little.values()[0] == 0);
    }
}

/// Stores a box at every interesting place, and compares all of the tensor's memory.
template <typename Bits>
void check_stores(const Tensor<Bits>& x, DataType dtype) {
  constexpr int kBoxRows = 64, kColumns = kColumnsOf<Bits>;
  constexpr int kElements = kBoxRows * kColumns, kBytes = kElements * int{sizeof(Bits)};
  std::vector<Bits> image(kElements);
  std::mt19937 generator(6);
  for (Bits& bits : image) bits = static_cast<Bits>(generator());
  const DeviceArray<Bits> device_image(image);

  for (int first_row : {0, 36, 64, 99, 100})
    for (int first_column = 0; first_column < x.head_dim + kColumns; first_column += kColumns) {
      const BoxOrigin at = {first_column, first_row, 1, 1};
      CAPTURE(x.head_dim, first_row, first_column);
      const DeviceArray<Bits> memory(x.memory);
      store<<<1, kThreads, kBytes + kAlignment>>>(
          x.map(memory.data(), dtype, kBoxRows), at, kBytes,
          reinterpret_cast<const unsigned char*>(device_image.data()));
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

      std::vector<Bits> expected = x.memory;
      for (int row = 0; row < kBoxRows; ++row)
        for (int column = 0; column < kColumns; ++column) {
          const BoxOrigin element = {first_column + column, first_row + row, at.head, at.batch};
          if (x.holds(element)) expected[x.index(0, element)] = image[place<Bits>(row, column)];
        }
      CHECK((memory.values() == expected));
    }
}

}  // namespace

TEST_CASE("sm90: a box is loaded swizzled, and zeros where the tensor ends") {
  if (!has_hopper()) return;
  struct Case {
    int head_dim, rows, box_rows;
    bool rows_inside_heads;
  };
  const auto [head_dim, rows, box_rows, rows_inside_heads] =
      GENERATE(Case{64, 250, 192, false}, Case{128, 165, 128, true}, Case{256, 101, 80, false},
               Case{8, 128, 64, false}, Case{72, 130, 128, false}, Case{200, 90, 80, true},
               Case{136, 1, 128, false});
  const Tensor<uint16_t> x(2, rows, 3, head_dim, rows_inside_heads, 1);
  check_loads(x, DataType::kBFloat16, box_rows, L2Policy::kEvictLast);
  check_loads(x, DataType::kFloat16, box_rows, L2Policy::kEvictFirst);
}

TEST_CASE("sm90: float32 boxes are half as wide") {
  if (!has_hopper()) return;
  check_loads(Tensor<uint32_t>(2, 150, 3, 128, false, 2), DataType::kFloat32, 128,
              L2Policy::kEvictFirst);
  check_loads(Tensor<uint32_t>(1, 70, 2, 72, true, 3), DataType::kFloat32, 64,
              L2Policy::kEvictFirst);
}

TEST_CASE("sm90: the stride of a dimension of size 1 says nothing") {
  if (!has_hopper()) return;
  Tensor<uint16_t> x(1, 40, 1, 64, false, 4);
  x.batch_stride = 3;
  x.head_stride = -5;
  check_loads(x, DataType::kBFloat16, 64, L2Policy::kEvictLast);
}

TEST_CASE("sm90: a stored box leaves alone what is not of the tensor") {
  if (!has_hopper()) return;
  const auto [head_dim, rows_inside_heads] =
      GENERATE(table<int, bool>({{64, true}, {72, false}, {128, false}, {200, true}}));
  check_stores(Tensor<uint16_t>(2, 100, 3, head_dim, rows_inside_heads, 5), DataType::kBFloat16);
  check_stores(Tensor<uint32_t>(2, 100, 3, head_dim, rows_inside_heads, 5), DataType::kFloat32);
}

TEST_CASE("sm90: four 8x8 matrices go where the lanes' addresses say") {
  if (!has_hopper()) return;
  std::vector<uint32_t> registers(32 * 4);
  std::mt19937 generator(7);
  for (uint32_t& bits : registers) bits = static_cast<uint32_t>(generator());
  std::vector<int> row_of_lane(32);
  for (int lane = 0; lane < 32; ++lane) row_of_lane[lane] = lane * 11 % 32;
  const DeviceArray<uint32_t> device_registers(registers), stored(std::vector<uint32_t>(32 * 4, 0));
  const DeviceArray<int> device_rows(row_of_lane);
  store_in_matrices<<<1, 32>>>(device_registers.data(), device_rows.data(), stored.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);

  std::vector<uint32_t> expected(32 * 4);
  for (int matrix = 0; matrix < 4; ++matrix)
    for (int row = 0; row < 8; ++row)
      for (int t = 0; t < 4; ++t) {
        expected[4 * row_of_lane[8 * matrix + row] + t] = registers[4 * (4 * row + t) + matrix];
      }
  CHECK(stored.values() == expected);
}
