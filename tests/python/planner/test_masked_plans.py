# SPDX-License-Identifier: Apache-2.0
"""Plans for packed documents and windows: beside every other partition of a short sequence, in
parallelized models, and from a rebalancer."""

import itertools
import random
from typing import Any

import pytest
import ringattn
import torch
from _distributed import this
from ringattn import ModelCost, Partition, RankProfile, Rebalancer, StepTiming, Timings
from ringattn.parallel import Split
from ringattn.planning import predict

COST = ModelCost(1e9, 3e9, 64)
LAYER = ModelCost(16384.0, 436.2e6, 4096)  # LLaMA-3-8B
MASKS: list[dict[str, Any]] = [
    {"cu_seqlens": [0, 5, 12]},
    {"cu_seqlens": [0, 9, 9, 11, 12], "window_size": (3, -1)},
    {"cu_seqlens": torch.tensor([0, 2, 12], dtype=torch.int32), "causal": False},
    {"window_size": (2, 0)},
    {"window_size": (4, 1), "causal": False},
]


def counted_ms(
    partition: Partition, profiles: list[RankProfile], cost: ModelCost, mask: dict[str, Any]
) -> list[float]:
    """Overhead, matrix products, and one visible pair after the other."""
    return [
        tokens
        and profile.overhead_ms
        + tokens * cost.linear_flops / profile.linear_tflops / 1e9
        + partition.num_pairs(rank, **mask) * cost.attention_flops / profile.attention_tflops / 1e9
        for rank, (tokens, profile) in enumerate(zip(partition.lengths, profiles, strict=True))
    ]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    "profiles",
    [
        [RankProfile(1, 1)] * 2,
        [RankProfile(1, 1), RankProfile(0.3, 0.5, overhead_ms=2)],
        [RankProfile(1, 1), RankProfile(0.7, 0.2, max_tokens=3), RankProfile(0.5, 1)],
    ],
)
def test_no_contiguous_partition_is_faster_than_the_planned_one(profiles, mask):
    planned = ringattn.plan(12, profiles, COST, layout="contiguous", **mask)
    assert planned.partition.layout == "contiguous"
    counted = counted_ms(planned.partition, profiles, COST, mask)
    assert planned.rank_ms == pytest.approx(counted)
    assert planned.predicted_ms == max(planned.rank_ms)
    assert predict(planned.partition, profiles, COST, **mask) == planned.rank_ms
    ranks = range(len(profiles))
    best = min(
        max(counted_ms(Partition.contiguous(lengths, order), profiles, COST, mask))
        for lengths in itertools.product(range(13), repeat=len(profiles))
        if sum(lengths) == 12
        and all(n <= (p.max_tokens or 12) for n, p in zip(lengths, profiles, strict=True))
        for order in itertools.permutations(ranks)
    )
    assert planned.predicted_ms == pytest.approx(best)
    assert planned.ideal_ms <= planned.predicted_ms
    assert planned.efficiency == pytest.approx(planned.ideal_ms / planned.predicted_ms)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_of_a_pack_end_together(world_size):
    draws = random.Random(world_size)
    ends = [0]
    while ends[-1] < 131072:
        ends.append(min(131072, ends[-1] + draws.randrange(1, 32768)))
    for speeds in ([1.0] * world_size, [1.0 / (1 + rank % 3) for rank in range(world_size)]):
        profiles = [RankProfile(500 * speed, 700 * speed) for speed in speeds]
        planned = ringattn.plan(131072, profiles, LAYER, cu_seqlens=ends)
        assert planned.partition.layout == "contiguous"
        counted = counted_ms(planned.partition, profiles, LAYER, {"cu_seqlens": ends})
        assert max(counted) <= 1.01 * sum(counted) / world_size
        assert planned.efficiency > 0.99
    capped = [RankProfile(1, 1, max_tokens=-(-131072 // world_size))] * world_size
    lengths = ringattn.plan(131072, capped, LAYER, cu_seqlens=ends).partition.lengths
    assert max(lengths) <= -(-131072 // world_size)


def test_the_layout_that_is_left_out_follows_the_mask():
    profiles = [RankProfile(1, 1)] * 4

    def layout(**mask: Any) -> str:
        return ringattn.plan(32768, profiles, LAYER, **mask).partition.layout

    assert layout() == layout(causal=False) == layout(cu_seqlens=[0, 32768]) == "zigzag"
    assert layout(window_size=(2**63 - 1, 0)) == "zigzag"
    assert layout(window_size=(1023, 0)) == layout(cu_seqlens=[0, 1024, 32768]) == "contiguous"
    assert layout(cu_seqlens=[0, 1024, 32768], layout="zigzag") == "zigzag"


def test_a_mask_that_breaks_a_rule_is_refused():
    profiles = [RankProfile(1, 1)] * 2
    with pytest.raises(ValueError, match="cu_seqlens must end with the 12 tokens of the whole"):
        ringattn.plan(12, profiles, COST, cu_seqlens=[0, 11])
    with pytest.raises(ValueError, match="cu_seqlens must not decrease, got 8 before 4"):
        predict(Partition.even(12, 2), profiles, COST, cu_seqlens=[0, 8, 4, 12])
    with pytest.raises(ValueError, match=r"window_size must be \(left, right\)"):
        Rebalancer(profiles, COST, window_size=(-2, 0))
    with pytest.raises(ValueError, match="cu_seqlens must be "):
        Rebalancer(profiles, COST).plan(12, [1, 12])


# ---- parallelized models -----------------------------------------------------------------------


def test_a_pack_is_cut_where_layers_take_equally_long():
    ends = [0, 100, 200, 300, 1000]
    documents = torch.tensor(ends)
    cost = ModelCost(1e3, 1e5)
    equal = [RankProfile(1, 1)] * 2
    planned = ringattn.plan(1000, equal, cost, cu_seqlens=ends).partition
    assert planned.layout == "contiguous" and planned.lengths[0] > 600
    assert Split(2, cost=cost).partition(1000, documents) == planned
    assert Split(2, cost=cost).partition(1000) == Partition.even(1000, 2)
    measured = (RankProfile(1, 1), RankProfile(0.5, 0.5))
    assert Split(2, profiles=measured, cost=cost).partition(1000, documents) == (
        ringattn.plan(1000, measured, cost, cu_seqlens=ends).partition
    )
    assert Split.of("even", 2).partition(1000, documents) == Partition.packed(ends, 2)
    weighted = Split.of([1, 3], 2)
    assert weighted.partition(1000, documents) == weighted.partition(1000)


# ---- the rebalancer ----------------------------------------------------------------------------

PROFILES = [RankProfile(500, 700, overhead_ms=0.01)] * 2


def observed(rebalancer: Rebalancer, plan: ringattn.Plan, speeds: list[float], mask: Any) -> bool:
    """A request in which ranks were so many times as fast as their profiles."""
    rank = this().rank
    flops = plan.partition.num_pairs(rank, **mask) * LAYER.attention_flops
    profile = PROFILES[rank]
    took = profile.overhead_ms + flops / (speeds[rank] * profile.attention_tflops * 1e9)
    # Some steps without flops: they are those of the mask then.
    steps = [StepTiming(0, rank, "own", took, 0.0, 0.0, 0.0)]
    return rebalancer.observe(Timings(steps))


def serve_packs(window_size: tuple[int, int]) -> None:
    draws = random.Random(7)
    rebalancer = Rebalancer(PROFILES, LAYER, window_size=window_size)
    speeds = [1.0, 1.0]
    for request in range(12):
        ends = [0, *sorted(draws.sample(range(1, 65536), 5)), 65536]
        mask = {"window_size": window_size, "cu_seqlens": ends}
        plan = rebalancer.plan(65536, torch.tensor(ends))
        if request < 4:  # the profiles hold
            assert plan == ringattn.plan(65536, PROFILES, LAYER, **mask)
        if request == 4:
            speeds = [1.0, 0.5]
        observed(rebalancer, plan, speeds, mask)
    assert rebalancer.speeds == pytest.approx(speeds, rel=0.02)
    assert rebalancer.profiles[1].attention_tflops == pytest.approx(250, rel=0.02)


@pytest.mark.parametrize("window_size", [(-1, -1), (4095, 0)])
def test_speeds_are_learnt_from_packs_that_differ(rank_pool, window_size):
    rank_pool(2).run(serve_packs, window_size)


def other_documents() -> None:
    rebalancer = Rebalancer(PROFILES, LAYER)
    rebalancer.plan(64, [0, 10 + this().rank, 64])
    rebalancer.observe(Timings())


def test_ranks_that_plan_for_other_documents_are_told_so(rank_pool):
    for outcome in rank_pool(2).outcomes(other_documents):
        assert outcome.error == "ValueError"
        assert "cu_seqlens must be the same on all ranks, got different ones" in outcome.message
