# SPDX-License-Identifier: Apache-2.0
"""The attention "flash_attention_2" of Hugging Face transformers, over a ring.

Each rank gives the model its chunk of a pack, batch size 1, with the position ids of its rows::

    substitute_hf_flash_attn(group, heads_k_stride=1)  # once
    update_ring_flash_attn_params(cu_seqlens, group)  # for each pack, on every rank
    model(input_ids=chunk, position_ids=position_ids_of_the_chunk)

:func:`ringattn.parallelize` does without both: it cuts the ids and balances the ranks itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringattn._checks import check_integer
from ringattn._distributed.errors import ErrorsToPeers
from ringattn._distributed.groups import GroupInfo, keep, resolve_group
from ringattn._masks import Mask
from ringattn.compat.ring_flash_attn.dense import chunks
from ringattn.compat.ring_flash_attn.llama3 import llama3_flash_attn_prepare_cu_seqlens
from ringattn.functional import attend
from ringattn.integrations.shared import check_dropout

_NAME = "flash_attention_2"

#: Of the current pack: ``cu_seqlens``, and what :func:`llama3_flash_attn_prepare_cu_seqlens`
#: returns for this rank, by their names.
DATA_PARAMS: dict[str, Any] = {}
RING_ATTN_SWITCH = True
_replaced: Any = None  # what transformers had under the name


def update_ring_flash_attn_params(
    cu_seqlens: torch.Tensor, process_group: dist.ProcessGroup | None
) -> None:
    """Sets the documents of the next calls, the same on every rank: ``cu_seqlens`` are boundaries
    in the whole pack, ``[0, ..., T]``, T a multiple of the ranks; ValueError for others."""
    ring = resolve_group(process_group)
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k", "local_k_slice")
    prepared = llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, ring.rank, ring.world_size)
    DATA_PARAMS.update(zip(names, prepared, strict=True), cu_seqlens=cu_seqlens)


def use_ring_attn(flag: bool) -> None:
    """Whether calls go through the ring; otherwise through what transformers had before."""
    global RING_ATTN_SWITCH
    RING_ATTN_SWITCH = flag


def substitute_hf_flash_attn(
    process_group: dist.ProcessGroup | None, heads_k_stride: int | None
) -> None:
    """From now on layers with the attention "flash_attention_2" attend over the ring, in all models
    of this process. ``heads_k_stride`` is not needed: blocks of keys travel with all heads.

    Served are ``sliding_window``, ``softcap`` and sinks (``s_aux``); padding (an
    ``attention_mask``), dropout and batches of more than one row are refused on all ranks.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    global _replaced
    if heads_k_stride is not None:
        check_integer("heads_k_stride", heads_k_stride, least=1)
    group = keep(resolve_group(process_group).group)
    if _replaced is None:
        _replaced = ALL_ATTENTION_FUNCTIONS[_NAME]

    def flash_attention_forward(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        if not RING_ATTN_SWITCH:
            return _replaced(
                *(module, query, key, value, attention_mask),
                dropout=dropout,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                **kwargs,
            )
        ring = resolve_group(group)
        causal = kwargs.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        # ``sliding_window`` counts the query's own key.
        left = -1 if sliding_window is None else sliding_window - 1
        window = (left, -1 if causal else left)
        mask = Mask(causal, window, softcap or 0.0, DATA_PARAMS.get("cu_seqlens"))
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        return _attend(ring, q, k, v, attention_mask, dropout, mask, scaling, kwargs), None

    ALL_ATTENTION_FUNCTIONS[_NAME] = flash_attention_forward


def _attend(
    ring: GroupInfo,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    mask: Mask,
    scale: float | None,
    kwargs: dict[str, Any],
) -> torch.Tensor:
    with ErrorsToPeers(ring):
        check_dropout(dropout, "attention_dropout")
        if attention_mask is not None:
            raise ValueError(
                "attention_mask must be None, the documents are those of "
                f"update_ring_flash_attn_params, got shape {list(attention_mask.shape)}"
            )
        if mask.cu_seqlens is None:
            raise ValueError(
                "update_ring_flash_attn_params(cu_seqlens, group) must be called before the model, "
                "got no call"
            )
        if q.size(0) != 1 or k.size(1) != q.size(1):
            raise ValueError(
                "q and k must be the same rows of one batch row, got "
                f"{list(q.shape[:2])} and {list(k.shape[:2])}"
            )
    partition = chunks(q.size(1), ring.world_size)
    out, _ = attend(ring, q, k, v, partition, mask, scale, sinks=kwargs.get("s_aux"))
    return out
