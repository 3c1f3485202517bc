# SPDX-License-Identifier: Apache-2.0
"""Packed documents cut into one chunk per rank, whatever the documents."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ringattn._checks import check_flag, check_integer, check_is_tensor
from ringattn._distributed.collectives import agree
from ringattn._distributed.errors import known_to_all
from ringattn._distributed.groups import Group, GroupInfo
from ringattn._masks import checked_documents, documents
from ringattn.compat.ring_flash_attn.calls import Options, attention, packed_forms
from ringattn.compat.ring_flash_attn.dense import chunks
from ringattn.compat.ring_flash_attn.varlen import boundaries_of
from ringattn.partition import Partition


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """What the documents of a pack are for one rank, which owns chunk ``rank`` of it.

    Args:
        cu_seqlens: boundaries of the documents in the whole pack, ``[0, ..., T]``, T a multiple of
            ``world_size``.
        causal: whether keys after the last query of the rank are left out.
        rank: of the ring.
        world_size: W.

    Returns:
        cu_seqlens_q, boundaries within the rows of the rank; cu_seqlens_k, boundaries within the
        keys that these see; the longest document of either; the slice of the pack that these keys
        are. Tensors have the dtype and device of ``cu_seqlens``.

    Raises:
        ValueError: boundaries that break a rule, a rank out of range.
    """
    check_is_tensor("cu_seqlens", cu_seqlens)
    given = documents(cu_seqlens)
    assert given is not None
    total = int(given[-1]) if given.numel() else 0
    boundaries = checked_documents(given, total).tolist()
    world_size = check_integer("world_size", world_size, least=1)
    rank = check_integer("rank", rank)
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must lie in [0, {world_size}), got {rank}")
    if total % world_size:
        raise ValueError(
            f"cu_seqlens must end with a multiple of the {world_size} ranks, got {total}"
        )
    rows = total // world_size
    begin, end = rank * rows, (rank + 1) * rows
    inside = [x for x in boundaries if begin < x < end]
    first = max(x for x in boundaries if x <= begin)
    last = end if check_flag("causal", causal) else min(x for x in boundaries if x >= end)
    queries = [0, *(x - begin for x in inside), rows]
    keys = [0, *(x - first for x in inside), last - first]

    def longest(of: list[int]) -> int:
        return max(b - a for a, b in pairwise(of))

    like: dict[str, Any] = {"dtype": cu_seqlens.dtype, "device": cu_seqlens.device}
    tensors = torch.tensor(queries, **like), torch.tensor(keys, **like)
    return *tensors, longest(queries), longest(keys), slice(first, last)


def llama3_flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    heads_k_stride: int | None,
    local_k_slice: slice,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    group: Group = None,
) -> Any:
    """Attention of rows [T_r, H, D] that are chunk r of W of a pack. ``cu_seqlens_q``,
    ``cu_seqlens_k`` and ``local_k_slice`` are those of
    :func:`llama3_flash_attn_prepare_cu_seqlens`; the ranks exchange them once for each new tensor
    ``cu_seqlens_k``."""

    def layout(ring: GroupInfo) -> tuple[Partition, tuple[int, ...]]:
        rows = q.size(0)
        boundaries = _whole_documents(ring, rows, cu_seqlens_q, cu_seqlens_k, local_k_slice)
        return chunks(rows, ring.world_size), boundaries

    options = Options(
        *(dropout_p, softmax_scale, causal, window_size, alibi_slopes),
        *(deterministic, return_attn_probs, group),
    )
    name = "llama3_flash_attn_varlen_func"
    return attention(name, q, k, v, layout, options, varlen=True)


llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = packed_forms(
    llama3_flash_attn_varlen_func
)

# Of a tensor cu_seqlens_k: its version and what else it was given with, and the whole documents.
_known = WeakTensorKeyDictionary()


@torch.compiler.disable
def _whole_documents(
    ring: GroupInfo, rows: int, cu_seqlens_q: Any, cu_seqlens_k: Any, local_k_slice: Any
) -> tuple[int, ...]:
    """Boundaries of the documents in the whole pack, of which a rank knows those near its rows.
    Collective where ``cu_seqlens_k`` is new."""
    versioned = isinstance(cu_seqlens_k, torch.Tensor) and not cu_seqlens_k.is_inference()
    key: Any = None
    if versioned and isinstance(local_k_slice, slice):
        places = (local_k_slice.start, local_k_slice.stop)
        key = (cu_seqlens_k._version, ring.name, ring.rank, ring.world_size, rows, *places)
        known = _known.get(cu_seqlens_k)
        if known is not None and known[0] == key:
            return known[1]
    mistake, starts = None, []
    try:
        starts = _starts(ring.rank, rows, cu_seqlens_q, cu_seqlens_k, local_k_slice)
    except ValueError as error:
        mistake = str(error)
    with known_to_all():
        facts = {"the number of rows of q": rows}
        of_ranks = agree(ring, "llama3_flash_attn_varlen_func", mistake, facts, starts)
    whole = (*(start for owned in of_ranks for start in owned), ring.world_size * rows)
    if whole[0] != 0:  # all ranks are without rows
        whole = (0, *whole)
    if key is not None:
        _known[cu_seqlens_k] = (key, whole)
    return whole


def _starts(
    rank: int, rows: int, cu_seqlens_q: Any, cu_seqlens_k: Any, local_k_slice: Any
) -> list[int]:
    """Positions in the pack at which documents begin, of those that this rank owns."""
    queries = boundaries_of("cu_seqlens_q", cu_seqlens_q, rows)
    if not isinstance(local_k_slice, slice) or local_k_slice.step not in (None, 1):
        raise ValueError(f"local_k_slice must be a slice of the pack, got {local_k_slice!r}")
    first, last = local_k_slice.start, local_k_slice.stop
    keys = boundaries_of("cu_seqlens_k", cu_seqlens_k, last - first)
    begin = rank * rows
    starts = [x + first for x in keys[:-1]]
    # The first document may begin before the rows of this rank.
    if not (
        starts[0] <= begin
        and begin + rows <= last
        and starts[1:] == [x + begin for x in queries[1:-1]]
    ):
        raise ValueError(
            "cu_seqlens_q, cu_seqlens_k and local_k_slice must be those that "
            f"llama3_flash_attn_prepare_cu_seqlens returns for rank {rank} of this group, got "
            f"{list(queries[:8])}, {list(keys[:8])} and {local_k_slice}"
        )
    return [start for start in starts if start >= begin]
