# SPDX-License-Identifier: Apache-2.0
"""The one-sided transport: blocks in memory that all ranks of a host share, fetched by the kernel
that attends to them. What can go wrong there goes wrong rarely, so it is provoked."""

import math
import random
import re
import time
from contextlib import nullcontext
from dataclasses import replace

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from _gpus import WORLD_SIZES
from _memory import grows_each_time, in_use
from _numerics import poisoned_memory
from _rings import SPLITS, Case, check_ring
from ringattn import Partition
from ringattn.testing import inject_transfer_delays
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.multi_gpu


def cases(world_size: int, transport: str = "symmetric") -> list[Case]:
    """Uneven lengths with 0 and odd ones, both layouts, groups of heads, batches, widths."""
    splits = [([19 * n for n in lengths], order) for lengths, order in SPLITS[world_size]]
    cases = []
    for (lengths, order), head_dim, kv_heads, batch in zip(
        splits, (64, 128, 72, 256), (2, 4, 1, 2), (1, 2, 3, 1), strict=False
    ):
        for layout in ("zigzag", "contiguous"):
            for causal in (True, False):
                cases.append(
                    Case(
                        Partition(layout, tuple(lengths), tuple(order or ())),
                        torch.bfloat16,
                        causal,
                        batch,
                        num_kv_heads=kv_heads,
                        head_dim=head_dim,
                        transport=transport,
                    )
                )
    return cases


def long_case(world_size: int) -> Case:
    """Thread blocks that share keys, slices of heads that are not alike, blocks of many pieces."""
    return Case(
        Partition.even(8192, world_size),
        torch.bfloat16,
        batch=1,
        num_heads=6,
        num_kv_heads=3,
        head_dim=128,
        transport="symmetric",
    )


@pytest.fixture(
    params=[
        {},
        {"RINGATTN_KERNEL_WAITS": "0"},
        {"CUDA_LAUNCH_BLOCKING": "1"},
        {"RINGATTN_KERNEL_FAMILY": "sm80"},
    ],
    ids=["one launch", "two launches", "blocking launches", "portable kernels"],
)
def setting(request: pytest.FixtureRequest) -> dict[str, str]:
    return request.param


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_every_way_to_launch_is_correct(setting, world_size):
    with RankPool(world_size, "cuda", environment=setting) as ring:
        for case in (*cases(world_size), long_case(world_size)):
            check_ring(ring, case)


def attention_launches(case: Case) -> int:
    """Kernels of block attention in one ring."""
    ring(case)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        ring(case)
        torch.cuda.synchronize()
    return sum(
        entry.count for entry in profiler.key_averages() if "block_attention_kernel" in entry.key
    )


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("environment", "launches"), [({}, 1), ({"RINGATTN_KERNEL_WAITS": "0"}, 2)]
)
def test_a_ring_is_one_launch_or_two(environment: dict[str, str], launches: int) -> None:
    case = Case(Partition.even(512, 2), torch.bfloat16, transport="symmetric", head_dim=128)
    with RankPool(2, "cuda", environment=environment) as pool:
        assert pool.run(attention_launches, case) == [launches, launches]


def recorded(case: Case) -> list[ringattn.StepTiming]:
    ring(case)
    with ringattn.record_timings(by_block=False) as timings:
        ring(case)
    return timings.steps


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("environment", "launches"), [({}, 1), ({"RINGATTN_KERNEL_WAITS": "0"}, 2)]
)
def test_launches_are_recorded_as_they_are(environment: dict[str, str], launches: int) -> None:
    case = Case(Partition.even(512, 2), torch.bfloat16, transport="symmetric", head_dim=128)
    with RankPool(2, "cuda", environment=environment) as pool:
        of_ranks = pool.run(recorded, case)
    pair_flops = 4 * case.batch * case.num_heads * case.head_dim
    for rank, steps in enumerate(of_ranks):
        assert [step.kind for step in steps] == ["own", "remote"][:launches]
        assert steps[0].source == rank
        assert all(step.attention_ms > 0 and step.transfer_ms == 0 for step in steps)
        expected = pair_flops * (256 * 257 / 2 + 256 * 128)
        assert sum(step.flops for step in steps) == expected


