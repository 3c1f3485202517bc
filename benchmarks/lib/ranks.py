# SPDX-License-Identifier: Apache-2.0
"""The ranks of a benchmark: the process group that torchrun describes, or one process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def process_group(device: str, ranks_per_gpu: int = 1) -> Iterator[torch.device]:
    """The group that torchrun describes, if it does, and the device of this rank."""
    on, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        backend = "nccl" if ranks_per_gpu == 1 else "cpu:gloo,cuda:gloo"  # NCCL shares no GPU
        on = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) // ranks_per_gpu)
        torch.cuda.set_device(on)
    launched = "WORLD_SIZE" in os.environ
    if launched:
        dist.init_process_group(backend)
    yield on
    # Not after an exception: NCCL would wait for ranks that are in a collective operation, and
    # torchrun ends those ranks only after this one.
    if launched:
        dist.destroy_process_group()


def from_all_ranks(values: Sequence[float]) -> torch.Tensor:
    """The values of every rank, float64 [W, len(values)], on every rank. Collective."""
    own = torch.tensor(values, dtype=torch.float64)
    if not dist.is_initialized():
        return own[None]
    own = own.to("cuda" if dist.get_backend() == "nccl" else "cpu")
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu()
