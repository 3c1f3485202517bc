# SPDX-License-Identifier: Apache-2.0
"""Profiles say how fast ranks are: slower where they are slower, equal where they are equal."""

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import ringattn
import torch
from _distributed import AT_ONCE_S, RankPool, this
from _profiles import check_profiles
from ringattn import AttentionTile, Partition, RankProfile, testing
from ringattn._profiling import devices, speeds
from ringattn._profiling.timers import Spread
from ringattn.profiling import RankMeasurement, equalize

SMALL: dict[str, Any] = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
    "num_layers": 2,
    "num_tokens": 256,
    "seconds": 0.1,
}


def profiles_here(slow_rank: int = -1, factor: float = 1.0) -> list[RankProfile]:
    with testing.slowdown(factor if this().rank == slow_rank else 1.0):
        return ringattn.measure_profiles(device=this().device.type, **SMALL)


def test_every_rank_gets_the_same_profiles(ring: RankPool) -> None:
    answers = ring.run(profiles_here)
    assert all(answer == answers[0] for answer in answers)
    check_profiles(answers[0], ring.world_size)


def test_no_process_group_is_one_rank() -> None:
    profiles = ringattn.measure_profiles(device="cpu", **SMALL)
    check_profiles(profiles, 1)
    assert profiles[0].tiles == ()  # the CPU's kernels compute what is there


@pytest.mark.cuda
def test_kernels_on_devices_have_tiles() -> None:
    (profile,) = ringattn.measure_profiles(device="cuda", **SMALL)
    assert profile.tiles == devices.attention_tiles(torch.device("cuda"), torch.bfloat16, 64)
    for dtype, head_dim in itertools.product(
        (torch.bfloat16, torch.float16, torch.float32), (64, 128, 256)
    ):
        tiles = devices.attention_tiles(torch.device("cuda"), dtype, head_dim)
        is_hopper = torch.cuda.get_device_capability() == (9, 0) and dtype != torch.float32
        is_portable = not is_hopper or os.environ.get("RINGATTN_KERNEL_FAMILY") == "sm80"
        assert len(tiles) == (2 if head_dim == 128 and not is_portable else 1)
        assert all(tile.rows in (64, 128, 192, 256) and 16 <= tile.keys <= 128 for tile in tiles)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_rank_that_repeats_its_work_measures_slower(
    rank_pool: Callable[..., RankPool], world_size: int
) -> None:
    slow_rank = world_size - 1
    before, *_ = rank_pool(world_size).run(profiles_here)
    profiles, *_ = rank_pool(world_size).run(profiles_here, slow_rank, 40.0)
    for name in ("attention_tflops", "linear_tflops"):
        slow = getattr(profiles[slow_rank], name)
        # A fortieth, but other programs may have the cores for most of the time.
        assert slow < getattr(before[slow_rank], name) / 2
        assert all(getattr(p, name) > 2 * slow for p in profiles[:slow_rank])


def profiles_of_another_ring() -> tuple[list[RankProfile], list[int]]:
    """Had the calls of the ring been others: profiles, and how many calls there were."""
    seen = []

    def tflops(calls: list[list[ringattn.StepTiming]], overhead_ms: float) -> list[float]:
        assert overhead_ms > 0
        assert all(sum(step.flops for step in steps) > 0 for steps in calls)
        seen.append(len(calls))
        return [7.0 * (1 + this().rank)] * 3

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds, "call_tflops", tflops)
        return ringattn.measure_profiles(device="cpu", **SMALL), seen


def test_attention_is_as_fast_as_in_the_ring(rank_pool: Callable[..., RankPool]) -> None:
    answers = rank_pool(2).run(profiles_of_another_ring)
    for profiles, calls in answers:
        assert [profile.attention_tflops for profile in profiles] == [7.0, 14.0]
        assert calls == answers[0][1] and calls[0] >= 3


def measure_for_longer_on_the_last_rank() -> str:
    x, size = torch.zeros(1, 4, 1, 16), this().world_size
    partition = Partition.even(4 * size, size)
    ringattn.ring_attention(x, x, x, partition)
    with pytest.raises(ValueError) as error:
        ringattn.measure_profiles(**SMALL | {"seconds": 0.01 * (1 + this().rank)}, device="cpu")
    ringattn.ring_attention(x, x, x, partition)
    return str(error.value)


def test_ranks_that_would_measure_differently_are_refused(
    rank_pool: Callable[..., RankPool],
) -> None:
    for said in rank_pool(2).run(measure_for_longer_on_the_last_rank):
        assert (
            said == "seconds must be the same on all ranks, got 0.01 on rank 0 and 0.02 on rank 1"
        )


