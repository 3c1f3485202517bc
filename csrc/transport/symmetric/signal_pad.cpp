// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/signal_pad.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <utility>

#include "peer_sync/protocol.h"
#include "transport/group/ring_group.h"
#include "transport/runtime/cuda_event_transfer.h"
#include "transport/runtime/watchdog.h"
#include "transport/symmetric/host_signal_pad.h"
#include "transport/symmetric/peer_device_memory.h"
#include "transport/symmetric/peer_host_memory.h"
#include "transport/symmetric/signal_watchdog.h"
#include "transport/symmetric/stream_memops.h"

namespace ringattn {
namespace {

// What a rank has in shared device memory, in words.
struct Layout {
  static constexpr int64_t kRanks = cuda::kMaxSignals;
  static constexpr int64_t kStaged = 0;
  static constexpr int64_t kRead = kStaged + kRanks;
  static constexpr int64_t kTag = kRead + kRanks;
  static constexpr int64_t kBlocksDone = kTag + kRanks;
  static constexpr int64_t kCalls = kBlocksDone + cuda::kStageCounters;
  static constexpr int64_t kFailed = kCalls + 1;
  static constexpr int64_t kSeen = kFailed + 1;  // of HostWords::given_up, by streams
  static constexpr int64_t kOne = kSeen + 1;     // a 1 to copy from
  static constexpr int64_t kLaunch = kOne + 1;
  static constexpr int64_t kArrivals = 4096;
  static constexpr int64_t kWords = kLaunch + LaunchWords::kFirstArrival + kArrivals;
};

constexpr uint32_t kNotWaiting = Phase{}.word();
constexpr uint32_t kUntilRead = Phase{Phase::kUntilRead, 1}.word();
constexpr uint32_t until_staged(uint32_t least) { return Phase{Phase::kUntilStaged, least}.word(); }
constexpr uint32_t kStreamUntilRead = Phase{Phase::kStreamUntilRead, 1}.word();
constexpr uint32_t kStreamUntilStaged = Phase{Phase::kStreamUntilStaged, 1}.word();

// What streams wait for is 0 before.
uint32_t as_word(int32_t kind) { return std::max<uint32_t>(static_cast<uint32_t>(kind), 1); }

// What a rank needs beside shared memory.
struct OwnParts {
  c10::Device device;
  cudaStream_t releasing = nullptr;  // past everything that waits
  std::string refusal;               // why it cannot have that, or nothing

  explicit OwnParts(c10::Device device) : device(device) {
    if (!cuda::StreamWords::available()) {
      refusal = "its driver has no stream memory operations";
      return;
    }
    const c10::cuda::CUDAGuard guard(device);
    const cudaError_t error = cudaStreamCreateWithFlags(&releasing, cudaStreamNonBlocking);
    if (error == cudaSuccess) return;
    cudaGetLastError();  // it is not the next caller's
    refusal = cudaGetErrorString(error);
  }
  ~OwnParts() {
    on_device(device, [&] {
      if (releasing != nullptr) cudaStreamDestroy(releasing);
    });
  }
  OwnParts(const OwnParts&) = delete;
  OwnParts& operator=(const OwnParts&) = delete;
};

// Collective. Where ranks are refused it, nobody sees the others' device memory any more either.
std::unique_ptr<SharedHostMemory> share_host_memory(RingGroup& group, c10::Device device,
                                                    SharedMemory& device_memory) {
  try {
    return std::make_unique<SharedHostMemory>(group, device, group.size() * sizeof(HostWords));
  } catch (const c10::DistBackendError&) {
    throw;  // a rank is gone
  } catch (const c10::Error&) {
    device_memory.close_others();
    group.exchange("");
    throw;
  }
}

// The words of each rank, this rank's own made anew.
std::vector<HostWords*> host_words(void* memory, int64_t rank, int64_t num_ranks) {
  auto* const words = static_cast<HostWords*>(memory);
  new (words + rank) HostWords;
  for (int64_t other = 0; other < num_ranks; ++other) words[rank].read[other] = 1;
  std::vector<HostWords*> of_ranks;
  for (int64_t other = 0; other < num_ranks; ++other) of_ranks.push_back(words + other);
  return of_ranks;
}

}  // namespace

/// The words in device memory, and those in host memory.
class Handshake::Words : public WatchedWords {
 public:
  /// Collective.
  Words(RingGroup& group, c10::Device device)
      : rank_(group.rank()),
        others_(group.others()),
        device_(device),
        own_(device),
        shared_(group, device, Layout::kWords * sizeof(uint32_t), own_.refusal),
        host_memory_(share_host_memory(group, device, shared_)),
        host_(host_words(host_memory_->data(), rank_, group.size()), rank_) {
    const c10::cuda::CUDAGuard guard(device);
    std::vector<uint32_t> initial(Layout::kWords, 0);
    for (int64_t rank = 0; rank < group.size(); ++rank) initial[Layout::kRead + rank] = 1;
    initial[Layout::kOne] = 1;
    C10_CUDA_CHECK(cudaMemcpy(at(0), initial.data(), initial.size() * sizeof(uint32_t),
                              cudaMemcpyHostToDevice));
    group.exchange("");  // nobody signals before all words are in place
  }

