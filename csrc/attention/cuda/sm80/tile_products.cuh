// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/mma.cuh"

// Products of two tiles in shared memory, as one warp computes its part: 16 * kM rows and 8 * kN
// columns of c += a @ b.T, where a [rows, depth] and b [columns, depth] lie as copy.cuh says, as
// they are or transposed. `c` are accumulators of m16n8.

namespace ringattn::cuda::sm80 {

/// How an operand lies in shared memory, and the pitch of its rows there.
enum class Layout { kRowMajor, kTransposed };

template <Layout kLayout_, int kPitch_>
struct TileLayout {
  static constexpr bool kTransposed = kLayout_ == Layout::kTransposed;
  static constexpr int kRowPitch = kPitch_;

  /// The address of a chunk of a row.
  __device__ static uint32_t address(uint32_t tile, unsigned row, unsigned chunk) {
    return tile + row * kRowPitch + chunk / 8 * kLineBytes + (chunk % 8 ^ row % 8) * kChunkBytes;
  }
};

/// From the address of a chunk to that `chunks` later: within a line they move by an exclusive or.
/// The first of them has a number whose bits below the power of two over `chunks` are 0, but for
/// those that `chunks` has not.
__device__ __forceinline__ uint32_t later_chunk(uint32_t address, int chunks) {
  return (address ^ (chunks % 8 * kChunkBytes)) + chunks / 8 * kLineBytes;
}

/// threadIdx.x, hidden from the compiler: addresses derived from it are recomputed for each product
/// and keep no registers between products.
__device__ __forceinline__ unsigned thread_index_again() {
  unsigned thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

constexpr bool is_power_of_two(int x) { return (x & (x - 1)) == 0; }

/// float16 and bfloat16: m16n8k16.
template <typename Element, int kM, int kN, int kDepth, typename A, typename B>
struct TileProduct {
  using Sums = float[kM][kN][4];
  static constexpr int kSteps = A::kTransposed || kDepth < 64 ? kDepth / 16 : 4;
  static_assert(kN % 2 == 0 && kDepth % (16 * kSteps) == 0);
  static_assert(!A::kTransposed || is_power_of_two(kM));
  static_assert(!B::kTransposed || is_power_of_two(kN));

  /// c += a[first_row : first_row + 16 kM] @ b[first_column : first_column + 8 kN].T
  __device__ static __forceinline__ void add(Sums& c, uint32_t a, unsigned first_row, uint32_t b,
                                             unsigned first_column) {
    walk(a, first_row, b, first_column,
         [&](int step, uint32_t a_lane, uint32_t b_lane) { add_step(c, a_lane, b_lane, step); });
  }

  /// The same for two products at once, of tiles as far from `a` and `b` as the distances say.
  __device__ static __forceinline__ void add_both(Sums& c, Sums& other_c, uint32_t a,
                                                  unsigned first_row, int a_distance, uint32_t b,
                                                  unsigned first_column, int b_distance) {
    walk(a, first_row, b, first_column, [&](int step, uint32_t a_lane, uint32_t b_lane) {
      add_step(c, a_lane, b_lane, step);
      add_step(other_c, a_lane + a_distance, b_lane + b_distance, step);
    });
  }

  /// Calls use(row, column, x) for all of the lane's sums, adjacent ones of a row together.
  template <typename Use>
  __device__ static __forceinline__ void for_each(const Sums& c, const Use& use) {
    const unsigned lane = thread_index_again() % kWarpSize;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          use(16 * m + 8 * half + lane / 4, 8 * n + lane % 4 * 2,
              make_float2(c[m][n][2 * half], c[m][n][2 * half + 1]));
        }
  }

  /// The same, four at a time: lanes of two exchange halves of two column tiles. All lanes call it.
  template <typename Use>
  __device__ static __forceinline__ void for_each_four(const Sums& c, const Use& use) {
    const unsigned lane = thread_index_again() % kWarpSize;
    const bool odd = lane % 2 != 0;
    const unsigned column = 8 * odd + lane % 4 / 2 * 4;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int n = 0; n < kN; n += 2) {
          const float *first = c[m][n] + 2 * half, *second = c[m][n + 1] + 2 * half;
          const float x = __shfl_xor_sync(0xffffffff, odd ? first[0] : second[0], 1);
          const float y = __shfl_xor_sync(0xffffffff, odd ? first[1] : second[1], 1);
          use(16 * m + 8 * half + lane / 4, 8 * n + column,
              odd ? make_float4(x, y, second[0], second[1])
                  : make_float4(first[0], first[1], x, y));
        }
  }

