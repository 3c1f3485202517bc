# SPDX-License-Identifier: Apache-2.0
"""The ring-flash-attn package (https://github.com/zhuzilin/ring-flash-attention), if installed."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
import torch.distributed as dist
from lib.problem import Problem
from lib.timing import Contestant


def available(problem: Problem) -> str | None:
    for package in ("ring_flash_attn", "flash_attn"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    if not problem.q.is_cuda or problem.q.dtype not in (torch.float16, torch.bfloat16):
        return "ring_flash_attn needs float16 or bfloat16 on CUDA"
    if not problem.causal:
        return "the zigzag form of ring_flash_attn is causal"
    if problem.seq_len % (2 * dist.get_world_size()):
        return "ring_flash_attn must get a sequence that 2 W divides"
    return None


def prepare(problem: Problem) -> list[Contestant]:
    from ring_flash_attn import zigzag_ring_flash_attn_func

    shard, positions = problem.even_zigzag()
    call = partial(zigzag_ring_flash_attn_func, *shard.tensors, causal=True)
    return [Contestant("ring_flash_attn zigzag", call, positions)]
