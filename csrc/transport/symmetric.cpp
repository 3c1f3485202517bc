// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <utility>

#include "transport/cuda/poison.h"
#include "transport/cuda/stage.h"
#include "transport/cuda/stream_words.h"
#include "transport/handshake.h"
#include "transport/hostility.h"
#include "transport/ring_group.h"
#include "transport/shared_memory.h"

namespace ringattn {
namespace {

using at::cuda::CUDAEvent;
using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;

// Rows of a block, all planes (a head of a batch, keys or values) of some heads, from where its
// owner has staged it to where this rank attends to it.
struct Copy {
  int64_t step = 0;
  const char* from = nullptr;
  char* to = nullptr;
  size_t plane_bytes = 0;  // that are copied
  size_t pitch = 0;        // of the staged block
  size_t planes = 0;
  uint32_t* arrival = nullptr;  // set to 1 behind it; null: nobody polls
};

// What a kind of call does with memory. Addresses do not change from call to call.
struct Plan {
  at::Tensor memory;         // the visiting blocks
  Gathering gathering;       // arrivals only where they are polled
  std::vector<Copy> copies;  // in the order in which they are made
  std::shared_ptr<const std::vector<int64_t>> step_of_rank;
  cudaGraphExec_t graph = nullptr;  // all copies of a polled call and the words behind them
  int64_t uses = 0;

  Plan() = default;
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  ~Plan() {
    if (graph != nullptr) cudaGraphExecDestroy(graph);
  }
};

std::optional<unsigned long long> capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, &id));
  if (status != cudaStreamCaptureStatusActive) return {};
  return id;
}

cuda::StageSource stage_source(const at::Tensor& x) {  // [B, S_r, H_kv, D]
  const auto bytes = [&](int64_t dim) {
    return x.stride(dim) * static_cast<int64_t>(x.element_size());
  };
  return {x.const_data_ptr(), bytes(0), bytes(1), bytes(2)};
}

// x itself, or a copy where its rows are not whole aligned pieces of memory.
at::Tensor stageable(const at::Tensor& x) {
  const cuda::StageSource source = stage_source(x);
  const bool aligned =
      (reinterpret_cast<uintptr_t>(source.data) | static_cast<uintptr_t>(source.batch_stride) |
       static_cast<uintptr_t>(source.row_stride) | static_cast<uintptr_t>(source.head_stride)) %
          cuda::kStagePiece ==
      0;
  if (x.numel() == 0 || (x.stride(3) == 1 && aligned)) return x;
  return x.clone(at::MemoryFormat::Contiguous);
}

class SymmetricTransport : public MessageTransport {
 public:
  SymmetricTransport(RingGroup& group, c10::Device device)
      : group_(group), device_(device), handshake_(group, device), lane_(own_stream(device)) {}

  ~SymmetricTransport() override { cudaStreamDestroy(lane_); }

  std::unique_ptr<BlockStream> open(const Exchange& exchange) override;
  std::unique_ptr<Transfer> start(const Message& message) override;
  at::Tensor all_gather(const at::Tensor& mine, int64_t call) override;

  bool needs_every_rank() const override { return true; }

  void guard(const std::vector<at::Tensor>& results) override {
    const auto stream = getCurrentCUDAStream();
    for (const at::Tensor& result : results) {
      C10_CUDA_CHECK(cuda::poison_if_failed(result.mutable_data_ptr(), result.nbytes(),
                                            reinterpret_cast<const int*>(handshake_.failed()),
                                            stream.stream()));
    }
  }

  void synchronize() override {
    for (CUDAEvent& end : ends()) end.synchronize();
  }

  bool idle() override {
    if (!ending_) ending_ = ends();
    const bool done =
        std::all_of(ending_->begin(), ending_->end(), [](CUDAEvent& end) { return end.query(); });
    return done && handshake_.all_read();
  }

 private:
  friend class SymmetricStream;

  char* staged_by(int64_t rank) const { return static_cast<char*>(staged_->of(rank)); }
  std::vector<int64_t> others() const {
    std::vector<int64_t> others;
    for (int64_t rank = 0; rank < group_.size(); ++rank) {
      if (rank != group_.rank()) others.push_back(rank);
    }
    return others;
  }

  // Note: none of PyTorch's pool. Two groups that came by the same stream would wait for each
  // other's copies, and their kernels for them.
  static CUDAStream own_stream(c10::Device device) {
    const c10::cuda::CUDAGuard guard(device);
    int lowest = 0, highest = 0;
    C10_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    cudaStream_t stream = nullptr;
    C10_CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
    return c10::cuda::getStreamFromExternal(stream, device.index());
  }