 private:
  /// Calls use(step, a_lane, b_lane) for steps of the depth, from the addresses of this lane.
  template <typename Use>
  __device__ static __forceinline__ void walk(uint32_t a, unsigned first_row, uint32_t b,
                                              unsigned first_column, const Use& use) {
    const unsigned lane = thread_index_again() % kWarpSize;
    const unsigned eight = lane / 8 % 2, sixteen = lane / 16;
    uint32_t a_lane = A::kTransposed ? A::address(a, sixteen * 8 + lane % 8, first_row / 8 + eight)
                                     : A::address(a, first_row + lane % 16, sixteen);
    uint32_t b_lane = B::kTransposed ? B::address(b, lane % 16, first_column / 8 + sixteen)
                                     : B::address(b, first_column + sixteen * 8 + lane % 8, eight);
    // Note: unrolled by two. By more, the compiler mixes the products of a tile, which takes more
    // registers than there are.
#pragma unroll 2
    for (int begin = 0; begin < kDepth / 16; begin += kSteps) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) use(step, a_lane, b_lane);
      // Four steps along a row are a line.
      a_lane += A::kTransposed ? kSteps * 16 * A::kRowPitch : kLineBytes;
      b_lane += B::kTransposed ? kSteps * 16 * B::kRowPitch : kLineBytes;
    }
  }

  __device__ static __forceinline__ void add_step(Sums& c, uint32_t a_lane, uint32_t b_lane,
                                                  int step) {
    uint32_t x[kM][4];
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      if constexpr (A::kTransposed) {
        load_matrices_transposed(x[m], later_chunk(a_lane, 2 * m) + step * 16 * A::kRowPitch);
      } else {
        load_matrices(x[m], later_chunk(a_lane, 2 * step) + m * 16 * A::kRowPitch);
      }
    }
#pragma unroll
    for (int n = 0; n < kN; n += 2) {
      uint32_t y[4];
      if constexpr (B::kTransposed) {
        load_matrices_transposed(y, later_chunk(b_lane, n) + step * 16 * B::kRowPitch);
      } else {
        load_matrices(y, later_chunk(b_lane, 2 * step) + n * 8 * B::kRowPitch);
      }
#pragma unroll
      for (int m = 0; m < kM; ++m) {
        mma_m16n8k16<Element>(c[m][n], x[m], y[0], y[1]);
        mma_m16n8k16<Element>(c[m][n + 1], x[m], y[2], y[3]);
      }
    }
  }
};

/// float32: three products in tf32, and short sums in the matrix units, as in products.cuh.
template <int kM, int kN, int kDepth, typename A, typename B>
struct TileProduct<float, kM, kN, kDepth, A, B> {
  using Sums = float[kM][kN][4];
  static constexpr int kSteps = A::kTransposed ? kDepth / 16 : 4;  // summed up in the matrix units
  static constexpr int kTiles = B::kTransposed ? 4 : 2;            // of b that are loaded together
  static_assert(kM == 1 && kN % kTiles == 0 && kDepth % (8 * kSteps) == 0);

  __device__ static __forceinline__ void add_both(Sums& c, Sums& other_c, uint32_t a,
                                                  unsigned first_row, int a_distance, uint32_t b,
                                                  unsigned first_column, int b_distance) {
    add(c, a, first_row, b, first_column);
    add(other_c, a + a_distance, first_row, b + b_distance, first_column);
  }

