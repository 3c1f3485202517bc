# SPDX-License-Identifier: Apache-2.0
"""Traces: the last rank's speed changes from request to request, and the rebalancer follows.

Each request is computed under every policy, one after the other, so that clocks and temperature
are the same for all. The oracle has profiles measured at every speed of the scenario, and has
observed the ring at each before the trace begins. The rebalancer has observed the ring at the first
speed, so its correction of the initial profiles does not count as drift.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ringattn
import torch
from lib.ranks import rank, world_size
from lib.timing import Contestant, measure
from ringattn.profiling import equalize
from ringattn.testing import slowdown

from study.settings import Cell, Settings
from study.splits import PlanInputs, Split, split
from study.sweep import measured_ranks, tokens_measured, watched
from study.workloads import workload

POLICIES = ("rebalanced", "oracle", "even_zigzag")
# Calls of a request before the timed one: after a rest, clocks of GPUs are higher than those that
# profiles were taken at, and not equally so on ranks that compute longer.
_LEAD_IN_MS = {"cuda": 15.0, "cpu": 0.0}


def steady(requests: int) -> list[float]:
    """50 % of the others' speed in every request."""
    return [0.5] * requests


def drift(requests: int) -> list[float]:
    """100 % of the others' speed, then 40 %, then 70 %."""
    falls, rises = requests // 4, 5 * requests // 8
    return [1.0] * falls + [0.4] * (rises - falls) + [0.7] * (requests - rises)


def flapping(requests: int) -> list[float]:
    """60 % and 100 % of the others' speed, ten requests each."""
    return [1.0 if request // 10 % 2 == 0 else 0.6 for request in range(requests)]


def hiccups(requests: int) -> list[float]:
    """70 % in one request of fifty."""
    draw = random.Random(0)
    return [0.7 if draw.random() < 0.02 else 1.0 for _ in range(requests)]


#: Name -> speed of the last rank in each request, relative to the others.
SCENARIOS: dict[str, Callable[[int], list[float]]] = {
    "steady": steady,
    "drift": drift,
    "flapping": flapping,
    "hiccups": hiccups,
}


def trace(cell: Cell, settings: Settings, device: torch.device) -> list[dict[str, Any]]:
    """One row per request, the same on every rank. Collective."""
    speeds = SCENARIOS[cell.kind](settings.requests)
    work = workload(cell, settings, device)
    profiles, oracle = {}, {}
    for speed in dict.fromkeys(speeds):
        with _last_rank_at(speed):
            measured = measured_ranks(tokens_measured(cell, device), settings, device)
            profiles[speed] = equalize(measured)
            linear_tflops = [measurement.linear_tflops.median for measurement in measured]
            inputs = PlanInputs(
                cell.seq_len,
                cell.percentages,
                profiles[speed],
                linear_tflops,
                work.cost,
                settings,
            )
            oracle[speed] = watched(inputs, work)
    even = split("even_zigzag", inputs)
    rebalancer = ringattn.Rebalancer(profiles[speeds[0]], work.cost)
    generator = random.Random(rank())
    calls: dict[Any, Callable[[], torch.Tensor]] = {}

    rows = []
    before = None
    for request, speed in enumerate([speeds[0]] * settings.watched + speeds, -settings.watched):
        planned = rebalancer.plan(cell.seq_len)
        policies = {
            "rebalanced": Split(planned.partition, planned.depth),
            "oracle": oracle[speed],
            "even_zigzag": even,
        }
        for chosen in policies.values():
            if chosen.same not in calls:
                calls[chosen.same] = work.ring(chosen.partition, chosen.depth)
                with _last_rank_at(speed):
                    calls[chosen.same]()  # one-time costs belong to no request
        lead_in = math.ceil(_LEAD_IN_MS[device.type] / planned.predicted_ms)
        recorded: dict[str, ringattn.Timings] = {}
        contestants = [
            Contestant(
                name,
                calls[chosen.same],
                chosen.partition.position_ids(rank(), device),
                around=partial(_recording, name, recorded),
                lead_in=lead_in,
            )
            for name, chosen in policies.items()
        ]
        with _last_rank_at(speed):
            timings = measure(contestants, device, rounds=1, warmup=0)
        rebalancer.observe(_noisy(recorded["rebalanced"], settings.noise, generator))
        changed, before = planned.partition != before, planned.partition
        if request < 0:
            continue
        row: dict[str, Any] = {
            "scenario": cell.kind,
            "what": cell.what,
            "seq_len": cell.seq_len,
            "request": request,
            "asked_speed": speed,
            "replanned": int(changed and request > 0),
        }
        for name, timing in timings.items():
            row[f"{name}_ms"] = timing.median
        for r in range(world_size()):
            row[f"rank{r}_tokens"] = planned.partition.lengths[r]
            row[f"rank{r}_oracle_tokens"] = oracle[speed].partition.lengths[r]
        rows.append(row)
    return rows


@contextlib.contextmanager
def _last_rank_at(speed: float) -> Iterator[None]:
    """The last rank at `speed`, the others left alone."""
    with slowdown(1.0 / speed if rank() == world_size() - 1 else 1.0):
        yield


@contextlib.contextmanager
def _recording(name: str, recorded: dict[str, ringattn.Timings]) -> Iterator[None]:
    # As the oracle's were, and as calls are without it.
    with ringattn.record_timings(by_block=False) as timings:
        yield
    recorded[name] = timings


def _noisy(timings: ringattn.Timings, noise: float, draw: random.Random) -> ringattn.Timings:
    """Timings of a rank whose speed was a little different."""
    factor = max(0.1, 1.0 + noise * draw.gauss(0.0, 1.0))
    steps = [
        dataclasses.replace(step, attention_ms=step.attention_ms * factor) for step in timings.steps
    ]
    return dataclasses.replace(timings, steps=steps)
