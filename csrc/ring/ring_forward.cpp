// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_forward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "attention/params.h"
#include "core/kernel_waits.h"
#include "ring/step_recorder.h"
#include "testing/throttle.h"

namespace ringattn {
namespace {

// What I give at a step is what the rank that my block visits then will see of it.
std::vector<Hop> hops(const RingCall& call, const std::vector<Visit>& visits) {
  std::vector<Hop> hops;
  for (int64_t step = 1; step < call.partition.world_size(); ++step) {
    Hop hop;
    hop.source = visits[step].source;
    hop.rows_received = visits[step].key_end;
    hop.destination = call.partition.visited(call.rank, step);
    hop.rows_sent = rows_seen(call.partition, hop.destination, call.rank, call.causal);
    hop.source_rows = call.partition.length(hop.source);
    hops.push_back(hop);
  }
  return hops;
}

// Attends to visiting blocks, one launch for some of them at a time, and keeps the state between
// launches.
class Executor {
 public:
  Executor(const at::Tensor& q, const RingCall& call, const std::vector<Visit>& visits)
      : q_(q), call_(call), visits_(visits) {
    const auto wide = q.options().dtype(state_dtype(q.scalar_type()));
    out_ = at::empty(q.sizes(), q.options());
    lse_ = at::empty({q.size(0), q.size(2), q.size(1)}, wide);
  }

  /// The visits [first, last) in one launch; blocks[i] is that of visit first + i.
  void attend(int64_t first, int64_t last, const std::vector<Block>& blocks,
              const Gathering* gathering) {
    Range range;
    for (int64_t step = first; step < last; ++step) range.add(visits_[step]);
    if (range.num_visible == 0 && !by_kernel(gathering)) return;

    std::vector<KeyBlock> seen;
    for (int64_t step = first; step < last; ++step) {
      const Visit& visit = visits_[step];
      if (!visit.visible()) continue;
      const Block& block = blocks[step - first];
      KeyBlock keys;
      keys.k = leading(block.k, visit.key_end);
      keys.v = leading(block.v, visit.key_end);
      keys.diagonal = visit.diagonal;
      keys.first_query = visit.query_begin - range.query_begin;
      if (by_kernel(gathering) && step > 0) keys.source = gathering->sources[step - 1];
      repeat(visit.query_begin, keys);
      seen.push_back(std::move(keys));
    }
    block_attention(rows(q_, 1, range.query_begin), seen, call_.scale, result(range),
                    bringing(gathering));
    first_ = false;
  }

  const at::Tensor& out() const { return out_; }
  const at::Tensor& lse() const { return lse_; }

 private:
  // What several visits come to.
  struct Range {
    int64_t query_begin = 0, query_end = 0;
    int64_t final_begin = 0, final_end = 0;
    int64_t num_visible = 0;

    void add(const Visit& visit) {
      if (!visit.visible()) return;
      const bool is_first = num_visible++ == 0;
      query_begin = is_first ? visit.query_begin : std::min(query_begin, visit.query_begin);
      query_end = visit.query_end;
      if (visit.final_begin == visit.final_end) return;
      final_begin = final_end == 0 ? visit.final_begin : std::min(final_begin, visit.final_begin);
      final_end = std::max(final_end, visit.final_end);
    }
  };

  static bool by_kernel(const Gathering* gathering) {
    return gathering != nullptr && !gathering->sources.empty();
  }

  static at::Tensor leading(const at::Tensor& x, int64_t rows) {
    return rows == x.size(1) ? x : x.narrow(1, 0, rows);
  }

  static at::Tensor rows(const at::Tensor& x, int64_t dim, int64_t begin) {
    return begin == 0 ? x : x.narrow(dim, begin, x.size(dim) - begin);
  }

  AttentionResult result(const Range& range) {
    AttentionResult result;
    result.fold = !first_;
    result.lse = rows(lse_, 2, range.query_begin);
    result.final_begin = range.final_begin - range.query_begin;
    result.final_end = range.final_end - range.query_begin;
    if (result.final_end > result.final_begin) result.out = rows(out_, 1, range.query_begin);
    const bool all_final =
        result.final_end - result.final_begin == range.query_end - range.query_begin;
    if (result.fold || !all_final) {
      if (!state_.defined()) state_ = at::empty(q_.sizes(), lse_.options());
      result.state = rows(state_, 1, range.query_begin);
    }
    return result;
  }

  Bringing bringing(const Gathering* gathering) {
    if (by_kernel(gathering)) return gathering->bringing;
    Bringing none;
    // Transfers may hold some multiprocessors for a while: tiles go to whoever is free.
    if (visits_.size() > 1 && attends_lists(q_, 1)) {
      if (!words_.defined()) {
        words_ = at::zeros({LaunchWords::kFirstArrival}, q_.options().dtype(at::kInt));
      }
      none.words.data = static_cast<uint32_t*>(words_.mutable_data_ptr());
    }
    return none;
  }

