// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn {

/// A tile of an attention kernel: rows and keys that it computes together, whether they exist or
/// not, and how long that takes. The kernel's own scheduler and the planner both use it.
struct AttentionTile {
  int rows = 1;
  int keys = 1;
  int rows_per_warpgroup = 1;  // divides `rows`: rows that are computed side by side
  int relative_cost = 1;       // of a full tile, in any unit
  int overhead_keys = 0;       // keys that rows could attend in the time of prologue and epilogue
};

/// The cost of a tile of which `warpgroups` have rows, in units of what each of them adds.
constexpr int warpgroups_cost(int warpgroups) { return warpgroups + 2; }

}  // namespace ringattn