  __device__ static __forceinline__ void add(Sums& c, uint32_t a, unsigned first_row, uint32_t b,
                                             unsigned first_column) {
    const unsigned lane = thread_index_again() % kWarpSize;
    const unsigned g = lane / 4, t = lane % 4;
    const unsigned eight = lane / 8 % 2, sixteen = lane / 16;
    uint32_t a_lane = A::kTransposed
                          ? A::address(a, t, first_row / 4 + g / 4) + g % 4 * sizeof(float)
                          : A::address(a, first_row + lane % 16, sixteen);
    // Four column tiles share 32 columns: a lane reads 16 bytes of them at a time, in an order that
    // spreads over the banks. Slot g of tile i is column 4 (g / 2 + 4 (g % 2)) + i.
    uint32_t b_lane = B::kTransposed ? B::address(b, t, first_column / 4 + g / 2 + 4 * (g % 2))
                                     : B::address(b, first_column + sixteen * 8 + lane % 8, eight);
    // Note: not unrolled, so that the compiler does not mix the products of a tile: that takes more
    // registers than there are.
#pragma unroll 1
    for (int begin = 0; begin < kDepth / 8; begin += kSteps) {
      uint32_t a_high[kSteps][4], a_low[kSteps][4];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t x[4];
        if constexpr (A::kTransposed) {
          const uint32_t at = a_lane + step * 8 * A::kRowPitch;
          x[0] = load_word(at);
          x[1] = load_word(later_chunk(at, 2));
          x[2] = load_word(four_rows_on<A>(at));
          x[3] = load_word(later_chunk(four_rows_on<A>(at), 2));
        } else {
          load_matrices(x, later_chunk(a_lane, 2 * step));
        }
        split(a_high[step], a_low[step], x);
      }
#pragma unroll
      for (int n = 0; n < kN; n += kTiles) {
        float large[kTiles][4] = {}, small[kTiles][4] = {};
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          // Of tile i, the halves of the depth.
          uint32_t first[kTiles], second[kTiles];
          load_tiles(first, second, b_lane, step, n);
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            uint32_t first_high, first_low, second_high, second_low;
            split_tf32(__uint_as_float(first[i]), first_high, first_low);
            split_tf32(__uint_as_float(second[i]), second_high, second_low);
            mma_m16n8k8(small[i], a_low[step], first_high, second_high);
            mma_m16n8k8(large[i], a_high[step], first_high, second_high);
            mma_m16n8k8(small[i], a_high[step], first_low, second_low);
          }
        }
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) c[0][n + i][e] += large[i][e] + small[i][e];
      }
      // Four steps along a row are a line.
      a_lane += A::kTransposed ? kSteps * 8 * A::kRowPitch : kLineBytes;
      b_lane += B::kTransposed ? kSteps * 8 * B::kRowPitch : kLineBytes;
    }
  }

  template <typename Use>
  __device__ static __forceinline__ void for_each(const Sums& c, const Use& use) {
    const unsigned lane = thread_index_again() % kWarpSize;
    const unsigned g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < kN; n += kTiles)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const unsigned row = 8 * half + g;
          if constexpr (B::kTransposed) {
            const int e = 2 * half + i;
            use(row, 8 * n + 16 * i + 4 * t,
                make_float4(c[0][n][e], c[0][n + 1][e], c[0][n + 2][e], c[0][n + 3][e]));
          } else {
            use(row, 8 * (n + i) + 2 * t,
                make_float2(c[0][n + i][2 * half], c[0][n + i][2 * half + 1]));
          }
        }
  }

  template <typename Use>
  __device__ static __forceinline__ void for_each_four(const Sums& c, const Use& use) {
    static_assert(B::kTransposed);
    for_each(c, use);
  }

 private:
  template <typename Tile>
  __device__ static uint32_t four_rows_on(uint32_t address) {
    return (address ^ (4 * kChunkBytes)) + 4 * Tile::kRowPitch;
  }

  __device__ static __forceinline__ void load_tiles(uint32_t (&first)[kTiles],
                                                    uint32_t (&second)[kTiles], uint32_t b_lane,
                                                    int step, int n) {
    if constexpr (B::kTransposed) {
      const uint32_t at = later_chunk(b_lane, n * 2) + step * 8 * B::kRowPitch;
      load_chunk(first, at);
      load_chunk(second, four_rows_on<B>(at));
    } else {
      uint32_t x[4];
      load_matrices(x, later_chunk(b_lane, 2 * step) + n * 8 * B::kRowPitch);
      first[0] = x[0], second[0] = x[1], first[1] = x[2], second[1] = x[3];
    }
  }

  __device__ static __forceinline__ void split(uint32_t (&high)[4], uint32_t (&low)[4],
                                               const uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(__uint_as_float(x[i]), high[i], low[i]);
  }
  __device__ static __forceinline__ uint32_t load_word(uint32_t address) {
    uint32_t x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address));
    return x;
  }
  __device__ static __forceinline__ void load_chunk(uint32_t (&x)[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(address));
  }
};

}  // namespace ringattn::cuda::sm80
