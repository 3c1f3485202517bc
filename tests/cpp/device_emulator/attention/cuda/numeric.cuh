// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "device_emulator.h"

// In place of csrc/attention/cuda/numeric.cuh where a test emulates device code: instructions of
// the device that a host does not have.

namespace ringattn::cuda {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

inline float to_bfloat16(float x) {
  if (std::isnan(x)) return x;
  const auto bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000u);
}
inline float exp2_approx(float x) { return std::exp2(x); }
inline float log2_approx(float x) { return std::log2(x); }
inline float reciprocal(float x) { return 1.0f / x; }

template <typename Element>
uint32_t pack(float first, float second);  // not called

}  // namespace ringattn::cuda
