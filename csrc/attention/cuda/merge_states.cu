// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>

#include "attention/cuda/alignment.h"
#include "attention/cuda/merge_states.h"

namespace ringattn::cuda {
namespace {

constexpr int kWarpSize = 32;
constexpr int kWarps = 4;           // rows of a thread block
constexpr int kStatesInFlight = 8;  // loads a lane has under way
constexpr unsigned kAllLanes = 0xffffffffu;

/// kVector neighbouring elements of a row.
template <int kVector>
struct Floats {
  float x[kVector];

  __device__ void load(const float* from) {
    if constexpr (kVector == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      x[0] = *from;
    }
  }

  __device__ void add(float weight, const Floats& other) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = fmaf(weight, other.x[i], x[i]);
  }

  template <typename Out>
  __device__ void store(Out* to) const {
    if constexpr (kVector == 4 && sizeof(Out) == 4) {
      *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else if constexpr (kVector == 4) {
      alignas(8) Out rounded[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rounded[i] = Out(x[i]);
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(rounded);
    } else {
      *to = Out(x[0]);
    }
  }
};

/// One warp per row. State 0 of the merge is what out and lse hold, when folding.
template <typename Out, int kVector>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const int lane = threadIdx.x % kWarpSize;
  const unsigned index = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const int64_t row = index / static_cast<unsigned>(p.num_heads);
  const int64_t head = index % static_cast<unsigned>(p.num_heads);
  const int64_t batch = blockIdx.y;
  if (row >= p.num_queries) return;

  Out* out = static_cast<Out*>(p.out.data) + batch * p.out.batch_stride + row * p.out.row_stride +
             head * p.out.head_stride;
  float* lse = p.lse + batch * p.lse_batch_stride + head * p.lse_head_stride + row;
  const float* first_out = static_cast<const float*>(p.states.data) +
                           batch * p.states.batch_stride + row * p.states.row_stride +
                           head * p.states.head_stride;
  const float* first_lse =
      p.states_lse + batch * p.states_lse_batch_stride + head * p.states_lse_head_stride + row;

  const float lse_before = p.fold ? *lse : -INFINITY;
  const auto lse_of = [&](int state) {
    return state < p.num_states ? first_lse[state * p.next_state_lse] : -INFINITY;
  };

  // max = lses.max()
  float max = lse_before;
  bool empty = lse_before == -INFINITY;
  for (int state = lane; state < p.num_states; state += kWarpSize) {
    max = fmaxf(max, lse_of(state));
    empty = empty && lse_of(state) == -INFINITY;
  }
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
    max = fmaxf(max, __shfl_xor_sync(kAllLanes, max, lanes));
  empty = __all_sync(kAllLanes, empty);

  // total = (lses - max).exp().sum(); a NaN, which the maximum drops, stays in its own exp. No max:
  // all is -inf.
  const auto weight_of = [&](float x) { return empty ? 0.0f : expf(x - max); };
  float total = 0.0f;
  for (int state = lane; state < p.num_states; state += kWarpSize)
    total += weight_of(lse_of(state));
  for (int lanes = kWarpSize / 2; lanes > 0; lanes /= 2)
    total += __shfl_xor_sync(kAllLanes, total, lanes);
  const float weight_before = weight_of(lse_before);
  total += weight_before;
  const float norm = empty ? 0.0f : 1.0f / total;

  // out = sum((lses - max).exp() / total * outs)
  for (int begin = 0; begin < p.head_dim; begin += kWarpSize * kVector) {
    const int column = begin + lane * kVector;
    const bool inside = column < p.head_dim;
    Floats<kVector> sum = {};
    if constexpr (sizeof(Out) == sizeof(float)) {
      if (p.fold && inside) {
        Floats<kVector> x;
        x.load(out + column);
        sum.add(weight_before * norm, x);
      }
    }
    for (int group = 0; group < p.num_states; group += kWarpSize) {
      const float weight = weight_of(lse_of(group + lane)) * norm;
#pragma unroll kStatesInFlight
      for (int state = group; state < min(group + kWarpSize, p.num_states); ++state) {
        const float w = __shfl_sync(kAllLanes, weight, state - group);
        if (inside) {
          Floats<kVector> x;
          x.load(first_out + state * p.next_state + column);
          sum.add(w, x);
        }
      }
    }
    if (inside) sum.store(out + column);
  }
  __syncwarp();  // every lane has read lse
  if (p.lse != nullptr && lane == 0) *lse = empty ? -INFINITY : max + logf(total);
}

template <typename Out>
cudaError_t launch(const MergeStatesParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.num_queries} * p.num_heads;  // of a batch entry
  constexpr int kMaxGridY = 65535;
  if (rows > INT32_MAX || p.batch > kMaxGridY) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps), p.batch);
  const bool vectors =
      p.head_dim % 4 == 0 &&
      rows_are_aligned(p.out, sizeof(Out), p.batch, p.num_queries, p.num_heads) &&
      rows_are_aligned(p.states, sizeof(float), p.batch, p.num_queries, p.num_heads) &&
      (p.num_states <= 1 || p.next_state % 4 == 0);
  const auto kernel = vectors ? merge_states_kernel<Out, 4> : merge_states_kernel<Out, 1>;
  kernel<<<grid, kWarps * kWarpSize, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t merge_states(const MergeStatesParams& p, cudaStream_t stream) {
  if (p.batch == 0 || p.num_queries == 0 || p.num_heads == 0) return cudaSuccess;
  if (p.fold && (p.out_dtype != DataType::kFloat32 || p.lse == nullptr))
    return cudaErrorInvalidValue;
  switch (p.out_dtype) {
    case DataType::kFloat16:
      return launch<__half>(p, stream);
    case DataType::kBFloat16:
      return launch<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return launch<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ringattn::cuda
