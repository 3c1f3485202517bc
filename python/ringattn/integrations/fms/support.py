# SPDX-License-Identifier: Apache-2.0
"""Which models and calls of FMS the ring computes, and why it refuses others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import fms.models
import torch
from fms.modules.attention import MultiHeadAttention
from fms.modules.positions import RotaryEmbedding
from fms.modules.ssm import SSM
from torch import nn

from ringattn.integrations import shared
from ringattn.integrations.fms.attention import NAME

#: Modules of ``fms.models`` whose layers were read: they pass keyword arguments down to the
#: attention op, and nothing but attention looks at other tokens. Windows and sinks are those that a
#: layer passes to the op: its config may name a window that no layer uses.
SUPPORTED_FAMILIES = (
    *("llama", "granite", "granite_moe_hybrid", "granite_swa"),
    *("mistral", "mixtral", "qwen3", "gpt_oss"),
)

_ENCODERS = ("roberta", "mpnet")

# Rotations that depend on nothing but the position.
_ROPE_TYPES = ("regular", "llama3", "yarn")

# Keywords of other attention functions, and what a call of a model has instead.
_OTHER_KEYWORDS = {
    "attn_mask": "the mask is mask=",
    "attention_mask": "the mask is mask=",
    "cu_seqlens": "models of FMS take no packed documents",
}


def family(model: object) -> str | None:
    """The module of ``fms.models`` that a model's class is of; None for other objects."""
    root = fms.models.__name__ + "."
    for kind in type(model).__mro__:
        if issubclass(kind, nn.Module) and kind.__module__.startswith(root):
            name = kind.__module__.removeprefix(root)
            return None if name.startswith("hf.") else name
    return None


def body_of(model: Any) -> Any:
    """The part of a model that ends before its head: ``base_model``, or the model itself."""
    return getattr(model, "base_model", model)


def refusal(model: Any) -> str | None:
    """Why the ring cannot run this model, with every reason; None where it can."""
    return shared.refusal(type(model).__name__, _reasons(model))


def _reasons(model: Any) -> Iterator[str]:
    name = family(model)
    if name not in SUPPORTED_FAMILIES:
        yield f"the family must be one of {', '.join(SUPPORTED_FAMILIES)}"
    elif not hasattr(body_of(model), "layers"):
        yield "it must be a whole model or its base_model"
    if name in _ENCODERS:
        yield "its attention is not causal"
    modules = list(model.modules())
    layers = [module for module in modules if isinstance(module, MultiHeadAttention)]
    if any(isinstance(module, SSM) for module in modules):
        yield "it has state-space (SSM) layers"
    encoders = {id(layer.position_encoder): layer.position_encoder for layer in layers}
    for encoder in encoders.values():
        if encoder is not None and type(encoder) is not RotaryEmbedding:
            yield f"its positions are encoded by {type(encoder).__name__}"
        elif encoder is not None and encoder.rope_type not in _ROPE_TYPES:
            yield shared.rotary_reason(encoder.rope_type)
    yield from shared.head_dim_reasons(sorted({layer.emb_kq_per_head for layer in layers}))
    yield from shared.device_reasons(model)


def check_keywords(given: Mapping[str, Any]) -> None:
    """ValueError for keywords of a call to its attention op that change what is computed."""
    name = given.get("attn_name")
    if name is not None and name != NAME:
        raise ValueError(
            f'attn_name must be "{NAME}" or left out for a parallelized model, got {name!r}'
        )
    if given.get("is_causal_mask") is False:
        raise ValueError(
            "is_causal_mask must be True or left out, got False: attention here is causal"
        )
    if given.get("sliding_window"):
        raise ValueError(
            f"sliding_window must be 0, got {given['sliding_window']}: windows are not supported"
        )
    shared.check_keywords(given, _OTHER_KEYWORDS)


def num_positions(body: Any, device: torch.device) -> int | None:
    """In the model's table of rotations; None: it has no such table."""
    rotary = getattr(body, "rot_emb", None)
    if not isinstance(rotary, RotaryEmbedding):
        return None
    return rotary.max_seq_len_cached.get(device.index, rotary.rope_scaling.orig_max_seq_len)


def check_positions(body: Any, device: torch.device, highest: int) -> None:
    """ValueError where position ``highest`` is past the model's table of rotations, which FMS does
    not extend: on CUDA reading past it ends the process."""
    known = num_positions(body, device)
    if known is not None and highest >= known:
        raise ValueError(
            f"sequence must fit into max_expected_seq_len, {known} tokens, got {highest + 1}: pass "
            "max_expected_seq_len= to get_model()"
        )
