// SPDX-License-Identifier: Apache-2.0
#include "ops/checks.h"

#include <ATen/MemoryOverlap.h>
#include <c10/core/ScalarType.h>

#include <cmath>
#include <stdexcept>

#include "attention/block_attention.h"
#include "core/environment.h"
#include "ring/key_tables.h"

namespace ringattn {
namespace {

constexpr int64_t kMaxHeadDim = 256;
constexpr int64_t kHeadDimStep = 8;

bool has_kernel(const at::Tensor& x) {
  const auto dtype = x.scalar_type();
  const bool half_or_single = dtype == at::kHalf || dtype == at::kBFloat16 || dtype == at::kFloat;
  return half_or_single || (x.is_cpu() && dtype == at::kDouble);
}

void check_like(const at::Tensor& x, const char* name, const at::Tensor& q) {
  RINGATTN_CHECK(x.dim() == 4, name, " must be [B, S, H_kv, D], got shape ", x.sizes());
  RINGATTN_CHECK(x.scalar_type() == q.scalar_type(), name, " must have the dtype of q, ",
                 dtype_name(q.scalar_type()), ", got ", dtype_name(x.scalar_type()));
  RINGATTN_CHECK(x.device() == q.device(), name, " must be on the device of q, ", q.device(),
                 ", got ", x.device());
  RINGATTN_CHECK(x.size(0) == q.size(0), name, " must have the batch size of q, ", q.size(0),
                 ", got ", x.size(0));
  RINGATTN_CHECK(x.size(3) == q.size(3), name, " must have the head dimension of q, ", q.size(3),
                 ", got ", x.size(3));
}

// A state is folded in place: each of its elements must be written once.
void check_written(const at::Tensor& x, const char* name) {
  RINGATTN_CHECK(at::has_internal_overlap(x) != at::MemOverlap::Yes, name,
                 " must not overlap itself, got strides ", x.strides());
}

// Hint after "got ..." where the heads do not divide. k with fewer rows than heads looks
// transposed.
const char* heads_hint(const at::Tensor& q, const at::Tensor& k) {
  const bool swapped_fit = 0 < k.size(1) && k.size(1) < k.size(2) && q.size(1) % k.size(1) == 0;
  return swapped_fit || has_heads_first(q) || has_heads_first(k)
             ? "; these look like [B, H, S, D]: pass transpose(1, 2) of q, k and v"
             : "";
}

// Hint after "got ..." where the rows are not those of the rank: what x looks like.
std::string rows_hint(const at::Tensor& x, const std::string& name, const Partition& partition,
                      int64_t rank, const std::string& partition_name) {
  const std::string transposed = name + ".transpose(1, 2)";
  const auto shard = [&](const std::string& whole) {
    return partition_name + ".shard(" + whole + ", " + std::to_string(rank) + ")";
  };
  const std::string heads_first = "; this looks like [B, H, S, D]: pass " + transposed;
  if (x.size(2) == partition.length(rank)) return heads_first;
  if (x.size(1) == partition.seq_len()) return "; this is the whole sequence: pass " + shard(name);
  if (x.size(2) == partition.seq_len()) {
    return "; this looks like [B, H, S, D] of the whole sequence: pass " + shard(transposed);
  }
  return has_heads_first(x) ? heads_first : "";
}

}  // namespace

std::string dtype_name(at::ScalarType dtype) {
  return std::string("torch.").append(c10::getDtypeNames(dtype).first);
}

bool has_heads_first(const at::Tensor& x) {
  return !x.is_contiguous() && x.transpose(1, 2).is_contiguous();
}

void check_environment() {
  const std::string& error = environment().error;
  RINGATTN_CHECK(error.empty(), error);
}

void check_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double scale) {
  RINGATTN_CHECK(q.dim() == 4, "q must be [B, S, H, D], got shape ", q.sizes());
  RINGATTN_CHECK(q.is_cpu() || q.is_cuda(), "q must be on a CPU or CUDA device, got ", q.device());
  RINGATTN_CHECK(has_kernel(q), "q must be float16, bfloat16",
                 q.is_cpu() ? ", float32 or float64" : " or float32 on CUDA", ", got ",
                 dtype_name(q.scalar_type()));
  const int64_t head_dim = q.size(3);
  RINGATTN_CHECK(head_dim > 0 && head_dim <= kMaxHeadDim && head_dim % kHeadDimStep == 0,
                 "the head dimension must be a multiple of ", kHeadDimStep, " from ", kHeadDimStep,
                 " to ", kMaxHeadDim, ", got ", head_dim);
  check_like(k, "k", q);
  check_like(v, "v", q);
  RINGATTN_CHECK(k.size(1) == v.size(1), "v must have as many rows as k, ", k.size(1), ", got ",
                 v.size(1));
  RINGATTN_CHECK(k.size(2) == v.size(2), "v must have as many heads as k, ", k.size(2), ", got ",
                 v.size(2));
  RINGATTN_CHECK(k.size(2) > 0 && q.size(2) > 0, "q and k must have at least one head, got ",
                 q.size(2), " and ", k.size(2));
  RINGATTN_CHECK(q.size(2) % k.size(2) == 0,
                 "the number of query heads must be a multiple of the number of key heads, ",
                 k.size(2), ", got ", q.size(2), heads_hint(q, k));
  RINGATTN_CHECK(std::isfinite(scale), "scale must be finite, got ", scale);
  check_environment();
}

