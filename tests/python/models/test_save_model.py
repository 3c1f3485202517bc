# SPDX-License-Identifier: Apache-2.0
"""save_model writes Hugging Face directories that load_model and transformers read."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _llama import LLAMA3_ROPE, random_ids
from ringattn.models import LLaMA, LLaMAConfig, load_model, save_model
from transformers import AutoModelForCausalLM

SHAPE = {"src_vocab_size": 99, "emb_dim": 64, "nlayers": 2, "nheads": 4, "hidden_dim": 112}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kvheads": 2, "tie_heads": True, "eos_ids": (3,), "pad_id": 1},
        {"attn_bias": True, "mlp_bias": True, "head_dim": 32, "eos_ids": (3, 4)},
        {
            "rope_theta": LLAMA3_ROPE["rope_theta"],
            "rope_scaling": {k: v for k, v in LLAMA3_ROPE.items() if k != "rope_theta"},
        },
    ],
    ids=["plain", "tied", "biases", "llama3"],
)
@torch.no_grad()
def test_what_is_saved_is_loaded_by_this_package_and_by_transformers(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = LLaMA(LLaMAConfig(**SHAPE, **changes), group="single")
    for parameter in model.parameters():
        parameter.normal_(0, 0.3)
    save_model(model, tmp_path / "model", config={"bos_token_id": 7})
    ids = random_ids(2, 20)
    right = model(ids)
    loaded = load_model(tmp_path / "model", group="single")
    assert loaded.config == model.config and torch.equal(loaded(ids), right)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert theirs.config.bos_token_id == 7
    torch.testing.assert_close(theirs(ids).logits, right, atol=1e-4, rtol=1e-4)
    save_model(model, tmp_path / "model", dtype=torch.bfloat16)  # replaces it
    halves = load_model(tmp_path / "model", group="single", dtype=torch.bfloat16)
    assert torch.equal(halves(ids), model.bfloat16()(ids))
    assert json.loads((tmp_path / "model" / "config.json").read_text())["dtype"] == "bfloat16"


def test_a_window_and_dtypes_without_floats_are_refused(tmp_path: Path) -> None:
    model = LLaMA(LLaMAConfig(**SHAPE, window_size=4), group="single")
    with pytest.raises(ValueError, match="window_size must be None in a Hugging Face directory"):
        save_model(model, tmp_path)
    with pytest.raises(ValueError, match="must be a floating"):
        save_model(model, tmp_path, dtype=torch.int8)
    assert list(tmp_path.iterdir()) == []
