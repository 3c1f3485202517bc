// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/mma.cuh"

// The two matrix products of attention as one warp computes them: 16 * kM query rows against a tile
// of kKeys keys. Scores and outputs are accumulators of m16n8: element c of (m, n) lies in row 16 m
// + g + 8 (c / 2).

namespace ringattn::cuda::sm80 {

/// float16 and bfloat16: m16n8k16.
template <typename Element, int kM, int kKeys, int kHeadDim>
struct Products {
  static constexpr int kRowPitch = kPitch<Element, kHeadDim>;
  static constexpr int kScoreTiles = kKeys / 8;
  static constexpr int kOutTiles = kHeadDim / 8;
  static constexpr int kStoredTiles = 1;  // output tiles whose elements lie side by side in a lane
  static_assert(kKeys % 16 == 0 && kHeadDim % 16 == 0);

  using Scores = float[kM][kScoreTiles][4];
  using Out = float[kM][kOutTiles][4];

  /// Column of this lane's element c of output tile n.
  __device__ static int out_column(int n, int c, int t) { return 8 * n + 2 * t + c % 2; }

  /// scores = q @ k.T; q: the warp's 16 * kM rows, k: kKeys rows in shared memory.
  __device__ static __forceinline__ void scores(Scores& s, uint32_t q, uint32_t k,
                                                int /*head_dim*/) {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t q_lane = q + (lane % 16) * kRowPitch + ((lane / 16) ^ (lane % 8)) * kChunkBytes;
    const int key = lane / 16 * 8 + lane % 8;
    const uint32_t k_lane = k + key * kRowPitch + ((lane / 8 % 2) ^ (lane % 8)) * kChunkBytes;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
#pragma unroll
    for (int step = 0; step < kHeadDim / 16; ++step) {
      // Note: two chunks per step; within a line they move by an exclusive or, as the swizzle does.
      const uint32_t flip = step % 4 * 2 * kChunkBytes;
      const uint32_t line = step / 4 * kLineBytes;
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) load_matrices(a[m], (q_lane ^ flip) + line + m * 16 * kRowPitch);
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        uint32_t b[4];
        load_matrices(b, (k_lane ^ flip) + line + n * 8 * kRowPitch);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16<Element>(s[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<Element>(s[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// out = out * decay[:, None] + p @ v; v: kKeys rows in shared memory.
  __device__ static __forceinline__ void accumulate(Out& out, const float (&decay)[kM][2],
                                                    const Scores& p, uint32_t v, int /*head_dim*/) {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t v_lane = v + (lane % 16) * kRowPitch + ((lane / 16) ^ (lane % 8)) * kChunkBytes;
#pragma unroll
    for (int m = 0; m < kM; ++m) {
      // Maxima change seldom once many keys were seen.
      if (__all_sync(0xffffffff, decay[m][0] == 1.0f && decay[m][1] == 1.0f)) continue;
#pragma unroll
      for (int n = 0; n < kOutTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) out[m][n][c] *= decay[m][c / 2];
    }
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) pack_step(a[m], p[m][2 * step], p[m][2 * step + 1]);
#pragma unroll
      for (int n = 0; n < kOutTiles; n += 2) {
        uint32_t b[4];
        load_matrices_transposed(
            b, (v_lane ^ (n % 8 * kChunkBytes)) + n / 8 * kLineBytes + step * 16 * kRowPitch);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16<Element>(out[m][n], a[m], b[0], b[1]);
          mma_m16n8k16<Element>(out[m][n + 1], a[m], b[2], b[3]);
        }
      }
    }
  }

  /// The same for rows that see some key of the tile. The others, whose probabilities are 0, keep
  /// `out` also where v is not finite: the sums of the product cannot go into `out` itself.
  __device__ static __forceinline__ void accumulate_where(const bool (&sees)[kM][2], Out& out,
                                                          const float (&decay)[kM][2],
                                                          const Scores& p, uint32_t v,
                                                          int /*head_dim*/) {
    constexpr int kSteps = kKeys / 16;
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t v_lane = v + (lane % 16) * kRowPitch + ((lane / 16) ^ (lane % 8)) * kChunkBytes;
    uint32_t a[kSteps][kM][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
#pragma unroll
      for (int m = 0; m < kM; ++m) pack_step(a[step][m], p[m][2 * step], p[m][2 * step + 1]);
#pragma unroll
    for (int n = 0; n < kOutTiles; n += 2) {
      float part[kM][2][4] = {};
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t b[4];
        load_matrices_transposed(
            b, (v_lane ^ (n % 8 * kChunkBytes)) + n / 8 * kLineBytes + step * 16 * kRowPitch);
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16<Element>(part[m][0], a[step][m], b[0], b[1]);
          mma_m16n8k16<Element>(part[m][1], a[step][m], b[2], b[3]);
        }
      }
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            float& o = out[m][n + i][c];
            if (sees[m][c / 2]) o = fmaf(o, decay[m][c / 2], part[m][i][c]);
          }
    }
  }

