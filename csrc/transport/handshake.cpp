// SPDX-License-Identifier: Apache-2.0
#include "transport/handshake.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <utility>

#include "core/remote_keys.h"
#include "transport/cuda/stream_words.h"
#include "transport/errand.h"
#include "transport/ring_group.h"
#include "transport/shared_memory.h"
#include "transport/watchdog.h"

namespace ringattn {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank has in shared memory, in words.
struct Layout {
  static constexpr int64_t kRanks = cuda::kMaxSignals;
  static constexpr int64_t kStaged = 0;
  static constexpr int64_t kRead = kStaged + kRanks;
  static constexpr int64_t kBlocksDone = kRead + kRanks;
  static constexpr int64_t kCalls = kBlocksDone + cuda::kStageCounters;
  static constexpr int64_t kFailed = kCalls + 1;
  static constexpr int64_t kOne = kFailed + 1;  // a 1 to copy from
  static constexpr int64_t kLaunch = kOne + 1;
  static constexpr int64_t kArrivals = 4096;
  static constexpr int64_t kWords = kLaunch + LaunchWords::kFirstArrival + kArrivals;
};

// What a stream is waiting for: words of one kind that are not as large yet.
struct Phase {
  enum Kind : uint32_t { kNotWaiting = 0, kUntilRead = 1, kUntilStaged = 2 };
  Kind kind = kNotWaiting;
  uint32_t least = 0;

  // In one word, which streams write and the watchdog reads.
  static constexpr uint32_t kKinds = 4;
  constexpr uint32_t word() const { return kKinds * least + kind; }
  static constexpr Phase from(uint32_t word) {
    return {static_cast<Kind>(word % kKinds), word / kKinds};
  }
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

class Handshake::State : public std::enable_shared_from_this<Handshake::State> {
 public:
  State(RingGroup& group, c10::Device device)
      : rank_(group.rank()),
        size_(group.size()),
        others_(group.others()),
        own_(device),
        group_(group.weak_from_this()),
        device_(device),
        patience_(group.peers().timeout() * 4 / 5),
        words_(group, device, Layout::kWords * sizeof(uint32_t), own_.refusal) {
    const c10::cuda::CUDAGuard guard(device);
    std::vector<uint32_t> initial(Layout::kWords, 0);
    for (int64_t rank = 0; rank < size_; ++rank) initial[Layout::kRead + rank] = 1;
    initial[Layout::kOne] = 1;
    C10_CUDA_CHECK(cudaMemcpy(word(0), initial.data(), initial.size() * sizeof(uint32_t),
                              cudaMemcpyHostToDevice));
    group.exchange("");  // nobody signals before all words are in place
  }

  uint32_t* word(int64_t index) const { return word_of(rank_, index); }
  uint32_t* word_of(int64_t rank, int64_t index) const {
    return static_cast<uint32_t*>(words_.of(rank)) + index;
  }

