# SPDX-License-Identifier: Apache-2.0
"""checkpoint_policy: what attention returns is kept, everything else is recomputed."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import ringattn
import torch
from _distributed import this
from ringattn import Partition
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

LAYERS = 3


def test_results_of_attention_alone_are_kept():
    kept = (torch.ops.ringattn.ring_forward.default, torch.ops.ringattn.block_attention.default)
    for op in kept:
        assert ringattn.checkpoint_policy(None, op) is CheckpointPolicy.MUST_SAVE
    recomputed = (torch.ops.aten.mm.default, torch.ops.ringattn.gather.default, torch.add)
    for op in recomputed:
        policy = ringattn.checkpoint_policy(None, op, torch.ones(1), out=None)
        assert policy is CheckpointPolicy.PREFER_RECOMPUTE


class Layer(nn.Module):
    def __init__(self, partition: Partition | None) -> None:
        super().__init__()
        self.qkv = nn.Linear(32, 96, dtype=torch.float64)
        self.partition = partition

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(2)
        if self.partition is None:
            out, _ = ringattn.block_attention(q, k, v, diagonal=0)
        else:
            out = ringattn.ring_attention(q, k, v, self.partition)
        return x + out.flatten(2)


class Count(TorchDispatchMode):
    """Calls of operators that reach their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.name()] += 1
        return func(*args, **(kwargs or {}))


def step(how: str, in_ring: bool) -> tuple[Counter[str], list[torch.Tensor]]:
    """One step through all layers: calls of operators, and the gradients."""
    rank, size = this().rank, this().world_size
    partition = Partition.even(8 * size + 1, size)
    torch.manual_seed(0)
    layers = nn.Sequential(*(Layer(partition if in_ring else None) for _ in range(LAYERS)))
    x = torch.randn(1, partition.seq_len, 32, dtype=torch.float64)
    x = partition.shard(x, rank).requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, ringattn.checkpoint_policy)
    options = {"kept": {"context_fn": contexts}, "recomputed": {}}
    count = Count()
    with count:
        out = x
        for layer in layers:
            if how == "plain":
                out = layer(out)
            else:
                out = checkpoint(layer, out, use_reentrant=False, **options[how])
        out.square().sum().backward()
    return count.calls, [x.grad, *(weight.grad for weight in layers.parameters())]


@pytest.mark.parametrize(
    ("operator", "size"), [("ring_forward", 1), ("ring_forward", 2), ("block_attention", 1)]
)
def test_a_backward_runs_no_attention_again(rank_pool, operator, size):
    pool = rank_pool(size)
    runs = {
        how: pool.run(step, how, operator == "ring_forward")
        for how in ("plain", "kept", "recomputed")
    }
    for rank in range(size):
        calls = {how: run[rank][0] for how, run in runs.items()}
        forward, mm = f"ringattn::{operator}", "aten::addmm"
        assert calls["plain"][forward] == calls["kept"][forward] == LAYERS
        assert calls["recomputed"][forward] == 2 * LAYERS
        assert calls["kept"][mm] == calls["recomputed"][mm] == 2 * calls["plain"][mm] > 0
        for how in ("kept", "recomputed"):
            for mine, plain in zip(runs[how][rank][1], runs["plain"][rank][1], strict=True):
                assert torch.equal(mine, plain)
