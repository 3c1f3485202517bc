// SPDX-License-Identifier: Apache-2.0
// The only file that calls NCCL.

#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <memory>
#include <mutex>
#include <thread>

#include "transport/group/peer_wait.h"
#include "transport/group/rendezvous.h"
#include "transport/p2p_transport.h"
#include "transport/registry.h"
#include "transport/runtime/cuda_event_transfer.h"
#include "transport/runtime/stream_pool.h"
#include "transport/runtime/watchdog.h"

namespace ringattn {
namespace {

#define RINGATTN_NCCL_CHECK(call) check_nccl((call), #call)

using std::chrono::milliseconds;

void check_nccl(ncclResult_t result, const char* call) {
  TORCH_CHECK_WITH(DistBackendError, result == ncclSuccess, call,
                   " failed: ", ncclGetErrorString(result), " (", ncclGetLastError(nullptr), ")");
}

// NCCL calls that are launched as one. Note: a group that an error leaves open would swallow every
// later NCCL call of this thread.
class NcclGroup {
 public:
  NcclGroup() { RINGATTN_NCCL_CHECK(ncclGroupStart()); }
  ~NcclGroup() {
    if (open_) ncclGroupEnd();
  }
  NcclGroup(const NcclGroup&) = delete;
  NcclGroup& operator=(const NcclGroup&) = delete;

  ncclResult_t end() {
    open_ = false;
    return ncclGroupEnd();
  }

 private:
  bool open_ = true;
};

// Note: abort, not destroy. Destroying waits for the other ranks, and they may be gone.
struct AbortComm {
  void operator()(ncclComm_t comm) const { ncclCommAbort(comm); }
};
using CommHandle = std::unique_ptr<ncclComm, AbortComm>;

// Ends the group because one of `suspects` did not take part.
void give_up(CallMonitor& calls, const std::vector<int64_t>& suspects, const std::string& reason) {
  calls.fail(calls.blame(kOutsideCalls, /*step=*/0, suspects, reason));
  calls.throw_if_failed();
}

// Device memory of one communicator. Note: not a tensor. Every communicator has a stream of its
// own, and PyTorch's allocator keeps two megabytes for each stream that it has served.
struct DeviceScratch {
  uint32_t failed;         // whether transfers have been given up
  unsigned char bytes[1];  // sent to and received from each rank to connect them, [2, size]
};
using SharedScratch = std::shared_ptr<DeviceScratch>;

SharedScratch new_scratch(int64_t size, cudaStream_t stream) {
  const size_t bytes = sizeof(DeviceScratch) + 2 * size;
  void* scratch = nullptr;
  C10_CUDA_CHECK(cudaMalloc(&scratch, bytes));
  const SharedScratch shared(static_cast<DeviceScratch*>(scratch),
                             [](DeviceScratch* x) { cudaFree(x); });
  C10_CUDA_CHECK(cudaMemsetAsync(scratch, 0, bytes, stream));
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  return shared;
}

// Sends one byte between every two ranks, and gathers one. Note: NCCL connects a pair on its first
// message, and the host waits for that. It happens here, where all ranks have just made the
// communicator, and never in the middle of a call.
ncclResult_t connect(ncclComm_t comm, int rank, int size, const SharedScratch& scratch,
                     cudaStream_t stream) {
  unsigned char* const sent = scratch->bytes;
  unsigned char* const received = sent + size;
  NcclGroup group;
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    RINGATTN_NCCL_CHECK(ncclSend(sent + other, 1, ncclUint8, other, comm, stream));
    RINGATTN_NCCL_CHECK(ncclRecv(received + other, 1, ncclUint8, other, comm, stream));
  }
  const ncclResult_t connected = group.end();
  if (connected != ncclSuccess) return connected;
  return ncclAllGather(sent, received, 1, ncclUint8, comm, stream);
}

// Makes the communicator of the ranks that have `id`, and connects all of them; null where a rank
// went away in the middle. NCCL blocks the host until all ranks take part, for ever where one has
// died: a thread of its own calls NCCL, so that the caller can stop waiting. A communicator that is
// made after the caller has given up is freed; a thread that never returns stays until the process
// ends.
//
// Note: not config.blocking = 0. NCCL (2.28) launches each message of a communicator that never
// blocks from a thread that it starts for it, and the host must wait for that one before it can
// record an event: 28 us a message instead of 5.
std::future<CommHandle> make_communicator(const ncclUniqueId& id, int rank, int size,
                                          const SharedScratch& scratch,
                                          const c10::cuda::CUDAStream& stream) {
  std::packaged_task<CommHandle()> task([=]() -> CommHandle {
    const c10::cuda::CUDAGuard guard(stream.device());
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.blocking = 1;
    ncclComm_t comm = nullptr;
    const ncclResult_t made = ncclCommInitRankConfig(&comm, size, id, rank, &config);
    if (made == ncclRemoteError) return nullptr;
    check_nccl(made, "ncclCommInitRankConfig");
    CommHandle handle(comm);
    const ncclResult_t connected = connect(comm, rank, size, scratch, stream.stream());
    if (connected == ncclRemoteError) return nullptr;
    check_nccl(connected, "connecting an NCCL communicator");
    return handle;
  });
  auto comm = task.get_future();
  std::thread(std::move(task)).detach();
  return comm;
}

// The communicator, shared by the transport and by what the watchdog holds. Either may be the last.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  Communicator(const Rendezvous& rendezvous, c10::Device device)
      : rank_(rendezvous.rank), calls_(rendezvous.calls), device_(device) {
    const c10::cuda::CUDAGuard guard(device);
    C10_CUDA_CHECK(cudaStreamCreateWithFlags(&failing_, cudaStreamNonBlocking));
    scratch_ = new_scratch(rendezvous.size, failing_);
  }

