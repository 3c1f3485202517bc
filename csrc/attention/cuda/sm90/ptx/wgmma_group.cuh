// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Products of a warpgroup (4 warps, 64 rows) run beside the threads that issue them. They are
// issued in groups: fence, products, commit; the accumulators may be read after the wait.
//
// Shared-memory operands are tiles as the copy engine writes them with the 128-byte swizzle: for
// each 64 columns a block of [rows][64] elements of 16 bits, 128 bytes a row, that begins at a
// multiple of 1024. Only plain rows have none.

namespace ringattn::cuda::sm90 {

/// Before the first product of a group, when ordinary instructions wrote its registers.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/// Waits until at most kPending groups, the latest ones, are unfinished.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

/// Where an operand lies in shared memory. Addresses and distances are in units of 16 bytes.
///   bits 0-13   address
///   bits 16-29  leading distance: from 64 columns to the next 64, where a product takes more
///   bits 32-45  stride distance: from 8 rows to the next 8
///   bits 62-63  1: swizzle of 128 bytes
/// The same in all lanes of a warp.
struct OperandDescriptor {
  uint32_t low;

  /// Rows are the product's M or N, the 64 columns its K (queries, keys).
  static __device__ __forceinline__ OperandDescriptor k_major(uint32_t address) {
    return of(((address & 0x3FFFF) >> 4) | (1u << 16));
  }

  /// Rows are the product's K, columns its N, in blocks `block_bytes` apart (values).
  static __device__ __forceinline__ OperandDescriptor n_major(uint32_t address,
                                                              uint32_t block_bytes) {
    return of(((address & 0x3FFFF) >> 4) | ((block_bytes >> 4) << 16));
  }

  __device__ __forceinline__ uint64_t at(uint32_t offset_bytes) const {
    constexpr uint32_t kHigh = (1u << 30) | (1024 >> 4);
    uint64_t bits;
    asm("mov.b64 %0, {%1, %2};" : "=l"(bits) : "r"(low + (offset_bytes >> 4)), "r"(kHigh));
    return bits;
  }

 private:
  /// Products take descriptors from a warp's uniform registers. The exchange says that all lanes
  /// have the same one: it is then computed there, once. Otherwise each product waits for four
  /// moves between register files.
  static __device__ __forceinline__ OperandDescriptor of(uint32_t low) {
    return {__shfl_sync(0xffffffff, low, 0)};
  }
};

/// The descriptor of rows of eight 16-bit columns, one row behind the other without a swizzle. Rows
/// are the product's M or N.
///   half_bytes   from one half of the product's K to the other; 0: both are the same columns
///   group_bytes  from 8 rows to the next 8; 0: all are the same
__device__ __forceinline__ uint64_t describe_plain_rows(uint32_t address, uint32_t half_bytes,
                                                        uint32_t group_bytes) {
  const uint32_t low = (address & 0x3FFFF) >> 4 | half_bytes >> 4 << 16;
  uint64_t bits;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(bits)
      : "r"(__shfl_sync(0xffffffff, low, 0)), "r"(group_bytes >> 4));
  return bits;
}

}  // namespace ringattn::cuda::sm90
