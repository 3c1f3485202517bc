# SPDX-License-Identifier: Apache-2.0
"""Interleaved timing of contestants.

Times are medians over rounds. In each round every contestant runs once, in an order drawn anew,
after a rest as long as the run before it, of LONGEST_REST at most, or after calls of its own that
do not count: clocks follow the device's recent load, and all contestants are treated alike. Across
ranks the slowest one counts, sample by sample.
"""

from __future__ import annotations

import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from lib.problem import Problem
from lib.ranks import from_all_ranks, rank

LONGEST_REST = 0.2  # seconds
EACH_ALONE = "every rank alone"  # the whole problem on every rank, all at once
# Sustained contestants are timed for at least so long, after as long: power and clocks of a GPU
# swing for some tenths of a second once it is loaded. CPUs only have to fill their caches.
_STRETCH_MS = {"cuda": 120.0, "cpu": 50.0}
_draw = random.Random(0)


@dataclass(frozen=True)
class Contestant:
    """A call to time; the context `around` is entered before it and left after it."""

    name: str
    call: Callable[[], torch.Tensor]  # -> out [B, S_r, H, D], a view of any strides
    positions: torch.Tensor  # int64 [S_r]: where the rows of out stand in the sequence
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    note: str = ""
    alone: bool = False  # rank 0 runs it while the others wait, for what uses the whole machine
    from_idle: bool = False  # on CUDA: the device waits for the host, so its launches count too
    back_to_back: int = 1  # calls in a row that make one sample
    lead_in: int = 0  # calls before them, until clocks and temperature have settled
    tail: int = 0  # calls after them, until other ranks are done too
    inputs: Sequence[torch.Tensor] = ()  # leaves: what gradients of out are asked for


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds."""

    samples: Sequence[float]  # of the slowest rank
    own_samples: Sequence[float]  # of this rank

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def own_median(self) -> float:
        return statistics.median(self.own_samples)

    def columns(self) -> dict[str, float]:
        """Median and spread, as tables name them."""
        return {"ms": self.median, "p10": self.quantile(0.1), "p90": self.quantile(0.9)}

    def quantile(self, share: float) -> float:
        ordered = sorted(self.samples)
        return ordered[round(share * (len(ordered) - 1))]


def measure(
    contestants: Sequence[Contestant], device: torch.device, *, rounds: int, warmup: int
) -> dict[str, Timing]:
    """Times all contestants, one after the other in every round. On all ranks in one order."""
    own: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for count in range(-warmup, rounds):
        for contestant in _draw.sample(contestants, len(contestants)):
            sample = _sample(contestant, device)
            if contestant.lead_in == 0:
                time.sleep(min(sample * contestant.back_to_back / 1e3, LONGEST_REST))
            if count >= 0:
                own[contestant.name].append(sample)
    return {
        name: Timing(from_all_ranks(samples).amax(0).tolist(), samples)
        for name, samples in own.items()
    }


def sustain(
    contestants: Sequence[Contestant], device: torch.device, *, warmup: int
) -> tuple[list[Contestant], float]:
    """The contestants, EACH_ALONE among them, as calls in a row with all ranks busy, and about how
    many seconds a round of them takes. Rings and lone ranks are then timed over the same stretch of
    time after their start, the same for all problems of a length: otherwise the ideal would refer
    to other clocks than the ring's. Collective; takes the warm-up and a round."""
    second_calls = [replace(each, lead_in=1) for each in contestants]
    first = measure(second_calls, device, rounds=1, warmup=warmup)
    alone_ms = from_all_ranks([first[EACH_ALONE].own_median])[:, 0].tolist()
    stretch_ms = _STRETCH_MS[device.type]
    if device.type == "cuda":
        # Whole calls of the fastest lone rank, so that rings are not timed earlier or later.
        stretch_ms = math.ceil(stretch_ms / min(alone_ms)) * min(alone_ms)
    sustained = []
    round_s = 0.0
    for contestant in contestants:
        slowest = first[contestant.name].median
        lasts_ms = max(stretch_ms, slowest)
        # All ranks make the same calls of a ring. A lone rank makes as many as fit, and goes on
        # until the others are done.
        own = first[contestant.name].own_median if contestant.name == EACH_ALONE else slowest
        calls = max(1, round(stretch_ms / own))
        tail = 0
        if contestant.name == EACH_ALONE:
            tail = max(0, round(2 * lasts_ms / own) - 2 * calls)
        sustained.append(replace(contestant, lead_in=calls, back_to_back=calls, tail=tail))
        round_s += 2e-3 * lasts_ms
    return sustained, round_s


def _sample(contestant: Contestant, device: torch.device) -> float:
    """Milliseconds of one call, all ranks having started together."""
    with contestant.around():
        if dist.is_initialized():
            dist.barrier()
        if contestant.alone and rank() != 0:
            elapsed = 0.0
        else:
            for _ in range(contestant.lead_in):
                contestant.call()
            elapsed = (_on_cuda if device.type == "cuda" else _on_cpu)(contestant)
            for _ in range(contestant.tail):
                contestant.call()
        if contestant.alone and dist.is_initialized():
            dist.barrier()
    return elapsed


def _on_cpu(contestant: Contestant) -> float:
    start = time.perf_counter()
    for _ in range(contestant.back_to_back):
        contestant.call()
    return 1e3 * (time.perf_counter() - start) / contestant.back_to_back


def _on_cuda(contestant: Contestant) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if contestant.from_idle:
        torch.cuda.synchronize()
    elif contestant.lead_in == 0:
        meet(all_ranks=not contestant.alone)
    begin.record()
    for _ in range(contestant.back_to_back):
        contestant.call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / contestant.back_to_back


def meet(all_ranks: bool = True) -> None:
    """Keeps the device busy for some milliseconds while the host enqueues the next calls, so that
    the device is timed and not Python. Then the devices of all ranks synchronize."""
    torch.cuda._sleep(5_000_000)
    if all_ranks and dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cuda"))


def max_error(contestant: Contestant, problem: Problem) -> float:
    """Largest error of one call over sampled rows of all ranks; NaN if it is NaN on any."""
    error = 0.0
    with contestant.around():
        if rank() == 0 or not contestant.alone:
            error = problem.max_error(contestant.call(), contestant.positions)
    return from_all_ranks([error]).max().item()
