// SPDX-License-Identifier: Apache-2.0
#include "attention/cuda/exchange_partials.cuh"

namespace ringattn::cuda {

cudaError_t exchange_partials(const ExchangePartialsParams& p, cudaStream_t stream) {
  switch (p.out_dtype) {
    case DataType::kFloat16:
      return launch_exchange_partials<__half>(p, stream);
    case DataType::kBFloat16:
      return launch_exchange_partials<__nv_bfloat16>(p, stream);
    case DataType::kFloat32:
      return launch_exchange_partials<float>(p, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace ringattn::cuda
