// SPDX-License-Identifier: Apache-2.0
#include "attention/sum_rows.h"

#include <algorithm>
#include <cstdint>

#ifdef RINGATTN_WITH_CUDA
#include "attention/cuda/sum_rows.h"
#include "attention/tensor_params.h"
#endif

namespace ringattn {

#ifdef RINGATTN_WITH_CUDA
namespace {

void sum_on_device(const at::Tensor& sum, const std::vector<RowsToAdd>& parts,
                   const std::array<at::Tensor, 2>& out) {
  constexpr int64_t kMaxParts = cuda::SumRowsParams::kMaxParts;
  const auto num_parts = static_cast<int64_t>(parts.size());
  for (int64_t first = 0; first == 0 || first < num_parts; first += kMaxParts) {
    const int64_t end = std::min(first + kMaxParts, num_parts);
    cuda::SumRowsParams params;
    params.sum = sum.const_data_ptr<float>();
    for (int64_t i = 0; i < 2; ++i) {
      const at::Tensor& to = end == num_parts ? out[i] : sum.select(0, i);
      params.out[i] = to.mutable_data_ptr();
      params.out_dtype = data_type(to.scalar_type());
    }
    for (int64_t i = first; i < end; ++i) {
      const auto& [x, rows] = parts[i];
      params.parts[params.num_parts++] = {x.const_data_ptr<float>(), x.stride(1),
                                          static_cast<int32_t>(rows.begin),
                                          static_cast<int32_t>(rows.end)};
    }
    params.planes = static_cast<int32_t>(sum.size(0) * sum.size(1));
    params.rows = static_cast<int32_t>(sum.size(2));
    params.row_elements = static_cast<int32_t>(sum.size(3) * sum.size(4));
    check_launch(cuda::sum_rows(params, current_stream(sum)), "sum_rows");
  }
}

}  // namespace
#endif

void sum_rows(const at::Tensor& sum, const std::vector<RowsToAdd>& parts,
              const std::array<at::Tensor, 2>& out) {
  if (sum.numel() == 0) return;
#ifdef RINGATTN_WITH_CUDA
  if (sum.is_cuda()) return sum_on_device(sum, parts, out);
#endif
  for (const auto& [x, rows] : parts) sum.narrow(2, rows.begin, rows.size()).add_(x);
  for (int64_t i = 0; i < 2; ++i) {
    const at::Tensor half = sum.select(0, i);
    if (half.const_data_ptr() != out[i].const_data_ptr()) out[i].copy_(half);
  }
}

}  // namespace ringattn