  /// Collective. Enqueues work on `stream`, which the caller has the watchdog watch. A rank that
  /// does not take part within the group's timeout ends the group.
  void form(const Rendezvous& rendezvous, const c10::cuda::CUDAStream& stream) {
    const auto deadline = std::chrono::steady_clock::now() + rendezvous.patience();
    ncclUniqueId id;
    std::string mine;
    if (rank_ == 0) {
      RINGATTN_NCCL_CHECK(ncclGetUniqueId(&id));
      mine.assign(id.internal, sizeof(id.internal));
    }
    const std::string first = rendezvous.exchange(mine).front();
    if (first.size() != sizeof(id.internal)) {
      give_up(*rendezvous.calls, {0}, "it sent no NCCL identifier");
    }
    std::copy(first.begin(), first.end(), id.internal);
    auto formed = make_communicator(id, static_cast<int>(rank_), static_cast<int>(rendezvous.size),
                                    scratch_, stream);
    CommHandle comm;
    if (formed.wait_until(deadline) == std::future_status::ready) comm = formed.get();
    if (!comm) {
      give_up(*rendezvous.calls, rendezvous.others(), "it was not there for the NCCL communicator");
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    comm_ = std::move(comm);
  }

  // Throws nothing: at the end of the process CUDA may be gone too, with all of its resources.
  ~Communicator() {
    if (abort()) cudaStreamDestroy(failing_);
  }

  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  /// Starts to end everything in flight; sets `failed` first, which kernels read once they are
  /// released. On a thread of its own: NCCL waits for its earlier launches, which may be queued
  /// behind a wait that only the watchdog can end.
  void end() {
    if (ending_.exchange(true)) return;
    std::thread([self = shared_from_this()] { self->fail(); }).detach();
  }

  /// Calls NCCL with the communicator. Note: the lock keeps the watchdog from aborting it in the
  /// middle.
  template <typename Calls>
  void use(const Calls& calls) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (comm_ == nullptr) {
      calls_->throw_if_failed();
      TORCH_CHECK_WITH(DistBackendError, false, "the communicator of this group has been aborted");
    }
    calls(comm_.get());
  }
  const uint32_t* failed() const { return &scratch_->failed; }
  int64_t rank() const { return rank_; }
  CallMonitor& calls() const { return *calls_; }

 private:
  void fail() noexcept {
    if (cudaSetDevice(device_.index()) != cudaSuccess) return;
    const uint32_t yes = 1;  // copied by an engine: no kernel has to end for it
    cudaMemcpyAsync(&scratch_->failed, &yes, sizeof(yes), cudaMemcpyHostToDevice, failing_);
    cudaStreamSynchronize(failing_);
    abort();
  }

