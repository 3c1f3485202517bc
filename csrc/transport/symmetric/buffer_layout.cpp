// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/buffer_layout.h"

#include <algorithm>

namespace ringattn {
namespace {

int64_t row_bytes(const at::Tensor& k) {  // keys and values of a row, all heads and batch entries
  return 2 * k.size(0) * k.size(2) * k.size(3) * static_cast<int64_t>(k.element_size());
}

// The first byte of each buffer, and the end of the last.
std::vector<int64_t> buffer_offsets(const RingExchangePlan& exchange) {
  constexpr int64_t kAlignment = 1024;
  std::vector<int64_t> begin = {0};
  for (const int64_t rows : buffer_rows(exchange.hops, exchange.depth)) {
    const int64_t bytes = rows * row_bytes(exchange.k);
    begin.push_back(begin.back() + (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  return begin;
}

}  // namespace

cuda::StageSource stage_source(const at::Tensor& x) {
  const auto bytes = [&](int64_t dim) {
    return x.stride(dim) * static_cast<int64_t>(x.element_size());
  };
  return {x.const_data_ptr(), bytes(0), bytes(1), bytes(2)};
}

at::Tensor as_stage_input(const at::Tensor& x) {
  const cuda::StageSource source = stage_source(x);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(source.data) | static_cast<uintptr_t>(source.batch_stride) |
       static_cast<uintptr_t>(source.row_stride) | static_cast<uintptr_t>(source.head_stride)) %
          cuda::kVectorBytes ==
      0;
  if (x.numel() == 0 || (x.stride(3) == 1 && aligned)) return x;
  return x.clone(at::MemoryFormat::Contiguous);
}

std::vector<int64_t> plan_key(const RingExchangePlan& exchange) {
  const at::Tensor& k = exchange.k;
  std::vector<int64_t> key = {k.size(0),      k.size(2),
                              k.size(3),      static_cast<int64_t>(k.scalar_type()),
                              exchange.depth, exchange.kernel_fetches()};
  for (const HopPlan& hop : exchange.hops) {
    const RowSet& rows = hop.received;
    key.insert(key.end(), {hop.source, rows.hull.begin, rows.hull.end, hop.source_rows,
                           static_cast<int64_t>(rows.gaps.size())});
    for (const RowRange& gap : rows.gaps) key.insert(key.end(), {gap.begin, gap.end});
  }
  return key;
}

int64_t fetched_bytes(const RingExchangePlan& exchange) { return buffer_offsets(exchange).back(); }

std::unique_ptr<MemoryPlan> plan_memory(const RingExchangePlan& exchange,
                                        const PeerDeviceMemory& staged, const at::Tensor& fetched,
                                        const SignalPad& signal_pad) {
  const at::Tensor& k = exchange.k;
  const int64_t batch = k.size(0), kv_heads = k.size(2), head_dim = k.size(3);
  const int64_t num_hops = exchange.hops.size(), bytes = k.element_size();
  const std::vector<int64_t> begin = buffer_offsets(exchange);

  auto plan = std::make_unique<MemoryPlan>();
  plan->memory = fetched;
  ResidentBlocks& resident = plan->resident;
  if (exchange.kernel_fetches()) resident.remote_fetch = signal_pad.remote_fetch(kv_heads);

  const at::Tensor elements = fetched.view(k.scalar_type());
  auto step_of_rank = std::make_shared<std::vector<int64_t>>(num_hops + 1, 0);
  for (int64_t i = 0; i < num_hops; ++i) {
    const HopPlan& hop = exchange.hops[i];
    (*step_of_rank)[hop.source] = i + 1;
    const int64_t buffer = begin[i % (static_cast<int64_t>(begin.size()) - 1)];  // bytes
    const int64_t num_rows = hop.received.size();
    const int64_t plane = num_rows * head_dim;  // elements
    const auto view = [&](int64_t offset) {
      return elements.as_strided({batch, num_rows, kv_heads, head_dim},
                                 {plane, head_dim, 2 * batch * plane, 1}, buffer / bytes + offset);
    };
    resident.blocks.push_back({view(0), view(batch * plane)});
    const char* from = static_cast<const char*>(staged.of(hop.source));
    if (exchange.kernel_fetches()) {
      from += hop.received.hull.begin * head_dim * bytes;
      resident.sources.push_back({from, hop.source_rows});
      continue;
    }
    char* to = static_cast<char*>(fetched.mutable_data_ptr()) + buffer;
    auto& copies = plan->copies.emplace_back();
    for (const RowRange& range : hop.received.ranges()) {
      CopyPlan copy;
      copy.from = from + range.begin * head_dim * bytes;
      copy.to = to;
      copy.planes = 2 * kv_heads * batch;
      copy.plane_bytes = range.size() * head_dim * bytes;
      copy.from_pitch = hop.source_rows * head_dim * bytes;
      copy.to_pitch = plane * bytes;
      copies.push_back(copy);
      to += copy.plane_bytes;
    }
  }
  plan->step_of_rank = std::move(step_of_rank);
  return plan;
}

}  // namespace ringattn
