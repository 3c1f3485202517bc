// SPDX-License-Identifier: Apache-2.0
#include "ring/key_tables.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace ringattn {

KeyTables::KeyTables(const Partition& partition, int64_t rank, const Mask& mask,
                     const std::vector<Visit>& visits)
    : queries_(partition.rows(rank)), mask_(mask), seq_len_(partition.seq_len()) {
  for (const Visit& visit : visits) {
    needed_.push_back(visit.visible() && visit.visibility == Visibility::kIntervals);
    any_ = any_ || needed_.back();
    keys_.push_back(needed_.back()
                        ? partition.rows(visit.source).part(visit.keys.begin, visit.keys.end)
                        : BlockRows({}));
  }
  tables_.resize(visits.size());
}

const std::vector<at::Tensor>& KeyTables::on(c10::Device device) {
  if (must_be_made(device)) make(device);
  if (made_) {
    const c10::impl::VirtualGuardImpl guard(device.type());
    const c10::Stream stream = guard.getStream(device);
    made_->block(stream);
    for (const at::Tensor& table : tables_) {
      if (table.defined()) table.record_stream(stream);
    }
  }
  return tables_;
}

void KeyTables::make(c10::Device device) {
  const auto on_host = at::TensorOptions(at::kInt).pinned_memory(device.is_cuda());
  for (size_t step = 0; step < needed_.size(); ++step) {
    if (!needed_[step]) continue;
    const at::Tensor table = at::empty({queries_.size(), 2}, on_host);
    key_ranges(queries_, keys_[step], mask_, seq_len_, table.mutable_data_ptr<int32_t>());
    tables_[step] = table.to(device, /*non_blocking=*/true);
  }
  device_ = device;
  if (device.is_cpu()) return;
  made_ = std::make_shared<c10::Event>(device.type());
  made_->record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
}

}  // namespace ringattn
