# SPDX-License-Identifier: Apache-2.0
"""Gradients of ring calls and of single blocks, against those of float64 attention in pure torch.

float64   at most 1e-9
float32   at most 1e-5, or twice the error of PyTorch's backward where that is more
halves    max at most twice that of PyTorch's own backward in that dtype, on one device, and of what
          the rounding of out alone does to the gradients, which a row with few keys shows

each times the largest gradient where that is above 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import ringattn
import torch
import torch.nn.functional as F
from _distributed import RankPool, this
from _numerics import TIMES_PYTORCH, Error, measure, poisoned_memory
from _rings import Case
from ringattn import reference

NAMES = ("dq", "dk", "dv", "dsinks")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5}


def result_gradients(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of out and lse of the whole sequence, the same wherever they are asked for."""
    generator = torch.Generator().manual_seed(case.seed + 2)
    rows = case.partition.seq_len
    state = torch.float64 if case.dtype == torch.float64 else torch.float32
    of_out = torch.randn(case.batch, rows, case.num_heads, case.head_dim, generator=generator)
    of_lse = torch.randn(case.batch, case.num_heads, rows, generator=generator)
    return of_out.to(case.dtype), of_lse.to(state)


def ring_gradients(case: Case, deterministic: bool = False) -> list[torch.Tensor]:
    """dq, dk, dv of this rank's rows and its part of dsinks."""
    place = this()
    inputs = [x.requires_grad_() for x in case.local_inputs()]
    sinks = case.sinks(place.device)
    if sinks is not None:
        inputs.append(sinks.requires_grad_())
    of_out, of_lse = result_gradients(case)
    with poisoned_memory() if deterministic else torch.enable_grad():
        out, lse = ringattn.ring_attention(
            *inputs[:3],
            case.partition,
            causal=case.causal,
            window_size=case.window_size,
            softcap=case.softcap,
            sinks=sinks,
            cu_seqlens=case.cu_seqlens,
            key_partition=case.key_partition,
            scale=case.scale,
            transport=case.transport,
            depth=case.depth,
            return_lse=True,
        )
        gradients = [
            case.partition.shard(of_out, place.rank).to(place.device),
            case.partition.shard(of_lse, place.rank, dim=2).to(place.device),
        ]
        return list(torch.autograd.grad([out, lse], inputs, gradients))


class ExactAttention(NamedTuple):
    """Of the whole sequence, in float64 from the same inputs."""

    inputs: list[torch.Tensor]
    out: torch.Tensor
    lse: torch.Tensor  # 0 where it is -inf, a constant

    @classmethod
    def of(cls, case: Case, visible: torch.Tensor, device: str) -> ExactAttention:
        inputs = [x.double().requires_grad_() for x in case.inputs(device)]
        sinks = case.sinks(device)
        if sinks is not None:
            sinks = sinks.double().requires_grad_()
        scoring = (case.scale, case.softcap, sinks)
        out, lse = reference.masked_attention(*inputs, visible.to(device), *scoring)
        if sinks is not None:
            inputs.append(sinks)
        return cls(inputs, out, lse.masked_fill(lse.isneginf(), 0.0))


def expected_gradients(case: Case, exact: ExactAttention) -> list[torch.Tensor]:
    inputs, *results = exact
    gradients = [x.to(exact.out) for x in result_gradients(case)]
    expected = list(torch.autograd.grad(results, inputs, gradients, retain_graph=True))
    if case.with_sinks:
        expected[3][inputs[3].isneginf()] = 0.0  # no sink: 0 times infinity above
    return expected


def pytorch_gradients(case: Case, visible: torch.Tensor, device: str) -> list[torch.Tensor]:
    """dq, dk, dv of PyTorch's attention in the case's dtype, without softcap, sinks and lse."""
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
    scale = 1 / case.head_dim**0.5 if case.scale is None else case.scale
    mask = visible.to(device)
    if scale <= 0:
        q, scale = -q, -scale
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    out = out.transpose(1, 2)
    sees = mask.any(1)[None, :, None, None]
    return list(
        torch.autograd.grad(
            out.where(sees, 0.0), inputs, result_gradients(case)[0].to(device).where(sees, 0.0)
        )
    )


