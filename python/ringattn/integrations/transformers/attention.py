# SPDX-License-Identifier: Apache-2.0
"""The attention implementation "ringattn": of a parallelized model, and of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ringattn._masks import Mask, sliding
from ringattn.integrations.shared import check_dropout
from ringattn.integrations.transformers.one_process import attend_alone, mask

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
        ringattn_call: of a parallelized model, whose body puts it among the keyword arguments; its
            ``call`` is a :class:`ringattn.model_call.ModelCall`, and its ``attended`` gets
            ``module``.
        kwargs: the layer's own, ``sliding_window``, ``softcap`` and ``s_aux`` (sinks), and what the
            caller gave to the model.

    Returns:
        ``[B, S, H, D]``, and None for the attention weights.
    """
    check_dropout(dropout, "attention_dropout")
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if ringattn_call is not None:
        ringattn_call.attended.add(module)
        layer: Any = module.layer_idx
        seen = layer_mask(kwargs, ringattn_call.documents)
        sinks = kwargs.get("s_aux")
        return ringattn_call.call.attend(layer, q, k, v, scaling, seen, sinks), None
    return attend_alone(module, q, k, v, attention_mask, scaling, kwargs), None


def layer_mask(given: Mapping[str, Any], documents: torch.Tensor | None = None) -> Mask:
    """The mask of a layer of a parallelized model, by what it passes to its attention function.
    ``sliding_window`` counts the query's own key."""
    mask = sliding(given.get("sliding_window"))
    return mask._replace(softcap=given.get("softcap") or 0.0, cu_seqlens=documents)
