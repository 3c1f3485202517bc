// SPDX-License-Identifier: Apache-2.0
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <memory>
#include <string>
#include <utility>

#include "ops/checks.h"
#include "transport/group/group_context.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

// Small tensors, and facts of a call that its operators do not see.
at::Tensor all_gather_op(const at::Tensor& mine, c10::string_view operation, c10::string_view facts,
                         c10::string_view group_name) {
  const c10::DeviceGuard guard(mine.device());
  const auto group = GroupContext::resolve(std::string(group_name));
  const CallEntry entry(group.get(), "all_gather");
  Signature asked = check_call(*group, [&] {
    RINGATTN_CHECK(facts.empty() || facts.back() == '\n', "facts must end with a newline, got ",
                   facts);
    group->check_device(mine.device(), group_transport());
    return Signature(literal(operation))
        .add_lines(facts)
        .add("dtype", c10::toString(mine.scalar_type()))
        .add("device type", c10::DeviceTypeName(mine.device().type()))
        .add("shape", mine.sizes());
  });
  const int64_t call = group->begin_call(std::make_shared<const Signature>(std::move(asked)),
                                         /*tagged=*/mine.is_cpu());
  return group->run(call, [&] {
    // As bytes: any backend takes any dtype then.
    const at::Tensor all = group->own_transport(mine.device())
                               .all_gather(mine.contiguous().view(-1).view(at::kByte), call);
    auto sizes = mine.sizes().vec();
    sizes.insert(sizes.begin(), group->size());
    return all.view(-1).view(mine.scalar_type()).view(sizes);
  });
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("all_gather", &all_gather_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("all_gather", &all_gather_op); }
#endif

}  // namespace
}  // namespace ringattn