void check_state(const at::Tensor& out, const at::Tensor& lse) {
  RINGATTN_CHECK(out.dim() == 4, "out must be [B, S, H, D], got shape ", out.sizes());
  const auto dtype = out.scalar_type();
  RINGATTN_CHECK(dtype == at::kFloat || (out.is_cpu() && dtype == at::kDouble),
                 "out must be a float32 state", out.is_cpu() ? ", or float64" : "", ", got ",
                 dtype_name(dtype));
  const std::vector<int64_t> rows = {out.size(0), out.size(2), out.size(1)};
  RINGATTN_CHECK(lse.sizes() == at::IntArrayRef(rows), "lse must have shape [B, H, S], ",
                 at::IntArrayRef(rows), ", got ", lse.sizes());
  RINGATTN_CHECK(lse.scalar_type() == dtype && lse.device() == out.device(),
                 "lse must have the dtype and the device of out, ", dtype_name(dtype), " on ",
                 out.device(), ", got ", dtype_name(lse.scalar_type()), " on ", lse.device());
  check_written(out, "out");
  check_written(lse, "lse");
}

void check_state(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& q) {
  check_state(out, lse);
  const auto wide = state_dtype(q.scalar_type());
  RINGATTN_CHECK(out.sizes() == q.sizes(), "out must have the shape of q, ", q.sizes(), ", got ",
                 out.sizes());
  RINGATTN_CHECK(out.scalar_type() == wide, "out must be a ", dtype_name(wide), " state, got ",
                 dtype_name(out.scalar_type()));
  RINGATTN_CHECK(out.device() == q.device(), "out must be on the device of q, ", q.device(),
                 ", got ", out.device());
}

bool is_host_integers(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kLong && x.is_contiguous();
}

at::IntArrayRef values_of(const at::Tensor& host_integers) {
  return {host_integers.const_data_ptr<int64_t>(), static_cast<size_t>(host_integers.numel())};
}

namespace {

void check_integers(const at::Tensor& x, const char* name, int64_t dims) {
  RINGATTN_CHECK(is_host_integers(x), name, " must be contiguous torch.int64 on the CPU, got ",
                 dtype_name(x.scalar_type()), " on ", x.device());
  RINGATTN_CHECK(x.dim() == dims, name, " must have ", dims, " dimensions, got shape ", x.sizes());
}

// A refusal of the rooms below becomes one of the operator.
template <typename Make>
auto checked(const Make& make) {
  try {
    return make();
  } catch (const std::invalid_argument& error) {
    RINGATTN_CHECK(false, error.what());
  }
}

}  // namespace

