// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// What a kernel needs to bring keys and values, or whatever else is staged, from other devices by
// itself: transports provide it, kernels use it. Plain data.

namespace ringattn {

/// A block in memory of another device that this one can read: [H_kv, 2, B, num_rows, D], keys
/// and values of a head next to each other.
struct RemoteKeys {
  const void* data = nullptr;
  int64_t num_rows = 0;
};

/// Words of device memory, [kFirstArrival + num_arrivals] of them, that are 0 when a launch begins
/// and that it leaves 0 behind: a captured launch can be replayed. Launches that overlap need words
/// of their own each.
struct LaunchWords {
  static constexpr int kTurnsTaken = 0;
  static constexpr int kWarpsDone = 1;
  static constexpr int kPiecesTaken = 2;
  static constexpr int kPiecesBrought = 3;
  static constexpr int kFirstArrival = 4;

  uint32_t* data = nullptr;
  int32_t num_arrivals = 0;  // room for so many counts of what has been brought

  constexpr uint32_t* arrivals() const { return data + kFirstArrival; }
};

/// What a rank says of the block that others read: nothing (0), that it is being staged, so that it
/// will come whatever else happens, and the number of KV heads that may be read.
constexpr uint32_t kBeingStaged = 1;
constexpr uint32_t staged_heads(uint32_t heads) { return kBeingStaged + heads; }

/// Said, for the kind of its call, by who has seen somebody in another one.
constexpr uint32_t kNoCall = 0xffffffff;

/// What the word `failed` of a rank is where calls come to nothing: the host has given up, or a
/// rank has been seen in another call. Staging goes on then, lest others do not see it.
constexpr uint32_t kGivenUp = 1;
constexpr uint32_t kInAnotherCall = 2;

/// What a launch that brings what is staged and its peers tell each other.
struct Notices {
  static constexpr int kMaxPeers = 16;

  // Of this device: what each peer has staged, as above.
  uint32_t* staged[kMaxPeers] = {};
  // When all has been read, first `staged` is set to 0, then these, of others, to 1.
  uint32_t* read[kMaxPeers] = {};
  // The same for who waits in streams, in host memory: what each peer has said to them here is set
  // to 0, too, and `read` told first there. Null: nobody does.
  uint32_t* staged_for_streams[kMaxPeers] = {};
  uint32_t* read_for_streams[kMaxPeers] = {};
  // It ends when these, of this device, are not 0 any more: the others have read what is here.
  const uint32_t* read_here[kMaxPeers] = {};
  int32_t num_peers = 0;

  uint32_t* phase = nullptr;    // a word of the host's; null: nobody asks
  uint32_t phase_working = 0;   // written there when the launch begins, when all has been read, and
                                // when it has waited at its end,
  uint32_t phase_bringing = 0;  // when it waits for long for what a peer stages,
  uint32_t phase_told = 0;      // or for that to be told to streams, too,
  uint32_t phase_waiting = 0;   // and when nothing is left but to wait until the others have read
};

/// What a launch needs beside where the keys are, to bring them.
struct Bringing {
  LaunchWords words;
  /// Device memory: where it is not 0, nothing is read any more, and the results and lse of what is
  /// finished from then on are NaN (kGivenUp, kInAnotherCall).
  uint32_t* failed = nullptr;
  /// A word of the host's, which who waits for long looks at, and sets `failed` where it is not 0:
  /// the driver may keep the host from the device until that has done what waits. Null: nobody
  /// looks.
  const uint32_t* given_up = nullptr;
  Notices notices;
  /// The kernel before is the one that stages this rank's block: it says when this one may begin
  /// beside it.
  bool follows_staging = false;
  /// For tests: not 0, what is brought is late by random times drawn from it.
  uint32_t lateness = 0;
};

}  // namespace ringattn
