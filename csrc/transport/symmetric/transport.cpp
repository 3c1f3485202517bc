// SPDX-License-Identifier: Apache-2.0
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <exception>
#include <map>
#include <utility>

#include "core/environment.h"
#include "testing/fault_injection.h"
#include "transport/group/rendezvous.h"
#include "transport/p2p_transport.h"
#include "transport/registry.h"
#include "transport/runtime/cuda_event_transfer.h"
#include "transport/runtime/stream_pool.h"
#include "transport/symmetric/buffer_layout.h"
#include "transport/symmetric/capture_aware_order.h"
#include "transport/symmetric/kernels/fetch.h"
#include "transport/symmetric/kernels/stage.h"
#include "transport/symmetric/peer_device_memory.h"
#include "transport/symmetric/signal_pad.h"
#include "transport/symmetric/transfer_delays.h"

namespace ringattn {
namespace {

using at::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;
using Steps = std::shared_ptr<const std::vector<int64_t>>;

// Bytes of a message. Alone, a kernel is faster than copy engines up to 16 MB (H200; 104 against
// 119 us). But copy engines need no multiprocessors, and another kernel that runs beside the
// message may leave one of them to it: a kernel fetches what one alone can in little time.
constexpr int64_t kMaxFetchedByKernel = int64_t{1} << 20;

// What has been received is there before peers have read what was sent. The tensors of a message
// are held until the stream that it began on waits for its end. Otherwise their allocator is told
// that the side stream uses them, and then keeps their memory until the device is done.
class SymmetricTransfer : public CudaTransfer {
 public:
  SymmetricTransfer(const Message& message, std::shared_ptr<CUDAEvent> started,
                    std::shared_ptr<CUDAEvent> received, std::shared_ptr<CUDAEvent> done,
                    CUDAStream side_stream)
      : CudaTransfer(std::move(started), std::move(received), message.timed),
        held_{message.send, message.receive},
        done_(std::move(done)),
        stream_(getCurrentCUDAStream()),
        side_stream_(side_stream) {}

  ~SymmetricTransfer() override {
    for (const at::Tensor& x : held_) {
      if (x.defined()) x.record_stream(side_stream_);
    }
  }
  SymmetricTransfer(const SymmetricTransfer&) = delete;
  SymmetricTransfer& operator=(const SymmetricTransfer&) = delete;

  void wait_received() override { CudaTransfer::wait(); }
  void wait() override {
    const CUDAStream stream = getCurrentCUDAStream();
    done_->block(stream);
    if (stream == stream_) held_ = {};
  }

 private:
  std::array<at::Tensor, 2> held_;
  std::shared_ptr<CUDAEvent> done_;
  CUDAStream stream_, side_stream_;
};

// One-sided, between devices of one host: every rank stages its block in memory that all ranks can
// read. The attention kernel of a reader, or its copy engines, copy it to local memory. Making one
// is collective; it throws on all ranks where they do not share memory.
class SymmetricTransport : public MessageTransport {
 public:
  SymmetricTransport(const Rendezvous& rendezvous, c10::Device device)
      : rendezvous_(rendezvous),
        device_(device),
        signal_pad_(rendezvous, device),
        side_stream_(take_stream(device)),
        delays_(device) {}

  ~SymmetricTransport() override { return_stream(side_stream_); }

  std::unique_ptr<BlockStream> open(const RingExchangePlan& exchange) override;
  std::unique_ptr<Transfer> start(const Message& message) override;

  bool needs_every_rank() const override { return true; }
  // More memory is a collective exchange that comes before.
  bool compares_tags(int64_t bytes) const override {
    return staged_ && staged_->bytes() >= static_cast<size_t>(bytes);
  }

  bool exchanges_partials(int64_t bytes) const override {
    return bytes <= kMaxPartialBytes && signal_pad_.kernels_may_wait();
  }
  void exchange_partials(int64_t call,
                         c10::function_ref<void(const PartialExchange&)> launch) override;
  void begin_replay() override { calls_.begin_on(getCurrentCUDAStream()); }
  void end_replay() override { calls_.end_on(getCurrentCUDAStream()); }

  void guard(const std::vector<at::Tensor>& results) override {
    signal_pad_.poison_if_failed(results);
  }

  void synchronize() override {
    if (!calls_.any()) return;
    calls_.synchronize();
    CUDAEvent copied;
    copied.record(side_stream_);
    copied.synchronize();
    signal_pad_.check_mismatch();
  }

  bool idle() override {
    if (!calls_.any()) return true;
    if (!calls_.done()) return false;
    if (cudaStreamQuery(side_stream_) == cudaErrorNotReady) {
      cudaGetLastError();  // not an error
      return false;
    }
    return signal_pad_.all_read();
  }

