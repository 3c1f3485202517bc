// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "accumulators.cuh"
#include "attention/cuda/sm90/products.cuh"
#include "attention/cuda/sm90/ptx/mbarrier.cuh"
#include "attention/cuda/sm90/ptx/tma.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/recompute_scores.cuh"
#include "catch.h"
#include "device.h"
#include "swizzle.h"

// Products of the tensor cores against plain loops in float64. All operands are multiples of 1/8
// below 4, so that every sum is exact in float32, and the results must be the same numbers.

namespace {

using namespace ringattn::cuda::sm90;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr int kRows = 128;  // of the left operand: 64 for each of two warpgroups
constexpr int kThreads = 256;
constexpr int kAlignment = 1024;                 // of the swizzle
constexpr int kRowBytes = 2 * kSwizzledColumns;  // of a block of 64 columns
constexpr int kMaxSharedBytes = 232448;

/// Copies an image into shared memory, for the tensor cores to read.
__device__ void copy_to_shared(uint32_t to, const uint4* image, int bytes) {
  for (int i = threadIdx.x; i < bytes / 16; i += kThreads) {
    const uint4 x = image[i];
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to + 16 * i), "r"(x.x), "r"(x.y),
                 "r"(x.z), "r"(x.w)
                 : "memory");
  }
  fence_async_shared();
}

__device__ uint32_t aligned(const void* dynamic, int offset) {
  return (shared_address(dynamic) + offset + kAlignment - 1) / kAlignment * kAlignment;
}

/// A group: accumulators (+)= a @ b.T for this warpgroup's rows of a [kRows, kDepth], b [kN,
/// kDepth].
template <typename Element, int kN, int kDepth, bool kAccumulate>
__device__ void issue_of_shared(float (&accumulators)[kN / 2], uint32_t shared_a,
                                uint32_t shared_b) {
  using Product = ProductOfShared<Element, kN>;
  const auto a = OperandDescriptor::k_major(shared_a + threadIdx.x / 128 * 64 * kRowBytes);
  const auto b = OperandDescriptor::k_major(shared_b);
  begin_products();
  Product::template issue<kAccumulate>(accumulators, a.at(0), b.at(0));
#pragma unroll
  for (int step = 1; step < kDepth / 16; ++step) {
    const int block = step / 4, offset = step % 4 * 32;
    Product::template issue<true>(accumulators, a.at(block * kRows * kRowBytes + offset),
                                  b.at(block * kN * kRowBytes + offset));
  }
  commit_products();
}

/// A group: accumulators += a @ b, b [kDepth, kN].
template <typename Element, int kN, int kDepth>
__device__ void issue_of_registers(float (&accumulators)[kN / 2], const uint32_t (&a)[kDepth / 4],
                                   uint32_t shared_b) {
  const auto b = OperandDescriptor::n_major(shared_b, kDepth * kRowBytes);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    ProductOfRegisters<Element, kN>::issue(accumulators, a[4 * step], a[4 * step + 1],
                                           a[4 * step + 2], a[4 * step + 3],
                                           b.at(step * 16 * kRowBytes));
  }
  commit_products();
}

/// A group: accumulators += a @ b for this warpgroup's rows of a [kRows, kDepth], b [kDepth, kN].
template <typename Element, int kN, int kDepth>
__device__ void issue_of_rows(float (&accumulators)[kN / 2], uint32_t shared_a, uint32_t shared_b) {
  const auto a = OperandDescriptor::k_major(shared_a + threadIdx.x / 128 * 64 * kRowBytes);
  const auto b = OperandDescriptor::n_major(shared_b, kDepth * kRowBytes);
  begin_products();
#pragma unroll
  for (int step = 0; step < kDepth / 16; ++step) {
    ProductOfRows<Element, kN>::template issue<true>(
        accumulators, a.at(step / 4 * kRows * kRowBytes + step % 4 * 32),
        b.at(step * 16 * kRowBytes));
  }
  commit_products();
}

/// Of a [kRows, kDepth], row-major in global memory: pairs of columns.
template <int kDepth>
__device__ void read_left_operand(uint32_t (&registers)[kDepth / 4], const uint32_t* a) {
#pragma unroll
  for (int i = 0; i < kDepth / 4; ++i) {
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i % 2 * 8;
    const int column = i / 4 * 16 + i / 2 % 2 * 8 + threadIdx.x % 4 * 2;
    registers[i] = a[(row * kDepth + column) / 2];
  }
}

