// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <type_traits>

#include "attention/cuda/numeric.cuh"
#include "attention/cuda/sm80/copy.cuh"
#include "attention/cuda/sm80/tile_products.cuh"

// Tile shapes of the backward, and how warps divide the five products of a tile among them.

namespace ringattn::cuda::sm80 {

/// Rows of queries and keys of a tile. Warps are a grid over the rows and columns of each product:
///   kScoreWarpsQ x kScoreWarpsK   over [queries, keys], of P and dS; other warps have no part
///   kKeyWarpsK x kKeyWarpsD       over [keys, head dim], of dk and dv
///   kQueryWarpsQ x kQueryWarpsD   over [queries, head dim], of dq
/// With kSharesScores P and dS take turns in one place. All fit 99 KB, what the smaller chips have.
template <typename Element, int kHeadDim>
struct BackwardTileShape;

template <typename Element_>
struct BackwardTileShape<Element_, 64> {
  using Element = Element_;
  static constexpr int kHeadDim = 64;
  static constexpr int kBlockQ = 128, kBlockK = 64, kWarps = 4, kBlocksPerSm = 2;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 2;
  static constexpr int kKeyWarpsK = 2, kKeyWarpsD = 2;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 2;
  static constexpr bool kSharesScores = false;
};

template <typename Element_>
struct BackwardTileShape<Element_, 128> {
  using Element = Element_;
  static constexpr int kHeadDim = 128;
  static constexpr int kBlockQ = 64, kBlockK = 64, kWarps = 4, kBlocksPerSm = 2;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 2;
  static constexpr int kKeyWarpsK = 2, kKeyWarpsD = 2;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 2;
  static constexpr bool kSharesScores = false;
};

template <typename Element_>
struct BackwardTileShape<Element_, 256> {
  using Element = Element_;
  static constexpr int kHeadDim = 256;
  static constexpr int kBlockQ = 32, kBlockK = 32, kWarps = 4, kBlocksPerSm = 2;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 2;
  static constexpr int kKeyWarpsK = 2, kKeyWarpsD = 2;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 2;
  static constexpr bool kSharesScores = false;
};

template <>
struct BackwardTileShape<float, 64> {
  using Element = float;
  static constexpr int kHeadDim = 64;
  static constexpr int kBlockQ = 32, kBlockK = 64, kWarps = 4, kBlocksPerSm = 2;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 2;
  static constexpr int kKeyWarpsK = 4, kKeyWarpsD = 1;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 2;
  static constexpr bool kSharesScores = false;
};

template <>
struct BackwardTileShape<float, 128> {
  using Element = float;
  static constexpr int kHeadDim = 128;
  static constexpr int kBlockQ = 32, kBlockK = 32, kWarps = 4, kBlocksPerSm = 2;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 2;
  static constexpr int kKeyWarpsK = 2, kKeyWarpsD = 2;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 2;
  static constexpr bool kSharesScores = false;
};

template <>
struct BackwardTileShape<float, 256> {
  using Element = float;
  static constexpr int kHeadDim = 256;
  static constexpr int kBlockQ = 16, kBlockK = 32, kWarps = 4, kBlocksPerSm = 1;
  static constexpr int kScoreWarpsQ = 1, kScoreWarpsK = 2;
  static constexpr int kKeyWarpsK = 2, kKeyWarpsD = 2;
  static constexpr int kQueryWarpsQ = 1, kQueryWarpsD = 4;
  static constexpr bool kSharesScores = true;
};

/// Tiles for chips with 163 KB, where they are faster.
template <typename Element, int kHeadDim>
struct LargeBackwardTileShape : BackwardTileShape<Element, kHeadDim> {};

template <typename Element_>
struct LargeBackwardTileShape<Element_, 128> {
  using Element = Element_;
  static constexpr int kHeadDim = 128;
  static constexpr int kBlockQ = 64, kBlockK = 128, kWarps = 8, kBlocksPerSm = 1;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 4;
  static constexpr int kKeyWarpsK = 4, kKeyWarpsD = 2;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 4;
  static constexpr bool kSharesScores = false;
};

template <typename Element_>
struct LargeBackwardTileShape<Element_, 256> {
  using Element = Element_;
  static constexpr int kHeadDim = 256;
  static constexpr int kBlockQ = 64, kBlockK = 64, kWarps = 8, kBlocksPerSm = 1;
  static constexpr int kScoreWarpsQ = 2, kScoreWarpsK = 4;
  static constexpr int kKeyWarpsK = 2, kKeyWarpsD = 4;
  static constexpr int kQueryWarpsQ = 2, kQueryWarpsD = 4;
  static constexpr bool kSharesScores = false;
};

template <>
struct LargeBackwardTileShape<float, 128> : BackwardTileShape<float, 128> {};

template <>
struct LargeBackwardTileShape<float, 256> : BackwardTileShape<float, 256> {};

template <typename Shape>
struct BackwardTile : Shape {
  using typename Shape::Element;
  static constexpr int kThreads = Shape::kWarps * kWarpSize;
  static constexpr int kScoreWarps = Shape::kScoreWarpsQ * Shape::kScoreWarpsK;
  static constexpr int kScoreM = Shape::kBlockQ / Shape::kScoreWarpsQ / 16;
  static constexpr int kScoreN = Shape::kBlockK / Shape::kScoreWarpsK / 8;
  static constexpr int kKeyM = Shape::kBlockK / Shape::kKeyWarpsK / 16;
  static constexpr int kKeyN = Shape::kHeadDim / Shape::kKeyWarpsD / 8;
  static constexpr int kQueryM = Shape::kBlockQ / Shape::kQueryWarpsQ / 16;
  static constexpr int kQueryN = Shape::kHeadDim / Shape::kQueryWarpsD / 8;
  static_assert(kScoreWarps <= Shape::kWarps);
  static_assert(Shape::kKeyWarpsK * Shape::kKeyWarpsD == Shape::kWarps);
  static_assert(Shape::kQueryWarpsQ * Shape::kQueryWarpsD == Shape::kWarps);
  static_assert(kScoreM > 0 && kScoreN > 0 && kKeyM > 0 && kQueryM > 0);
  static_assert(kThreads % 64 == 0);  // passes of load_queries are whole groups of 8 rows
  static_assert(kThreads >= Shape::kBlockQ && kThreads >= Shape::kBlockK);

