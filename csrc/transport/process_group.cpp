// SPDX-License-Identifier: Apache-2.0
// The only place that knows c10d.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <map>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "transport/peers.h"
#include "transport/ring_group.h"

namespace ringattn {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// The group itself, as a transport, on CPU: the group's own threads (gloo) move the data.
class CpuTransfer : public Transfer {
 public:
  CpuTransfer(RingGroup& group, c10d::ProcessGroup& process_group, const Message& message)
      : group_(group), message_(message), start_(Clock::now()) {
    const int tag = group.tag(message.step);
    if (message.send.defined()) {
      std::vector<at::Tensor> tensors = {message_.send};
      group_.blaming(message_.call, message_.step, {message_.destination}, [&] {
        sending_ = process_group.send(tensors, static_cast<int>(message.destination), tag);
      });
    }
    if (message.receive.defined()) {
      std::vector<at::Tensor> tensors = {message_.receive};
      group_.blaming(message_.call, message_.step, {message_.source}, [&] {
        receiving_ = process_group.recv(tensors, static_cast<int>(message.source), tag);
      });
    }
  }

  void wait() override {
    complete(receiving_, message_.source);
    if (elapsed_ms_ == 0.0 && message_.receive.defined())
      elapsed_ms_ = std::chrono::duration<double, std::milli>(Clock::now() - start_).count();
  }
  void finish() override {
    wait();
    complete(sending_, message_.destination);
    message_.send.reset();
    message_.receive.reset();
  }
  double elapsed_ms() override { return elapsed_ms_; }

 private:
  void complete(c10::intrusive_ptr<c10d::Work>& work, int64_t other) {
    if (!work) return;
    group_.blaming(message_.call, message_.step, {other},
                   [&] { work->wait(group_.peers().timeout() * 4 / 5); });
    work.reset();
  }

  RingGroup& group_;
  Message message_;
  c10::intrusive_ptr<c10d::Work> sending_, receiving_;
  Clock::time_point start_;
  double elapsed_ms_ = 0.0;
};

// Operations of a group that are launched as one. Note: what an error leaves open would swallow
// every later operation of this thread.
class Coalescing {
 public:
  Coalescing(c10d::ProcessGroup& process_group, c10::DeviceType device_type)
      : process_group_(process_group), device_type_(device_type) {
    process_group_.startCoalescing(device_type_);
  }
  ~Coalescing() {
    if (!open_) return;
    try {
      process_group_.endCoalescing(device_type_);
    } catch (const std::exception&) {
      // The error that left it open is the one to be told of.
    }
  }
  Coalescing(const Coalescing&) = delete;
  Coalescing& operator=(const Coalescing&) = delete;

  c10::intrusive_ptr<c10d::Work> end() {
    open_ = false;
    return process_group_.endCoalescing(device_type_);
  }

 private:
  c10d::ProcessGroup& process_group_;
  c10::DeviceType device_type_;
  bool open_ = true;
};

// The same on an accelerator: the group's library (NCCL) moves the data, ordered through a side
// stream so that the current stream never waits for a transfer that it does not need yet.
class DeviceTransfer : public Transfer {
 public:
  DeviceTransfer(c10d::ProcessGroup& process_group, c10::Stream side, const Message& message)
      : device_(side.device()),
        timed_(message.timed),
        started_(side.device_type(), flag(message)),
        done_(side.device_type(), flag(message)) {
    const c10::impl::VirtualGuardImpl device(side.device_type());
    c10::Event ready(side.device_type());
    ready.record(device.getStream(side.device()));
    ready.block(side);

    const c10::StreamGuard on_side(side);
    started_.record(side);
    Coalescing coalescing(process_group, side.device_type());
    if (message.send.defined()) {
      std::vector<at::Tensor> tensors = {message.send};
      process_group.send(tensors, static_cast<int>(message.destination), 0);
      message.send.record_stream(side);
    }
    if (message.receive.defined()) {
      std::vector<at::Tensor> tensors = {message.receive};
      process_group.recv(tensors, static_cast<int>(message.source), 0);
      message.receive.record_stream(side);
    }
    coalescing.end()->wait();  // of the side stream, not of the host
    done_.record(side);
  }

  void wait() override {
    done_.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  }
  void finish() override {}
  double elapsed_ms() override { return timed_ ? started_.elapsedTime(done_) : 0.0; }

 private:
  static c10::EventFlag flag(const Message& message) {
    return message.timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT;
  }

  c10::Device device_;
  bool timed_;
  c10::Event started_, done_;
};

class ProcessGroupTransport : public CollectiveTransport {
 public:
  ProcessGroupTransport(RingGroup& group, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
                        c10::Device device)
      : group_(group), process_group_(std::move(process_group)) {
    // Note: NCCL's communicator is made by the first operation, and all ranks must take part in
    // that. A hop may have no message for some of them.
    if (!device.is_cpu()) {
      all_gather(at::empty({1}, at::TensorOptions(device).dtype(at::kFloat)), /*call=*/0);
    }
  }

