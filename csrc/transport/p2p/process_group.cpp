// SPDX-License-Identifier: Apache-2.0
#include "transport/p2p/process_group.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>
#include <chrono>
#include <optional>

#include "transport/group/peer_wait.h"
#include "transport/group/rendezvous.h"
#include "transport/runtime/wait_ticker.h"

namespace ringattn {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Half of a message, on CPU: the group's own threads (gloo) move the data.
class CpuOperation : public Wakeable {
 public:
  CpuOperation(const Rendezvous& rendezvous, std::shared_ptr<Unfinished> unfinished,
               const Message& message)
      : rendezvous_(rendezvous),
        unfinished_(std::move(unfinished)),
        call_(message.call),
        step_(message.step),
        tag_(rendezvous.calls->message_tag(message.returns ? -message.step : message.step)) {}
  CpuOperation(const CpuOperation&) = delete;
  CpuOperation& operator=(const CpuOperation&) = delete;
  ~CpuOperation() override {
    if (work_) unfinished_->keep(std::move(work_));
  }

  void send(c10d::ProcessGroup& process_group, const at::Tensor& tensor, int64_t to) {
    start(
        to,
        [&](std::vector<at::Tensor>& tensors, int tag) {
          work_ = process_group.send(tensors, static_cast<int>(to), tag);
        },
        tensor);
  }
  void receive(c10d::ProcessGroup& process_group, const at::Tensor& tensor, int64_t from) {
    start(
        from,
        [&](std::vector<at::Tensor>& tensors, int tag) {
          work_ = process_group.recv(tensors, static_cast<int>(from), tag);
        },
        tensor);
  }

  void wait() {
    if (!work_) return;
    wait_until_completed();
    work_.reset();  // after the registration has ended: the ticker wakes work_ until then
  }

  void wake() override {
    try {
      if (can_wake_) work_->abort();
    } catch (const std::exception&) {
      can_wake_ = false;  // a backend other than gloo
    }
  }

 private:
  template <typename Start>
  void start(int64_t other, const Start& start, const at::Tensor& tensor) {
    other_ = other;
    std::vector<at::Tensor> tensors = {tensor};
    try {
      start(tensors, tag_);
    } catch (const std::exception& error) {
      lose(error, PeerWait(rendezvous_, call_, step_, {other}));
    }
  }

  void wait_until_completed() {
    PeerWait wait(rendezvous_, call_, step_, {other_});
    const WaitTicker::Registration ticks(*this);
    while (!completed(wait)) {
      wait.poll();
      if (!wait.expired()) continue;
      CallMonitor& calls = *rendezvous_.calls;
      calls.fail(calls.blame(call_, wait.place(), {other_}, "no message came"));
      calls.throw_if_failed();
    }
  }

  // False: the ticker has woken this thread. Note: gloo's own timeout is never reached, see
  // WaitTicker; it is there for backends that cannot be woken.
  bool completed(const PeerWait& wait) {
    constexpr auto kPastTheDeadline = milliseconds(2000);
    try {
      return work_->wait(rendezvous_.timeout + kPastTheDeadline);
    } catch (const std::exception& error) {
      lose(error, wait);
      throw;  // never: the line above throws
    }
  }

  void lose(const std::exception& error, const PeerWait& wait) {
    const std::string reason = reason_of(error);
    rendezvous_.calls->lose(call_, other_, wait.place(), reason.substr(0, reason.find('\n')));
  }

  const Rendezvous& rendezvous_;
  const std::shared_ptr<Unfinished> unfinished_;
  const int64_t call_, step_;
  const int32_t tag_;
  int64_t other_ = 0;
  c10::intrusive_ptr<c10d::Work> work_;
  std::atomic<bool> can_wake_{true};
};

// The group itself, as a transport, on CPU.
class CpuTransfer : public Transfer {
 public:
  CpuTransfer(const Rendezvous& rendezvous, c10d::ProcessGroup& process_group,
              const std::shared_ptr<Unfinished>& unfinished, const Message& message)
      : sending_(rendezvous, unfinished, message),
        receiving_(rendezvous, unfinished, message),
        receives_(message.receive.defined()),
        start_(Clock::now()) {
    if (message.send.defined()) sending_.send(process_group, message.send, message.destination);
    if (receives_) receiving_.receive(process_group, message.receive, message.source);
  }