/// d += a @ b.T or, with kRowMajor, d += a @ b.
template <typename Element, int kN, int kDepth, bool kAccumulate, bool kRowMajor>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_shared(const uint4* a, const uint4* b, int offset, float* d) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t shared_a = aligned(dynamic, offset);
  const uint32_t shared_b = shared_a + kRows * kDepth * 2;
  copy_to_shared(shared_a, a, kRows * kDepth * 2);
  copy_to_shared(shared_b, b, kN * kDepth * 2);
  __syncthreads();
  float accumulators[kN / 2];
  read_accumulators<kN>(accumulators, d);
  if constexpr (kRowMajor) {
    issue_of_rows<Element, kN, kDepth>(accumulators, shared_a, shared_b);
  } else {
    issue_of_shared<Element, kN, kDepth, kAccumulate>(accumulators, shared_a, shared_b);
  }
  wait_for_products<0>();
  write_accumulators<kN>(accumulators, d);
}

/// Of all rows or, apart, of the given rows of each warp's 16.
template <typename Element, int kN, int kDepth, bool kApart>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_registers(const uint32_t* a, const uint4* b, int offset, RowFlags rows, float* d) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t shared_b = aligned(dynamic, offset);
  copy_to_shared(shared_b, b, kN * kDepth * 2);
  __syncthreads();
  float accumulators[kN / 2];
  read_accumulators<kN>(accumulators, d);
  uint32_t registers[kDepth / 4];
  read_left_operand<kDepth>(registers, a);
  if constexpr (kApart) {
    add_values_to_rows<Element>(accumulators, registers, shared_b, kDepth * kRowBytes,
                                [&] { return rows; });
  } else {
    issue_of_registers<Element, kN, kDepth>(accumulators, registers, shared_b);
    wait_for_products<0>();
  }
  write_accumulators<kN>(accumulators, d);
}

/// Two groups in flight, as in attention: d = q @ k.T and e += p @ v. The first result is read
/// while the second may be on its way.
template <typename Element, int kN>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_both(const uint4* q, const uint4* k, const uint32_t* p, const uint4* v, float* d,
                  float* e) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t shared_q = aligned(dynamic, 0);
  const uint32_t shared_k = shared_q + kRows * kN * 2, shared_v = shared_k + kN * kN * 2;
  copy_to_shared(shared_q, q, kRows * kN * 2);
  copy_to_shared(shared_k, k, kN * kN * 2);
  copy_to_shared(shared_v, v, kN * kN * 2);
  __syncthreads();
  float scores[kN / 2], out[kN / 2];
  uint32_t registers[kN / 4];
  read_accumulators<kN>(out, e);
  read_left_operand<kN>(registers, p);
  issue_of_shared<Element, kN, kN, false>(scores, shared_q, shared_k);
  issue_of_registers<Element, kN, kN>(out, registers, shared_v);
  wait_for_products<1>();
  write_accumulators<kN>(scores, d);
  wait_for_products<0>();
  write_accumulators<kN>(out, e);
}

/// d = a @ b.T by single warps, in the first or the last 8 rows of each warp's 16, or in both.
template <typename Element, int kN, int kDepth>
__global__ void __launch_bounds__(kThreads, 1)
    multiply_by_warps(const uint4* a, const uint4* b, RowFlags rows, float* d) {
  extern __shared__ unsigned char dynamic[];
  const uint32_t shared_a = aligned(dynamic, 0);
  const uint32_t shared_b = shared_a + kRows * kDepth * 2;
  copy_to_shared(shared_a, a, kRows * kDepth * 2);
  copy_to_shared(shared_b, b, kN * kDepth * 2);
  __syncthreads();
  float scores[kN / 2];
  read_accumulators<kN>(scores, d);
  recompute_scores<Element, kDepth>(scores, rows, shared_a + threadIdx.x / 128 * 64 * kRowBytes,
                                    kRows * kRowBytes, shared_b, kN * kRowBytes);
  write_accumulators<kN>(scores, d);
}

__global__ void describe(uint32_t address, uint32_t block_bytes, uint32_t offset, uint64_t* bits) {
  bits[0] = OperandDescriptor::k_major(address).at(offset);
  bits[1] = OperandDescriptor::n_major(address, block_bytes).at(offset);
}

/// A matrix of multiples of 1/8, row-major.
std::vector<float> eighths(int rows, int columns, int seed) {
  std::mt19937 generator(seed);
  std::uniform_int_distribution<int> distribution(-31, 31);
  std::vector<float> matrix(rows * columns);
  for (float& x : matrix) x = distribution(generator) / 8.0f;
  return matrix;
}

