// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include <exception>
#include <memory>
#include <vector>

#include "testing/fault_injection.h"
#include "transport/symmetric/transport.h"

namespace ringattn {

using at::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;

// The blocks of a ring.
class SymmetricStream : public BlockStream {
 public:
  SymmetricStream(SymmetricTransport& transport, const RingExchangePlan& exchange)
      : transport_(transport),
        exchange_(exchange),
        stream_(getCurrentCUDAStream()),
        num_hops_(exchange.hops.size()) {
    exchange_.k = as_stage_input(exchange.k);
    exchange_.v = as_stage_input(exchange.v);
    const at::Tensor &k = exchange_.k, &v = exchange_.v;
    transport_.calls_.begin_on(stream_);
    const int64_t row_bytes = 2 * k.size(0) * k.size(2) * k.size(3) * k.element_size();
    transport_.reserve(transport_.staged_, exchange_.max_rows * row_bytes);
    plan_ = &transport_.plan(exchange);

    cuda::StageParams params;
    // Each row has its place in the staged block, whichever rows are staged.
    const RowRange rows = k.numel() > 0 ? rows_sent(exchange_.hops) : RowRange{};
    params.k = stage_source(k.narrow(1, rows.begin, rows.size()));
    params.v = stage_source(v.narrow(1, rows.begin, rows.size()));
    params.staged = static_cast<char*>(transport_.staged_by(transport_.rendezvous_.rank)) +
                    rows.begin * k.size(3) * k.element_size();
    params.batch = static_cast<int>(k.size(0));
    params.rows = static_cast<int>(rows.size());
    params.staged_rows = static_cast<int>(k.size(1));
    params.num_kv_heads = static_cast<int>(k.size(2));
    params.row_bytes = static_cast<int>(k.size(3) * k.element_size());
    if (transfer_delay_seed()) {
      constexpr int kNaN = 0xff;
      C10_CUDA_CHECK(cudaMemsetAsync(transport_.fetched_.mutable_data_ptr(), kNaN,
                                     transport_.fetched_.nbytes(), stream_));
    }
    params.kernel_fetches = params.follows_closely = exchange_.kernel_fetches();
    transport_.stage(params, exchange_.call, plan_->step_of_rank, stream_);
    if (exchange_.kernel_fetches()) {
      plan_->resident.remote_fetch.delay_seed = transport_.delays_.seed();
      for (int64_t i = 0; i < num_hops_; ++i) list_parts(i);
      return;
    }
    transport_.after(stream_);
    transport_.signal_pad_.enqueue_wait_and_clear_staged(transport_.rendezvous_.calls->call_tag(),
                                                         transport_.side_stream_);
    arrived_.resize(num_hops_);
    for (int64_t step = 1; step <= exchange_.depth; ++step) fetch(step);
  }

  // Enqueued work of a failed call runs all the same: the next call is ordered after it.
  ~SymmetricStream() override {
    if (finished_) return;
    try {
      transport_.calls_.end_on(stream_);
    } catch (const std::exception&) {
      return;  // the device is lost: nothing runs on it
    }
  }
  SymmetricStream(const SymmetricStream&) = delete;
  SymmetricStream& operator=(const SymmetricStream&) = delete;

  const ResidentBlocks* resident_blocks() const override {
    return exchange_.depth >= num_hops_ ? &plan_->resident : nullptr;
  }

  Block wait(int64_t step) override {
    if (arrived_[step - 1].end) arrived_[step - 1].end->block(getCurrentCUDAStream());
    return plan_->resident.blocks[step - 1];
  }

  void release(int64_t step) override {
    const int64_t next = step + exchange_.depth + 1;
    if (exchange_.kernel_fetches() || next > num_hops_) return;
    transport_.after(getCurrentCUDAStream());
    fetch(next);
  }

  void finish(const std::vector<at::Tensor>& results) override {
    if (!exchange_.kernel_fetches()) {
      transport_.signal_pad_.enqueue_wait_until_read(exchange_.fetching, transport_.side_stream_);
      transport_.join(stream_);
      transport_.guard(results);
    }
    transport_.calls_.end_on(stream_);
    // Aligned copies of k and v live until here: a kernel that runs beside the staging kernel must
    // not get memory from the allocator that the staging kernel still reads.
    exchange_.k.reset();
    exchange_.v.reset();
    finished_ = true;
  }

  double transfer_ms(int64_t step) override {
    const Arrived& arrived = arrived_[step - 1];
    return arrived.start && exchange_.timed ? arrived.start->elapsed_time(*arrived.end) : 0.0;
  }

 private:
  struct Arrived {
    std::unique_ptr<CUDAEvent> start, end;
  };

  // The lists belong to the call, the addresses in its plan to all calls of its kind.
  void list_parts(int64_t i) {
    const at::Tensor& parts = exchange_.parts[i];
    RemoteBlock& source = plan_->resident.sources[i];
    source.parts =
        parts.defined() ? static_cast<const RemotePart*>(parts.const_data_ptr()) : nullptr;
    source.num_parts = parts.defined() ? static_cast<int32_t>(parts.size(0)) : 0;
  }

  // Copies the block of one step, then signals to its owner that it has been read.
  void fetch(int64_t step) {
    Arrived& arrived = arrived_[step - 1];
    const unsigned flags = exchange_.timed ? cudaEventDefault : cudaEventDisableTiming;
    arrived.start = std::make_unique<CUDAEvent>(flags);
    arrived.end = std::make_unique<CUDAEvent>(flags);
    if (exchange_.timed) arrived.start->record(transport_.side_stream_);
    const int64_t source = exchange_.hops[step - 1].source;
    transport_.delays_.occupy_copy_engine(transport_.staged_by(source), transport_.staged_->bytes(),
                                          transport_.side_stream_);
    for (const CopyPlan& copy : plan_->copies[step - 1]) enqueue(copy);
    arrived.end->record(transport_.side_stream_);
    transport_.signal_pad_.enqueue_signal_read({source}, exchange_.fetching,
                                               transport_.side_stream_);
  }

  void enqueue(const CopyPlan& copy) {
    const CUDAStream stream = transport_.side_stream_;
    if (copy.planes * copy.plane_bytes == 0) return;
    const bool contiguous =
        copy.from_pitch == copy.plane_bytes && copy.to_pitch == copy.plane_bytes;
    if (contiguous || copy.planes == 1) {
      C10_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.planes * copy.plane_bytes,
                                     cudaMemcpyDefault, stream));
    } else {
      C10_CUDA_CHECK(cudaMemcpy2DAsync(copy.to, copy.to_pitch, copy.from, copy.from_pitch,
                                       copy.plane_bytes, copy.planes, cudaMemcpyDefault, stream));
    }
  }

  SymmetricTransport& transport_;
  RingExchangePlan exchange_;
  CUDAStream stream_;
  int64_t num_hops_;
  MemoryPlan* plan_ = nullptr;
  bool finished_ = false;
  std::vector<Arrived> arrived_;  // [W - 1], where copy engines fetch
};

std::unique_ptr<BlockStream> SymmetricTransport::open(const RingExchangePlan& exchange) {
  return std::make_unique<SymmetricStream>(*this, exchange);
}

}  // namespace ringattn
