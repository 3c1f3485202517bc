// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/params.h"

// Parameters of the kernels that run between the products of one decoded token: rows are few and
// short, so that the time of a launch is what counts, and each kernel does what would be several.

namespace ringattn {

/// sum = x + delta, rounded; normed = sum * weight / sqrt(mean(sum^2) + eps), computed in float32
/// and rounded once. All contiguous, of one dtype.
struct AddRmsNormParams {
  const void* x = nullptr;       // [rows, width]
  const void* delta = nullptr;   // [rows, width]
  const void* weight = nullptr;  // [width]
  void* sum = nullptr;           // [rows, width]
  void* normed = nullptr;        // [rows, width]
  int64_t rows = 0;
  int32_t width = 0;  // a multiple of 8
  float eps = 0.0f;
  DataType dtype = DataType::kBFloat16;
};

/// out = silu(gate) * up, each factor rounded.
struct GatedSiluParams {
  const void* gate_up = nullptr;  // [rows, 2 * width]: gate, then up
  void* out = nullptr;            // [rows, width]
  int64_t rows = 0;
  int32_t width = 0;  // a multiple of 8
  DataType dtype = DataType::kBFloat16;
};

/// Rotates the query and key heads of one new token in each batch row, and writes its keys and
/// values to their place in a cache.
struct RotateIntoCacheParams {
  const void* qkv = nullptr;      // [B, H + 2 * H_kv, D]: query, key, value heads
  const float* cos = nullptr;     // [D]
  const float* sin = nullptr;     // [D], the first half negated
  void* q = nullptr;              // [B, H, D]
  Strided keys;                   // [B, capacity, H_kv, D]
  Strided values;                 // [B, capacity, H_kv, D]
  const int32_t* slot = nullptr;  // [1]: the token's row in the cache; negative: none
  int32_t batch = 0;
  int32_t capacity = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;  // D, even
  DataType dtype = DataType::kBFloat16;
};

}  // namespace ringattn