Partition check_partition(const std::vector<int64_t>& lengths, const std::vector<int64_t>& order,
                          const std::string& layout_name, int64_t world_size,
                          const std::optional<at::Tensor>& pieces, const char* name) {
  RINGATTN_CHECK(static_cast<int64_t>(lengths.size()) == world_size, name, " must have the ",
                 world_size, " ranks of the group, got ", lengths.size());
  return checked([&] {
    const Layout layout = parse_layout(layout_name);
    RINGATTN_CHECK(pieces.has_value() == (layout == Layout::kPieces),
                   "pieces must come with the layout \"pieces\" and with no other, got \"",
                   layout_name, "\" and ", pieces ? "some" : "none");
    if (!pieces) return Partition(layout, lengths, order);
    check_integers(*pieces, "pieces", 2);
    RINGATTN_CHECK(pieces->size(1) == 3,
                   "pieces must have a rank, a start and a stop each, got shape ", pieces->sizes());
    return partition_of_pieces(lengths, values_of(*pieces).vec());
  });
}

Mask check_mask(const MaskArguments& given, int64_t seq_len) {
  std::optional<std::vector<int64_t>> cu_seqlens;
  if (given.cu_seqlens) {
    check_integers(*given.cu_seqlens, "cu_seqlens", 1);
    cu_seqlens = values_of(*given.cu_seqlens).vec();
  }
  return checked([&] {
    return make_mask(given.causal, given.window_left, given.window_right, cu_seqlens, seq_len);
  });
}

void check_scoring(const at::Tensor& q, double softcap, const std::optional<at::Tensor>& sinks) {
  RINGATTN_CHECK(std::isfinite(softcap) && softcap >= 0.0,
                 "softcap must be finite and not negative, got ", softcap);
  if (!sinks) return;
  RINGATTN_CHECK(sinks->dim() == 1 && sinks->size(0) == q.size(2),
                 "sinks must have shape [H], H = ", q.size(2), ", got ", sinks->sizes());
  RINGATTN_CHECK(at::isFloatingType(sinks->scalar_type()), "sinks must be of a float dtype, got ",
                 dtype_name(sinks->scalar_type()));
  RINGATTN_CHECK(sinks->device() == q.device(), "sinks must be on the device of q, ", q.device(),
                 ", got ", sinks->device());
}

at::Tensor aligned(const at::Tensor& x, size_t bytes) {
  const at::Tensor rows = x.contiguous();
  return reinterpret_cast<uintptr_t>(rows.const_data_ptr()) % bytes == 0 ? rows : rows.clone();
}

Scoring make_scoring(const at::Tensor& q, double scale, double softcap,
                     const std::optional<at::Tensor>& sinks) {
  Scoring scoring(scale);
  scoring.softcap = softcap;
  if (sinks) scoring.sinks = sinks->to(state_dtype(q.scalar_type())).contiguous();
  return scoring;
}

void check_rows(const at::Tensor& x, const char* name, const Partition& partition, int64_t rank,
                const char* partition_name) {
  const int64_t rows = partition.length(rank);
  RINGATTN_CHECK(x.size(1) == rows, name, " must have the ", rows, " rows that the ",
                 partition_name, " gives rank ", rank, ", got ", x.size(1),
                 rows_hint(x, name, partition, rank, partition_name));
}

void check_capture(const GroupContext& group, const Signature& signature, c10::Device device,
                   c10::function_ref<const MessageTransport&()> transport) {
  if (!is_captured(device)) return;
  RINGATTN_CHECK(group.agreement().knows(signature),
                 "a call must have been made once before one of its kind is captured in a CUDA "
                 "graph, got a first one under capture");
  RINGATTN_CHECK(transport().can_be_captured(),
                 "a call that is captured in a CUDA graph must not travel over NCCL, got one that "
                 "does");
}

}  // namespace ringattn
