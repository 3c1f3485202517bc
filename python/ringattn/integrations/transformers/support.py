# SPDX-License-Identifier: Apache-2.0
"""Which models and calls of transformers the ring computes, and why it refuses others."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedModel

from ringattn.integrations import shared
from ringattn.integrations.transformers.caches import CACHES

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


def body_of(model: Any) -> Any:
    """The part of a model before its head: the layers, and what is around them."""
    body = model.base_model
    if body is model and hasattr(model, "lm_head"):  # Gemma 3 of transformers 4 names another
        body = getattr(model, "model", model)
    return body


def refusal(model: Any) -> str | None:
    """Why the ring cannot run this PreTrainedModel, with every reason; None where it can."""
    try:
        config = model.config.get_text_config()
    except ValueError:  # it has two of them
        config = model.config
    return shared.refusal(model.config.model_type, _reasons(model, config))


def _reasons(model: Any, config: Any) -> Iterator[str]:
    is_supported = config.model_type in SUPPORTED_FAMILIES
    if not is_supported:
        yield f"the family must be one of {', '.join(SUPPORTED_FAMILIES)}"
    elif config is not model.config:
        yield _text_model_reason(model, config)
    elif not set(CACHES) & set(inspect.signature(body_of(model).forward).parameters):
        yield (
            "its base_model_prefix must name its body, whose forward takes a cache, "
            f"got {model.base_model_prefix!r}"
        )
    kinds = set(_field(config, "layer_types") or ())
    kinds |= set(_field(config, "layers_block_type") or ())
    if "chunked_attention" in kinds or _field(config, "attention_chunk_size"):
        yield "it has chunked attention"
    if any("mamba" in kind for kind in kinds) or _has_state_space(config):
        yield "it has state-space (SSM) layers"
    elif any("linear" in kind for kind in kinds) or hasattr(config, "linear_num_value_heads"):
        yield "it has linear attention"
    if _field(config, "kv_lora_rank"):
        yield "it has latent attention (MLA)"
    if (
        config.is_encoder_decoder
        or _field(config, "cross_attention_layers")
        or _field(config, "add_cross_attention")
    ):
        yield "it has cross attention"
    if not _field(config, "is_causal", True) or not all(_causal(model)):
        yield "its attention is not causal (is_causal=False)"
    for kind in sorted(_rope_types(config) - set(_ROPE_TYPES)):
        yield shared.rotary_reason(kind)
    if is_supported:  # other families mean other things by these fields
        head_dim = _field(config, "head_dim")
        if head_dim is None and config.num_attention_heads:
            head_dim = config.hidden_size // config.num_attention_heads
        if isinstance(head_dim, int):
            yield from shared.head_dim_reasons([head_dim])
    yield from _adapter_reasons(model)
    yield from shared.device_reasons(model)


def _text_model_reason(model: Any, config: Any) -> str:
    """What to take of a model of several modalities; ``config`` of its text model."""
    if config.model_type == "gemma3_text":
        # Note: from_pretrained() of transformers 5 would load none of these weights.
        return (
            "tokens of its images see each other: make Gemma3ForCausalLM(model.config.text_config) "
            "and set its .model to model.model.language_model and its .lm_head to model.lm_head"
        )
    names = (
        name
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and module.config.model_type == config.model_type
    )
    return f"its text model alone can be on a ring: pass model.{next(names, 'language_model')}"


#: What adapters of PEFT, by their ``peft_type``, need of all tokens of a call.
_NEED_ALL_TOKENS: dict[Any, str] = {
    "LILY": "a Lily, whose router takes the mean over all tokens",
    "XLORA": "an X-LoRA, whose first pass scales all tokens",
}


def _adapter_reasons(model: Any) -> Iterator[str]:
    """For adapters that PEFT has put into a model."""
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "alora_invocation_tokens", None):
            yield (
                f"its adapter {name!r} is an aLoRA, which looks for its invocation among all tokens"
            )
        elif (what := _NEED_ALL_TOKENS.get(getattr(adapter, "peft_type", None))) is not None:
            yield f"its adapter {name!r} is {what}"


def _field(config: Any, name: str, default: Any = None) -> Any:
    """A field of a config; the default where it has none, or one for each layer."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # AmbiguousGlobalPerLayerAttributeError of transformers 5
        return default


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
        given = _field(config, name)
        if not isinstance(given, Mapping):
            continue
        nested = [value for value in given.values() if isinstance(value, Mapping)]
        for one in nested or [given]:
            kind = one.get("rope_type", one.get("type", "default"))
            if kind is not None:
                found.add(kind)
    return found


def check_adapters(model: Any) -> None:
    """ValueError where a parallelized model has got an adapter that is refused."""
    message = shared.refusal(model.config.model_type, _adapter_reasons(model))
    if message is not None:
        raise ValueError(message)


def check_loss_of_adapters(model: Any) -> None:
    """ValueError where PEFT adds a term of an adapter's weights to the loss: every rank has it
    whole, and gradients are summed over the ranks."""
    for name, adapter in (getattr(model, "peft_config", None) or {}).items():
        if getattr(adapter, "orth_reg_weight", 0):
            raise ValueError(
                "labels must be left out where an adapter is an AdaLoRA, which adds a term of its "
                f"weights to the loss on every rank, got the adapter {name!r}: compute the loss "
                "from the logits, with that term divided by the number of ranks"
            )


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
