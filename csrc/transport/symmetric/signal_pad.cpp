// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/signal_pad.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "core/environment.h"
#include "peer_sync/protocol.h"
#include "transport/group/rendezvous.h"
#include "transport/runtime/cuda_event_transfer.h"
#include "transport/runtime/watchdog.h"
#include "transport/symmetric/exchange_regions.h"
#include "transport/symmetric/host_signal_pad.h"
#include "transport/symmetric/peer_device_memory.h"
#include "transport/symmetric/peer_host_memory.h"
#include "transport/symmetric/signal_watchdog.h"
#include "transport/symmetric/stream_memops.h"

namespace ringattn {
namespace {

// The pad of a rank in shared device memory, and counters of its kernels. Offsets in uint32.
struct Layout {
  static constexpr int64_t kRanks = cuda::kMaxPeers;
  static constexpr int64_t kStaged = 0;
  static constexpr int64_t kRead = kStaged + kRanks;
  static constexpr int64_t kTag = kRead + kRanks;
  static constexpr int64_t kBlocksDone = kTag + kRanks;
  static constexpr int64_t kCalls = kBlocksDone + cuda::kStageCounters;
  static constexpr int64_t kFailed = kCalls + 1;
  static constexpr int64_t kGivenUpCopy = kFailed + 1;  // of HostSignalPad::given_up, by streams
  static constexpr int64_t kOne = kGivenUpCopy + 1;     // a 1 to copy from
  static constexpr int64_t kLaunch = kOne + 1;
  static constexpr int64_t kArrivals = 4096;
  static constexpr int64_t kSize = kLaunch + LaunchScratch::kFirstArrival + kArrivals;
  // The exchange region comes behind the pad.
  static constexpr int64_t kExchange = (kSize + 63) / 64 * 64;
};

constexpr uint32_t kNotWaiting = Phase{}.encoded();
constexpr uint32_t kUntilRead = Phase{Phase::kUntilRead, 1}.encoded();
constexpr uint32_t until_staged(uint32_t least) {
  return Phase{Phase::kUntilStaged, least}.encoded();
}
constexpr uint32_t kStreamUntilRead = Phase{Phase::kStreamUntilRead, 1}.encoded();
constexpr uint32_t kStreamUntilStaged = Phase{Phase::kStreamUntilStaged, 1}.encoded();

// At least 1: 0 in a mirror means that nothing has been staged.
uint32_t as_signal(int32_t call_tag) {
  return std::max<uint32_t>(static_cast<uint32_t>(call_tag), 1);
}

// What a rank needs beside shared memory.
struct LocalResources {
  c10::Device device;
  cudaStream_t releasing = nullptr;  // for copies that must not queue behind waits
  std::string refusal;               // why the rank cannot have it; empty: it has

  explicit LocalResources(c10::Device device) : device(device) {
    if (!cuda::StreamMemOps::available()) {
      refusal = "its driver has no stream memory operations";
      return;
    }
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = cudaStreamCreateWithFlags(&releasing, cudaStreamNonBlocking);
    if (error == cudaSuccess) return;
    cudaGetLastError();  // the error is reported here, not by the next call
    refusal = cudaGetErrorString(error);
  }
  ~LocalResources() {
    on_device(device, [&] {
      if (releasing != nullptr) cudaStreamDestroy(releasing);
    });
  }
  LocalResources(const LocalResources&) = delete;
  LocalResources& operator=(const LocalResources&) = delete;
};

// Collective. Where a rank is refused it, all ranks unmap the peers' device memory too.
std::unique_ptr<PeerHostMemory> share_host_memory(const Rendezvous& rendezvous, c10::Device device,
                                                  PeerDeviceMemory& device_memory) {
  try {
    return std::make_unique<PeerHostMemory>(rendezvous, device,
                                            rendezvous.size * sizeof(HostSignalPad));
  } catch (const c10::DistBackendError&) {
    throw;  // a rank is gone
  } catch (const c10::Error&) {
    device_memory.close_peers();
    rendezvous.exchange("");
    throw;
  }
}

// The pads of all ranks; constructs this rank's own.
std::vector<HostSignalPad*> host_pads(void* memory, int64_t rank, int64_t num_ranks) {
  auto* const first = static_cast<HostSignalPad*>(memory);
  new (first + rank) HostSignalPad;
  for (int64_t other = 0; other < num_ranks; ++other) first[rank].read_mirror[other] = 1;
  std::vector<HostSignalPad*> pads;
  for (int64_t other = 0; other < num_ranks; ++other) pads.push_back(first + other);
  return pads;
}

}  // namespace

/// The pads in device memory, and those in host memory.
class SignalPad::Signals : public WatchedSignals {
 public:
  /// Collective.
  Signals(const Rendezvous& rendezvous, c10::Device device)
      : rank_(rendezvous.rank),
        others_(rendezvous.others()),
        device_(device),
        local_(device),
        shared_(rendezvous, device,
                Layout::kExchange * sizeof(uint32_t) + ExchangeRegions::bytes(rendezvous.size),
                local_.refusal),
        exchange_(exchange_regions(rendezvous.size), rank_),
        host_memory_(share_host_memory(rendezvous, device, shared_)),
        host_(host_pads(host_memory_->data(), rank_, rendezvous.size), rank_) {
    const c10::cuda::CUDAGuard guard(device);
    std::vector<uint32_t> initial(Layout::kSize, 0);
    for (int64_t rank = 0; rank < rendezvous.size; ++rank) initial[Layout::kRead + rank] = 1;
    initial[Layout::kOne] = 1;
    C10_CUDA_CHECK(cudaMemcpy(at(0), initial.data(), initial.size() * sizeof(uint32_t),
                              cudaMemcpyHostToDevice));
    exchange_.initialise([](void* to, const void* from, size_t bytes) {
      C10_CUDA_CHECK(cudaMemcpy(to, from, bytes, cudaMemcpyHostToDevice));
    });
    // All pads are initialised before any rank signals.
    const auto waits = rendezvous.exchange(environment().kernels_may_wait ? "kernels" : "");
    kernels_may_wait_ =
        std::none_of(waits.begin(), waits.end(), [](const auto& wait) { return wait.empty(); });
  }

