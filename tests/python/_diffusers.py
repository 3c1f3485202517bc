# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers of diffusers with random weights, on one process or on the ranks of a group.

Tests that import this module are skipped where diffusers is not installed.
"""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _distributed import this

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("needs diffusers", allow_module_level=True)

from diffusers import (
    ContextParallelConfig,
    FluxTransformer2DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)
from diffusers.hooks import context_parallel
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from ringattn.integrations import diffusers as integration

integration.register()

RINGATTN = AttentionBackendName("ringattn")
Inputs = dict[str, Any]


def flux() -> FluxTransformer2DModel:
    torch.manual_seed(0)
    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()


def flux_inputs(num_image: int, num_text: int) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, num_image, 4, generator=generator),
        "encoder_hidden_states": torch.randn(2, num_text, 32, generator=generator),
        "pooled_projections": torch.randn(2, 32, generator=generator),
        "timestep": torch.tensor([0.3, 0.7]),
        "img_ids": torch.arange(3.0 * num_image).view(num_image, 3) % 7,
        "txt_ids": torch.zeros(num_text, 3),
    }


def wan(**options: Any) -> WanTransformer3DModel:
    torch.manual_seed(0)
    return WanTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=128,
        **options,
    ).eval()


def wan_inputs(num_tokens: int, num_text: int = 7) -> Inputs:
    """A token is one frame of 2 x 2 latents."""
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 4, num_tokens, 2, 2, generator=generator),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, num_text, 16, generator=generator),
    }


def wan_times_of_tokens_inputs(num_tokens: int) -> Inputs:
    """Each token has a time of its own, as Wan 2.2 has where an image is given."""
    return wan_inputs(num_tokens) | {"timestep": torch.arange(2 * num_tokens).view(2, -1) % 11}


def wan_from_image() -> WanTransformer3DModel:
    """Attends to an image beside the text: two cross attentions in each layer."""
    return wan(image_dim=24, added_kv_proj_dim=32)


def wan_from_image_inputs(num_tokens: int) -> Inputs:
    generator = torch.Generator().manual_seed(2)
    image = torch.randn(2, 5, 24, generator=generator)
    # diffusers takes the last 512 tokens for the text.
    return wan_inputs(num_tokens, 512) | {"encoder_hidden_states_image": image}


def ltx() -> LTXVideoTransformer3DModel:
    torch.manual_seed(0)
    return LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=16,
    ).eval()


def ltx_inputs(num_text: int, masked: bool) -> Inputs:
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 8, 4, generator=generator),
        "encoder_hidden_states": torch.randn(1, num_text, 16, generator=generator),
        "timestep": torch.tensor([3]),
        "encoder_attention_mask": torch.ones(1, num_text) if masked else None,
        **{"num_frames": 2, "height": 2, "width": 2},
    }


@torch.compiler.disable  # dynamo may not know how objects are gathered
def _all_gather_anything(tensor: torch.Tensor, dim: int, group: dist.ProcessGroup) -> torch.Tensor:
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, tensor, group)
    return torch.cat(gathered, dim)


@contextmanager
def cpu_as_accelerator() -> Iterator[None]:
    """diffusers asks torch for the number of accelerators, and divides by it. With
    ``ring_anything`` it gathers outputs of unequal sizes, which gloo does not."""
    cpu = torch.device("cpu")
    with (
        mock.patch.object(torch.accelerator, "device_count", lambda: 1),
        mock.patch.object(torch._C, "_get_accelerator", lambda: cpu),
        mock.patch.object(context_parallel, "_all_gather_anything", _all_gather_anything),
    ):
        yield


def parallel(model: Any, backend_first: bool = True, plan: Any = None, **options: Any) -> Any:
    """The model on all ranks of this group."""
    config = ContextParallelConfig(**{"ring_degree": this().world_size} | options)
    with cpu_as_accelerator(), attention_backend(AttentionBackendName.NATIVE):
        if backend_first:
            model.set_attention_backend("ringattn")
        model.enable_parallelism(config=config, cp_plan=plan)
        if not backend_first:
            model.set_attention_backend("ringattn")
    return model


@torch.no_grad()
def sample(model: Any, inputs: Inputs) -> torch.Tensor:
    with cpu_as_accelerator():
        return model(**inputs, return_dict=False)[0]  # the form that diffusers splits over ranks


def qkv(*lengths: int, kv_heads: int = 4) -> list[torch.Tensor]:
    """Queries of the first length, keys and values of the last one."""
    generator = torch.Generator().manual_seed(0)
    heads = (4, kv_heads, kv_heads)
    sizes = zip((lengths[0], lengths[-1], lengths[-1]), heads, strict=True)
    return [torch.randn(2, length, num, 16, generator=generator) for length, num in sizes]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest value."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * expected.abs().max().item())