  // The end of everything that has been enqueued so far.
  std::vector<CUDAEvent> ends() const {
    std::vector<CUDAEvent> ends;
    if (!last_stream_) return ends;
    ends.emplace_back().record(*last_stream_);
    ends.emplace_back().record(lane_);
    return ends;
  }

  // What is copied from now on comes after what `stream` holds.
  void after(CUDAStream stream) {
    fork_.record(stream);
    fork_.block(lane_);
  }

  // Calls follow each other, also from stream to stream. What is captured is ordered by whoever
  // replays it, and by the handshake.
  void after_last(CUDAStream stream) {
    const auto capture = capture_of(stream);
    if (last_stream_ && *last_stream_ != stream) {
      if (gathered_.defined()) gathered_.record_stream(stream);
      if (capture == last_capture_) {
        CUDAEvent end;
        end.record(*last_stream_);
        end.block(stream);
      }
    }
    last_stream_ = stream;
    last_capture_ = capture;
    captured_ |= capture.has_value();
  }

  // Collective: memory for staging blocks of `bytes`, on every rank.
  void reserve(size_t bytes, cudaStream_t stream) {
    if (staged_ && staged_->bytes() >= bytes) return;
    TORCH_CHECK(!capture_of(stream),
                "ringattn: a call must have been made once before one of its kind is captured in a "
                "CUDA graph, got a first one under capture");
    forget_plans();
    if (staged_) group_.exchange("");  // nobody reads it any more
    if (captured_ && staged_) captured_staged_.push_back(std::move(staged_));
    staged_.reset();
    staged_ = std::make_unique<SharedMemory>(group_, device_, bytes);
  }

  // What has been captured goes on using the memory that it was captured with.
  void forget_plans() {
    synchronize();
    if (captured_) {
      for (auto& [key, plan] : plans_) captured_plans_.push_back(std::move(plan));
    }
    plans_.clear();
  }

  // Some time of a copy engine.
  void delay(int64_t from) {
    if (!delays_) delays_.emplace(*hostile_transfers());
    constexpr int64_t kMostBytes = int64_t{32} << 20;
    if (!nowhere_.defined()) {
      nowhere_ = at::empty({kMostBytes}, at::TensorOptions(device_).dtype(at::kByte));
    }
    const int64_t most = std::min<int64_t>(kMostBytes, staged_->bytes());
    for (uint64_t times = (*delays_)() % 8; times > 0; --times) {
      C10_CUDA_CHECK(cudaMemcpyAsync(nowhere_.mutable_data_ptr(), staged_by(from),
                                     (*delays_)() % most, cudaMemcpyDefault, lane_));
    }
  }

  Plan& plan(const Exchange& exchange);
  void stage(cuda::StageParams params, int64_t call,
             std::shared_ptr<const std::vector<int64_t>> step_of_rank, cudaStream_t stream) {
    handshake_.describe(call, std::move(step_of_rank));
    handshake_.give_signals(params);
    C10_CUDA_CHECK(cuda::stage(params, stream));
    handshake_.wait_until_staged(stream);
  }

  RingGroup& group_;
  c10::Device device_;
  Handshake handshake_;
  std::unique_ptr<SharedMemory> staged_;  // what each rank gives
  at::Tensor gathered_;                   // what this rank gets, bytes
  std::map<std::vector<int64_t>, std::unique_ptr<Plan>> plans_;
  std::vector<std::unique_ptr<SharedMemory>> captured_staged_;
  std::vector<std::unique_ptr<Plan>> captured_plans_;
  // Where blocks are copied. One stream: copies from other devices share one engine, and streams
  // that take turns on it cost more than they bring (H200: 0.27 against 0.30 ms for a ring of 8192
  // tokens).
  CUDAStream lane_;
  CUDAEvent fork_;
  std::optional<CUDAStream> last_stream_;
  std::optional<unsigned long long> last_capture_;
  bool captured_ = false;
  std::optional<std::vector<CUDAEvent>> ending_;  // once the group is gone
  std::optional<std::minstd_rand> delays_;        // where transfers are hostile
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
    const at::Tensor k = stageable(exchange.k), v = stageable(exchange.v);
    exchange_.k.reset();
    exchange_.v.reset();
    transport_.after_last(stream_);
    capturing_ = transport_.last_capture_.has_value();
    const size_t row_bytes = 2 * k.size(0) * k.size(2) * k.size(3) * k.element_size();
    transport_.reserve(exchange_.most_rows * row_bytes, stream_);
    plan_ = &transport_.plan(exchange);
    exchange_.polled = !plan_->gathering.arrivals.empty();

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
    transport_.stage(params, exchange_.call, plan_->step_of_rank, stream_);

