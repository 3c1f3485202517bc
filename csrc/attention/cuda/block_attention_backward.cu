// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "attention/cuda/alignment.h"
#include "attention/cuda/block_attention_backward.h"
#include "attention/cuda/kernel_choice.h"
#include "attention/cuda/sm80/group_parts.h"
#include "attention/cuda/sm80/launch.h"
#include "attention/cuda/sm90/backward/launch.h"
#include "attention/cuda/sm90/device_limits.h"
#include "attention/cuda/sm90/launch.h"

namespace ringattn::cuda {
namespace {

constexpr int kLanesPerRow = 8;
constexpr int kThreads = 256;
constexpr int kRows = kThreads / kLanesPerRow;

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

/// kVector adjacent elements, as one access.
template <typename Element, int kVector>
struct alignas(sizeof(Element) * kVector) Elements {
  Element x[kVector];
};

/// kLanesPerRow threads add up a row of a head, and clear its dq; adjacent rows of a warp are
/// adjacent in delta. A thread block has kRows rows of a head. Its neighbours have the other heads
/// of these rows, so that what is read and written at one time is adjacent in memory.
template <typename Element, int kVector>
__global__ void __launch_bounds__(kThreads)
    attention_delta_kernel(const __grid_constant__ AttentionDeltaParams p) {
  const int64_t head = blockIdx.x % p.num_heads, tile = blockIdx.x / p.num_heads;
  const int64_t tiles = (int64_t{p.num_queries} + kRows - 1) / kRows;
  const int64_t row = tile % tiles * kRows + threadIdx.x / kLanesPerRow, batch = tile / tiles;
  const int lane = threadIdx.x % kLanesPerRow;
  const bool exists = row < p.num_queries;
  float sum = 0.0f;
  if (exists && p.grad_out.data != nullptr) {
    const auto at = [&](const Strided& x) {
      return static_cast<const Element*>(x.data) + batch * x.batch_stride + row * x.row_stride +
             head * x.head_stride;
    };
    const Element *grad_out = at(p.grad_out), *out = at(p.out);
    for (int column = lane * kVector; column < p.head_dim; column += kLanesPerRow * kVector) {
      using Vector = Elements<Element, kVector>;
      const Vector a = *reinterpret_cast<const Vector*>(grad_out + column);
      const Vector b = *reinterpret_cast<const Vector*>(out + column);
#pragma unroll
      for (int i = 0; i < kVector; ++i) sum = fmaf(to_float(a.x[i]), to_float(b.x[i]), sum);
    }
  }
  if (exists) {
    constexpr int kFloats = kVector > 1 ? 4 : 1;
    using Vector = Elements<float, kFloats>;
    float* const dq = p.dq + ((batch * p.num_queries + row) * p.num_heads + head) * p.head_dim;
    for (int column = lane * kFloats; column < p.head_dim; column += kLanesPerRow * kFloats) {
      *reinterpret_cast<Vector*>(dq + column) = {};
    }
  }
#pragma unroll
  for (int other = kLanesPerRow / 2; other > 0; other /= 2) {
    sum += __shfl_xor_sync(0xffffffff, sum, other);
  }
  if (!exists || lane != 0) return;
  if (p.grad_lse != nullptr) {
    sum -= p.grad_lse[batch * p.grad_lse_batch_stride + head * p.grad_lse_head_stride +
                      row * p.grad_lse_row_stride];
  }
  p.delta[(batch * p.num_heads + head) * p.num_queries + row] = sum;
}

template <typename Element>
cudaError_t launch_delta(const AttentionDeltaParams& p, cudaStream_t stream) {
  const int64_t tiles = (int64_t{p.num_queries} + kRows - 1) / kRows;
  const int64_t blocks = p.batch * tiles * p.num_heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const auto aligned = [&](const Strided& x) {
    return rows_are_aligned(x, sizeof(Element), p.batch, p.num_queries, p.num_heads);
  };
  constexpr int kVector = 16 / sizeof(Element);
  const bool vectors = p.head_dim % kVector == 0 && aligned(p.grad_out) && aligned(p.out);
  const auto kernel =
      vectors ? attention_delta_kernel<Element, kVector> : attention_delta_kernel<Element, 1>;
  kernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <typename Element>
cudaError_t dispatch_head_dim(const BlockAttentionBackwardParams& p, cudaStream_t stream) {
  if (p.head_dim <= 64) return sm80::launch_block_attention_backward<Element, 64>(p, stream);
  if (p.head_dim <= 128) return sm80::launch_block_attention_backward<Element, 128>(p, stream);
  if (p.head_dim <= 256) return sm80::launch_block_attention_backward<Element, 256>(p, stream);
  return cudaErrorInvalidValue;
}

/// Whether p goes to the Hopper family first; where that is asked for, also if it cannot run.
bool prefers_sm90(const BlockAttentionBackwardParams& p) {
  return wants_sm90(/*unless_set=*/true) && sm90::supports_backward(p) &&
         (sm90::available() || wants_sm90(/*unless_set=*/false));
}

}  // namespace

cudaError_t attention_delta(const AttentionDeltaParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.num_queries == 0 || p.num_heads == 0) return cudaSuccess;
  switch (p.dtype) {
    case DataType::kFloat16:
      return launch_delta<__half>(p, stream);
    case DataType::kBFloat16:
      return launch_delta<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return launch_delta<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

bool gains_by_semaphore(const BlockAttentionBackwardParams& p) {
  return wants_sm90(/*unless_set=*/true) && sm90::available() && sm90::gains_by_semaphore(p);
}

int choose_group_parts(const BlockAttentionBackwardParams& p) {
  if (prefers_sm90(p)) return 1;
  int device = 0;
  sm90::DeviceLimits limits;
  if (cudaGetDevice(&device) != cudaSuccess || sm90::device_limits(device, limits) != cudaSuccess) {
    return 1;
  }
  return sm80::choose_group_parts(p, limits.multiprocessors);
}

cudaError_t block_attention_backward(const BlockAttentionBackwardParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.num_keys == 0 || p.num_kv_heads == 0) return cudaSuccess;
  if (p.deterministic && p.semaphores == nullptr && p.num_queries > 0) return cudaErrorInvalidValue;
  if (p.group_parts > 1 &&
      (p.rounds_key_gradients || p.num_heads % (p.num_kv_heads * p.group_parts) != 0)) {
    return cudaErrorInvalidValue;
  }
  if (prefers_sm90(p)) {
    const cudaError_t error =
        sm90::available() ? sm90::block_attention_backward(p, stream) : cudaErrorNotSupported;
    if (error != cudaErrorNotSupported || wants_sm90(/*unless_set=*/false)) return error;
  }
  switch (p.dtype) {
    case DataType::kFloat16:
      return dispatch_head_dim<__half>(p, stream);
    case DataType::kBFloat16:
      return dispatch_head_dim<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return dispatch_head_dim<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ringattn::cuda
