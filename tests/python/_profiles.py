# SPDX-License-Identifier: Apache-2.0
"""Checks that measured profiles of every kind must pass."""

import math

from ringattn import RankProfile


def check_profiles(profiles: list[RankProfile], world_size: int) -> None:
    """Finite positive values; links where there is more than one rank."""
    assert len(profiles) == world_size
    for profile in profiles:
        for name in ("attention_tflops", "linear_tflops", "overhead_ms", "memory_gbps"):
            assert 0 < getattr(profile, name) < math.inf
        for value in (profile.link_gbps, profile.link_latency_us):
            if world_size == 1:
                assert value is None
            else:
                assert value is not None and 0 < value < math.inf
        assert profile.max_tokens is not None and profile.max_tokens > 0