 private:
  friend class SymmetricStream;

  char* staged_by(int64_t rank) const { return static_cast<char*>(staged_->of(rank)); }

  // Later work of the side stream waits for the present work of `stream`.
  void after(CUDAStream stream) {
    fork_.record(stream);
    fork_.block(side_stream_);
  }
  // Later work of `stream` waits for the present work of the side stream. A capture, too, must end
  // with all streams that it has spread to joined to the first.
  void join(CUDAStream stream) {
    join_.record(side_stream_);
    join_.block(stream);
  }

  // Collective: every rank has memory for staging blocks of `bytes`.
  void reserve(size_t bytes) {
    if (staged_ && staged_->bytes() >= bytes) return;
    check_may_grow();
    forget_plans();
    if (staged_) {
      const auto captured = rendezvous_.exchange(calls_.captured() ? "captured" : "");
      if (std::any_of(captured.begin(), captured.end(), [](const auto& c) { return !c.empty(); })) {
        captured_staged_.push_back(std::move(staged_));  // a captured call of any rank reads it
      } else {
        staged_->close_peers();
        rendezvous_.exchange("");  // all ranks have unmapped it
      }
    }
    staged_.reset();
    staged_ = std::make_unique<PeerDeviceMemory>(rendezvous_, device_, bytes, /*refusal=*/"");
  }

  void check_may_grow() const {
    TORCH_CHECK(!calls_.capturing(),
                "ringattn: a call must have been made once before one of its kind is captured in a "
                "CUDA graph, got one under capture that needs more memory");
  }

  // Captured calls go on using the memory that they were captured with.
  void forget_plans() {
    synchronize();
    rendezvous_.calls->throw_if_failed();  // peers may not take part in what follows
    if (calls_.captured()) {
      for (auto& [key, plan] : plans_) captured_plans_.push_back(std::move(plan));
    }
    plans_.clear();
  }

  void fetch_by_kernel(const Message& message);
  void fetch_by_copy_engine(const Message& message, CUDAEvent& received);
  MemoryPlan& plan(const RingExchangePlan& exchange);
  void stage(cuda::StageParams params, int64_t call, Steps step_of_rank, cudaStream_t stream) {
    signal_pad_.describe(call, std::move(step_of_rank), calls_.capturing());
    signal_pad_.add_signals(params, rendezvous_.calls->call_tag());
    params.delay_seed = delays_.seed();
    C10_CUDA_CHECK(cuda::stage(params, stream));
  }

  const Rendezvous rendezvous_;
  c10::Device device_;
  SignalPad signal_pad_;
  std::unique_ptr<PeerDeviceMemory> staged_;  // the block of each rank
  at::Tensor fetched_;                        // blocks that this rank fetches, bytes
  std::map<std::vector<int64_t>, std::unique_ptr<MemoryPlan>> plans_;
  std::vector<std::unique_ptr<PeerDeviceMemory>> captured_staged_;
  std::vector<std::unique_ptr<MemoryPlan>> captured_plans_;
  // For copies of blocks, and for rotations. One stream: copies from other devices share one
  // engine, and alternating streams cost more than they gain (H200: 0.27 against 0.30 ms for a ring
  // of 8192 tokens).
  CUDAStream side_stream_;
  CUDAEvent fork_, join_;
  CallOrder calls_;
  TransferDelays delays_;
};

// ---- rings --------------------------------------------------------------------------------------

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
    const size_t row_bytes = 2 * k.size(0) * k.size(2) * k.size(3) * k.element_size();
    transport_.reserve(exchange_.max_rows * row_bytes);
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
    params.kernel_fetches = params.follows_closely = exchange_.kernel_fetches;
    transport_.stage(params, exchange_.call, plan_->step_of_rank, stream_);
    if (exchange_.kernel_fetches) {
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
    if (exchange_.kernel_fetches || next > num_hops_) return;
    transport_.after(getCurrentCUDAStream());
    fetch(next);
  }

