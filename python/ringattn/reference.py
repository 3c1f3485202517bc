# SPDX-License-Identifier: Apache-2.0
"""The whole ring in pure torch, in one process: slow and obvious, what tests compare with.

Everything is computed in the dtype of the inputs; give float64 for a reference. No code is shared
with the operators: which keys a query sees comes from positions alone.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from ringattn.partition import Partition


def masked_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Dense attention under any mask.

    Args:
        q: ``[B, S_q, H, D]``.
        k: ``[B, S_k, H_kv, D]``.
        v: ``[B, S_k, H_kv, D]``.
        visible: bool ``[S_q, S_k]``, which query sees which key.
        scale: of the scores; None means ``1 / sqrt(D)``.
        softcap: scores become ``softcap * tanh(score / softcap)``; 0 leaves them as they are.
        sinks: ``[H]``, a logit of each head that joins the denominator; None: none.

    Returns:
        out ``[B, S_q, H, D]`` and lse ``[B, H, S_q]`` (natural log), in the dtype of ``q``; a query
        that sees no key has out 0 and lse -inf, or its sink.
    """
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    group_size = q.size(2) // k.size(2)
    k, v = (x.repeat_interleave(group_size, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    # The clamp is for rows that see nothing: -inf - -inf would be NaN.
    weights = torch.exp(scores - lse.clamp(min=torch.finfo(lse.dtype).min).unsqueeze(-1))
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    diagonal: int | None = None,
    scale: float | None = None,
    *,
    key_ranges: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of :func:`ringattn.block_attention`: query row i sees key column j when
    ``j - i <= diagonal``, or by ``key_ranges`` when ``begin <= j < end``; without either all.
    Shapes as in :func:`masked_attention`."""
    visible = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
    if key_ranges is not None:
        columns = torch.arange(k.size(1), device=q.device)
        visible = (columns >= key_ranges[:, :1]) & (columns < key_ranges[:, 1:])
    elif diagonal is not None:
        visible = visible.tril(diagonal)
    return masked_attention(q, k, v, visible, scale, softcap, sinks)


def visible_keys(
    query_at: torch.Tensor,
    key_at: torch.Tensor,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
) -> torch.Tensor:
    """Which query sees which key, by their positions in the sequence.

    Args:
        query_at: int64 ``[S_q]``.
        key_at: int64 ``[S_k]``.
        causal: a query sees the keys at its own and at earlier positions.
        window_size: (left, right), the keys before and after it that a query sees; -1: all.
        cu_seqlens: boundaries of packed documents; None: one document.

    Returns:
        bool ``[S_q, S_k]``.
    """
    after = key_at[None, :] - query_at[:, None]  # how far the key is after the query
    visible = torch.ones_like(after, dtype=torch.bool)
    left, right = window_size
    if causal:
        visible &= after <= 0
    if left >= 0:
        visible &= after >= -left
    if right >= 0:
        visible &= after <= right
    if cu_seqlens is not None:
        ends = torch.as_tensor(cu_seqlens, device=key_at.device)
        document = [torch.searchsorted(ends, at, right=True) for at in (query_at, key_at)]
        visible &= document[0][:, None] == document[1][None, :]
    return visible


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the union of two disjoint sets of keys. out ``[B, S, H, D]``, lse ``[B, H,
    S]``."""
    lse = torch.logaddexp(lse_a, lse_b)
    finite = lse.clamp(min=torch.finfo(lse.dtype).min)  # both sides empty: weights 0
    weight_a, weight_b = (
        torch.exp(side - finite).transpose(1, 2).unsqueeze(-1) for side in (lse_a, lse_b)
    )
    return out_a * weight_a + out_b * weight_b, lse


def rank_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition,
    rank: int,
    causal: bool = True,
    scale: float | None = None,
    *,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: Sequence[int] | torch.Tensor | None = None,
    key_partition: Partition | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of one rank of a ring, folded block by block in visiting order.

    Args:
        q: all queries, ``[B, S, H, D]``; so are k and v, ``[B, S_k, H_kv, D]``.
        partition: which rank owns which queries, and which keys where there is no other for them.
        rank: whose rows are computed.
        causal: a query sees the keys at its own and at earlier positions.
        scale: of the scores; None means ``1 / sqrt(D)``.
        window_size: as in :func:`ringattn.ring_attention`; so are the others.
        softcap: of the scores.
        sinks: ``[H]``.
        cu_seqlens: boundaries of packed documents.
        key_partition: which rank owns which keys; the queries are the last of their positions.

    Returns:
        out ``[B, S_r, H, D]`` and lse ``[B, H, S_r]``, in the dtype of ``q``.
    """
    keys_of = partition if key_partition is None else key_partition
    queries, query_at = partition.shard(q, rank), partition.position_ids(rank, q.device)
    query_at = query_at + keys_of.seq_len - partition.seq_len
    out = torch.zeros_like(queries)
    lse = queries.new_full((q.size(0), q.size(2), queries.size(1)), -math.inf)
    place = keys_of.order.index(rank)
    for step in range(keys_of.world_size):
        source = keys_of.order[place - step]  # the own block, then those of the ranks before
        key_at = keys_of.position_ids(source, q.device)
        visible = visible_keys(query_at, key_at, causal, window_size, cu_seqlens)
        keys, values = keys_of.shard(k, source), keys_of.shard(v, source)
        block = masked_attention(queries, keys, values, visible, scale, softcap)
        out, lse = merge_states(out, lse, *block)
    if sinks is None:
        return out, lse
    # A sink is a key without a value.
    return merge_states(out, lse, torch.zeros_like(out), sinks.to(lse)[:, None].expand_as(lse))


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    partition: Partition,
    causal: bool = True,
    scale: float | None = None,
    **mask: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All ranks of a ring, one after the other; arguments as in :func:`rank_attention`.

    Returns:
        out ``[B, S, H, D]`` and lse ``[B, H, S]`` of all queries.
    """
    states = [
        rank_attention(q, k, v, partition, rank, causal, scale, **mask)
        for rank in range(partition.world_size)
    ]
    outs, lses = zip(*states, strict=True)
    return partition.unshard(outs, dim=1), partition.unshard(lses, dim=2)
