# SPDX-License-Identifier: Apache-2.0
"""What a rebalancer holds plans against before it changes them, and after: waits, noise between
equal ranks, tiles that are not full, and whether the plan before was faster."""

from dataclasses import replace

import pytest
import ringattn
from _distributed import this
from ringattn import (
    AttentionTile,
    ModelCost,
    Partition,
    RankProfile,
    Rebalancer,
    StepTiming,
    Timings,
)
from ringattn.planning import predict

COST = ModelCost.attention_only(32, 128)
ATTENTION = ModelCost.attention_only(32, 128, num_kv_heads=8)


def own_flops(partition: Partition) -> float:
    """Of this rank's rows of a causal zigzag sequence."""
    return COST.attention_flops * partition.lengths[this().rank] * partition.seq_len / 2


def one_call(took_ms: float, flops: float, waited_ms: float = 0.0) -> Timings:
    """What this rank records of a request."""
    return Timings([StepTiming(0, this().rank, "own", took_ms, 0.0, waited_ms, flops)])


def slow_links(gbps: float, speed: float) -> tuple[float, float]:
    """What the second of two ranks at such links costs once it is slow: the plan in use after some
    requests, and the best plan there is."""
    profiles = [RankProfile(500, 700, link_gbps=gbps, link_latency_us=30)] * 2
    actual = [profiles[0], replace(profiles[1], attention_tflops=500 * speed)]
    rebalancer = Rebalancer(profiles, ATTENTION)
    for _ in range(20):
        plan = rebalancer.plan(32768)
        p = plan.partition
        flops = own_flops(p)
        took = flops / ((speed if this().rank else 1.0) * 500e9)
        # A plan that waits less is faster: what is waited is part of how fast a plan has been.
        waited = predict(p, actual, ATTENTION, depth=plan.depth)[this().rank] - took
        rebalancer.observe(one_call(took, flops, waited))
    used = rebalancer.plan(32768)
    of_used = predict(used.partition, actual, ATTENTION, depth=used.depth)
    return max(of_used), ringattn.plan(32768, actual, ATTENTION).predicted_ms


@pytest.mark.parametrize("gbps", [6, 12, 24])
@pytest.mark.parametrize("speed", [0.8, 0.6])
def test_waits_count_for_the_plan_in_use_and_for_the_best(rank_pool, gbps, speed):
    for used_ms, best_ms in rank_pool(2).run(slow_links, gbps, speed):
        assert used_ms <= 1.03 * best_ms


UNEQUAL = [RankProfile(500, 700), RankProfile(300, 700)]


