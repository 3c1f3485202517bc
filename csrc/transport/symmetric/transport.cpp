// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/transport.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <exception>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "core/kernel_waits.h"
#include "testing/fault_injection.h"
#include "transport/group/ring_group.h"
#include "transport/runtime/cuda_event_transfer.h"
#include "transport/runtime/stream_pool.h"
#include "transport/symmetric/buffer_layout.h"
#include "transport/symmetric/capture_aware_order.h"
#include "transport/symmetric/kernels/fetch.h"
#include "transport/symmetric/kernels/stage.h"
#include "transport/symmetric/peer_device_memory.h"
#include "transport/symmetric/signal_pad.h"

namespace ringattn {
namespace {

using at::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;

// Of a single message, in bytes. By itself, a kernel is faster up to 16 MB (H200; 104 against 119
// us). But copy engines need no multiprocessors, of which what runs beside a message leaves few: so
// a kernel brings what one of them can.
constexpr int64_t kMostFetchedByKernel = int64_t{1} << 20;

class SymmetricTransport : public MessageTransport {
 public:
  SymmetricTransport(RingGroup& group, c10::Device device)
      : group_(group), device_(device), handshake_(group, device), lane_(take_lane(device)) {}

  ~SymmetricTransport() override { give_lane_back(lane_); }

  std::unique_ptr<BlockStream> open(const Exchange& exchange) override;
  std::unique_ptr<Transfer> start(const Message& message) override;

  bool needs_every_rank() const override { return true; }

  void guard(const std::vector<at::Tensor>& results) override {
    handshake_.poison_if_failed(results);
  }

  void synchronize() override {
    if (!calls_.any()) return;
    calls_.synchronize();
    CUDAEvent copied;
    copied.record(lane_);
    copied.synchronize();
    handshake_.notice();
  }

  bool idle() override {
    if (!calls_.any()) return true;
    if (!calls_.done()) return false;
    if (cudaStreamQuery(lane_) == cudaErrorNotReady) {
      cudaGetLastError();  // no error of anybody's
      return false;
    }
    return handshake_.all_read();
  }

 private:
  friend class SymmetricStream;

  char* staged_by(int64_t rank) const { return static_cast<char*>(staged_->of(rank)); }

  // What is copied from now on comes after what `stream` holds.
  void after(CUDAStream stream) {
    fork_.record(stream);
    fork_.block(lane_);
  }
  // And what `stream` does from now on after what has been copied. A capture, too, ends with every
  // stream that it has spread to back on the first.
  void join(CUDAStream stream) {
    join_.record(lane_);
    join_.block(stream);
  }

  // Collective: memory for staging blocks of `bytes`, on every rank.
  void reserve(size_t bytes) {
    if (staged_ && staged_->bytes() >= bytes) return;
    check_may_grow();
    forget_plans();
    if (staged_) {
      const auto captured = group_.exchange(calls_.captured() ? "captured" : "");
      if (std::any_of(captured.begin(), captured.end(), [](const auto& c) { return !c.empty(); })) {
        captured_staged_.push_back(std::move(staged_));  // what was captured anywhere reads it
      } else {
        staged_->close_others();
        group_.exchange("");  // nobody sees it any more
      }
    }
    staged_.reset();
    staged_ = std::make_unique<SharedMemory>(group_, device_, bytes, /*refusal=*/"");
  }

  void check_may_grow() const {
    TORCH_CHECK(!calls_.capturing(),
                "ringattn: a call must have been made once before one of its kind is captured in a "
                "CUDA graph, got one under capture that needs more memory");
  }

  // What has been captured goes on using the memory that it was captured with.
  void forget_plans() {
    synchronize();
    group_.throw_if_failed();  // others do not come to what follows
    if (calls_.captured()) {
      for (auto& [key, plan] : plans_) captured_plans_.push_back(std::move(plan));
    }
    plans_.clear();
  }

  // Some time of a copy engine.
  void delay(int64_t from) {
    constexpr int64_t kMostBytes = int64_t{32} << 20;
    if (!nowhere_.defined()) {
      nowhere_ = at::empty({kMostBytes}, at::TensorOptions(device_).dtype(at::kByte));
    }
    const int64_t most = std::min<int64_t>(kMostBytes, staged_->bytes());
    for (uint64_t times = next_delay() % 8; times > 0; --times) {
      C10_CUDA_CHECK(cudaMemcpyAsync(nowhere_.mutable_data_ptr(), staged_by(from),
                                     next_delay() % most, cudaMemcpyDefault, lane_));
    }
  }
  uint32_t next_delay() {
    if (!delays_) delays_.emplace(*hostile_transfers());
    return static_cast<uint32_t>((*delays_)());  // never 0
  }
  // Of a kernel; 0: none.
  uint32_t lateness() { return hostile_transfers() ? next_delay() : 0; }

  void fetch_by_kernel(const Message& message);
  void fetch_by_copy_engine(const Message& message);

