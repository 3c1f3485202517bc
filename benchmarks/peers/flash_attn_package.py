# SPDX-License-Identifier: Apache-2.0
"""The packages flash-attn and flash-attn-4 (https://github.com/Dao-AILab/flash-attention), if
installed."""

from __future__ import annotations

import importlib.util

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
    newest = importlib.util.find_spec("flash_attn.cute") is not None
    if newest:
        from flash_attn.cute.interface import flash_attn_func
    else:
        from flash_attn import flash_attn_func

    def call() -> torch.Tensor:
        out = flash_attn_func(*problem.tensors, causal=problem.causal)
        return out[0] if isinstance(out, tuple) else out

    positions = torch.arange(problem.seq_len, device=problem.q.device)
    return [Contestant("flash-attn-4" if newest else "flash_attn", call, positions)]
