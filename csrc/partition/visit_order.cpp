// SPDX-License-Identifier: Apache-2.0
#include "partition/visit_order.h"

#include <algorithm>
#include <cstdlib>

namespace ringattn {

VisitOrder::VisitOrder(const Partition& queries, const Partition& keys)
    : ranks_(keys.order()), place_(ranks_.size()) {
  const auto has_tokens = [&](int64_t rank) {
    return queries.length(rank) > 0 || keys.length(rank) > 0;
  };
  num_active_ = std::stable_partition(ranks_.begin(), ranks_.end(), has_tokens) - ranks_.begin();
  for (size_t place = 0; place < ranks_.size(); ++place) place_[ranks_[place]] = place;
}

int64_t VisitOrder::after(int64_t rank, int64_t distance) const {
  const int64_t at = place_.at(rank);
  const int64_t all = at < num_active_ ? num_active_ : static_cast<int64_t>(ranks_.size());
  // Steps after those to the active ranks go to the ranks without tokens, which stand behind them.
  const int64_t step = std::abs(distance);
  return ranks_[step < all ? ((at + distance) % all + all) % all : step];
}

}  // namespace ringattn
