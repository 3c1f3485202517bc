// SPDX-License-Identifier: Apache-2.0
#include "ops/checks.h"

#include <ATen/MemoryOverlap.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "attention/block_attention.h"

#ifdef RINGATTN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ringattn {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 8;

bool has_kernel(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  const bool half_or_single = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
  return half_or_single || (x.is_cpu() && dtype == at::kDouble);
}

void check_like(const at::Tensor& x, const char* name, const at::Tensor& q) {
  RINGATTN_CHECK(x.dim() == 4, name, " must have 4 dimensions [B, S, H_kv, D], got ", x.dim());
  RINGATTN_CHECK(x.scalar_type() == q.scalar_type(), name, " must have the dtype of q, ",
                 q.scalar_type(), ", got ", x.scalar_type());
  RINGATTN_CHECK(x.device() == q.device(), name, " must be on the device of q, ", q.device(),
                 ", got ", x.device());
  RINGATTN_CHECK(x.size(0) == q.size(0), name, " must have the batch size of q, ", q.size(0),
                 ", got ", x.size(0));
  RINGATTN_CHECK(x.size(3) == q.size(3), name, " must have the head dimension of q, ", q.size(3),
                 ", got ", x.size(3));
}

// What is folded into is written once for each of its elements.
void check_written(const at::Tensor& x, const char* name) {
  RINGATTN_CHECK(at::has_internal_overlap(x) != at::MemOverlap::Yes, name,
                 " must not overlap itself, got strides ", x.strides());
}

// What is set but means nothing would be taken for the default.
void check_switch(const char* variable, const char* one, const char* other) {
  const char* value = std::getenv(variable);
  RINGATTN_CHECK(value == nullptr || *value == 0 || std::strcmp(value, one) == 0 ||
                     std::strcmp(value, other) == 0,
                 "environment variable ", variable, " must be ", one, " or ", other, ", got ",
                 value);
}

}  // namespace

void check_switches() {
  check_switch("RINGATTN_KERNEL_FAMILY", "sm80", "sm90");
  check_switch("RINGATTN_KERNEL_WAITS", "0", "1");
}

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  RINGATTN_CHECK(q.dim() == 4, "q must have 4 dimensions [B, S, H, D], got ", q.dim());
  RINGATTN_CHECK(q.is_cpu() || q.is_cuda(), "q must be on a CPU or CUDA device, got ", q.device());
  RINGATTN_CHECK(has_kernel(q), "q must be float16, bfloat16",
                 q.is_cpu() ? ", float32 or float64" : " or float32 on CUDA", ", got ",
                 q.scalar_type());
  const int64_t head_dim = q.size(3);
  RINGATTN_CHECK(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kHeadDimStep == 0,
                 "the head dimension must be a multiple of ", kHeadDimStep, " from ", kHeadDimStep,
                 " to ", kMaxHeadDim, ", got ", head_dim);
  check_like(k, "k", q);
  check_like(v, "v", q);
  RINGATTN_CHECK(k.size(1) == v.size(1), "v must have as many rows as k, ", k.size(1), ", got ",
                 v.size(1));
  RINGATTN_CHECK(k.size(2) == v.size(2), "v must have as many heads as k, ", k.size(2), ", got ",
                 v.size(2));
  RINGATTN_CHECK(k.size(2) > 0 && q.size(2) > 0, "q and k must have at least one head, got ",
                 q.size(2), " and ", k.size(2));
  RINGATTN_CHECK(q.size(2) % k.size(2) == 0,
                 "the number of query heads must be a multiple of the number of key heads, ",
                 k.size(2), ", got ", q.size(2));
  RINGATTN_CHECK(std::isfinite(scale), "scale must be finite, got ", scale);
  check_switches();
}

void check_state(const at::Tensor& out, const at::Tensor& lse) {
  RINGATTN_CHECK(out.dim() == 4, "out must have 4 dimensions [B, S, H, D], got ", out.dim());
  const auto dtype = out.scalar_type();
  RINGATTN_CHECK(dtype == at::kFloat || (out.is_cpu() && dtype == at::kDouble),
                 "out must be a float32 state", out.is_cpu() ? ", or float64" : "", ", got ",
                 dtype);
  const std::vector<int64_t> rows = {out.size(0), out.size(2), out.size(1)};
  RINGATTN_CHECK(lse.sizes() == at::IntArrayRef(rows), "lse must have shape [B, H, S], ",
                 at::IntArrayRef(rows), ", got ", lse.sizes());
  RINGATTN_CHECK(lse.scalar_type() == dtype && lse.device() == out.device(),
                 "lse must have the dtype and the device of out, ", dtype, " on ", out.device(),
                 ", got ", lse.scalar_type(), " on ", lse.device());
  check_written(out, "out");
  check_written(lse, "lse");
}

void check_state(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& q) {
  check_state(out, lse);
  const auto wide = state_dtype(q.scalar_type());
  RINGATTN_CHECK(out.sizes() == q.sizes(), "out must have the shape of q, ", q.sizes(), ", got ",
                 out.sizes());
  RINGATTN_CHECK(out.scalar_type() == wide, "out must be a ", wide, " state, got ",
                 out.scalar_type());
  RINGATTN_CHECK(out.device() == q.device(), "out must be on the device of q, ", q.device(),
                 ", got ", out.device());
}

Partition check_partition(const std::vector<int64_t>& lengths, const std::vector<int64_t>& order,
                          const std::string& layout, int64_t world_size) {
  RINGATTN_CHECK(static_cast<int64_t>(lengths.size()) == world_size,
                 "lengths must have one entry for each of the ", world_size,
                 " ranks of the group, got ", lengths.size());
  try {
    return Partition(parse_layout(layout), lengths, order);
  } catch (const std::invalid_argument& error) {
    RINGATTN_CHECK(false, error.what());
  }
}

void check_capture(const RingGroup& group, const Signature& signature, c10::Device device,
                   c10::function_ref<const MessageTransport&()> transport) {
#ifdef RINGATTN_WITH_CUDA
  if (!device.is_cuda()) return;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
  if (status == cudaStreamCaptureStatusNone) return;
  RINGATTN_CHECK(group.knows(signature),
                 "a call must have been made once before one of its kind is captured in a CUDA "
                 "graph, got a first one under capture");
  RINGATTN_CHECK(transport().can_be_captured(),
                 "a call that is captured in a CUDA graph must not travel over NCCL, got one that "
                 "does");
#endif
}

}  // namespace ringattn
