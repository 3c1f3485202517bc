# SPDX-License-Identifier: Apache-2.0
"""Planning for unequal ranks: what is promised of plans, and what is refused.

That no partition is faster is shown by brute force in tests/cpp/planner/test_planner.cpp.
"""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ringattn
import torch
from ringattn import AttentionTile, ModelCost, Partition, RankProfile
from ringattn.models import LLaMAConfig
from ringattn.planning import predict, work_in_tiles

LLAMA_8B = LLaMAConfig(emb_dim=4096, nheads=32, kvheads=8, hidden_dim=14336)
ATTENTION = ModelCost.attention_only(32, 128, num_kv_heads=8)
LAYER = ModelCost.from_config(LLAMA_8B)
LAYOUTS = ["zigzag", "contiguous"]


def ranks(*speeds: float, **options) -> list[RankProfile]:
    return [RankProfile(550 * speed, 700 * speed, **options) for speed in speeds]


# ---- costs -------------------------------------------------------------------------------------


def test_a_layer_costs_what_its_shapes_say():
    assert ModelCost(4 * 32 * 128, 0, 2 * 8 * 128 * 2) == ATTENTION
    assert LAYER.attention_flops == ATTENTION.attention_flops
    assert LAYER.kv_bytes == ATTENTION.kv_bytes
    weights = 4096 * 6144 + 4096 * 4096 + 3 * 4096 * 14336  # qkv, dense, gate and up and down
    assert LAYER.linear_flops == 2 * weights
    assert ModelCost.from_config(LLAMA_8B, dtype=torch.float32).kv_bytes == 2 * LAYER.kv_bytes


@pytest.mark.parametrize("kv_heads", [8, None])
def test_the_config_may_be_of_hugging_face(kv_heads):
    from transformers import LlamaConfig

    theirs = LlamaConfig(
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=kv_heads,
        intermediate_size=14336,
    )
    ours = LLAMA_8B.updated(kvheads=kv_heads or 32)
    assert ModelCost.from_config(theirs) == ModelCost.from_config(ours)


def test_a_config_may_leave_out_what_follows_from_the_rest():
    plain = SimpleNamespace(hidden_size=4096, num_attention_heads=32, intermediate_size=14336)
    assert ModelCost.from_config(plain) == ModelCost.from_config(LLAMA_8B.updated(kvheads=32))


def test_heads_may_be_narrower_than_the_model():
    cost = ModelCost.from_config(LLAMA_8B.updated(head_dim=64))
    assert (cost.attention_flops, cost.kv_bytes) == (4 * 32 * 64, 2 * 8 * 64 * 2)
    assert cost.linear_flops == 2 * (4096 * 64 * (32 + 8 + 8 + 32) + 3 * 4096 * 14336)


# ---- plans -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_a_plan_says_what_its_partition_takes(layout, causal):
    profiles = ranks(1, 0.5, 0.25, overhead_ms=0.01)
    plan = ringattn.plan(5000, profiles, LAYER, layout=layout, causal=causal)
    assert isinstance(plan.partition, Partition) and plan.partition.layout == layout
    assert plan.partition.seq_len == 5000
    assert plan.rank_ms == predict(plan.partition, profiles, LAYER, causal=causal)
    assert plan.predicted_ms == max(plan.rank_ms)
    assert plan.efficiency == plan.ideal_ms / plan.predicted_ms
    assert 0.9 < plan.efficiency <= 1


