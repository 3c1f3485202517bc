// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "core/export.h"

// Turns of a kernel whose thread blocks stay: each is handed out, in order, to whoever is free
// first.

namespace ringattn {

/// Times are in any unit.
struct Turn {
  int length;
  int earliest_end = 0;  // whenever it begins: what it needs comes while others are taken
};

/// How long it is until all turns are done.
RINGATTN_API int64_t time_of_turns(const std::vector<Turn>& turns, int64_t num_takers);

/// Turns taken in the order in which they lie end unevenly: of a few long ones each, who is done
/// last has a good part of one left when the others have nothing more to take. An order of the last
/// of them, `most` at the most, with which they end more evenly, found by a search: the i-th of
/// these is turn turns.size() - result.size() + result[i]. Empty where it would gain a two
/// hundredth or less.
RINGATTN_API std::vector<uint16_t> order_of_last_turns(const std::vector<Turn>& turns,
                                                       int64_t num_takers, int64_t most);

/// Turns with the last of them in the order that order_of_last_turns found.
RINGATTN_API std::vector<Turn> with_last_in_order(const std::vector<Turn>& turns,
                                                  const std::vector<uint16_t>& order);

}  // namespace ringattn