  MemoryPlan& plan(const Exchange& exchange);
  void stage(cuda::StageParams params, int64_t call,
             std::shared_ptr<const std::vector<int64_t>> step_of_rank, cudaStream_t stream) {
    handshake_.describe(call, std::move(step_of_rank));
    handshake_.give_signals(params, group_.kind());
    params.lateness = lateness();
    C10_CUDA_CHECK(cuda::stage(params, stream));
  }

  RingGroup& group_;
  c10::Device device_;
  Handshake handshake_;
  std::unique_ptr<SharedMemory> staged_;  // what each rank gives
  at::Tensor gathered_;                   // what this rank gets, bytes
  std::map<std::vector<int64_t>, std::unique_ptr<MemoryPlan>> plans_;
  std::vector<std::unique_ptr<SharedMemory>> captured_staged_;
  std::vector<std::unique_ptr<MemoryPlan>> captured_plans_;
  // Where blocks are copied, and rotations are made. One stream: copies from other devices share
  // one engine, and streams that take turns on it cost more than they bring (H200: 0.27 against
  // 0.30 ms for a ring of 8192 tokens).
  CUDAStream lane_;
  CUDAEvent fork_, join_;
  CallOrder calls_;
  std::optional<std::minstd_rand> delays_;  // where transfers are hostile
  at::Tensor nowhere_;
};

// ---- rings --------------------------------------------------------------------------------------

class SymmetricStream : public BlockStream {
 public:
  SymmetricStream(SymmetricTransport& transport, const Exchange& exchange)
      : transport_(transport),
        exchange_(exchange),
        stream_(getCurrentCUDAStream()),
        num_hops_(exchange.hops.size()) {
    exchange_.k = stageable(exchange.k);
    exchange_.v = stageable(exchange.v);
    const at::Tensor &k = exchange_.k, &v = exchange_.v;
    transport_.calls_.begin_on(stream_);
    const size_t row_bytes = 2 * k.size(0) * k.size(2) * k.size(3) * k.element_size();
    transport_.reserve(exchange_.most_rows * row_bytes);
    plan_ = &transport_.plan(exchange);

    cuda::StageParams params;
    params.k = stage_source(k);
    params.v = stage_source(v);
    params.staged = transport_.staged_by(transport_.group_.rank());
    params.batch = static_cast<int>(k.size(0));
    for (const Hop& hop : exchange_.hops) {
      if (k.numel() > 0) params.rows = std::max(params.rows, static_cast<int>(hop.rows_sent));
    }
    params.staged_rows = static_cast<int>(k.size(1));
    params.num_kv_heads = static_cast<int>(k.size(2));
    params.row_bytes = static_cast<int>(k.size(3) * k.element_size());
    if (hostile_transfers()) {
      constexpr int kNaN = 0xff;
      C10_CUDA_CHECK(cudaMemsetAsync(transport_.gathered_.mutable_data_ptr(), kNaN,
                                     transport_.gathered_.nbytes(), stream_));
    }
    params.kernel_fetches = params.follows_closely = exchange_.by_kernel;
    transport_.stage(params, exchange_.call, plan_->step_of_rank, stream_);
    if (exchange_.by_kernel) {
      plan_->gathering.bringing.lateness = transport_.lateness();
      return;
    }
    transport_.after(stream_);
    transport_.handshake_.wait_until_staged(transport_.group_.kind(), transport_.lane_);
    arrived_.resize(num_hops_);
    for (int64_t step = 1; step <= exchange_.depth; ++step) fetch(step);
  }

  // What has been enqueued of a call that failed runs all the same: memory outlives it.
  ~SymmetricStream() override {
    if (finished_) return;
    try {
      transport_.calls_.end_on(stream_);
    } catch (const std::exception&) {
      return;  // the device is lost: nothing runs
    }
  }
  SymmetricStream(const SymmetricStream&) = delete;
  SymmetricStream& operator=(const SymmetricStream&) = delete;

  const Gathering* gathering() const override {
    return exchange_.depth >= num_hops_ ? &plan_->gathering : nullptr;
  }

  Block wait(int64_t step) override {
    if (arrived_[step - 1].end) arrived_[step - 1].end->block(getCurrentCUDAStream());
    return plan_->gathering.blocks[step - 1];
  }

  void release(int64_t step) override {
    const int64_t next = step + exchange_.depth + 1;
    if (exchange_.by_kernel || next > num_hops_) return;
    transport_.after(getCurrentCUDAStream());
    fetch(next);
  }