    if (hostile_transfers()) {
      constexpr int kNaN = 0xff;
      C10_CUDA_CHECK(cudaMemsetAsync(transport_.gathered_.mutable_data_ptr(), kNaN,
                                     transport_.gathered_.nbytes(), stream_));
    }
    transport_.after(stream_);
    if (exchange_.polled) {
      fetch_all();
    } else {
      arrived_.resize(num_hops_);
      for (int64_t step = 1; step <= exchange_.depth; ++step) fetch(step);
    }
  }

  const Gathering* gathering() const override {
    return exchange_.depth >= num_hops_ ? &plan_->gathering : nullptr;
  }

  Block wait(int64_t step) override {
    if (arrived_[step - 1].end) arrived_[step - 1].end->block(getCurrentCUDAStream());
    return plan_->gathering.blocks[step - 1];
  }

  void release(int64_t step) override {
    const int64_t next = step + exchange_.depth + 1;
    if (exchange_.polled || next > num_hops_) return;
    transport_.after(getCurrentCUDAStream());
    fetch(next);
  }

  void finish(const std::vector<at::Tensor>& results) override {
    if (capturing_) {
      // A capture ends with every stream that it has spread to back on the first.
      CUDAEvent done;
      done.record(transport_.lane_);
      done.block(stream_);
    }
    if (exchange_.polled) return;  // the kernel has seen to it
    transport_.guard(results);
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
    for (const Copy& copy : plan_->copies) {
      if (copy.step == step) enqueue(copy);
    }
    arrived.end->record(transport_.lane_);
    transport_.handshake_.tell_read(exchange_.hops[step - 1].source, transport_.lane_);
  }

  // All blocks at once, slice of heads by slice of heads, each with its word. From the second time
  // on as one graph: a host call for each of them would take as long as a small ring.
  void fetch_all() {
    const bool by_host = capturing_ || hostile_transfers();
    if (by_host || (plan_->graph == nullptr && plan_->uses++ == 0)) return enqueue_all();
    if (plan_->graph == nullptr) {
      C10_CUDA_CHECK(cudaStreamBeginCapture(transport_.lane_, cudaStreamCaptureModeThreadLocal));
      enqueue_all();
      cudaGraph_t graph = nullptr;
      C10_CUDA_CHECK(cudaStreamEndCapture(transport_.lane_, &graph));
      C10_CUDA_CHECK(cudaGraphInstantiate(&plan_->graph, graph, 0));
      C10_CUDA_CHECK(cudaGraphDestroy(graph));
    }
    C10_CUDA_CHECK(cudaGraphLaunch(plan_->graph, transport_.lane_));
  }

  void enqueue_all() {
    for (const Copy& copy : plan_->copies) enqueue(copy);
    for (const Hop& hop : exchange_.hops) {
      transport_.handshake_.tell_read(hop.source, transport_.lane_);
    }
  }

  void enqueue(const Copy& copy) {
    const CUDAStream lane = transport_.lane_;
    if (hostile_transfers()) transport_.delay(exchange_.hops[copy.step - 1].source);
    if (copy.planes * copy.plane_bytes == 0) {
      // Nothing to bring, but somebody may wait for word of it.
    } else if (copy.pitch == copy.plane_bytes || copy.planes == 1) {
      C10_CUDA_CHECK(cudaMemcpyAsync(copy.to, copy.from, copy.planes * copy.plane_bytes,
                                     cudaMemcpyDefault, lane));
    } else {
      C10_CUDA_CHECK(cudaMemcpy2DAsync(copy.to, copy.plane_bytes, copy.from, copy.pitch,
                                       copy.plane_bytes, copy.planes, cudaMemcpyDefault, lane));
    }
    if (copy.arrival == nullptr) return;
    cuda::StreamWords words;
    words.write(copy.arrival, 1);
    C10_CUDA_CHECK(words.enqueue(lane));
  }

  SymmetricTransport& transport_;
  Exchange exchange_;
  CUDAStream stream_;
  int64_t num_hops_;
  bool capturing_ = false;
  Plan* plan_ = nullptr;
  std::vector<Arrived> arrived_;  // [W - 1], where the host orders streams after arrivals
};

