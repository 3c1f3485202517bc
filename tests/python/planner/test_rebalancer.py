# SPDX-License-Identifier: Apache-2.0
"""Plans that follow speeds: simulated rings, with real process groups between the ranks, and a real
ring with a rank that is made slow.

Its control law alone is tested in test_speed_tracking.py, trials of new plans in
test_rebalancer_trials.py.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import ringattn
import torch
from _distributed import this
from ringattn import ModelCost, Partition, RankProfile, Rebalancer, StepTiming, Timings
from ringattn.planning import predict

COST = ModelCost.attention_only(32, 128)
LAYERS = 3
PROFILES = [RankProfile(500, 700, overhead_ms=0.01)] * 4
SEQ_LENS = (65536, 16384, 131072)


def timings_of(partition: Partition, rank: int, speed: float, *, with_flops: bool) -> Timings:
    """What a rank that is ``speed`` times as fast as its profile records."""
    profile = PROFILES[rank]
    steps = []
    for call in range(LAYERS):
        # As the ring counts: all pairs at its own block, none at the others.
        before = sum(partition.lengths[: partition.order.index(rank)])
        tokens = partition.lengths[rank]
        pairs = tokens * partition.seq_len / 2
        if partition.layout == "contiguous":
            pairs = tokens * (before + tokens / 2)
        flops = pairs * COST.attention_flops
        took = flops / (speed * profile.attention_tflops * 1e9)
        took += profile.overhead_ms if tokens else 0
        if with_flops:
            steps.append(StepTiming(call, rank, "own", took, 0.0, 0.0, flops))
        else:
            steps += steps_by_source(partition, rank, call, took)
        steps.append(StepTiming(call, (rank + 1) % 4, "remote", 0.0, 1.0, 50.0))
    return Timings(steps)


def steps_by_source(partition: Partition, rank: int, call: int, took: float) -> list[StepTiming]:
    """The same time over all blocks, in proportion to their tokens."""
    kinds = ["own" if source == rank else "remote" for source in range(4)]
    return [
        StepTiming(call, source, kinds[source], took * tokens / partition.seq_len, 0.0, 0.0)
        for source, tokens in enumerate(partition.lengths)
    ]


@dataclass
class Served:
    """A simulated service, as one rank saw it."""

    plans: list[ringattn.Plan]
    replans: list[int]  # requests from which plans were others
    total_ms: float = 0.0
    oracle_ms: float = 0.0  # had every request been planned for the speeds it met


#: True speeds of the four ranks at a request.
Truth = Callable[[int], list[float]]


def falls_and_recovers(request: int) -> list[float]:
    return [1.0, 1.0, 1.0 if request < 30 else 0.4 if request < 70 else 0.7, 1.0]


def steady(request: int) -> list[float]:
    return [1.0] * 4


def all_slower(request: int) -> list[float]:
    return [1.0 if request < 20 else 0.8] * 4


def hiccups(request: int) -> list[float]:
    return [1.0, 0.5 if request % 25 == 10 else 1.0, 1.0, 0.7 if request % 40 == 3 else 1.0]


def flaps(request: int) -> list[float]:
    return [1.0, 1.0, 1.0, 0.6 if request // 4 % 2 else 1.0]


def serve(
    truth: Truth, noise: float, num_requests: int, layout: str, seed: int, with_flops: bool = True
) -> Served:
    rank = this().rank
    rebalancer = Rebalancer(PROFILES, COST, layout=layout)
    served = Served([], [])
    draws = random.Random(seed)  # of all ranks' speeds: every rank knows what the others took
    for request in range(num_requests):
        seq_len = SEQ_LENS[request % len(SEQ_LENS)]
        plan = rebalancer.plan(seq_len)
        actual = [speed * (1 + noise * draws.gauss(0, 1)) for speed in truth(request)]
        met = [
            replace(profile, attention_tflops=profile.attention_tflops * speed)
            for profile, speed in zip(PROFILES, actual, strict=True)
        ]
        oracle = ringattn.plan(seq_len, met, COST, layout=layout)
        served.plans.append(plan)
        served.total_ms += max(predict(plan.partition, met, COST))
        served.oracle_ms += oracle.predicted_ms
        timings = timings_of(plan.partition, rank, actual[rank], with_flops=with_flops)
        if rebalancer.observe(timings):
            served.replans.append(request + 1)
    return served


def serve_everywhere(rank_pool, *args, **kwargs) -> Served:
    """What all ranks saw, which is the same."""
    of_ranks = rank_pool(4).run(serve, *args, **kwargs)
    assert all(served == of_ranks[0] for served in of_ranks)
    return of_ranks[0]


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_a_fall_and_a_recovery_are_planned_for_within_three_requests(rank_pool, noise, layout):
    served = serve_everywhere(rank_pool, falls_and_recovers, noise, 110, layout, 1)
    assert any(30 < at <= 33 for at in served.replans)
    assert any(70 < at <= 73 for at in served.replans)
    assert len(served.replans) <= 4
    assert served.total_ms <= 1.05 * served.oracle_ms
    if layout == "zigzag":
        shares = [plan.partition.lengths[2] / plan.partition.seq_len for plan in served.plans]
        assert shares[29] == pytest.approx(0.25, rel=0.02)
        assert shares[60] == pytest.approx(0.4 / 3.4, rel=0.05)
        assert shares[109] == pytest.approx(0.7 / 3.7, rel=0.05)


@pytest.mark.parametrize("truth", [steady, all_slower, hiccups])
def test_steady_ranks_keep_their_plans(rank_pool, truth):
    served = serve_everywhere(rank_pool, truth, 0.02, 200, "zigzag", 3)
    assert served.replans == []
    even = [Partition.even(plan.partition.seq_len, 4) for plan in served.plans]
    assert [plan.partition for plan in served.plans] == even


def test_a_rank_that_flaps_is_not_followed_for_long(rank_pool):
    served = serve_everywhere(rank_pool, flaps, 0.01, 120, "zigzag", 5)
    assert len(served.replans) <= 8
    assert served.total_ms <= 1.15 * served.oracle_ms


def test_steps_without_flops_are_of_the_latest_plan(rank_pool):
    known = serve_everywhere(rank_pool, falls_and_recovers, 0.01, 80, "zigzag", 7)
    taken = serve_everywhere(rank_pool, falls_and_recovers, 0.01, 80, "zigzag", 7, False)
    assert taken.replans == known.replans
    for ours, theirs in zip(taken.plans, known.plans, strict=True):
        assert ours.partition.lengths == pytest.approx(theirs.partition.lengths, rel=1e-3, abs=256)


def idle_rank() -> tuple[list[float], tuple[int, ...]]:
    profiles = [RankProfile(500, 500), RankProfile(1, 1)]
    rebalancer = Rebalancer(profiles, COST)
    for _ in range(3):
        lengths = rebalancer.plan(256).partition.lengths
        steps = []
        if this().rank == 0:
            flops = 1e9
            steps = [StepTiming(0, 0, "own", flops / (250 * 1e9), 0.0, 0.0, flops)]
        rebalancer.observe(Timings(steps))
    return rebalancer.speeds, lengths


def test_a_rank_without_tokens_keeps_its_speed(rank_pool):
    for speeds, lengths in rank_pool(2).run(idle_rank):
        assert speeds == [pytest.approx(0.5), 1.0]
        assert lengths[0] >= 255


def steps_that_nothing_recorded(wrong: Any, training: bool) -> str:
    """One rank's steps are refused on all ranks, and the next ones are taken."""
    rebalancer = Rebalancer([RankProfile(500, 500)] * 2, COST, training=training)
    rebalancer.plan(256)
    with pytest.raises(ValueError) as error:
        rebalancer.observe(Timings([wrong] if this().rank == 1 else []))
    rebalancer.observe(Timings([StepTiming(0, 0, "own", 0.004, 0.0, 0.0, 1e9, backward=training)]))
    return str(error.value)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("wrong", [float("inf"), float("nan"), -1.0, "a number", None])
