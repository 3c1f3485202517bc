// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdint>
#include <set>
#include <vector>

#include "catch.h"
#include "ring/key_tables.h"
#include "ring/ring_plan.h"

using ringattn::HostTable;
using ringattn::Layout;
using ringattn::make_mask;
using ringattn::Mask;
using ringattn::Partition;
using ringattn::plan_ring;
using ringattn::RingPlan;

TEST_CASE("the host knows each table that a plan has made, by a number of its own") {
  const Partition partition(Layout::kContiguous, {5, 4, 3});
  const Mask mask = make_mask(true, 2, 0, std::vector<int64_t>{0, 7, 12}, 12);
  std::set<int64_t> numbers;
  for (int repeat = 0; repeat < 2; ++repeat) {
    const RingPlan plan = plan_ring(partition, partition, 1, mask);
    const std::vector<at::Tensor>& tables = plan.key_tables->on(at::kCPU);
    REQUIRE(tables.size() == 3);
    for (int64_t step = 0; step < 3; ++step) {
      const HostTable host = plan.key_tables->host_table(step);
      INFO("step " << step);
      CHECK((host.ranges != nullptr) == plan.visits[step].visible());
      CHECK(tables[step].defined() == plan.visits[step].visible());
      if (host.ranges == nullptr) continue;
      const auto* table = tables[step].const_data_ptr<int32_t>();
      CHECK(std::equal(host.ranges, host.ranges + tables[step].numel(), table));
      CHECK(host.number > 0);
      CHECK(numbers.insert(host.number).second);
    }
  }
  CHECK(numbers.size() == 4);  // of rows 5 to 8, which see rows of ranks 0 and 1
}
