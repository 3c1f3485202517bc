# SPDX-License-Identifier: Apache-2.0
"""Small random LLaMAs in Hugging Face's format, written by transformers."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

VOCABULARY = 99
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tiny_llama(**changes: Any) -> LlamaForCausalLM:
    """Two layers, four query and two key/value heads of 16, weights wide enough that logits differ
    clearly. Without an end token unless ``changes`` give one."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 112,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "eos_token_id": None,
    }
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**(settings | changes))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    return model


def save(model: LlamaForCausalLM, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def random_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    """int64 token ids, the same in every process."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, shape, generator=generator)