def plan_of_the_ring(overhead_ms: float) -> tuple[int, ...]:
    """How tokens were dealt out among equal ranks, one of which has such an overhead."""
    lengths = []

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partition: Any, **rest: Any
    ) -> Any:
        lengths.append(partition.lengths)
        return ring_attention(q, k, v, partition, **rest)

    def equal(measured: list[Any], noise: float = 0.05) -> list[RankProfile]:
        slow = {"overhead_ms": overhead_ms, "link_gbps": 0.001, "link_latency_us": 10.0}
        return [RankProfile(1.0, 1.0), *(RankProfile(1.0, 1.0, **slow) for _ in measured[1:])]

    ring_attention = speeds.ring_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds, "ring_attention", attend)
        patch.setattr(speeds, "equalize", equal)
        ringattn.measure_profiles(device="cpu", **SMALL)
    return lengths[0]


def test_every_rank_takes_part_in_the_ring_that_is_measured(
    rank_pool: Callable[..., RankPool],
) -> None:
    for lengths in rank_pool(2).run(plan_of_the_ring, 1e3):
        assert lengths[0] == lengths[1] > 0


def calls_where_waits_are_long() -> int:
    """How many ring calls a rank makes where each takes far longer than its profiles tell."""
    ring_attention, calls = speeds.ring_attention, itertools.count()

    def slow(*arguments: Any, **options: Any) -> Any:
        next(calls)
        time.sleep(0.02)
        return ring_attention(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speeds, "ring_attention", slow)
        ringattn.measure_profiles(device="cpu", **SMALL | {"num_tokens": 8})
    return next(calls)


def test_measuring_takes_its_seconds_where_ranks_wait_for_each_other(
    rank_pool: Callable[..., RankPool],
) -> None:
    at_most = 3 + 2 * math.ceil(SMALL["seconds"] / 0.02)
    first, second = rank_pool(2).run(calls_where_waits_are_long)
    assert first == second <= at_most


def test_room_for_all_layers_does_not_matter_to_one(rank_pool: Callable[..., RankPool]) -> None:
    small = {**SMALL, "num_layers": 2**40}
    profiles = rank_pool(2).run(ringattn.measure_profiles, device="cpu", **small)[0]
    assert all(profile.max_tokens == 0 for profile in profiles)


def test_profiles_make_a_plan(rank_pool: Callable[..., RankPool]) -> None:
    profiles, *_ = rank_pool(2).run(profiles_here, 1, 10.0)
    plan = ringattn.plan(4096, profiles, ringattn.ModelCost.attention_only(4, 64))
    fast, slow = plan.partition.lengths
    assert fast + slow == 4096 and fast > 1.5 * slow


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_tokens": 0}, "num_tokens must be positive, got 0"),
        ({"num_heads": -4}, "num_heads must be positive, got -4"),
        ({"num_layers": 1.5}, "num_layers must be an integer, got 1.5"),
        ({"num_kv_heads": 3}, "heads .* got"),
        ({"head_dim": 20}, "head dimension .* got 20"),
        ({"seconds": 0.0}, "seconds must be finite and positive, got 0.0"),
        ({"seconds": math.nan}, "seconds must be finite and positive, got nan"),
        ({"noise": 1.0}, r"noise must lie in \[0, 1\), got 1.0"),
        ({"device": "meta"}, "device must be one with a kernel .* got meta"),
        ({"device": "foo"}, "device must be one with a kernel .* got 'foo'"),
        ({"num_tokens": True}, "num_tokens must be an integer, got True"),
        ({"seconds": "x"}, "seconds must be finite and positive, got 'x'"),
        ({"noise": "x"}, r"noise must lie in \[0, 1\), got 'x'"),
        ({"dtype": torch.int32}, "dtype must be a torch.dtype of .*float64, got torch.int32"),
        ({"dtype": "float32"}, "dtype must be a torch.dtype of .* got 'float32'"),
        ({"transport": "pigeon"}, "transport .* got .*pigeon"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ringattn.measure_profiles(**{"device": "cpu", **SMALL, **wrong})


def wrong_on_rank_1(wrong: dict[str, Any], recording: bool) -> None:
    mine = this().rank == 1
    with ringattn.record_timings() if mine and recording else contextlib.nullcontext():
        ringattn.measure_profiles(**{"device": "cpu", **SMALL, **(wrong if mine else {})})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_tokens": -1}, "num_tokens must be positive, got -1"),
        ({"noise": 2}, "noise must lie in [0, 1), got 2"),
        ({}, "record_timings must not be nested, got a second recording in this process"),
    ],
)
def test_a_mistake_of_one_rank_fails_all_ranks(
    rank_pool: Callable[..., RankPool], wrong: dict[str, Any], message: str
) -> None:
    outcomes = rank_pool(2).outcomes(wrong_on_rank_1, wrong, not wrong)
    assert [outcome.error for outcome in outcomes] == ["ValueError"] * 2
    assert [outcome.message for outcome in outcomes] == [f"rank 1: {message}", message]
    assert all(outcome.seconds < AT_ONCE_S for outcome in outcomes)