def pytorch_errors(case: Case, visible: torch.Tensor, device: str) -> list[Error]:
    """Largest errors of PyTorch's dq, dk and dv, of the gradient of out alone."""
    inputs = [x.double().requires_grad_() for x in case.inputs(device)]
    out, _ = reference.masked_attention(*inputs, visible.to(device), case.scale)
    expected = torch.autograd.grad(out, inputs, result_gradients(case)[0].double().to(device))
    actual = pytorch_gradients(case, visible, device)
    return [measure(a.nan_to_num(), e) for a, e in zip(actual, expected, strict=True)]


def rounding_errors(case: Case, exact: ExactAttention) -> list[float]:
    """Largest errors of dq, dk, dv and dsinks where out is rounded and all else is exact: the
    gradient of a score is p * (dp - delta), and delta is the sum of out times its gradient."""
    inputs, out, lse = exact
    of_out = result_gradients(case)[0].to(out.device)
    of_delta = ((out.to(case.dtype) - out) * of_out).sum(-1).transpose(1, 2)
    errors = torch.autograd.grad(lse, inputs, of_delta, materialize_grads=True)
    return [error.nan_to_num().abs().max().item() for error in errors]


def allowed(case: Case, visible: torch.Tensor, device: str, exact: ExactAttention) -> list[float]:
    """Of dq, dk, dv and dsinks, for gradients up to 1."""
    base = TOLERANCE.get(case.dtype, 0.0)
    if case.dtype == torch.float64 or visible.numel() == 0:
        return [max(base, 1e-9)] * 4
    errors = [error.max for error in pytorch_errors(case, visible, device)]
    rounded = rounding_errors(case, exact) if case.dtype != torch.float32 else [0.0] * 4
    rounding = torch.finfo(case.dtype).eps  # of a result up to 1, and of a rounded sum of heads
    return [
        max(base, TIMES_PYTORCH * (error + of_out), rounding)
        for error, of_out in zip((*errors, max(errors)), rounded, strict=False)
    ]


@dataclass(frozen=True)
class Rule:
    """What the gradients of a case have to be."""

    expected: list[torch.Tensor]
    limits: list[float]

    @classmethod
    def of(cls, case: Case, visible: torch.Tensor, device: str) -> Rule:
        """Computed on ``device``."""
        exact = ExactAttention.of(case, visible, device)
        return cls(expected_gradients(case, exact), allowed(case, visible, device, exact))


def compare(case: Case, actual: list[torch.Tensor], rule: Rule, of_parts: float = 0.0) -> None:
    """Holds gradients of the whole sequence against the rule at the top. ``of_parts``: what the
    parts of dsinks were rounded by."""
    assert len(actual) == len(rule.expected)
    for name, mine, right, limit in zip(NAMES, actual, rule.expected, rule.limits, strict=False):
        assert mine.dtype == case.dtype
        error = measure(mine, right)
        scale = max(1.0, right.abs().max().item() if right.numel() else 0.0)
        within = limit * scale + (of_parts if name == "dsinks" else 0.0)
        assert error.max <= within, f"{name} must be within {within:.3g}, got {error}; {case}"


def whole_gradients(case: Case, parts: list[Any]) -> list[torch.Tensor]:
    """From those of each rank: rows are joined, and parts of dsinks summed."""
    owners = (case.partition, case.keys_of, case.keys_of)
    whole = [owner.unshard([part[i] for part in parts]) for i, owner in enumerate(owners)]
    if case.with_sinks:
        dtype = torch.float64 if case.dtype == torch.float64 else torch.float32
        whole.append(sum(part[3].to(dtype) for part in parts).to(case.dtype))
    return whole


def check_ring_gradients(ring: RankPool, case: Case) -> None:
    """Runs the case on every rank, with poisoned memory and without."""
    rule = Rule.of(case, case.visible(), ring.device_type)
    for deterministic in (True, False):
        parts = ring.run(ring_gradients, case, deterministic)
        parts = [[x.cpu() for x in part] for part in parts]
        largest = sum(part[3].abs().max().item() for part in parts) if case.with_sinks else 0.0
        of_parts = torch.finfo(case.dtype).eps / 2 * largest
        compare(case, whole_gradients(case, parts), rule, of_parts)
