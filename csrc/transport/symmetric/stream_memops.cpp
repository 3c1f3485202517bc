// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/stream_memops.h"

#include <algorithm>

namespace ringattn::cuda {
namespace {

using BatchMemOp = decltype(&cuStreamBatchMemOp);

// The driver's function, through the runtime: the library does not link the driver.
BatchMemOp batch_mem_op() {
  static const BatchMemOp function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuStreamBatchMemOp", &found, 12000,
                                                               cudaEnableDefault, &result);
    const bool there = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return there ? reinterpret_cast<BatchMemOp>(found) : nullptr;
  }();
  return function;
}

CUdeviceptr address(const uint32_t* signal) { return reinterpret_cast<CUdeviceptr>(signal); }

}  // namespace

bool StreamMemOps::available() { return batch_mem_op() != nullptr; }

void StreamMemOps::wait_until(const uint32_t* signal, uint32_t value) {
  CUstreamBatchMemOpParams operation = {};
  operation.waitValue.operation = CU_STREAM_MEM_OP_WAIT_VALUE_32;
  operation.waitValue.address = address(signal);
  operation.waitValue.value = value;
  operation.waitValue.flags = CU_STREAM_WAIT_VALUE_EQ;
  operations_.push_back(operation);
}

void StreamMemOps::write(uint32_t* signal, uint32_t value) {
  CUstreamBatchMemOpParams operation = {};
  operation.writeValue.operation = CU_STREAM_MEM_OP_WRITE_VALUE_32;
  operation.writeValue.address = address(signal);
  operation.writeValue.value = value;
  operation.writeValue.flags = CU_STREAM_WRITE_VALUE_DEFAULT;
  operations_.push_back(operation);
}

cudaError_t StreamMemOps::enqueue(cudaStream_t stream) {
  constexpr size_t kMaxAtOnce = 256;
  for (size_t first = 0; first < operations_.size(); first += kMaxAtOnce) {
    const size_t count = std::min(kMaxAtOnce, operations_.size() - first);
    const CUresult result =
        batch_mem_op()(stream, static_cast<unsigned>(count), operations_.data() + first, 0);
    if (result != CUDA_SUCCESS) return static_cast<cudaError_t>(result);
  }
  return cudaSuccess;
}

}  // namespace ringattn::cuda
