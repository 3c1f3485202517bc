// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_forward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "attention/params.h"
#include "core/environment.h"
#include "ring/launch_plan.h"
#include "ring/step_recorder.h"
#include "testing/throttle.h"

namespace ringattn {
namespace {

// Attends the steps of a schedule, one launch for some of them at a time, and keeps the state
// between launches.
class Executor {
 public:
  /// `per_block`: steps are attended one at a time, a part of a visit in each launch.
  Executor(const at::Tensor& q, const RingCall& call, bool per_block)
      : q_(q),
        call_(call),
        visits_(call.plan.visits),
        per_block_(per_block),
        key_tables_(call.plan.key_tables->on(q.device())) {
    const auto state_options = q.options().dtype(state_dtype(q.scalar_type()));
    out_ = at::empty(q.sizes(), q.options());
    lse_ = at::empty({q.size(0), q.size(2), q.size(1)}, state_options);
  }

  /// The steps [first, last) in one launch; blocks[i] is the block of step first + i. `remote`:
  /// with kSingle, the sources of the blocks; null otherwise.
  void attend(int64_t first, int64_t last, const std::vector<Block>& blocks,
              const ResidentBlocks* remote) {
    std::vector<SeenBlock> seen;
    RowRange final;
    for (int64_t step = first; step < last; ++step) {
      for (const VisitPart& part : visits_[step].parts()) {
        seen.push_back({step, part, blocks[step - first]});
      }
      final.include(visits_[step].final);
    }
    if (!per_block_) return launch(seen, final, remote);
    // Rows that a later part has are not complete before it.
    for (size_t i = 0; i < seen.size(); ++i) {
      const bool is_last = i + 1 == seen.size();
      const int64_t end = is_last ? final.end : seen[i + 1].part.queries.begin;
      launch({seen[i]}, {final.begin, std::min(final.end, end)}, nullptr);
      final.begin = std::max(final.begin, end);
    }
  }

  /// Operations of these steps: for every pair, two products of D multiplications and additions.
  double flops(int64_t first, int64_t last) const {
    double pairs = 0.0;
    for (int64_t step = first; step < last; ++step) {
      pairs += static_cast<double>(visits_[step].num_pairs);
    }
    return 4.0 * static_cast<double>(q_.size(0) * q_.size(2) * q_.size(3)) * pairs;
  }

  const at::Tensor& out() const { return out_; }
  const at::Tensor& lse() const { return lse_; }

 private:
  // A part of a visit, and the block of its step.
  struct SeenBlock {
    int64_t step = 0;
    VisitPart part;
    Block block;
  };

  void launch(const std::vector<SeenBlock>& seen, const RowRange& final,
              const ResidentBlocks* remote) {
    RowRange queries;
    for (const SeenBlock& one : seen) queries.include(one.part.queries);
    if (queries.empty()) return;
    std::vector<KeyBlock> visible;
    for (const SeenBlock& one : seen) {
      visible.push_back(key_block(one, queries));
      // A launch fetches what travels once, with the first of its parts.
      if (remote == nullptr || one.step == 0 || one.part.keys.begin > 0) continue;
      visible.back().source = remote->sources[one.step - 1];
      visible.back().keys_behind = visits_[one.step].keys.size() - one.part.keys.size();
    }
    const at::Tensor given = rows_of(q_, 1, queries);
    for (const KeyBlock& keys : visible) repeat_for_slowdown(given, keys);
    LaunchOptions options;
    RemoteFetch remote_fetch;
    if (remote != nullptr) {
      options.scheduling = Scheduling::kDynamic;
      options.fetch = Fetch::kRemote;
      remote_fetch = remote->remote_fetch;
    } else if (needs_dynamic_scheduling()) {
      options.scheduling = Scheduling::kDynamic;
      remote_fetch.scratch = scratch();
    }
    block_attention(given, visible, call_.scoring, result(queries, final), options, remote_fetch);
    first_ = false;
  }

