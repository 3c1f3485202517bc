// SPDX-License-Identifier: Apache-2.0
//
// The Hopper kernel of one source tree, for head dims up to VARIANT_HEAD_DIM, without the library
// around it: kernel_variants.py compiles and loads it.

#include <cuda_bf16.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "attention/cuda/sm90/backward/launch.h"
#include "attention/cuda/sm90/launch.h"
#include "partition/schedule.h"
#include "peer_sync/protocol.h"
#include "transport/symmetric/kernels/stage.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

using namespace ringattn;

namespace {

constexpr int kElementBytes = 2;

/// [B, rows, heads, D], contiguous.
Strided contiguous(void* data, int64_t rows, int64_t heads, int64_t head_dim) {
  return {data, rows * heads * head_dim, heads * head_dim, head_dim};
}

bool holds(int head_dim) {
  return head_dim >= 1 && head_dim <= VARIANT_HEAD_DIM && head_dim % 8 == 0;
}

AttentionShape shape_of(int batch, int rows, int num_heads, int num_kv_heads, int head_dim,
                        float scale) {
  return {batch, rows, num_heads, num_kv_heads, head_dim, scale, DataType::kBFloat16};
}

cudaError_t launch(const BlockAttentionParams& params, void* stream) {
  return cuda::sm90::launch_block_attention<__nv_bfloat16, VARIANT_HEAD_DIM>(
      params, static_cast<cudaStream_t>(stream));
}

}  // namespace

/// q, out [B, S, H, D], k, v [B, S, H_kv, D], bfloat16; state [B, S, H, D], lse [B, H, S], float32;
/// all contiguous. Without a state, rows are final, in out; with one, they are folded into it.
/// Returns a cudaError_t.
EXPORTED int attend(void* q, void* k, void* v, void* out, void* state, float* lse, int batch,
                    int rows, int num_heads, int num_kv_heads, int head_dim, int diagonal,
                    int tile_rows, float scale, void* stream) {
  if (!holds(head_dim)) return cudaErrorInvalidValue;
  KeySegment segment;
  segment.k = contiguous(k, rows, num_kv_heads, head_dim);
  segment.v = contiguous(v, rows, num_kv_heads, head_dim);
  segment.num_keys = rows;
  segment.diagonal = std::clamp(diagonal, -rows, rows);

  BlockAttentionParams params;
  params.q = contiguous(q, rows, num_heads, head_dim);
  params.segments = &segment;
  params.num_segments = 1;
  static_cast<AttentionShape&>(params) =
      shape_of(batch, rows, num_heads, num_kv_heads, head_dim, scale);
  params.tile_rows = tile_rows;
  params.fold = state != nullptr;
  if (params.fold) {
    params.state = contiguous(state, rows, num_heads, head_dim);
  } else {
    params.out = contiguous(out, rows, num_heads, head_dim);
    params.final_end = rows;
  }
  params.lse = lse;
  params.lse_head_stride = rows;
  params.lse_batch_stride = int64_t{num_heads} * rows;
  return launch(params, stream);
}

/// grad_out [B, S, H, D], bfloat16; delta [B, H, S], float32; dq [B, S, H, D], dk, dv [B, S, H_kv,
/// D], float32, dq to be added to. With semaphores, 0, the call is deterministic. Otherwise as
/// above.
EXPORTED int attend_backward(void* q, void* k, void* v, void* grad_out, const float* lse,
                             const float* delta, void* dq, void* dk, void* dv, int32_t* semaphores,
                             int batch, int rows, int num_heads, int num_kv_heads, int head_dim,
                             int diagonal, float scale, void* stream) {
  if (!holds(head_dim)) return cudaErrorInvalidValue;
  BlockAttentionBackwardParams params;
  for (auto [to, data] :
       {std::pair{&params.q, q}, {&params.grad_out, grad_out}, {&params.dq, dq}}) {
    *to = contiguous(data, rows, num_heads, head_dim);
  }
  for (auto [to, data] :
       {std::pair{&params.k, k}, {&params.v, v}, {&params.dk, dk}, {&params.dv, dv}}) {
    *to = contiguous(data, rows, num_kv_heads, head_dim);
  }
  static_cast<AttentionShape&>(params) =
      shape_of(batch, rows, num_heads, num_kv_heads, head_dim, scale);
  params.num_keys = rows;
  params.diagonal = std::clamp(diagonal, -rows, rows);
  params.lse = lse;
  params.delta = delta;
  params.lse_head_stride = rows;
  params.lse_batch_stride = int64_t{num_heads} * rows;
  params.semaphores = semaphores;
  params.deterministic = semaphores != nullptr;
  return cuda::sm90::launch_block_attention_backward<__nv_bfloat16, VARIANT_HEAD_DIM>(
      params, static_cast<cudaStream_t>(stream));
}

