# SPDX-License-Identifier: Apache-2.0
"""The attention functions: they check arguments and call the operators."""

from collections.abc import Sequence
from typing import Literal, overload

import torch

from ringattn import _C
from ringattn._checks import (
    check_collective,
    check_dims,
    check_flag,
    check_int64_or_none,
    check_keywords,
    check_tensors,
    finite_scale,
    finite_softcap,
)
from ringattn._distributed.errors import ErrorsToPeers, call
from ringattn._distributed.groups import Group, GroupInfo, resolve_group
from ringattn._masks import CAUSAL, CuSeqlens, Mask
from ringattn._ring_options import ring_options
from ringattn.partition import Partition

_ops = torch.ops.ringattn

# The operators' names of arguments -> the names here.
_MERGED = {"out": "out_a", "lse": "lse_a", "other_out": "out_b", "other_lse": "lse_b"}


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition | None = None,
    *,
    group: Group = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_partition: Partition | None = None,
    scale: float | None = None,
    transport: str = "auto",
    depth: int | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition | None = None,
    *,
    group: Group = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_partition: Partition | None = None,
    scale: float | None = None,
    transport: str = "auto",
    depth: int | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition | None = None,
    *,
    group: Group = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_partition: Partition | None = None,
    scale: float | None = None,
    transport: str = "auto",
    depth: int | None = None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition | None = None,
    *,
    group: Group = None,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: CuSeqlens | None = None,
    key_partition: Partition | None = None,
    scale: float | None = None,
    transport: str = "auto",
    depth: int | None = None,
    return_lse: bool = False,
    **refused: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Exact attention over a sequence spread across ranks. Collective: every rank of the group
    calls it.

    Key/value blocks travel around the ring while attention runs; each is folded into a float32
    state (float64 for float64), which is rounded once, at the end. The same inputs give the same
    bits.

    Args:
        q: queries of this rank, ``[B, S_r, H, D]``, in position order, float16, bfloat16 or float32
            on CPU or CUDA, float64 on CPU. D is a multiple of 8, at most 256. S_r may be 0. The
            rows of a whole tensor x that this rank owns are ``partition.shard(x, rank)``;
            ``x.chunk(W, 1)[rank]`` has other rows, of the same shape, unless the layout is
            "contiguous". Tensors ``[B, H, S_r, D]`` need their ``transpose(1, 2)``: where S_r, H
            and H_kv are equal, neither shapes nor strides can tell that it is missing.
        k: keys of this rank, ``[B, S_r, H_kv, D]``, ``H % H_kv == 0``, dtype and device of ``q``;
            with ``key_partition`` the rows that it gives this rank.
        v: values of this rank, like ``k``.
        partition: which rank owns which tokens, the same on all ranks, such as
            ``Partition.even(S, W)``. None, all tokens on this rank, is for a single rank alone:
            the length of a shard does not show which rank's tokens it holds.
        group: ProcessGroup, one-dimensional DeviceMesh, None for the default group, or "single" for
            this process alone, whatever groups there are. None means this process alone too where
            there never was a default group and ``WORLD_SIZE`` is not above 1.
        causal: a query sees the keys at its own and at earlier positions; otherwise all keys.
        window_size: (left, right), the keys before and after its own position that a query sees,
            -1 for all of them, as FlashAttention counts; ``causal`` limits right to 0.
        softcap: scores become ``softcap * tanh(score / softcap)`` after the scale and before the
            mask; 0 leaves them as they are.
        sinks: ``[H]`` on the device of ``q``, any floating dtype: a logit of each query head,
            neither scaled nor capped, that joins the denominator of the softmax and has no value.
            ``-inf`` is no sink. The returned lse contains it.
        cu_seqlens: boundaries of packed documents in the whole sequence, ``[0, ..., S]``, never
            decreasing: a query sees keys of its own document alone, and windows count inside it. A
            list, a tuple or a tensor, the same on all ranks; a CUDA tensor is read once for each of
            its versions, for which the host waits. With ``key_partition`` the sequence is that of
            the keys.
        key_partition: which rank owns which of S_k keys, where there are more keys than queries: a
            cache, and what follows it. The queries are the last ``partition.seq_len`` of the S_k
            positions. None: keys lie as queries do.
        scale: of the scores, any finite number; None means ``1 / sqrt(D)``.
        transport: how blocks travel. "symmetric": through memory that all ranks of one host share,
            fetched by the kernel that attends to them. "nccl": over a communicator of ringattn's
            own. "process_group": over the group's own backend, CPUs too. "auto": the first of these
            that the ranks and their device can have.
        depth: how many blocks may be under way ahead of the one being attended to, at least 1; None
            means all ``W - 1``, and so does more. Memory for visiting blocks is for ``depth + 1``
            of them at most.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        out ``[B, S_r, H, D]`` in the dtype of ``q``; with ``return_lse`` also lse ``[B, H, S_r]``,
        natural log, float32 (float64 for float64), -inf for a query that sees no key.

    Raises:
        ValueError: an argument that breaks a rule above, ranks that disagree about them (on all
            ranks, when a combination is first used), no process group under torchrun or after
            ``destroy_process_group()``, DTensors, ``torch.vmap``, and keywords of other packages
            (``attn_mask``, ``dropout_p``, ``max_seqlen``, ...) but with the values that change
            nothing (None, 0.0).
        torch.distributed.DistBackendError: a peer died or never arrived; it names the rank and the
            step. On CUDA it may come from the next call, see :func:`synchronize`.

    Gradients of out and lse reach q, k, v and sinks; those of other ranks' keys and values return
    to their owner, in float32 (float64 for float64). The backward is a collective call too: every
    rank makes it, and for the same inputs. Gradients of ``sinks`` are of this rank's rows alone,
    like those of a weight. There is no double backward.

    Rotary embeddings come before this call, and need the positions of this rank's rows in the whole
    sequence: ``partition.position_ids(rank)``, not ``torch.arange(S_r)``. Wrong positions cannot be
    seen here: the results are finite, of the right shape, and wrong on every rank.

    Ring attention: Liu et al., https://arxiv.org/abs/2310.01889. Merging partial results by their
    log-sum-exp: Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    """
    ring = resolve_group(group)
    with ErrorsToPeers(ring):
        check_keywords("ring_attention", refused)
        return_lse = check_flag("return_lse", return_lse)
    mask = Mask(causal, window_size, softcap, cu_seqlens)
    options = (mask, scale, transport, depth, sinks, key_partition)
    out, lse = attend(ring, q, k, v, partition, *options)
    return (out, lse) if return_lse else out


def attend(
    ring: GroupInfo,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition | None = None,
    mask: Mask = CAUSAL,
    scale: float | None = None,
    transport: str = "auto",
    depth: int | None = None,
    sinks: torch.Tensor | None = None,
    key_partition: Partition | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`ring_attention` over a ring that is known: out and lse."""
    with ErrorsToPeers(ring):
        options, scores, tables, of_keys = ring_options(
            ring, q, k, v, partition, mask, scale, transport, depth, key_partition
        )
        if sinks is not None:
            check_tensors(sinks=sinks)
            check_collective(sinks=sinks)
    out, lse = call(_ops.ring_forward.default, q, k, v, *options, *scores, sinks, *tables, *of_keys)
    return out, lse


