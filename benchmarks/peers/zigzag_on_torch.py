# SPDX-License-Identifier: Apache-2.0
"""A zigzag ring on PyTorch's own attention operators: what a user builds without own kernels.

Even shards, causal; the next block is in flight while one is computed. In the backward the blocks
go round once more, and each block's gradients follow it in float32, one step behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.problem import Problem
from lib.timing import Contestant

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]
ALL = slice(None)


@dataclass(frozen=True)
class Kernel:
    """Operators of one backend, on tensors [B, H, S, D]."""

    name: str
    # (q, k, v, causal) -> out, lse, and what else the backward wants
    forward: Callable[..., Sequence[Any]]
    # (grad, q, k, v, out, lse, the rest, causal) -> dq, dk, dv
    backward: Callable[..., Sequence[torch.Tensor]]


def flash_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_flash_attention(
        q, k, v, 0.0, causal
    )
    return out, lse, (seed, offset)


def flash_backward(grad, q, k, v, out, lse, rest, causal) -> Any:
    lengths = (None, None, q.size(2), k.size(2))
    return aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, *lengths, 0.0, causal, *rest
    )


def cudnn_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    out, lse, _, _, _, _, seed, offset, _ = aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal
    )
    return out, lse, (seed, offset)


def cudnn_backward(grad, q, k, v, out, lse, rest, causal) -> Any:
    lengths = (None, None, q.size(2), k.size(2))
    return aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse, *rest, None, *lengths, 0.0, causal
    )


def cpu_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    return out, lse, ()


def cpu_backward(grad, q, k, v, out, lse, rest, causal) -> Any:
    groups = q.size(1) // k.size(1)  # the operator's backward takes as many heads of k as of q
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    dq, dk, dv = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal
    )
    return dq, *(x.unflatten(1, (-1, groups)).sum(2) for x in (dk, dv))


FLASH = Kernel("FlashAttention-2", flash_forward, flash_backward)
CUDNN = Kernel("cuDNN", cudnn_forward, cudnn_backward)
CPU = Kernel("torch CPU", cpu_forward, cpu_backward)


def available(problem: Problem) -> str | None:
    if not problem.causal:
        return "written for causal attention"
    if problem.seq_len % (2 * dist.get_world_size()):
        return "written for a sequence that 2 W divides"
    if problem.q.is_cuda and problem.q.dtype not in (torch.float16, torch.bfloat16):
        return "FlashAttention-2 and cuDNN need float16 or bfloat16"
    return None


def prepare(problem: Problem) -> list[Contestant]:
    shard, positions = problem.even_zigzag()
    kernels = [FLASH, CUDNN] if problem.q.is_cuda else [CPU]
    return [
        Contestant(
            f"zigzag on {kernel.name}",
            partial(ZigzagRing.apply, *shard.tensors, kernel),
            positions,
            inputs=shard.tensors,
        )
        for kernel in kernels
    ]


class ZigzagRing(torch.autograd.Function):
    """q [B, S_r, H, D]; k, v [B, S_r, H_kv, D] -> out [B, S_r, H, D]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kernel: Kernel) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))  # [B, H, S_r, D]
        world_size = dist.get_world_size()
        block: Tensors = (k.contiguous(), v.contiguous())
        total = sums = rest = None
        for step in range(world_size):
            arriving = Rotation(block) if step + 1 < world_size else None
            rows, keys, causal = visit(step, q.size(2))
            out, lse, rest_of_block = kernel.forward(
                q[:, :, rows], *(x[:, :, keys] for x in block), causal
            )
            if total is None:
                total, sums, rest = out.float(), lse, rest_of_block
            else:
                fold(total[:, :, rows], sums[:, :, rows], out, lse)
            block = arriving.wait() if arriving else block
        assert total is not None and sums is not None
        total = total.to(q.dtype)
        ctx.save_for_backward(q, k, v, total, sums)
        ctx.kernel, ctx.rest = kernel, rest
        return total.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        grad = grads[0].transpose(1, 2)
        world_size = dist.get_world_size()
        block: Tensors = (k.contiguous(), v.contiguous())
        dq = torch.zeros_like(q, dtype=torch.float32)
        of_block: Tensors = tuple(torch.zeros_like(x, dtype=torch.float32) for x in block)
        returning = None
        for step in range(world_size):
            arriving = Rotation(block) if step + 1 < world_size else None
            rows, keys, causal = visit(step, q.size(2))
            of_rows = (x[:, :, rows] for x in (grad, q))
            kept = (x[:, :, rows].contiguous() for x in (out, lse))
            part, *parts = ctx.kernel.backward(
                *of_rows, *(x[:, :, keys] for x in block), *kept, ctx.rest, causal
            )
            dq[:, :, rows] += part
            if returning:
                of_block = returning.wait()
            for total, x in zip(of_block, parts, strict=True):
                total[:, :, keys] += x
            block = arriving.wait() if arriving else block
            returning = Rotation(of_block)
        assert returning is not None
        dk, dv = returning.wait()
        return *(x.to(q.dtype).transpose(1, 2) for x in (dq, dk, dv)), None


def visit(step: int, length: int) -> tuple[slice, slice, bool]:
    """Which rows of mine meet which keys of the block that visits in a step, and whether causally;
    ``length`` is that of a shard."""
    rank, half = dist.get_rank(), length // 2
    source = (rank - step) % dist.get_world_size()
    if step == 0:
        return ALL, ALL, True
    if source < rank:  # a block outside mine: all my rows, its head half
        return ALL, slice(half), False
    return slice(half, None), ALL, False  # nested inside mine: my tail rows, all its keys


class Rotation:
    """Tensors on their way to the next rank, and those of the rank before, which arrive."""

    def __init__(self, tensors: Tensors) -> None:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        self._kept = tensors  # until they are sent
        self._arriving = tuple(torch.empty_like(x) for x in tensors)
        after, before = (rank + 1) % world_size, (rank - 1) % world_size
        exchange = [dist.P2POp(dist.isend, x, after) for x in tensors]
        exchange += [dist.P2POp(dist.irecv, x, before) for x in self._arriving]
        self._requests = dist.batch_isend_irecv(exchange)

    def wait(self) -> Tensors:
        for request in self._requests:
            request.wait()
        return self._arriving


def fold(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merges another block into a state in place; every row of both has seen a key."""
    apart = other_lse - lse
    weight = torch.sigmoid(apart).reshape(*out.shape[:-1], 1)  # lse of cuDNN has that 1 already
    out.add_(weight * (other_out - out))
    lse.sub_(F.logsigmoid(-apart))