def test_time_is_proportional_to_tokens_under_zigzag():
    profiles = [RankProfile(500, 600, overhead_ms=0.1), RankProfile(100, 300)]
    seq_len = 4000
    took = predict(Partition.zigzag([3000, 1000]), profiles, LAYER)
    for profile, tokens, ms in zip(profiles, (3000, 1000), took, strict=True):
        of_token = LAYER.linear_flops / (
            profile.linear_tflops * 1e9
        ) + LAYER.attention_flops * seq_len / 2 / (profile.attention_tflops * 1e9)
        assert ms == pytest.approx(profile.overhead_ms + tokens * of_token, rel=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_at_a_bad_link_is_left_out_where_it_does_not_pay(layout):
    links = [dict(link_gbps=gbps, link_latency_us=10) for gbps in (200, 200, 200, 1.25)]
    profiles = [RankProfile(600, 650, **link) for link in links]
    plan = ringattn.plan(16384, profiles, ATTENTION, layout=layout)
    assert plan.rank_ms == predict(plan.partition, profiles, ATTENTION, depth=plan.depth)
    profiles[3] = RankProfile(600, 650, max_tokens=0, **links[3])
    without = ringattn.plan(16384, profiles, ATTENTION, layout=layout)
    assert plan.predicted_ms <= 1.01 * without.predicted_ms
    # Two ranks that together are slower than one.
    both = [RankProfile(600, 650, link_gbps=5, link_latency_us=30)] * 2
    alone = ringattn.plan(8192, both[:1], ATTENTION, layout=layout)
    assert ringattn.plan(8192, both, ATTENTION, layout=layout).predicted_ms <= alone.predicted_ms


def test_predictions_hold_what_ranks_wait():
    profiles = [RankProfile(600, 650, link_gbps=1.0)] * 2
    even = Partition.even(16384, 2)
    waited = predict(even, profiles, ATTENTION)
    assert min(waited) > 1.5 * max(predict(even, [RankProfile(600, 650)] * 2, ATTENTION))
    # A fast rank among slow ones, and one block under way at a time.
    unequal = ringattn.plan(2**16, ranks(1, 0.1, 0.1, 0.1), ATTENTION)
    one = predict(unequal.partition, ranks(1, 0.1, 0.1, 0.1), ATTENTION, depth=1)
    assert max(one) > 1.1 * unequal.predicted_ms


def test_training_weighs_attention_more():
    profiles = [RankProfile(500, 500), RankProfile(100, 500)]
    forward = ringattn.plan(65536, profiles, LAYER)
    training = ringattn.plan(65536, profiles, LAYER, training=True)
    assert training.partition.lengths[1] < forward.partition.lengths[1]
    only = ringattn.plan(65536, profiles, ATTENTION)
    trained = ringattn.plan(65536, profiles, ATTENTION, training=True)
    assert trained.partition == only.partition
    assert trained.predicted_ms == pytest.approx(3.5 * only.predicted_ms)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_training_takes_three_times_the_products_and_more_of_attention(layout):
    profiles = [RankProfile(500, 500, overhead_ms=0.1), RankProfile(100, 300)]
    training = ringattn.plan(5000, profiles, LAYER, layout=layout, training=True)
    partition = training.partition
    bare = [replace(profile, overhead_ms=0.0) for profile in profiles]
    attention = predict(partition, bare, ATTENTION)
    both = predict(partition, bare, LAYER)
    assert training.rank_ms == predict(partition, profiles, LAYER, training=True)
    work = [
        profile.overhead_ms + 3 * (of_both - of_attention) + 3.5 * of_attention
        for profile, of_both, of_attention in zip(profiles, both, attention, strict=True)
    ]
    # One of two ranks waits for gradients at most.
    waits = [total / alone - 1 for total, alone in zip(training.rank_ms, work, strict=True)]
    assert min(waits) == pytest.approx(0, abs=1e-12) and max(waits) < 0.1


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        ({"window_size": (4095, 0)}, None),
        ({"cu_seqlens": [0, 9000, 30000, 65536]}, None),
        ({"causal": False}, "contiguous"),
    ],
)
def test_a_training_step_is_planned_under_every_mask_and_limit(mask, layout):
    profiles = [*ranks(1.0, 0.5), *ranks(0.8, max_tokens=9000)]
    plan = ringattn.plan(65536, profiles, LAYER, layout=layout, training=True, **mask)
    assert plan.partition.lengths[2] <= 9000
    assert plan.rank_ms == predict(plan.partition, profiles, LAYER, training=True, **mask)
    alone = ringattn.plan(65536, ranks(1.0), LAYER, training=True, **mask).predicted_ms
    assert plan.predicted_ms < 0.7 * alone
    assert plan.ideal_ms == pytest.approx(alone / 2.3, rel=0.02)
    slow_links = [replace(profile, link_gbps=0.5) for profile in profiles]
    waited = predict(plan.partition, slow_links, LAYER, training=True, **mask)
    assert max(waited) > plan.predicted_ms