def test_steps_that_nothing_recorded_are_refused_on_all_ranks(rank_pool, wrong, training):
    if isinstance(wrong, float):
        wrong = StepTiming(0, 0, "own", wrong, 0.0, 0.0, 1e9, backward=training)
    for sentence in rank_pool(2).run(steps_that_nothing_recorded, wrong, training):
        assert "got steps that nothing recorded" in sentence


def slow_ring(training: bool, seq_len: int, slowdown: float) -> tuple:
    """Eight requests to a real ring whose second rank computes everything `slowdown` times."""
    size, rank = this().world_size, this().rank
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(3, 1, seq_len, 4, 64, generator=generator).unbind()
    profiles = [RankProfile(0.05, 0.05)] * size
    rebalancer = Rebalancer(profiles, ModelCost.attention_only(4, 64), training=training)
    plans = []
    for _ in range(8):
        plans.append(rebalancer.plan(seq_len))
        p = plans[-1].partition
        own = [p.shard(x, rank).requires_grad_(training) for x in (q, k, v)]
        with (
            ringattn.testing.slowdown(slowdown if rank == 1 else 1.0),
            ringattn.record_timings() as timings,
        ):
            for _ in range(3):
                out = ringattn.ring_attention(*own, p)
                if training:
                    out.sum().backward()
        rebalancer.observe(timings)
    return plans, rebalancer.speeds


