// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "attention/params.h"

namespace ringattn::cuda {

inline int element_bytes(DataType dtype) { return dtype == DataType::kFloat32 ? 4 : 2; }

/// Whether every row of x [batch, rows, heads, D] begins at a multiple of 16 bytes, less than 2 GiB
/// from the next. Strides of dimensions of size 1 do not count; neither does a tensor without
/// elements or without data.
inline bool rows_are_aligned(const Strided& x, int bytes, int64_t batch, int64_t rows,
                             int64_t heads) {
  if (x.data == nullptr || batch == 0 || rows == 0 || heads == 0) return true;
  const auto multiple = [](int64_t value) { return value % 16 == 0; };
  return reinterpret_cast<std::uintptr_t>(x.data) % 16 == 0 &&
         (batch == 1 || multiple(x.batch_stride * bytes)) &&
         (rows == 1 || (multiple(x.row_stride * bytes) && x.row_stride * bytes <= INT32_MAX)) &&
         (heads == 1 || multiple(x.head_stride * bytes));
}

}  // namespace ringattn::cuda