  // Keys as the rows `queries` see them. What travels is what is seen; of the own block, whose rows
  // all are here, that is a part.
  KeyBlock key_block(const SeenBlock& seen, const RowRange& queries) const {
    const Visit& visit = visits_[seen.step];
    const int64_t first_row = seen.step == 0 ? visit.keys.hull.begin : 0;
    const RowRange rows = {first_row + seen.part.keys.begin, first_row + seen.part.keys.end};
    KeyBlock keys = {rows_of(seen.block.k, 1, rows), rows_of(seen.block.v, 1, rows)};
    if (visit.visibility == Visibility::kIntervals) {
      keys.key_ranges = key_tables_[seen.step];
      keys.host_table = call_.plan.key_tables->host_table(seen.step);
      return keys;
    }
    keys.first_query = seen.part.queries.begin - queries.begin;
    if (seen.part.diagonal) keys.diagonal = *seen.part.diagonal - keys.first_query;
    return keys;
  }

  AttentionResult result(const RowRange& queries, const RowRange& final) {
    AttentionResult result;
    result.fold = !first_;
    result.lse = rows_of(lse_, 2, queries);
    result.final_begin = final.empty() ? 0 : final.begin - queries.begin;
    result.final_end = final.empty() ? 0 : final.end - queries.begin;
    if (!final.empty()) result.out = rows_of(out_, 1, queries);
    if (result.fold || final.size() != queries.size()) {
      if (!state_.defined()) state_ = at::empty(q_.sizes(), lse_.options());
      result.state = rows_of(state_, 1, queries);
    }
    return result;
  }

  // Transfers may occupy some multiprocessors for a while, and rows of documents see unequal
  // numbers of keys. Those of a window alone see nearly as many each.
  bool needs_dynamic_scheduling() const {
    const bool may_be_uneven = visits_.size() > 1 || call_.plan.key_tables->has_documents();
    return may_be_uneven && q_.is_cuda() && supports_segment_lists(q_);
  }

  LaunchScratch scratch() {
    if (!scratch_.defined()) {
      scratch_ = at::zeros({LaunchScratch::kFirstArrival}, q_.options().dtype(at::kInt));
    }
    return {static_cast<uint32_t*>(scratch_.mutable_data_ptr())};
  }

  // ringattn.testing.slowdown: repeats the share of the work that the factor asks for and drops the
  // results. The share is taken as leading rows.
  void repeat_for_slowdown(const at::Tensor& queries, KeyBlock keys) const {
    const int64_t first = keys.first_query;
    const int64_t num_queries = queries.size(1) - first;
    const at::Tensor key_ranges = keys.key_ranges;
    if (keys.diagonal != KeyBlock::kNoMask) keys.diagonal += first;
    keys.first_query = 0;
    keys.source = {};
    for (double extra = slowdown() - 1.0; extra > 0.0; extra -= 1.0) {
      const int64_t repeated =
          std::lround(leading_rows(num_queries, keys.diagonal, std::min(extra, 1.0)));
      if (repeated == 0) continue;
      if (key_ranges.defined()) keys.key_ranges = key_ranges.narrow(0, first, repeated);
      block_attention(queries.narrow(1, first, repeated), keys, call_.scoring, q_.scalar_type());
    }
  }

  // So many of `rows` have this share of their work. Under a diagonal, n leading rows see
  // n * diagonal + n * n / 2 keys.
  static double leading_rows(int64_t rows, int64_t diagonal, double share) {
    const double n = static_cast<double>(rows);
    if (diagonal == KeyBlock::kNoMask) return share * n;
    const double before = static_cast<double>(diagonal);
    return std::sqrt(before * before + share * n * (2 * before + n)) - before;
  }