  int64_t rank() const { return rank_; }
  const std::vector<int64_t>& others() const { return others_; }
  uint32_t* at(int64_t index) const { return at(rank_, index); }
  uint32_t* at(int64_t rank, int64_t index) const {
    return static_cast<uint32_t*>(shared_.of(rank)) + index;
  }
  HostSignalPad& host() const { return host_.own(); }
  HostSignalPad& host(int64_t rank) const { return host_.of(rank); }
  const ExchangeRegions& exchange() const { return exchange_; }
  bool kernels_may_wait() const { return kernels_may_wait_; }
  /// The address at which the device sees a signal in host memory.
  uint32_t* on_device(const HostSignalPad::Signal& signal) const {
    return static_cast<uint32_t*>(host_memory_->on_device(&signal));
  }

  void wait_staged(const std::vector<int64_t>& peers, int32_t call_tag,
                   cuda::StreamMemOps& operations) const {
    operations.write(on_device(host().call_tag), as_signal(call_tag));
    operations.write(on_device(host().phase), kStreamUntilStaged);
    for (const int64_t rank : peers) {
      operations.wait_until(on_device(host().staged_mirror[rank]), as_signal(call_tag));
    }
    operations.write(on_device(host().phase), kNotWaiting);
  }

  uint32_t phase() const override { return host().phase; }
  uint32_t calls() const override { return host().calls; }
  std::optional<CallMismatch> call_mismatch() const override { return host_.call_mismatch(); }
  void give_up() override { host_.give_up(); }

  std::vector<uint32_t> progress(Phase::Kind kind) override {
    if (Phase{kind}.in_host_memory()) return host_.progress(kind);
    if (kind == Phase::kUntilPartial) {
      return exchange_.progress(
          [&](void* to, const void* from, size_t bytes) { copy(to, from, bytes); });
    }
    std::vector<uint32_t> progress(others_.size() + 1, 0);
    const int64_t first = kind == Phase::kUntilRead ? Layout::kRead : Layout::kStaged;
    copy(progress.data(), at(first), progress.size() * sizeof(uint32_t));
    return progress;
  }

  void release() override {
    const auto set = [&](int64_t index, int64_t count, uint32_t value) {
      const std::vector<uint32_t> values(count, value);
      copy(at(index), values.data(), count * sizeof(uint32_t));
    };
    set(Layout::kFailed, 1, kGivenUp);                // first: a kernel that passes reads it
    set(Layout::kStaged, Layout::kRanks, INT32_MAX);  // as many heads as any call waits for
    set(Layout::kRead, Layout::kRanks, 1);
  }

 private:
  std::vector<void*> exchange_regions(int64_t num_ranks) const {
    std::vector<void*> regions;
    for (int64_t rank = 0; rank < num_ranks; ++rank) {
      regions.push_back(at(rank, Layout::kExchange));
    }
    return regions;
  }

  // Called on a thread of its own (asking_). Errors are ignored: on a lost device nothing waits.
  void copy(void* to, const void* from, size_t bytes) const {
    const c10::cuda::CUDAGuard guard(device_);
    cudaStreamCaptureMode mode =
        cudaStreamCaptureModeRelaxed;  // a capture of another thread goes on
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, local_.releasing);
    cudaStreamSynchronize(local_.releasing);
  }

