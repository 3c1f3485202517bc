# SPDX-License-Identifier: Apache-2.0
"""Small models of Hugging Face transformers with random weights, the same in every process."""

from typing import Any

import torch
import transformers
from _distributed import this
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

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
    if family == "mistral":
        values["sliding_window"] = None
    if family == "granite":
        values |= {
            "attention_multiplier": 0.3,
            "embedding_multiplier": 2.0,
            "residual_multiplier": 0.5,
            "logits_scaling": 3.0,
        }
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