def hidden_cost(num_requests: int, falls_at: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """Two ranks, of which the second is 10 % slower than its profile, but any other split than the
    first costs 15 % of everything; from a request on it is half as fast again."""
    rank = this().rank
    rebalancer = Rebalancer(UNEQUAL, COST)
    lengths, changes = [], []
    for request in range(num_requests):
        p = rebalancer.plan(32768).partition
        lengths.append(p.lengths)
        flops = own_flops(p)
        took = flops / (UNEQUAL[rank].attention_tflops * 1e9)
        if rank == 1:
            took /= 0.9 if request < falls_at else 0.45
        if p.lengths != lengths[0] and request < falls_at:
            took *= 1.15
        if rebalancer.observe(one_call(took, flops)):
            changes.append(request + 1)
    return lengths, changes


def test_a_plan_that_turns_out_slower_is_given_up(rank_pool):
    of_ranks = rank_pool(2).run(hidden_cost, 60, 40)
    assert of_ranks[0] == of_ranks[1]
    lengths, changes = of_ranks[0]
    # On trial for three requests, then what was before, and not again.
    first = changes[0]
    assert first <= 8 and changes[1] == first + 3
    assert set(lengths[first : first + 3]) != {lengths[0]}
    assert set(lengths[first + 3 : 41]) == {lengths[0]}
    # A speed that changes is followed all the same.
    assert 40 < changes[2] <= 43
    assert lengths[-1][1] < 0.8 * lengths[0][1]


def worse_by(factor: float, num_requests: int) -> tuple[list[tuple[int, ...]], list[int]]:
    """As above, but under any other split than the first ranks wait until calls have taken so many
    times what they took under that one; and one call of three is twice as long, which is none."""
    rank = this().rank
    rebalancer = Rebalancer(UNEQUAL, COST)
    lengths, changes, first_ms = [], [], 0.0
    for request in range(num_requests):
        p = rebalancer.plan(32768).partition
        lengths.append(p.lengths)
        took = own_flops(p) / (UNEQUAL[rank].attention_tflops * (0.9 if rank else 1.0) * 1e9)
        if request == 0:  # the second rank is the last
            first_ms = COST.attention_flops * p.lengths[1] * p.seq_len / 2 / (300 * 0.9 * 1e9)
        is_other = p.lengths != lengths[0]
        waited = [(factor if is_other else 1.0) * first_ms - took] * 3
        waited[1] += first_ms if is_other else 0.0
        if rebalancer.observe(
            Timings(
                [
                    StepTiming(call, rank, "own", took, 0.0, ms, own_flops(p))
                    for call, ms in enumerate(waited)
                ]
            )
        ):
            changes.append(request + 1)
    return lengths, changes


@pytest.mark.parametrize(("factor", "is_kept"), [(1.0095, True), (1.0105, False)])
def test_a_plan_is_given_up_where_it_is_a_hundredth_slower(rank_pool, factor, is_kept):
    for lengths, changes in rank_pool(2).run(worse_by, factor, 20):
        if is_kept:
            assert len(changes) == 1 and lengths[-1] != lengths[0]
        else:
            assert len(changes) == 2 and changes[1] == changes[0] + 3  # after three requests
            assert lengths[changes[0]] != lengths[-1] == lengths[0]


def drift(speeds: list[float], slow_tflops: float = 500) -> tuple[list[float], tuple[int, ...]]:
    tflops = [500.0] * (len(speeds) - 1) + [slow_tflops]
    rebalancer = Rebalancer([RankProfile(speed, 700) for speed in tflops], COST)
    for _ in range(30):
        p = rebalancer.plan(65536).partition
        flops = own_flops(p)
        took = flops / (speeds[this().rank] * tflops[this().rank] * 1e9)
        rebalancer.observe(one_call(took, flops))
    return rebalancer.speeds, rebalancer.plan(65536).partition.lengths


def test_equal_ranks_that_drift_apart_a_little_stay_equal(rank_pool):
    for speeds, lengths in rank_pool(4).run(drift, [1.03, 0.985, 1.03, 0.985]):
        assert speeds[1] < 0.97 * speeds[0]
        assert lengths == (16384,) * 4
    for _, lengths in rank_pool(4).run(drift, [1.0, 1.0, 0.85, 0.87]):
        assert lengths[0] == lengths[1] > lengths[2] == lengths[3]


@pytest.mark.parametrize(("speed", "is_noise"), [(0.945, True), (0.942, False)])
def test_equal_ranks_are_unequal_from_a_twentieth_on(rank_pool, speed, is_noise):
    for speeds, lengths in rank_pool(4).run(drift, [1.0, 1.0, speed, speed]):
        assert speeds[3] == pytest.approx(0.95, abs=0.002)  # 1 in the beginning
        assert (speeds[3] > 0.95) == is_noise == (lengths == (16384,) * 4)


def test_unequal_ranks_that_drift_apart_are_followed(rank_pool):
    planned = ringattn.plan(65536, [RankProfile(500, 700), RankProfile(300, 700)], COST)
    for _, lengths in rank_pool(2).run(drift, [1.0, 0.955], 300):
        assert lengths[1] < 0.98 * planned.partition.lengths[1]


def rests_while_it_waits(parted: float, later: float) -> tuple[tuple[int, ...], int]:
    """The second of two ranks is 14 % slower while the first one waits for it, and less once it
    does not, from request 30 on less again. The lengths in the end, and how often they have changed
    until request 30."""
    rebalancer = Rebalancer([RankProfile(500, 700)] * 2, COST)
    changes = 0
    for request in range(80):
        p = rebalancer.plan(65536).partition
        even = p.lengths[0] == p.lengths[1]
        slower = later if request >= 30 else 0.86 if even else parted
        speed = slower if this().rank == 1 else 1.0
        flops = own_flops(p)
        changed = rebalancer.observe(one_call(flops / (speed * 500e9), flops))
        changes += changed and request < 30
    return rebalancer.plan(65536).partition.lengths, changes


@pytest.mark.parametrize(
    ("parted", "later", "is_even"), [(0.96, 0.96, False), (0.9, 0.98, True), (0.9, 0.97, False)]
)
def test_ranks_that_have_been_parted_stay_so_until_they_are_closer(
    rank_pool, parted, later, is_even
):
    for lengths, changes in rank_pool(2).run(rests_while_it_waits, parted, later):
        assert 1 <= changes <= 2
        assert (lengths[0] == lengths[1]) == is_even


def unfilled_tiles(causal: bool) -> list[float]:
    """A ring whose attention takes what its tiles take."""
    profiles = [RankProfile(500, 700, tiles=(AttentionTile(128, 128),))] * 2
    rebalancer = Rebalancer(profiles, COST, causal=causal)
    for _ in range(6):
        p = rebalancer.plan(2 * 1090).partition
        took = predict(p, profiles, COST, causal=causal)[this().rank]
        flops = own_flops(p) * (1 if causal else 2)
        assert took > 1.1 * flops / 500e9
        rebalancer.observe(one_call(took, flops))
    return rebalancer.speeds


@pytest.mark.parametrize("causal", [True, False])
def test_unfilled_tiles_are_no_slowness(rank_pool, causal):
    for speeds in rank_pool(2).run(unfilled_tiles, causal):
        assert speeds == pytest.approx([1.0, 1.0])


#: Of a service: the second rank at half speed, its prompts drawn evenly on a logarithmic scale.
HALF = [RankProfile(500, 700, overhead_ms=0.03), RankProfile(250, 700, overhead_ms=0.06)]
PROMPTS = [15403, 10125, 1970, 899, 3059, 1826, 11478, 1115, 2585, 4341, 20981, 2963, 1005]
PROMPTS += [10020, 5144, 863, 21148, 30142, 13048, 20384]


def mixed_prompts(
    prompts: list[int], extra_ms: tuple[float, float], falls_at: int, profiles: list[RankProfile]
) -> tuple[list[float], list[float], list[float]]:
    """Each rank's calls take longer than its profile says, by the same time whatever their length;
    from a request on the second rank is half as fast again. What each request took, what it would
    have taken as first planned, and as planned for the speeds at the time."""
    rebalancer = Rebalancer(profiles, COST)
    took, as_planned, at_best = [], [], []
    for request, seq_len in enumerate(prompts):
        speeds = (1.0, 0.5 if request >= falls_at else 1.0)
        actual = [
            replace(
                profile,
                attention_tflops=profile.attention_tflops * speed,
                overhead_ms=HALF[rank].overhead_ms + extra_ms[rank],
            )
            for rank, (profile, speed) in enumerate(zip(profiles, speeds, strict=True))
        ]
        p = rebalancer.plan(seq_len).partition
        times = predict(p, actual, COST)
        took.append(max(times))
        for known, of in ((profiles, as_planned), (actual, at_best)):
            of.append(max(predict(ringattn.plan(seq_len, known, COST).partition, actual, COST)))
        ms = times[this().rank]
        rebalancer.observe(one_call(ms, own_flops(p), max(times) - ms))
    return took, as_planned, at_best


UNKNOWN = [replace(profile, overhead_ms=0.0) for profile in HALF]


@pytest.mark.parametrize("profiles", [HALF, UNKNOWN], ids=["overhead measured", "unknown"])
@pytest.mark.parametrize("extra_ms", [(0.0, 0.15), (0.15, 0.0), (0.15, 0.15)])
@pytest.mark.parametrize(
    "prompts",
    [PROMPTS * 5, sorted(PROMPTS) * 5, [1024] * 30 + [32768] * 10],
    ids=["mixed", "growing", "long after short"],
)
def test_short_prompts_do_not_decide_how_long_ones_are_split(
    rank_pool, prompts, extra_ms, profiles
):
    """Their calls are mostly overhead: either rank looks slower than it is, or both alike."""
    for took, as_planned, _ in rank_pool(2).run(mixed_prompts, prompts, extra_ms, 1000, profiles):
        for seq_len, ms, planned_ms in zip(prompts, took, as_planned, strict=True):
            assert seq_len < 16384 or ms <= 1.06 * planned_ms, (seq_len, ms, planned_ms)
        assert sum(took) <= 1.04 * sum(as_planned)


@pytest.mark.parametrize("prompts", [PROMPTS * 10, [2048] * 200], ids=["mixed", "all short"])
def test_a_rank_that_falls_is_followed_whatever_the_prompts(rank_pool, prompts):
    for took, as_planned, at_best in rank_pool(2).run(
        mixed_prompts, prompts, (0.02, 0.05), 60, HALF
    ):
        late = slice(100, None)
        assert sum(took[late]) <= 1.05 * sum(at_best[late])
        assert sum(took[late]) < 0.85 * sum(as_planned[late])
