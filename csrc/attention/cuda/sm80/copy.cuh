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

/// Copies 16 bytes asynchronously; where not `item < num_items`, writes zeros and reads nothing.
__device__ __forceinline__ void copy_chunk_async(uint32_t shared, const void* global, int item,
                                                 int num_items) {
  // Note: compared here, so that the results are not kept in registers across a loop.
  asm volatile(
      "{\n"
      ".reg .pred valid;\n"
      ".reg .b32 bytes;\n"
      "setp.lt.s32 valid, %2, %3;\n"
      "selp.b32 bytes, %4, 0, valid;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], %4, bytes;\n"
      "}"
      :
      : "r"(shared), "l"(global), "r"(item), "r"(num_items), "n"(kChunkBytes)
      : "memory");
}

__device__ __forceinline__ void copy_float_async(uint32_t shared, const float* global) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared), "l"(global) : "memory");
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
  static constexpr int kRowsPerPass = kThreads / 8;
  static constexpr int kPasses = kRows / kRowsPerPass;
  static constexpr int kLines = kRowPitch / kLineBytes;
  static_assert(kRows % kRowsPerPass == 0);

  const unsigned char* source;  // this thread's column of row 0 of the tensor
  int row_bytes;                // from row to row of the tensor
  int num_lines;                // how many of a row's lines have something in this thread's column

  /// head: row 0 of a tensor [rows, head_dim].
  __device__ TileCopy(const void* head, int64_t row_stride, int head_dim)
      : row_bytes(static_cast<int>(row_stride * sizeof(Element))) {
    const int column_byte = chunk() * kChunkBytes;
    const int head_bytes = head_dim * static_cast<int>(sizeof(Element));
    source = static_cast<const unsigned char*>(head) + column_byte;
    num_lines = (head_bytes - column_byte + kLineBytes - 1) / kLineBytes;
  }

  /// This thread's row in a tile's first pass, and its chunk in a line.
  __device__ static int first_row() { return threadIdx.x % kThreads / 8; }
  __device__ static int chunk() { return threadIdx.x % 8; }

  /// The address of a chunk of a tile's row.
  __host__ __device__ static constexpr uint32_t offset(unsigned row, unsigned chunk) {
    return row * kRowPitch + ((chunk ^ (row % 8)) * kChunkBytes);
  }

  /// tile = tensor[first : first + kRows]; rows from num_rows and columns from head_dim on are
  /// zero.
  __device__ __forceinline__ void load(uint32_t tile, int first, int num_rows) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row() + pass * kRowsPerPass;
      const uint32_t to = tile + offset(row, chunk());
      // Note: 32 by 32 bits give 64, one instruction; a 64-bit stride would cost registers.
      const unsigned char* from = source + int64_t{first + row} * row_bytes;
      const int lines = first + row < num_rows ? num_lines : 0;
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        copy_chunk_async(to + line * kLineBytes, from + line * kLineBytes, line, lines);
      }
    }
  }

  /// The same for rows that are wanted(row of the tile) alone; the others are zero.
  template <typename Wanted>
  __device__ __forceinline__ void load_where(uint32_t tile, int first, const Wanted& wanted) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int row = first_row() + pass * kRowsPerPass;
      const uint32_t to = tile + offset(row, chunk());
      const unsigned char* from = source + int64_t{first + row} * row_bytes;
      const int lines = wanted(row) ? num_lines : 0;
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        copy_chunk_async(to + line * kLineBytes, from + line * kLineBytes, line, lines);
      }
    }
  }

  /// tile = -tile, this thread's own copies; they must have arrived.
  __device__ void negate(unsigned char* tile) const {
    constexpr uint32_t kSigns = sizeof(Element) == 2 ? 0x80008000u : 0x80000000u;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      unsigned char* to = tile + offset(first_row() + pass * kRowsPerPass, chunk());
#pragma unroll
      for (int line = 0; line < kLines; ++line) {
        uint4& x = *reinterpret_cast<uint4*>(to + line * kLineBytes);
        x = make_uint4(x.x ^ kSigns, x.y ^ kSigns, x.z ^ kSigns, x.w ^ kSigns);
      }
    }
  }
};

}  // namespace ringattn::cuda::sm80