/// As an operand in shared memory: blocks of [rows][64], swizzled.
template <typename Element>
std::vector<Element> image(const std::vector<float>& matrix, int rows, int columns) {
  std::vector<Element> result(rows * columns, Element(0.0f));
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      const int block = column / kSwizzledColumns * rows * kSwizzledColumns;
      result[block + swizzled(row, column % kSwizzledColumns)] =
          Element(matrix[row * columns + column]);
    }
  return result;
}

/// d + a @ b, or d + a @ b.T, in float64.
std::vector<float> product(const std::vector<float>& a, const std::vector<float>& b, int n,
                           int depth, bool transposed, const std::vector<float>& d) {
  std::vector<float> result;
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < n; ++j) {
      double sum = d[i * n + j];
      for (int k = 0; k < depth; ++k) {
        sum += double(a[i * depth + k]) * double(transposed ? b[j * depth + k] : b[k * n + j]);
      }
      result.push_back(static_cast<float>(sum));
    }
  return result;
}

template <typename T, typename Element>
const T* as(const DeviceArray<Element>& array) {
  return reinterpret_cast<const T*>(array.data());
}

/// How far into shared memory the operands can begin: addresses need all bits of a descriptor.
int last_offset(int operand_bytes) { return kMaxSharedBytes - operand_bytes - kAlignment; }

template <typename Kernel>
void allow_all_shared_memory(Kernel kernel) {
  REQUIRE(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kMaxSharedBytes) == cudaSuccess);
}

template <typename Element, int kN, int kDepth, bool kAccumulate, bool kRowMajor = false>
void check_of_shared() {
  CAPTURE(kN, kDepth, kAccumulate, kRowMajor);
  const auto a = eighths(kRows, kDepth, 1),
             b = kRowMajor ? eighths(kDepth, kN, 2) : eighths(kN, kDepth, 2),
             before = eighths(kRows, kN, 3);
  const std::vector<float> nan(kRows * kN, kNaN), zero(kRows * kN, 0.0f);
  const auto expected = product(a, b, kN, kDepth, !kRowMajor, kAccumulate ? before : zero);
  const DeviceArray<Element> device_a(image<Element>(a, kRows, kDepth)),
      device_b(kRowMajor ? image<Element>(b, kDepth, kN) : image<Element>(b, kN, kDepth));
  const auto kernel = multiply_shared<Element, kN, kDepth, kAccumulate, kRowMajor>;
  allow_all_shared_memory(kernel);
  for (int offset : {0, last_offset((kRows + kN) * kDepth * 2)}) {
    const DeviceArray<float> d(kAccumulate ? before : nan);
    kernel<<<1, kThreads, kMaxSharedBytes>>>(as<uint4>(device_a), as<uint4>(device_b), offset,
                                             d.data());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK((d.values() == expected));
  }
}

template <typename Element, int kN, int kDepth, bool kApart = false>
void check_of_registers(const RowFlags& rows = {{true, true}}) {
  CAPTURE(kN, kDepth);
  const auto a = eighths(kRows, kDepth, 4), b = eighths(kDepth, kN, 5),
             before = eighths(kRows, kN, 6);
  auto expected = product(a, b, kN, kDepth, false, before);
  for (int i = 0; i < kRows * kN; ++i) {
    if (!rows.of[i / kN % 16 / 8]) expected[i] = before[i];
  }
  const DeviceArray<Element> device_a(rounded<Element>(a)), device_b(image<Element>(b, kDepth, kN));
  const auto kernel = multiply_registers<Element, kN, kDepth, kApart>;
  allow_all_shared_memory(kernel);
  for (int offset : {0, last_offset(kDepth * kN * 2)}) {
    const DeviceArray<float> d(before);
    kernel<<<1, kThreads, kMaxSharedBytes>>>(as<uint32_t>(device_a), as<uint4>(device_b), offset,
                                             rows, d.data());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK((d.values() == expected));
  }
}

template <typename Element, int kN, int kDepth>
void check_by_warps() {
  CAPTURE(kN, kDepth);
  const auto a = eighths(kRows, kDepth, 12), b = eighths(kN, kDepth, 13),
             before = eighths(kRows, kN, 14);
  const auto all = product(a, b, kN, kDepth, true, std::vector<float>(kRows * kN, 0.0f));
  const DeviceArray<Element> device_a(image<Element>(a, kRows, kDepth)),
      device_b(image<Element>(b, kN, kDepth));
  const auto kernel = multiply_by_warps<Element, kN, kDepth>;
  allow_all_shared_memory(kernel);
  for (const RowFlags rows :
       {RowFlags{{true, true}}, RowFlags{{false, true}}, RowFlags{{true, false}}}) {
    std::vector<float> expected = before;
    for (int i = 0; i < kRows * kN; ++i) {
      if (rows.of[i / kN % 16 / 8]) expected[i] = all[i];
    }
    const DeviceArray<float> d(before);
    kernel<<<1, kThreads, kMaxSharedBytes>>>(as<uint4>(device_a), as<uint4>(device_b), rows,
                                             d.data());
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK((d.values() == expected));
  }
}

}  // namespace

