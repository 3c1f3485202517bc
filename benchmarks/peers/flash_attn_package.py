# SPDX-License-Identifier: Apache-2.0
"""The flash-attn package (https://github.com/Dao-AILab/flash-attention), if installed."""

from __future__ import annotations

import importlib.util
from functools import partial

import torch
from lib.problem import Problem
from lib.timing import Contestant


def available(problem: Problem) -> str | None:
    if importlib.util.find_spec("flash_attn") is None:
        return "flash_attn is not installed"
    if not problem.q.is_cuda or problem.q.dtype not in (torch.float16, torch.bfloat16):
        return "flash_attn needs float16 or bfloat16 on CUDA"
    return None


def prepare(problem: Problem) -> list[Contestant]:
    from flash_attn import flash_attn_func

    positions = torch.arange(problem.seq_len, device=problem.q.device)
    call = partial(flash_attn_func, *problem.tensors, causal=problem.causal)
    return [Contestant("flash_attn", call, positions)]
