# SPDX-License-Identifier: Apache-2.0
"""Speed of the transfer of blocks to a rank, while all ranks send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringattn._distributed.collectives import barrier
from ringattn._distributed.groups import GroupInfo
from ringattn._profiling.timers import Spread, bursts
from ringattn._profiling.workloads import ProbeWorkload
from ringattn.partition import Partition
from ringattn.rotation import rotate_kv


def measure_link(ring: GroupInfo, probe: ProbeWorkload, transport: str) -> tuple[Spread, Spread]:
    """Bandwidth in GB/s and latency in microseconds of the hop that ends here."""

    def hop(num_tokens: int) -> Callable[[], Any]:
        kv = probe.random(2, 1, num_tokens, probe.num_kv_heads, probe.head_dim)
        partition = Partition.contiguous([num_tokens] * ring.world_size)
        return lambda: rotate_kv(kv, partition, group=ring.group, transport=transport).wait()

    # Large blocks may be sent in another way than small ones, so the cost of bytes is the
    # difference of two large blocks.
    half = probe.num_tokens // 2
    small, medium, large = hop(1), hop(half), hop(probe.num_tokens)
    for first_call in (large, medium, small):
        first_call()

    def together() -> None:
        for _ in range(ring.world_size):  # after W hops, every rank has waited for all others
            small()

    barrier(ring, "measure_profiles")
    latency = Spread.of([1e3 * ms for ms in bursts(small, probe.device, together)])
    medium_ms = Spread.of(bursts(medium, probe.device, together)).median
    large_ms = bursts(large, probe.device, together)
    # Noise may make the longer hop the faster one: at least a tenth of its time counts.
    transfer = [1e-3 * max(ms - medium_ms, 0.1 * ms) for ms in large_ms]
    num_bytes = (probe.num_tokens - half) * probe.token_bytes
    return Spread.of([1e-9 * num_bytes / seconds for seconds in transfer]), latency
