# SPDX-License-Identifier: Apache-2.0
"""What the adapters of several libraries share; it knows no library's names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from ringattn import _checks
from ringattn._checks import HEAD_DIM_RULE, is_head_dim

# Keywords of ring_attention, which models of other libraries take and drop: what to write instead,
# and the values that change nothing.
_PARALLELIZE = "give it to ringattn.parallelize()"
_LAYERS_OWN = "each layer has its own"
_KEYWORDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "partition": (_PARALLELIZE, (None,)),
    "group": (_PARALLELIZE, (None,)),
    "transport": (_PARALLELIZE, (None,)),
    "depth": ("the ring chooses it", (None,)),
    "causal": ("attention here is causal", (None, True)),
    "scale": (_LAYERS_OWN, (None,)),
    "softcap": (_LAYERS_OWN, (None, 0)),
    "window_size": (_LAYERS_OWN, (None, (-1, -1), (None, None))),
    "sinks": (_LAYERS_OWN, (None,)),
    "s_aux": (_LAYERS_OWN, (None,)),
    "key_partition": ("keys before this call are those of the cache", (None,)),
    "return_lse": ("models return no log-sum-exp", (None, False)),
}


def names_of(signature: inspect.Signature) -> list[str]:
    """The arguments of a function that have names, in order."""
    rest = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [name for name, each in signature.parameters.items() if each.kind not in rest]


def by_name(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call as keyword arguments; ``names`` as of :func:`names_of`.

    Raises:
        TypeError: more positional arguments than names, one that is given by name, too.
    """
    if len(args) > len(names):
        raise TypeError(
            f"call must have {len(names)} positional arguments at most, got {len(args)}"
        )
    for name in names[: len(args)]:
        if name in kwargs:
            raise TypeError(f"{name} must be given once, got it by position and by name")
    return {**dict(zip(names, args, strict=False)), **kwargs}


def check_keywords(given: Mapping[str, Any], others: Mapping[str, str]) -> None:
    """ValueError for keywords of a model's call that its library would drop: those of
    :func:`ringattn.ring_attention`, and ``others``, with what to write instead."""
    rules = {**_KEYWORDS, **{name: (instead, (None,)) for name, instead in others.items()}}
    found = {name: given[name] for name in rules if name in given}
    _checks.check_keywords("model", found, rules)


def refusal(kind: str, reasons: Iterable[str]) -> str | None:
    """The sentence that refuses a model of this kind, with every reason; None without reasons."""
    found = list(reasons)
    if not found:
        return None
    return f"model must be one that the ring computes, got {kind}: {'; '.join(found)}"


def rotary_reason(rope_type: str) -> str:
    """Why a rotary embedding cannot be computed shard by shard."""
    return f"its rotary embedding is of type {rope_type!r}, which depends on the length of a call"


def head_dim_reasons(head_dims: Iterable[int]) -> Iterator[str]:
    """For head dimensions that kernels do not take."""
    for head_dim in head_dims:
        if not is_head_dim(head_dim):
            yield f"its head dimension must be {HEAD_DIM_RULE}, got {head_dim}"


def check_dropout(dropout: float, option: str) -> None:
    """ValueError where a layer in training mode drops probabilities; ``option`` of its config."""
    if dropout:
        raise ValueError(
            f"attention dropout must be 0, got {dropout}: call model.eval(), or set {option} to 0 "
            "in the config"
        )


def device_reasons(model: nn.Module) -> Iterator[str]:
    """For weights on more than one device."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if len(devices) > 1:
        yield f"its weights must be on one device, got {', '.join(devices)}"
