// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/cuda/sm90/backward/row_terms.cuh"
#include "attention/cuda/sm90/backward/tile.cuh"
#include "attention/cuda/sm90/ptx/wgmma.cuh"
#include "attention/cuda/sm90/score_product.cuh"

// The five products of a consumer warpgroup, with its 64 keys as rows. Each is a group of its own.

namespace ringattn::cuda::sm90 {

/// s.T = k @ q.T and dp.T = v @ grad_out.T, each as its tile of a step is there, plus the terms of
/// query rows. Under a softcap lse has no term.
///   keys, values  the consumer's 64 rows of a tile
template <typename Element, typename Tile, bool kSoftcap>
__device__ __forceinline__ void issue_transposed_scores(
    const BackwardShared<Tile>& shared, const StagePosition<Tile::kQueryStages>& queries_at,
    const StagePosition<Tile::kGradOutStages>& grad_out_at, uint32_t keys, uint32_t values,
    float (&s)[Tile::kBlockQ / 2], float (&dp)[Tile::kBlockQ / 2]) {
  const auto issue = [](float(&x)[Tile::kBlockQ / 2], uint32_t stationary, uint32_t moving,
                        const auto& add_term) {
    issue_score_product<Element, Tile::kHeadDim, Tile::kKeyBlockBytes, Tile::kQueryBlockBytes>(
        x, stationary, moving, add_term);
  };
  wait(shared.full(kScoreOperand, queries_at.stage), queries_at.parity);
  const auto delta = shared.template terms<kDeltaTerm>(queries_at.stage);
  const uint32_t queries = shared.moving(kScoreOperand, queries_at.stage);
  if constexpr (kSoftcap) {
    issue(s, keys, queries, [] {});
  } else {
    const auto lse = shared.template terms<kLseTerm>(queries_at.stage);
    issue(s, keys, queries, [&] { lse.add_to(s); });
  }
  wait(shared.full(kProbabilityOperand, grad_out_at.stage), grad_out_at.parity);
  issue(dp, values, shared.moving(kProbabilityOperand, grad_out_at.stage),
        [&] { delta.add_to(dp); });
}

/// dv += p.T @ grad_out, or dk += ds.T @ q.
template <typename Element, typename Tile>
__device__ __forceinline__ void issue_key_grads(float (&grads)[Tile::kHeadDim / 2],
                                                const uint32_t (&weights)[Tile::kBlockQ / 4],
                                                uint32_t moving) {
  const auto b = OperandDescriptor::n_major(moving, Tile::kQueryBlockBytes);
  begin_products();
#pragma unroll
  for (int step = 0; step < Tile::kBlockQ / 16; ++step) {
    ProductOfRegisters<Element, Tile::kHeadDim>::issue(
        grads, weights[4 * step], weights[4 * step + 1], weights[4 * step + 2],
        weights[4 * step + 3], b.at(step * 16 * kGradPitch));
  }
  commit_products();
}

/// The same with the weights in shared memory: p.T or ds.T, [64, kBlockQ].
///
/// Note: 128 columns a product. One of 256 needs more registers than a thread has at the launch of
/// four warpgroups, which ptxas refuses.
template <typename Element, typename Tile>
__device__ __forceinline__ void issue_key_grads(float (&grads)[Tile::kHeadDim / 128][64],
                                                uint32_t weights, uint32_t moving) {
  using Product = ProductOfRows<Element, 128>;
  const auto a = OperandDescriptor::k_major(weights),
             b = OperandDescriptor::n_major(moving, Tile::kQueryBlockBytes);
  static_assert(Tile::kBlockQ == kGradColumnBlock);
  begin_products();
#pragma unroll
  for (int step = 0; step < Tile::kBlockQ / 16; ++step) {
#pragma unroll
    for (int half = 0; half < Tile::kHeadDim / 128; ++half) {
      Product::template issue<true>(
          grads[half], a.at(step * 32),
          b.at(step * 16 * kGradPitch + half * 2 * Tile::kQueryBlockBytes));
    }
  }
  commit_products();
}

/// dq (+)= ds @ k, of 64 rows and 2 * kSize columns, over the keys of a thread block: products of a
/// group that the caller begins and commits.
///   score_grads  the first of their 64 rows: ds, [kBlockK / 64][kBlockQ][64]
///   keys         the columns: [kSize / 32][kBlockK][64]
template <typename Element, typename Tile, bool kAccumulate, int kSize>
__device__ __forceinline__ void multiply_score_grads(float (&dq)[kSize], uint32_t score_grads,
                                                     uint32_t keys) {
  using Product = ProductOfRows<Element, 2 * kSize>;
  const auto a = OperandDescriptor::k_major(score_grads),
             b = OperandDescriptor::n_major(keys, Tile::kKeyBlockBytes);
  Product::template issue<kAccumulate>(dq, a.at(0), b.at(0));
#pragma unroll
  for (int step = 1; step < Tile::kBlockK / 16; ++step) {
    Product::template issue<true>(dq, a.at(step / 4 * Tile::kQueryBlockBytes + step % 4 * 32),
                                  b.at(step * 16 * kGradPitch));
  }
}

/// dq = ds @ k, of 64 rows and all columns.
template <typename Element, typename Tile>
__device__ __forceinline__ void issue_query_grads(float (&dq)[Tile::kHeadDim / 2],
                                                  uint32_t score_grads, uint32_t keys) {
  begin_products();
  multiply_score_grads<Element, Tile, false>(dq, score_grads, keys);
  commit_products();
}

/// The same of 64 columns, over the keys of both thread blocks of a pair.
template <typename Element, typename Tile>
__device__ __forceinline__ void issue_query_grads_of_pair(float (&dq)[kGradColumnBlock / 2],
                                                          uint32_t score_grads, uint32_t keys,
                                                          uint32_t other_score_grads,
                                                          uint32_t other_keys) {
  begin_products();
  multiply_score_grads<Element, Tile, false>(dq, score_grads, keys);
  multiply_score_grads<Element, Tile, true>(dq, other_score_grads, other_keys);
  commit_products();
}

/// dq (+)= ds @ k, of 64 rows and 64 columns, with the weights there as ds.T.
///   score_grads  ds.T of their 64 rows, [kBlockK, 64]
///   keys         their 64 columns: [kBlockK, 64]
template <typename Element, typename Tile, bool kAccumulate>
__device__ __forceinline__ void issue_query_grads_of_transposed(float (&dq)[kGradColumnBlock / 2],
                                                                uint32_t score_grads,
                                                                uint32_t keys) {
  using Product = ProductOfTransposed<Element, kGradColumnBlock>;
  const auto a = OperandDescriptor::n_major(score_grads, Tile::kKeyBlockBytes),
             b = OperandDescriptor::n_major(keys, Tile::kKeyBlockBytes);
  begin_products();
  Product::template issue<kAccumulate>(dq, a.at(0), b.at(0));
#pragma unroll
  for (int step = 1; step < Tile::kBlockK / 16; ++step) {
    Product::template issue<true>(dq, a.at(step * 16 * kGradPitch), b.at(step * 16 * kGradPitch));
  }
  commit_products();
}

}  // namespace ringattn::cuda::sm90
