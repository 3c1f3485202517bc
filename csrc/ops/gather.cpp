// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "transport/group/group_context.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

Signature signature(const at::Tensor& rows, const Partition& partition, const std::string& layout,
                    int64_t dim, const std::optional<at::Tensor>& pieces) {
  Signature signature("gather");
  signature.add("partition.lengths", partition.lengths())
      .add("partition.order", partition.order())
      .add("partition.layout", layout)
      .add("dtype", dtype_name(rows.scalar_type()))
      .add("device type", c10::DeviceTypeName(rows.device().type()))
      .add("sizes", rows.sizes().slice(1))
      .add("dim", dim);
  if (pieces) signature.add("partition.pieces", values_of(*pieces));
  return signature;
}

// Every rank sends as many rows as the longest one has, as bytes: any backend takes any dtype then.
at::Tensor gather_op(const at::Tensor& rows, at::IntArrayRef lengths, at::IntArrayRef order,
                     c10::string_view layout_name, int64_t dim, c10::string_view group_name,
                     const std::optional<at::Tensor>& pieces) {
  const c10::DeviceGuard guard(rows.device());
  const std::string layout(layout_name);
  const auto group = GroupContext::resolve(std::string(group_name));
  const CallEntry entry(group.get(), "gather");
  std::optional<Partition> partition;
  Signature asked = check_call(*group, [&] {
    RINGATTN_CHECK(rows.dim() >= 1, "rows must have a dimension, got none");
    partition = check_partition(lengths.vec(), order.vec(), layout, group->size(), pieces);
    const int64_t own = partition->length(group->rank());
    RINGATTN_CHECK(rows.size(0) == own, "rows must be the ", own, " of this rank, got ",
                   rows.size(0));
    group->check_device(rows.device(), group_transport());
    return signature(rows, *partition, layout, dim, pieces);
  });
  const int64_t call = group->begin_call(std::make_shared<const Signature>(std::move(asked)),
                                         /*tagged=*/rows.is_cpu());
  return group->run(call, [&] {
    auto sizes = rows.sizes().vec();
    sizes[0] = *std::max_element(lengths.begin(), lengths.end());
    at::Tensor padded = at::zeros(sizes, rows.options());
    padded.narrow(0, 0, rows.size(0)).copy_(rows);
    auto& transport = *group->transport(group_transport(), rows.device()).collectives();
    const at::Tensor all = transport.all_gather(padded.view(-1).view(at::kByte), call);
    sizes.insert(sizes.begin(), group->size());
    return all.view(-1).view(rows.scalar_type()).view(sizes);
  });
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) { m.impl("gather", &gather_op); }

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) { m.impl("gather", &gather_op); }
#endif

}  // namespace
}  // namespace ringattn
