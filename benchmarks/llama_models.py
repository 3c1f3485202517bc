# SPDX-License-Identifier: Apache-2.0
"""One LLaMA, of this package, of transformers or of FMS, with regular attention and over the ring.

Both strategies share the weights. Regular attention is PyTorch's, on rank 0 alone.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ringattn
import torch
from decode import random_model
from lib.problem import DTYPES
from lib.ranks import world_size
from library_models import (
    SplitOf,
    Step,
    best_attention,
    fms_model,
    fms_step,
    own_step,
    sharing_weights,
    transformers_model,
    transformers_step,
    whole,
)
from peers import torch_sdpa
from ringattn import ModelCost
from ringattn.model_call import ModelCall
from ringattn.models import LLaMA, LLaMAConfig, load_model
from ringattn.models.loading import config_from_hf, read_json
from ringattn.parallel import Split
from ringattn.profiling import measure_profiles, tokens_to_measure
from torch.nn.attention import SDPBackend, sdpa_kernel

REGULAR, RING = "regular", "ring"


@dataclass(frozen=True)
class Strategy:
    """A model and how its attention is computed."""

    name: str  # REGULAR or RING
    step: Step
    split: SplitOf

    @property
    def alone(self) -> bool:
        """Whether rank 0 runs it while the others wait."""
        return self.name == REGULAR

    @property
    def ranks(self) -> int:
        return 1 if self.alone else world_size()


class RegularCall(ModelCall):
    """The call of a model on one rank whose attention is PyTorch's."""

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        mask: Any = None,  # causal, of every model here
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert self.cache is not None
        if self.is_prefill:
            self.cache.store(layer, k, v)
        else:
            k, v = self.cache.append(layer, k, v)
        grouped = q.size(2) != k.size(2)
        return torch_sdpa.attend(q, k, v, self.is_prefill, grouped)


def regular_attention(flash: bool) -> contextlib.AbstractContextManager[None]:
    """Around a prompt: PyTorch's fastest kernel, or with ``flash=False`` its fastest one but
    FlashAttention's and cuDNN's."""
    if flash:
        return best_attention()
    return sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH], set_priority=True)


def config_of(options: argparse.Namespace, shapes: dict[str, LLaMAConfig]) -> LLaMAConfig:
    """The shape that the command line asks for."""
    if options.model is not None:
        return config_from_hf(read_json(options.model / "config.json"))
    changes = {
        "emb_dim": options.dim,
        "nlayers": options.n_layers,
        "nheads": options.n_heads,
        "kvheads": options.n_kv_heads,
    }
    given = {name: value for name, value in changes.items() if value is not None}
    if "emb_dim" in given:
        given["hidden_dim"] = 7 * given["emb_dim"] // 2  # as in LLaMA-3-8B
    if "emb_dim" in given or "nheads" in given:
        given["head_dim"] = 0  # follows from the others
    if "nheads" in given and "kvheads" not in given:
        given["kvheads"] = 0  # as many
    return shapes[options.shape].updated(**given)


def model_text(config: LLaMAConfig, options: argparse.Namespace) -> str:
    """As headers name it."""
    return (
        f"{options.model.name if options.model else options.shape}: "
        f"{config.nlayers} layers of {config.emb_dim} and {config.hidden_dim}, "
        f"{config.nheads}/{config.kvheads} heads of {config.head_dim}"
    )


def strategies(
    config: LLaMAConfig, device: torch.device, options: argparse.Namespace
) -> list[Strategy]:
    """Those that the command line asks for, regular attention first."""
    makers = {"own": own, "transformers": of_transformers, "fms": of_fms}
    regular, ring, split = makers[options.library](config, device, options)
    found = {REGULAR: Strategy(REGULAR, regular, whole), RING: Strategy(RING, ring, split)}
    return [found[name] for name in options.strategies]


def split_of(config: LLaMAConfig, device: torch.device, options: argparse.Namespace) -> SplitOf:
    """Even, or planned from profiles that are measured now. Collective."""
    size = world_size()
    if options.partition == "even" or size == 1:
        return Split(size).partition
    profiles = profiles_of(config, device, options, max(options.seq_lens))
    dtype = DTYPES[options.dtype]
    cost = ModelCost.from_config(config, dtype=dtype)
    return Split(size, profiles=tuple(profiles), cost=cost).partition


def profiles_of(
    config: LLaMAConfig, device: torch.device, options: argparse.Namespace, seq_len: int
) -> list[ringattn.RankProfile]:
    """Of the ranks, for prompts of about ``seq_len`` tokens. Collective."""
    return measure_profiles(
        num_heads=config.nheads,
        num_kv_heads=config.kvheads,
        head_dim=config.head_dim,
        num_layers=config.nlayers,
        num_tokens=tokens_to_measure(seq_len, world_size(), device),
        dtype=DTYPES[options.dtype],
        device=device,
    )


# ---- this package's model -----------------------------------------------------------------------


def own_model(config: LLaMAConfig, device: torch.device, options: argparse.Namespace) -> LLaMA:
    dtype = DTYPES[options.dtype]
    if options.model is not None:
        return load_model(options.model, device=device, dtype=dtype)
    return random_model(config, device, dtype)


def own(config: LLaMAConfig, device: torch.device, options: Any) -> tuple[Step, Step, SplitOf]:
    model = own_model(config, device, options)
    split = split_of(config, device, options)
    regular = own_step(model.alone(), options.tokens, whole, RegularCall)
    return regular, own_step(model, options.tokens, split), split


# ---- models of other libraries ------------------------------------------------------------------


def of_transformers(config: LLaMAConfig, device: torch.device, options: Any) -> Any:
    if options.model is None:
        model = transformers_model(config, device, options)
    else:
        from transformers import AutoModelForCausalLM

        dtype = DTYPES[options.dtype]
        model = AutoModelForCausalLM.from_pretrained(
            options.model, dtype=dtype, attn_implementation="sdpa"
        )
        model = model.to(device).eval().requires_grad_(False)
    return both(model, config, device, options, transformers_step)


def of_fms(config: LLaMAConfig, device: torch.device, options: Any) -> Any:
    if options.model is None:
        model = fms_model(config, device, options)
    else:
        from ringattn.integrations.fms import get_model

        # Over the ring first: only then does FMS get the rotary embedding of Hugging Face's config.
        model = get_model(
            "hf_pretrained",
            model_path=str(options.model),
            device_type=device.type,
            data_type=DTYPES[options.dtype],
            distributed_strategy="ring",
        )
        model = ringattn.unparallelize(model.to(device)).eval().requires_grad_(False)
    return both(model, config, device, options, fms_step)


def both(
    model: Any,
    config: LLaMAConfig,
    device: torch.device,
    options: argparse.Namespace,
    step_of: Callable[[Any], Step],
) -> tuple[Step, Step, SplitOf]:
    over_ring = sharing_weights(model)
    split = split_of(config, device, options)
    if options.partition == "even":
        ringattn.parallelize(over_ring)
    else:
        # The lengths of the longest prompt serve shorter ones as shares.
        ringattn.parallelize(over_ring, partition=split(max(options.seq_lens)))
        split = Split.of(split(max(options.seq_lens)), world_size()).partition
    return step_of(model), step_of(over_ring), split


def model_folder(text: str) -> Path:
    """A type of arguments: a folder with a config.json."""
    folder = Path(text)
    if not (folder / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"must be a folder with config.json, got {text}")
    return folder