std::unique_ptr<BlockStream> SymmetricTransport::open(const Exchange& exchange) {
  return std::make_unique<SymmetricStream>(*this, exchange);
}

// Where everything of this kind of call lies. A visiting block is [H_kv, 2, B, rows, D], like the
// staged one.
Plan& SymmetricTransport::plan(const Exchange& exchange) {
  const at::Tensor& k = exchange.k;
  const int64_t batch = k.size(0), kv_heads = k.size(2), head_dim = k.size(3);
  const int64_t num_hops = exchange.hops.size();
  // Copies within a device may need its multiprocessors, which the polling kernel holds.
  const bool polled = exchange.polled && !exchange.timed && !handshake_.shares_devices();

  std::vector<int64_t> key = {
      batch, kv_heads, head_dim, static_cast<int64_t>(k.scalar_type()), exchange.depth, polled};
  for (const Hop& hop : exchange.hops) {
    key.insert(key.end(), {hop.source, hop.rows_received, hop.source_rows});
  }
  const auto known = plans_.find(key);
  if (known != plans_.end()) return *known->second;
  TORCH_CHECK(!last_capture_,
              "ringattn: a call must have been made once before one of its kind is captured in a "
              "CUDA graph, got a first one under capture");

  // Ahead of the block being attended there are up to `depth` others: depth + 1 places in turn.
  const int64_t num_places = std::min(num_hops, exchange.depth + 1);
  const int64_t bytes_per_row = 2 * kv_heads * batch * head_dim * k.element_size();
  std::vector<int64_t> place_rows(num_places, 0);
  for (int64_t i = 0; i < num_hops; ++i) {
    place_rows[i % num_places] =
        std::max(place_rows[i % num_places], exchange.hops[i].rows_received);
  }
  std::vector<int64_t> place_begin;
  int64_t total = 0;
  constexpr int64_t kAlignment = 1024;
  for (const int64_t rows : place_rows) {
    place_begin.push_back(total);
    total += (rows * bytes_per_row + kAlignment - 1) / kAlignment * kAlignment;
  }
  if (!gathered_.defined() || gathered_.nbytes() < static_cast<size_t>(total)) {
    forget_plans();
    gathered_.reset();  // the old before the new: both may not fit
    gathered_ = at::empty({total}, at::TensorOptions(device_).dtype(at::kByte));
  }
  constexpr size_t kMostPlans = 64;
  if (plans_.size() >= kMostPlans) forget_plans();

  auto made = std::make_unique<Plan>();
  made->memory = gathered_;
  Gathering& gathering = made->gathering;
  // Slices small enough that the first is there soon, large enough for an engine's full speed.
  constexpr int64_t kSliceBytes = int64_t{4} << 20;
  int64_t largest = 0;
  for (const Hop& hop : exchange.hops) largest = std::max(largest, hop.rows_received);
  int64_t slices =
      polled ? std::clamp<int64_t>(largest * bytes_per_row / kSliceBytes, 1, kv_heads) : 1;
  slices = std::min(slices, Handshake::kMaxArrivals / std::max<int64_t>(num_hops, 1) - 1);
  const int64_t heads_per_slice = (std::max<int64_t>(kv_heads, 1) + slices - 1) / slices;
  slices = (kv_heads + heads_per_slice - 1) / heads_per_slice;
  gathering.heads_per_arrival = heads_per_slice;
  gathering.words = handshake_.launch_words();
  gathering.num_arrivals = polled ? num_hops * slices : 0;
  uint32_t* const arrivals = gathering.words + Handshake::kLaunchCounters;
  gathering.failed = handshake_.failed();

  const at::Tensor elements = gathered_.view(k.scalar_type());
  auto step_of_rank = std::make_shared<std::vector<int64_t>>(group_.size(), 0);
  for (int64_t i = 0; i < num_hops; ++i) {
    const Hop& hop = exchange.hops[i];
    (*step_of_rank)[hop.source] = i + 1;
    const int64_t plane = hop.rows_received * head_dim;  // elements
    const int64_t begin = place_begin[i % num_places] / k.element_size();
    const auto view = [&](int64_t offset) {
      return elements.as_strided({batch, hop.rows_received, kv_heads, head_dim},
                                 {plane, head_dim, 2 * batch * plane, 1}, begin + offset);
    };
    gathering.blocks.push_back({view(0), view(batch * plane)});
    if (polled) gathering.arrivals.push_back(arrivals + i * slices);
  }
  for (int64_t slice = 0; slice < slices; ++slice) {
    const int64_t first_head = slice * heads_per_slice;
    const int64_t heads = std::min(heads_per_slice, kv_heads - first_head);
    for (int64_t i = 0; i < num_hops; ++i) {
      const Hop& hop = exchange.hops[i];
      const int64_t row = head_dim * k.element_size();
      Copy copy;
      copy.step = i + 1;
      copy.planes = 2 * heads * batch;
      copy.plane_bytes = hop.rows_received * row;
      copy.pitch = hop.source_rows * row;
      copy.from = staged_by(hop.source) + 2 * first_head * batch * copy.pitch;
      copy.to = static_cast<char*>(gathered_.mutable_data_ptr()) + place_begin[i % num_places] +
                2 * first_head * batch * copy.plane_bytes;
      if (polled) copy.arrival = arrivals + i * slices + slice;
      made->copies.push_back(copy);
    }
  }
  made->step_of_rank = std::move(step_of_rank);
  auto& entry = plans_[key];
  entry = std::move(made);
  return *entry;
}

