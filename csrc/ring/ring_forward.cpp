// SPDX-License-Identifier: Apache-2.0
#include "ring/ring_forward.h"

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <vector>

#include "attention/block_attention.h"
#include "ring/timings.h"

namespace ringattn {
namespace {

// What I give at a step is what the rank that my block visits then will see of it.
std::vector<Hop> hops(const RingCall& call, const std::vector<Visit>& visits) {
  std::vector<Hop> hops;
  for (int64_t step = 1; step < call.partition.world_size(); ++step) {
    Hop hop;
    hop.source = visits[step].source;
    hop.rows_received = visits[step].key_end;
    hop.destination = call.partition.neighbour(call.rank, step);
    hop.rows_sent = schedule(call.partition, hop.destination, call.causal)[step].key_end;
    hops.push_back(hop);
  }
  return hops;
}

// Attends to one visiting block after the other, one call each, and keeps the state between them.
class StepExecutor {
 public:
  StepExecutor(const at::Tensor& q, const RingCall& call, const std::vector<Visit>& visits)
      : q_(q), call_(call) {
    const auto wide = q.options().dtype(state_dtype(q.scalar_type()));
    out_ = at::empty(q.sizes(), q.options());
    lse_ = at::empty({q.size(0), q.size(2), q.size(1)}, wide);
    // Where the first call completes every row, no state is ever written.
    if (visits[0].final_end - visits[0].final_begin < q.size(1))
      state_ = at::empty(q.sizes(), wide);
  }

  void attend(const Visit& visit, const at::Tensor& k, const at::Tensor& v) {
    const auto rows = [&](const at::Tensor& x, int64_t dim) {
      return x.defined() ? x.narrow(dim, visit.query_begin, visit.num_queries()) : x;
    };
    AttentionResult result;
    result.fold = !first_;
    result.lse = rows(lse_, 2);
    result.final_begin = visit.final_begin - visit.query_begin;
    result.final_end = visit.final_end - visit.query_begin;
    if (result.final_end > result.final_begin) result.out = rows(out_, 1);
    const bool all_final = result.final_end - result.final_begin == visit.num_queries();
    if (result.fold || !all_final) result.state = rows(state_, 1);

    const at::Tensor keys = k.narrow(1, 0, visit.key_end), values = v.narrow(1, 0, visit.key_end);
    repeat(rows(q_, 1), keys, values, visit.diagonal);
    block_attention(rows(q_, 1), keys, values, call_.scale, visit.diagonal, result);
    first_ = false;
  }

  const at::Tensor& out() const { return out_; }
  const at::Tensor& lse() const { return lse_; }

 private:
  // testing.slowdown: the same work again, as much of it as the factor asks for, into nothing. The
  // first rows stand for a share of the work: under a triangle that share grows with the square of
  // their number.
  void repeat(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
              std::optional<int64_t> diagonal) const {
    for (double extra = slowdown() - 1.0; extra > 0.0; extra -= 1.0) {
      const double share = std::min(extra, 1.0);
      const int64_t rows = std::lround((diagonal ? std::sqrt(share) : share) * q.size(1));
      if (rows > 0)
        block_attention(q.narrow(1, 0, rows), k, v, call_.scale, diagonal, q.scalar_type());
    }
  }

  const at::Tensor& q_;
  const RingCall& call_;
  at::Tensor out_;    // [B, S_r, H, D], q's dtype: completed rows
  at::Tensor state_;  // [B, S_r, H, D], state dtype: the others
  at::Tensor lse_;    // [B, H, S_r]
  bool first_ = true;
};

}  // namespace

std::pair<at::Tensor, at::Tensor> ring_forward(const at::Tensor& q, const at::Tensor& k,
                                               const at::Tensor& v, const RingCall& call,
                                               Transport* transport) {
  const std::vector<Visit> visits = schedule(call.partition, call.rank, call.causal);
  Recorder& recorder = Recorder::get();
  const bool timed = recorder.on();
  const int64_t recorded_call = timed ? recorder.begin_call() : 0;

  std::shared_ptr<BlockStream> stream;
  if (visits.size() > 1) {
    Exchange exchange;
    exchange.call = call.number;
    exchange.k = k;
    exchange.v = v;
    exchange.hops = hops(call, visits);
    exchange.depth = std::min<int64_t>(call.depth, exchange.hops.size());
    exchange.timed = timed;
    stream = transport->open(exchange);
  }

  StepExecutor executor(q, call, visits);
  for (int64_t step = 0; step < static_cast<int64_t>(visits.size()); ++step) {
    RECORD_USER_SCOPE("ringattn::ring_step");
    const Visit& visit = visits[step];
    std::optional<Stamp> before, ready, after;
    if (timed) before.emplace(q.device());
    const Block block = step == 0 ? Block{k, v} : stream->wait(step);
    if (timed) ready.emplace(q.device());
    if (visit.visible()) executor.attend(visit, block.k, block.v);
    if (timed) {
      after.emplace(q.device());
      // Two products of a multiplication and an addition for every pair.
      const double flops = 4.0 * static_cast<double>(q.size(0) * q.size(2) * q.size(3)) *
                           static_cast<double>(visit.num_pairs());
      recorder.add([=, source = visit.source, visible = visit.visible()] {
        StepTiming timing;
        timing.call = recorded_call;
        timing.source = source;
        timing.own = step == 0;
        timing.flops = flops;
        timing.wait_ms = step == 0 ? 0.0 : before->until(*ready);
        timing.attention_ms = visible ? ready->until(*after) : 0.0;
        timing.transfer_ms = step == 0 ? 0.0 : stream->transfer_ms(step);
        return timing;
      });
    }
    if (stream) stream->release(step);
  }
  if (stream) stream->finish({executor.out(), executor.lse()});
  return {executor.out(), executor.lse()};
}

}  // namespace ringattn
