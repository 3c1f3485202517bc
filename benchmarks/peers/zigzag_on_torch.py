# SPDX-License-Identifier: Apache-2.0
"""A zigzag ring on PyTorch's own attention operator: what a user builds without own kernels.

Even shards, causal; the next block is in flight while one is computed.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lib.problem import Problem
from lib.timing import Contestant

aten = torch.ops.aten


def available(problem: Problem) -> str | None:
    if not problem.causal:
        return "written for causal attention"
    if problem.seq_len % (2 * dist.get_world_size()):
        return "written for a sequence that 2 W divides"
    if problem.q.is_cuda and problem.q.dtype not in (torch.float16, torch.bfloat16):
        return "FlashAttention-2 needs float16 or bfloat16"
    return None


def prepare(problem: Problem) -> list[Contestant]:
    shard, positions = problem.even_zigzag()
    q, k, v = shard.tensors
    kernel = "FlashAttention-2" if q.is_cuda else "torch CPU"
    call = partial(zigzag_ring, q, torch.stack((k, v)))
    return [Contestant(f"zigzag on {kernel}", call, positions)]


def zigzag_ring(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """q: [B, S_r, H, D]; kv: [2, B, S_r, H_kv, D]. Returns out [B, S_r, H, D]."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    half = q.size(1) // 2
    out = lse = None
    for step in range(world_size):
        requests = []
        if step + 1 < world_size:
            arriving = torch.empty_like(kv)
            exchange = [
                dist.P2POp(dist.isend, kv, (rank + 1) % world_size),
                dist.P2POp(dist.irecv, arriving, (rank - 1) % world_size),
            ]
            requests = dist.batch_isend_irecv(exchange)
        source = (rank - step) % world_size
        if step == 0:
            out, lse = attend(q, kv, causal=True)
            out = out.float()
        elif source < rank:  # a block outside mine: all my rows, its head half
            fold(out, lse, *attend(q, kv[:, :, :half], causal=False))
        else:  # a block nested inside mine: my tail rows, all its keys
            fold(out[:, half:], lse[:, half:], *attend(q[:, half:], kv, causal=False))
        for request in requests:
            request.wait()
        if requests:
            kv = arriving
    return out.to(q.dtype)


def attend(q: torch.Tensor, kv: torch.Tensor, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out [B, S_q, H, D] in the dtype of q; lse [B, S_q, H, 1] in float32."""
    heads_first = [x.transpose(1, 2) for x in (q, kv[0], kv[1])]
    if q.is_cuda:
        out, lse, *_ = aten._scaled_dot_product_flash_attention(*heads_first, 0.0, causal)
    else:
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*heads_first, 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2).unsqueeze(-1)


def fold(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    """Merges another block into a state in place; every row of both has seen a key."""
    weight = torch.sigmoid(other_lse - lse)
    out.add_(weight * (other_out - out))
    lse.sub_(F.logsigmoid(lse - other_lse))