// ---- single messages ----------------------------------------------------------------------------

class SymmetricTransfer : public Transfer {
 public:
  explicit SymmetricTransfer(bool timed)
      : timed_(timed),
        started_(timed ? cudaEventDefault : cudaEventDisableTiming),
        done_(timed ? cudaEventDefault : cudaEventDisableTiming) {}

  void start(CUDAStream stream) { started_.record(stream); }
  void end(CUDAStream stream) { done_.record(stream); }

  void wait() override { done_.block(getCurrentCUDAStream()); }
  void finish() override {}
  double elapsed_ms() override { return timed_ ? started_.elapsed_time(done_) : 0.0; }

 private:
  bool timed_;
  CUDAEvent started_, done_;
};

std::unique_ptr<Transfer> SymmetricTransport::start(const Message& message) {
  const CUDAStream lane = lane_;
  after(getCurrentCUDAStream());
  after_last(lane);
  reserve(message.largest, lane);

  auto transfer = std::make_unique<SymmetricTransfer>(message.timed);
  transfer->start(lane);
  auto steps = std::make_shared<std::vector<int64_t>>(group_.size(), message.step);
  handshake_.describe(message.call, std::move(steps));
  handshake_.wait_until_read(lane);
  if (message.send.defined()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(staged_by(group_.rank()), message.send.const_data_ptr(),
                                   message.send.nbytes(), cudaMemcpyDefault, lane));
    message.send.record_stream(lane);
  }
  cuda::StageParams signals;
  handshake_.give_signals(signals);
  C10_CUDA_CHECK(cuda::stage(signals, lane));
  handshake_.wait_until_staged(lane);
  if (message.receive.defined()) {
    C10_CUDA_CHECK(cudaMemcpyAsync(message.receive.mutable_data_ptr(), staged_by(message.source),
                                   message.receive.nbytes(), cudaMemcpyDefault, lane));
    message.receive.record_stream(lane);
  }
  transfer->end(lane);
  for (const int64_t other : others()) handshake_.tell_read(other, lane);
  return transfer;
}

at::Tensor SymmetricTransport::all_gather(const at::Tensor& mine, int64_t call) {
  at::Tensor all = at::empty({group_.size(), mine.numel()}, mine.options());
  const CUDAStream stream = getCurrentCUDAStream();
  after_last(stream);
  reserve(mine.nbytes(), stream);
  handshake_.describe(call, nullptr);
  handshake_.wait_until_read(stream);
  C10_CUDA_CHECK(cudaMemcpyAsync(staged_by(group_.rank()), mine.const_data_ptr(), mine.nbytes(),
                                 cudaMemcpyDefault, stream));
  cuda::StageParams signals;
  handshake_.give_signals(signals);
  C10_CUDA_CHECK(cuda::stage(signals, stream));
  handshake_.wait_until_staged(stream);
  for (int64_t rank = 0; rank < group_.size(); ++rank) {
    C10_CUDA_CHECK(cudaMemcpyAsync(all[rank].mutable_data_ptr(), staged_by(rank), mine.nbytes(),
                                   cudaMemcpyDefault, stream));
  }
  for (const int64_t other : others()) handshake_.tell_read(other, stream);
  return all;
}

}  // namespace

std::unique_ptr<MessageTransport> make_symmetric_transport(RingGroup& group, c10::Device device) {
  return std::make_unique<SymmetricTransport>(group, device);
}

}  // namespace ringattn
