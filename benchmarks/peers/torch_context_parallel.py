# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.tensor.experimental.context_parallel, each SDPA backend by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from lib.problem import Problem
from lib.timing import Contestant
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers.torch_sdpa import backends, calls


def available(problem: Problem) -> str | None:
    if not problem.q.is_cuda:
        return "context_parallel has no ring for the CPU kernel"
    if not problem.causal:
        return "context_parallel balances the load for causal attention only"
    if problem.seq_len % (2 * dist.get_world_size()):
        return "context_parallel must get a sequence that 2 W divides"
    return None


def prepare(problem: Problem) -> list[Contestant]:
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    mesh = init_device_mesh(problem.q.device.type, (dist.get_world_size(),))
    # Its head-tail balancing gives each rank what an even zigzag partition does.
    shard, positions = problem.even_zigzag()
    # In memory as it wants them, [B, H, S_r, D]: no copy is charged to it.
    heads_first = (x.transpose(1, 2).contiguous() for x in shard.tensors)
    shard = Problem(*(x.transpose(1, 2) for x in heads_first), problem.causal)
    anything = torch.empty(2 * dist.get_world_size(), device=problem.q.device)

    @contextlib.contextmanager
    def around(backend: SDPBackend, rotate_method: str) -> Iterator[None]:
        # The shards are made already; the context wants something to shard.
        set_rotate_method(rotate_method)
        with (
            sdpa_kernel(backend),
            context_parallel(mesh, buffers=[anything.clone()], buffer_seq_dims=[0]),
        ):
            yield

    contestants = []
    for name, backend in backends(problem).items():
        for rotate_method in ("allgather", "alltoall"):
            entered = partial(around, backend, rotate_method)
            for call, note in calls(shard):
                if _works(call, entered):
                    full_name = f"context_parallel {name.removeprefix('torch ')} {rotate_method}"
                    contestants.append(Contestant(full_name, call, positions, entered, note))
                    break
    return contestants


def _works(call, around) -> bool:
    """Whether a call raises nothing on any rank."""
    works = torch.ones(1, device="cuda")
    context = around()
    context.__enter__()
    try:
        call()
    except Exception:  # whatever it raises: this backend cannot take the problem
        works.zero_()
    # Left by the front door in any case: context_parallel restores F only then.
    context.__exit__(None, None, None)
    dist.all_reduce(works, dist.ReduceOp.MIN)
    return bool(works.item())
