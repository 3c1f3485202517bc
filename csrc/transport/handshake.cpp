// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <string>
#include <utility>

#include "core/remote_keys.h"
#include "transport/cuda/stream_words.h"
#include "transport/ring_group.h"
#include "transport/shared_memory.h"
#include "transport/signal_watch.h"
#include "transport/watchdog.h"

namespace ringattn {
namespace {

// What a rank has in shared memory, in words.
struct Layout {
  static constexpr int64_t kRanks = cuda::kMaxSignals;
  static constexpr int64_t kStaged = 0;
  static constexpr int64_t kRead = kStaged + kRanks;
  static constexpr int64_t kTag = kRead + kRanks;
  static constexpr int64_t kBlocksDone = kTag + kRanks;
  static constexpr int64_t kCalls = kBlocksDone + cuda::kStageCounters;
  static constexpr int64_t kFailed = kCalls + 1;
  static constexpr int64_t kOne = kFailed + 1;  // a 1 to copy from
  static constexpr int64_t kLaunch = kOne + 1;
  static constexpr int64_t kArrivals = 4096;
  static constexpr int64_t kWords = kLaunch + LaunchWords::kFirstArrival + kArrivals;
};

constexpr uint32_t kNotWaiting = Phase{}.word();
constexpr uint32_t kUntilRead = Phase{Phase::kUntilRead, 1}.word();
constexpr uint32_t until_staged(uint32_t least) { return Phase{Phase::kUntilStaged, least}.word(); }

uint32_t all_staged(int64_t num_kv_heads) {
  return staged_heads(static_cast<uint32_t>(num_kv_heads));
}

struct HostWords {
  volatile uint32_t phase;     // Phase::word
  volatile uint32_t calls;     // that have been staged
  volatile uint32_t given_up;  // for kernels that wait
  volatile uint32_t unlike;    // CallTags::unlike
};

// What a rank needs beside shared memory.
struct OwnParts {
  c10::Device device;
  HostWords* host = nullptr;
  cudaStream_t releasing = nullptr;  // past everything that waits
  std::string refusal;               // why it cannot have that, or nothing

