# SPDX-License-Identifier: Apache-2.0
"""Small models of FMS with random weights, the same on every rank, and prompts for them."""

import copy
from typing import Any

import pytest
import torch
from _distributed import this
from torch import nn

granite = pytest.importorskip("fms.models.granite")
gpt_oss = pytest.importorskip("fms.models.gpt_oss")
granite_moe_hybrid = pytest.importorskip("fms.models.granite_moe_hybrid")
granite_swa = pytest.importorskip("fms.models.granite_swa")
llama = pytest.importorskip("fms.models.llama")
mistral = pytest.importorskip("fms.models.mistral")
mixtral = pytest.importorskip("fms.models.mixtral")
qwen3 = pytest.importorskip("fms.models.qwen3")
pad_input_ids = pytest.importorskip("fms.utils.generation").pad_input_ids

VOCABULARY = 97

_COMMON = {
    "src_vocab_size": VOCABULARY,
    "nheads": 4,
    "kvheads": 2,
    "nlayers": 2,
    "max_expected_seq_len": 64,
}
#: Of a llama.
SIZES: dict[str, Any] = {**_COMMON, "emb_dim": 32, "multiple_of": 8}
_EXPERTS: dict[str, Any] = {
    **_COMMON,
    "dim": 32,
    "hidden_dim": 48,
    "num_experts": 3,
    "top_k_experts": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_GRANITE = granite.GraniteConfig(
    **SIZES,
    head_dim=16,
    embedding_multiplier=3.0,
    logits_scaling=2.0,
    residual_multiplier=0.5,
    attention_multiplier=0.3,
)

WINDOW = 4
_GRANITE_SWA = granite_swa.GraniteSWAConfig(
    **SIZES, head_dim=16, pad_id=0, is_swa_layer=[True, False], window_length=WINDOW
)


def _gpt_oss(**kwargs: Any) -> Any:
    config = gpt_oss.GptOssConfig(
        **{name: value for name, value in _COMMON.items() if name != "max_expected_seq_len"},
        **{"emb_dim": 32, "head_dim": 16, "num_experts": 5, "rope_ntk_beta": 8.0},
    )
    config.max_expected_seq_len = _COMMON["max_expected_seq_len"]  # no field
    model = gpt_oss.GptOss(config, **kwargs)
    # FMS gives 128 to a layer with a window, whatever the config says.
    model.base_model.layers[0].layer_sliding_window = WINDOW
    return model


#: Constructors by name.
MODELS: dict[str, Any] = {
    "llama": lambda **kw: llama.LLaMA(llama.LLaMAConfig(**SIZES), **kw),
    "llama3": lambda **kw: llama.LLaMA(llama.LLaMAConfig(**SIZES, rope_scaling=_LLAMA3), **kw),
    "granite": lambda **kw: granite.Granite(_GRANITE, **kw),
    "granite_moe_hybrid": lambda **kw: granite_moe_hybrid.GraniteMoeHybrid(_GRANITE, **kw),
    "granite_swa": lambda **kw: granite_swa.GraniteSWA(_GRANITE_SWA, **kw),
    "gpt_oss": _gpt_oss,
    # FMS has a window in the config, which no layer uses.
    "mistral": lambda **kw: mistral.Mistral(
        mistral.MistralConfig(**SIZES, head_dim=8, sliding_window=4), **kw
    ),
    "mixtral": lambda **kw: mixtral.Mixtral(mixtral.MixtralConfig(**_EXPERTS), **kw),
    "qwen3": lambda **kw: qwen3.Qwen3(qwen3.Qwen3Config(**SIZES, head_dim=8), **kw),
}


def initialized(model: nn.Module, seed: int = 0) -> Any:
    """``model`` for inference, with random weights that differ enough for tokens to."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 1.5 / weight.size(-1) ** 0.5, generator=generator)
            elif name.endswith("sinks"):
                weight.normal_(0, 1, generator=generator)
            elif name.endswith("weight"):
                weight.uniform_(0.5, 1.5, generator=generator)
            else:
                weight.normal_(0, 0.1, generator=generator)
    model.post_init()
    return model.eval()


def tiny(name: str = "llama", **kwargs: Any) -> Any:
    """On the device of this rank."""
    model = initialized(MODELS[name](**kwargs)).to(this().device)
    model.post_init()  # tables of rotations are of one device
    return model


def two_of(name: str = "llama") -> tuple[Any, Any]:
    """The same model twice, to put one on a ring."""
    model = tiny(name)
    return model, copy.deepcopy(model)


def prompt(*shape: int, seed: int = 1) -> torch.Tensor:
    """Ids ``[B, S]`` or ``[S]``, of prompts of one length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, shape, generator=generator).to(this().device)


def padded(*lengths: int, side: str = "left", **kwargs: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """Ids of prompts of these lengths, and the mask and position ids that go with them."""
    rows = [prompt(length, seed=row) for row, length in enumerate(lengths)]
    ids, extra = pad_input_ids(rows, padding_side=side, **kwargs)
    return ids, {name: value.to(ids.device) for name, value in extra.items()}


def real(*lengths: int, side: str = "left") -> torch.Tensor:
    """bool ``[B, S]``: the tokens of :func:`padded` that are no padding."""
    columns, longest = torch.arange(max(lengths)), max(lengths)
    rows = [columns >= longest - n if side == "left" else columns < n for n in lengths]
    return torch.stack(rows)


def check_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"must be within 1e-4, got {error:.1e}"