@pytest.mark.parametrize(
    ("training", "seq_len", "slowdown"), [(False, 1536, 8.0), (True, 768, 6.0)]
)
def test_a_slow_rank_of_a_real_ring_gets_less(rank_pool, training, seq_len, slowdown):
    results = rank_pool(2).run(slow_ring, training, seq_len, slowdown)
    plans, speeds = results[0]
    assert results[1] == (plans, speeds)
    cost = ModelCost.attention_only(4, 64)
    profiles = [RankProfile(0.05, 0.05)] * 2
    assert plans[0] == ringattn.plan(seq_len, profiles, cost, training=training)
    assert plans[0].partition == Partition.even(seq_len, 2)
    assert plans[-1].partition.lengths[1] < 0.4 * seq_len
    assert speeds[1] < 0.6 * speeds[0]


def training_step(flops: float, forward_ms: float, backward_ms: float) -> Timings:
    """Of two layers, at these times for the forward's operations and as many of the backward."""
    passes = [(1.0, forward_ms, False)] * 2 + [(2.5, backward_ms, True)] * 2
    return Timings(
        [
            StepTiming(call, 0, "own", times * ms, 0.0, 0.0, times * flops, backward)
            for call, (times, ms, backward) in enumerate(passes)
        ]
    )


def test_a_training_step_teaches_the_speed_of_both_passes_together():
    # 1e9 operations in 2 ms and in 4 ms: 3.5e9 take 12 ms, at 1 TFLOPS 3.5.
    step = training_step(1e9, 2.0, 4.0)
    for training, speed in ((True, 3.5 / 12), (False, 0.5)):
        rebalancer = Rebalancer([RankProfile(1, 1)], COST, training=training)
        for _ in range(3):
            rebalancer.observe(step)
        assert rebalancer.speeds == [pytest.approx(speed)]


def other_speeds_backward() -> list[list[float]]:
    """The attention time of each rank's steps, as the last plan has them: forward as fast as its
    profile, backward half as fast on the second rank."""
    rank = this().rank
    rebalancer = Rebalancer(PROFILES[:2], COST, training=True)
    for _ in range(8):
        plan = rebalancer.plan(65536)
        flops = COST.attention_flops * plan.partition.num_pairs(rank)
        ms = flops / 500e9
        rebalancer.observe(training_step(flops, ms, ms * (1 + rank)))
    return [plan.partition.num_pairs(r) * (1 + 2.5 * (1 + r)) for r in range(2)]


