# SPDX-License-Identifier: Apache-2.0
"""torch.distributed.tensor.experimental.context_parallel, each SDPA backend by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import cache, partial

import torch
import torch.distributed as dist
from lib.passes import trouble
from lib.problem import Problem
from lib.timing import Contestant
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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


ROTATE_METHODS = ("allgather", "alltoall")


@contextlib.contextmanager
def sharded(device: torch.device, backend: SDPBackend, rotate_method: str) -> Iterator[None]:
    """F.scaled_dot_product_attention of even zigzag shards, of all ranks, attends to all keys: in
    the backward as well."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import set_rotate_method

    set_rotate_method(rotate_method)
    # The shards are made already; the context wants something to shard.
    anything = torch.empty(2 * dist.get_world_size(), device=device)
    context = context_parallel(_mesh(device.type), buffers=[anything], buffer_seq_dims=[0])
    with sdpa_kernel(backend):
        context.__enter__()
        try:
            yield
        finally:  # by the front door in any case: it restores F only then
            context.__exit__(None, None, None)


@cache
def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),))


def prepare(problem: Problem) -> list[Contestant]:
    # Its head-tail balancing gives each rank what an even zigzag partition does.
    shard, positions = problem.even_zigzag()
    # In memory as it wants them, [B, H, S_r, D]: no copy is charged to it.
    heads_first = (x.detach().transpose(1, 2).contiguous() for x in shard.tensors)
    shard = Problem(*(x.transpose(1, 2) for x in heads_first), problem.causal)
    if problem.q.requires_grad:
        shard = shard.trained()
    contestants = []
    for name, backend in backends(problem).items():
        for rotate_method in ROTATE_METHODS:
            around = partial(sharded, problem.q.device, backend, rotate_method)
            for call, note in calls(shard):
                full_name = f"context_parallel {name.removeprefix('torch ')} {rotate_method}"
                item = Contestant(full_name, call, positions, around, note, inputs=shard.tensors)
                if trouble(item) is None:
                    contestants.append(item)
                    break
    return contestants
