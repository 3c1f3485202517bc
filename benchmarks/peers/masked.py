# SPDX-License-Identifier: Apache-2.0
"""Kernels for one device that take packed documents, windows, sinks or softcap.

Each peer is a function: a problem -> its contestant, or the reason why it has none.
"""

from __future__ import annotations

import importlib.util
import inspect
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from lib.masked import MaskedProblem
from lib.timing import Contestant
from torch.nn.attention import SDPBackend, sdpa_kernel

_LARGEST_MASK = 2**30  # elements of a dense mask, 32K x 32K


def positions(problem: MaskedProblem) -> torch.Tensor:
    return torch.arange(problem.seq_len, device=problem.q.device)


def needs_half_on_cuda(problem: MaskedProblem) -> str | None:
    if problem.q.is_cuda and problem.q.dtype in (torch.float16, torch.bfloat16):
        return None
    return "needs float16 or bfloat16 on CUDA"


def flex(problem: MaskedProblem) -> Contestant | str:
    """torch FlexAttention with a block mask; sinks scale its output by what lse says."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    cuda = problem.q.is_cuda  # on CPU, where a compilation takes longer than all else, as it is
    compiled = torch.compile if cuda else lambda function: function
    softcap, sinks = problem.softcap, problem.sinks
    begins = problem.key_ranges[:, 0].contiguous()

    def visible(b, h, query, key):
        return (key <= query) & (key >= begins[query])

    def capped(score, b, h, query, key):
        return softcap * torch.tanh(score / softcap)

    def attend(q, k, v, block_mask):
        out, aux = flex_attention(
            *(x.transpose(1, 2) for x in (q, k, v)),
            score_mod=capped if softcap else None,
            block_mask=block_mask,
            enable_gqa=q.size(2) != k.size(2),
            return_aux=AuxRequest(lse=True),
        )
        if sinks is not None:
            out = out * torch.sigmoid(aux.lse - sinks[:, None].float())[..., None].to(out.dtype)
        return out.transpose(1, 2)

    # Each problem compiles anew: past a few kinds of one function torch would not compile it.
    torch.compiler.reset()
    length = problem.seq_len
    block_mask = compiled(create_block_mask)(
        visible, None, None, length, length, device=problem.q.device
    )
    call = partial(compiled(attend), *problem.tensors, block_mask)
    return Contestant("torch FlexAttention", call, positions(problem))


def sdpa(problem: MaskedProblem) -> Contestant | str:
    """torch's scaled_dot_product_attention with a dense mask: cuDNN on CUDA."""
    if problem.sinks is not None or problem.softcap:
        return "has neither sinks nor softcap"
    if problem.seq_len**2 > _LARGEST_MASK:
        return f"a dense mask of {problem.seq_len} x {problem.seq_len} does not fit"
    q, k, v = (x.transpose(1, 2) for x in (problem.q, *problem.expanded()))
    begins, ends = problem.key_ranges.unbind(1)
    keys = positions(problem)
    mask = (keys >= begins[:, None]) & (keys < ends[:, None])
    backend = SDPBackend.CUDNN_ATTENTION if problem.q.is_cuda else SDPBackend.MATH
    name = "torch cuDNN" if problem.q.is_cuda else "torch CPU"

    def call() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    note = "dense mask, K, V expanded"
    return Contestant(name, call, keys, partial(sdpa_kernel, backend), note)


def varlen(problem: MaskedProblem) -> Contestant | str:
    """torch's varlen_attn."""
    if reason := needs_half_on_cuda(problem):
        return reason
    if problem.sinks is not None or problem.softcap:
        return "has neither sinks nor softcap"
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    left = problem.window_size[0]
    options: dict[str, Any] = {}
    if "window_size" in known:
        options["window_size"] = (left, 0)
    elif left >= 0:
        return "has no window in this release of torch"
    else:
        options["is_causal"] = True
    if "enable_gqa" in known:
        options["enable_gqa"] = True
        tensors = problem.tensors
    else:
        tensors = (problem.q, *problem.expanded())
    q, k, v = (x[0] for x in tensors)
    ends, longest = problem.boundaries, problem.longest

    def call() -> torch.Tensor:
        return varlen_attn(q, k, v, ends, ends, longest, longest, **options)[None]

    note = "" if "enable_gqa" in known else "K, V expanded"
    return Contestant("torch varlen_attn", call, positions(problem), note=note)


def flash_attn_4(problem: MaskedProblem) -> Contestant | str:
    """The package flash-attn-4."""
    if importlib.util.find_spec("flash_attn") is None:
        return "is not installed"
    if importlib.util.find_spec("flash_attn.cute") is None:
        return "is not installed, an older flash_attn is"
    if reason := needs_half_on_cuda(problem):
        return reason
    from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

    left = problem.window_size[0]
    options: dict[str, Any] = {"causal": True, "softcap": problem.softcap}
    options["learnable_sink"] = problem.sinks
    if left >= 0:
        options["window_size"] = (left, 0)
    if problem.masking.cu_seqlens is None:
        function, tensors = flash_attn_func, problem.tensors
    else:
        function, tensors = flash_attn_varlen_func, tuple(x[0] for x in problem.tensors)
        for side in "qk":
            options[f"cu_seqlens_{side}"] = problem.boundaries
            options[f"max_seqlen_{side}"] = problem.longest

    def call() -> torch.Tensor:
        result = function(*tensors, **options)
        out = result[0] if isinstance(result, tuple) else result
        return out if out.dim() == 4 else out[None]

    return Contestant("flash-attn-4", call, positions(problem))


PEERS = {
    "torch FlexAttention": flex,
    "torch scaled_dot_product_attention": sdpa,
    "torch varlen_attn": varlen,
    "flash-attn-4": flash_attn_4,
}
