// SPDX-License-Identifier: Apache-2.0
#pragma once

// A warpgroup's accumulators of [64, kN] in memory: where each thread's numbers lie. Of several
// warpgroups each has 64 rows.

/// Row and column of accumulator i.
__device__ inline int accumulator_row(int i) {
  return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
__device__ inline int accumulator_column(int i) { return i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2; }

template <int kN>
__device__ void read_accumulators(float (&accumulators)[kN / 2], const float* d) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    accumulators[i] = d[accumulator_row(i) * kN + accumulator_column(i)];
  }
}

template <int kN>
__device__ void write_accumulators(const float (&accumulators)[kN / 2], float* d) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) {
    d[accumulator_row(i) * kN + accumulator_column(i)] = accumulators[i];
  }
}
