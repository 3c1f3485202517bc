# SPDX-License-Identifier: Apache-2.0
"""A LLaMA as a Hugging Face directory: ``config.json`` and ``model.safetensors``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ringattn._checks import check_floating
from ringattn.models.config import LLaMAConfig
from ringattn.models.llama import LLaMA
from ringattn.models.loading import weight_places


def save_model(
    model: LLaMA,
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model as a Hugging Face directory, which :func:`load_model` and transformers (4 and
    5) read. One rank writes; not collective.

    Args:
        model: its weights are the same on every rank.
        path: the folder; made where it is missing, its ``config.json`` and ``model.safetensors``
            are replaced.
        dtype: floating type of the weights in the file; None: that of the model.
        config: entries for ``config.json`` beside those of the model, such as ``bos_token_id``.

    Raises:
        ValueError: a dtype that is not floating; a model with a window, which transformers does not
            have in its LLaMA.
    """
    dtype = model.dtype if dtype is None else check_floating(dtype)
    entries = {**config_to_hf(model.config), "dtype": str(dtype).removeprefix("torch.")}
    weights = {
        name: place.detach().to("cpu", dtype).contiguous() for name, place in weight_places(model)
    }
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps({**entries, **(config or {})}, indent=2) + "\n"
    (folder / "config.json").write_text(text)


def config_to_hf(config: LLaMAConfig) -> dict[str, Any]:
    """Hugging Face's ``LlamaConfig`` in the form of transformers 4, which 5 reads, too."""
    if config.window_size is not None:
        raise ValueError(
            "window_size must be None in a Hugging Face directory, whose LLaMA has no window, "
            f"got {config.window_size}"
        )
    eos = list(config.eos_ids)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.src_vocab_size,
        "hidden_size": config.emb_dim,
        "intermediate_size": config.hidden_dim,
        "num_hidden_layers": config.nlayers,
        "num_attention_heads": config.nheads,
        "num_key_value_heads": config.kvheads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_expected_seq_len,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": dict(config.rope_scaling) or None,
        "attention_bias": config.attn_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_heads,
        "bos_token_id": None,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "pad_token_id": config.pad_id,
    }