  // testing.slowdown: the same work again, as much of it as the factor asks for, into nothing. The
  // first rows stand for a share of the work: under a triangle that share grows with the square of
  // their number.
  void repeat(int64_t query_begin, const KeyBlock& keys) const {
    const auto num_queries = static_cast<double>(q_.size(1) - query_begin);
    for (double extra = slowdown() - 1.0; extra > 0.0; extra -= 1.0) {
      const double share = std::min(extra, 1.0);
      const int64_t repeated =
          std::lround((keys.diagonal ? std::sqrt(share) : share) * num_queries);
      if (repeated > 0) {
        block_attention(q_.narrow(1, query_begin, repeated), keys.k, keys.v, call_.scale,
                        keys.diagonal, q_.scalar_type());
      }
    }
  }

  const at::Tensor& q_;
  const RingCall& call_;
  const std::vector<Visit>& visits_;
  at::Tensor out_;    // [B, S_r, H, D], q's dtype: completed rows
  at::Tensor state_;  // [B, S_r, H, D], state dtype: the others, where a launch leaves some
  at::Tensor lse_;    // [B, H, S_r]
  at::Tensor words_;  // int32, 0: counters of the kernel's, where it brings nothing
  bool first_ = true;
};

}  // namespace

std::pair<at::Tensor, at::Tensor> ring_forward(const at::Tensor& given_q, const at::Tensor& given_k,
                                               const at::Tensor& given_v, const RingCall& call,
                                               Transport* transport) {
  // Between staging and the launch that begins beside it nothing may run: copies come first, and
  // memory, which some have filled.
  const at::Tensor q = attendable(given_q), k = attendable(given_k), v = attendable(given_v);
  const std::vector<Visit> visits = schedule(call.partition, call.rank, call.causal);
  Recorder& recorder = Recorder::get();
  const bool timed = recorder.on();
  const int64_t recorded_call = timed ? recorder.begin_call() : 0;

  // One launch for the whole ring, or for all that visits, takes kernels for lists of blocks. Work
  // that is repeated goes block by block, and what is to be timed so.
  const int64_t num_visits = visits.size();
  const bool by_block = (timed && recorder.by_block()) || slowdown() > 1.0 ||
                        call.depth < num_visits - 1 || !attends_lists(q, num_visits);

  Executor executor(q, call, visits);
  std::shared_ptr<BlockStream> stream;
  if (num_visits > 1) {
    Exchange exchange;
    exchange.call = call.number;
    exchange.k = k;
    exchange.v = v;
    exchange.hops = hops(call, visits);
    exchange.most_rows =
        *std::max_element(call.partition.lengths().begin(), call.partition.lengths().end());
    exchange.depth = std::min<int64_t>(call.depth, exchange.hops.size());
    exchange.by_kernel = !by_block && kernels_may_wait();
    exchange.timed = timed && by_block;
    stream = transport->open(exchange);
  }
  const Gathering* gathering = stream && !by_block ? stream->gathering() : nullptr;
  const bool by_kernel = gathering != nullptr && !gathering->sources.empty();

  std::vector<std::function<StepTiming()>> steps;  // not of a call that fails: they hold its stream
  for (int64_t first = 0, last; first < num_visits; first = last) {
    RECORD_USER_SCOPE("ringattn::ring_step");
    last = by_kernel || (gathering != nullptr && first > 0) ? num_visits : first + 1;
    std::optional<Stamp> before, ready, after;
    if (timed) before.emplace(q.device());
    std::vector<Block> blocks;
    for (int64_t step = first; step < last; ++step) {
      blocks.push_back(step == 0 ? Block{k, v}
                                 : (by_kernel ? gathering->blocks[step - 1] : stream->wait(step)));
    }
    if (timed) ready.emplace(q.device());
    executor.attend(first, last, blocks, gathering);
    if (timed) {
      after.emplace(q.device());
      // Two products of a multiplication and an addition for every pair.
      const double pair_flops = 4.0 * static_cast<double>(q.size(0) * q.size(2) * q.size(3));
      double flops = 0.0;
      for (int64_t step = first; step < last; ++step) {
        flops += pair_flops * static_cast<double>(visits[step].num_pairs());
      }
      steps.push_back([=, step = first, source = visits[first].source] {
        StepTiming timing;
        timing.call = recorded_call;
        timing.source = source;
        timing.own = step == 0;
        timing.flops = flops;
        timing.wait_ms = step == 0 ? 0.0 : before->until(*ready);
        timing.attention_ms = flops > 0.0 ? ready->until(*after) : 0.0;
        timing.transfer_ms = step == 0 || !by_block ? 0.0 : stream->transfer_ms(step);
        return timing;
      });
    }
    for (int64_t step = first; stream && step < last; ++step) stream->release(step);
  }
  if (stream) stream->finish({executor.out(), executor.lse()});
  if (timed) recorder.add(std::move(steps));
  return {executor.out(), executor.lse()};
}

}  // namespace ringattn
