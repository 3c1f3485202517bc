# SPDX-License-Identifier: Apache-2.0
"""torch's ``context_parallel`` under its own signature, over :func:`ringattn.ring_attention`."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from ringattn._checks import check_flag, check_integer, check_is_tensor, check_keywords, is_dtensor
from ringattn._distributed.errors import ErrorsToPeers, refuse
from ringattn._distributed.groups import GroupInfo, resolve_group
from ringattn._masks import Mask
from ringattn.functional import attend
from ringattn.partition import Partition


@contextmanager
def context_parallel(
    mesh: DeviceMesh,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Collection[torch.Tensor] | None = None,
) -> Generator[None, None, None]:
    """Context parallelism as ``torch.distributed.tensor.experimental.context_parallel`` has it:
    inside, ``buffers`` hold this rank's rows of the sequence, and
    ``F.scaled_dot_product_attention`` attends over the ring. Collective in each attention call.

    Rows are those of ``Partition.even(S, W)``: where ``2 * W`` divides S, torch's own head and tail
    chunks, which its ``context_parallel_unshard`` puts together again; any other S has shares that
    differ by one token.

    ``F.scaled_dot_product_attention`` takes ``[B, H, S_r, D]`` here, with ``is_causal``, ``scale``
    and ``enable_gqa``; of queries, keys and values of the buffers' sequence. Calls are found
    wherever they are made from, in compiled code, too. A backward may run after the context, unless
    it recomputes activations or needs a buffer that the context restores: an embedding's token ids
    belong in ``no_restore_buffers`` then.

    Args:
        mesh: one-dimensional, of the ranks that share a sequence, as in
            :func:`ringattn.ring_attention`.
        buffers: whole tensors, the same on all ranks, that depend on the sequence: inputs, labels,
            position ids; at least one, not one that requires grad. Each is another tensor inside,
            in a memory of its own: views of it keep the whole sequence.
        buffer_seq_dims: the sequence dimension of each buffer, in which all have the same size.
        no_restore_buffers: those of ``buffers`` that keep this rank's rows afterwards. All others
            get their own memory back.

    Raises:
        ValueError: on all ranks: buffers that break a rule above, a context within another one,
            ``attn_mask`` and ``dropout_p``, attention to another sequence, attention that is not
            causal, over several ranks, of fewer than ``2 * W`` rows (models give
            ``is_causal=False`` for a rank's single row), attention by another function
            (``nn.MultiheadAttention``; ``flex_attention`` is an error of the compiler's).

    An exception from inside comes out unchanged; the buffers are restored before. A context that
    ends without a call of attention warns, unless an earlier one has seen some.
    """
    ring = resolve_group(mesh)
    with ErrorsToPeers(ring):
        if F.scaled_dot_product_attention is not _torch_attention:
            there = getattr(F.scaled_dot_product_attention, "func", F.scaled_dot_product_attention)
            name = f"{there.__module__}.{getattr(there, '__qualname__', type(there).__name__)}"
            raise ValueError(
                "context_parallel must not be within another one, got "
                f"F.scaled_dot_product_attention replaced by {name}"
            )
        given, dims, kept = _check_buffers(buffers, buffer_seq_dims, no_restore_buffers)
    partition = Partition.even(given[0].size(dims[0]), ring.world_size)
    with torch.no_grad():
        shards = [
            partition.shard(buffer, ring.rank, dim).clone(memory_format=torch.contiguous_format)
            for buffer, dim in zip(given, dims, strict=True)
        ]
    # The same memory; that of buffers which are not restored is let go of.
    whole = [None if keeps else x.detach() for x, keeps in zip(given, kept, strict=True)]
    mode = _RingAttention(ring, partition)
    # The first compilation asks once for all functions of torch, which must be torch's own by then.
    torch.overrides.get_testing_overrides()
    try:
        F.scaled_dot_product_attention = mode.attention
        _replace(given, shards)
        del shards
        with mode:
            yield
        mode.warn_if_unused()
    finally:
        F.scaled_dot_product_attention = _torch_attention
        _replace(given, whole)


_torch_attention = torch._C._nn.scaled_dot_product_attention
_KEYWORDS = {
    "attn_mask": (
        "is_causal is the mask within context_parallel; a model makes another from attention_mask "
        "and from position ids that restart: give it neither",
        (None,),
    ),
    "dropout_p": ("attention has no dropout here", (None, 0)),
}
# The same as an operator, of exported graphs for instance.
_operator = torch.ops.aten.scaled_dot_product_attention
_ATTENTION = (_torch_attention, _operator, _operator.default)
# By a context of this process.
_attention_seen = False


@torch.no_grad()
def _replace(buffers: Sequence[torch.Tensor], contents: Sequence[torch.Tensor | None]) -> None:
    """Gives each buffer the memory and the shape of another tensor, but where that is None."""
    for buffer, content in zip(buffers, contents, strict=True):
        if content is not None:
            place = content.storage_offset(), content.size(), content.stride()
            buffer.set_(content.untyped_storage(), *place)


def _check_buffers(
    buffers: Any, seq_dims: Any, not_restored: Any
) -> tuple[list[torch.Tensor], list[int], list[bool]]:
    """The buffers, the sequence dimension of each, and whether it keeps its rows."""
    given = list(buffers or ())
    dims = list(seq_dims or ())
    if not given:
        raise ValueError(
            "buffers must name at least one tensor, whose size tells the sequence's, got none"
        )
    if len(dims) != len(given):
        raise ValueError(
            f"buffer_seq_dims must have one dimension for each of the {len(given)} buffers, "
            f"got {len(dims)}"
        )
    for i, (buffer, dim) in enumerate(zip(given, dims, strict=True)):
        name = f"buffers[{i}]"
        check_is_tensor(name, buffer)
        if is_dtensor(buffer):
            raise ValueError(f"{name} must be a plain tensor, got a DTensor")
        if buffer.requires_grad:
            raise ValueError(f"{name} must not require grad, got requires_grad=True")
        dim = check_integer(f"buffer_seq_dims[{i}]", dim)
        if not -buffer.dim() <= dim < buffer.dim():
            raise ValueError(
                f"buffer_seq_dims[{i}] must be a dimension of shape {list(buffer.shape)}, got {dim}"
            )
        dims[i] = dim % buffer.dim()
        rows = given[0].size(dims[0])
        if buffer.size(dims[i]) != rows:
            raise ValueError(
                f"{name} must have the {rows} rows of the first buffer in dim {dims[i]}, "
                f"got {buffer.size(dims[i])}"
            )
    left = list(not_restored or ())
    if not all(any(x is buffer for buffer in given) for x in left):
        raise ValueError("no_restore_buffers must be some of buffers, got another tensor")
    return given, dims, [any(x is buffer for x in left) for buffer in given]


# Layers that would attend to this rank's rows alone.
_REFUSED = {
    F.multi_head_attention_forward: "nn.MultiheadAttention",
    torch._native_multi_head_attention: "nn.MultiheadAttention",
    torch._transformer_encoder_layer_fwd: "nn.TransformerEncoderLayer",
    torch.ops.higher_order.flex_attention: "flex_attention",
}


class _RingAttention(TorchFunctionMode):
    """Reroutes attention, beside a replaced attribute of F. A mode also sees calls through
    references that modules keep and by other functions, and compiled code is traced anew for it.
    The attribute also serves where the mode is off: within functions that the mode has seen, such
    as a backward that recomputes activations."""

    def __init__(self, ring: GroupInfo, partition: Partition) -> None:
        super().__init__()
        self.ring = ring
        self.attention = partial(_attention, ring, partition)

    def warn_if_unused(self) -> None:
        """Attention that this mode cannot see would attend to this rank's rows alone."""
        if self.ring.world_size > 1 and not _attention_seen:
            warnings.warn(
                "context_parallel must see F.scaled_dot_product_attention, got no call of it: "
                "other attention, such as that of attn_implementation='eager', sees this rank's "
                "rows alone",
                stacklevel=4,
            )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _ATTENTION:
            return self.attention(*args, **kwargs)
        if func in _REFUSED:
            refuse(
                self.ring,
                "attention must be F.scaled_dot_product_attention within context_parallel, "
                f"got {_REFUSED[func]}",
            )
        return func(*args, **kwargs)


def _attention(
    ring: GroupInfo,
    partition: Partition,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """With the signature of ``F.scaled_dot_product_attention``."""
    global _attention_seen
    _attention_seen = True
    with ErrorsToPeers(ring):
        refused = {"attn_mask": attn_mask, "dropout_p": dropout_p}
        check_keywords("scaled_dot_product_attention", refused, _KEYWORDS)
        rows = partition.lengths[ring.rank]
        for name, x in (("query", query), ("key", key), ("value", value)):
            check_is_tensor(name, x)
            if x.dim() != 4:
                raise ValueError(f"{name} must be [B, H, S, D], got shape {list(x.shape)}")
            if x.size(2) != rows:
                raise ValueError(
                    f"{name} must be [B, H, {rows}, D], this rank's rows of the sequence, within "
                    f"context_parallel, got shape {list(x.shape)}: attention to another sequence "
                    "belongs outside"
                )
        is_causal = check_flag("is_causal", is_causal)
        least = 2 * ring.world_size
        if not is_causal and ring.world_size > 1 and partition.seq_len < least:
            raise ValueError(
                f"buffers must have at least {least} rows, two a rank, for attention that is not "
                "causal: models give is_causal=False for a single row, "
                f"got {partition.seq_len}"
            )
        if not enable_gqa and query.size(1) != key.size(1):
            raise ValueError(
                f"key must have the {query.size(1)} heads of query unless enable_gqa=True, "
                f"got {key.size(1)}"
            )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out, _ = attend(ring, q, k, v, partition, Mask(is_causal), scale)
    return out.transpose(1, 2)