def test_ranks_whose_backward_alone_is_slow_end_together(rank_pool):
    for first, second in rank_pool(2).run(other_speeds_backward):
        assert first == pytest.approx(second, rel=0.02)


def forward_alone_on_one_rank() -> None:
    rebalancer = Rebalancer(PROFILES[:2], COST, training=True)
    step = training_step(1e9, 1.0, 1.0)
    rebalancer.observe(Timings(step.steps[: 4 - 2 * this().rank]))


def test_timings_without_a_backward_teach_nothing_about_training(rank_pool):
    first, second = rank_pool(2).outcomes(forward_alone_on_one_rank)
    assert first.error == second.error == "ValueError"
    message = "timings must be of forward and backward with training=True, got forward calls alone"
    assert message in first.message and message in second.message


def test_a_single_rank_has_nothing_to_balance():
    rebalancer = Rebalancer([RankProfile(1, 1)], ModelCost.attention_only(2, 16))
    q = torch.randn(1, 64, 2, 16)
    assert not rebalancer.observe(Timings())
    for _ in range(3):
        assert rebalancer.plan(64).partition == Partition.even(64, 1)
        with ringattn.record_timings() as timings:
            ringattn.ring_attention(q, q, q)
        assert not rebalancer.observe(timings)
    assert rebalancer.profiles == [RankProfile(1, 1)]


def speed_seen(profile: RankProfile, took_ms: list[float], flops: float = 1e9) -> float:
    """What is believed of a single rank whose calls, each of so many operations, take these times
    in every request."""
    rebalancer = Rebalancer([profile], COST)
    for _ in range(3):
        steps = [StepTiming(n, 0, "own", ms, 0.0, 0.0, flops) for n, ms in enumerate(took_ms)]
        rebalancer.observe(Timings(steps))
    return rebalancer.speeds[0]


def without_a_mask(layout: str) -> tuple[list[float], ringattn.Plan, list[RankProfile]]:
    """Two ranks whose steps do not say what they did, the second half as fast as its profile."""
    rebalancer = Rebalancer(PROFILES[:2], COST, causal=False, layout=layout)
    for _ in range(8):
        partition = rebalancer.plan(8192).partition
        flops = COST.attention_flops * partition.lengths[this().rank] * partition.seq_len
        took = flops / ((0.5 if this().rank else 1.0) * 500e9) + PROFILES[0].overhead_ms
        rebalancer.observe(Timings([StepTiming(0, this().rank, "own", took, 0.0, 0.0)]))
    return rebalancer.speeds, rebalancer.plan(8192), rebalancer.profiles


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_without_a_mask_all_pairs_count(rank_pool, layout):
    for speeds, plan, profiles in rank_pool(2).run(without_a_mask, layout):
        assert speeds == pytest.approx([1.0, 0.5])
        assert plan == ringattn.plan(8192, profiles, COST, causal=False, layout=layout)
        assert plan.partition.lengths[0] == pytest.approx(8192 * 2 / 3, rel=0.01)


def test_overhead_is_not_taken_for_slowness():
    # 1e9 operations at half of 1 TFLOPS: 2 ms.
    assert speed_seen(RankProfile(1, 1), [2.0]) == pytest.approx(0.5)
    assert speed_seen(RankProfile(1, 1, overhead_ms=1.5), [3.5]) == pytest.approx(0.5)
    # An overhead that was overrated makes no rank infinitely fast.
    assert speed_seen(RankProfile(1, 1, overhead_ms=9.0), [4.0]) == pytest.approx(0.5)