  const int64_t rank_;
  const std::vector<int64_t> others_;
  c10::Device device_;
  LocalResources local_;
  PeerDeviceMemory shared_;
  ExchangeRegions exchange_;
  bool kernels_may_wait_ = false;  // of all ranks
  std::unique_ptr<PeerHostMemory> host_memory_;
  HostSignalPads host_;
};

namespace {

// Polls a pad's watchdog until it is closed.
class WatchedPad : public WatchedOperation {
 public:
  explicit WatchedPad(std::shared_ptr<SignalWatchdog> watchdog) : watchdog_(std::move(watchdog)) {}
  const void* owner() const override { return watchdog_.get(); }
  bool poll() override { return watchdog_->poll(); }

 private:
  std::shared_ptr<SignalWatchdog> watchdog_;
};

}  // namespace

SignalPad::SignalPad(const Rendezvous& rendezvous, c10::Device device) {
  TORCH_CHECK(rendezvous.size <= cuda::kMaxPeers,
              "ringattn: transport \"symmetric\" must have at most ", cuda::kMaxPeers,
              " ranks, got ", rendezvous.size);
  signals_ = std::make_shared<Signals>(rendezvous, device);
  watchdog_ = std::make_shared<SignalWatchdog>(rendezvous, signals_);
  Watchdog::get().watch(std::make_unique<WatchedPad>(watchdog_));
}

SignalPad::~SignalPad() { watchdog_->close(); }

bool SignalPad::all_read() { return watchdog_->all_read(); }

void SignalPad::check_mismatch() { watchdog_->check_mismatch(); }

void SignalPad::add_signals(cuda::StageParams& params, int32_t call_tag,
                            const std::vector<int64_t>& peers) const {
  HostSignalPad& host = signals_->host();
  params.tags.value = as_signal(call_tag);
  params.tags.mismatch = signals_->on_device(host.mismatch);
  for (const int64_t rank : peers) {
    const int peer = params.num_peers++;
    params.read_mirror_by_peer[peer] = signals_->on_device(host.read_mirror[rank]);
    params.staged_mirror_by_this_rank[peer] =
        signals_->on_device(signals_->host(rank).staged_mirror[signals_->rank()]);
    params.tags.by_this_rank[peer] = signals_->at(rank, Layout::kTag + signals_->rank());
    params.tags.by_peer[peer] = signals_->at(Layout::kTag + rank);
    params.read_by_peer[peer] = signals_->at(Layout::kRead + rank);
    params.staged_by_this_rank[peer] = signals_->at(rank, Layout::kStaged + signals_->rank());
    if (!params.kernel_fetches) continue;
    params.staged_by_peer[params.num_awaited++] = signals_->at(Layout::kStaged + rank);
  }
  params.blocks_done = signals_->at(Layout::kBlocksDone);
  params.failed = signals_->at(Layout::kFailed);
  params.given_up_copy = signals_->at(Layout::kGivenUpCopy);
  params.given_up = signals_->on_device(host.given_up);
  params.calls = signals_->at(Layout::kCalls);
  params.host_calls = signals_->on_device(host.calls);
  params.host_phase = signals_->on_device(host.phase);
  params.phase = until_staged(kBeingStaged);  // a stream that waits writes its own phase
}

void SignalPad::enqueue_wait_staged(const std::vector<int64_t>& peers, int32_t call_tag,
                                    cudaStream_t stream) {
  cuda::StreamMemOps operations;
  signals_->wait_staged(peers, call_tag, operations);
  C10_CUDA_CHECK(operations.enqueue(stream));
}

void SignalPad::enqueue_wait_and_clear_staged(int32_t call_tag, cudaStream_t stream) {
  HostSignalPad& host = signals_->host();
  cuda::StreamMemOps operations;
  signals_->wait_staged(signals_->others(), call_tag, operations);
  // The signals in device memory were set before their mirrors.
  for (const int64_t rank : signals_->others()) {
    operations.write(signals_->on_device(host.staged_mirror[rank]), 0);
    operations.write(signals_->at(Layout::kStaged + rank), 0);
  }
  C10_CUDA_CHECK(operations.enqueue(stream));
}

void SignalPad::enqueue_signal_read(const std::vector<int64_t>& peers, Fetching by,
                                    cudaStream_t stream) {
  cuda::StreamMemOps operations;
  for (const int64_t peer : peers) {
    uint32_t* const read = signals_->on_device(signals_->host(peer).read_mirror[signals_->rank()]);
    operations.write(read, 1);
    // Waits until the write is there. In flight, it could land after the peer, which sees `read`,
    // has cleared the mirror.
    if (by == Fetching::kByStream) operations.wait_until(read, 1);
  }
  C10_CUDA_CHECK(operations.enqueue(stream));
  if (by == Fetching::kByStreamOnAllRanks) return;
  for (const int64_t peer : peers) {
    // Note: a copy, since a device's front end writes only to that device.
    C10_CUDA_CHECK(cudaMemcpyAsync(signals_->at(peer, Layout::kRead + signals_->rank()),
                                   signals_->at(Layout::kOne), sizeof(uint32_t), cudaMemcpyDefault,
                                   stream));
  }
}