  void wait() override {
    receiving_.wait();
    if (elapsed_ms_ == 0.0 && receives_)
      elapsed_ms_ = std::chrono::duration<double, std::milli>(Clock::now() - start_).count();
  }
  void finish() override {
    wait();
    sending_.wait();
  }
  double elapsed_ms() override { return elapsed_ms_; }

 private:
  CpuOperation sending_, receiving_;
  bool receives_;
  Clock::time_point start_;
  double elapsed_ms_ = 0.0;
};

// Operations of a group that are launched as one. Note: coalescing that an error leaves open would
// swallow every later operation of this thread.
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
      // The error that left it open is reported instead.
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
  ProcessGroupTransport(const Rendezvous& rendezvous,
                        c10::intrusive_ptr<c10d::ProcessGroup> process_group, c10::Device device)
      : rendezvous_(rendezvous),
        process_group_(std::move(process_group)),
        tags_messages_(device.is_cpu()) {
    // Note: NCCL's communicator is made by the first operation, and all ranks must take part in
    // that. A hop may have no message for some of them.
    if (!device.is_cpu()) {
      all_gather(at::empty({1}, at::TensorOptions(device).dtype(at::kFloat)), /*call=*/0);
    }
  }

  std::unique_ptr<Transfer> start(const Message& message) override {
    const c10::Device device = (message.send.defined() ? message.send : message.receive).device();
    if (device.is_cpu()) {
      return std::make_unique<CpuTransfer>(rendezvous_, group_process(), unfinished_, message);
    }
    if (!side_) side_ = c10::impl::VirtualGuardImpl(device.type()).getNewStream(device, -1);
    return std::make_unique<DeviceTransfer>(group_process(), *side_, message);
  }

  bool tags_messages() const override { return tags_messages_; }

  at::Tensor all_gather(const at::Tensor& mine, int64_t call) override {
    at::Tensor all = at::empty({rendezvous_.size, mine.numel()}, mine.options());
    if (mine.is_cpu()) {
      gather_messages(mine, all, call);
      return all;
    }
    at::Tensor flat = all.view(-1), input = mine;
    try {
      group_process()._allgather_base(flat, input)->wait();  // of the stream, not of the host
    } catch (const std::exception& error) {
      CallMonitor& calls = *rendezvous_.calls;
      calls.fail(calls.blame(call, /*step=*/0, rendezvous_.others(), reason_of(error)));
      calls.throw_if_failed();
    }
    return all;
  }

 private:
  // Note: not a collective of gloo's. Those are matched by how many each rank has begun, so a rank
  // that refuses one is out of step with the others for good; messages are matched by their tags.
  void gather_messages(const at::Tensor& mine, const at::Tensor& all, int64_t call) {
    all[rendezvous_.rank].copy_(mine.view(-1));
    // Where nothing is to be sent a byte shows that the ranks are in one call.
    const bool sends_rows = mine.numel() > 0;
    std::vector<std::unique_ptr<Transfer>> transfers;
    for (int64_t step = 1; step < rendezvous_.size; ++step) {
      Message message;
      message.call = call;
      message.step = step;
      message.destination = (rendezvous_.rank + step) % rendezvous_.size;
      message.source = (rendezvous_.rank - step + rendezvous_.size) % rendezvous_.size;
      message.send = sends_rows ? mine : at::zeros({1}, at::kByte);
      message.receive = sends_rows ? all[message.source] : at::empty({1}, at::kByte);
      transfers.push_back(start(message));
    }
    for (const auto& transfer : transfers) transfer->finish();
  }

  c10d::ProcessGroup& group_process() {
    const auto process_group = process_group_.lock();
    TORCH_CHECK(process_group,
                "ringattn: the process group must be alive, got one that was destroyed");
    return *process_group;  // c10d's registry or the caller holds it
  }

  const Rendezvous rendezvous_;
  c10::weak_intrusive_ptr<c10d::ProcessGroup> process_group_;
  const bool tags_messages_;
  const std::shared_ptr<Unfinished> unfinished_ = std::make_shared<Unfinished>();  // on CPU
  std::optional<c10::Stream> side_;
};

}  // namespace

std::unique_ptr<MessageTransport> make_process_group_transport(
    const Rendezvous& rendezvous, c10::intrusive_ptr<c10d::ProcessGroup> process_group,
    c10::Device device) {
  return std::make_unique<ProcessGroupTransport>(rendezvous, std::move(process_group), device);
}

}  // namespace ringattn