  std::unique_ptr<Transfer> start(const Message& message) override {
    const c10::Device device = (message.send.defined() ? message.send : message.receive).device();
    if (device.is_cpu()) return std::make_unique<CpuTransfer>(group_, group_process(), message);
    if (!side_) side_ = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, -1);
    return std::make_unique<DeviceTransfer>(group_process(), *side_, message);
  }

  at::Tensor all_gather(const at::Tensor& mine, int64_t call) override {
    at::Tensor all = at::empty({group_.size(), mine.numel()}, mine.options());
    at::Tensor flat = all.view(-1), input = mine;
    group_.blaming(call, 0, group_.others(), [&] {
      const auto work = group_process()._allgather_base(flat, input);
      // On an accelerator this orders the stream and does not block: no timeout of ours.
      mine.is_cpu() ? work->wait(group_.peers().timeout() * 4 / 5) : work->wait();
    });
    return all;
  }

 private:
  c10d::ProcessGroup& group_process() {
    const auto process_group = process_group_.lock();
    TORCH_CHECK(process_group,
                "ringattn: the process group must be alive, got one that was destroyed");
    return *process_group;  // the registry, or whoever made the call, holds it
  }

  RingGroup& group_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group_;
  std::optional<c10::Stream> side_;
};

class ProcessGroupPeers : public Peers {
 public:
  ProcessGroupPeers(std::string name, c10::intrusive_ptr<c10d::ProcessGroup> group)
      : name_(std::move(name)),
        group_(group),
        rank_(group->getRank()),
        size_(group->getSize()),
        timeout_(find_timeout(*group)) {
    if (size_ == 1) return;
    store_ = group->getStore();
    try {
      spare_ = store_->clone();
    } catch (const std::exception& error) {
      TORCH_CHECK(false,
                  "ringattn: group must have a store that can be cloned, got one that says: ",
                  error.what());
    }
    const std::string counter = "ringattn/" + std::to_string(rank_);
    prefix_ = "ringattn/" + std::to_string(store().add(counter, 1)) + "/";
  }

  int64_t rank() const override { return rank_; }
  int64_t size() const override { return size_; }
  milliseconds timeout() const override { return timeout_; }

  bool current() const override {
    const auto group = group_.lock();
    if (!group) return false;
    try {
      return c10d::resolve_process_group(name_).get() == group.get();
    } catch (const c10::Error&) {
      return false;  // the name is gone
    }
  }

  void put(const std::string& key, const std::string& value) override {
    if (store_) store().set(prefix_ + key, value);
  }

  std::optional<std::string> get(const std::string& key, milliseconds patience) override {
    if (!store_) return {};
    try {
      store().wait({prefix_ + key}, patience);
      return store().get_to_str(prefix_ + key);
    } catch (const std::exception&) {
      return {};
    }
  }

  void remove(const std::string& key) override {
    if (store_) store().deleteKey(prefix_ + key);
  }

  bool carries(c10::DeviceType device_type) const override {
    const auto group = group_.lock();
    if (!group) return true;  // whoever uses it next is told that it is gone
    try {
      return group->getBackend(device_type).defined();
    } catch (const c10::Error&) {
      return false;
    }
  }

  std::unique_ptr<MessageTransport> transport(RingGroup& group, c10::Device device) override {
    return std::make_unique<ProcessGroupTransport>(group, group_.lock(), device);
  }

 private:
  // A clone has a connection of its own, and one for each thread: whoever waits on it keeps nobody
  // else from the store, least of all the watchdog. The second thread to come, which is the
  // watchdog as a rule, finds one that has been made while all was well: whoever has the store may
  // be who is gone, and connecting takes as long then as the store's own timeout.
  c10d::Store& store() {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& clone = clones_[std::this_thread::get_id()];
    if (!clone) clone = clones_.size() == 2 && spare_ ? std::move(spare_) : store_->clone();
    return *clone;
  }

  // The timeout that the group was made with; c10d's own default where no backend tells.
  static milliseconds find_timeout(c10d::ProcessGroup& group) {
    for (const auto type : {c10::kCPU, c10::kCUDA}) {
      try {
        const auto options = group.getBackend(type)->getBackendOptions();
        if (options) return options->timeout;
      } catch (const c10::Error&) {
        // no backend for this device type, or one that keeps its options to itself
      }
    }
    return ::kBackendDefaultTimeout;
  }

  std::string name_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> group_;
  int64_t rank_, size_;
  milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;  // the group's; null for a single rank
  std::mutex mutex_;                       // guards what follows
  c10::intrusive_ptr<c10d::Store> spare_;  // for the second thread
  std::map<std::thread::id, c10::intrusive_ptr<c10d::Store>> clones_;
  std::string prefix_;
};

}  // namespace

std::unique_ptr<Peers> find_peers(const std::string& group_name) {
  return std::make_unique<ProcessGroupPeers>(group_name, c10d::resolve_process_group(group_name));
}

}  // namespace ringattn