  // Returns whether the device could be selected.
  bool abort() noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    int before = 0;
    if (cudaGetDevice(&before) != cudaSuccess || cudaSetDevice(device_.index()) != cudaSuccess) {
      return false;
    }
    comm_.reset();
    cudaSetDevice(before);
    return true;
  }

  const int64_t rank_;
  const std::shared_ptr<CallMonitor> calls_;
  c10::Device device_;
  std::mutex mutex_;  // guards comm_
  CommHandle comm_;
  SharedScratch scratch_;
  cudaStream_t failing_ = nullptr;  // writes scratch_->failed: no wait is queued here
  std::atomic<bool> ending_{false};
};

// An operation on a stream between two events, and the ranks that it waits for.
struct InFlight {
  std::shared_ptr<Communicator> communicator;
  std::shared_ptr<at::cuda::CUDAEvent> started, done;
  int64_t call = 0, step = 0;
  std::vector<int64_t> suspects;
  milliseconds patience{};
};

class WatchedTransfer : public TimeLimited {
 public:
  WatchedTransfer(InFlight transfer, const void* owner)
      : transfer_(std::move(transfer)), owner_(owner) {}

  const void* owner() const override { return owner_; }
  bool started() override { return transfer_.started->query(); }
  bool done() override { return transfer_.done->query(); }
  milliseconds timeout() const override { return transfer_.patience; }
  void under_way(milliseconds waited) override {
    constexpr auto kFirst = milliseconds(100);
    if (waited < next_look_) return;
    next_look_ = waited + std::clamp(waited / 20, kFirst, 5 * kFirst);
    CallMonitor& calls = transfer_.communicator->calls();
    if (const auto why = calls.ended_by(transfer_.call, transfer_.suspects)) {
      calls.fail(*why);
      return transfer_.communicator->end();
    }
    if (report_.due(waited)) {
      WaitReport::log(transfer_.communicator->rank(), transfer_.suspects,
                      "step " + std::to_string(transfer_.step) + " of the ring", waited);
    }
  }
  void expire() override {
    CallMonitor& calls = transfer_.communicator->calls();
    calls.fail(calls.blame(transfer_.call, transfer_.step, transfer_.suspects,
                           "no data came through NCCL"));
    transfer_.communicator->end();
  }

 private:
  InFlight transfer_;
  const void* owner_;
  milliseconds next_look_{100};
  WaitReport report_;
};

// A communicator of its own, on a high-priority side stream of `device`. It is aborted, and its
// waits released, when a transfer outlasts the group's timeout, and freed with the group.
class NcclTransport : public CollectiveTransport {
 public:
  NcclTransport(const Rendezvous& rendezvous, c10::Device device)
      : rendezvous_(rendezvous),
        communicator_(std::make_shared<Communicator>(rendezvous, device)),
        side_(take_stream(device)) {
    const auto started = new_event(false), done = new_event(false);
    started->record(side_);
    communicator_->form(rendezvous, side_);
    done->record(side_);
    last_ = done;
    watch(started, done, kOutsideCalls, /*step=*/0, rendezvous.others());
  }

  ~NcclTransport() override { return_stream(side_); }

  std::unique_ptr<Transfer> start(const Message& message) override {
    return std::move(start_as_one({message}).front());
  }

  std::vector<std::unique_ptr<Transfer>> start_all(const std::vector<Message>& messages) override {
    return starts_as_one(messages) ? start_as_one(messages) : MessageTransport::start_all(messages);
  }

  /// Where all ranks may start them by one launch: NCCL moves messages between more than eight
  /// ranks in batches, one after the other, and ranks that start other ones together, for a depth
  /// of their own or rows that do not travel, would wait for each other. Not where they are timed,
  /// or so large that the first one's block would be waited for.
  bool starts_as_one(const std::vector<Message>& messages) const override {
    constexpr int64_t kMaxRanks = 8;
    constexpr size_t kMaxBytes = size_t{16} << 20;
    const auto alone = [](const Message& message) {
      const auto is_large = [](const at::Tensor& x) {
        return x.defined() && x.nbytes() > kMaxBytes;
      };
      return message.timed || is_large(message.send) || is_large(message.receive);
    };
    return messages.size() >= 2 && rendezvous_.size <= kMaxRanks &&
           std::none_of(messages.begin(), messages.end(), alone);
  }

