# SPDX-License-Identifier: Apache-2.0
"""Gradients of a model on a ring, beside those of one process."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def sum_over_the_ring(num_replicas, bucket):  # DDP refuses annotations that are strings
    """DDP's hook: the mean of replicas, the sum over the ranks of a ring."""
    work = dist.all_reduce(bucket.buffer().div_(num_replicas), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def summed_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of each parameter that has one on some rank, the sum over all ranks; the model loses them."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.grad is not None:
            gradients[name] = parameter.grad.clone()
            dist.all_reduce(gradients[name])
        parameter.grad = None
    return gradients


def gradients_of(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a loss that no other rank has a part in; the model loses them."""
    loss.backward()
    gradients = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return gradients


def assert_same_gradients(
    given: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float
) -> None:
    """Relative to the largest value of a parameter's gradient, and for parameters whose gradients
    are all small to a thousandth of the largest of all."""
    assert given.keys() == expected.keys(), set(given) ^ set(expected)
    largest = max(x.abs().max().item() for x in expected.values())
    assert largest > 0
    for name, right in expected.items():
        scale = max(right.abs().max().item(), 1e-3 * largest)
        error = (given[name] - right).abs().max().item() / scale
        assert error <= tolerance, f"{name} must be within {tolerance}, got {error:.1e}"


def assert_near(given: Any, expected: torch.Tensor, tolerance: float) -> None:
    """Relative; for a loss."""
    assert isinstance(given, torch.Tensor) and given.shape == expected.shape == ()
    error = abs(given.item() / expected.item() - 1)
    assert error <= tolerance, f"{expected.item()} must be near, got {given.item()}: {error:.1e}"
