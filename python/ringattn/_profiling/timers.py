# SPDX-License-Identifier: Apache-2.0
"""Times of work on a device, in milliseconds, while all ranks are busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

_BURST = 8  # calls timed together, or queued ahead of the clock
_SLEEP_CYCLES = 5_000_000  # a CUDA device sleeps while the host queues what is timed: some 3 ms


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, low, high)

    def explains(self, other: Spread) -> bool:
        """Whether the median of ``other`` lies between these quartiles, as half the samples do."""
        return self.low <= other.median <= self.high


def repeat(
    work: Callable[[], Any], device: torch.device, seconds: float, at_least: int = 3
) -> list[float]:
    """The time of each call during about ``seconds``, of ``at_least`` calls.

    The duration is fixed and not the number: ranks that begin together end together, so that no
    rank is timed while another is idle.
    """
    end = time.perf_counter() + seconds
    if device.type != "cuda":
        times: list[float] = []
        while len(times) < at_least or time.perf_counter() < end:
            start = time.perf_counter()
            work()
            times.append(1e3 * (time.perf_counter() - start))
        return times
    marks = [_mark()]
    while len(marks) <= at_least or time.perf_counter() < end:
        work()
        marks.append(_mark())
        if len(marks) > _BURST:  # the host stays a few calls ahead of the device
            marks[-_BURST].synchronize()
    marks[-1].synchronize()
    return [before.elapsed_time(after) for before, after in pairwise(marks)]


def bursts(
    work: Callable[[], Any], device: torch.device, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """The time of a call that is too short to be timed alone, from a few bursts of calls.
    ``before`` is called before each burst and not timed."""
    times = []
    for _ in range(_BURST):
        if device.type == "cuda":
            # Everything is queued while the device sleeps, so that the device is timed.
            torch.cuda._sleep(_SLEEP_CYCLES)
            before()
            start = _mark()
            for _ in range(_BURST):
                work()
            end = _mark()
            end.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            before()
            begin = time.perf_counter()
            for _ in range(_BURST):
                work()
            elapsed = 1e3 * (time.perf_counter() - begin)
        times.append(elapsed / _BURST)
    return times


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
