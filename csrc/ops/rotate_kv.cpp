// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#ifdef RINGATTN_WITH_CUDA
#include <c10/cuda/CUDAStream.h>
#endif

#include "core/process_singleton.h"
#include "ops/checks.h"
#include "transport/group/group_context.h"
#include "transport/registry.h"

namespace ringattn {
namespace {

// Transfers that wait_kv has not been called for, by the storage that they fill.
class Pending {
 public:
  struct Rotation {
    std::shared_ptr<GroupContext> group;  // first: it must outlive the transfer
    at::Tensor sent;
    at::Tensor received;
    MessageTransport* transport = nullptr;  // of the group
    std::unique_ptr<Transfer> transfer;     // null: nothing had to travel
  };

  void add(Rotation rotation) {
    std::vector<Rotation> abandoned;  // finished and freed without the lock
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      abandoned = take_abandoned();
      const auto* storage = rotation.received.storage().unsafeGetStorageImpl();
      rotations_.insert_or_assign(storage, std::move(rotation));
    }
    for (Rotation& rotation : abandoned) {
      try {
        const CallEntry entry(rotation.group.get(), "rotate_kv");
        if (rotation.transfer) rotation.transfer->finish();
      } catch (const std::exception&) {
        // Nothing waits for this transfer; the next call of its group throws why the group ended.
        // Where a thread is in a call of the group, the transport keeps what is unfinished.
      }
    }
  }

  std::shared_ptr<GroupContext> group_of(const at::Tensor& received) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return find(received)->second.group;
  }

  Rotation take(const at::Tensor& received) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = find(received);
    Rotation rotation = std::move(found->second);
    rotations_.erase(found);
    return rotation;
  }

 private:
  using Rotations = std::unordered_map<const c10::StorageImpl*, Rotation>;

  Rotations::iterator find(const at::Tensor& received) {
    const auto found = rotations_.find(received.storage().unsafeGetStorageImpl());
    RINGATTN_CHECK(
        found != rotations_.end(),
        "received must be a tensor that rotate_kv returned and wait_kv has not taken, got one that "
        "nothing fills");
    return found;
  }

  // Results that the caller has freed: only this map holds their memory. They must still arrive.
  std::vector<Rotation> take_abandoned() {
    std::vector<Rotation> abandoned;
    for (auto entry = rotations_.begin(); entry != rotations_.end();) {
      if (entry->second.received.storage().use_count() > 1) {
        ++entry;
        continue;
      }
      abandoned.push_back(std::move(entry->second));
      entry = rotations_.erase(entry);
    }
    return abandoned;
  }

  std::mutex mutex_;
  Rotations rotations_;
};

Partition check(const at::Tensor& kv, const std::vector<int64_t>& lengths,
                const std::vector<int64_t>& order, const std::string& transport, int64_t rank,
                int64_t world_size) {
  RINGATTN_CHECK(kv.dim() == 5 && kv.size(0) == 2, "kv must be [2, B, S_r, H_kv, D], got shape ",
                 kv.sizes());
  RINGATTN_CHECK(kv.is_cpu() || kv.is_cuda(), "kv must be on a CPU or CUDA device, got ",
                 kv.device());
  RINGATTN_CHECK(kv.is_floating_point(), "kv must be of a floating point dtype, got ",
                 dtype_name(kv.scalar_type()));
  // Destinations depend on the order alone, which both layouts share.
  Partition partition = check_partition(lengths, order, "contiguous", world_size);
  RINGATTN_CHECK(kv.size(2) == partition.length(rank), "kv must have the ", partition.length(rank),
                 " rows that the partition gives rank ", rank, ", got ", kv.size(2),
                 kv.size(3) == partition.length(rank)
                     ? "; this looks like [2, B, H_kv, S_r, D]: pass kv.transpose(2, 3)"
                     : "");
  check_transport(transport, kv.device().type());
  check_environment();
  return partition;
}

Signature signature(const at::Tensor& kv, const Partition& partition,
                    const std::string& transport) {
  return Signature("rotate_kv")
      .add("partition.lengths", partition.lengths())
      .add("partition.order", partition.order())
      .add("dtype", dtype_name(kv.scalar_type()))
      .add("device type", c10::DeviceTypeName(kv.device().type()))
      .add("batch size", kv.size(1))
      .add("key heads", kv.size(3))
      .add("head dimension", kv.size(4))
      .add("transport", transport);
}