namespace {

/// In device memory, initialised by prepare_signals.
struct RankSignals {
  uint32_t failed;  // not 0: ends all waits
  uint32_t calls;
  uint32_t staged[PeerSignals::kMaxPeers];
  uint32_t read[PeerSignals::kMaxPeers];
  uint32_t tags[PeerSignals::kMaxPeers];
  uint32_t blocks_done[cuda::kStageCounters];
  uint32_t scratch[LaunchScratch::kFirstArrival];
  uint32_t arrivals[4096];
};

/// In host memory that the device writes.
struct HostMirrors {
  uint32_t calls, phase, mismatch;
};

/// What one rank of a ring does. Blocks [H_kv, 2, B, S_r, D]: keys and values of a head next to
/// each other.
struct RankCall {
  void *q, *k, *v;   // its own, [B, S_r, H or H_kv, D], contiguous
  void* out;         // like q
  float* lse;        // [B, H, S_r]
  void* staged;      // its block, for others to read
  void* blocks[16];  // of the others, by rank
  void* fetched;     // memory for all of these; null: they are attended in place
  RankSignals* signals;
  HostMirrors* host;
  int64_t lengths[16];  // of the shards of an even or uneven zigzag
  int world_size, rank, batch, num_heads, num_kv_heads, head_dim, causal, tile_rows;
  float scale;
};

/// The rank's own pad stands for those of its peers: their signals matter only by their timing, and
/// all ranks are at the same point here.
cuda::StageParams staging(const RankCall& call, const Partition& partition) {
  const int64_t row_bytes = int64_t{call.head_dim} * kElementBytes;
  const auto source = [&](const void* data) {
    const int64_t row = call.num_kv_heads * row_bytes;
    return cuda::StageSource{data, partition.length(call.rank) * row, row, row_bytes};
  };
  cuda::StageParams params;
  params.k = source(call.k);
  params.v = source(call.v);
  params.staged = call.staged;
  params.batch = call.batch;
  params.staged_rows = static_cast<int>(partition.length(call.rank));
  params.num_kv_heads = call.num_kv_heads;
  params.row_bytes = row_bytes;
  params.kernel_fetches = true;
  const Mask mask = {call.causal != 0};
  params.rows = static_cast<int>(rows_sent(plan_hops(partition, call.rank, mask)).end);
  for (int64_t other = 0; other < call.world_size; ++other) {
    if (other == call.rank) continue;
    params.read_by_peer[params.num_peers] = &call.signals->read[other];
    params.staged_by_this_rank[params.num_peers++] = &call.signals->staged[other];
    params.tags.by_this_rank[params.num_awaited] = &call.signals->tags[other];
    params.tags.by_peer[params.num_awaited] = &call.signals->tags[other];
    params.staged_by_peer[params.num_awaited++] = &call.signals->staged[other];
  }
  params.tags.mismatch = &call.host->mismatch;
  params.failed = &call.signals->failed;
  params.blocks_done = call.signals->blocks_done;
  params.calls = &call.signals->calls;
  params.host_calls = &call.host->calls;
  params.host_phase = &call.host->phase;
  return params;
}

RemoteFetch remote_fetch(const RankCall& call) {
  RemoteFetch remote_fetch;
  remote_fetch.scratch = {call.signals->scratch,
                          static_cast<int32_t>(std::size(call.signals->arrivals))};
  if (call.fetched == nullptr) return remote_fetch;
  remote_fetch.failed = &call.signals->failed;
  PeerSignals& signals = remote_fetch.signals;
  for (int64_t other = 0; other < call.world_size; ++other) {
    if (other == call.rank) continue;
    signals.staged_by_peer[signals.num_peers] = &call.signals->staged[other];
    signals.read_by_peer[signals.num_peers] = &call.signals->read[other];
    signals.read_by_this_rank[signals.num_peers++] = &call.signals->read[other];
  }
  signals.phase = &call.host->phase;
  remote_fetch.follows_staging = true;
  return remote_fetch;
}

}  // namespace

