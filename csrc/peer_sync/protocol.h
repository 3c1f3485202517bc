// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// The protocol by which kernels and streams of the ranks of one host order staging, fetching and
// reuse of each other's memory. This page is its specification; transports provide the data below,
// kernels use it. Plain data.
//
// Every rank has a signal pad in device memory, and one in host memory with mirrors of `staged` and
// `read`; all ranks map both. A signal is a 32-bit value in the pad of one rank that another rank
// writes. A rank cannot know whether a peer waits in a kernel or in a stream, so `staged` and
// `read` are written to both memories in each call: kernels wait for the device's, streams for the
// mirror.
//
// Signals of a call. x[p] of r: in the pad of rank r, written by its peer p. "staging": the kernel
// that copies a rank's block into memory that its peers read. "fetching": the kernel that reads the
// blocks of peers; a rank launches it behind its staging kernel. "stream": the stream whose copy
// engines fetch, where no kernel does; staging then waits for no `staged`. Orders are PTX's, all of
// system scope. Stream operations are ordered by their stream, a write behind everything that the
// stream did before it. A signal is in flight when its writer has issued it and the waiter cannot
// see it yet.
//
//   signal            writer, order               value               waiter
//   ----------------  --------------------------  ------------------  ---------------------------
//   tag[p]            staging of p, relaxed,      hash of the call,   staging of r reads it once
//                     before staged[p]            or kMismatchTag     staged[p] is not 0
//   staged[p]         staging of p, release       kBeingStaged, then  staging of r: not 0
//                                                 staged_heads(n)     fetching of r: enough heads
//   staged_mirror[p]  staging of p, release,      tag                 stream of r: equal to tag
//                     after all heads                                 fetching of r, at its end
//   read[p]           fetching of p, release,     1                   fetching of r, at its end
//                     a copy on p's stream, or                        next staging of r
//                     r's own stream (below)
//   read_mirror[p]    fetching of p, relaxed,     1                   stream of r
//                     or p's stream,
//                     before read[p]
//
//   signal            cleared to 0 by
//   ----------------  -----------------------------------------------------------------------------
//   tag[p]            nothing: the next call writes over it
//   staged[p]         fetching of r once it has read everything and both are set, or stream of r
//                     once the mirror is set; before r writes read[r] of p, so that p cannot have
//                     set it for the next call yet
//   staged_mirror[p]  as staged[p]: fetching of r, or stream of r
//   read[p]           staging of r in the next call, before it writes staged[r] of p
//   read_mirror[p]    staging of r in the next call, after it has written staged[r] of p; in a
//                     round, before
//
// Where the streams of all ranks fetch, no kernel waits for `read` but the staging kernels, each
// behind its own stream. There a stream writes `read` to its own pad, once its own writes are there
// and all of read_mirror are set, instead of a copy to each peer.
//
// A round of messages is a call in which the streams of all ranks fetch. What a rank sends to each
// peer has memory of its own, and is written there by its attention kernels. A staging kernel for
// each peer, in the order of the round and behind the kernel that writes, waits for and clears the
// read[p] of that peer alone, and gives its signals: the value of `staged` is that of all heads at
// once. The stream waits for the staged_mirror of one peer, reads what that sends, and waits for
// the next; it clears all of them behind the last. It waits for read_mirror once the last of its
// own rank's staging kernels has ended, which clear it.
//
// Write order: `staged` before staged_mirror, read_mirror before `read`. A waiter for the signal
// that is written second knows that both are set. A kernel that has read everything waits for
// staged_mirror, too, before it clears both. A stream waits for read_mirror and does not clear it;
// the next staging kernel waits for `read` before it clears both.
//
// `read` and read_mirror are 1 before the first call. No signal counts calls: a captured call can
// be replayed. A call ends for its stream when all peers have read what the rank staged: the next
// staging kernel waits only for a `read` that is in flight behind its mirror.
//
// Failure. `failed` (device memory of a rank) becomes kGivenUp or kCallMismatch, and never 0 again;
// kGivenUp replaces kCallMismatch. It ends all waits of that rank's kernels: results are NaN, and
// kernels read nothing more from peers.
// The host's watchdog then also sets `staged`, `read` and both mirrors of its rank, again and
// again: calls that were enqueued before clear them.
//
//   failed = kGivenUp       written by the host's watchdog, by a waiting kernel (from given_up) or
//                           by the staging kernel (from given_up_copy). The rank stages nothing
//                           and writes no tag or `staged` from then on. It still writes
//                           `read`: it will read no more.
//   failed = kCallMismatch  written by the staging kernel that reads a tag unlike its own. The rank
//                           goes on staging, under kMismatchTag, so that peers detect it too.
//   given_up                host memory, written by the watchdog before it sets all other signals
//   given_up_copy           device memory, copied from given_up by the stream, once peers have read
//                           and, in a round, once they have staged
//
// What a kernel may wait for:
//   - Signals that peers write while they stage, for which they need nothing else: all blocks of
//     the fetching kernel wait for `staged`, one warp of it at most for staged_mirror.
//   - Signals in flight: one warp of the staging kernel waits for `read`.
//   - Signals of work that peers have yet to begin: one thread block of the staging kernel, which
//     copies nothing, waits for `staged` to be not 0; of the fetching kernel, the warp that ends
//     last waits for `read`.
// Ranks may share a device. So no rank waits for work that a peer has yet to begin while it holds
// more than two multiprocessors, those of a cluster of the Hopper attention kernel.