def ring(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = case.local_inputs()
    return ringattn.ring_attention(
        q, k, v, case.partition, causal=case.causal, transport=case.transport, return_lse=True
    )


def under_stress(cases: list[Case], rounds: int) -> None:
    """Late copies and late words into poisoned memory, other tensors and another kind of call each
    time, beside NCCL that needs multiprocessors too."""
    # Each kind with two sets of tensors: a read of the previous call's block shows.
    calls = [replace(case, seed=seed) for case in cases for seed in (11, 12)]
    inputs = [(case.local_inputs(), case) for case in calls]
    expected = [ring(case) for case in calls]
    side = torch.cuda.Stream()
    busy = torch.ones(1 << 20, device=this().device)
    order = random.Random(0)
    with inject_transfer_delays(seed=this().rank):
        for _ in range(rounds):
            index = order.randrange(len(calls))
            with torch.cuda.stream(side):
                dist.all_reduce(busy)
                busy.fill_(1.0)
            (q, k, v), case = inputs[index]
            results = ringattn.ring_attention(
                q, k, v, case.partition, causal=case.causal, transport="symmetric", return_lse=True
            )
            for ours, theirs in zip(results, expected[index], strict=True):
                assert torch.equal(ours, theirs), case
    torch.cuda.synchronize()


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_late_copies_are_waited_for(rank_pool, world_size):
    ring_of_ranks = rank_pool(world_size, "cuda")
    ring_of_ranks.run(under_stress, [*cases(world_size), long_case(world_size)], 1000)


def fetch_in_different_ways(cases: list[Case], rounds: int) -> None:
    """Each rank records a call block by block when it likes: there copy engines fetch, and streams
    wait, while a kernel does for others. In between all of them rotate, little or so much that copy
    engines fetch it."""
    inputs = [replace(case, seed=seed).local_inputs() for case in cases for seed in (11, 12)]
    calls = [case for case in cases for _ in range(2)]

    def attend(index: int, by_block: bool) -> torch.Tensor:
        with ringattn.record_timings() if by_block else nullcontext():
            case = calls[index]
            return ringattn.ring_attention(
                *inputs[index], case.partition, causal=case.causal, transport="symmetric"
            )

    def rotate(index: int) -> torch.Tensor:
        kv = torch.stack(inputs[index][1:])
        if index % 4 == 0:
            row_bytes = math.prod(kv.shape[:2] + kv.shape[3:]) * kv.element_size()
            largest = max(calls[index].partition.lengths) * row_bytes
            kv = kv.repeat(1, 1, 1, 1, 17_000_000 // largest + 1)
        return ringattn.rotate_kv(kv, calls[index].partition, transport="symmetric").wait()

    attended = {
        (index, by_block): attend(index, by_block)
        for index in range(len(calls))
        for by_block in (False, True)
    }
    rotated = [rotate(index) for index in range(len(calls))]
    together, alone = random.Random(0), random.Random(this().rank)
    for _ in range(rounds):
        index = together.randrange(len(calls))
        by_block = alone.random() < 0.5
        assert torch.equal(attend(index, by_block), attended[index, by_block]), (index, by_block)
        if together.random() < 0.3:
            assert torch.equal(rotate(index), rotated[index]), index
    ringattn.synchronize()


@pytest.mark.hopper
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_may_fetch_in_different_ways(rank_pool, world_size):
    chosen = cases(world_size)[::3]
    rank_pool(world_size, "cuda").run(fetch_in_different_ways, chosen, 300)


def replayed(case: Case, replays: int) -> None:
    """A captured ring gives what an eager one gives, with other inputs each time, in between eager
    calls of its own and of another kind."""
    q, k, v = case.local_inputs()
    other = Case(Partition.even(256, this().world_size), torch.bfloat16, transport="symmetric")

    def call() -> torch.Tensor:
        first = ringattn.ring_attention(q, k, v, case.partition, transport="symmetric")
        return ringattn.ring_attention(first, k, v, case.partition, transport="symmetric")

    call()
    ring(other)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    for replay in range(replays):
        for x in (q, k, v):
            x.copy_(torch.roll(x, 1, 0 if x.size(0) > 1 else 1))
        expected = call() if replay % 3 else None
        graph.replay()
        if expected is None:
            ring(other)
            expected = call()
        assert torch.equal(out, expected), f"replay {replay}"


def test_a_captured_ring_can_be_replayed(rank_pool):
    for case in (cases(2)[0], cases(2)[4], long_case(2)):
        rank_pool(2, "cuda").run(replayed, case, 500)


def laid_out(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values, in most layouts where kernels, or staging, must copy them first."""
    if how == "features apart":
        return x.transpose(2, 3).contiguous().transpose(2, 3)
    if how == "not aligned":
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view_as(x)
    if how == "a batch of one, next to nothing":
        return x[0].unsqueeze(-1).permute(3, 0, 1, 2)
    return torch.cat([x, x, x], 2)[:, :, x.size(2) : 2 * x.size(2)]  # as a projection of all three


def given_otherwise(case: Case, how: str, calls: int) -> None:
    inputs = [laid_out(x, how) for x in case.local_inputs()]
    expected = ring(case)
    for count in range(calls):
        with poisoned_memory() if count % 2 else nullcontext():  # kernels fill what is allocated
            results = ringattn.ring_attention(
                *inputs, case.partition, transport=case.transport, return_lse=True
            )
        for ours, theirs in zip(results, expected, strict=True):
            assert torch.equal(ours, theirs), how


@pytest.mark.parametrize(
    "how",
    ["features apart", "not aligned", "a batch of one, next to nothing", "a part of a projection"],
)
def test_inputs_in_any_layout_are_staged_as_they_are(rank_pool, how):
    """Nothing comes between staging and the kernel that begins beside it, and what is staged stays
    until then."""
    case = replace(long_case(2), partition=Partition.even(16384, 2), num_heads=8, num_kv_heads=8)
    rank_pool(2, "cuda").run(given_otherwise, case, how, 30)


def captured_first(case: Case) -> str:
    q, k, v = case.local_inputs()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(ValueError, match="captured") as error, torch.cuda.graph(graph):
        ringattn.ring_attention(q, k, v, case.partition, scale=case.scale, transport="symmetric")
    ring(case)  # the group works on
    torch.cuda.synchronize()
    return str(error.value)


def test_a_new_kind_of_call_under_capture_is_refused(rank_pool):
    # Of a kind that no other test makes.
    case = Case(Partition.even(1122, 2), torch.bfloat16, transport="symmetric", scale=0.31)
    for message in rank_pool(2, "cuda").run(captured_first, case):
        assert re.search(r"must have been made once before", message)


def captured_over_nccl(case: Case) -> None:
    q, k, v = case.local_inputs()
    calls = (
        lambda: ringattn.ring_attention(q, k, v, case.partition, transport="nccl"),
        lambda: ringattn.decode_attention(q, k, v),  # more than kernels exchange by themselves
    )
    for call in calls:
        call()
        graph = torch.cuda.CUDAGraph()
        with pytest.raises(ValueError, match="must not travel over NCCL"), torch.cuda.graph(graph):
            call()
        call()  # the group works on
        torch.cuda.synchronize()


@pytest.mark.nccl
def test_nccl_under_capture_is_refused(rank_pool):
    case = Case(Partition.even(1122, 2), torch.bfloat16, transport="nccl")
    rank_pool(2, "cuda").run(captured_over_nccl, case)


def captured_after_a_larger_one(small: Case, large: Case) -> None:
    """Memory that grew since leaves a kind of call known."""
    expected = ring(small)[0]
    ring(large)
    q, k, v = small.local_inputs()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ringattn.ring_attention(q, k, v, small.partition, transport="symmetric")
    graph.replay()
    assert torch.equal(out, expected)
    ring(large)
    torch.cuda.synchronize()


def test_a_kind_of_call_stays_known_when_memory_grows(rank_pool):
    small, large = (
        Case(Partition.even(rows, 2), torch.bfloat16, transport="symmetric")
        for rows in (1400, 60000)
    )
    rank_pool(2, "cuda").run(captured_after_a_larger_one, small, large)


def memory_of_a_call(rows: int) -> list[int]:
    """Bytes in use after each of some calls of one kind."""
    case = Case(Partition.even(rows, this().world_size), torch.bfloat16, transport="symmetric")
    q, k, v = case.local_inputs()
    used = []
    for _ in range(24):
        ringattn.ring_attention(q, k, v, case.partition, transport="symmetric")
        torch.cuda.synchronize()
        used.append(in_use())
        time.sleep(0.05)  # another process that starts allocates for longer than a few calls
    return used


def test_buffers_are_used_again(rank_pool):
    for used in rank_pool(2, "cuda").run(memory_of_a_call, 8192):
        assert not grows_each_time(used), used
