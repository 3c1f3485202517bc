// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm80/mma.cuh"

// Tiles of q, k and v on their way from global to shared memory.
//
// A tile [rows, kHeadDim] lies in shared memory with rows of `kPitch` bytes, a multiple of 128. The
// 16-byte chunk c of a row lies at chunk c ^ (row % 8), so that eight rows' chunks of the same
// column (what ldmatrix reads) fall into different banks. Tiles begin at multiples of 128 bytes.

namespace ringattn::cuda::sm80 {

constexpr int kChunkBytes = 16;
constexpr int kLineBytes = 128;

/// Bytes of a tile's row in shared memory.
template <typename Element, int kHeadDim>
constexpr int kPitch =
    (kHeadDim * static_cast<int>(sizeof(Element)) + kLineBytes - 1) / kLineBytes* kLineBytes;

/// Copies 16 bytes asynchronously, or writes 16 zero bytes and reads nothing.
__device__ __forceinline__ void copy_chunk_async(uint32_t shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :
               : "r"(shared), "l"(global), "r"(valid ? kChunkBytes : 0)
               : "memory");
}

__device__ __forceinline__ void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

/// Waits until at most kPending of this thread's committed groups are still on their way.
template <int kPending>
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

__device__ __forceinline__ void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

/// How kThreads threads copy tiles of kRows rows: eight neighbouring threads take 128 bytes of a
/// row, so a thread's column within them never changes.
template <typename Element, int kRows, int kHeadDim, int kThreads>
struct TileCopy {
  static constexpr int kRowPitch = kPitch<Element, kHeadDim>;
  static constexpr int kBytes = kRows * kRowPitch;
  static constexpr int kElementsPerChunk = kChunkBytes / sizeof(Element);
  static constexpr int kElementsPerLine = kLineBytes / sizeof(Element);
  static constexpr int kRowsPerPass = kThreads / 8;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static constexpr int kLines = kRowPitch / kLineBytes;
  static_assert(kRows % kRowsPerPass == 0);

  const Element* source;  // this thread's element of row 0 of the tensor
  int64_t row_stride;
  int head_dim;
  int row;     // of this thread in a tile's first pass
  int column;  // of this thread in a row's first line

  __device__ TileCopy(const void* head, int64_t row_stride, int head_dim, int thread)
      : row_stride(row_stride),
        head_dim(head_dim),
        row(thread / 8),
        column(thread % 8 * kElementsPerChunk) {
    source = static_cast<const Element*>(head) + row * row_stride + column;
  }

  __device__ static uint32_t offset(int row, int chunk) {
    return row * kRowPitch + ((chunk ^ (row % 8)) * kChunkBytes);
  }

  /// tile = tensor[first : first + kRows]; rows from num_rows and columns from head_dim on are
  /// zero.
  __device__ __forceinline__ void load(uint32_t tile, int first, int num_rows) const {
    const Element* from = source + first * row_stride;
    const int rows_left = num_rows - first - row;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int tile_row = row + pass * kRowsPerPass;
      const uint32_t to = tile + offset(tile_row, threadIdx.x % 8);
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        const bool valid =
            pass * kRowsPerPass < rows_left && column + line * kElementsPerLine < head_dim;
        copy_chunk_async(to + line * kLineBytes, from + line * kElementsPerLine, valid);
      }
      from += kRowsPerPass * row_stride;
    }
  }

  /// tile = -tile, this thread's own copies; they must have arrived.
  __device__ void negate(unsigned char* tile) const {
    constexpr uint32_t kSigns = sizeof(Element) == 2 ? 0x80008000u : 0x80000000u;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      unsigned char* to = tile + offset(row + pass * kRowsPerPass, threadIdx.x % 8);
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        uint4& chunk = *reinterpret_cast<uint4*>(to + line * kLineBytes);
        chunk = make_uint4(chunk.x ^ kSigns, chunk.y ^ kSigns, chunk.z ^ kSigns, chunk.w ^ kSigns);
      }
    }
  }
};

}  // namespace ringattn::cuda::sm80