def block_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    diagonal: int | None = None,
    key_ranges: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    **refused: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of some queries on some keys, on one device and without a group: one step of a
    ring.

    Args:
        q: ``[B, S_q, H, D]``, float16, bfloat16 or float32 on CPU or CUDA, float64 on CPU. D is a
            multiple of 8, at most 256. Tensors ``[B, H, S_q, D]`` need their ``transpose(1, 2)``:
            where S_q is a multiple of S_k, nothing can tell that it is missing.
        k: ``[B, S_k, H_kv, D]``, ``H % H_kv == 0``, dtype and device of ``q``.
        v: like ``k``.
        scale: of the scores, any finite number; None means ``1 / sqrt(D)``.
        diagonal: as in ``torch.tril``: query row i sees key column j when ``j - i <= diagonal``; 0
            is causal. None masks nothing.
        key_ranges: int32 ``[S_q, 2]`` on the device of ``q``, instead of a diagonal: query row i
            sees the keys ``[begin, end)``, clamped to ``[0, S_k]``, none where begin >= end.
            Neither column decreases; on CUDA a table that does gives an unspecified result.
        softcap: as in :func:`ring_attention`.
        sinks: likewise.

    Returns:
        out ``[B, S_q, H, D]`` in the dtype of ``q``, and lse ``[B, H, S_q]``, natural log, float32
        (float64 for float64). A query that sees no key has out 0 and lse -inf, or its sink.

    Raises:
        ValueError: an argument that breaks a rule above, DTensors, ``torch.vmap``, keywords of
            other packages, as in :func:`ring_attention`.

    The tiled computation with running maximum and sum is FlashAttention (Dao et al.,
    https://arxiv.org/abs/2205.14135).
    """
    check_keywords("block_attention", refused)
    check_tensors(q=q, k=k, v=v)
    check_dims("q", q, "[B, S_q, H, D]")
    scale = finite_scale(scale, q)
    diagonal = check_int64_or_none("diagonal", diagonal)
    softcap = finite_softcap(softcap)
    tables = {"key_ranges": key_ranges, "sinks": sinks}
    check_tensors(**{name: table for name, table in tables.items() if table is not None})
    out, lse = call(_ops.block_attention, q, k, v, scale, diagonal, key_ranges, softcap, sinks)
    return out, lse


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys, from the attention over each. Exact.

    Args:
        out_a: ``[B, S, H, D]``, any floating dtype.
        lse_a: ``[B, H, S]``, natural log, any floating dtype.
        out_b: like ``out_a``.
        lse_b: like ``lse_a``.

    Returns:
        A new state: out ``[B, S, H, D]`` and lse ``[B, H, S]``, both float32, float64 where any
        input is float64. The state (0, -inf) is neutral.

    Raises:
        ValueError: shapes or devices that do not go together, dtypes that are not floating, inputs
            that require grad under grad mode, DTensors, ``torch.vmap``.

    Milakov and Gimelshein, https://arxiv.org/abs/1805.02867.
    """
    states = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    check_tensors(**states)
    for name, state in states.items():
        if not state.is_floating_point():
            raise ValueError(f"{name} must have a floating dtype, got {state.dtype}")
    double = any(state.dtype == torch.float64 for state in states.values())
    dtype = torch.float64 if double else torch.float32
    out, lse = (
        state.to(dtype, copy=True, memory_format=torch.contiguous_format)
        for state in (out_a, lse_a)
    )
    call(_ops.merge_states_, out, lse, out_b.to(dtype), lse_b.to(dtype), names=_MERGED)
    return out, lse


def synchronize(group: Group = None) -> None:
    """Waits until the calls of this rank are done, and raises what went wrong in them.

    On CUDA a call returns before its work is done; when a peer dies, or is found in another call
    over ``"symmetric"``, the results are filled with NaN and the error is raised by the next call
    or by this one.

    Args:
        group: as in :func:`ring_attention`.

    Raises:
        ValueError: a group this process is not in.
        torch.distributed.DistBackendError: a peer died, never arrived, or made another call.
    """
    ring = resolve_group(group)
    if ring.name:  # one rank without a group waits for no peer
        call(_C.synchronize, ring.name)