  int64_t rank() const { return rank_; }
  const std::vector<int64_t>& others() const { return others_; }
  uint32_t* at(int64_t index) const { return at(rank_, index); }
  uint32_t* at(int64_t rank, int64_t index) const {
    return static_cast<uint32_t*>(shared_.of(rank)) + index;
  }
  HostWords& host() const { return host_.own(); }
  HostWords& host(int64_t rank) const { return host_.of(rank); }
  /// As the device sees it.
  uint32_t* shown(const HostWords::Word& word) const {
    return static_cast<uint32_t*>(host_memory_->on_device(&word));
  }

  uint32_t phase() const override { return host().phase; }
  uint32_t calls() const override { return host().calls; }
  std::optional<Unlike> unlike_seen() const override { return host_.unlike_seen(); }
  void give_up() override { host_.give_up(); }

  std::vector<uint32_t> come(Phase::Kind kind) override {
    if (Phase{kind}.in_host_memory()) return host_.come(kind);
    std::vector<uint32_t> words(others_.size() + 1, 0);
    const int64_t first = kind == Phase::kUntilRead ? Layout::kRead : Layout::kStaged;
    copy(words.data(), at(first), words.size());
    return words;
  }

  void release() override {
    const auto set = [&](int64_t index, int64_t count, uint32_t value) {
      const std::vector<uint32_t> values(count, value);
      copy(at(index), values.data(), count);
    };
    set(Layout::kFailed, 1, kGivenUp);  // first: who passes must know
    set(Layout::kStaged, Layout::kRanks, INT32_MAX);
    set(Layout::kRead, Layout::kRanks, 1);
  }

 private:
  // On a thread of an errand's own, past everything that waits. Where the device is lost nothing
  // waits there any more.
  void copy(uint32_t* to, const uint32_t* from, size_t count) const {
    const c10::cuda::CUDAGuard guard(device_);
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // captures are others' business
    cudaThreadExchangeStreamCaptureMode(&mode);
    cudaMemcpyAsync(to, from, count * sizeof(uint32_t), cudaMemcpyDefault, own_.releasing);
    cudaStreamSynchronize(own_.releasing);
  }

  const int64_t rank_;
  const std::vector<int64_t> others_;
  c10::Device device_;
  OwnParts own_;
  SharedMemory shared_;
  std::unique_ptr<SharedHostMemory> host_memory_;
  HostSignals host_;
};

namespace {

// Looks after a handshake for as long as it lives.
class Lookout : public Watched {
 public:
  explicit Lookout(std::shared_ptr<SignalWatch> watch) : watch_(std::move(watch)) {}
  const void* owner() const override { return watch_.get(); }
  bool look() override { return watch_->look(); }

