# SPDX-License-Identifier: Apache-2.0
"""Small models of Hugging Face transformers with random weights, the same in every process."""

from typing import Any

import torch
import transformers
from _distributed import this
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel

VOCAB = 61
FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "granite")

#: Shares of the ranks: one without tokens, and one that has almost all.
WEIGHTS = {1: [1], 2: [0, 1], 3: [4, 0, 7], 4: [1, 1, 0, 9]}

#: Real tokens of two rows of 13: padding before; padding after; both, down to one token.
MASKS = {
    "before": [[0] * 3 + [1] * 10, [0] * 12 + [1]],
    "after": [[1] * 5 + [0] * 8, [1] * 13],
    "around": [[0, 0] + [1] * 6 + [0] * 5, [0] * 4 + [1] + [0] * 8],
}

#: The keyword of a cache: transformers 5.24 renamed it.
CACHE = (
    "cache"
    if hasattr(transformers.modeling_outputs.CausalLMOutputWithPast(), "cache")
    else ("past_key_values")
)


#: What a config of a family has beside the common values.
OF_FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "granite": {
        "attention_multiplier": 0.3,
        "embedding_multiplier": 2.0,
        "residual_multiplier": 0.5,
        "logits_scaling": 3.0,
    },
    "gemma2": {"query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"query_pre_attn_scalar": 9},
    "gpt_oss": {"num_local_experts": 2, "num_experts_per_tok": 1},
}

#: (family, changes of its config) of models whose layers see windows, or of which some do.
MASKED = {
    "mistral": ("mistral", {"sliding_window": 5}),
    "qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "qwen3": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    ),
    "phi3": ("phi3", {"sliding_window": 3}),
    "phi3-full": ("phi3", {"sliding_window": None}),
    "gemma2": ("gemma2", {"sliding_window": 4}),
    "gemma3": (
        "gemma3_text",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gpt_oss": ("gpt_oss", {"sliding_window": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": (
        "olmo3",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "cohere2": (
        "cohere2",
        {"sliding_window": 2, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}
if "granite_swa" in CONFIG_MAPPING:  # of transformers 5
    MASKED["granite_swa"] = (
        "granite_swa",
        {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    )


def config_of(family: str, **changes: Any) -> Any:
    """A config of two layers. Granite's multipliers are not 1, so that one that is lost is seen."""
    values: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": None,
        "attention_dropout": 0.0,
    }
    values |= OF_FAMILIES.get(family, {})
    return AutoConfig.for_model(family, **(values | changes))


def model_of(
    family: str = "llama", kind: Any = AutoModelForCausalLM, device: Any = None, **changes: Any
) -> PreTrainedModel:
    """A model on this rank's device, its weights drawn from one seed and large enough for attention
    to matter."""
    torch.manual_seed(0)
    model = kind.from_config(config_of(family, **changes)).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(4)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.normal_()
    return model.to(this().device if device is None else device)


def token_ids(num_tokens: int, seed: int = 1, batch: int = 2) -> torch.Tensor:
    """int64 [batch, num_tokens] on this rank's device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCAB, (batch, num_tokens), generator=generator).to(this().device)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 2e-5) -> None:
    """Relative to the largest value; NaN and infinity are never near."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    assert expected.isfinite().all()
    distance = (actual - expected).abs().max().item() / expected.abs().max().item()
    assert distance <= tolerance, f"error must be at most {tolerance}, got {distance:.1e}"
