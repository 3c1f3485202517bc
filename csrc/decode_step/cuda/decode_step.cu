// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "core/ceil_div.h"
#include "decode_step/cuda/decode_step.h"

namespace ringattn::cuda {
namespace {

constexpr int kWarpSize = 32;

/// Neighbouring elements of a row, 16 bytes of them.
template <typename Element>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(Element);
  Element x[kSize];
};

/// The sum over all threads of a block, in an order that depends on nothing but their number.
__device__ float block_sum(float x) {
  __shared__ float warp_sums[kWarpSize];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffff, x, offset);
  if (lane == 0) warp_sums[warp] = x;
  __syncthreads();
  x = lane < static_cast<int>(blockDim.x) / kWarpSize ? warp_sums[lane] : 0.0f;
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

/// A thread block for each row.
template <typename Element>
__global__ void add_rms_norm_kernel(const __grid_constant__ AddRmsNormParams p) {
  using Vec = Vector<Element>;
  const int num_vectors = p.width / Vec::kSize;
  const int64_t first = blockIdx.x * static_cast<int64_t>(num_vectors);
  const Vec* x = static_cast<const Vec*>(p.x) + first;
  const Vec* delta = static_cast<const Vec*>(p.delta) + first;
  Vec* sum = static_cast<Vec*>(p.sum) + first;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    const Vec a = x[i], b = delta[i];
    Vec added;
#pragma unroll
    for (int j = 0; j < Vec::kSize; ++j) {
      added.x[j] = Element(static_cast<float>(a.x[j]) + static_cast<float>(b.x[j]));
      const float rounded = static_cast<float>(added.x[j]);
      squares = fmaf(rounded, rounded, squares);
    }
    sum[i] = added;
  }
  const float scale = rsqrtf(block_sum(squares) / static_cast<float>(p.width) + p.eps);
  const Vec* weight = static_cast<const Vec*>(p.weight);
  Vec* normed = static_cast<Vec*>(p.normed) + first;
  for (int i = threadIdx.x; i < num_vectors; i += blockDim.x) {
    const Vec added = sum[i], w = weight[i];  // this thread's own
    Vec out;
#pragma unroll
    for (int j = 0; j < Vec::kSize; ++j) {
      out.x[j] = Element(static_cast<float>(w.x[j]) * (scale * static_cast<float>(added.x[j])));
    }
    normed[i] = out;
  }
}

template <typename Element>
__global__ void gated_silu_kernel(const __grid_constant__ GatedSiluParams p) {
  using Vec = Vector<Element>;
  const int num_vectors = p.width / Vec::kSize;
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= num_vectors) return;
  for (int64_t row = blockIdx.y; row < p.rows; row += gridDim.y) {
    const Vec* gate_up = static_cast<const Vec*>(p.gate_up) + 2 * row * num_vectors;
    const Vec gate = gate_up[i], up = gate_up[num_vectors + i];
    Vec out;
#pragma unroll
    for (int j = 0; j < Vec::kSize; ++j) {
      const float x = static_cast<float>(gate.x[j]);
      const Element activated = Element(x / (1.0f + expf(-x)));
      out.x[j] = Element(static_cast<float>(activated) * static_cast<float>(up.x[j]));
    }
    static_cast<Vec*>(p.out)[row * num_vectors + i] = out;
  }
}

/// A thread block for each head of a batch row, a thread for each pair of elements that rotate.
template <typename Element>
__global__ void rotate_into_cache_kernel(const __grid_constant__ RotateIntoCacheParams p) {
  const int half = p.head_dim / 2;
  const int heads = p.num_heads + 2 * p.num_kv_heads;
  const int head = static_cast<int>(blockIdx.x % heads);
  const int64_t batch = blockIdx.x / heads;
  const Element* from = static_cast<const Element*>(p.qkv) +
                        (batch * heads + head) * static_cast<int64_t>(p.head_dim);
  const bool is_query = head < p.num_heads;
  const bool is_value = head >= p.num_heads + p.num_kv_heads;
  Element* to;
  if (is_query) {
    to = static_cast<Element*>(p.q) +
         (batch * p.num_heads + head) * static_cast<int64_t>(p.head_dim);
  } else {
    const int slot = *p.slot;
    if (slot < 0 || slot >= p.capacity) return;
    const Strided& cache = is_value ? p.values : p.keys;
    const int kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
    to = static_cast<Element*>(cache.data) + batch * cache.batch_stride + slot * cache.row_stride +
         kv_head * cache.head_stride;
  }
  for (int i = static_cast<int>(threadIdx.x); i < half; i += static_cast<int>(blockDim.x)) {
    if (is_value) {
      to[i] = from[i];
      to[half + i] = from[half + i];
      continue;
    }
    const float low = static_cast<float>(from[i]), high = static_cast<float>(from[half + i]);
    to[i] = Element(fmaf(high, p.sin[i], low * p.cos[i]));
    to[half + i] = Element(fmaf(low, p.sin[half + i], high * p.cos[half + i]));
  }
}

template <typename Launch>
cudaError_t dispatch(DataType dtype, const Launch& launch) {
  switch (dtype) {
    case DataType::kFloat16:
      launch(__half{});
      break;
    case DataType::kBFloat16:
      launch(__nv_bfloat16{});
      break;
    case DataType::kFloat32:
      launch(float{});
      break;
  }
  return cudaGetLastError();
}

int64_t num_vectors(int32_t width, DataType dtype) {
  return width / (dtype == DataType::kFloat32 ? Vector<float>::kSize : Vector<__half>::kSize);
}

}  // namespace

cudaError_t add_rms_norm(const AddRmsNormParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  if (p.rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  constexpr int64_t kMaxThreads = 1024;
  const int64_t threads =
      std::min(kMaxThreads, ceil_div(num_vectors(p.width, p.dtype), kWarpSize) * kWarpSize);
  return dispatch(p.dtype, [&](auto element) {
    add_rms_norm_kernel<decltype(element)>
        <<<static_cast<unsigned>(p.rows), static_cast<unsigned>(threads), 0, stream>>>(p);
  });
}

cudaError_t gated_silu(const GatedSiluParams& p, cudaStream_t stream) {
  if (p.rows == 0 || p.width == 0) return cudaSuccess;
  constexpr int64_t kThreads = 128, kMaxGridY = 65535;
  const dim3 grid(static_cast<unsigned>(ceil_div(num_vectors(p.width, p.dtype), kThreads)),
                  static_cast<unsigned>(std::min(p.rows, kMaxGridY)));
  return dispatch(p.dtype, [&](auto element) {
    gated_silu_kernel<decltype(element)><<<grid, kThreads, 0, stream>>>(p);
  });
}

cudaError_t rotate_into_cache(const RotateIntoCacheParams& p, cudaStream_t stream) {
  const int64_t blocks = int64_t{p.batch} * (p.num_heads + 2 * p.num_kv_heads);
  if (blocks == 0 || p.head_dim == 0) return cudaSuccess;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const int64_t threads = ceil_div(p.head_dim / 2, kWarpSize) * kWarpSize;
  return dispatch(p.dtype, [&](auto element) {
    rotate_into_cache_kernel<decltype(element)>
        <<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), 0, stream>>>(p);
  });
}

}  // namespace ringattn::cuda
