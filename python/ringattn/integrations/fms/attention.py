# SPDX-License-Identifier: Apache-2.0
"""The attention op "ring", as FMS registers such ops."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from fms.modules.attention import get_attention_type, register_attention_op

from ringattn._masks import Mask, sliding
from ringattn.integrations.shared import check_dropout
from ringattn.model_call import ModelCall

#: The name of this op in ``attn_name=``, and of this strategy in ``distributed_strategy=``.
NAME = "ring"


class LayerCall:
    """One forward of a model on its way through the layers. FMS tells an op neither its layer nor
    its module, so the op's calls are counted; each forward begins a new count. A layer that is
    computed again for a backward counts on, where no cache asks for its number."""

    def __init__(self, call: ModelCall, *, with_gradients: bool) -> None:
        self.call = call
        self.with_gradients = with_gradients
        self._layer = 0

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        mask: Mask,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """:meth:`ringattn.model_call.ModelCall.attend` of the next layer."""
        layer, self._layer = self._layer, self._layer + 1
        # Without: a generation in grad mode.
        with torch.set_grad_enabled(self.with_gradients and torch.is_grad_enabled()):
            return self.call.attend(layer, q, k, v, scale, mask, sinks)


def register() -> None:
    """Makes "ring" known to FMS. Calling it again changes nothing."""
    try:
        get_attention_type(attn_name=NAME)
    except KeyError:
        register_attention_op(NAME, store, compute)


def store(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: the layers of a parallelized model keep no cache of their own."""
    raise ValueError(_NOT_ON_A_RING)


def compute(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    nheads: int,
    kvheads: int,
    p_dropout: float,
    scale_factor: float | None,
    ringattn_call: LayerCall | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of one layer, with the signature that FMS gives such ops.

    Args:
        query: ``[B, S, H, D]``.
        keys: ``[B, S, H_kv, D]``, of the tokens of this call alone.
        values: like ``keys``.
        nheads: H.
        kvheads: H_kv.
        p_dropout: must be 0.
        scale_factor: of the scores; None means ``1 / sqrt(D)``.
        ringattn_call: of a parallelized model, whose body puts it among the keyword arguments.
        kwargs: the other ones of the call; of a layer with sinks, ``sinks`` and ``sliding_window``,
            which counts the query's own key.

    Returns:
        ``[B, S, H, D]``.
    """
    if ringattn_call is None:
        raise ValueError(_NOT_ON_A_RING)
    check_dropout(p_dropout, "p_dropout")
    mask, sinks = sliding(kwargs.get("sliding_window")), kwargs.get("sinks")
    return ringattn_call.attend(query, keys, values, scale_factor, mask, sinks)


_NOT_ON_A_RING = (
    f'attn_name="{NAME}" must be used by a model on a ring, got one that is not: pass the model to '
    "ringattn.parallelize(), and leave attn_name out"
)
