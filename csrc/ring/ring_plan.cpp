// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_plan.h"

#include <algorithm>

namespace ringattn {

RingPlan plan_ring(const Partition& queries, const Partition& keys, int64_t rank,
                   const Mask& mask) {
  RingPlan plan;
  plan.visits = schedule(queries, keys, rank, mask);
  plan.hops = plan_hops(queries, keys, rank, mask);
  plan.key_tables = std::make_shared<KeyTables>(queries, keys, rank, mask, plan.visits);
  plan.max_rows = *std::max_element(keys.lengths().begin(), keys.lengths().end());
  return plan;
}

}  // namespace ringattn