def test_ranks_wait_for_gradients_where_attention_is_unequal():
    """Contiguous ranks have equal work in sum: the last one has more attention, and less of the
    rest. Under zigzag a rank gets ahead of others by itself, whatever their speeds."""
    profiles = ranks(1, 1, 1)
    plan = ringattn.plan(2**15, profiles, LAYER, layout="contiguous", training=True)
    forward = ringattn.plan(2**15, profiles, LAYER, layout="contiguous")
    assert forward.efficiency > 0.99 and plan.efficiency < 0.9
    fast = ringattn.plan(2**17, ranks(1, 0.1, 0.1), ATTENTION, training=True)
    assert fast.efficiency > 0.99


def test_gradients_of_a_block_take_three_times_as_long_as_the_block_and_no_more():
    """All bytes of a step, over links that all else is short for: a block each way in both passes,
    and gradients of twice its bytes."""
    even, links = Partition.even(2**14, 2), [RankProfile(600, 650, link_gbps=0.01)] * 2
    forward = max(predict(even, links, ATTENTION, causal=False))
    training = max(predict(even, links, ATTENTION, causal=False, training=True))
    assert training == pytest.approx(4 * forward, rel=1e-3)


@pytest.mark.parametrize("seq_len", [0, 1, 5, 1000, 100001, 2**20])
@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_equal_ranks_get_the_even_partition(seq_len, world_size):
    even = Partition.even(seq_len, world_size)
    assert ringattn.plan(seq_len, ranks(*[1] * world_size), LAYER).partition == even
    full = ringattn.plan(
        seq_len, ranks(*[1] * world_size), LAYER, layout="contiguous", causal=False
    )
    assert full.partition == Partition.even(seq_len, world_size, layout="contiguous")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seq_len", [7, 1000, 4096, 65537])
def test_no_plan_is_slower_than_even(seq_len, layout):
    for speeds in itertools.product((1, 0.99, 0.5), repeat=3):
        plan = ringattn.plan(seq_len, ranks(*speeds), LAYER, layout=layout)
        even = predict(Partition.even(seq_len, 3, layout=layout), ranks(*speeds), LAYER)
        assert plan.predicted_ms <= max(even)


