// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

namespace ringattn::cpu {

/// See ringattn::merge_states_.
void merge_states_(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& other_out,
                   const at::Tensor& other_lse);

}  // namespace ringattn::cpu
