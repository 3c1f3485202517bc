# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens on a cache that is spread over the ranks: the function, which checks its
arguments, and the call of the operator."""

from typing import Literal, overload

import torch

from ringattn._checks import (
    check_collective,
    check_dims,
    check_flag,
    check_keywords,
    check_no_grad,
    check_tensors,
    finite_scale,
    finite_softcap,
)
from ringattn._distributed.errors import ErrorsToPeers, call
from ringattn._distributed.groups import Group, GroupInfo, resolve_group

_ops = torch.ops.ringattn

# The operator's names of arguments -> the names here.
_SHARDS = {"k": "k_shard", "v": "v_shard"}


@overload
def decode_attention(
    q: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor,
    *,
    group: Group = None,
    scale: float | None = None,
    key_lengths: torch.Tensor | None = None,
    key_begins: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[False] = False,
) -> torch.Tensor: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor,
    *,
    group: Group = None,
    scale: float | None = None,
    key_lengths: torch.Tensor | None = None,
    key_begins: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def decode_attention(
    q: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor,
    *,
    group: Group = None,
    scale: float | None = None,
    key_lengths: torch.Tensor | None = None,
    key_begins: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def decode_attention(
    q: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor,
    *,
    group: Group = None,
    scale: float | None = None,
    key_lengths: torch.Tensor | None = None,
    key_begins: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    return_lse: bool = False,
    **refused: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of the newest tokens on a key/value cache spread across ranks. Collective.

    Each rank attends to its own cached keys; the partial results are merged in rank order on every
    rank, so the result is bit-identical on all of them.

    Args:
        q: ``[B, T, H, D]``, the same on all ranks; dtypes and head dimensions as in
            :func:`ring_attention`.
        k_shard: this rank's cached keys, ``[B, N_r, H_kv, D]``, ``H % H_kv == 0``; any number of
            them, 0 included. All are visible to all queries of their batch row.
        v_shard: this rank's cached values, like ``k_shard``.
        group: as in :func:`ring_attention`.
        scale: of the scores, any finite number; None means ``1 / sqrt(D)``.
        key_lengths: int32 or int64 ``[B]`` on the device of ``q``: batch row b sees the first
            ``key_lengths[b]`` keys of this rank. Values are clamped to ``[0, N_r]`` and never read
            by the host on CUDA; keys and values past them may be uninitialised. None: all keys.
        key_begins: likewise: batch row b does not see the keys before ``key_begins[b]`` of this
            rank, which are not read and may be uninitialised. None: from the first key on.
        softcap: c > 0 makes the scaled scores ``c * tanh(score / c)``, the same c on all ranks; 0
            leaves them as they are.
        sinks: ``[H]`` on the device of ``q``, any float dtype: a logit for each query head that
            joins the softmax's denominator and carries no value, neither scaled nor capped. Given
            on every rank; those of the group's first rank count. -inf is no sink.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        out ``[B, T, H, D]`` in the dtype of ``q``, 0 where no rank has a visible key; with
        ``return_lse`` also lse ``[B, H, T]``, natural log, float32 (float64 for float64), which
        contains the sinks: without them -inf where no rank has a visible key.

    Raises:
        ValueError, torch.distributed.DistBackendError: as in :func:`ring_attention`.

    The split over keys is Flash-Decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html),
    here over ranks.
    """
    ring = resolve_group(group)
    with ErrorsToPeers(ring):
        check_keywords("decode_attention", refused)
        check_tensors(q=q, k_shard=k_shard, v_shard=v_shard)
        check_dims("q", q, "[B, T, H, D]")
        check_dims("k_shard", k_shard, "[B, S, H_kv, D]")
        check_collective(q=q, k_shard=k_shard, v_shard=v_shard)
        check_no_grad("decode_attention", q=q, k_shard=k_shard, v_shard=v_shard)
        scale = finite_scale(scale, q)
        return_lse = check_flag("return_lse", return_lse)
        key_lengths = _key_bounds("key_lengths", key_lengths, k_shard)
        key_begins = _key_bounds("key_begins", key_begins, k_shard)
        softcap = finite_softcap(softcap)
        if sinks is not None:
            check_tensors(sinks=sinks)
            check_collective(sinks=sinks)
            check_no_grad("decode_attention", sinks=sinks)
    mask = (key_lengths, key_begins, softcap, sinks)
    out, lse = attend_cached(ring, q, k_shard, v_shard, scale, *mask)
    return (out, lse) if return_lse else out


def _key_bounds(
    name: str, bounds: torch.Tensor | None, k_shard: torch.Tensor
) -> torch.Tensor | None:
    """``bounds`` as the operator takes them, int32."""
    if bounds is None:
        return None
    check_tensors(**{name: bounds})
    if bounds.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be torch.int32 or torch.int64, got {bounds.dtype}")
    if bounds.dtype == torch.int64:
        bounds = bounds.clamp(0, k_shard.size(1)).to(torch.int32)
    return bounds


def attend_cached(
    ring: GroupInfo,
    q: torch.Tensor,
    k_shard: torch.Tensor,
    v_shard: torch.Tensor,
    scale: float,
    key_lengths: torch.Tensor | None = None,
    key_begins: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    *,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`decode_attention` over a ring that is known, of tensors that have been checked: out
    and lse. The checks cost as much time as a small kernel, in every layer of every token.
    ``key_lengths`` and ``key_begins`` are int32. ``wide``: out is not rounded, a state."""
    mask = (key_lengths, key_begins, softcap, sinks)
    arguments = (q, k_shard, v_shard, scale, ring.name, *mask, wide)
    out, lse = call(_ops.decode_attention, *arguments, names=_SHARDS)
    return out, lse
