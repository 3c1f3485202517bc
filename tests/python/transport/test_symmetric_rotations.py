# SPDX-License-Identifier: Apache-2.0
"""Rotations through memory that all ranks of a host share: little is fetched by a kernel, much by
copy engines, and each rank chooses by itself."""

import os
import random
from dataclasses import dataclass

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _gpus import WORLD_SIZES
from _numerics import poisoned_memory
from _rings import Case, ring_call
from ringattn import _C, Partition
from ringattn.testing import inject_transfer_delays

pytestmark = pytest.mark.multi_gpu

#: Rows of float32 with two heads of 64: 64 KB and 41 MB a block.
LITTLE, MUCH = 64, 40_000


@dataclass
class Rotation:
    """A block of this rank's, of one value, and what comes from the rank before."""

    rows: int

    def __post_init__(self) -> None:
        size = this().world_size
        self.partition = Partition.even(size * self.rows, size)
        self.kv = torch.zeros(2, 1, self.rows, 2, 64, device=this().device)

    def fill(self, number: int) -> float:
        """The block for this number, and the value of the one that comes."""
        size, rank = this().world_size, this().rank
        self.kv.fill_(size * number + rank)
        return size * number + (rank - 1) % size

    def __call__(self) -> torch.Tensor:
        return ringattn.rotate_kv(self.kv, self.partition, transport="symmetric").wait()


def rotate_again_and_again(rows: list[int], rounds: int, by_copy_engines: bool = False) -> None:
    """Late words, little and much in any order, rings in between."""
    if by_copy_engines:
        os.environ["RINGATTN_KERNEL_WAITS"] = "0"
        _C.reread_environment()
    size = this().world_size
    case = Case(Partition.even(64 * size, size), torch.bfloat16, transport="symmetric")
    expected, _ = ring_call(case)
    rotations = [Rotation(each) for each in rows]
    order = random.Random(0)
    with inject_transfer_delays(seed=this().rank):
        for number in range(rounds):
            rotation = order.choice(rotations)
            value = rotation.fill(number)
            with poisoned_memory():
                received = rotation()
            assert torch.equal(received, torch.full_like(received, value)), number
            if order.random() < 0.2:
                assert torch.equal(ring_call(case)[0], expected), number
    ringattn.synchronize()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize(
    "environment",
    [{}, {"RINGATTN_KERNEL_WAITS": "0"}, {"CUDA_LAUNCH_BLOCKING": "1"}],
    ids=["as they are", "by copy engines", "blocking launches"],
)
def test_late_words_are_waited_for(world_size, environment):
    with RankPool(world_size, "cuda", environment=environment) as pool:
        pool.run(rotate_again_and_again, [LITTLE, 3 * LITTLE, MUCH], 300)


def rotate_in_ways_of_their_own(rounds: int) -> None:
    rotate_again_and_again([LITTLE, 3 * LITTLE], rounds, by_copy_engines=this().rank % 2 == 1)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_may_fetch_a_rotation_in_different_ways(world_size):
    with RankPool(world_size, "cuda") as pool:
        pool.run(rotate_in_ways_of_their_own, 300)


def replay(rows: int, replays: int, with_a_ring: bool) -> None:
    """A captured rotation brings what the previous rank has then, beside eager ones and rings."""
    size = this().world_size
    case = Case(Partition.even(64 * size, size), torch.bfloat16, transport="symmetric")
    inputs = case.local_inputs()
    rotation = Rotation(rows)

    def attend() -> torch.Tensor:
        return ringattn.ring_attention(*inputs, case.partition, transport="symmetric")

    def call() -> list[torch.Tensor]:
        return [rotation(), *([attend(), rotation()] if with_a_ring else [])]

    call()
    attended = attend()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for number in range(replays):
        value = rotation.fill(number)
        if number % 3 == 0:
            assert torch.equal(attend(), attended), number
        graph.replay()
        for received in captured[::2]:
            assert torch.equal(received, torch.full_like(received, value)), number
        if with_a_ring:
            assert torch.equal(captured[1], attended), number
        if number % 3 == 1:
            assert torch.equal(rotation(), captured[0]), number


@pytest.mark.parametrize("with_a_ring", [False, True], ids=["alone", "around a ring"])
@pytest.mark.parametrize("rows", [LITTLE, MUCH], ids=["by a kernel", "by copy engines"])
def test_a_captured_rotation_can_be_replayed(rank_pool, rows, with_a_ring):
    rank_pool(2, "cuda").run(replay, rows, 100, with_a_ring)
