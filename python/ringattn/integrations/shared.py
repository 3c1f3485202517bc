# SPDX-License-Identifier: Apache-2.0
"""What the adapters of several libraries share; it knows no library's names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn

from ringattn._checks import HEAD_DIM_RULE, is_head_dim


def parameter_names(module: nn.Module) -> list[str]:
    """Of ``module.forward``, in order. Slow: adapters ask once, not in every call."""
    return list(inspect.signature(module.forward).parameters)


def by_name(names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call as keyword arguments."""
    return {**dict(zip(names, args, strict=False)), **kwargs}


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