  explicit OwnParts(c10::Device device) : device(device) {
    if (!cuda::StreamWords::available()) {
      refusal = "its driver has no stream memory operations";
      return;
    }
    const c10::cuda::CUDAGuard guard(device);
    cudaError_t error = cudaHostAlloc(&host, sizeof(HostWords), cudaHostAllocMapped);
    if (error == cudaSuccess) {
      host->phase = kNotWaiting;
      host->calls = 0;
      host->given_up = 0;
      host->unlike = 0;
      error = cudaStreamCreateWithFlags(&releasing, cudaStreamNonBlocking);
    }
    if (error == cudaSuccess) return;
    cudaGetLastError();  // it is not the next caller's
    refusal = cudaGetErrorString(error);
  }
  ~OwnParts() {
    on_device(device, [&] {
      if (releasing != nullptr) cudaStreamDestroy(releasing);
      if (host != nullptr) cudaFreeHost(host);
    });
  }
  OwnParts(const OwnParts&) = delete;
  OwnParts& operator=(const OwnParts&) = delete;
};

}  // namespace

/// The words in device memory, and those beside them in host memory.
class Handshake::Words : public WatchedWords {
 public:
  /// Collective.
  Words(RingGroup& group, c10::Device device)
      : rank_(group.rank()),
        others_(group.others()),
        device_(device),
        own_(device),
        shared_(group, device, Layout::kWords * sizeof(uint32_t), own_.refusal) {
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

  // As the device sees them: it reads and writes host memory, too.
  uint32_t* phase_shown() const { return const_cast<uint32_t*>(&own_.host->phase); }
  uint32_t* calls_shown() const { return const_cast<uint32_t*>(&own_.host->calls); }
  const uint32_t* given_up() const { return const_cast<const uint32_t*>(&own_.host->given_up); }
  uint32_t* unlike() const { return const_cast<uint32_t*>(&own_.host->unlike); }

  uint32_t phase() const override { return own_.host->phase; }
  uint32_t calls() const override { return own_.host->calls; }
  std::optional<Unlike> unlike_seen() const override {
    const uint32_t seen = own_.host->unlike;
    if (seen == 0) return {};
    return Unlike{others_[(seen - 1) % cuda::kMaxSignals], seen > cuda::kMaxSignals};
  }
  void give_up() override { own_.host->given_up = 1; }

  std::vector<uint32_t> come(Phase::Kind kind) override {
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
  params.tags.own = static_cast<uint32_t>(kind);
  params.tags.unlike = words_->unlike();
  for (const int64_t rank : words_->others()) {
    params.tags.told[params.num_signals] = words_->at(rank, Layout::kTag + words_->rank());
    params.tags.theirs[params.num_signals] = words_->at(Layout::kTag + rank);
    params.taken_back[params.num_signals] = words_->at(Layout::kRead + rank);
    params.signals[params.num_signals++] = words_->at(rank, Layout::kStaged + words_->rank());
    if (!params.kernel_fetches) continue;
    params.awaited[params.num_awaited++] = words_->at(Layout::kStaged + rank);
  }
  params.blocks_done = words_->at(Layout::kBlocksDone);
  params.failed = words_->at(Layout::kFailed);
  params.given_up = words_->given_up();
  params.calls = words_->at(Layout::kCalls);
  params.calls_shown = words_->calls_shown();
  params.phase_shown = words_->phase_shown();
  params.phase =
      until_staged(params.kernel_fetches ? kBeingStaged : all_staged(params.num_kv_heads));
}

void Handshake::take_staged(int64_t num_kv_heads, cudaStream_t stream) {
  cuda::StreamWords words;
  for (const int64_t rank : words_->others()) {
    words.wait_until(words_->at(Layout::kStaged + rank), all_staged(num_kv_heads));
  }
  for (const int64_t rank : words_->others()) words.write(words_->at(Layout::kStaged + rank), 0);
  words.write(words_->phase_shown(), kNotWaiting);
  C10_CUDA_CHECK(words.enqueue(stream));
}

void Handshake::tell_read(int64_t other, cudaStream_t stream) {
  // Note: a copy, since it goes to another device: the engine that copied the block does this after
  // it.
  C10_CUDA_CHECK(cudaMemcpyAsync(words_->at(other, Layout::kRead + words_->rank()),
                                 words_->at(Layout::kOne), sizeof(uint32_t), cudaMemcpyDefault,
                                 stream));
}

void Handshake::show_and_wait_until_read(cudaStream_t stream) {
  uint32_t* const phase = words_->phase_shown();
  cuda::StreamWords words;
  words.write(phase, kUntilRead);
  for (const int64_t rank : words_->others()) {
    words.wait_until(words_->at(Layout::kRead + rank), 1);
  }
  words.write(phase, kNotWaiting);
  C10_CUDA_CHECK(words.enqueue(stream));
}

Bringing Handshake::bringing(int64_t num_kv_heads) const {
  Bringing bringing;
  bringing.words = {words_->at(Layout::kLaunch), static_cast<int32_t>(Layout::kArrivals)};
  bringing.failed = words_->at(Layout::kFailed);
  bringing.given_up = words_->given_up();
  Notices& notices = bringing.notices;
  for (const int64_t rank : words_->others()) {
    notices.staged[notices.num_peers] = words_->at(Layout::kStaged + rank);
    notices.read_here[notices.num_peers] = words_->at(Layout::kRead + rank);
    notices.read[notices.num_peers++] = words_->at(rank, Layout::kRead + words_->rank());
  }
  notices.phase = words_->phase_shown();
  notices.phase_working = kNotWaiting;
  notices.phase_bringing = until_staged(all_staged(num_kv_heads));
  notices.phase_waiting = kUntilRead;
  bringing.follows_staging = true;
  return bringing;
}

const uint32_t* Handshake::failed() const { return words_->at(Layout::kFailed); }

void Handshake::describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank) {
  watch_->describe(call, std::move(step_of_rank));
}

}  // namespace ringattn
