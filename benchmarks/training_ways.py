# SPDX-License-Identifier: Apache-2.0
"""Ways in which the attention of a training step goes over the ranks.

Each maker is a function: what is trained -> ways; the report gets the reason where there is none.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import ringattn
import torch
from lib.problem import DTYPES, Problem
from lib.ranks import world_size
from lib.report import Report
from llama_models import profiles_of
from peers import contenders, torch_context_parallel, torch_sdpa, ulysses, zigzag_on_torch
from ringattn import ModelCost, Partition
from torch.nn.attention import SDPBackend

_TRIAL = 512  # tokens a rank of the call that shows whether a peer works


@dataclass(frozen=True)
class Way:
    """How queries of this rank's tokens get to the keys of all."""

    name: str
    partition: Partition
    attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # [B, S_r, H, D]
    partition_text: str = "even"
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    note: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Trained:
    """What is trained, and where."""

    seq_len: int
    config: Any  # of the model
    device: torch.device
    options: argparse.Namespace
    report: Report

    def even(self, layout: str = "zigzag") -> Partition:
        return Partition.even(self.seq_len, world_size(), layout=layout)

    def trial(self) -> Problem:
        """A short problem of the model's heads."""
        config = self.config
        return Problem.random(
            *(_TRIAL * world_size(), config.nheads, config.kvheads, config.head_dim),
            dtype=DTYPES[self.options.dtype],
            device=self.device,
            causal=True,
        ).trained()


def partition_name(partition: Partition) -> str:
    return f"{partition.layout} {', '.join(map(str, partition.lengths))}"


def ring(trained: Trained) -> list[Way]:
    """ringattn.ring_attention, with each of --partitions."""
    found = []
    transport = trained.options.transport
    for name in trained.options.partitions:
        partition, note = split_of(name, trained)
        attend = partial(ringattn.ring_attention, partition=partition, transport=transport)
        found.append(Way("ring", partition, attend, name, note=note, ours=True))
    return found


def split_of(name: str, trained: Trained) -> tuple[Partition, str]:
    """A partition of --partitions, and what there is to say of it. Collective."""
    seq_len, options = trained.seq_len, trained.options
    if name == "even":
        return trained.even(), ""
    if name == "auto":
        profiles = profiles_of(trained.config, trained.device, options, seq_len)
        cost = ModelCost.from_config(trained.config, dtype=DTYPES[options.dtype])
        plan = ringattn.plan(seq_len, profiles, cost, training=True)
        speeds = ", ".join(f"{profile.attention_tflops:.3g}" for profile in profiles)
        return plan.partition, f"attention at {speeds} TFLOPS"
    shares = [int(share) for share in name.split(":")]
    if len(shares) != world_size():
        raise ValueError(f"--partitions must give {world_size()} shares, got {name}")
    ends = [seq_len * sum(shares[:count]) // sum(shares) for count in range(len(shares) + 1)]
    return Partition.zigzag([end - begin for begin, end in pairwise(ends)]), ""


def context_parallel(trained: Trained) -> list[Way]:
    """PyTorch's context_parallel on cuDNN, else on FlashAttention-2; it all-gathers."""
    name, config = "context_parallel", trained.config
    found = contenders(name, torch_context_parallel, trained.trial(), trained.report)
    works = {one.name: one for one in found}
    backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention-2": SDPBackend.FLASH_ATTENTION}
    for kernel, backend in backends.items():
        working = works.get(f"{name} {kernel} allgather")
        if working is not None:
            grouped = working.note == "enable_gqa"
            groups = 1 if grouped else config.nheads // config.kvheads

            def attend(
                q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grouped=grouped, groups=groups
            ) -> torch.Tensor:
                if groups > 1:
                    k, v = (x.repeat_interleave(groups, 2) for x in (k, v))
                return torch_sdpa.attend(q, k, v, True, grouped)

            around = partial(torch_context_parallel.sharded, trained.device, backend, "allgather")
            name, note = f"{name} on {kernel}", working.note
            return [Way(name, trained.even(), attend, around=around, note=note)]
    return []


def zigzag(trained: Trained) -> list[Way]:
    """A zigzag ring on PyTorch's operators: cuDNN's, on CPU PyTorch's own."""
    kernel = zigzag_on_torch.CUDNN if trained.device.type == "cuda" else zigzag_on_torch.CPU
    name = f"zigzag on {kernel.name}"
    found = contenders("zigzag", zigzag_on_torch, trained.trial(), trained.report)
    if name not in [one.name for one in found]:
        return []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return zigzag_on_torch.ZigzagRing.apply(q, k, v, kernel)

    return [Way(name, trained.even(), attend)]


def heads_over_ranks(trained: Trained) -> list[Way]:
    """Ulysses, on flash-attn-4 where it is installed, else on cuDNN."""
    problem = trained.trial()
    for one in contenders("ulysses", ulysses, problem, trained.report):
        _, kernel = ulysses.kernel_of(problem.q)
        attend = partial(ulysses.attend, kernel=partial(kernel, causal=True))
        return [Way(one.name, trained.even("contiguous"), attend)]
    return []


MAKERS: dict[str, Callable[[Trained], list[Way]]] = {
    "ring": ring,
    "context_parallel": context_parallel,
    "ulysses": heads_over_ranks,
    "zigzag": zigzag,
}
