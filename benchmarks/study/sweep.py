# SPDX-License-Identifier: Apache-2.0
"""One cell of the sweep: every strategy on one problem over one set of ranks, interleaved."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import ringattn
import torch
import torch.distributed as dist
from lib.problem import DTYPES
from lib.ranks import from_all_ranks, rank
from lib.timing import EACH_ALONE, Contestant, Timing, measure, sustain
from ringattn.profiling import (
    NUM_LAYERS,
    RankMeasurement,
    equalize,
    measure_ranks,
    tokens_to_measure,
)

from study.settings import Cell, Settings, set_name
from study.splits import PlanInputs, Split, split
from study.workloads import Workload, workload

_RECORDED_CALLS = 3  # whose steps are taken apart; one, where a call takes long
_LONG_MS = 100.0
_MIN_ROUNDS = 3
_TRIAL = 4  # requests until the rebalancer has judged a new plan
_LEAD_IN_MS = {"cuda": 60.0, "cpu": 0.0}  # of a request that the rebalancer watches
STEP_COLUMNS = ("own_ms", "remote_ms", "transfer_ms", "wait_ms")


def measure_cell(
    cell: Cell,
    measured: Sequence[RankMeasurement],
    settings: Settings,
    device: torch.device,
) -> list[dict[str, Any]]:
    """One row per strategy, the same on every rank. Collective."""
    work = workload(cell, settings, device)
    linear_tflops = [measurement.linear_tflops.median for measurement in measured]
    inputs = PlanInputs(
        cell.seq_len, cell.percentages, equalize(measured), linear_tflops, work.cost, settings
    )
    splits = {name: split(name, inputs) for name in settings.strategies if name != "rebalanced"}
    if "rebalanced" in settings.strategies:
        splits["rebalanced"] = watched(inputs, work)
    first_with = {chosen.same: name for name, chosen in reversed(splits.items())}
    contestants = {
        name: _contestant(name, splits[name], work, device) for name in first_with.values()
    }
    errors = {
        name: from_all_ranks([work.max_error(contestant)]).max().item()
        for name, contestant in contestants.items()
    }
    everything = torch.arange(cell.seq_len, device=device)
    alone = Contestant(EACH_ALONE, work.alone, everything)
    timings = _timings([*contestants.values(), alone], settings, device)
    alone_ms = from_all_ranks([timings.pop(EACH_ALONE).own_median])[:, 0]
    ideal_ms = 1.0 / (1.0 / alone_ms).sum().item()
    latencies = {
        name: from_all_ranks([timing.own_median])[:, 0].tolist() for name, timing in timings.items()
    }
    steps = {
        name: _steps(contestant.call, _recorded_calls(timings[name].median))
        for name, contestant in contestants.items()
    }

    rows = []
    for name, chosen in splits.items():
        twin = first_with[chosen.same]
        notes = [chosen.note, "" if twin == name else f"the split of {twin}, timed once"]
        row: dict[str, Any] = {
            "split_type": name,
            "seq_len": cell.seq_len,
            "what": cell.what,
            "percentages": set_name(cell.percentages),
            "layout": chosen.partition.layout,
            "depth": chosen.depth,
            "overall_latency_ms": timings[twin].median,
            "p10_ms": timings[twin].quantile(0.1),
            "p90_ms": timings[twin].quantile(0.9),
            "rounds": len(timings[twin].samples),
            "ideal_ms": ideal_ms,
            "predicted_ms": chosen.predicted_ms,
            "max_error": errors[twin],
            "note": "; ".join(filter(None, notes)),
        }
        for r in range(len(measured)):
            row[f"rank{r}_tokens"] = chosen.partition.lengths[r]
            row[f"rank{r}_latency_ms"] = latencies[twin][r]
            row[f"rank{r}_tflops"] = 1e-9 * work.flops / alone_ms[r].item()
            row[f"rank{r}_linear_tflops"] = linear_tflops[r]
            for column, value in zip(STEP_COLUMNS, steps[twin][r], strict=True):
                row[f"rank{r}_{column}"] = value
        rows.append(row)
    return rows


def tokens_measured(cell: Cell, device: torch.device) -> int:
    """Tokens of a shard for `measured_ranks`, as `ringattn generate --partition auto` takes."""
    return tokens_to_measure(cell.seq_len, len(cell.percentages), device)


def measured_ranks(
    num_tokens: int, settings: Settings, device: torch.device
) -> list[RankMeasurement]:
    """The measurements behind `ringattn.measure_profiles`. Collective."""
    return measure_ranks(
        None,
        num_heads=settings.heads,
        num_kv_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        num_layers=NUM_LAYERS,
        num_tokens=num_tokens,
        dtype=DTYPES[settings.dtype],
        device=device,
        seconds=settings.settle_seconds,
        transport=settings.transport,
    )


def watched(inputs: PlanInputs, work: Workload) -> Split:
    """The rebalancer's plan after it has observed some requests of a few calls in a row, at the
    clocks that contestants are timed at. After a late change of plans it observes some more, so
    that it can give up a bad plan. Collective."""
    lead_in_ms = _LEAD_IN_MS[inputs.settings.device]
    rebalancer = ringattn.Rebalancer(inputs.profiles, inputs.cost)
    request, requests = 0, inputs.settings.watched
    while request < requests:
        planned = rebalancer.plan(inputs.seq_len)
        call = work.ring(planned.partition, planned.depth)
        dist.barrier()
        # At least once: the one-time costs of a first call belong to no request.
        for _ in range(max(1, math.ceil(lead_in_ms / planned.predicted_ms))):
            call()
        with ringattn.record_timings(by_block=False) as timings:
            for _ in range(_recorded_calls(planned.predicted_ms)):
                call()
        request += 1
        if rebalancer.observe(timings):
            requests = min(max(requests, request + _TRIAL), 2 * inputs.settings.watched)
    planned = rebalancer.plan(inputs.seq_len)
    return Split(planned.partition, planned.depth, planned.predicted_ms)


def _recorded_calls(ms: float) -> int:
    return 1 if ms > _LONG_MS else _RECORDED_CALLS


def _contestant(name: str, chosen: Split, work: Workload, device: torch.device) -> Contestant:
    positions = chosen.partition.position_ids(rank(), device)
    return Contestant(name, work.ring(chosen.partition, chosen.depth), positions)


def _timings(
    contestants: Sequence[Contestant], settings: Settings, device: torch.device
) -> dict[str, Timing]:
    """Samples that fill the time of a cell."""
    sustained, round_s = sustain(contestants, device, warmup=settings.warmup)
    affordable = math.floor(settings.cell_seconds / round_s + 1e-6)  # not one less by rounding
    rounds = min(settings.rounds, max(_MIN_ROUNDS, affordable))
    return measure(sustained, device, rounds=rounds, warmup=0)


def _steps(call: Callable[[], Any], calls: int) -> list[list[float]]:
    """Milliseconds of STEP_COLUMNS in one call: [W][4]."""
    with ringattn.record_timings() as timings:
        for _ in range(calls):
            dist.barrier()
            call()
    total = timings.summary()
    names = ("own_attention_ms", "remote_attention_ms", "transfer_ms", "wait_ms")
    return from_all_ranks([total[name] / calls for name in names]).tolist()
