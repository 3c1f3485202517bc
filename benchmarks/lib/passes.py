# SPDX-License-Identifier: Apache-2.0
"""Attention in training: the forward of a contestant, its backward, and both; their error."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from lib.problem import Problem
from lib.ranks import from_all_ranks, rank
from lib.timing import Contestant

#: Operations of each pass, over those of a forward.
PASSES = {"forward": 1.0, "backward": 2.5, "both": 3.5}
LONGEST_CHECK = 4096  # tokens; the check keeps all pairs of a head in float64


def gradients(contestant: Contestant, of_out: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
    """dq, dk and dv of a call, where those of out are ``of_out``, or its values."""
    out = contestant.call()
    return torch.autograd.grad(out, contestant.inputs, out.detach() if of_out is None else of_out)


def trouble(contestant: Contestant) -> str | None:
    """What a call, and its backward where gradients are recorded, raises on some rank. Collective:
    a peer that fails must do so on all ranks alike."""
    reason = None
    try:
        if rank() == 0 or not contestant.alone:
            with contestant.around():
                if any(x.requires_grad for x in contestant.inputs):
                    gradients(contestant)
                else:
                    contestant.call()
    except Exception as error:  # whatever it raises: another project's
        first, *_ = str(error).splitlines() or [""]
        reason = f"{type(error).__name__}: {first}"
    failed = from_all_ranks([0.0 if reason is None else 1.0]).max().item()
    return reason or ("it fails on another rank" if failed else None)


def passes(contestant: Contestant) -> list[Contestant]:
    """One for each of PASSES, called "NAME|PASS". The backward alone is that of a forward which is
    kept."""
    of_out = torch.randn_like(contestant.inputs[0])
    kept: list[torch.Tensor] = []

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return contestant.call()

    def backward() -> torch.Tensor:
        if not kept:
            kept.append(contestant.call())
        return torch.autograd.grad(kept[0], contestant.inputs, of_out, retain_graph=True)[0]

    def both() -> torch.Tensor:
        return gradients(contestant, of_out)[0]

    calls = dict(zip(PASSES, (forward, backward, both), strict=True))
    return [
        dataclasses.replace(contestant, name=f"{contestant.name}|{which}", call=call)
        for which, call in calls.items()
    ]


def gradient_error(contestant: Contestant, problem: Problem) -> float | None:
    """Largest difference of dq, dk and dv from those of float64 attention, in the last key head and
    its query heads, over the rows of all ranks; None for more than LONGEST_CHECK tokens.
    Collective."""
    if problem.seq_len > LONGEST_CHECK:
        return None
    error = 0.0
    if rank() == 0 or not contestant.alone:
        generator = torch.Generator(problem.q.device).manual_seed(1)
        of_out = torch.randn(problem.q.shape, generator=generator, device=problem.q.device)
        of_out = of_out.to(problem.q.dtype)
        own = contestant.positions
        with contestant.around():
            actual = gradients(contestant, of_out[:, own])
        for mine, right in zip(actual, expected_gradients(problem, of_out), strict=True):
            if own.numel() > 0:
                part = mine[:, :, -right.size(2) :].double() - right[:, own]
                largest = part.abs().max().item()
                # max() of Python would drop a NaN.
                error = largest if math.isnan(largest) else max(error, largest)
    return from_all_ranks([error]).max().item()


def expected_gradients(problem: Problem, of_out: torch.Tensor) -> Sequence[torch.Tensor]:
    """dq [B, S, H / H_kv, D], dk and dv [B, S, 1, D] of the last key head, in float64."""
    heads = problem.q.size(2) // problem.k.size(2)
    last = (problem.q[:, :, -heads:], problem.k[:, :, -1:], problem.v[:, :, -1:])
    q, k, v = (x.detach().double().requires_grad_() for x in last)
    rows = torch.arange(problem.seq_len, device=q.device)
    outs = []
    for head in range(heads):
        scores = q[:, :, head] @ k[:, :, 0].transpose(1, 2) / math.sqrt(q.size(-1))  # [B, S, S]
        outs.append(problem.weights(scores, rows, problem.q.size(2) - heads + head) @ v[:, :, 0])
    return torch.autograd.grad(torch.stack(outs, 2), (q, k, v), of_out[:, :, -heads:].double())
