// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "attention/cuda/merge_row.cuh"
#include "attention/cuda/sum_rows.h"
#include "core/ceil_div.h"

namespace ringattn::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 4;

template <typename Out>
__global__ void __launch_bounds__(kThreads)
    sum_rows_kernel(const __grid_constant__ SumRowsParams p) {
  const uint32_t row_vectors = p.row_elements / kVector;
  const uint32_t index = blockIdx.x * kThreads + threadIdx.x;
  const int32_t row = static_cast<int32_t>(index / row_vectors);
  if (row >= p.rows) return;
  const uint32_t column = (index - row * row_vectors) * kVector;
  for (int32_t plane = blockIdx.y; plane < p.planes; plane += gridDim.y) {
    const auto at = [&](int64_t planes, int64_t next_plane, int32_t rows) {
      return planes * next_plane + int64_t{rows} * p.row_elements + column;
    };
    const int64_t plane_elements = int64_t{p.rows} * p.row_elements;
    Floats<kVector> sum;
    sum.load(p.sum + at(plane, plane_elements, row));
#pragma unroll 4
    for (int i = 0; i < p.num_parts; ++i) {
      const SumRowsParams::Part& part = p.parts[i];
      if (row < part.begin || row >= part.end) continue;
      Floats<kVector> x;
      x.load(part.data + at(plane, part.next_plane, row - part.begin));
#pragma unroll
      for (int j = 0; j < kVector; ++j) sum.x[j] += x.x[j];
    }
    const int32_t half = p.planes / 2;
    Out* const out = static_cast<Out*>(p.out[plane >= half]);
    sum.store(out + at(plane % half, plane_elements, row), 1.0f);
  }
}

template <typename Out>
cudaError_t launch_sum(const SumRowsParams& p, cudaStream_t stream) {
  const int64_t vectors = int64_t{p.rows} * (p.row_elements / kVector);
  constexpr int kMaxGridY = 65535;
  if (vectors > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(ceil_div(vectors, kThreads)),
                  std::min(p.planes, kMaxGridY));
  sum_rows_kernel<Out><<<grid, kThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace

cudaError_t sum_rows(const SumRowsParams& p, cudaStream_t stream) {
  if (p.planes == 0 || p.rows == 0 || p.row_elements == 0) return cudaSuccess;
  if (p.row_elements % kVector != 0) return cudaErrorInvalidValue;
  switch (p.out_dtype) {
    case DataType::kFloat16:
      return launch_sum<__half>(p, stream);
    case DataType::kBFloat16:
      return launch_sum<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return launch_sum<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ringattn::cuda