@pytest.mark.parametrize("speed", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("num_slow", [1, 2, 3])
def test_a_few_thousand_tokens_fill_the_tiles_of_kernels(speed, num_slow):
    speeds = [1.0] * (4 - num_slow) + [speed] * num_slow
    in_tiles = ranks(*speeds, tiles=(AttentionTile(128, 128),))
    tiled = ringattn.plan(16384, in_tiles, ATTENTION)
    plain = ringattn.plan(16384, ranks(*speeds), ATTENTION)
    innermost = tiled.partition.order[-1]
    for rank, tokens in enumerate(tiled.partition.lengths):
        assert tokens % (128 if rank == innermost else 256) == 0
    # Tokens that fill no tile cost as much as if they did.
    assert tiled.predicted_ms <= max(predict(plain.partition, in_tiles, ATTENTION))
    assert tiled.ideal_ms == plain.ideal_ms


def test_the_slow_rank_may_be_any():
    shares = set()
    for slow in range(4):
        speeds = [1.0] * 4
        speeds[slow] = 0.1
        lengths = list(ringattn.plan(2**16, ranks(*speeds), ATTENTION).partition.lengths)
        shares.add((lengths.pop(slow), tuple(sorted(lengths))))
        assert len(set(lengths)) == 1
    assert len(shares) == 1


def test_a_rank_holds_no_more_than_it_can():
    profiles = [RankProfile(500, 500, max_tokens=1000), RankProfile(100, 500)]
    assert ringattn.plan(65536, profiles, LAYER).partition.lengths == (1000, 64536)
    profiles = [RankProfile(500, 500, max_tokens=1000), RankProfile(100, 500, max_tokens=333)]
    assert ringattn.plan(1333, profiles, LAYER).partition.lengths == (1000, 333)
    none = [RankProfile(500, 500, max_tokens=0), RankProfile(100, 500)]
    assert ringattn.plan(1000, none, LAYER).partition.lengths == (0, 1000)


def test_a_rank_that_does_not_pay_gets_nothing():
    profiles = [RankProfile(500, 500), RankProfile(500, 500, overhead_ms=1e3)]
    plan = ringattn.plan(4096, profiles, LAYER)
    assert plan.partition.lengths == (4096, 0) and plan.rank_ms[1] == 0
    assert plan.ideal_ms == pytest.approx(plan.predicted_ms / 2)  # of both, without overheads


def test_ideal_ignores_limits():
    free = ringattn.plan(65536, ranks(1, 0.5), LAYER)
    bound = ringattn.plan(65536, ranks(1, 0.5, max_tokens=40000), LAYER)
    assert bound.ideal_ms == free.ideal_ms and bound.efficiency < free.efficiency


def test_nothing_to_do_is_ideal():
    plan = ringattn.plan(0, ranks(1, 0.5), LAYER)
    assert (plan.rank_ms, plan.predicted_ms, plan.efficiency) == ((0.0, 0.0), 0.0, 1.0)
    tiles = (AttentionTile(128, 128),)
    assert work_in_tiles(Partition.zigzag([0, 100]), 0, ATTENTION, tiles) == 1.0
    assert work_in_tiles(Partition.zigzag([0, 100]), 1, ATTENTION, tiles) > 1.0


def test_depth_is_all_there_is_or_what_is_asked():
    one_fast = ringattn.plan(2**16, ranks(1, 0.1, 0.1, 0.1), ATTENTION)
    assert (one_fast.depth, one_fast.min_depth) == (3, 3)
    equal = ringattn.plan(2**16, ranks(1, 1, 1, 1), ATTENTION)
    assert (equal.depth, equal.min_depth) == (3, 1)
    assert ringattn.plan(2**16, ranks(1, 1, 1, 1), ATTENTION, depth=2).depth == 2
    assert ringattn.plan(2**16, ranks(1, 1), ATTENTION, depth=9).depth == 1
    # Two slow ranks are put apart, so that depth 1 is enough.
    two_slow = ringattn.plan(2**16, ranks(1, 1, 0.25, 0.25), ATTENTION)
    order = two_slow.partition.order
    assert two_slow.min_depth == 1 and abs(order.index(2) - order.index(3)) == 2


@pytest.mark.parametrize("depth", [1, 2, None])
def test_no_more_depth_is_asked_for_than_is_used(depth: int | None) -> None:
    profiles = [RankProfile(tflops, 100.0) for tflops in (10.0, 1.0, 30.0, 5.0)] * 2
    model = ModelCost(4 * 32 * 128, 4e8, 4096)
    options = {"causal": False, "window_size": (64, 64), "depth": depth}
    planned = ringattn.plan(5000, profiles, model, layout="zigzag", **options)
    assert planned.min_depth <= planned.depth


def test_memory_in_training_is_all_blocks_and_float32_gradients():
    block = 1000 * ATTENTION.kv_bytes
    for depth in (1, 3):
        options = {"causal": False, "depth": depth, "training": True}
        plan = ringattn.plan(4000, ranks(1, 1, 1, 1), ATTENTION, **options)
        # Its own gradients, and three blocks of them for each way.
        assert plan.memory_bytes == ((4 + 2 * 7) * block,) * 4


def test_memory_is_the_buffers_of_the_depth():
    block = 1000 * ATTENTION.kv_bytes
    for depth, num_blocks in ((1, 3), (2, 4), (3, 4)):  # this rank's own among them
        plan = ringattn.plan(4000, ranks(1, 1, 1, 1), ATTENTION, causal=False, depth=depth)
        assert plan.memory_bytes == (num_blocks * block,) * 4


def test_a_plan_prints_itself():
    text = str(ringattn.plan(65536, ranks(1, 0.5), LAYER))
    lines = text.splitlines()
    assert lines[0].startswith("65536 tokens, zigzag, order 0 1, depth 1 (at least 1): ")
    assert "% of ideal" in lines[0]
    assert lines[1].split() == ["rank", "tokens", "share", "ms", "busy", "buffers", "MiB"]
    assert [line.split()[0] for line in lines[2:]] == ["0", "1"]
    assert len({len(line) for line in lines[1:]}) == 1
    assert "0 tokens" in str(ringattn.plan(0, ranks(1), LAYER))


def test_numbers_may_be_of_other_kinds():
    import numpy as np

    profiles = [RankProfile(np.float32(5), np.int64(7), max_tokens=np.int32(100))] * 2
    assert profiles[0] == RankProfile(5.0, 7.0, max_tokens=100)
    assert ringattn.plan(torch.tensor(10), profiles, LAYER).partition.lengths == (5, 5)


# ---- the cache ---------------------------------------------------------------------------------


def test_cached_keys_lie_where_they_are_read_fastest():
    fast, slow = RankProfile(1, 1, memory_gbps=4000), RankProfile(1, 1, memory_gbps=1000)
    assert ringattn.plan_cache(10000, [fast, slow], LAYER) == [8000, 2000]
    assert ringattn.plan_cache(10000, [fast, fast, fast], LAYER) == [3334, 3333, 3333]
    little = RankProfile(1, 1, memory_gbps=4000, max_tokens=100)
    assert ringattn.plan_cache(10000, [little, slow], LAYER) == [100, 9900]
    assert ringattn.plan_cache(7, ranks(1, 0.1), LAYER) == [4, 3]  # no bandwidth is known
    assert ringattn.plan_cache(0, [fast, slow], LAYER) == [0, 0]


@pytest.mark.parametrize("num_tokens", [1, 7, 30])
@pytest.mark.parametrize("caps", [(None, None, None), (None, 4, 11), (3, None, None)])
@pytest.mark.parametrize("gbps", [(1, 1, 1), (4, 1, 2), (1000, 1010, 990), (7, 5, 3)])
def test_no_other_place_of_cached_keys_is_read_faster(num_tokens, caps, gbps):
    profiles = [
        RankProfile(1, 1, memory_gbps=speed, max_tokens=cap)
        for speed, cap in zip(gbps, caps, strict=True)
    ]
    room = [num_tokens if cap is None else cap for cap in caps]

    def slowest(lengths):
        return max(tokens / speed for tokens, speed in zip(lengths, gbps, strict=True))

    everywhere = itertools.product(*(range(most + 1) for most in room))
    best = min(slowest(lengths) for lengths in everywhere if sum(lengths) == num_tokens)
    planned = ringattn.plan_cache(num_tokens, profiles, LAYER)
    assert sum(planned) == num_tokens
    assert all(tokens <= most for tokens, most in zip(planned, room, strict=True))
    assert slowest(planned) == best
    even = list(Partition.even(num_tokens, 3).lengths)
    fits = all(tokens <= most for tokens, most in zip(even, room, strict=True))
    assert (planned == even) == (fits and slowest(even) == best)


# ---- wrong arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ModelCost(10**400), "attention_flops must be finite and positive, got 1000"),
        (lambda: ModelCost(1, 10**400), "linear_flops must be finite and not negative, got 1000"),
        (lambda: ModelCost(1, 1, 2**63), "kv_bytes must fit into 64 bits, got 9223372036854775808"),
        (lambda: ringattn.plan(2**63, ranks(1), LAYER), "seq_len must fit into 64 bits, got 9223"),
        (lambda: ringattn.plan(8, ranks(1), LAYER, depth=2**63), "depth must fit into 64 bits"),
        (lambda: ringattn.plan(8, *ranks(1), LAYER), "must be a list of .* got RankProfile"),
        (
            lambda: ringattn.plan(8, ranks(1), LAYER, causal="no"),
            "causal must be True or False, got 'no'",
        ),
        (
            lambda: ringattn.plan(8, ranks(1), LAYER, training=1),
            "training must be True or False, got 1",
        ),
        (
            lambda: predict(Partition.even(8, 1), ranks(1), LAYER, causal=None),
            "causal must be True or False, got None",
        ),
        (lambda: ModelCost.attention_only(True, 64), "num_heads must be an integer, got True"),
        (
            lambda: ModelCost.attention_only(8, 64, dtype="float32"),
            "dtype must be a floating torch.dtype, got 'float32'",
        ),
        (lambda: predict([4], ranks(1), LAYER), "partition must be a Partition, got list"),
        (
            lambda: ringattn.plan(8, ranks(1), LAYER, depth=1.5),
            "depth must be an integer or None, got 1.5",
        ),
        (lambda: ModelCost.attention_only(0, 64), "num_heads must be positive, got 0"),
        (lambda: ModelCost.attention_only(8, 64.5), "head_dim must be an integer, got 64.5"),
        (lambda: ModelCost(math.nan), "attention_flops must be finite and positive, got nan"),
        (lambda: ModelCost(1, -1), "linear_flops must be finite and not negative, got -1"),
        (lambda: ModelCost(1, 1, -1), "kv_bytes must not be negative, got -1"),
        (lambda: ModelCost.from_config(object()), "config must be a LLaMAConfig or .* got object"),
        (lambda: ringattn.plan(8, [], LAYER), "profiles must name at least one rank, got none"),
        (lambda: ringattn.plan(8, [1.0], LAYER), "profiles must be RankProfiles, got float"),
        (lambda: ringattn.plan(8, ranks(1), 3), "cost must be a ModelCost, got int"),
        (lambda: ringattn.plan(-1, ranks(1), LAYER), "seq_len must not be negative, got -1"),
        (lambda: ringattn.plan(1.5, ranks(1), LAYER), "seq_len must be an integer, got 1.5"),
        (
            lambda: ringattn.plan(ranks(1, 1), 8, LAYER),
            "^seq_len must be an integer, got a list of 2: the order is seq_len, profiles, cost$",
        ),
        (
            lambda: ringattn.plan_cache(ranks(1, 1), 8, LAYER),
            "^num_tokens must be an integer, got a list of 2: the order is num_tokens, profiles, ",
        ),
        (
            lambda: predict(ringattn.plan(8, ranks(1), LAYER), ranks(1), LAYER),
            "^partition must be a Partition, got Plan: pass plan.partition$",
        ),
        (
            lambda: ringattn.plan(8, ranks(1), LAYER, layout="spiral"),
            'layout must be "zigzag" or "contiguous", got "spiral"',
        ),
        (lambda: ringattn.plan(8, ranks(1), LAYER, depth=0), "depth must be positive, got 0"),
        (
            lambda: ringattn.plan(8, ranks(1, 1, max_tokens=3), LAYER),
            "profiles must have max_tokens for all 8 tokens, got room for 6",
        ),
        (
            lambda: predict(Partition.even(8, 3), ranks(1, 1), LAYER),
            "profiles must be 3, one for each rank of the partition, got 2",
        ),
        (
            lambda: predict(Partition.even(8, 2), ranks(1, 1), LAYER, depth=0),
            "depth must be positive, got 0",
        ),
        (
            lambda: ringattn.plan_cache(-1, ranks(1), LAYER),
            "num_tokens must not be negative, got -1",
        ),
        (
            lambda: ringattn.plan_cache(8, [*ranks(1), RankProfile(1, 1, memory_gbps=1)], LAYER),
            "profiles must have memory_gbps for all ranks or none, got rank 1 unlike rank 0",
        ),
        (
            lambda: ringattn.plan_cache(8, ranks(1, memory_gbps=1), ringattn.ModelCost(1.0)),
            "cost must have kv_bytes where profiles have memory_gbps, got ModelCost",
        ),
        (
            lambda: ringattn.plan(2**31, ranks(1, 1), LAYER),
            r"seq_len must be less than 2\*\*31, got 2147483648",
        ),
        (
            lambda: ringattn.ModelCost(1e308),
            r"attention_flops must be 1e\+30 at most, got 1e\+308",
        ),
        (
            lambda: ringattn.plan_cache(8, ranks(1, max_tokens=3), LAYER),
            "profiles must have max_tokens for all 8 tokens, got room for 3",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
