# SPDX-License-Identifier: Apache-2.0
"""Packed documents, each of which is cut into equal shares of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch

from ringattn._distributed.groups import Group, GroupInfo
from ringattn._masks import documents
from ringattn.compat.ring_flash_attn.calls import Function, Options, attention, packed_forms
from ringattn.partition import Partition

# The partition, and the boundaries of the whole documents.
_Pack = tuple[Partition, tuple[int, ...]]


@lru_cache(maxsize=64)
def _chunks(shares: tuple[int, ...], world_size: int) -> _Pack:
    """Of each document chunk r of W."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for begin, end in pairwise(shares):
        start, length = begin * world_size, end - begin
        for rank, owned in enumerate(pieces):
            owned.append((start + rank * length, start + (rank + 1) * length))
    return Partition.pieces(pieces), tuple(share * world_size for share in shares)


@lru_cache(maxsize=64)
def _zigzag(shares: tuple[int, ...], world_size: int) -> _Pack:
    """Of each document chunks r and 2W - 1 - r of 2W."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for begin, end in pairwise(shares):
        start, length = begin * world_size, end - begin
        if length % 2 == 1:
            raise ValueError(
                "cu_seqlens must give each document an even number of rows, a chunk of its head "
                f"and one of its tail, got {length} from {begin} to {end}"
            )
        half = length // 2
        for rank, owned in enumerate(pieces):
            for chunk in (rank, 2 * world_size - 1 - rank):
                owned.append((start + chunk * half, start + (chunk + 1) * half))
    return Partition.pieces(pieces), tuple(share * world_size for share in shares)


def boundaries_of(name: str, cu_seqlens: Any, rows: int) -> tuple[int, ...]:
    """Boundaries of documents within the ``rows`` rows of this rank, or a ValueError."""
    given = documents(cu_seqlens)
    values = () if given is None else tuple(given.tolist())
    if len(values) < 2 or values[0] != 0 or values[-1] != rows:
        raise ValueError(
            f"{name} must be [0, ..., {rows}], the boundaries within the rows of this rank, "
            f"got {list(values[:8])}"
        )
    if any(end < begin for begin, end in pairwise(values)):
        raise ValueError(f"{name} must not decrease, got {list(values[:8])}")
    return values


def _function(name: str, pack: Callable[[tuple[int, ...], int], _Pack]) -> Function:
    def function(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_seqlen: int | None,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Any:
        def layout(ring: GroupInfo) -> _Pack:
            return pack(boundaries_of("cu_seqlens", cu_seqlens, q.size(0)), ring.world_size)

        options = Options(
            *(dropout_p, softmax_scale, causal, window_size, alibi_slopes),
            *(deterministic, return_attn_probs, group),
        )
        return attention(name, q, k, v, layout, options, varlen=True)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Attention of rows [T_r, H, D] that are laid out so: {pack.__doc__}"
    return function


ring_flash_attn_varlen_func = _function("ring_flash_attn_varlen_func", _chunks)
zigzag_ring_flash_attn_varlen_func = _function("zigzag_ring_flash_attn_varlen_func", _zigzag)

ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = packed_forms(
    ring_flash_attn_varlen_func
)
zigzag_ring_flash_attn_varlen_kvpacked_func, zigzag_ring_flash_attn_varlen_qkvpacked_func = (
    packed_forms(zigzag_ring_flash_attn_varlen_func)
)