  /// A look at the streams, from the watchdog's thread. Whether there is nothing to look at any
  /// more.
  bool look() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) return true;
    const uint32_t phase = own_.host->phase, calls = own_.host->calls;
    const bool moved = phase != last_phase_ || calls != last_calls_;
    last_phase_ = phase;
    last_calls_ = calls;
    if (moved || phase == kNotWaiting) watch_anew();
    if (given_up_) {
      constexpr auto kAgain = std::chrono::milliseconds(500);
      if (moved || Clock::now() - released_ >= kAgain) release();
    } else if (phase != kNotWaiting && Clock::now() - since_ >= patience_) {
      give_up(Phase::from(phase));
    }
    return false;
  }

  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }

  void describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank) {
    const std::lock_guard<std::mutex> lock(mutex_);
    call_ = call;
    step_of_rank_ = std::move(step_of_rank);
  }

  bool all_read() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (given_up_) return true;
    const auto read = look_at(Layout::kRead);
    const auto has_read = [&](int64_t rank) { return read && (*read)[rank] != 0; };
    if (std::all_of(others_.begin(), others_.end(), has_read)) return true;
    if (!leaving_since_) leaving_since_ = Clock::now();
    return Clock::now() - *leaving_since_ >= patience_;
  }

  const int64_t rank_, size_;
  const std::vector<int64_t> others_;
  OwnParts own_;

 private:
  friend class Handshake;

  void watch_anew() {
    since_ = Clock::now();
    suspected_ = false;
    silent_since_.reset();
  }

  void give_up(Phase phase) {
    const auto seen = look_at(phase.kind == Phase::kUntilRead ? Layout::kRead : Layout::kStaged);
    std::vector<int64_t> suspects = others_;
    if (seen) {
      silent_since_.reset();
      const auto has_come = [&](int64_t rank) { return (*seen)[rank] >= phase.least; };
      suspects.erase(std::remove_if(suspects.begin(), suspects.end(), has_come), suspects.end());
      if (suspects.empty()) return watch_anew();  // a call is over, or its kernel has yet to begin
      // The next look, a while later, must see them too: a call that begins takes its words back.
      if (!std::exchange(suspected_, true)) return;
    } else {
      // Nobody gets to the device any more. That may be for what waits there, and have no end.
      if (!silent_since_) silent_since_ = Clock::now();
      if (Clock::now() - *silent_since_ < patience_ / 16) return;
    }
    if (auto group = group_.lock()) {
      const int64_t step = step_of_rank_ ? (*step_of_rank_)[suspects.front()] : 1;
      group->fail(group->blame(call_, step, suspects, "no signal came through shared memory"));
      // This may be the last to hold it, and its end comes back here for the lock.
      Watchdog::get().free_later(std::move(group));
    }
    given_up_ = true;
    own_.host->given_up = 1;
    release();
  }

  // Whether `body`, which talks to the device, is through soon.
  bool is_soon_through(std::function<void()> body) {
    const auto soon = std::min(patience_ / 16, std::chrono::milliseconds(1000));
    return talking_.run(soon, [self = shared_from_this(), body = std::move(body)] {
      const c10::cuda::CUDAGuard guard(self->device_);
      cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;  // captures are others' business
      cudaThreadExchangeStreamCaptureMode(&mode);
      body();
    });
  }

  // Nothing where the driver does not answer.
  std::optional<std::vector<uint32_t>> look_at(int64_t first) {
    const auto seen = std::make_shared<std::vector<uint32_t>>(size_, 0);
    const bool answered = is_soon_through([this, first, seen] {
      cudaMemcpyAsync(seen->data(), word(first), size_ * sizeof(uint32_t), cudaMemcpyDeviceToHost,
                      own_.releasing);
      cudaStreamSynchronize(own_.releasing);
    });
    if (!answered) return {};
    return *seen;
  }

  // Lets everything pass that waits, now and later: calls that the host made before it knew are
  // still to come. What they compute is NaN.
  void release() {
    const bool through = is_soon_through([this] {
      const auto set = [&](int64_t index, int64_t count, uint32_t value) {
        const std::vector<uint32_t> values(count, value);
        cudaMemcpyAsync(word(index), values.data(), count * sizeof(uint32_t),
                        cudaMemcpyHostToDevice, own_.releasing);
        cudaStreamSynchronize(own_.releasing);
      };
      set(Layout::kFailed, 1, 1);  // first: who passes must know
      set(Layout::kStaged, Layout::kRanks, INT32_MAX);
      set(Layout::kRead, Layout::kRanks, 1);
    });
    if (through) released_ = Clock::now();
  }

  std::weak_ptr<RingGroup> group_;
  c10::Device device_;
  std::chrono::milliseconds patience_;
  std::mutex mutex_;  // guards what follows
  int64_t call_ = 0;
  std::shared_ptr<const std::vector<int64_t>> step_of_rank_;
  bool closed_ = false, given_up_ = false;
  bool suspected_ = false;                          // somebody, by the last look
  std::optional<Clock::time_point> silent_since_;   // the driver does not answer
  Clock::time_point released_;                      // what waits, last; long ago: never
  Errand talking_;                                  // with the device
  std::optional<Clock::time_point> leaving_since_;  // the group is gone, and not all has been read
  uint32_t last_phase_ = kNotWaiting, last_calls_ = 0;
  Clock::time_point since_ = Clock::now();
  SharedMemory words_;
};

namespace {

// Looks after a handshake for as long as it lives.
template <typename State>
class Lookout : public Watched {
 public:
  explicit Lookout(std::shared_ptr<State> state) : state_(std::move(state)) {}
  const void* owner() const override { return state_.get(); }
  bool look() override { return state_->look(); }

