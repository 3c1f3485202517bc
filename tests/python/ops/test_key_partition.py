# SPDX-License-Identifier: Apache-2.0
"""Queries that are the last of more keys, which lie in a partition of their own."""

import random
from dataclasses import replace
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _gradients import check_ring_gradients
from _rings import HALVES, Case, check_ring, random_case, ring_call
from ringattn import Partition, reference
from torch.utils.flop_counter import FlopCounterMode

#: Drawn for each number of ranks and dtype.
CASES = 50


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_the_last_queries_of_any_keys_equal_three_loops(ring: RankPool, dtype: torch.dtype):
    on_cpu = ring.device_type == "cpu"
    if dtype == torch.float64 and not on_cpu:
        pytest.skip("float64 is computed on CPUs")
    draw = random.Random(2000 * ring.world_size + torch.finfo(dtype).bits)
    for _ in range(CASES if dtype not in HALVES or not on_cpu else 8):
        check_ring(
            ring,
            random_case(draw, ring.world_size, dtype, 1 if on_cpu else 13, with_key_partition=True),
        )


def cached_case(
    world_size: int, before: int, new: int, layout: str = "zigzag", **options: Any
) -> Case:
    """New tokens after a cache: each rank holds some of the cached and some of the new keys."""
    old = Partition.even(before, world_size)
    queries = Partition.even(new, world_size, layout=layout)
    pieces = [
        [*old.segments(rank), *((before + a, before + b) for a, b in queries.segments(rank))]
        for rank in range(world_size)
    ]
    return Case(queries, key_partition=Partition.pieces(pieces), **options)


@pytest.mark.parametrize("transport", ["auto", "process_group", "nccl", "symmetric"])
@pytest.mark.parametrize(("before", "new"), [(0, 40), (1, 40), (500, 7), (300, 301), (3000, 1300)])
def test_new_tokens_after_a_cache(ring: RankPool, before: int, new: int, transport: str):
    on_cpu = ring.device_type == "cpu"
    if on_cpu and (transport in ("nccl", "symmetric") or before == 3000):
        pytest.skip("for GPUs")
    for dtype in (torch.float32, torch.bfloat16):
        for layout in ("zigzag", "contiguous"):
            case = cached_case(
                ring.world_size, before, new, layout, dtype=dtype, transport=transport
            )
            check_ring(ring, case)
            check_ring(ring, replace(case, depth=1))
            check_ring(ring, replace(case, softcap=20.0, with_sinks=True))
        check_ring(ring, replace(case, window_size=(63, 0), softcap=20.0, with_sinks=True))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_gradients_of_new_tokens_after_a_cache(ring: RankPool, layout: str):
    on_cpu = ring.device_type == "cpu"
    for before, new in [(17, 23), (40, 9)] if on_cpu else [(300, 301), (3000, 1300)]:
        for dtype in (torch.float64, torch.float32) if on_cpu else (torch.float32, *HALVES):
            check_ring_gradients(
                ring, cached_case(ring.world_size, before, new, layout, dtype=dtype)
            )


def slow_call(case: Case, slow: bool) -> tuple[torch.Tensor, torch.Tensor]:
    with ringattn.testing.slowdown(2.6 if slow else 1.0):
        return ring_call(case)


def test_a_slow_rank_repeats_work_after_a_cache_and_keeps_its_results(rank_pool):
    ring = rank_pool(2, "cpu")
    case = cached_case(2, 30, 13)
    ordinary, slow = (ring.run(slow_call, case, slow) for slow in (False, True))
    for mine, theirs in zip(ordinary, slow, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=str)
def test_gradients_of_the_last_queries_and_all_keys(ring: RankPool, dtype: torch.dtype):
    on_cpu = ring.device_type == "cpu"
    if dtype == torch.float64 and not on_cpu:
        pytest.skip("float64 is computed on CPUs")
    draw = random.Random(3000 * ring.world_size + torch.finfo(dtype).bits)
    for _ in range(8 if dtype not in HALVES or not on_cpu else 2):
        check_ring_gradients(
            ring,
            random_case(draw, ring.world_size, dtype, 1 if on_cpu else 7, with_key_partition=True),
        )


@pytest.mark.parametrize("empty", [0, 1])
def test_a_rank_may_have_queries_without_keys_and_keys_without_queries(rank_pool, empty: int):
    ring = rank_pool(3, "cpu")
    keys, queries = [12, 13, 14], [0, 0, 0]
    keys[empty] = 0
    queries[empty] = 9
    case = Case(Partition.contiguous(queries), key_partition=Partition.zigzag(keys, [2, 0, 1]))
    for depth in (None, 1):
        check_ring(ring, replace(case, depth=depth))
    check_ring(ring, replace(case, partition=Partition.contiguous([0, 0, 0])))


@pytest.mark.parametrize("causal", [True, False])
def test_equal_partitions_of_both_sides_give_the_bits_of_one(rank_pool, causal: bool):
    ring = rank_pool(2, "cpu")
    case = Case(Partition.zigzag([21, 18]), causal=causal)
    both = replace(case, key_partition=Partition.zigzag([21, 18]))
    for alone, other in zip(ring.run(ring_call, case), ring.run(ring_call, both), strict=True):
        assert all(torch.equal(*pair) for pair in zip(alone, other, strict=True))


