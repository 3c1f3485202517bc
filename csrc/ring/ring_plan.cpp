// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_plan.h"

#include <algorithm>

namespace ringattn {

RingPlan plan_ring(const Partition& partition, int64_t rank, const Mask& mask) {
  RingPlan plan;
  plan.visits = schedule(partition, rank, mask);
  plan.hops = plan_hops(partition, rank, mask);
  plan.key_tables = std::make_shared<KeyTables>(partition, rank, mask, plan.visits);
  plan.max_rows = *std::max_element(partition.lengths().begin(), partition.lengths().end());
  return plan;
}

}  // namespace ringattn