 private:
  std::shared_ptr<State> state_;
};

}  // namespace

Handshake::Handshake(RingGroup& group, c10::Device device) {
  TORCH_CHECK(group.size() <= cuda::kMaxSignals,
              "ringattn: transport \"symmetric\" must have at most ", cuda::kMaxSignals,
              " ranks, got ", group.size());
  state_ = std::make_shared<State>(group, device);
  Watchdog::get().watch(std::make_unique<Lookout<State>>(state_));
}

Handshake::~Handshake() { state_->close(); }

bool Handshake::all_read() { return state_->all_read(); }

void Handshake::give_signals(cuda::StageParams& params) const {
  for (const int64_t rank : state_->others_) {
    params.taken_back[params.num_signals] = state_->word(Layout::kRead + rank);
    params.signals[params.num_signals++] = state_->word_of(rank, Layout::kStaged + state_->rank_);
    if (!params.kernel_fetches) continue;
    params.awaited[params.num_awaited++] = state_->word(Layout::kStaged + rank);
  }
  params.blocks_done = state_->word(Layout::kBlocksDone);
  params.failed = state_->word(Layout::kFailed);
  params.given_up = const_cast<const uint32_t*>(&state_->own_.host->given_up);
  params.calls = state_->word(Layout::kCalls);
  params.calls_shown = const_cast<uint32_t*>(&state_->own_.host->calls);
  params.phase_shown = const_cast<uint32_t*>(&state_->own_.host->phase);
  params.phase =
      until_staged(params.kernel_fetches ? kBeingStaged : all_staged(params.num_kv_heads));
}

void Handshake::take_staged(int64_t num_kv_heads, cudaStream_t stream) {
  cuda::StreamWords words;
  for (const int64_t rank : state_->others_) {
    words.wait_until(state_->word(Layout::kStaged + rank), all_staged(num_kv_heads));
  }
  for (const int64_t rank : state_->others_) words.write(state_->word(Layout::kStaged + rank), 0);
  words.write(const_cast<uint32_t*>(&state_->own_.host->phase), kNotWaiting);
  C10_CUDA_CHECK(words.enqueue(stream));
}

void Handshake::tell_read(int64_t other, cudaStream_t stream) {
  // Note: a copy, since it goes to another device: the engine that copied the block does this after
  // it.
  C10_CUDA_CHECK(cudaMemcpyAsync(state_->word_of(other, Layout::kRead + state_->rank_),
                                 state_->word(Layout::kOne), sizeof(uint32_t), cudaMemcpyDefault,
                                 stream));
}

void Handshake::show_and_wait_until_read(cudaStream_t stream) {
  uint32_t* const phase = const_cast<uint32_t*>(&state_->own_.host->phase);
  cuda::StreamWords words;
  words.write(phase, kUntilRead);
  for (const int64_t rank : state_->others_) {
    words.wait_until(state_->word(Layout::kRead + rank), 1);
  }
  words.write(phase, kNotWaiting);
  C10_CUDA_CHECK(words.enqueue(stream));
}

Bringing Handshake::bringing(int64_t num_kv_heads) const {
  Bringing bringing;
  bringing.words = {state_->word(Layout::kLaunch), static_cast<int32_t>(Layout::kArrivals)};
  bringing.failed = state_->word(Layout::kFailed);
  bringing.given_up = const_cast<const uint32_t*>(&state_->own_.host->given_up);
  Notices& notices = bringing.notices;
  for (const int64_t rank : state_->others_) {
    notices.staged[notices.num_peers] = state_->word(Layout::kStaged + rank);
    notices.read_here[notices.num_peers] = state_->word(Layout::kRead + rank);
    notices.read[notices.num_peers++] = state_->word_of(rank, Layout::kRead + state_->rank_);
  }
  notices.phase = const_cast<uint32_t*>(&state_->own_.host->phase);
  notices.phase_working = kNotWaiting;
  notices.phase_bringing = until_staged(all_staged(num_kv_heads));
  notices.phase_waiting = kUntilRead;
  bringing.follows_staging = true;
  return bringing;
}

const uint32_t* Handshake::failed() const { return state_->word(Layout::kFailed); }

void Handshake::describe(int64_t call, std::shared_ptr<const std::vector<int64_t>> step_of_rank) {
  state_->describe(call, std::move(step_of_rank));
}

}  // namespace ringattn
