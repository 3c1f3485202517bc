# SPDX-License-Identifier: Apache-2.0
"""Ulysses: every rank attends to all rows of some heads, between two exchanges of all ranks.

The kernel is flash-attn-4's where it is installed, else PyTorch's cuDNN. q, k and v travel in one
exchange. Jacobs et al., https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ringattn
import torch
import torch.distributed as dist
from lib.problem import Problem
from lib.timing import Contestant
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers import torch_sdpa

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def available(problem: Problem) -> str | None:
    world_size = dist.get_world_size()
    if problem.seq_len % world_size:
        return "written for a sequence that W divides"
    if problem.k.size(2) % world_size:
        return f"needs key heads that W divides, got {problem.k.size(2)}"
    return None


def prepare(problem: Problem) -> list[Contestant]:
    even = ringattn.Partition.even(problem.seq_len, dist.get_world_size(), layout="contiguous")
    shard, positions = problem.shard(even)
    name, kernel = kernel_of(problem.q)
    call = partial(attend, *shard.tensors, partial(kernel, causal=problem.causal))
    return [Contestant(f"Ulysses on {name}", call, positions, inputs=shard.tensors)]


def kernel_of(q: torch.Tensor) -> tuple[str, Callable[..., torch.Tensor]]:
    """The kernel for such tensors and its name: (q, k, v, causal=) -> out, [B, S, H, D] all."""
    half = q.dtype in (torch.float16, torch.bfloat16)
    if not (q.is_cuda and half):
        return "PyTorch's kernel", partial(_on_torch, None)
    # The package flash-attn, without the 4, may be there alone.
    if importlib.util.find_spec("flash_attn") and importlib.util.find_spec("flash_attn.cute"):
        return "flash-attn-4", _on_flash_attn_4
    return "cuDNN", partial(_on_torch, SDPBackend.CUDNN_ATTENTION)


def _on_flash_attn_4(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    from flash_attn.cute.interface import flash_attn_func

    result = flash_attn_func(q, k, v, causal=causal)
    return result[0] if isinstance(result, tuple) else result


def _on_torch(
    backend: SDPBackend | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> torch.Tensor:
    grouped = q.size(2) != k.size(2)
    if backend is None:
        return torch_sdpa.attend(q, k, v, causal, grouped)
    with sdpa_kernel(backend):
        return torch_sdpa.attend(q, k, v, causal, grouped)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Attend) -> torch.Tensor:
    """q [B, S / W, H, D]; k, v [B, S / W, H_kv, D] of this rank's rows -> out [B, S / W, H, D]."""
    return ToRows.apply(kernel(*ToHeads.apply(q, k, v)))


class ToHeads(torch.autograd.Function):
    """All heads of this rank's rows -> some heads of all rows."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return to_heads(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return to_rows(grads)


class ToRows(torch.autograd.Function):
    """Some heads of all rows -> all heads of this rank's rows."""

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor) -> torch.Tensor:
        return to_rows([out])[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return to_heads(grads)[0]


def to_heads(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each [B, s, W h, D] -> [B, W s, h, D], in one exchange; h may differ."""
    world_size = dist.get_world_size()
    parts = [x.unflatten(2, (world_size, -1)).permute(2, 0, 1, 3, 4) for x in tensors]
    arrived = exchanged(parts)  # [W, B, s, h, D]: from each rank its rows
    return tuple(x.transpose(0, 1).flatten(1, 2) for x in arrived)


def to_rows(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Each [B, W s, h, D] -> [B, s, W h, D], in one exchange; h may differ."""
    world_size = dist.get_world_size()
    parts = [x.unflatten(1, (world_size, -1)).transpose(0, 1) for x in tensors]
    arrived = exchanged(parts)  # [W, B, s, h, D]: from each rank its heads
    return tuple(x.permute(1, 2, 0, 3, 4).flatten(2, 3) for x in arrived)


def exchanged(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """[W, B, s, h, D] each, a part for each rank -> a part from each rank."""
    sizes = [part.size(3) for part in parts]
    *outer, _, head_dim = parts[0].shape
    leaving = parts[0].new_empty(*outer, sum(sizes), head_dim)
    for place, part in zip(leaving.split(sizes, 3), parts, strict=True):
        place.copy_(part)
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving, leaving)
    return arriving.split(sizes, 3)
