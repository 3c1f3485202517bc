# SPDX-License-Identifier: Apache-2.0
"""Sums over ranks through which gradients flow."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ringattn._distributed.collectives import all_gather
from ringattn._distributed.groups import GroupInfo


def sum_over_ranks(ring: GroupInfo, operation: str, part: torch.Tensor) -> torch.Tensor:
    """The sum of the parts of all ranks, which have one shape, to the same bits on every rank.
    Collective, as :func:`ringattn._distributed.collectives.all_gather`.

    The gradient of the sum reaches this rank's part unscaled, without an exchange: every rank
    computes the same from the sum, and each continues into the graph of its own part.
    """
    if torch.is_grad_enabled() and part.requires_grad:
        total: torch.Tensor = _Sum.apply(part, ring, operation)
        return total
    return _sum(ring, operation, part)


def _sum(ring: GroupInfo, operation: str, part: torch.Tensor) -> torch.Tensor:
    return all_gather(ring, operation, part).sum(0, dtype=part.dtype)


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, ring: GroupInfo, operation: str) -> torch.Tensor:
        return _sum(ring, operation, part)

    @staticmethod
    @once_differentiable  # a second derivative would lack the parts of other ranks
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0], None, None
