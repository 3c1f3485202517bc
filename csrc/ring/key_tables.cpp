// SPDX-License-Identifier: Apache-2.0
#include "ring/key_tables.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "attention/block_attention_backward.h"
#include "transport/transport.h"

#ifdef RINGATTN_WITH_CUDA
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace ringattn {

namespace {

at::Tensor remote_parts(const RowSet& rows) {
  // 32 KB of keys of 128 elements: as long as a chunk of a block without gaps.
  constexpr int64_t kRowsPerPart = 128;
  std::vector<RemotePart> parts;
  int64_t to = 0;
  for (const RowRange& range : rows.ranges()) {
    for (int64_t from = range.begin; from < range.end; from += kRowsPerPart) {
      const int64_t count = std::min(kRowsPerPart, range.end - from);
      parts.push_back({static_cast<int32_t>(from - rows.hull.begin), static_cast<int32_t>(to),
                       static_cast<int32_t>(count)});
      to += count;
    }
  }
  constexpr int64_t kIntegers = sizeof(RemotePart) / sizeof(int32_t);
  const at::Tensor list = at::empty({static_cast<int64_t>(parts.size()), kIntegers},
                                    at::TensorOptions(at::kInt).pinned_memory(true));
  std::copy(parts.begin(), parts.end(), static_cast<RemotePart*>(list.mutable_data_ptr()));
  return list;
}

}  // namespace

bool is_captured(c10::Device device) {
#ifdef RINGATTN_WITH_CUDA
  if (!device.is_cuda()) return false;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(c10::cuda::getCurrentCUDAStream(device.index()), &status));
  return status != cudaStreamCaptureStatusNone;
#else
  return false;
#endif
}

KeyTables::KeyTables(const Partition& queries, const Partition& keys, int64_t rank,
                     const Mask& mask, const std::vector<Visit>& visits)
    : queries_(query_rows(queries, keys, rank)), mask_(mask), seq_len_(keys.seq_len()) {
  for (const Visit& visit : visits) {
    auto& seen = keys_.emplace_back();
    if (!visit.visible() || visit.visibility != Visibility::kIntervals) continue;
    seen = keys.rows(visit.source).part(visit.keys);
    any_ = true;
  }
  for (const Visit& visit : visits) rows_.push_back(visit.keys);
  tables_.resize(visits.size());
  host_tables_.resize(visits.size());
  parts_.resize(visits.size() - 1);
}

const std::vector<at::Tensor>& KeyTables::on(c10::Device device) {
  if (must_be_made(device)) make(device);
  // A captured stream cannot wait for what is outside of its graph. The tables were made in an
  // earlier call, are kept with the graph, and a capture begins after the device is idle.
  if (any_ && device.is_cuda() && !is_captured(device)) {
    const c10::Stream stream = c10::impl::VirtualGuardImpl(device.type()).getStream(device);
    if (made_ && made_->query()) made_.reset();
    if (made_) made_->block(stream);
    for (const auto* tables : {&tables_, &parts_, &transposed_}) {
      for (const at::Tensor& table : *tables) {
        if (table.defined()) table.record_stream(stream);
      }
    }
  }
  return tables_;
}

std::vector<at::Tensor> KeyTables::transposed_on(c10::Device device) {
  const std::vector<at::Tensor>& tables = on(device);
  if (!transposed_.empty()) return transposed_;
  std::vector<at::Tensor> transposed(tables.size());
  for (size_t step = 0; step < tables.size(); ++step) {
    if (keys_[step]) transposed[step] = transposed_ranges(tables[step], keys_[step]->size());
  }
  if (any_ && device.is_cuda()) {
    if (is_captured(device)) return transposed;
    mark_made();
  }
  return transposed_ = std::move(transposed);
}

void KeyTables::make(c10::Device device) {
  static std::atomic<int64_t> numbers{1};
  first_number_ = numbers.fetch_add(static_cast<int64_t>(keys_.size()));
  const auto on_host = at::TensorOptions(at::kInt).pinned_memory(device.is_cuda());
  for (size_t step = 0; step < keys_.size(); ++step) {
    if (!keys_[step]) continue;
    const at::Tensor table = at::empty({queries_.size(), 2}, on_host);
    key_ranges(queries_, *keys_[step], mask_, seq_len_, table.mutable_data_ptr<int32_t>());
    tables_[step] = table.to(device, /*non_blocking=*/true);
    host_tables_[step] = table;
    if (!device.is_cuda() || rows_[step].gaps.empty()) continue;
    parts_[step - 1] = remote_parts(rows_[step]).to(device, /*non_blocking=*/true);
  }
  device_ = device;
  transposed_.clear();
  if (device.is_cuda()) mark_made();
}

void KeyTables::mark_made() {
  made_ = std::make_shared<c10::Event>(device_.type());
  made_->record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

}  // namespace ringattn
