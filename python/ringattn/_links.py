# SPDX-License-Identifier: Apache-2.0
"""How fast blocks come to a rank, while all ranks send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ringattn._calls import meet
from ringattn._clock import Spread, bursts
from ringattn._group import Ring
from ringattn._shard import Shard
from ringattn.functional import rotate_kv
from ringattn.partition import Partition


def measure_link(ring: Ring, shard: Shard, transport: str) -> tuple[Spread, Spread]:
    """Bandwidth in GB/s and latency in microseconds of the hop that ends here."""

    def hop(num_tokens: int) -> Callable[[], Any]:
        kv = shard.random(2, 1, num_tokens, shard.num_kv_heads, shard.head_dim)
        partition = Partition.contiguous([num_tokens] * ring.world_size)
        group = ring.process_group
        return lambda: rotate_kv(kv, partition, group=group, transport=transport).wait()

    # The second is one token longer: the difference is what the bytes cost.
    small, large = hop(1), hop(shard.num_tokens + 1)
    small()
    large()

    def together() -> None:
        for _ in range(ring.world_size):  # after so many hops, every rank has waited for all others
            small()

    meet(ring, "measure_profiles")
    latency = Spread.of([1e3 * ms for ms in bursts(small, shard.device, together)])
    times = bursts(large, shard.device, together)
    # Noise may make the longer hop the faster one: a tenth of its time is the least that counts.
    transfer = [max(1e-3 * ms - 1e-6 * latency.median, 1e-4 * ms) for ms in times]
    num_bytes = shard.num_tokens * shard.token_bytes
    return Spread.of([1e-9 * num_bytes / seconds for seconds in transfer]), latency
