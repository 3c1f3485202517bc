# SPDX-License-Identifier: Apache-2.0
"""Decode attention over ranks whose kernels exchange their partial results by themselves."""

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


@dataclass(frozen=True)
class Decode:
    """One call: the same queries on every rank, and keys of each rank."""

    dtype: torch.dtype = torch.bfloat16
    batch: int = 2
    num_queries: int = 1
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 128
    keys: int = 300  # of rank 0
    extra_keys: int = 57  # of each rank than of the one before

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        place = this()
        generator = torch.Generator().manual_seed(3)
        shape = (self.batch, self.num_queries, self.num_heads, self.head_dim)
        q = torch.randn(shape, generator=generator)
        generator.manual_seed(100 + place.rank)
        keys = self.keys + self.extra_keys * place.rank
        kv = (2, self.batch, keys, self.num_kv_heads, self.head_dim)
        k, v = torch.randn(kv, generator=generator).to(place.device, self.dtype)
        return q.to(place.device, self.dtype), k, v


#: Little and much, several queries, heads of all widths, each dtype, a rank without keys.
CASES = [
    Decode(batch=1),
    Decode(keys=0),
    Decode(torch.float16, num_queries=3, head_dim=72),
    Decode(torch.float32, head_dim=64),
    Decode(batch=9, num_heads=32, num_kv_heads=8),
    Decode(batch=3, num_heads=40, num_kv_heads=1, head_dim=8, num_queries=20),
    Decode(batch=15, num_heads=64, num_kv_heads=64, head_dim=256, keys=33),
]
#: A partial of more than 1 MiB.
LARGE = Decode(batch=17, num_heads=64, num_kv_heads=64, head_dim=256, keys=33)


def decode(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with poisoned_memory():
        return ringattn.decode_attention(q, k, v, return_lse=True)


def roll(*inputs: torch.Tensor) -> None:
    """Other values in the same memory; queries stay the same on every rank."""
    q, k, v = inputs
    q.copy_(torch.roll(q, 1, dims=3))
    for x in (k, v):
        x.copy_(torch.roll(x, 1, dims=1))


def decoded(cases: list[Decode]) -> tuple[list[tuple[torch.Tensor, ...]], list[str | None]]:
    """The results of a few calls of each, and what carried each."""
    results, transports = [], []
    for case in cases:
        inputs = case.inputs()
        for _ in range(3):
            results.append(tuple(x.cpu() for x in decode(*inputs)))
            roll(*inputs)
        transports.append(ringattn.last_transport())
    return results, transports


@pytest.mark.nccl
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_results_are_the_same_bits_on_all_ranks_and_over_nccl(world_size):
    with RankPool(world_size, "cuda") as pool:
        exchanged = pool.run(decoded, [*CASES, LARGE])
    with RankPool(world_size, "cuda", environment={"RINGATTN_KERNEL_WAITS": "0"}) as pool:
        gathered = pool.run(decoded, [*CASES, LARGE])
    assert exchanged[0][1] == ["symmetric"] * len(CASES) + ["nccl"]
    assert gathered[0][1] == ["nccl"] * (len(CASES) + 1)
    first = exchanged[0][0]
    for results, _ in (*exchanged, *gathered):
        for ours, theirs in zip(results, first, strict=True):
            for x, y in zip(ours, theirs, strict=True):
                assert torch.equal(x, y)
                assert not x.isnan().any()


def one_rank_lets_no_kernel_wait() -> str | None:
    if this().rank == 1:
        os.environ["RINGATTN_KERNEL_WAITS"] = "0"
        _C.reread_environment()
    decode(*CASES[0].inputs())
    return ringattn.last_transport()


@pytest.mark.nccl
def test_no_kernel_waits_where_one_rank_lets_none_wait():
    with RankPool(2, "cuda") as pool:
        assert pool.run(one_rank_lets_no_kernel_wait) == ["nccl", "nccl"]


def replayed(case: Decode, replays: int) -> list[torch.Tensor]:
    """Each replay gives what the eager call before or after it gives, with other inputs each time.
    Two exchanges in one graph."""
    inputs = case.inputs()

    def call() -> tuple[torch.Tensor, ...]:
        out, _ = ringattn.decode_attention(*inputs, return_lse=True)
        return ringattn.decode_attention(out, *inputs[1:], return_lse=True)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    seen = []
    for replay in range(replays):
        roll(*inputs)
        expected = call() if replay % 2 else None
        graph.replay()
        expected = expected or call()
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs), f"replay {replay}"
            assert not ours.isnan().any()
        seen.append(results[0].cpu())
    ringattn.synchronize()
    return seen


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_captured_exchange_can_be_replayed(rank_pool, world_size):
    for case in CASES:
        seen = rank_pool(world_size, "cuda").run(replayed, case, 50)
        for ours in zip(*seen, strict=True):
            assert all(torch.equal(x, ours[0]) for x in ours)


def beside_rings(rounds: int) -> None:
    """Rings, rotations and exchanges of several shapes in any order, some of them replayed, while
    transfers are delayed."""
    size = this().world_size
    ring = Case(Partition.even(512 * size, size), torch.bfloat16, transport="symmetric")
    q, k, v = ring.local_inputs()
    kv = torch.stack([k, v])
    decodes = [case.inputs() for case in CASES]
    calls = [
        lambda: ringattn.ring_attention(q, k, v, ring.partition, transport="symmetric"),
        lambda: ringattn.rotate_kv(kv, ring.partition, transport="symmetric").wait(),
        *(lambda inputs=inputs: ringattn.decode_attention(*inputs) for inputs in decodes),
    ]
    captured_calls = [calls[0], *calls[2:]]
    expected = [call() for call in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [call() for call in captured_calls]
    order = random.Random(0)
    with inject_transfer_delays(seed=this().rank):
        for _ in range(rounds):
            index = order.randrange(len(calls) + 1)
            if index == len(calls):
                graph.replay()
                for ours, theirs in zip(captured, [expected[0], *expected[2:]], strict=True):
                    assert torch.equal(ours, theirs)
            else:
                assert torch.equal(calls[index](), expected[index]), index
    ringattn.synchronize()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges_rings_and_replays_in_any_order(rank_pool, world_size):
    rank_pool(world_size, "cuda").run(beside_rings, 300)


def on_streams_in_turn(rounds: int) -> None:
    """Calls that do not wait for each other by what they read."""
    inputs = [case.inputs() for case in CASES]
    expected = [decode(*each)[0] for each in inputs]
    streams = [torch.cuda.Stream() for _ in range(3)]
    torch.cuda.synchronize()
    results = []
    for number in range(rounds):
        with torch.cuda.stream(streams[number % 3]):
            results.append(ringattn.decode_attention(*inputs[number % len(inputs)]))
    torch.cuda.synchronize()
    for number, result in enumerate(results):
        assert torch.equal(result, expected[number % len(inputs)]), number


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_exchanges_on_several_streams_follow_each_other(rank_pool, world_size):
    rank_pool(world_size, "cuda").run(on_streams_in_turn, 200)


def captured_first() -> None:
    inputs = Decode(batch=5).inputs()
    ring_call(Case(Partition.even(64, this().world_size), torch.bfloat16, transport="symmetric"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(ValueError, match="must have been made once before"),
        torch.cuda.graph(graph),
    ):
        ringattn.decode_attention(*inputs)
    decode(*inputs)  # the group works on
    ringattn.synchronize()


def test_a_new_kind_of_exchange_under_capture_is_refused():
    with RankPool(2, "cuda") as pool:
        pool.run(captured_first)
