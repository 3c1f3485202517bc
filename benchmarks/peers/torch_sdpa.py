# SPDX-License-Identifier: Apache-2.0
"""PyTorch's own attention on one device, each backend by its name."""

from functools import partial

import torch
import torch.nn.functional as F
from lib.problem import Problem
from lib.timing import Contestant
from torch.nn.attention import SDPBackend, sdpa_kernel

HALF = {
    "torch FlashAttention-2": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
}
FLOAT32 = {"torch memory-efficient": SDPBackend.EFFICIENT_ATTENTION}
CPU = {"torch CPU": SDPBackend.FLASH_ATTENTION}


def backends(problem: Problem) -> dict[str, SDPBackend]:
    """The fast ones: for half types the memory-efficient kernel is left out, at half the speed."""
    if not problem.q.is_cuda:
        return CPU
    return FLOAT32 if problem.q.dtype == torch.float32 else HALF


def available(problem: Problem) -> str | None:
    return None


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, grouped: bool
) -> torch.Tensor:
    """F.scaled_dot_product_attention on [B, S, H, D] tensors."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=causal,
        enable_gqa=grouped,
    )
    return out.transpose(1, 2)


def prepare(problem: Problem) -> list[Contestant]:
    """One contestant for each backend that takes the problem."""
    positions = torch.arange(problem.seq_len, device=problem.q.device)
    contestants = []
    for name, backend in backends(problem).items():
        around = partial(sdpa_kernel, backend)
        for call, note in calls(problem):
            try:
                with around():
                    call()
            except RuntimeError:  # this backend does not take the dtype, or grouped queries
                continue
            item = Contestant(name, call, positions, around, note, inputs=problem.tensors)
            contestants.append(item)
            break
    return contestants


def calls(problem: Problem):
    """Ways to call it, the better one first: (call, note)."""
    q, k, v = problem.tensors
    if q.size(2) == k.size(2):
        yield partial(attend, q, k, v, problem.causal, False), ""
        return
    yield partial(attend, q, k, v, problem.causal, True), "enable_gqa"
    if q.requires_grad:  # gradients of heads that are copies are summed: part of the backward
        yield lambda: attend(q, *problem.expanded(), problem.causal, False), "K, V expanded"
    else:
        yield partial(attend, q, *problem.expanded(), problem.causal, False), "K, V expanded"
