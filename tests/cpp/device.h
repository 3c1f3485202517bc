// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <random>
#include <vector>

#include "catch.h"
#include "skipped_tests.h"

// What tests of device code share: whether there is a device, memory on it, random numbers.

inline bool has_device() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
  skipped_tests.add();
  return false;
}

/// Whether code for sm_90a runs here.
inline bool has_hopper() {
  cudaDeviceProp properties;
  if (!has_device()) return false;
  REQUIRE(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  if (properties.major == 9 && properties.minor == 0) return true;
  skipped_tests.add();
  return false;
}

/// Device memory of n elements, copied in and out.
template <typename T>
class DeviceArray {
 public:
  explicit DeviceArray(const std::vector<T>& values) : size_(values.size()) {
    REQUIRE(cudaMalloc(&data_, size_ * sizeof(T)) == cudaSuccess);
    REQUIRE(cudaMemcpy(data_, values.data(), size_ * sizeof(T), cudaMemcpyDefault) == cudaSuccess);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::vector<T> values() const {
    std::vector<T> values(size_);
    REQUIRE(cudaMemcpy(values.data(), data_, size_ * sizeof(T), cudaMemcpyDefault) == cudaSuccess);
    return values;
  }

 private:
  T* data_ = nullptr;
  size_t size_;
};

inline std::vector<float> random_values(size_t n, int seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(n);
  for (float& value : values) value = normal(generator);
  return values;
}

template <typename Element>
std::vector<Element> rounded(const std::vector<float>& values) {
  std::vector<Element> result;
  for (float value : values) result.push_back(Element(value));
  return result;
}
