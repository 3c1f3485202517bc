// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <chrono>
#include <thread>
#include <vector>

#include "segment_lists.h"

// What a launch does with its words: tiles handed out one by one, keys that arrive while it runs.

using ringattn::LaunchWords;
using ringattn::testing::attend_list;
using ringattn::testing::can_run;
using ringattn::testing::kKvHeads;
using ringattn::testing::kLongZigzag;
using ringattn::testing::kNaN;
using ringattn::testing::kZigzag;
using ringattn::testing::Launch;
using ringattn::testing::no_words;
using ringattn::testing::Problem;
using ringattn::testing::Results;
using ringattn::testing::same_bits;
using ringattn::testing::Segment;
using ringattn::testing::Shape;

namespace {

/// Keys and values of all segments but the first, which a side stream brings slice by slice, each a
/// while after the one before it, into tensors that hold NaN.
class LateArrivals {
 public:
  LateArrivals(Problem& problem, int64_t kv_heads_per_arrival, bool last_slice_first)
      : slices_(kKvHeads / kv_heads_per_arrival), last_slice_first_(last_slice_first) {
    for (size_t i = 1; i < problem.segments.size(); ++i) {
      Segment& segment = problem.segments[i];
      // [H_kv, 2, B, S_k, D]: what a slice brings lies together.
      const at::Tensor wire =
          at::stack({segment.k, segment.v}).permute({3, 0, 1, 2, 4}).contiguous();
      from_.push_back(wire.cpu().pin_memory());
      to_.push_back(at::empty_like(wire));
      segment.k = to_.back().select(1, 0).permute({1, 2, 0, 3});
      segment.v = to_.back().select(1, 1).permute({1, 2, 0, 3});
    }
  }

  int64_t num_arrivals() const { return slices_ * static_cast<int64_t>(to_.size()); }

  /// Enqueues it all; to be called before the launch that waits for it.
  void bring(const at::Tensor& words) const {
    for (const at::Tensor& to : to_) to.fill_(kNaN);
    C10_CUDA_CHECK(cudaDeviceSynchronize());
    for (int64_t n = 0; n < slices_; ++n) {
      const int64_t slice = last_slice_first_ ? slices_ - 1 - n : n;
      for (size_t i = 0; i < to_.size(); ++i) {
        const int64_t word = LaunchWords::kFirstArrival + i * slices_ + slice;
        C10_CUDA_CHECK(cudaLaunchHostFunc(
            side_.stream(),
            [](void*) { std::this_thread::sleep_for(std::chrono::microseconds(300)); }, nullptr));
        copy(to_[i].chunk(slices_)[slice], from_[i].chunk(slices_)[slice]);
        copy(words.narrow(0, word, 1), one_);
      }
    }
  }

  void synchronize() const { side_.synchronize(); }

 private:
  /// From pinned memory: by a copy engine, also while the kernel holds every multiprocessor.
  void copy(const at::Tensor& to, const at::Tensor& from) const {
    if (to.numel() == 0) return;
    C10_CUDA_CHECK(cudaMemcpyAsync(to.data_ptr(), from.data_ptr(), from.nbytes(),
                                   cudaMemcpyHostToDevice, side_.stream()));
  }

  int64_t slices_;
  bool last_slice_first_;
  c10::cuda::CUDAStream side_ = c10::cuda::getStreamFromPool(/*isHighPriority=*/true);
  at::Tensor one_ = at::ones({1}, at::kInt).pin_memory();
  std::vector<at::Tensor> from_, to_;
};

}  // namespace

TEST_CASE("tiles handed out one by one give the same bits, launch after launch") {
  if (!can_run()) return;
  for (const auto& shapes : {std::vector<Shape>{{300, 0, 0}}, kZigzag, kLongZigzag}) {
    const Problem problem(300, shapes, 128, at::kBFloat16);
    Results shared_out(problem);
    REQUIRE(attend_list(problem, {}, shared_out) == cudaSuccess);
    Launch launch;
    launch.words = no_words();
    for (int repeat = 0; repeat < 20; ++repeat) {
      Results results(problem);
      REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
      REQUIRE(same_bits(results.state, shared_out.state));
      REQUIRE(same_bits(results.lse, shared_out.lse));
      REQUIRE(launch.words.eq(0).all().item<bool>());
    }
  }
}

TEST_CASE("keys that arrive late are waited for, and the words are set back") {
  if (!can_run()) return;
  for (const int64_t head_dim : {64, 128, 256}) {
    for (const int64_t kv_heads_per_arrival : {1, 2, 4}) {
      for (const bool last_slice_first : {false, true}) {
        const auto& shapes =
            last_slice_first == (kv_heads_per_arrival == 2) ? kLongZigzag : kZigzag;
        Problem problem(300, shapes, head_dim, at::kBFloat16);
        Results there(problem);
        REQUIRE(attend_list(problem, {}, there) == cudaSuccess);
        const LateArrivals arrivals(problem, kv_heads_per_arrival, last_slice_first);
        Launch launch;
        launch.words = no_words(arrivals.num_arrivals());
        launch.kv_heads_per_arrival = kv_heads_per_arrival;
        for (int repeat = 0; repeat < 3; ++repeat) {
          INFO("D " << head_dim << ", " << kv_heads_per_arrival << " heads, " << repeat);
          Results results(problem);
          arrivals.bring(launch.words);
          if (repeat == 2) arrivals.synchronize();  // all of them early
          REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
          REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
          REQUIRE(same_bits(results.state, there.state));
          REQUIRE(same_bits(results.lse, there.lse));
          REQUIRE(launch.words.eq(0).all().item<bool>());
        }
      }
    }
  }
}

TEST_CASE("a launch whose waits were released because of a failure leaves NaN") {
  if (!can_run()) return;
  for (const int64_t head_dim : {64, 128, 256}) {
    const auto& shapes = head_dim == 128 ? kLongZigzag : kZigzag;
    const Problem problem(300, shapes, head_dim, at::kBFloat16);
    Launch launch;
    launch.final_end = 300;
    launch.failed = at::ones({1}, at::TensorOptions(at::kCUDA).dtype(at::kInt));
    launch.words = no_words((shapes.size() - 1) * kKvHeads).fill_(1);
    launch.words.narrow(0, 0, LaunchWords::kFirstArrival).zero_();
    launch.kv_heads_per_arrival = 1;
    Results results(problem);
    results.out.zero_();
    results.lse.zero_();
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK(results.out.isnan().all().item<bool>());
    CHECK(results.lse.isnan().all().item<bool>());
    CHECK(launch.words.eq(0).all().item<bool>());
    launch.failed.zero_();
    launch.words.narrow(0, LaunchWords::kFirstArrival, launch.words.numel() - 2).fill_(1);
    REQUIRE(attend_list(problem, launch, results) == cudaSuccess);
    CHECK_FALSE(results.out.isnan().any().item<bool>());
  }
}