  /// The accumulators of two score tiles are, rounded, one operand of the next product.
  __device__ static __forceinline__ void pack_step(uint32_t (&a)[4], const float (&left)[4],
                                                   const float (&right)[4]) {
    a[0] = pack<Element>(left[0], left[1]);
    a[1] = pack<Element>(left[2], left[3]);
    a[2] = pack<Element>(right[0], right[1]);
    a[3] = pack<Element>(right[2], right[3]);
  }
};

/// float32: m16n8k8 in tf32, three products of the operands' high and low parts (low * low is below
/// float32's rounding). The matrix units truncate their sums, so no sum in them is longer than four
/// steps: longer ones are added up by ordinary, rounded additions.
template <int kM, int kKeys, int kHeadDim>
struct Products<float, kM, kKeys, kHeadDim> {
  static constexpr int kRowPitch = kPitch<float, kHeadDim>;
  static constexpr int kScoreTiles = kKeys / 8;
  static constexpr int kOutTiles = kHeadDim / 8;
  static constexpr int kStoredTiles = 4;
  static constexpr int kFloatsPerLine = 32;
  static constexpr int kScoreSteps =
      kHeadDim > 128 || kM > 1 ? 2 : 4;  // summed up in the matrix units
  static constexpr int kOutSteps = 4;
  static_assert(kKeys % 16 == 0 && kHeadDim % kFloatsPerLine == 0);

  using Scores = float[kM][kScoreTiles][4];
  using Out = float[kM][kOutTiles][4];

  /// Four output tiles share 32 columns, dealt out so that a lane reads v, and holds its results,
  /// 16 bytes at a time: slot g of tile i is column 4 g + i.
  __device__ static int out_column(int n, int c, int t) {
    return n / 4 * 32 + 8 * t + c % 2 * 4 + n % 4;
  }

  __device__ static __forceinline__ void split(uint32_t (&high)[4], uint32_t (&low)[4],
                                               const uint32_t (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) split_tf32(__uint_as_float(x[i]), high[i], low[i]);
  }