def test_the_reference_equals_one_dense_attention():
    draw = random.Random(3)
    for _ in range(20):
        case = random_case(draw, 3, torch.float64, with_key_partition=True)
        q, k, v = case.inputs("cpu")
        sinks = case.sinks("cpu")
        scoring = (case.scale, case.softcap, sinks)
        expected = reference.masked_attention(q, k, v, case.visible(), *scoring)
        found = reference.ring_attention(
            *(q, k, v, case.partition, case.causal, case.scale),
            window_size=case.window_size,
            softcap=case.softcap,
            sinks=sinks,
            cu_seqlens=case.cu_seqlens,
            key_partition=case.key_partition,
        )
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"key_partition": Partition.even(5, 1)},
        "key_partition must have at least as many tokens as partition, 6, got 5",
    ),
    ({"key_partition": [8]}, "key_partition must be a Partition, got list: pass "),
    ({"key_partition": 8}, "key_partition must be a Partition, got 8"),
    (
        {"key_partition": Partition.even(8, 2)},
        "key_partition must have the 1 ranks of the group, got 2",
    ),
    (
        {"key_partition": Partition.even(9, 1)},
        "k must have the 9 rows that the key_partition gives rank 0, got 8",
    ),
    (
        {"key_partition": Partition.even(8, 1), "cu_seqlens": [0, 6]},
        "cu_seqlens must end with the 8 tokens of the whole sequence, got 6",
    ),
]


@pytest.mark.parametrize(("wrong", "sentence"), BAD)
def test_a_key_partition_that_breaks_a_rule_is_refused(wrong: dict[str, Any], sentence: str):
    q, k = torch.randn(1, 6, 2, 16), torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError) as error:
        ringattn.ring_attention(q, k, k, **wrong)
    assert str(error.value).startswith(sentence)


def wrong_on_one_rank(case: Case, others: Any) -> None:
    q, k, v = case.local_inputs()
    keys = others if this().rank == 1 else case.key_partition
    ringattn.ring_attention(q, k, v, case.partition, key_partition=keys)


@pytest.mark.parametrize("repeated", [False, True])
def test_ranks_whose_key_partitions_differ_are_told_so(rank_pool, repeated: bool):
    ring = rank_pool(2, "cpu")
    case = Case(Partition.even(6, 2), key_partition=Partition.zigzag([10, 10]))
    others: list[tuple[Any, str]] = [
        (Partition.contiguous([10, 10]), "key_partition.layout"),
        (Partition.zigzag([10, 10], [1, 0]), "key_partition.order"),
        (Partition.zigzag([12, 10]), "key_partition"),
        (Partition.zigzag([1, 2]), "key_partition must have at least"),
        (None, "rows that the partition gives"),
        ([10, 10], "key_partition must be a Partition"),
    ]
    for other, said in others:
        if repeated:
            check_ring(ring, case)
        for outcome in ring.outcomes(wrong_on_one_rank, case, other):
            assert not outcome.ok and said in outcome.message, outcome.message
    check_ring(ring, case)  # the group works on


def test_the_module_takes_a_key_partition_at_the_call():
    q, k = torch.randn(1, 5, 2, 16), torch.randn(1, 12, 2, 16)
    keys = Partition.even(12, 1)
    expected = ringattn.ring_attention(q, k, k, key_partition=keys, window_size=(3, 0))
    attn = ringattn.RingAttention(window_size=(3, 0))
    assert torch.equal(attn(q, k, k, key_partition=keys), expected)


def test_other_numbers_of_keys_do_not_compile_again():
    torch._dynamo.reset()
    compiles = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]):
        compiles.append(graph)
        return graph.forward

    def attend(q: torch.Tensor, k: torch.Tensor, keys: Partition) -> torch.Tensor:
        return ringattn.ring_attention(q, k, k, Partition.even(q.size(1), 1), key_partition=keys)

    compiled = torch.compile(attend, fullgraph=True, backend=backend)
    for before in (8, 11, 19, 40):
        q, k = torch.randn(1, 4, 2, 16), torch.randn(1, before + 4, 2, 16)
        keys = Partition.even(before + 4, 1)
        assert torch.equal(compiled(q, k, keys), attend(q, k, keys))
    assert len(compiles) <= 2


def test_flops_are_those_of_visible_pairs():
    q, k = torch.randn(2, 9, 4, 16), torch.randn(2, 40, 4, 16)
    ends, window = [0, 13, 13, 40], (5, 2)
    keys = torch.arange(40)
    visible = reference.visible_keys(keys[-9:], keys, False, window, ends)
    pieces = Partition.pieces([[(0, 40)]])
    for of_keys in (Partition.even(40, 1), pieces):
        with FlopCounterMode(display=False) as counter:
            ringattn.ring_attention(
                *(q, k, k), causal=False, window_size=window, cu_seqlens=ends, key_partition=of_keys
            )
        assert counter.get_total_flops() == 4 * 16 * 4 * 2 * int(visible.sum())


def test_the_operator_passes_opcheck():
    q, k = torch.randn(1, 6, 2, 16), torch.randn(1, 9, 2, 16)
    mask = (3, -1, 2.0, torch.randn(2), torch.tensor([0, 2, 9]), None)
    pieces = torch.tensor([[0, 0, 9]])
    for keys in (([9], [0], "zigzag", None), ([9], [0], "pieces", pieces)):
        arguments = (q, k, k, [6], [0], "zigzag", True, 0.25, "", "auto", None, *mask, *keys)
        torch.library.opcheck(torch.ops.ringattn.ring_forward.default, arguments)