void SignalPad::enqueue_wait_until_read(Fetching by, cudaStream_t stream) {
  HostSignalPad& host = signals_->host();
  cuda::StreamMemOps operations;
  operations.write(signals_->on_device(host.phase), kStreamUntilRead);
  // Behind all that the stream has written: when it is there, so are cleared mirrors, which the
  // stream waits for in the next call.
  if (by == Fetching::kByStreamOnAllRanks) {
    operations.wait_until(signals_->on_device(host.phase), kStreamUntilRead);
  }
  for (const int64_t rank : signals_->others())
    operations.wait_until(signals_->on_device(host.read_mirror[rank]), 1);
  if (by == Fetching::kByStreamOnAllRanks) {
    for (const int64_t rank : signals_->others()) {
      operations.write(signals_->at(Layout::kRead + rank), 1);
    }
  }
  operations.write(signals_->on_device(host.phase), kNotWaiting);
  C10_CUDA_CHECK(operations.enqueue(stream));
  // A stream that the watchdog let pass reads it before anything is staged or returned.
  enqueue_copy_given_up(stream);
}

void SignalPad::enqueue_copy_given_up(cudaStream_t stream) {
  C10_CUDA_CHECK(cudaMemcpyAsync(signals_->at(Layout::kGivenUpCopy),
                                 signals_->on_device(signals_->host().given_up), sizeof(uint32_t),
                                 cudaMemcpyDefault, stream));
}

RemoteFetch SignalPad::remote_fetch(int64_t num_kv_heads) const {
  RemoteFetch remote_fetch;
  remote_fetch.scratch = {signals_->at(Layout::kLaunch), static_cast<int32_t>(Layout::kArrivals)};
  remote_fetch.failed = signals_->at(Layout::kFailed);
  remote_fetch.given_up = signals_->on_device(signals_->host().given_up);
  PeerSignals& signals = remote_fetch.signals;
  for (const int64_t rank : signals_->others()) {
    signals.staged_by_peer[signals.num_peers] = signals_->at(Layout::kStaged + rank);
    signals.read_by_peer[signals.num_peers] = signals_->at(Layout::kRead + rank);
    signals.staged_mirror_by_peer[signals.num_peers] =
        signals_->on_device(signals_->host().staged_mirror[rank]);
    signals.read_mirror_by_this_rank[signals.num_peers] =
        signals_->on_device(signals_->host(rank).read_mirror[signals_->rank()]);
    signals.read_by_this_rank[signals.num_peers++] =
        signals_->at(rank, Layout::kRead + signals_->rank());
  }
  signals.phase = signals_->on_device(signals_->host().phase);
  signals.phase_working = kNotWaiting;
  signals.phase_until_staged = until_staged(staged_heads(static_cast<uint32_t>(num_kv_heads)));
  signals.phase_until_mirrored = Phase{Phase::kUntilMirrored, 1}.encoded();
  signals.phase_until_read = kUntilRead;
  remote_fetch.follows_staging = true;
  return remote_fetch;
}

bool SignalPad::kernels_may_wait() const { return signals_->kernels_may_wait(); }

PartialExchange SignalPad::partial_exchange(int32_t call_tag) const {
  const HostSignalPad& host = signals_->host();
  PartialExchange exchange = signals_->exchange().addresses();
  for (const int64_t rank : signals_->others()) {
    exchange.staged_by_peer[rank] = signals_->at(Layout::kStaged + rank);
  }
  exchange.tag = as_signal(call_tag);
  exchange.mismatch = signals_->on_device(host.mismatch);
  exchange.failed = signals_->at(Layout::kFailed);
  exchange.given_up = signals_->on_device(host.given_up);
  exchange.phase = signals_->on_device(host.phase);
  exchange.phase_working = kNotWaiting;
  exchange.phase_until_partial = Phase{Phase::kUntilPartial, 0}.encoded();
  exchange.phase_per_exchange = Phase::kKinds;
  return exchange;
}

void SignalPad::poison_if_failed(const std::vector<at::Tensor>& results) const {
  static_assert(Layout::kGivenUpCopy == Layout::kFailed + 1);
  ringattn::fill_nan_if_failed(results, signals_->at(Layout::kFailed), 2);
}

void SignalPad::describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank,
                         bool captured) {
  watchdog_->describe(call, std::move(step_of_rank), captured);
}

}  // namespace ringattn