TEMPLATE_TEST_CASE("sm90: a warp by itself computes the scores of some of its rows", "", __half,
                   __nv_bfloat16) {
  if (!has_hopper()) return;
  check_by_warps<TestType, 64, 64>();
  check_by_warps<TestType, 80, 128>();
  check_by_warps<TestType, 128, 128>();
  check_by_warps<TestType, 80, 256>();
}

TEMPLATE_TEST_CASE("sm90: products of two operands in shared memory", "", __half, __nv_bfloat16) {
  if (!has_hopper()) return;
  check_of_shared<TestType, 128, 64, false>();
  check_of_shared<TestType, 128, 128, false>();
  check_of_shared<TestType, 128, 128, true>();
  check_of_shared<TestType, 80, 256, false>();
  check_of_shared<TestType, 80, 256, true>();
}

TEMPLATE_TEST_CASE("sm90: products of two operands in shared memory, the right one transposed", "",
                   __half, __nv_bfloat16) {
  if (!has_hopper()) return;
  check_of_shared<TestType, 128, 64, true, /*kRowMajor=*/true>();
  check_of_shared<TestType, 128, 128, true, /*kRowMajor=*/true>();
}

TEMPLATE_TEST_CASE("sm90: products of registers with a transposed operand", "", __half,
                   __nv_bfloat16) {
  if (!has_hopper()) return;
  check_of_registers<TestType, 64, 128>();
  check_of_registers<TestType, 128, 128>();
  check_of_registers<TestType, 256, 80>();
}

TEMPLATE_TEST_CASE("sm90: values are added to some rows of a warpgroup", "", __half,
                   __nv_bfloat16) {
  if (!has_hopper()) return;
  for (const RowFlags& rows :
       {RowFlags{{true, true}}, RowFlags{{false, true}}, RowFlags{{true, false}}}) {
    check_of_registers<TestType, 64, 80, true>(rows);
    check_of_registers<TestType, 128, 128, true>(rows);
    check_of_registers<TestType, 256, 80, true>(rows);
  }
}

TEMPLATE_TEST_CASE("sm90: the older group of products can be read while the newer one runs", "",
                   __half, __nv_bfloat16) {
  if (!has_hopper()) return;
  constexpr int kN = 128;
  const auto q = eighths(kRows, kN, 7), k = eighths(kN, kN, 8), p = eighths(kRows, kN, 9),
             v = eighths(kN, kN, 10), before = eighths(kRows, kN, 11);
  const std::vector<float> zero(kRows * kN, 0.0f);
  const DeviceArray<TestType> device_q(image<TestType>(q, kRows, kN)),
      device_k(image<TestType>(k, kN, kN)), device_p(rounded<TestType>(p)),
      device_v(image<TestType>(v, kN, kN));
  const DeviceArray<float> d(std::vector<float>(kRows * kN, kNaN)), e(before);
  const auto kernel = multiply_both<TestType, kN>;
  allow_all_shared_memory(kernel);
  kernel<<<1, kThreads, kMaxSharedBytes>>>(as<uint4>(device_q), as<uint4>(device_k),
                                           as<uint32_t>(device_p), as<uint4>(device_v), d.data(),
                                           e.data());
  REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
  CHECK((d.values() == product(q, k, kN, kN, true, zero)));
  CHECK((e.values() == product(p, v, kN, kN, false, before)));
}

TEST_CASE("sm90: an operand's descriptor names its address, its distances and the swizzle") {
  if (!has_hopper()) return;
  for (uint32_t address : {1024u, 0x2AC00u, 0x38000u})
    for (uint32_t offset : {0u, 96u, 0x4060u}) {
      constexpr uint32_t kBlockBytes = 80 * 128;
      const DeviceArray<uint64_t> bits(std::vector<uint64_t>(2, 0));
      describe<<<1, 1>>>(address, kBlockBytes, offset, bits.data());
      REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
      const uint64_t swizzle_and_stride = uint64_t{1} << 62 | uint64_t{1024 / 16} << 32;
      const uint64_t at = (address + offset) / 16;
      CAPTURE(address, offset);
      CHECK(bits.values()[0] == (swizzle_and_stride | uint64_t{1} << 16 | at));
      CHECK(bits.values()[1] == (swizzle_and_stride | uint64_t{kBlockBytes / 16} << 16 | at));
    }
}
