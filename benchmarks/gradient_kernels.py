# SPDX-License-Identifier: Apache-2.0
"""Kernels of one device whose gradients are timed: ours first, then those of others that work."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import ringattn
import torch
from lib.masked import MaskedProblem
from lib.problem import Problem
from lib.report import Report
from lib.timing import Contestant
from peers import flash_attn_package, masked, torch_sdpa, working

Prepare = Callable[[MaskedProblem], Contestant | str]


def unmasked(problem: Problem, report: Report, alone: bool = False) -> list[Contestant]:
    """Of a causal or dense problem whose tensors require gradients; ``alone``: rank 0 runs them.
    Collective."""
    diagonal = 0 if problem.causal else None

    def ours() -> torch.Tensor:
        return ringattn.block_attention(*problem.tensors, diagonal=diagonal)[0]

    rows = torch.arange(problem.seq_len, device=problem.q.device)
    field = [Contestant("ringattn", ours, rows), *torch_sdpa.prepare(problem)]
    reason = flash_attn_package.available(problem)
    if reason is None:
        field += flash_attn_package.prepare(problem)
    else:
        report.remark(f"flash_attn left out: {reason}")
    return differentiable(field, problem, report, alone)


def under_masks(
    problem: MaskedProblem, report: Report, others: Sequence[Prepare], alone: bool = False
) -> list[Contestant]:
    """Of a problem with documents or a window, whose tensors require gradients. Collective."""

    def ours() -> torch.Tensor:
        return ringattn.block_attention(*problem.tensors, key_ranges=problem.key_ranges)[0]

    field = [Contestant("ringattn", ours, masked.positions(problem))]
    for prepare in others:
        peer = prepare(problem)
        if isinstance(peer, Contestant):
            field.append(peer)
        else:
            report.remark(f"{prepare.__name__} left out: {peer}")
    return differentiable(field, problem, report, alone)


def differentiable(
    field: list[Contestant], problem: Problem, report: Report, alone: bool
) -> list[Contestant]:
    ours, *others = (
        dataclasses.replace(item, inputs=problem.tensors, alone=alone) for item in field
    )
    return [ours, *working(others, report)]
