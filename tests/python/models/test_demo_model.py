# SPDX-License-Identifier: Apache-2.0
"""The model that ships with the package is what its page says: it predicts Python's own text."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[3]
MODEL = ROOT / "python" / "ringattn" / "models" / "pydoc_llama"

# What a loader has to understand, and what keeps the package small.
MAX_DIRECTORY_BYTES = 8 * 2**20
MAX_BITS_PER_BYTE = 2.1
MIN_DUPLICATE_CHARS = 40  # what the corpus promises: no prose as long as this twice
SAMPLE_BYTES = 3 * 4096 + 1  # three windows of held-out text and the last byte to predict


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    """The script that owns the split and the measure."""
    sys.path.insert(0, str(ROOT / "tools" / "demo_model"))
    try:
        return importlib.import_module("measure")
    finally:
        sys.path.pop(0)


@pytest.fixture(scope="module")
def corpus(demo: ModuleType) -> Any:
    return demo.build_corpus()


@pytest.fixture(scope="module")
def held_out(corpus: Any) -> torch.Tensor:
    return corpus.held_out_stream()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(MODEL).float().eval()


def test_the_model_is_small_byte_level_and_trained_long(model: LlamaForCausalLM) -> None:
    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= MAX_DIRECTORY_BYTES
    assert model.config.vocab_size == 256
    assert model.config.ringattn_tokenizer == "bytes"
    assert model.config.max_position_embeddings >= 8192
    assert model.config.num_key_value_heads < model.config.num_attention_heads


def test_no_prose_of_the_held_out_text_is_in_the_training_text(corpus: Any) -> None:
    def prose(texts: Iterable[str]) -> set[str]:
        # A heading is a signature, which may repeat; nothing else this long may.
        paragraphs = {p for text in texts for p in text.split("\n\n")}
        return {p for p in paragraphs if len(p) >= MIN_DUPLICATE_CHARS and "(" not in p}

    train, held_out = (prose(part.values()) for part in corpus.split())
    assert len(held_out) > 100
    assert not train & held_out


def test_held_out_loss_meets_the_bound_and_long_context_helps(
    demo: ModuleType, model: LlamaForCausalLM, held_out: torch.Tensor
) -> None:
    figures = demo.evaluate(model, held_out[:SAMPLE_BYTES], context=4096)
    middle = figures["positions_2048_to_4095"]
    assert figures["bits_per_byte"] <= MAX_BITS_PER_BYTE, figures
    assert middle["bytes"] == 3 * 2048, figures
    assert middle["bits_per_byte"] < middle["bits_per_byte_context_cut_to_256"], figures


def test_the_cut_loss_sees_at_most_256_bytes(
    demo: ModuleType, model: LlamaForCausalLM, held_out: torch.Tensor
) -> None:
    targets = torch.arange(2048, 2048 + demo.CUT_RUN)
    changed = held_out[:4096].clone()
    changed[: int(targets[-1]) - 256] = ord("x")  # all that the last target must not see
    before = demo.cut_context_bits(model, held_out[:4096], targets)
    after = demo.cut_context_bits(model, changed, targets)
    assert torch.equal(before, after)


def test_the_committed_figures_meet_the_bounds() -> None:
    figures = json.loads((MODEL / "evaluation.json").read_text())
    middle = figures["positions_2048_to_4095"]
    assert figures["bits_per_byte"] <= MAX_BITS_PER_BYTE
    assert middle["bits_per_byte"] < middle["bits_per_byte_context_cut_to_256"]


@pytest.mark.parametrize(
    "how",
    [{"do_sample": False}, {"do_sample": True, "temperature": 0.7, "top_k": 0}],
    ids=["greedy", "sampled"],
)
def test_a_continuation_is_printable_text(
    model: LlamaForCausalLM, held_out: torch.Tensor, how: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    prompt = held_out[:1024].long()[None]
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=128,
        **how,
        eos_token_id=None,
        pad_token_id=0,
    )
    text = bytes(ids[0, 1024:].tolist()).replace(b"\0", b"\n").decode("utf-8", "replace")
    assert len(text) >= 100
    assert all(c.isprintable() or c == "\n" for c in text), text
    assert sum(c.isalpha() for c in text) > len(text) // 2, text