  /// Events of eager calls order the operations, and the watchdog queries each of these events.
  bool can_be_captured() const override { return false; }

  at::Tensor all_gather(const at::Tensor& mine, int64_t call) override {
    at::Tensor all = at::empty({rendezvous_.size, mine.numel()}, mine.options());
    const auto started = new_event(false), done = new_event(false);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    after_last(stream);
    started->record(stream);
    communicator_->use([&](ncclComm_t comm) {
      RINGATTN_NCCL_CHECK(ncclAllGather(mine.const_data_ptr(), all.mutable_data_ptr(),
                                        mine.nbytes(), ncclUint8, comm, stream.stream()));
    });
    done->record(stream);
    last_ = done;
    watch(started, done, call, 0, {(rendezvous_.rank + 1) % rendezvous_.size});
    return all;
  }

  void guard(const std::vector<at::Tensor>& results) override {
    fill_nan_if_failed(results, communicator_->failed(), /*num_flags=*/1);
  }

  void synchronize() override { Watchdog::get().drain(this); }

  bool idle() override { return last_->query(); }

 private:
  std::vector<std::unique_ptr<Transfer>> start_as_one(const std::vector<Message>& messages) {
    const bool timed = messages.front().timed;
    const auto started = new_event(timed), done = new_event(timed);
    at::cuda::CUDAEvent ready;
    ready.record(c10::cuda::getCurrentCUDAStream());
    ready.block(side_);

    after_last(side_);
    started->record(side_);
    communicator_->use([&](ncclComm_t comm) {
      NcclGroup group;
      for (const Message& message : messages) enqueue(message, comm);
      RINGATTN_NCCL_CHECK(group.end());
    });
    done->record(side_);
    last_ = done;

    std::vector<int64_t> suspects;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (const Message& message : messages) {
      if (message.receive.defined()) suspects.push_back(message.source);
      if (message.send.defined()) suspects.push_back(message.destination);
      transfers.push_back(std::make_unique<HoldingTransfer>(message, started, done, side_));
    }
    watch(started, done, messages.front().call, messages.front().step, std::move(suspects));
    return transfers;
  }

  void enqueue(const Message& message, ncclComm_t comm) const {
    if (message.send.defined()) {
      RINGATTN_NCCL_CHECK(ncclSend(message.send.const_data_ptr(), message.send.nbytes(), ncclUint8,
                                   static_cast<int>(message.destination), comm, side_.stream()));
    }
    if (message.receive.defined()) {
      RINGATTN_NCCL_CHECK(ncclRecv(message.receive.mutable_data_ptr(), message.receive.nbytes(),
                                   ncclUint8, static_cast<int>(message.source), comm,
                                   side_.stream()));
    }
  }

  // Note: operations of one communicator must not overlap, and they are enqueued on the side stream
  // as well as on the caller's current stream.
  void after_last(const c10::cuda::CUDAStream& stream) const { last_->block(stream); }

  void watch(std::shared_ptr<at::cuda::CUDAEvent> started,
             std::shared_ptr<at::cuda::CUDAEvent> done, int64_t call, int64_t step,
             std::vector<int64_t> suspects) {
    Watchdog::get().watch(std::make_unique<WatchedTransfer>(
        InFlight{communicator_, std::move(started), std::move(done), call, step,
                 std::move(suspects), rendezvous_.patience()},
        this));
  }

  const Rendezvous rendezvous_;
  std::shared_ptr<Communicator> communicator_;
  c10::cuda::CUDAStream side_;
  std::shared_ptr<at::cuda::CUDAEvent> last_;  // the end of this communicator's last operation
};

const bool registered = register_transport(
    {"nccl", /*preference=*/1, c10::kCUDA,
     [](const Rendezvous& rendezvous, c10::Device device) -> std::unique_ptr<MessageTransport> {
       return std::make_unique<NcclTransport>(rendezvous, device);
     }});

}  // namespace
}  // namespace ringattn