  __device__ static __forceinline__ void scores(Scores& s, uint32_t q, uint32_t k, int head_dim) {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t q_lane = q + (lane % 16) * kRowPitch + ((lane / 16) ^ (lane % 8)) * kChunkBytes;
    const int key = lane / 16 * 8 + lane % 8;
    const uint32_t k_lane = k + key * kRowPitch + ((lane / 8 % 2) ^ (lane % 8)) * kChunkBytes;
#pragma unroll
    for (int m = 0; m < kM; ++m)
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) s[m][n][c] = 0.0f;
#pragma unroll
    for (int begin = 0; begin < kHeadDim / 8; begin += kScoreSteps) {
      const auto flip = [&](int step) { return (begin + step) % 4 * 2 * kChunkBytes; };
      const auto line = [&](int step) { return (begin + step) / 4 * kLineBytes; };
      if (begin * 8 >= head_dim) break;
      uint32_t a_high[kScoreSteps][kM][4], a_low[kScoreSteps][kM][4];
#pragma unroll
      for (int step = 0; step < kScoreSteps; ++step)
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          uint32_t a[4];
          load_matrices(a, (q_lane ^ flip(step)) + line(step) + m * 16 * kRowPitch);
          split(a_high[step][m], a_low[step][m], a);
        }
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        float large[kM][2][4] = {}, small[kM][2][4] = {};
#pragma unroll
        for (int step = 0; step < kScoreSteps; ++step) {
          uint32_t b[4], b_high[4], b_low[4];
          load_matrices(b, (k_lane ^ flip(step)) + line(step) + n * 8 * kRowPitch);
          split(b_high, b_low, b);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              mma_m16n8k8(small[m][i], a_low[step][m], b_high[2 * i], b_high[2 * i + 1]);
              mma_m16n8k8(large[m][i], a_high[step][m], b_high[2 * i], b_high[2 * i + 1]);
              mma_m16n8k8(small[m][i], a_high[step][m], b_low[2 * i], b_low[2 * i + 1]);
            }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) s[m][n + i][c] += large[m][i][c] + small[m][i][c];
      }
    }
  }

  __device__ static __forceinline__ void accumulate(Out& out, const float (&decay)[kM][2],
                                                    const Scores& p, uint32_t v, int head_dim) {
    bool all[kM][2];
#pragma unroll
    for (int m = 0; m < kM; ++m) all[m][0] = all[m][1] = true;
    accumulate_where(all, out, decay, p, v, head_dim);
  }

  __device__ static __forceinline__ void accumulate_where(const bool (&sees)[kM][2], Out& out,
                                                          const float (&decay)[kM][2],
                                                          const Scores& p, uint32_t v,
                                                          int head_dim) {
    // Slot t of a product's eight keys is key 2t, slot t + 4 is key 2t + 1: as the scores lie.
    const int lane = threadIdx.x % kWarpSize;
    const int g = lane / 4;
    const int even = lane % 4 * 2;
    const uint32_t v_even = v + even * kRowPitch + (g ^ even) * kChunkBytes;
    const uint32_t v_odd = v + (even + 1) * kRowPitch + (g ^ (even + 1)) * kChunkBytes;
    uint32_t a_high[kScoreTiles][kM][4], a_low[kScoreTiles][kM][4];
#pragma unroll
    for (int step = 0; step < kScoreTiles; ++step)
#pragma unroll
      for (int m = 0; m < kM; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          constexpr int kSource[4] = {0, 2, 1, 3};
          split_tf32(p[m][step][kSource[i]], a_high[step][m][i], a_low[step][m][i]);
        }
#pragma unroll
    for (int begin = 0; begin < kScoreTiles; begin += kOutSteps)
#pragma unroll
      for (int line = 0; line < kHeadDim / kFloatsPerLine; ++line) {
        if (line * kFloatsPerLine >= head_dim) break;
        float large[kM][4][4] = {}, small[kM][4][4] = {};
#pragma unroll
        for (int step = begin; step < begin + kOutSteps && step < kScoreTiles; ++step) {
          const int at = line * kLineBytes + step * 8 * kRowPitch;
          uint32_t b0[4], b1[4], b0_high[4], b0_low[4], b1_high[4], b1_low[4];
          load_shared(b0, v_even + at);
          load_shared(b1, v_odd + at);
          split(b0_high, b0_low, b0);
          split(b1_high, b1_low, b1);
#pragma unroll
          for (int m = 0; m < kM; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              mma_m16n8k8(small[m][i], a_low[step][m], b0_high[i], b1_high[i]);
              mma_m16n8k8(large[m][i], a_high[step][m], b0_high[i], b1_high[i]);
              mma_m16n8k8(small[m][i], a_high[step][m], b0_low[i], b1_low[i]);
            }
        }
#pragma unroll
        for (int m = 0; m < kM; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              float& o = out[m][4 * line + i][c];
              if (!sees[m][c / 2]) continue;
              o = fmaf(o, begin == 0 ? decay[m][c / 2] : 1.0f, large[m][i][c] + small[m][i][c]);
            }
      }
  }

  __device__ static __forceinline__ void load_shared(uint32_t (&r)[4], uint32_t address) {
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
  }
};

}  // namespace ringattn::cuda::sm80
