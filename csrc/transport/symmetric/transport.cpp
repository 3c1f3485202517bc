// SPDX-License-Identifier: Apache-2.0
#include "transport/symmetric/transport.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>

#include <algorithm>
#include <utility>

#include "transport/registry.h"
#include "transport/runtime/stream_pool.h"

namespace ringattn {

using c10::cuda::CUDAStream;
using c10::cuda::getCurrentCUDAStream;

SymmetricTransport::SymmetricTransport(const Rendezvous& rendezvous, c10::Device device)
    : rendezvous_(rendezvous),
      device_(device),
      signal_pad_(rendezvous, device),
      side_stream_(take_stream(device)),
      signal_stream_(take_stream(device)),
      delays_(device) {}

SymmetricTransport::~SymmetricTransport() {
  return_stream(side_stream_);
  return_stream(signal_stream_);
}

void SymmetricTransport::synchronize() {
  if (!calls_.any()) return;
  calls_.synchronize();
  at::cuda::CUDAEvent copied;
  copied.record(side_stream_);
  copied.synchronize();
  signal_pad_.check_mismatch();
}

bool SymmetricTransport::idle() {
  if (!calls_.any()) return true;
  if (!calls_.done()) return false;
  if (cudaStreamQuery(side_stream_) == cudaErrorNotReady) {
    cudaGetLastError();  // not an error
    return false;
  }
  return signal_pad_.all_read();
}

void SymmetricTransport::reserve(std::unique_ptr<PeerDeviceMemory>& memory, int64_t bytes) {
  if (has(memory, bytes)) return;
  check_may_grow();
  forget_plans();
  if (memory) {
    const auto captured = rendezvous_.exchange(calls_.captured() ? "captured" : "");
    if (std::any_of(captured.begin(), captured.end(), [](const auto& c) { return !c.empty(); })) {
      captured_memory_.push_back(std::move(memory));  // a captured call of any rank reads it
    } else {
      memory->close_peers();
      rendezvous_.exchange("");  // all ranks have unmapped it
    }
  }
  memory.reset();
  memory = std::make_unique<PeerDeviceMemory>(rendezvous_, device_, static_cast<size_t>(bytes),
                                              /*refusal=*/"");
}

void SymmetricTransport::check_may_grow() const {
  TORCH_CHECK(!calls_.capturing(),
              "ringattn: a call must have been made once before one of its kind is captured in a "
              "CUDA graph, got one under capture that needs more memory");
}

void SymmetricTransport::forget_plans() {
  synchronize();
  rendezvous_.calls->throw_if_failed();  // peers may not take part in what follows
  if (calls_.captured()) {
    for (auto& [key, plan] : plans_) captured_plans_.push_back(std::move(plan));
  }
  plans_.clear();
}

void SymmetricTransport::stage(cuda::StageParams params, int64_t call, Steps step_of_rank,
                               cudaStream_t stream) {
  signal_pad_.describe(call, std::move(step_of_rank), calls_.capturing());
  signal_pad_.add_signals(params, rendezvous_.calls->call_tag(), rendezvous_.others());
  params.delay_seed = delays_.seed();
  C10_CUDA_CHECK(cuda::stage(params, stream));
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

namespace {

const bool registered = register_transport(
    {"symmetric", /*preference=*/2, c10::kCUDA,
     [](const Rendezvous& rendezvous, c10::Device device) -> std::unique_ptr<MessageTransport> {
       return std::make_unique<SymmetricTransport>(rendezvous, device);
     }});

}  // namespace
}  // namespace ringattn