at::Tensor rotate_kv_op(const at::Tensor& kv, at::IntArrayRef lengths, at::IntArrayRef order,
                        c10::string_view group_name, c10::string_view transport_name) {
  const c10::DeviceGuard guard(kv.device());
  const std::string transport(transport_name);
  Pending::Rotation rotation;
  if (!group_name.empty()) rotation.group = GroupContext::resolve(std::string(group_name));
  if (!rotation.group || rotation.group->size() == 1) {
    check(kv, lengths.vec(), order.vec(), transport, 0, 1);
    rotation.received = kv.clone(at::MemoryFormat::Contiguous);
  } else {
    GroupContext& group = *rotation.group;
    const CallEntry entry(&group, "rotate_kv");
    std::optional<Partition> partition;
    Message message;
    Signature asked = check_call(group, [&] {
      partition = check(kv, lengths.vec(), order.vec(), transport, group.rank(), group.size());
      group.check_device(kv.device(), transport);
      Signature made = signature(kv, *partition, transport);
      check_capture(group, made, kv.device(), [&]() -> const MessageTransport& {
        return group.transport(transport, kv.device());
      });
      return made;
    });
    message.call = group.begin_call(std::make_shared<const Signature>(std::move(asked)),
                                    /*tagged=*/kv.is_cpu());
    message.step = 1;
    message.destination = partition->rank_after(group.rank(), 1);
    message.source = partition->rank_after(group.rank(), -1);
    const auto& all_rows = partition->lengths();
    const int64_t row_bytes = 2 * kv.size(1) * kv.size(3) * kv.size(4) * kv.element_size();
    message.largest = *std::max_element(all_rows.begin(), all_rows.end()) * row_bytes;
    rotation.transport = &group.transport(transport, kv.device());
    group.run(message.call, [&] {
      // A copy: the caller may overwrite kv, and callers compiled by torch.compile do.
      rotation.sent = kv.clone(at::MemoryFormat::Contiguous);
      rotation.received = at::empty(
          {2, kv.size(1), partition->length(message.source), kv.size(3), kv.size(4)}, kv.options());
      const bool has_tag = rotation.transport->tags_messages();
      const auto rows_or_byte = [&](const at::Tensor& rows) {
        if (rows.numel() > 0) return rows;
        return has_tag ? at::zeros({1}, at::kByte) : at::Tensor();
      };
      message.send = rows_or_byte(rotation.sent);
      message.receive = rows_or_byte(rotation.received);
      if (message.send.defined() || message.receive.defined() ||
          rotation.transport->needs_every_rank()) {
        rotation.transfer = rotation.transport->start(message);
      }
    });
  }
  // The caller's tensor shares the memory: its storage's count shows when the caller frees it.
  const at::Tensor received = rotation.received.detach();
  process_singleton<Pending>().add(std::move(rotation));
  return received;
}

at::Tensor wait_kv_op(const at::Tensor& received, const at::Tensor& sent) {
  const c10::DeviceGuard guard(received.device());
  Pending& pending = process_singleton<Pending>();
  const auto group = pending.group_of(received);
  const CallEntry entry(group.get(), "wait_kv");
  const Pending::Rotation rotation = pending.take(received);
  if (rotation.transfer) {
    rotation.transfer->wait();
    rotation.transfer->finish();
  }
#ifdef RINGATTN_WITH_CUDA
  // It may have been allocated on another stream than this one, which reads it.
  if (received.is_cuda()) received.record_stream(c10::cuda::getCurrentCUDAStream());
#endif
  // A copy: torch.compile takes `received` for dead from here on, and may reuse its memory.
  at::Tensor result = received.clone();
  if (rotation.transfer) rotation.transport->guard({result});
  return result;
}

TORCH_LIBRARY_IMPL(ringattn, CPU, m) {
  m.impl("rotate_kv", &rotate_kv_op);
  m.impl("wait_kv", &wait_kv_op);
}

#ifdef RINGATTN_WITH_CUDA
TORCH_LIBRARY_IMPL(ringattn, CUDA, m) {
  m.impl("rotate_kv", &rotate_kv_op);
  m.impl("wait_kv", &wait_kv_op);
}
#endif

}  // namespace
}  // namespace ringattn
