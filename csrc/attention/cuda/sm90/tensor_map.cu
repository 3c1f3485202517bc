// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/alignment.h"
#include "attention/cuda/sm90/tensor_map.h"

namespace ringattn::cuda::sm90 {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

/// The driver's function, through the runtime: the library does not link the driver, and loads
/// where there is none.
Encode encode_function() {
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &result);
    const bool found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return found ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return encode;
}

CUtensorMapDataType map_type(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
    case DataType::kBFloat16:
      return CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    case DataType::kFloat32:
      break;
  }
  return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
}

}  // namespace

cudaError_t make_tensor_map(const Strided& x, DataType dtype, int batch, int rows, int heads,
                            int head_dim, int box_rows, CUtensorMap& map) {
  const Encode encode = encode_function();
  if (encode == nullptr) return cudaErrorNotSupported;

  const int bytes = element_bytes(dtype);
  // The stride of a dimension of size 1 says nothing, but has to be valid.
  const auto stride = [&](int64_t elements, int size) {
    return static_cast<cuuint64_t>(size == 1 ? int64_t{head_dim} * bytes : elements * bytes);
  };
  const cuuint64_t sizes[4] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(heads), static_cast<cuuint64_t>(batch)};
  const cuuint64_t strides[3] = {stride(x.row_stride, rows), stride(x.head_stride, heads),
                                 stride(x.batch_stride, batch)};
  const cuuint32_t box[4] = {static_cast<cuuint32_t>(128 / bytes),
                             static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t every_element[4] = {1, 1, 1, 1};
  const CUresult result =
      encode(&map, map_type(dtype), 4, x.data, sizes, strides, box, every_element,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorNotSupported;
}

}  // namespace ringattn::cuda::sm90