  const at::Tensor& q_;
  const RingCall& call_;
  const std::vector<Visit>& visits_;
  const bool per_block_;
  const std::vector<at::Tensor>& key_tables_;  // [W]
  at::Tensor out_;                             // [B, S_r, H, D], q's dtype: final rows
  at::Tensor state_;    // [B, S_r, H, D], state dtype: the other rows, if there are any
  at::Tensor lse_;      // [B, H, S_r]
  at::Tensor scratch_;  // int32, LaunchScratch of launches that fetch nothing
  bool first_ = true;
};

// Whether each block has a launch of its own: for timings by block, for repeated work, where not
// all blocks may be in flight at once, without kernels for lists of segments and for longer lists.
bool needs_launch_per_block(const at::Tensor& q, const RingCall& call, const CallTimer& timer) {
  const auto num_steps = static_cast<int64_t>(call.plan.visits.size());
  size_t num_segments = 0;
  for (const Visit& visit : call.plan.visits) num_segments += visit.parts().size();
  return timer.by_block() || slowdown() > 1.0 || call.depth < num_steps - 1 ||
         !supports_segment_lists(q) || num_segments > PeerSignals::kMaxPeers;
}

RingExchangePlan exchange_plan(const at::Tensor& k, const at::Tensor& v, const RingCall& call,
                               bool per_block, bool timed) {
  RingExchangePlan exchange;
  exchange.call = call.number;
  exchange.k = k;
  exchange.v = v;
  exchange.hops = call.plan.hops;
  exchange.max_rows = call.plan.max_rows;
  exchange.depth = std::min<int64_t>(call.depth, exchange.hops.size());
  if (!per_block && environment().kernels_may_wait) exchange.fetching = Fetching::kByKernel;
  exchange.parts = call.plan.key_tables->parts();
  exchange.timed = timed;
  return exchange;
}

}  // namespace

std::pair<at::Tensor, at::Tensor> ring_forward(const at::Tensor& given_q, const at::Tensor& given_k,
                                               const at::Tensor& given_v, const RingCall& call,
                                               Transport* transport) {
  // Inputs are copied and memory is allocated before open(), see BlockStream.
  const at::Tensor q = as_attention_input(given_q), k = as_attention_input(given_k),
                   v = as_attention_input(given_v);
  CallTimer timer(q.device());
  const bool per_block = needs_launch_per_block(q, call, timer);
  Executor executor(q, call, per_block);
  const int64_t num_steps = call.plan.visits.size();
  std::shared_ptr<BlockStream> stream;
  if (num_steps > 1) {
    stream = transport->open(exchange_plan(k, v, call, per_block, timer.by_block()));
  }
  const ResidentBlocks* resident = stream && !per_block ? stream->resident_blocks() : nullptr;
  const LaunchPlan plan = launch_plan(resident);
  const ResidentBlocks* remote = plan == LaunchPlan::kSingle ? resident : nullptr;

  for (int64_t first = 0, last; first < num_steps; first = last) {
    RECORD_USER_SCOPE("ringattn::ring_step");
    last = launch_end(plan, first, num_steps);
    timer.begin_launch();
    std::vector<Block> blocks;
    for (int64_t step = first; step < last; ++step) {
      blocks.push_back(step == 0           ? Block{k, v}
                       : remote != nullptr ? remote->blocks[step - 1]
                                           : stream->wait(step));
    }
    timer.begin_attention();
    executor.attend(first, last, blocks, remote);
    if (timer.on()) {
      StepTiming timing;
      timing.source = call.plan.visits[first].source;
      timing.own = first == 0;
      timing.flops = executor.flops(first, last);
      std::function<double()> transfer_ms;
      if (timer.by_block() && first > 0) transfer_ms = [=] { return stream->transfer_ms(first); };
      timer.end_launch(timing, std::move(transfer_ms));
    }
    for (int64_t step = first; stream && step < last; ++step) stream->release(step);
  }
  if (stream) stream->finish({executor.out(), executor.lse()});
  timer.finish();
  return {executor.out(), executor.lse()};
}

}  // namespace ringattn
