// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <c10/util/FunctionRef.h>

#include <optional>
#include <string>
#include <vector>

#include "core/shape.h"
#include "partition/partition.h"
#include "transport/group/group_context.h"
#include "transport/p2p_transport.h"

// What operators ask of their arguments, once: nothing below this room checks again. A refusal
// reads "subject must rule, got value". The prefix tells the Python layer that the caller is to
// blame.
#define RINGATTN_CHECK(condition, ...) TORCH_CHECK(condition, "ringattn: ", __VA_ARGS__)

namespace ringattn {

/// As Python writes it: torch.float32.
std::string dtype_name(at::ScalarType dtype);

/// Every environment variable that C++ reads has a meaning.
void check_environment();

/// q [B, S_q, H, D] and k, v [B, S_k, H_kv, D] fit each other and a kernel.
void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale);

/// (out, lse) is a state: [B, S, H, D] and [B, H, S], float32, on CPU float64 too.
void check_state(const at::Tensor& out, const at::Tensor& lse);
/// The same, over the rows of q.
void check_state(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& q);

/// Whether x, meant to be [B, S, H, D], has the strides of a transposed [B, H, S, D].
bool has_heads_first(const at::Tensor& x);

/// The partition that these arguments describe, over `world_size` ranks.
Partition check_partition(const std::vector<int64_t>& lengths, const std::vector<int64_t>& order,
                          const std::string& layout, int64_t world_size);

/// x [B, S_r, H, D] has the rows of `rank`. The refusal of whole tensors, and of [B, H, S_r, D],
/// says what to pass.
void check_rows(const at::Tensor& x, const char* name, const Partition& partition, int64_t rank);

/// What is captured in a CUDA graph has been agreed on before: ranks cannot talk then. And its
/// transport, asked for where there is a capture, can be part of one.
void check_capture(const GroupContext& group, const Signature& signature, c10::Device device,
                   c10::function_ref<const MessageTransport&()> transport);

/// The signature that `check` makes of this rank's arguments. Where it refuses them, the other
/// ranks are told.
template <typename Check>
Signature check_call(GroupContext& group, const Check& check) {
  group.failures().throw_if_failed();
  try {
    return check();
  } catch (const std::exception& error) {  // whatever it is, peers wait for this rank
    group.refuse_call(reason_of(error));
    throw;
  }
}

}  // namespace ringattn
