# SPDX-License-Identifier: Apache-2.0
"""The attention implementation "ringattn", and the mask that goes with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from ringattn._distributed.groups import resolve_group
from ringattn._masks import Mask
from ringattn.functional import block_attention, decode_attention
from ringattn.integrations.shared import check_dropout
from ringattn.integrations.transformers.support import check_attention_keywords

#: The name of this implementation in ``attn_implementation=``.
NAME = "ringattn"


def register() -> None:
    """Makes "ringattn" known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    ringattn_call: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer, with the signature that transformers gives such functions.

    Args:
        module: the layer's attention module.
        query: ``[B, H, S, D]``.
        key: ``[B, H_kv, S, D]``, without a call the cached ones first.
        value: like ``key``.
        attention_mask: what :func:`mask` returned; not looked at in a parallelized model.
        scaling: of the scores.
        dropout: must be 0.
        ringattn_call: of a parallelized model, whose hooks put it among the keyword arguments; its
            ``call`` is a :class:`ringattn.model_call.ModelCall`.
        kwargs: the layer's own: ``sliding_window``, ``softcap`` and ``s_aux`` (sinks), which are
            refused without a call.

    Returns:
        ``[B, S, H, D]``, and None for the attention weights.
    """
    check_dropout(dropout, "attention_dropout")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if ringattn_call is not None:
        layer: Any = module.layer_idx
        seen = layer_mask(kwargs, ringattn_call.documents)
        sinks = kwargs.get("s_aux")
        return ringattn_call.call.attend(layer, q, k, v, scaling, seen, sinks), None
    _check_alone(module, attention_mask, kwargs, k.size(1))
    if q.size(1) == 1:
        return decode_attention(q, k, v, group="single", scale=scaling), None
    out, _ = block_attention(q, k, v, scale=scaling, diagonal=k.size(1) - q.size(1))
    return out, None


def layer_mask(given: Mapping[str, Any], documents: torch.Tensor | None = None) -> Mask:
    """The mask of a layer of a parallelized model, by what it passes to its attention function.
    ``sliding_window`` counts the query's own key."""
    window = given.get("sliding_window")
    left = -1 if window is None else window - 1
    return Mask(True, (left, -1), given.get("softcap") or 0.0, documents)


def mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    """No mask: attention here is causal. What is not plain causal attention is refused.

    transformers asks for it once per forward, of one process without :func:`ringattn.parallelize`.
    """
    _check_one_rank()
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask must be all ones, got padding: pass the model to "
            "ringattn.parallelize(), which serves padding on one process too"
        )
    if "cache_position" in kwargs:  # transformers 4
        places = kwargs["cache_position"]
        first, num_queries, device = int(places[0]), places.numel(), places.device
    else:
        first, num_queries = int(kwargs["q_offset"]), kwargs["q_length"]
        device = kwargs["device"]
    if kv_length != first + num_queries:
        raise ValueError(
            f"cache must hold the keys seen so far, {first + num_queries} with the new ones, got "
            f'room for {kv_length}: a static or sliding cache is not supported by "{NAME}"'
        )
    causal = _is_causal(mask_function, batch_size, first, kv_length, device)
    if kwargs.get("use_vmap") or not causal:
        raise ValueError(
            "attention must be causal over the whole sequence, got another mask (a window, packed "
            f'position_ids, is_causal=False or one of the model\'s own): "{NAME}" has none'
        )


def _is_causal(
    visible: Callable[..., Any], batch_size: int, first: int, num_keys: int, device: Any
) -> bool:
    """Whether a mask function of transformers hides nothing but later keys from the queries from
    ``first`` on. Such functions are composed of windows, boundaries between packed sequences and
    blocks without an order: the first two hide a key from the last query, a block shows a query the
    key after it."""
    if visible is causal_mask_function:
        return True
    rows = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    keys = torch.arange(num_keys, device=device)
    last = visible(rows, head, torch.full_like(keys, num_keys - 1), keys)
    later = torch.as_tensor(visible(rows, head, keys[first:-1], keys[first + 1 :]))
    return bool(last.all() & ~later.any())


def _check_alone(
    module: torch.nn.Module, attention_mask: Any, kwargs: dict[str, Any], num_keys: int
) -> None:
    _check_one_rank()
    if attention_mask is not None:
        raise ValueError(
            'attention_mask must be [B, S] or None for "ringattn", '
            f"got {list(getattr(attention_mask, 'shape', [])) or type(attention_mask).__name__}"
        )
    if not getattr(module, "is_causal", True):
        raise ValueError("is_causal must be True, got a layer with False: attention here is causal")
    check_attention_keywords(kwargs, num_keys)


def _check_one_rank() -> None:
    world_size = resolve_group(None).world_size
    if world_size > 1:
        raise ValueError(
            f'attn_implementation="ringattn" must be on one process, got a group of {world_size}: '
            'pass the model to ringattn.parallelize(), with group="single" to stay on one process'
        )