  void finish(const std::vector<at::Tensor>& results) override {
    if (!exchange_.by_kernel) {
      transport_.handshake_.wait_until_read(transport_.lane_);
      transport_.join(stream_);
      transport_.guard(results);
    }
    transport_.calls_.end_on(stream_);
    // Kept until here, lest what is launched beside the staging kernel gets the memory of a copy.
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

  // The block of one step, and word to its owner that it has been read.
  void fetch(int64_t step) {
    Arrived& arrived = arrived_[step - 1];
    const unsigned flags = exchange_.timed ? cudaEventDefault : cudaEventDisableTiming;
    arrived.start = std::make_unique<CUDAEvent>(flags);
    arrived.end = std::make_unique<CUDAEvent>(flags);
    if (exchange_.timed) arrived.start->record(transport_.lane_);
    if (hostile_transfers()) transport_.delay(exchange_.hops[step - 1].source);
    enqueue(plan_->copies[step - 1]);
    arrived.end->record(transport_.lane_);
    transport_.handshake_.tell_read(exchange_.hops[step - 1].source, transport_.lane_);
  }

  void enqueue(const Copy& copy) {
    const CUDAStream lane = transport_.lane_;
    if (copy.planes * copy.plane_bytes == 0) return;
    if (copy.pitch == copy.plane_bytes || copy.planes == 1) {
      C10_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.planes * copy.plane_bytes,
                                     cudaMemcpyDefault, lane));
    } else {
      C10_CUDA_CHECK(cudaMemcpy2DAsync(copy.to, copy.plane_bytes, copy.from, copy.pitch,
                                       copy.plane_bytes, copy.planes, cudaMemcpyDefault, lane));
    }
  }

  SymmetricTransport& transport_;
  Exchange exchange_;
  CUDAStream stream_;
  int64_t num_hops_;
  MemoryPlan* plan_ = nullptr;
  bool finished_ = false;
  std::vector<Arrived> arrived_;  // [W - 1], where the host orders streams after arrivals
};

std::unique_ptr<BlockStream> SymmetricTransport::open(const Exchange& exchange) {
  return std::make_unique<SymmetricStream>(*this, exchange);
}

MemoryPlan& SymmetricTransport::plan(const Exchange& exchange) {
  const auto key = plan_key(exchange);
  const auto known = plans_.find(key);
  if (known != plans_.end()) return *known->second;
  const int64_t bytes = gathered_bytes(exchange);
  if (!gathered_.defined() || gathered_.nbytes() < static_cast<size_t>(bytes)) {
    check_may_grow();
    forget_plans();
    gathered_.reset();  // the old before the new: both may not fit
    gathered_ = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
  }
  constexpr size_t kMostPlans = 64;
  if (plans_.size() >= kMostPlans && !calls_.capturing()) forget_plans();
  auto made = plan_memory(exchange, *staged_, gathered_, handshake_);
  return *plans_.emplace(key, std::move(made)).first->second;
}

// ---- single messages ----------------------------------------------------------------------------

std::unique_ptr<Transfer> SymmetricTransport::start(const Message& message) {
  after(getCurrentCUDAStream());
  calls_.begin_on(lane_);
  reserve(message.largest);

  const auto started = new_event(message.timed), done = new_event(message.timed);
  started->record(lane_);
  cuda::StageParams params;
  params.staged = staged_by(group_.rank());
  if (message.send.defined()) {
    // One row of bytes. Note: its last piece may reach past its end, not past its allocation.
    params.k.data = message.send.const_data_ptr();
    params.keys_only = true;
    params.rows = params.staged_rows = 1;
    params.row_bytes = static_cast<int64_t>(message.send.nbytes());
    message.send.record_stream(lane_);
  }
  if (message.receive.defined()) message.receive.record_stream(lane_);
  params.kernel_fetches = kernels_may_wait() && message.largest <= kMostFetchedByKernel;
  if (params.kernel_fetches) cuda::load_fetch();
  stage(params, message.call, std::make_shared<std::vector<int64_t>>(group_.size(), message.step),
        lane_);
  if (params.kernel_fetches) {
    fetch_by_kernel(message);
  } else {
    fetch_by_copy_engine(message);
  }
  done->record(lane_);
  calls_.end_on(lane_);
  return std::make_unique<CudaTransfer>(started, done, message.timed);
}

void SymmetricTransport::fetch_by_kernel(const Message& message) {
  cuda::FetchParams params;
  if (message.receive.defined()) {
    params.from = staged_by(message.source);
    params.to = message.receive.mutable_data_ptr();
    params.bytes = static_cast<int64_t>(message.receive.nbytes());
  }
  params.bringing = handshake_.bringing(/*num_kv_heads=*/1);
  params.bringing.lateness = lateness();
  C10_CUDA_CHECK(cuda::fetch(params, lane_));
}

void SymmetricTransport::fetch_by_copy_engine(const Message& message) {
  handshake_.wait_until_staged(group_.kind(), lane_);
  if (message.receive.defined()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(message.receive.mutable_data_ptr(), staged_by(message.source),
                                   message.receive.nbytes(), cudaMemcpyDefault, lane_));
  }
  for (const int64_t rank : group_.others()) handshake_.tell_read(rank, lane_);
  handshake_.wait_until_read(lane_);
}

}  // namespace

std::unique_ptr<MessageTransport> make_symmetric_transport(RingGroup& group, c10::Device device) {
  return std::make_unique<SymmetricTransport>(group, device);
}

}  // namespace ringattn
