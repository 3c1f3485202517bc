// SPDX-License-Identifier: Apache-2.0
#include "transport/group/rendezvous.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <numeric>

namespace ringattn {

std::vector<int64_t> Rendezvous::others() const {
  std::vector<int64_t> ranks(size);
  std::iota(ranks.begin(), ranks.end(), 0);
  ranks.erase(ranks.begin() + rank);
  return ranks;
}

std::string one_of(std::vector<int64_t> ranks) {
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  std::string names;
  for (const int64_t rank : ranks) {
    names += (names.empty() ? "rank " : " or rank ") + std::to_string(rank);
  }
  return names;
}

std::string reason_of(const std::exception& error) {
  const auto* known = dynamic_cast<const c10::Error*>(&error);
  return known != nullptr ? known->what_without_backtrace() : error.what();
}

}  // namespace ringattn
