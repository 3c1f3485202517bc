// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "attention/cuda/alignment.h"
#include "attention/cuda/merge_row.cuh"
#include "attention/cuda/merge_states.h"
#include "peer_sync/dependent_launch.cuh"
#include "peer_sync/launch.cuh"

namespace ringattn::cuda {
namespace {

constexpr int kWarps = 4;  // rows of a thread block
// Of more splits of a decode, several warps merge a part each: one alone takes 10 us for 50. States
// of ranks are merged one by one, however many: exchange_partials does so, too.
constexpr int kManyStates = 8;
constexpr int kWarpsForMany = 8;

template <typename Out, int kVector>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    merge_states_kernel(const __grid_constant__ MergeStatesParams p) {
  const unsigned index = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const unsigned row = index / p.num_heads, head = index % p.num_heads;
  if (row >= static_cast<unsigned>(p.num_queries)) return;
  for (int batch = blockIdx.y; batch < p.batch; batch += gridDim.y) {
    merge_row<Out, kVector>(p, batch, row, head);
  }
}

/// A thread block for each row of a head: each warp merges every kWarpsForMany-th state, the first
/// warp then what the others have. Writes no lse where p.lse is null; folds nothing.
template <typename Out, int kVector>
__global__ void __launch_bounds__(kWarpsForMany* kWarpSize)
    merge_many_states_kernel(const __grid_constant__ MergeStatesParams p) {
  using Merge = RunningMerge<kVector>;
  alignas(16) __shared__ unsigned char memory[kWarpsForMany * kWarpSize * sizeof(Merge)];
  Merge* const merged = reinterpret_cast<Merge*>(memory);  // [kWarpsForMany][kWarpSize]
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const unsigned head = blockIdx.x % p.num_heads;
  const int64_t row = blockIdx.x / p.num_heads % p.num_queries;
  const int64_t batch = blockIdx.x / p.num_heads / p.num_queries;
  const float* first_out = static_cast<const float*>(p.states.data) +
                           batch * p.states.batch_stride + row * p.states.row_stride +
                           head * p.states.head_stride;
  const float* first_lse =
      p.states_lse + batch * p.states_lse_batch_stride + head * p.states_lse_head_stride + row;
  wait_for_previous_kernel();
  for (int begin = 0; begin < p.head_dim; begin += kWarpSize * kVector) {
    const int column = min(begin + lane * kVector, p.head_dim - kVector);
    Merge merge;
#pragma unroll kStatesInFlight
    for (int state = warp; state < p.num_states; state += kWarpsForMany) {
      Floats<kVector> x;
      x.load(first_out + state * p.next_state + column);
      merge.add(first_lse[state * p.next_state_lse], x);
    }
    merged[threadIdx.x] = merge;
    __syncthreads();
    if (warp == 0) {
#pragma unroll
      for (int other = 1; other < kWarpsForMany; ++other) {
        merge.add(merged[other * kWarpSize + lane]);
      }
      if (begin + lane * kVector < p.head_dim) {
        merge.sum.store(static_cast<Out*>(p.out.data) + batch * p.out.batch_stride +
                            row * p.out.row_stride + head * p.out.head_stride + column,
                        merge.norm());
      }
      if (begin == 0 && lane == 0 && p.lse != nullptr) {
        p.lse[batch * p.lse_batch_stride + head * p.lse_head_stride + row] = merge.lse();
      }
    }
    __syncthreads();
  }
}

template <typename Out, int kVector>
cudaError_t launch_many(const MergeStatesParams& p, cudaStream_t stream) {
  const int64_t blocks = int64_t{p.batch} * p.num_queries * p.num_heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch<merge_many_states_kernel<Out, kVector>>(p, blocks, kWarpsForMany * kWarpSize,
                                                        p.follows_closely, stream);
}

template <typename Out>
cudaError_t launch_merge(const MergeStatesParams& p, cudaStream_t stream) {
  const int64_t rows = int64_t{p.num_queries} * p.num_heads;  // of a batch entry
  constexpr int kMaxGridY = 65535;
  if (rows > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>((rows + kWarps - 1) / kWarps),
                  std::min(p.batch, kMaxGridY));
  const bool vectors =
      p.head_dim % 4 == 0 &&
      rows_are_aligned(p.out, sizeof(Out), p.batch, p.num_queries, p.num_heads) &&
      rows_are_aligned(p.states, sizeof(float), p.batch, p.num_queries, p.num_heads) &&
      (p.num_states <= 1 || p.next_state % 4 == 0);
  if (p.follows_closely && p.num_states > kManyStates) {
    return vectors ? launch_many<Out, 4>(p, stream) : launch_many<Out, 1>(p, stream);
  }
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
      return launch_merge<__half>(p, stream);
    case DataType::kBFloat16:
      return launch_merge<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return launch_merge<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ringattn::cuda
