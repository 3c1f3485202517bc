# SPDX-License-Identifier: Apache-2.0
"""A peer that goes while other collectives than the ring run, and results that nobody waits for."""

import os
import re
import resource
from pathlib import Path

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from ringattn import Partition

TIMEOUT_S = 3.0


def lose_a_rank_in(function_name: str, victim: int) -> str:
    """A warm collective that one rank dies before; what the others are told."""
    x = torch.zeros(1, 3, 2, 8)
    partition = Partition.even(3 * this().world_size, this().world_size)
    calls = {
        "decode_attention": lambda: ringattn.decode_attention(x, x, x),
        "rotate_kv": lambda: ringattn.rotate_kv(torch.stack([x, x]), partition).wait(),
    }
    calls[function_name]()
    if this().rank == victim:
        os._exit(1)
    with pytest.raises(dist.DistBackendError) as first:
        for _ in range(3):  # a message may still have been under way
            calls[function_name]()
    with pytest.raises(dist.DistBackendError):
        ringattn.synchronize()
    return str(first.value)


@pytest.mark.parametrize("function_name", ["decode_attention", "rotate_kv"])
def test_a_rank_that_dies_is_named_by_the_other_collectives(function_name):
    victim = 2
    with RankPool(3, timeout_s=TIMEOUT_S) as ring:
        for outcome in ring.outcomes(lose_a_rank_in, function_name, victim):
            if outcome.rank == victim:
                assert outcome.died
                continue
            assert outcome.ok, outcome.traceback
            assert re.search(rf"\brank {victim}\b", outcome.value), outcome.value
            assert re.search(r"\bstep \d", outcome.value), outcome.value


def test_rotations_that_nobody_waits_for_are_freed():
    partition = Partition.even(4000, 1)
    kv = torch.zeros(2, 1, 4000, 8, 64)  # 16 MB

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    for _ in range(3):
        ringattn.rotate_kv(kv, partition)
    before = resident_bytes()
    for _ in range(40):
        ringattn.rotate_kv(kv, partition)
    assert resident_bytes() - before < 10 * kv.nbytes
