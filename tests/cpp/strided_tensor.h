// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "attention/params.h"
#include "catch.h"

// Tensors of kernels without torch: values here, memory on the device.

namespace ringattn::testing {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

inline int bytes_of(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

/// x as `dtype` holds it, in 16 or 32 bits.
inline uint32_t to_bits(float x, DataType dtype) {
  if (dtype == DataType::kFloat16) return __half_as_ushort(__float2half(x));
  if (dtype == DataType::kBFloat16) return __bfloat16_as_ushort(__float2bfloat16(x));
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(x));
  return bits;
}

inline float from_bits(uint32_t bits, DataType dtype) {
  if (dtype == DataType::kFloat16) return __half2float(__ushort_as_half(bits));
  if (dtype == DataType::kBFloat16) return __bfloat162float(__ushort_as_bfloat16(bits));
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

/// A tensor [B, S, H, D] on the device, and its values here. Between strided rows lies NaN.
class Tensor {
 public:
  Tensor(DataType dtype, int batch, int rows, int heads, int dim, bool strided)
      : dtype_(dtype), batch_(batch), rows_(rows), heads_(heads), dim_(dim) {
    const int gap = strided ? 8 : 0;
    head_stride_ = dim_ + gap;
    row_stride_ = head_stride_ * heads_ + gap;
    batch_stride_ = row_stride_ * (rows_ + (strided ? 3 : 0));
    values.assign(size_t(batch_) * rows_ * heads_ * dim_, kNaN);
    const size_t bytes = std::max<size_t>(1, batch_stride_ * batch_ * bytes_of(dtype_));
    REQUIRE(cudaMalloc(&data_, bytes) == cudaSuccess);
  }
  ~Tensor() { cudaFree(data_); }
  Tensor(const Tensor&) = delete;
  Tensor& operator=(const Tensor&) = delete;

  float& at(int b, int i, int h, int d) {
    return values[((size_t(b) * rows_ + i) * heads_ + h) * dim_ + d];
  }
  float* row(int b, int i, int h) { return &at(b, i, h, 0); }

  void fill_normal(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (float& x : values) x = from_bits(to_bits(normal(random), dtype_), dtype_);
  }

  Strided copy_to_device() {
    std::vector<unsigned char> memory = packed();
    REQUIRE(cudaMemcpy(data_, memory.data(), memory.size(), cudaMemcpyDefault) == cudaSuccess);
    return {data_, batch_stride_, row_stride_, head_stride_};
  }

  /// Reads the values back. What lies between the rows must be as it was.
  void copy_from_device() {
    std::vector<unsigned char> before = packed(), memory(before.size());
    REQUIRE(cudaMemcpy(memory.data(), data_, memory.size(), cudaMemcpyDefault) == cudaSuccess);
    for_each([&](float& x, size_t offset) {
      uint32_t bits = 0;
      std::memcpy(&bits, &memory[offset], bytes_of(dtype_));
      x = from_bits(bits, dtype_);
      std::memcpy(&before[offset], &bits, bytes_of(dtype_));
    });
    CHECK(before == memory);
  }

  std::vector<float> values;

 private:
  template <typename Use>
  void for_each(const Use& use) {
    for (int b = 0; b < batch_; ++b)
      for (int i = 0; i < rows_; ++i)
        for (int h = 0; h < heads_; ++h)
          for (int d = 0; d < dim_; ++d)
            use(at(b, i, h, d), size_t(b * batch_stride_ + i * row_stride_ + h * head_stride_ + d) *
                                    bytes_of(dtype_));
  }

  std::vector<unsigned char> packed() {
    std::vector<unsigned char> memory(size_t(batch_stride_) * batch_ * bytes_of(dtype_), 0xff);
    for_each([&](float& x, size_t offset) {
      const uint32_t bits = to_bits(x, dtype_);
      std::memcpy(&memory[offset], &bits, bytes_of(dtype_));
    });
    return memory;
  }

  DataType dtype_;
  int batch_, rows_, heads_, dim_;
  int64_t batch_stride_, row_stride_, head_stride_;
  void* data_ = nullptr;
};

}  // namespace ringattn::testing
