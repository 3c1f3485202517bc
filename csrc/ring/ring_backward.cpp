// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_backward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros_like.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "attention/block_attention.h"
#include "ring/gradient_return.h"
#include "ring/step_recorder.h"
#include "testing/throttle.h"

namespace ringattn {
namespace {

KeyGradients rows_of(const KeyGradients& x, const RowRange& rows) {
  return {rows_of(x[0], 1, rows), rows_of(x[1], 1, rows)};
}

// The gradients of one rank's rows and of the blocks that visit it.
class Gradients {
 public:
  Gradients(const at::Tensor& q, const RowGradients& rows, const RingCall& call,
            Scheduling scheduling)
      : q_(q),
        rows_(rows),
        call_(call),
        scheduling_(scheduling),
        query_tables_(call.plan.key_tables->transposed_on(q.device())) {}

  /// Those of a block, of which `k` and `v` are the rows that are seen.
  ///   leaves_room  see block_attention_backward()
  void attend(int64_t step, const at::Tensor& k, const at::Tensor& v, const KeyGradients& gradients,
              bool leaves_room) const {
    const Visit& visit = call_.plan.visits[step];
    if (!visit.visible()) {
      for (const at::Tensor& x : gradients) x.zero_();
      return;
    }
    for (const VisitPart& part : visit.parts()) {
      KeyBlock block = {rows_of(k, 1, part.keys), rows_of(v, 1, part.keys)};
      if (visit.visibility == Visibility::kIntervals) block.query_ranges = query_tables_[step];
      if (part.diagonal) block.diagonal = *part.diagonal;
      const RowRange& queries = part.queries;
      const RowGradients rows = {rows_of(rows_.grad_out, 1, queries),
                                 rows_of(rows_.lse, 2, queries), rows_of(rows_.delta, 2, queries),
                                 rows_of(rows_.dq, 1, queries)};
      const at::Tensor q = rows_of(q_, 1, queries);
      repeat_for_slowdown(q, block, rows, leaves_room);
      const auto [dk, dv] = rows_of(gradients, part.keys);
      block_attention_backward(q, block, call_.scoring, rows, dk, dv, scheduling_, leaves_room);
    }
  }

  /// Operations of a step: for every pair, five products of D multiplications and additions.
  double flops(int64_t step) const {
    const auto pairs = static_cast<double>(call_.plan.visits[step].num_pairs);
    return 10.0 * static_cast<double>(q_.size(0) * q_.size(2) * q_.size(3)) * pairs;
  }

 private:
  // ringattn.testing.slowdown: repeats the whole block, and drops the results, as often as the
  // factor has room for. The rest is a share of the keys.
  void repeat_for_slowdown(const at::Tensor& q, const KeyBlock& block, const RowGradients& rows,
                           bool leaves_room) const {
    for (double extra = slowdown() - 1.0; extra > 0.0; extra -= 1.0) {
      const auto num_keys = static_cast<int64_t>(
          std::lround(std::min(extra, 1.0) * static_cast<double>(block.k.size(1))));
      if (num_keys == 0) continue;
      KeyBlock part = block;
      part.k = block.k.narrow(1, 0, num_keys);
      part.v = block.v.narrow(1, 0, num_keys);
      if (part.query_ranges.defined()) part.query_ranges = part.query_ranges.narrow(0, 0, num_keys);
      RowGradients dropped = rows;
      dropped.dq = at::zeros_like(rows.dq);
      const at::Tensor dk = at::empty(part.k.sizes(), rows.dq.options()), dv = at::empty_like(dk);
      block_attention_backward(q, part, call_.scoring, dropped, dk, dv, scheduling_, leaves_room);
    }
  }