def test_one_slow_call_of_many_is_none():
    assert speed_seen(RankProfile(1, 1), [2.0, 2.0, 90.0, 2.0, 0.1]) == pytest.approx(0.5)


def test_steps_carry_the_work_they_did():
    q, k = torch.randn(3, 40, 4, 16), torch.randn(3, 40, 2, 16)
    with ringattn.record_timings() as timings:
        ringattn.ring_attention(q, k, k)
        ringattn.ring_attention(q, k, k, causal=False)
    pair = 4 * 3 * 4 * 16
    assert [step.flops for step in timings.steps] == [pair * 40 * 41 / 2, pair * 40 * 40]


def ring_flops(partition: Partition) -> float:
    q = torch.randn(2, partition.lengths[this().rank], 4, 16)
    with ringattn.record_timings() as timings:
        ringattn.ring_attention(q, q, q, partition)
    for step in timings.steps:
        assert (step.flops > 0) == (step.attention_ms > 0)
    return sum(step.flops for step in timings.steps)


def test_the_work_of_all_ranks_is_that_of_the_sequence(rank_pool):
    for layout in ("zigzag", "contiguous"):
        partition = Partition(layout, (7, 0, 12, 30), (2, 0, 3, 1))
        flops = rank_pool(4).run(ring_flops, partition)
        assert sum(flops) == 4 * 2 * 4 * 16 * 49 * 50 / 2


# ---- wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], COST), "profiles must name at least one rank, got none"),
        (([1], COST), "profiles must be RankProfiles, got int"),
        ((PROFILES, None), "cost must be a ModelCost, got NoneType"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rebalancer(*arguments)
    with pytest.raises(ValueError, match='layout must be "zigzag" or "contiguous"'):
        Rebalancer(PROFILES, COST, layout="spiral")
    with pytest.raises(ValueError, match="training must be True or False, got 1"):
        Rebalancer(PROFILES, COST, training=1)


def test_profiles_for_another_number_of_ranks_are_refused():
    with pytest.raises(ValueError, match="one for each of the 1 ranks of the group, got 4"):
        Rebalancer(PROFILES, COST).observe(Timings())


def different_lengths() -> None:
    rebalancer = Rebalancer(PROFILES[:2], COST)
    rebalancer.plan(64 + this().rank)
    rebalancer.observe(Timings())


@pytest.mark.parametrize("profiles", [3, None, PROFILES[0]])
def test_what_is_no_list_of_profiles_is_refused(profiles):
    message = f"profiles must be a list of RankProfiles, got {type(profiles).__name__}"
    with pytest.raises(ValueError, match=message):
        Rebalancer(profiles, COST)


def no_timings_on_one_rank() -> None:
    rebalancer = Rebalancer(PROFILES[:2], COST)
    rebalancer.observe(Timings() if this().rank == 0 else [1])


def another_number_of_profiles_on_one_rank() -> None:
    rebalancer = Rebalancer(PROFILES[: 2 + this().rank], COST)
    rebalancer.observe(Timings())


def test_another_number_of_profiles_on_one_rank_is_an_error_on_all(rank_pool):
    first, second = rank_pool(2).outcomes(another_number_of_profiles_on_one_rank)
    assert first.error == second.error == "ValueError"
    message = "profiles must be one for each of the 2 ranks of the group, got 3"
    assert (first.message, second.message) == (f"rank 1: {message}", message)


def test_what_is_wrong_on_one_rank_is_an_error_on_all(rank_pool):
    for outcome in rank_pool(2).outcomes(different_lengths):
        assert outcome.error == "ValueError"
        assert "seq_len must be the same on all ranks, got 64 on rank 0 and 65" in outcome.message
    first, second = rank_pool(2).outcomes(no_timings_on_one_rank)
    assert first.error == second.error == "ValueError"
    assert second.message == "timings must be Timings, got list"
    assert first.message == "rank 1: timings must be Timings, got list"
