# SPDX-License-Identifier: Apache-2.0
"""Which models and calls of transformers the ring computes, and why it refuses others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ringattn.integrations import shared

#: Families whose layers were read: they pass keyword arguments down to the attention function, and
#: nothing but attention looks at other tokens. What a layer passes (window, softcap, sinks) is what
#: the unmodified model computes; leftovers in its config are not.
SUPPORTED_FAMILIES = (
    *("llama", "qwen2", "qwen3", "mistral", "granite"),
    *("gemma2", "gemma3_text", "gpt_oss", "phi3", "olmo2", "olmo3", "cohere2"),
    "granite_swa",
)

# Rotations that depend on nothing but the position.
_ROPE_TYPES = ("default", "linear", "llama3", "yarn")

# Keywords of other attention functions, and what a call of a model has instead.
_OTHER_KEYWORDS = {
    "attn_mask": "the mask is attention_mask=",
    "cu_seqlens": "the boundaries of packed documents are cu_seq_lens_q= and cu_seq_lens_k=",
    "position_bias": "scores have no bias here",
    "head_mask": "all heads count alike here",
}


def refusal(model: Any) -> str | None:
    """Why the ring cannot run this PreTrainedModel, with every reason; None where it can."""
    config = model.config.get_text_config()
    return shared.refusal(config.model_type, _reasons(model, config))


def _reasons(model: Any, config: Any) -> Iterator[str]:
    if config.model_type not in SUPPORTED_FAMILIES:
        yield f"the family must be one of {', '.join(SUPPORTED_FAMILIES)}"
    if config.model_type == "gemma3_text" and hasattr(model.config, "vision_config"):
        yield "tokens of its images see each other: take its language model alone"
    kinds = set(getattr(config, "layer_types", None) or ())
    kinds |= set(getattr(config, "layers_block_type", None) or ())
    if "chunked_attention" in kinds or getattr(config, "attention_chunk_size", None):
        yield "it has chunked attention"
    if any("mamba" in kind for kind in kinds) or _has_state_space(config):
        yield "it has state-space (SSM) layers"
    elif any("linear" in kind for kind in kinds) or hasattr(config, "linear_num_value_heads"):
        yield "it has linear attention"
    if getattr(config, "kv_lora_rank", None):
        yield "it has latent attention (MLA)"
    if (
        config.is_encoder_decoder
        or getattr(config, "cross_attention_layers", None)
        or getattr(config, "add_cross_attention", False)
    ):
        yield "it has cross attention"
    if not getattr(config, "is_causal", True) or not all(_causal(model)):
        yield "its attention is not causal (is_causal=False)"
    for kind in sorted(_rope_types(config) - set(_ROPE_TYPES)):
        yield shared.rotary_reason(kind)
    head_dim = getattr(config, "head_dim", None)
    if head_dim is None and getattr(config, "num_attention_heads", None):
        head_dim = config.hidden_size // config.num_attention_heads
    if isinstance(head_dim, int):
        yield from shared.head_dim_reasons([head_dim])
    yield from shared.device_reasons(model)


def _has_state_space(config: Any) -> bool:
    return any(name.startswith(("mamba_", "ssm_")) or name == "state_size" for name in vars(config))


def _causal(model: Any) -> Iterator[bool]:
    for module in model.modules():
        if hasattr(module, "layer_idx"):
            yield bool(getattr(module, "is_causal", True))


def _rope_types(config: Any) -> set[str]:
    """Of ``rope_scaling`` (transformers 4) and ``rope_parameters`` (5), one for all layers or one
    for each kind of layer."""
    found: set[str] = set()
    for name in ("rope_scaling", "rope_parameters"):
        given = getattr(config, name, None)
        if not isinstance(given, Mapping):
            continue
        nested = [value for value in given.values() if isinstance(value, Mapping)]
        for one in nested or [given]:
            kind = one.get("rope_type", one.get("type", "default"))
            if kind is not None:
                found.add(kind)
    return found


def check_module(module: Any, implementation: str) -> None:
    """ValueError where the attention of a module of a parallelized model has been changed since."""
    found = module.config._attn_implementation
    if found != implementation:
        raise ValueError(
            f'attention must stay "{implementation}" while a model is parallelized, got {found!r}: '
            "call ringattn.unparallelize(model) first"
        )
    if not (getattr(module, "is_causal", True) and getattr(module.config, "is_causal", True)):
        raise ValueError("is_causal must be True, got False: attention here is causal")


def check_attention_keywords(given: Mapping[str, Any], num_keys: int) -> None:
    """ValueError for keywords of a call, or of a layer to its attention function, that change what
    is computed."""
    seen = given.get("sliding_window")
    if seen is not None and seen < num_keys:
        raise ValueError(
            f"sliding_window must cover all {num_keys} keys, got {seen}: windows are not supported"
        )
    shared.check_keywords(given, _OTHER_KEYWORDS)
    if given.get("is_causal") is False:
        raise ValueError("is_causal must be True or None, got False: attention here is causal")