 private:
  std::shared_ptr<SignalWatch> watch_;
};

}  // namespace

Handshake::Handshake(RingGroup& group, c10::Device device) {
  TORCH_CHECK(group.size() <= cuda::kMaxSignals,
              "ringattn: transport \"symmetric\" must have at most ", cuda::kMaxSignals,
              " ranks, got ", group.size());
  words_ = std::make_shared<Words>(group, device);
  watch_ = std::make_shared<SignalWatch>(group, words_);
  Watchdog::get().watch(std::make_unique<Lookout>(watch_));
}

Handshake::~Handshake() { watch_->close(); }

bool Handshake::all_read() { return watch_->all_read(); }

void Handshake::notice() { watch_->notice(); }

void Handshake::give_signals(cuda::StageParams& params, int32_t kind) const {
  HostWords& host = words_->host();
  params.tags.own = as_word(kind);
  params.tags.unlike = words_->shown(host.unlike);
  for (const int64_t rank : words_->others()) {
    const int place = params.num_signals++;
    params.taken_back_for_streams[place] = words_->shown(host.read[rank]);
    params.signals_for_streams[place] = words_->shown(words_->host(rank).staged[words_->rank()]);
    params.tags.told[place] = words_->at(rank, Layout::kTag + words_->rank());
    params.tags.theirs[place] = words_->at(Layout::kTag + rank);
    params.taken_back[place] = words_->at(Layout::kRead + rank);
    params.signals[place] = words_->at(rank, Layout::kStaged + words_->rank());
    if (!params.kernel_fetches) continue;
    params.awaited[params.num_awaited++] = words_->at(Layout::kStaged + rank);
  }
  params.blocks_done = words_->at(Layout::kBlocksDone);
  params.failed = words_->at(Layout::kFailed);
  params.seen = words_->at(Layout::kSeen);
  params.given_up = words_->shown(host.given_up);
  params.calls = words_->at(Layout::kCalls);
  params.calls_shown = words_->shown(host.calls);
  params.phase_shown = words_->shown(host.phase);
  params.phase = until_staged(kBeingStaged);  // streams say what they wait for by themselves
}

void Handshake::wait_until_staged(int32_t kind, cudaStream_t stream) {
  HostWords& host = words_->host();
  cuda::StreamWords words;
  words.write(words_->shown(host.kind), as_word(kind));
  words.write(words_->shown(host.phase), kStreamUntilStaged);
  for (const int64_t rank : words_->others()) {
    words.wait_until(words_->shown(host.staged[rank]), as_word(kind));
  }
  // What kernels wait for was told before that.
  for (const int64_t rank : words_->others()) {
    words.write(words_->shown(host.staged[rank]), 0);
    words.write(words_->at(Layout::kStaged + rank), 0);
  }
  words.write(words_->shown(host.phase), kNotWaiting);
  C10_CUDA_CHECK(words.enqueue(stream));
}

void Handshake::tell_read(int64_t other, cudaStream_t stream) {
  cuda::StreamWords words;
  uint32_t* const read = words_->shown(words_->host(other).read[words_->rank()]);
  words.write(read, 1);
  words.wait_until(read, 1);  // it is there, not only under way: nobody takes it back before
  C10_CUDA_CHECK(words.enqueue(stream));
  // Note: a copy, since it goes to another device: a front end writes to its own.
  C10_CUDA_CHECK(cudaMemcpyAsync(words_->at(other, Layout::kRead + words_->rank()),
                                 words_->at(Layout::kOne), sizeof(uint32_t), cudaMemcpyDefault,
                                 stream));
}

void Handshake::wait_until_read(cudaStream_t stream) {
  HostWords& host = words_->host();
  cuda::StreamWords words;
  words.write(words_->shown(host.phase), kStreamUntilRead);
  for (const int64_t rank : words_->others()) words.wait_until(words_->shown(host.read[rank]), 1);
  words.write(words_->shown(host.phase), kNotWaiting);
  C10_CUDA_CHECK(words.enqueue(stream));
  // Who has been let pass must know before anything is staged or handed out.
  C10_CUDA_CHECK(cudaMemcpyAsync(words_->at(Layout::kSeen), words_->shown(host.given_up),
                                 sizeof(uint32_t), cudaMemcpyDefault, stream));
}

Bringing Handshake::bringing(int64_t num_kv_heads) const {
  Bringing bringing;
  bringing.words = {words_->at(Layout::kLaunch), static_cast<int32_t>(Layout::kArrivals)};
  bringing.failed = words_->at(Layout::kFailed);
  bringing.given_up = words_->shown(words_->host().given_up);
  Notices& notices = bringing.notices;
  for (const int64_t rank : words_->others()) {
    notices.staged[notices.num_peers] = words_->at(Layout::kStaged + rank);
    notices.read_here[notices.num_peers] = words_->at(Layout::kRead + rank);
    notices.staged_for_streams[notices.num_peers] = words_->shown(words_->host().staged[rank]);
    notices.read_for_streams[notices.num_peers] =
        words_->shown(words_->host(rank).read[words_->rank()]);
    notices.read[notices.num_peers++] = words_->at(rank, Layout::kRead + words_->rank());
  }
  notices.phase = words_->shown(words_->host().phase);
  notices.phase_working = kNotWaiting;
  notices.phase_bringing = until_staged(staged_heads(static_cast<uint32_t>(num_kv_heads)));
  notices.phase_told = Phase{Phase::kUntilTold, 1}.word();
  notices.phase_waiting = kUntilRead;
  bringing.follows_staging = true;
  return bringing;
}

void Handshake::poison_if_failed(const std::vector<at::Tensor>& results) const {
  static_assert(Layout::kSeen == Layout::kFailed + 1);
  ringattn::poison_if_failed(results, words_->at(Layout::kFailed), 2);
}

void Handshake::describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank) {
  watch_->describe(call, std::move(step_of_rank));
}

}  // namespace ringattn
