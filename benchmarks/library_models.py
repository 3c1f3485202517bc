# SPDX-License-Identifier: Apache-2.0
"""One LLaMA shape as a model of this package, transformers and FMS, and how each is called."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import torch
from lib.problem import DTYPES
from ringattn import Partition
from ringattn.model_call import ModelCall
from ringattn.models import LLaMA, LLaMAConfig
from ringattn.models.decode_step import DecodeStep
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

LIBRARIES = ("own", "transformers", "fms")
BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

#: One call of a model: token ids [B, T] and what the call before returned as its state.
Step = Callable[[torch.Tensor, Any], tuple[torch.Tensor, Any]]  # -> logits [B, V], the next state
#: Who owns which tokens of a prompt of so many.
SplitOf = Callable[[int], Partition]


def best_attention() -> contextlib.AbstractContextManager[None]:
    return sdpa_kernel(BACKENDS, set_priority=True)


def sharing_weights(model: nn.Module) -> nn.Module:
    """A copy with hooks and config of its own, and the same tensors."""
    tensors = (*model.parameters(), *model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def whole(seq_len: int) -> Partition:
    """The split of a prompt on one rank."""
    return Partition.even(seq_len, 1)


def own_step(
    model: LLaMA, new_tokens: int, split: SplitOf, call_type: type[ModelCall] = ModelCall
) -> Step:
    def prompt(ids: torch.Tensor) -> tuple[torch.Tensor, Any]:
        ring, partition = model.ring, split(ids.size(1))
        cache = model.new_cache(partition, new_tokens=new_tokens)
        call = call_type.prefill(ring, partition, cache=cache)
        positions = partition.position_ids(ring.rank, ids.device)
        hidden = model.base_model(partition.shard(ids, ring.rank), positions, call)
        step = DecodeStep.of(model, cache, ids.size(0))
        return model.project(call.last(hidden, 1)[:, 0]), (cache, step, 0)

    def step(ids: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        if state is None:
            return prompt(ids)
        cache, fused, tokens = state
        if fused is None:
            call = call_type.decode(model.ring, cache)
            positions = torch.full((1,), call.num_before, device=ids.device)
            hidden = model.base_model(ids, positions, call)[:, 0]
        else:
            hidden = fused(ids[:, 0])
            if tokens == 0:
                fused.record()
        return model.project(hidden), (cache, fused, tokens + 1)

    return step


def transformers_model(config: LLaMAConfig, device: torch.device, options: Any) -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    theirs = LlamaConfig(
        vocab_size=config.src_vocab_size,
        hidden_size=config.emb_dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.nlayers,
        num_attention_heads=config.nheads,
        num_key_value_heads=config.kvheads,
        max_position_embeddings=config.max_expected_seq_len,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_heads,
    )
    with device:
        dtype = DTYPES[options.dtype]
        model = AutoModelForCausalLM.from_config(theirs, dtype=dtype, attn_implementation="sdpa")
    return seeded(model)


def transformers_step(model: Any) -> Step:
    def step(ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        # The second of a call's results, under the names of all versions.
        out = model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).to_tuple()
        return out[0][:, -1], out[1]

    return step


def fms_model(config: LLaMAConfig, device: torch.device, options: Any) -> Any:
    from fms.models.llama import LLaMA as FMSLLaMA
    from fms.models.llama import LLaMAConfig as FMSConfig

    theirs = FMSConfig(
        src_vocab_size=config.src_vocab_size,
        emb_dim=config.emb_dim,
        nheads=config.nheads,
        kvheads=config.kvheads,
        nlayers=config.nlayers,
        hidden_grow_factor=config.hidden_dim / config.emb_dim,
        multiple_of=1,
        # A table of rotations for every position: no more than this run needs.
        max_expected_seq_len=max(options.seq_lens) + options.tokens,
        rope_theta=config.rope_theta,
        tie_heads=config.tie_heads,
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[options.dtype])
    try:
        with device:
            model = FMSLLaMA(theirs)
            model.reset_parameters()
            model.post_init()
    finally:
        torch.set_default_dtype(default)
    return seeded(model)


def fms_step(model: Any) -> Step:
    def step(ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        logits, cache = model(ids, past_key_value_states=cache, use_cache=True, last_n_tokens=1)
        return logits[:, -1], cache

    return step


def seeded(model: nn.Module) -> nn.Module:
    """The same weights on every rank, matrices small enough for sums to stay near 1."""
    generator = torch.Generator(next(model.parameters()).device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)
