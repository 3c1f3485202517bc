// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric_plan.h"

#include <ATen/cuda/CUDAContext.h>

#include <algorithm>

namespace ringattn {
namespace {

int64_t row_bytes(const at::Tensor& k) {  // keys and values of a row, all heads and batch entries
  return 2 * k.size(0) * k.size(2) * k.size(3) * static_cast<int64_t>(k.element_size());
}

// Ahead of the block being attended there are up to `depth` others: so many places, used in turn.
// The first byte of each, and behind the last.
std::vector<int64_t> places(const Exchange& exchange) {
  const int64_t num_hops = exchange.hops.size();
  const int64_t num_places = std::min(num_hops, exchange.depth + 1);
  std::vector<int64_t> rows(num_places, 0);
  for (int64_t i = 0; i < num_hops; ++i) {
    rows[i % num_places] = std::max(rows[i % num_places], exchange.hops[i].rows_received);
  }
  constexpr int64_t kAlignment = 1024;
  std::vector<int64_t> begin = {0};
  for (const int64_t some : rows) {
    const int64_t bytes = some * row_bytes(exchange.k);
    begin.push_back(begin.back() + (bytes + kAlignment - 1) / kAlignment * kAlignment);
  }
  return begin;
}

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// How many heads of a block come at once: as many as the kernel's first tiles are about, which wait
// for all of them, and as an engine needs for its speed (H200: 2 MB take 8 us, 4 MB 14, and 4 pass
// before the next). No more, so that the first are there soon.
int64_t heads_per_slice(const Exchange& exchange, bool polled) {
  constexpr int64_t kFewestBytes = int64_t{2} << 20;
  constexpr int64_t kRowsOfTile = 128;  // about
  const int64_t kv_heads = exchange.k.size(2), num_hops = exchange.hops.size();
  if (!polled || exchange.query_rows == 0) return kv_heads;
  int64_t most_rows = 0;
  for (const Hop& hop : exchange.hops) most_rows = std::max(most_rows, hop.rows_received);
  const int64_t head_bytes = std::max<int64_t>(1, most_rows * row_bytes(exchange.k) / kv_heads);
  const int64_t tiles = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
  const int64_t at_once =
      (tiles * kRowsOfTile + exchange.query_rows / 2) / exchange.query_rows;  // rounded
  const int64_t most_slices = std::min(kv_heads, Handshake::kMaxArrivals / num_hops);
  const int64_t heads =
      std::max({at_once, ceil_div(kFewestBytes, head_bytes), ceil_div(kv_heads, most_slices)});
  // Slices of one size: the last is not much smaller than the others.
  return ceil_div(kv_heads, ceil_div(kv_heads, std::min(heads, kv_heads)));
}

}  // namespace

cuda::StageSource stage_source(const at::Tensor& x) {
  const auto bytes = [&](int64_t dim) {
    return x.stride(dim) * static_cast<int64_t>(x.element_size());
  };
  return {x.const_data_ptr(), bytes(0), bytes(1), bytes(2)};
}

at::Tensor stageable(const at::Tensor& x) {
  const cuda::StageSource source = stage_source(x);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(source.data) | static_cast<uintptr_t>(source.batch_stride) |
       static_cast<uintptr_t>(source.row_stride) | static_cast<uintptr_t>(source.head_stride)) %
          cuda::kStagePiece ==
      0;
  if (x.numel() == 0 || (x.stride(3) == 1 && aligned)) return x;
  return x.clone(at::MemoryFormat::Contiguous);
}

Plan::~Plan() {
  if (graph != nullptr) cudaGraphExecDestroy(graph);
}

std::vector<int64_t> plan_key(const Exchange& exchange, bool polled) {
  const at::Tensor& k = exchange.k;
  std::vector<int64_t> key = {
      k.size(0),      k.size(2),           k.size(3), static_cast<int64_t>(k.scalar_type()),
      exchange.depth, exchange.query_rows, polled};
  for (const Hop& hop : exchange.hops) {
    key.insert(key.end(), {hop.source, hop.rows_received, hop.source_rows});
  }
  return key;
}

int64_t gathered_bytes(const Exchange& exchange) { return places(exchange).back(); }

std::unique_ptr<Plan> make_plan(const Exchange& exchange, bool polled, const SharedMemory& staged,
                                const at::Tensor& gathered, const Handshake& handshake) {
  const at::Tensor& k = exchange.k;
  const int64_t batch = k.size(0), kv_heads = k.size(2), head_dim = k.size(3);
  const int64_t num_hops = exchange.hops.size(), bytes = k.element_size();
  const int64_t heads_per_copy = heads_per_slice(exchange, polled);
  const int64_t slices = ceil_div(kv_heads, heads_per_copy);
  const std::vector<int64_t> begin = places(exchange);
  const auto begin_of = [&](int64_t hop) {
    return begin[hop % (static_cast<int64_t>(begin.size()) - 1)];
  };

  auto plan = std::make_unique<Plan>();
  plan->memory = gathered;
  Gathering& gathering = plan->gathering;
  gathering.heads_per_arrival = heads_per_copy;
  gathering.words = handshake.launch_words();
  gathering.num_arrivals = polled ? num_hops * slices : 0;
  gathering.failed = handshake.failed();
  uint32_t* const arrivals = gathering.words + Handshake::kLaunchCounters;

  const at::Tensor elements = gathered.view(k.scalar_type());
  auto step_of_rank = std::make_shared<std::vector<int64_t>>(num_hops + 1, 0);
  for (int64_t i = 0; i < num_hops; ++i) {
    const Hop& hop = exchange.hops[i];
    (*step_of_rank)[hop.source] = i + 1;
    const int64_t plane = hop.rows_received * head_dim;  // elements
    const auto view = [&](int64_t offset) {
      return elements.as_strided({batch, hop.rows_received, kv_heads, head_dim},
                                 {plane, head_dim, 2 * batch * plane, 1},
                                 begin_of(i) / bytes + offset);
    };
    gathering.blocks.push_back({view(0), view(batch * plane)});
    if (polled) gathering.arrivals.push_back(arrivals + i * slices);
  }
  plan->step_of_rank = std::move(step_of_rank);

  for (int64_t slice = 0; slice < slices; ++slice) {
    const int64_t first_head = slice * heads_per_copy;
    const int64_t heads = std::min(heads_per_copy, kv_heads - first_head);
    for (int64_t i = 0; i < num_hops; ++i) {
      const Hop& hop = exchange.hops[i];
      Copy copy;
      copy.step = i + 1;
      copy.planes = 2 * heads * batch;
      copy.plane_bytes = hop.rows_received * head_dim * bytes;
      copy.pitch = hop.source_rows * head_dim * bytes;
      copy.from =
          static_cast<const char*>(staged.of(hop.source)) + 2 * first_head * batch * copy.pitch;
      copy.to = static_cast<char*>(gathered.mutable_data_ptr()) + begin_of(i) +
                2 * first_head * batch * copy.plane_bytes;
      if (polled) copy.arrival = arrivals + i * slices + slice;
      plan->copies.push_back(copy);
    }
  }
  return plan;
}

}  // namespace ringattn
