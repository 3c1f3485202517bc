# SPDX-License-Identifier: Apache-2.0
"""Sequences of one document: contiguous, zigzag and striped rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from ringattn._distributed.groups import Group, GroupInfo
from ringattn.compat.ring_flash_attn.calls import Function, Options, attention, packed_forms
from ringattn.partition import Partition


@lru_cache(maxsize=64)
def chunks(rows: int, world_size: int) -> Partition:
    """Chunk r of W."""
    return Partition.contiguous([rows] * world_size)


@lru_cache(maxsize=64)
def _zigzag(rows: int, world_size: int) -> Partition:
    """Chunks r and 2W - 1 - r of 2W."""
    if rows % 2 == 1:
        raise ValueError(
            "q must have an even number of rows, a chunk of the head and one of the tail, "
            f"got {rows}"
        )
    return Partition.zigzag([rows] * world_size)


@lru_cache(maxsize=8)
def _stripes(rows: int, world_size: int) -> Partition:
    """Rows r, r + W, r + 2W, ..."""
    seq_len = rows * world_size
    return Partition.pieces(
        [[(i, i + 1) for i in range(rank, seq_len, world_size)] for rank in range(world_size)]
    )


def _function(name: str, partition: Callable[[int, int], Partition]) -> Function:
    def function(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: Sequence[int] = (-1, -1),
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        group: Group = None,
    ) -> Any:
        def layout(ring: GroupInfo) -> tuple[Partition, None]:
            return partition(q.size(1), ring.world_size), None

        options = Options(
            *(dropout_p, softmax_scale, causal, window_size, alibi_slopes),
            *(deterministic, return_attn_probs, group),
        )
        return attention(name, q, k, v, layout, options, varlen=False)

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"Attention of rows [B, S_r, H, D] that are laid out so: {partition.__doc__}"
    return function


ring_flash_attn_func = _function("ring_flash_attn_func", chunks)
zigzag_ring_flash_attn_func = _function("zigzag_ring_flash_attn_func", _zigzag)
stripe_flash_attn_func = _function("stripe_flash_attn_func", _stripes)

ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = packed_forms(ring_flash_attn_func)
zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = packed_forms(
    zigzag_ring_flash_attn_func
)
stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = packed_forms(
    stripe_flash_attn_func
)
