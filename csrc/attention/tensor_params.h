// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>

#include "attention/cuda/alignment.h"
#include "attention/params.h"

// From tensors to parameters of kernels. Only for builds with CUDA.

namespace ringattn {

inline DataType data_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kFloat:
      return DataType::kFloat32;
    default:
      TORCH_INTERNAL_ASSERT(false, "no kernel for dtype ", dtype);
  }
}

/// The shape of attention of q [B, S_q, H, D] over keys of `num_kv_heads` heads.
inline AttentionShape attention_shape(const at::Tensor& q, int64_t num_kv_heads, double scale) {
  return {static_cast<int32_t>(q.size(0)), static_cast<int32_t>(q.size(1)),
          static_cast<int32_t>(q.size(2)), static_cast<int32_t>(num_kv_heads),
          static_cast<int32_t>(q.size(3)), static_cast<float>(scale),
          data_type(q.scalar_type())};
}

inline Strided strided(const at::Tensor& x) {  // [B, S, H, D]
  return {x.data_ptr(), x.stride(0), x.stride(1), x.stride(2)};
}

/// Whether the strides and address of x [B, S, H, D] suit the kernels.
inline bool is_kernel_input(const at::Tensor& x) {
  return x.stride(3) == 1 && cuda::rows_are_aligned(strided(x), static_cast<int>(x.element_size()),
                                                    x.size(0), x.size(1), x.size(2));
}

/// x itself, or a copy where its strides or address do not suit the kernels.
inline at::Tensor as_kernel_input(const at::Tensor& x) {
  return x.numel() == 0 || is_kernel_input(x) ? x : x.clone(at::MemoryFormat::Contiguous);
}

inline at::Tensor unit_last_stride(const at::Tensor& x) {
  return x.stride(-1) == 1 || x.size(-1) <= 1 ? x : x.contiguous();
}

/// A tensor that a kernel reads and writes: itself, or a copy that is written back at the end of
/// the scope, unless an error ends it.
class InPlace {
 public:
  explicit InPlace(const at::Tensor& x)
      : target_(x),
        tensor_(x.numel() == 0 || (x.dim() == 4 ? is_kernel_input(x) : x.stride(-1) == 1)
                    ? x
                    : x.clone(at::MemoryFormat::Contiguous)) {}
  ~InPlace() noexcept(false) {
    if (!tensor_.is_same(target_) && std::uncaught_exceptions() == exceptions_) {
      target_.copy_(tensor_);
    }
  }
  InPlace(const InPlace&) = delete;
  InPlace& operator=(const InPlace&) = delete;

  const at::Tensor& tensor() const { return tensor_; }

 private:
  at::Tensor target_;
  at::Tensor tensor_;
  int exceptions_ = std::uncaught_exceptions();
};

inline cudaStream_t current_stream(const at::Tensor& x) {
  return c10::cuda::getCurrentCUDAStream(x.device().index()).stream();
}

inline void check_launch(cudaError_t error, const char* kernel) {
  TORCH_CHECK(error == cudaSuccess, "launching ", kernel, " failed: ", cudaGetErrorString(error));
}

}  // namespace ringattn
