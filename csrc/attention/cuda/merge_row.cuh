// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention/cuda/numeric.cuh"
#include "attention/params.h"

// The merge of states, by one warp for a row: what kernels that merge share, so that they give the
// same bits.

namespace ringattn::cuda {

constexpr int kWarpSize = 32;
constexpr int kStatesInFlight = 5;  // loads a lane has under way

/// kVector neighbouring elements of a row.
template <int kVector>
struct Floats {
  float x[kVector] = {};

  template <typename In>
  __device__ void load(const In* from) {
    static_assert(sizeof(In) == sizeof(float));
    if constexpr (kVector == 4) {
      const float4 v = *reinterpret_cast<const float4*>(from);
      x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
    } else {
      x[0] = *from;
    }
  }

  template <typename Out>
  __device__ void store(Out* to, float factor) const {
    if constexpr (kVector == 4 && sizeof(Out) == sizeof(float)) {
      *reinterpret_cast<float4*>(to) =
          make_float4(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor);
    } else if constexpr (kVector == 4) {
      *reinterpret_cast<uint2*>(to) = make_uint2(pack<Out>(x[0] * factor, x[1] * factor),
                                                 pack<Out>(x[2] * factor, x[3] * factor));
    } else {
      *to = Out(x[0] * factor);
    }
  }
};

/// sum_i exp(lse_i - max) * out_i and its weights' total; max is the largest lse so far. What an
/// empty state holds is left out: a NaN of its out would outlive the weight 0.
template <int kVector>
struct RunningMerge {
  Floats<kVector> sum;
  float total = 0.0f;
  float max = -INFINITY;

  __device__ void add(float lse, const Floats<kVector>& out) { add(lse, 1.0f, out); }
  __device__ void add(const RunningMerge& other) { add(other.max, other.total, other.sum); }

  __device__ void add(float other_max, float other_total, const Floats<kVector>& other_sum) {
    const float before = max;
    max = fmaxf(max, other_max);
    // Nothing but empty states so far: exp(-inf - 0) is 0, exp(-inf - -inf) would be NaN. A NaN,
    // which fmaxf drops, stays in its own weight.
    const float offset = max == -INFINITY ? 0.0f : max;
    const float decay = exp2_approx((before - offset) * kLog2E);
    const float weight = exp2_approx((other_max - offset) * kLog2E);
    const bool empty = other_max == -INFINITY;
    total = fmaf(total, decay, weight * other_total);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float added = weight * other_sum.x[i];
      sum.x[i] = fmaf(sum.x[i], decay, empty ? 0.0f : added);
    }
  }

  __device__ float norm() const { return total == 0.0f ? 0.0f : reciprocal(total); }
  __device__ float lse() const {
    return total == 0.0f ? -INFINITY : max + log2_approx(total) * kLn2;
  }
};

/// out[row] and lse[row] of one head, by one warp, which so reads all of a row before it writes.
template <typename Out, int kVector>
__device__ void merge_row(const MergeStatesParams& p, int64_t batch, int64_t row, int64_t head) {
  const int lane = threadIdx.x % kWarpSize;
  Out* out = static_cast<Out*>(p.out.data) + batch * p.out.batch_stride + row * p.out.row_stride +
             head * p.out.head_stride;
  float* lse = p.lse + batch * p.lse_batch_stride + head * p.lse_head_stride + row;
  const float* first_out = static_cast<const float*>(p.states.data) +
                           batch * p.states.batch_stride + row * p.states.row_stride +
                           head * p.states.head_stride;
  const float* first_lse =
      p.states_lse + batch * p.states_lse_batch_stride + head * p.states_lse_head_stride + row;

  float merged_lse = -INFINITY;
  for (int begin = 0; begin < p.head_dim; begin += kWarpSize * kVector) {
    // Lanes past the end repeat the last columns, for the sake of the row's lse.
    const int column = min(begin + lane * kVector, p.head_dim - kVector);
    RunningMerge<kVector> merge;
    if constexpr (std::is_same_v<Out, float>) {
      if (p.fold) {
        Floats<kVector> x;
        x.load(out + column);
        merge.add(*lse, x);
      }
    }
#pragma unroll kStatesInFlight
    for (int state = 0; state < p.num_states; ++state) {
      Floats<kVector> x;
      x.load(first_out + state * p.next_state + column);
      merge.add(first_lse[state * p.next_state_lse], x);
    }
    __syncwarp();
    if (begin + lane * kVector < p.head_dim) merge.sum.store(out + column, merge.norm());
    merged_lse = merge.lse();
  }
  __syncwarp();
  if (p.lse != nullptr && lane == 0) *lse = merged_lse;
}

}  // namespace ringattn::cuda