  const at::Tensor& q_;
  const RowGradients& rows_;
  const RingCall& call_;
  const Scheduling scheduling_;
  const std::vector<at::Tensor> query_tables_;  // [W]
};

RingExchangePlan exchange_plan(const at::Tensor& k, const at::Tensor& v, const RingCall& call,
                               bool timed) {
  RingExchangePlan exchange;
  exchange.call = call.number;
  exchange.k = k;
  exchange.v = v;
  exchange.hops = call.plan.hops;
  exchange.max_rows = call.plan.max_rows;
  exchange.depth = static_cast<int64_t>(call.plan.hops.size());
  exchange.fetching = Fetching::kByStreamOnAllRanks;
  exchange.timed = timed;
  return exchange;
}

// The rows outside of `range` become 0.
void zero_outside(const KeyGradients& gradients, const RowRange& range) {
  for (const at::Tensor& x : gradients) {
    if (range.size() == x.size(1)) continue;
    x.narrow(1, 0, range.begin).zero_();
    x.narrow(1, range.end, x.size(1) - range.end).zero_();
  }
}

}  // namespace

RingGradients ring_backward(const at::Tensor& given_q, const at::Tensor& given_k,
                            const at::Tensor& given_v, c10::function_ref<RowGradients()> make_rows,
                            const RingCall& call, MessageTransport* transport) {
  const at::Tensor q = as_attention_input(given_q), k = as_attention_input(given_k),
                   v = as_attention_input(given_v);
  const auto num_steps = static_cast<int64_t>(call.plan.visits.size());
  CallTimer timer(q.device());
  KeyGradients own;  // of this rank's rows by its own queries
  std::optional<GradientReturn> returns;
  std::shared_ptr<BlockStream> stream;
  if (num_steps == 1) {
    own = {at::empty(k.sizes(), k.options()), at::empty(v.sizes(), v.options())};
  } else {
    auto sizes = k.sizes().vec();
    sizes.insert(sizes.begin(), 2);
    const at::Tensor sum = at::empty(sizes, k.options().dtype(state_dtype(k.scalar_type())));
    own = {sum.select(0, 0), sum.select(0, 1)};
    returns.emplace(transport, call, sum);
    stream = transport->open(exchange_plan(k, v, call, timer.by_block()));
  }
  // The first block travels meanwhile.
  const RowGradients rows = make_rows();
  // A library moves messages by kernels, which hold multiprocessors until the other rank has come.
  const bool by_library = transport != nullptr && transport->collectives() != nullptr;
  const Gradients gradients(q, rows, call, by_library ? Scheduling::kDynamic : Scheduling::kStatic);

  const RowRange& seen = call.plan.visits[0].keys.hull;
  std::vector<Block> blocks(num_steps);
  blocks[0] = {rows_of(k, 1, seen), rows_of(v, 1, seen)};
  RingGradients result;
  for (int64_t turn = 1; turn <= num_steps; ++turn) {
    RECORD_USER_SCOPE("ringattn::ring_backward_step");
    // The own block is the last: gradients of the visiting ones travel beside it.
    const int64_t step = turn % num_steps;
    timer.begin_launch();
    if (turn == 1 && step == 1) blocks[1] = stream->wait(1);
    // All blocks are there before the first gradient leaves: the signals of the call serve one
    // exchange at a time.
    if (turn == 2) {
      for (int64_t other = 2; other < num_steps; ++other) blocks[other] = stream->wait(other);
      for (int64_t any = 0; any < num_steps; ++any) stream->release(any);
      stream->finish({});
    }
    if (turn > 1) returns->send(turn - 1);
    if (step == 0) zero_outside(own, seen);
    const KeyGradients of_block = step == 0 ? rows_of(own, seen) : returns->visiting(step);
    timer.begin_attention();
    gradients.attend(step, blocks[step].k, blocks[step].v, of_block,
                     /*leaves_room=*/turn > 1 && transport->signals_by_kernel());
    timer.end_attention();
    if (turn == num_steps) {
      result.dq = rows.dq.to(q.scalar_type());  // while messages travel
      const auto [dk, dv] = returns ? returns->sum(q.scalar_type()) : own;
      result.dk = dk;
      result.dv = dv;
    }
    if (timer.on()) {
      StepTiming timing;
      timing.source = call.plan.visits[step].source;
      timing.own = step == 0;
      timing.backward = true;
      timing.flops = gradients.flops(step);
      std::function<double()> transfer_ms;
      if (timer.by_block() && step > 0) transfer_ms = [=] { return stream->transfer_ms(step); };
      timer.end_launch(timing, std::move(transfer_ms));
    }
  }
  if (transport != nullptr) transport->guard({result.dq, result.dk, result.dv});
  timer.finish();
  return result;
}

}  // namespace ringattn