  void finish(const std::vector<at::Tensor>& results) override {
    if (!exchange_.kernel_fetches) {
      transport_.signal_pad_.enqueue_wait_until_read(fetching(), transport_.side_stream_);
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

  Fetching fetching() const {
    return exchange_.no_kernel_fetches ? Fetching::kByStreams : Fetching::kByAnyMeans;
  }

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
    transport_.signal_pad_.enqueue_signal_read({source}, fetching(), transport_.side_stream_);
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

MemoryPlan& SymmetricTransport::plan(const RingExchangePlan& exchange) {
  const auto key = plan_key(exchange);
  const auto known = plans_.find(key);
  if (known != plans_.end()) return *known->second;
  const int64_t bytes = fetched_bytes(exchange);
  if (!fetched_.defined() || fetched_.nbytes() < static_cast<size_t>(bytes)) {
    check_may_grow();
    forget_plans();
    fetched_.reset();  // freed first: both may not fit
    fetched_ = at::empty({bytes}, at::TensorOptions(device_).dtype(at::kByte));
  }
  constexpr size_t kMaxPlans = 64;
  if (plans_.size() >= kMaxPlans && !calls_.capturing()) forget_plans();
  auto made = plan_memory(exchange, *staged_, fetched_, signal_pad_);
  return *plans_.emplace(key, std::move(made)).first->second;
}

// ---- single messages ----------------------------------------------------------------------------

std::unique_ptr<Transfer> SymmetricTransport::start(const Message& message) {
  const CUDAStream stream = getCurrentCUDAStream();
  const bool kernel_fetches =
      environment().kernels_may_wait && message.largest <= kMaxFetchedByKernel;
  // A kernel that waits for peers is beside the work of the current stream. One that stages alone
  // comes before that: its thread blocks would find no place beside those of a long kernel.
  if (kernel_fetches) after(stream);
  const CUDAStream staging = kernel_fetches ? side_stream_ : stream;
  calls_.begin_on(staging);
  reserve(message.largest);

  const auto started = new_event(message.timed), received = new_event(message.timed),
             done = new_event(/*timed=*/false);
  if (message.timed) started->record(staging);
  cuda::StageParams params;
  params.staged = staged_by(rendezvous_.rank);
  if (message.send.defined()) {
    // One row of bytes. Its last vector may reach past its end: allocations are of 512 bytes.
    params.k.data = message.send.const_data_ptr();
    params.keys_only = true;
    params.rows = params.staged_rows = 1;
    params.row_bytes = static_cast<int64_t>(message.send.nbytes());
  }
  params.kernel_fetches = kernel_fetches;
  if (kernel_fetches) cuda::load_fetch();
  stage(params, message.call,
        std::make_shared<std::vector<int64_t>>(rendezvous_.size, message.step), staging);
  if (kernel_fetches) {
    fetch_by_kernel(message);
    received->record(side_stream_);
  } else {
    after(stream);
    fetch_by_copy_engine(message, *received);
  }
  done->record(side_stream_);
  calls_.end_on(side_stream_);
  return std::make_unique<SymmetricTransfer>(message, started, received, done, side_stream_);
}

void SymmetricTransport::fetch_by_kernel(const Message& message) {
  cuda::FetchParams params;
  if (message.receive.defined()) {
    params.from = staged_by(message.source);
    params.to = message.receive.mutable_data_ptr();
    params.bytes = static_cast<int64_t>(message.receive.nbytes());
  }
  params.remote_fetch = signal_pad_.remote_fetch(/*num_kv_heads=*/1);
  params.remote_fetch.delay_seed = delays_.seed();
  C10_CUDA_CHECK(cuda::fetch(params, side_stream_));
}

void SymmetricTransport::fetch_by_copy_engine(const Message& message, CUDAEvent& received) {
  signal_pad_.enqueue_wait_and_clear_staged(rendezvous_.calls->call_tag(), side_stream_);
  if (message.receive.defined()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(message.receive.mutable_data_ptr(), staged_by(message.source),
                                   message.receive.nbytes(), cudaMemcpyDefault, side_stream_));
  }
  received.record(side_stream_);
  // The size of the largest message is the same on every rank: copy engines fetch on all of them,
  // unless the environment keeps kernels from waiting on this one alone.
  const auto by =
      message.largest > kMaxFetchedByKernel ? Fetching::kByStreams : Fetching::kByAnyMeans;
  signal_pad_.enqueue_signal_read(rendezvous_.others(), by, side_stream_);
  signal_pad_.enqueue_wait_until_read(by, side_stream_);
}

void SymmetricTransport::exchange_partials(int64_t call,
                                           c10::function_ref<void(const PartialExchange&)> launch) {
  const CUDAStream stream = getCurrentCUDAStream();
  calls_.begin_on(stream, /*uses_buffers=*/false);
  signal_pad_.describe(call, std::make_shared<std::vector<int64_t>>(rendezvous_.size, 0),
                       calls_.capturing());
  PartialExchange exchange = signal_pad_.partial_exchange(rendezvous_.calls->call_tag());
  exchange.delay_seed = delays_.seed();
  launch(exchange);
  calls_.end_on(stream);
}

const bool registered = register_transport(
    {"symmetric", /*preference=*/2, c10::kCUDA,
     [](const Rendezvous& rendezvous, c10::Device device) -> std::unique_ptr<MessageTransport> {
       return std::make_unique<SymmetricTransport>(rendezvous, device);
     }});

}  // namespace
}  // namespace ringattn
