# SPDX-License-Identifier: Apache-2.0
"""Speeds of a rank: alone, while all ranks measure the same, and in a ring."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ringattn._distributed.collectives import barrier, gather_objects
from ringattn._distributed.groups import GroupInfo
from ringattn._profiling.devices import attention_tiles, hardware, spare_bytes
from ringattn._profiling.equalize import RankMeasurement, equalize
from ringattn._profiling.links import measure_link
from ringattn._profiling.timers import Spread, bursts, repeat
from ringattn._profiling.workloads import ProbeWorkload
from ringattn.functional import ring_attention
from ringattn.planning import ModelCost, plan, work_in_tiles
from ringattn.profiles import RankProfile
from ringattn.timings import call_tflops, record_timings

_MIN_CALLS = 3  # of a ring


def measure_alone(
    ring: GroupInfo, probe: ProbeWorkload, seconds: float, transport: str
) -> RankMeasurement:
    """All quantities but the speed in a ring, while every rank measures the same. Collective."""
    # The links come first: what they allocate is not free afterwards.
    link_gbps, link_latency_us = None, None
    if ring.world_size > 1:
        link_gbps, link_latency_us = measure_link(ring, probe, transport)
    max_tokens = spare_bytes(ring, probe.device) // (probe.num_layers * probe.token_bytes)

    attention, attention_flops = probe.attention(probe.num_tokens, transport)
    linear, linear_flops = probe.linear()
    # More than any cache of the device holds.
    large = 2**28 if probe.device.type == "cuda" else 2**24
    decode, decode_bytes = probe.decode(large // probe.token_bytes + 1)
    one_token, _ = probe.attention(1, transport)
    for work in (linear, decode, one_token, attention):  # one-time costs of a first call
        work()
    barrier(ring, "measure_profiles")
    # Attention in one stretch: after lighter work, clocks are above their steady level for a while.
    attention_ms = _settled(attention, probe.device, seconds, seconds)
    linear_ms = _settled(linear, probe.device, seconds / 4, seconds / 2)
    decode_ms = _settled(decode, probe.device, seconds / 4, seconds / 2)
    overhead_ms = bursts(one_token, probe.device)

    def rate(amount: float, times: Sequence[float]) -> Spread:
        return Spread.of([amount / ms for ms in times])

    return RankMeasurement(
        device=hardware(probe.device),
        attention_tflops=rate(1e-9 * attention_flops, attention_ms),
        linear_tflops=rate(1e-9 * linear_flops, linear_ms),
        overhead_ms=Spread.of([ring.world_size * ms for ms in overhead_ms]),
        memory_gbps=rate(1e-6 * decode_bytes, decode_ms),
        link_gbps=link_gbps,
        link_latency_us=link_latency_us,
        max_tokens=max_tokens,
        tiles=attention_tiles(probe.device, probe.dtype, probe.head_dim),
    )


def measure_in_ring(
    ring: GroupInfo,
    probe: ProbeWorkload,
    seconds: float,
    transport: str,
    measured: Sequence[RankMeasurement],
) -> RankMeasurement:
    """This rank's measurement with the speed of its attention in a ring that is balanced by all
    measurements: all ranks busy, with the kernels of rings. Collective."""
    cost = ModelCost.attention_only(
        probe.num_heads, probe.head_dim, num_kv_heads=probe.num_kv_heads, dtype=probe.dtype
    )
    profiles = equalize(measured)
    # Every rank gets tokens, whatever a call, a hop, or room for all layers costs.
    bare = [RankProfile(of.attention_tflops, of.linear_tflops, tiles=of.tiles) for of in profiles]
    planned = plan(probe.num_tokens * ring.world_size, bare, cost)
    own, overhead_ms = measured[ring.rank], profiles[ring.rank].overhead_ms
    num_tokens = planned.partition.lengths[ring.rank]
    q = probe.random(1, num_tokens, probe.num_heads, probe.head_dim)
    k, v = (probe.random(1, num_tokens, probe.num_kv_heads, probe.head_dim) for _ in range(2))

    def call() -> Any:
        return ring_attention(q, k, v, planned.partition, group=ring.group, transport=transport)

    # A number of calls and not a time: all ranks must make the same calls.
    first_ms = statistics.median(repeat(call, probe.device, 0.0, at_least=_MIN_CALLS))
    call_ms = max(gather_objects(ring, "measure_profiles", first_ms))
    calls = max(_MIN_CALLS, math.ceil(1e3 * seconds / call_ms))
    repeat(call, probe.device, 0.0, at_least=calls)
    with record_timings(by_block=False) as timings:
        repeat(call, probe.device, 0.0, at_least=calls)
    speeds = call_tflops(timings.calls, overhead_ms)
    if not speeds:
        return own  # the plan gave it no token
    in_tiles = work_in_tiles(planned.partition, ring.rank, cost, own.tiles)
    return replace(own, attention_tflops=Spread.of([in_tiles * speed for speed in speeds]))


def _settled(
    work: Callable[[], Any], device: torch.device, settling: float, seconds: float
) -> list[float]:
    """Milliseconds of each call in ``seconds``, after ``settling`` seconds of calls."""
    repeat(work, device, settling, at_least=1)
    return repeat(work, device, seconds)