/// Bytes of what is shared with Python.
EXPORTED int rank_call_bytes() { return sizeof(RankCall); }
EXPORTED int rank_signals_bytes() { return sizeof(RankSignals); }
EXPORTED int host_mirrors_bytes() { return sizeof(HostMirrors); }

/// Returns a cudaError_t.
EXPORTED int prepare_signals(RankSignals* signals) {
  const cudaError_t error = cudaMemset(signals, 0, sizeof(RankSignals));
  if (error != cudaSuccess) return error;
  const std::vector<uint32_t> read(PeerSignals::kMaxPeers, 1);  // nothing is staged yet
  return cudaMemcpy(signals->read, read.data(), sizeof(signals->read), cudaMemcpyHostToDevice);
}

/// Has the current device read memory of another one. Returns a cudaError_t.
EXPORTED int reach(int other) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(other, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return error;
  return cudaGetLastError() == error ? cudaSuccess : error;
}

/// One rank's call of a ring as the one-sided transport makes it, staging included where blocks are
/// fetched. Returns a cudaError_t.
EXPORTED int attend_as_rank(const RankCall* call, void* stream) {
  if (!holds(call->head_dim) || call->world_size < 2 || call->world_size > PeerSignals::kMaxPeers)
    return cudaErrorInvalidValue;
  const Partition partition(Layout::kZigzag, {call->lengths, call->lengths + call->world_size});
  const int rows = static_cast<int>(partition.length(call->rank));
  const int64_t head_dim = call->head_dim, batch = call->batch;

  std::vector<KeySegment> segments;
  auto* fetched = static_cast<char*>(call->fetched);
  for (const Visit& visit : schedule(partition, call->rank, {call->causal != 0})) {
    if (!visit.visible()) continue;
    KeySegment& segment = segments.emplace_back();
    segment.num_keys = static_cast<int>(visit.keys.size());
    segment.diagonal = visit.visibility == Visibility::kTriangle ? 0 : segment.num_keys;
    segment.first_query = static_cast<int>(visit.queries.begin);
    if (visit.source == call->rank) {
      segment.k = contiguous(call->k, rows, call->num_kv_heads, head_dim);
      segment.v = contiguous(call->v, rows, call->num_kv_heads, head_dim);
      continue;
    }
    const int64_t block_rows = partition.length(visit.source);
    const bool is_local = fetched == nullptr;
    const int64_t plane = (is_local ? block_rows : visit.keys.hull.end) * head_dim;
    char* const to = is_local ? static_cast<char*>(call->blocks[visit.source]) : fetched;
    segment.k = {to, plane, head_dim, 2 * batch * plane};
    segment.v = {to + batch * plane * kElementBytes, plane, head_dim, 2 * batch * plane};
    if (is_local) continue;
    segment.source = {call->blocks[visit.source], block_rows};
    fetched += 2 * batch * call->num_kv_heads * block_rows * head_dim * kElementBytes;
  }

  BlockAttentionParams params;
  params.q = contiguous(call->q, rows, call->num_heads, head_dim);
  params.out = contiguous(call->out, rows, call->num_heads, head_dim);
  params.lse = call->lse;
  params.lse_head_stride = rows;
  params.lse_batch_stride = int64_t{call->num_heads} * rows;
  params.segments = segments.data();
  params.num_segments = static_cast<int>(segments.size());
  params.scheduling = Scheduling::kDynamic;
  params.fetch = call->fetched != nullptr ? Fetch::kRemote : Fetch::kNone;
  params.remote_fetch = remote_fetch(*call);
  static_cast<AttentionShape&>(params) =
      shape_of(call->batch, rows, call->num_heads, call->num_kv_heads, call->head_dim, call->scale);
  params.final_end = rows;
  params.tile_rows = call->tile_rows;
  if (call->fetched != nullptr) {
    const cudaError_t error =
        cuda::stage(staging(*call, partition), static_cast<cudaStream_t>(stream));
    if (error != cudaSuccess) return error;
  }
  return launch(params, stream);
}
