// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace ringattn {

/// What an attention kernel computes together, whatever of it is there, and how long that takes:
/// what the kernel's own order of work, and plans for several ranks, go by.
struct AttentionTile {
  int rows = 1;
  int keys = 1;
  int part_rows = 1;  // of which `rows` are a multiple: parts that work side by side
  int time = 1;       // of a whole one, in any unit
  int more_keys = 0;  // that rows would see in the time that they take to begin and to end
};

/// How long a tile takes of which so many parts have rows, in the time that each of them adds.
constexpr int time_of_parts(int parts) { return parts + 2; }

}  // namespace ringattn