  using CopyQ = TileCopy<Element, Shape::kBlockQ, Shape::kHeadDim, kThreads>;
  using CopyK = TileCopy<Element, Shape::kBlockK, Shape::kHeadDim, kThreads>;
  static constexpr int kInputPitch = kPitch<Element, Shape::kHeadDim>;
  static constexpr int kScoresPitch = kPitch<Element, Shape::kBlockK>;
  using Inputs = TileLayout<Layout::kRowMajor, kInputPitch>;
  using InputsTransposed = TileLayout<Layout::kTransposed, kInputPitch>;
  using ScoresRowMajor = TileLayout<Layout::kRowMajor, kScoresPitch>;
  using ScoresTransposed = TileLayout<Layout::kTransposed, kScoresPitch>;

  using Scores = TileProduct<Element, kScoreM, kScoreN, Shape::kHeadDim, Inputs, Inputs>;
  using KeyGradients =
      TileProduct<Element, kKeyM, kKeyN, Shape::kBlockQ, ScoresTransposed, InputsTransposed>;
  using QueryGradients =
      TileProduct<Element, kQueryM, kQueryN, Shape::kBlockK, ScoresRowMajor, InputsTransposed>;

  static constexpr int kScoresBytes = Shape::kBlockQ * kScoresPitch;
  static constexpr int kStageBytes = 2 * CopyQ::kBytes + Shape::kBlockQ * 8;  // with statistics
  static constexpr int kSharedBytes = 2 * CopyK::kBytes +
                                      (Shape::kSharesScores ? 1 : 2) * kScoresBytes +
                                      Shape::kBlockK * 8;  // ranges of keys
  static constexpr int shared_bytes(int num_stages) {
    return kSharedBytes + num_stages * kStageBytes;
  }

  /// Where this warp's part of each product begins.
  __device__ static unsigned warp() { return thread_index_again() / kWarpSize; }
  __device__ static unsigned score_row() { return warp() / Shape::kScoreWarpsK * kScoreM * 16; }
  __device__ static unsigned score_column() { return warp() % Shape::kScoreWarpsK * kScoreN * 8; }
  __device__ static unsigned key_row() { return warp() / Shape::kKeyWarpsD * kKeyM * 16; }
  __device__ static unsigned key_column() { return warp() % Shape::kKeyWarpsD * kKeyN * 8; }
  __device__ static unsigned query_row() { return warp() / Shape::kQueryWarpsD * kQueryM * 16; }
  __device__ static unsigned query_column() { return warp() % Shape::kQueryWarpsD * kQueryN * 8; }
  __device__ static bool has_scores() {
    return kScoreWarps == Shape::kWarps || warp() < kScoreWarps;
  }

  /// tile = tensor[first_row : first_row + kBlockQ]; rows outside [begin, end) and columns from
  /// head_dim on are zero. head: row 0 of a tensor [rows, head_dim].
  __device__ static __forceinline__ void load_queries(uint32_t tile, const Element* head,
                                                      int64_t row_stride, int head_dim,
                                                      int first_row, int begin, int end) {
    // As in TileCopy, but no address keeps a register until the next tile.
    const unsigned thread = thread_index_again();
    const int row = thread / 8, chunk = thread % 8;
    constexpr int kChunk = kChunkBytes / sizeof(Element), kLine = kLineBytes / sizeof(Element);
    const int lines = (head_dim - chunk * kChunk + kLine - 1) / kLine;
    const uint32_t to = tile + CopyQ::offset(row, chunk);
    const Element* from = head + (first_row + row) * row_stride + chunk * kChunk;
#pragma unroll
    for (int pass = 0; pass < CopyQ::kPasses; ++pass) {
      constexpr int kRows = CopyQ::kRowsPerPass;
      const int at = first_row + row + pass * kRows;
      const int wanted = at >= begin && at < end ? lines : 0;
#pragma unroll
      for (int line = 0; line < CopyQ::kLines; ++line) {
        copy_chunk_async(to + pass * kRows * CopyQ::kRowPitch + line * kLineBytes,
                         from + pass * kRows * row_stride + line * kLine, line, wanted);
      }
    }
  }

  /// A warp's P or dS, rounded, into a tile [kBlockQ, kBlockK].
  __device__ static __forceinline__ void store_scores(unsigned char* tile,
                                                      const typename Scores::Sums& sums) {
    const unsigned first_row = score_row(), first_column = score_column();
    Scores::for_each(sums, [&](unsigned row, unsigned column, float2 x) {
      const unsigned byte = (first_column + column) * sizeof(Element);
      const unsigned at = first_row + row;
      unsigned char* to = tile + at * kScoresPitch + byte / kLineBytes * kLineBytes +
                          (byte % kLineBytes / kChunkBytes ^ at % 8) * kChunkBytes +
                          byte % kChunkBytes;
      if constexpr (std::is_same_v<Element, float>) {
        *reinterpret_cast<float2*>(to) = x;
      } else {
        *reinterpret_cast<uint32_t*>(to) = pack<Element>(x.x, x.y);
      }
    });
  }
};

}  // namespace ringattn::cuda::sm80