namespace ringattn {

/// Rows of a block that a thread block fetches at a time.
struct alignas(16) RemotePart {
  int32_t from = 0;  // the first row, counted from RemoteBlock::data
  int32_t to = 0;    // its place among the rows that are read
  int32_t rows = 0;
};

/// A block in memory of another device that this one can read: [H_kv, 2, B, num_rows, D], keys
/// and values of a head next to each other.
struct RemoteBlock {
  const void* data = nullptr;
  // Of the whole block. A plane is [num_rows, D]: keys or values of one head and batch entry. Its
  // leading rows are read, or these parts.
  int64_t num_rows = 0;
  const RemotePart* parts = nullptr;  // [num_parts], in this device's memory; null: leading rows
  int32_t num_parts = 0;
};

/// Counters of one launch in device memory, uint32 [kFirstArrival + num_arrivals]. They are 0 when
/// the launch begins, and it leaves them 0: a captured launch can be replayed. Launches that
/// overlap need counters of their own.
struct LaunchScratch {
  static constexpr int kWorkTilesTaken = 0;  // by thread blocks, in their order
  static constexpr int kWarpsDone = 1;       // warps, or thread blocks, that have ended
  static constexpr int kChunksTaken = 2;     // parts of remote blocks that a thread block fetches
  static constexpr int kChunksFetched = 3;
  static constexpr int kFirstArrival = 4;

  uint32_t* data = nullptr;
  int32_t num_arrivals = 0;  // counters of fetched chunks, for those who wait for some of them

  constexpr uint32_t* arrivals() const { return data + kFirstArrival; }
};

/// Values of `staged`: 0 before, kBeingStaged once all copying thread blocks of the staging kernel
/// run, so that the block will come whatever else happens, then staged_heads(KV heads to be read).
constexpr uint32_t kBeingStaged = 1;
constexpr uint32_t staged_heads(uint32_t heads) { return kBeingStaged + heads; }

/// Tag published by a rank that has detected a call mismatch. It equals no real call's tag.
constexpr uint32_t kMismatchTag = 0xffffffff;

/// Values of `failed` other than 0.
constexpr uint32_t kGivenUp = 1;
constexpr uint32_t kCallMismatch = 2;

/// Addresses of the signals that a fetching launch reads and writes.
///
/// Names here and in StageParams are a signal of the table and the rank that writes it:
///   x_by_peer[i]       x[peer i] in this rank's pad: peer i has staged its block, has read this
///                      rank's block, ...
///   x_by_this_rank[i]  x[this rank] in the pad of peer i: this rank has staged its block, has read
///                      peer i's block, ...
struct PeerSignals {
  static constexpr int kMaxPeers = 16;

  uint32_t* staged_by_peer[kMaxPeers] = {};     // waited for, then cleared
  uint32_t* read_by_this_rank[kMaxPeers] = {};  // set to 1 when everything has been read
  uint32_t* staged_mirror_by_peer[kMaxPeers] =
      {};  // host memory: as `staged`; null: none, in tests
  uint32_t* read_mirror_by_this_rank[kMaxPeers] = {};  // host memory: set before read_by_this_rank
  const uint32_t* read_by_peer[kMaxPeers] = {};        // the launch ends when all are set
  int32_t num_peers = 0;

  // Host memory where the launch shows its watchdog what it waits for; null: it shows nothing.
  uint32_t* phase = nullptr;
  uint32_t phase_working = 0;         // at its begin, once everything is read, and after its waits
  uint32_t phase_until_staged = 0;    // while it waits for long for heads that a peer stages
  uint32_t phase_until_mirrored = 0;  // while it waits for staged_mirror
  uint32_t phase_until_read = 0;      // while only read_by_peer is left to wait for
};

/// What a launch needs to fetch blocks of peers by itself, beside their addresses.
struct RemoteFetch {
  LaunchScratch scratch;
  /// Device memory. Where it is not 0, nothing more is fetched, and the rows and lse that are
  /// finished from then on are NaN.
  uint32_t* failed = nullptr;
  /// Host memory. A thread that waits for long reads it, and sets `failed` where it is not 0: the
  /// driver may keep the host from the device until the waiting kernel has ended. Null: not read.
  const uint32_t* given_up = nullptr;
  PeerSignals signals;
  /// The previous kernel of the stream stages this rank's block and triggers this launch.
  bool follows_staging = false;
  /// For tests: if not 0, chunks are delayed by random times drawn from it.
  uint32_t delay_seed = 0;
};

}  // namespace ringattn