def test_double_precision_is_measured_on_cpu() -> None:
    (profile,) = ringattn.measure_profiles(device="cpu", dtype=torch.float64, **SMALL)
    assert profile.attention_tflops > 0 and profile.tiles == ()


# ---- noise -------------------------------------------------------------------------------------


def measured(
    tflops: float, spread: float = 0.0, device: str = "a", linear: float = 2.0
) -> RankMeasurement:
    return RankMeasurement(
        device=device,
        attention_tflops=Spread(tflops, tflops * (1 - spread), tflops * (1 + spread)),
        linear_tflops=Spread(linear, linear, linear),
        overhead_ms=Spread(0.5, 0.5, 0.5),
        memory_gbps=Spread(3.0, 3.0, 3.0),
        link_gbps=None,
        link_latency_us=None,
        max_tokens=7,
        tiles=(AttentionTile(128, 64),),
    )


def equalized(*ranks: RankMeasurement, noise: float = 0.05) -> list[float]:
    return [profile.attention_tflops for profile in equalize(ranks, noise)]


def test_differences_below_the_noise_are_none() -> None:
    # On other hardware 2 % apart: equal; 3 %: not.
    assert equalized(measured(100), measured(98, device="b")) == [99, 99]
    assert equalized(measured(100), measured(97, device="b")) == [100, 97]
    assert equalized(measured(96), measured(100, device="b"), noise=0.1) == [98, 98]
    # Equal hardware needs twice as much to differ.
    assert equalized(measured(100), measured(92)) == [96, 96]
    assert equalized(measured(100), measured(89)) == [100, 89]
    # Hardware is not equal where matrix products are not, whatever it calls itself.
    assert (
        equalized(measured(100), measured(93), measured(99, linear=1.97))
        == [97.333333333333333] * 3
    )
    assert equalized(measured(100), measured(93, linear=1.88), measured(99)) == [99.5, 93, 99.5]
    # And then it needs as much as its noise.
    assert equalized(measured(100), measured(96, linear=1.88)) == [98, 98]
    assert equalized(measured(100), measured(94, linear=1.88)) == [100, 94]
    # A median between the other's quartiles is noise; that ranges touch says nothing.
    assert equalized(measured(100, 0.2), measured(82, 0.01)) == [91, 91]
    assert equalized(measured(100, 0.01), measured(85, 0.2)) == [92.5, 92.5]
    assert equalized(measured(100, 0.2), measured(70, 0.2)) == [100, 70]
    # But not on other hardware, where it is what is expected.
    assert equalized(measured(100, 0.2), measured(97, 0.2, device="b")) == [100, 97]


def test_what_does_not_compute_is_as_noisy_on_other_hardware() -> None:
    def overheads(first: Spread, second: Spread) -> list[float]:
        ranks = [
            replace(measured(100), overhead_ms=first),
            replace(measured(100, device="b"), overhead_ms=second),
        ]
        return [profile.overhead_ms for profile in equalize(ranks)]

    assert overheads(Spread(1.0, 1.0, 1.0), Spread(0.96, 0.96, 0.96)) == [0.98, 0.98]
    assert overheads(Spread(1.0, 1.0, 1.0), Spread(0.94, 0.94, 0.94)) == [1.0, 0.94]
    assert overheads(Spread(1.0, 0.8, 1.2), Spread(0.9, 0.9, 0.9)) == [0.95, 0.95]


def test_classes_do_not_creep() -> None:
    # Each is close to its neighbour, but the last is not close to the first.
    ranks = [measured(tflops, device=str(tflops)) for tflops in (100, 98, 96, 94)]
    assert equalized(*ranks) == [99, 99, 95, 95]


def test_equalizing_keeps_the_rest() -> None:
    (profile,) = equalize([measured(1.0)])
    assert profile == RankProfile(
        1.0, 2.0, max_tokens=7, overhead_ms=0.5, memory_gbps=3.0, tiles=(AttentionTile(128, 64),)
    )


def test_a_spread_is_the_median_and_its_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0)
    assert Spread.of([2.0]) == Spread(2.0, 2.0, 2.0)
