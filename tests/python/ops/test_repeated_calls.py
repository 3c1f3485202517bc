# SPDX-License-Identifier: Apache-2.0
"""Repeated ring calls skip their checks; a call that differs in anything does not."""

from typing import Any

import numpy as np
import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from _rings import Case
from ringattn import Partition, reference


def operands(rows: int = 8, **options: Any) -> tuple[torch.Tensor, ...]:
    return Case(Partition.zigzag([rows]), head_dim=16, **options).inputs("cpu")


def check_single(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> None:
    """A call on one rank equals attention by the definition."""
    out, lse = ringattn.ring_attention(q, k, v, **options, return_lse=True)
    diagonal = 0 if options.get("causal", True) else None
    scale = options.get("scale")
    wide = [x.double() for x in (q, k, v)]
    expected, expected_lse = reference.attention(*wide, scale=scale, diagonal=diagonal)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=2e-2)


OTHER_CALLS: list[dict[str, Any]] = [
    {"causal": False},
    {"scale": 0.7},
    {"scale": -0.7},
    {"scale": 0.0},
    {"scale": np.float64(2.0)},
    {"partition": Partition.contiguous([8])},
    {"depth": 3},
]


@pytest.mark.parametrize("other", OTHER_CALLS, ids=str)
def test_another_option_after_a_repeated_call_is_used(other: dict[str, Any]) -> None:
    tensors = operands()
    for options in ({}, {}, other, {}, other, other):
        check_single(*tensors, **options)


@pytest.mark.parametrize(
    "other",
    [{"rows": 7}, {"dtype": torch.bfloat16}, {"batch": 1}, {"num_heads": 2}, {"num_kv_heads": 4}],
    ids=str,
)
def test_other_tensors_after_a_repeated_call_are_used(other: dict[str, Any]) -> None:
    one, another = operands(), operands(**other)
    for tensors in (one, one, another, one, another):
        check_single(*tensors)


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"k": torch.zeros(2, 7, 2, 16)}, "v must have as many rows as k, 7, got 8"),
    ({"v": torch.zeros(2, 8, 1, 16)}, "v must have as many heads as k, 2, got 1"),
    ({"k": torch.zeros(2, 8, 2, 16).double()}, "k must have the dtype of q"),
    ({"q": torch.zeros(8, 4, 16)}, r"q must be \[B, S_r, H, D\]"),
    ({"q": torch.zeros(2, 8, 4, 16).to_sparse()}, "q must be strided"),
    ({"v": torch.zeros(2, 8, 2, 16, device="meta")}, "v must be on a device with a kernel"),
    ({"partition": Partition.zigzag([9])}, "q must have the 9 rows"),
    ({"partition": Partition.zigzag([8, 0])}, "partition must have the 1 ranks of the group"),
    ({"causal": 1}, "causal must be True or False"),
    ({"scale": float("nan")}, "scale must be finite"),
    ({"scale": torch.ones(2)}, r"scale must be a number, got a tensor \[2\]"),
    ({"depth": 0}, "depth must be positive"),
    ({"depth": True}, "depth must be an integer"),
    ({"transport": "pigeon"}, "transport must be"),
    ({"return_lse": "no"}, "return_lse must be True or False, got 'no'"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_a_mistake_after_a_repeated_call_is_refused(changes: dict[str, Any], message: str) -> None:
    q, k, v = operands()
    given = {"q": q, "k": k, "v": v, "causal": True, "scale": 0.25, "depth": 1}
    for _ in range(2):
        ringattn.ring_attention(**given)
        with pytest.raises(ValueError, match=message):
            ringattn.ring_attention(**(given | changes))


def test_a_mutable_scale_is_read_in_each_call() -> None:
    tensors = operands()
    scale = np.array(0.5)
    for value in (0.5, 0.5, 2.0):
        scale[...] = value
        out = ringattn.ring_attention(*tensors, scale=scale)  # type: ignore[arg-type]
        expected, _ = ringattn.block_attention(*tensors, scale=value, diagonal=0)
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["cu_seqlens", "window_size"])
def test_tensors_in_a_tuple_are_read_in_each_call(name: str) -> None:
    tensors, number = operands(), torch.tensor(0)
    given = (0, number, 8) if name == "cu_seqlens" else (number, 0)
    for value in (3, 3, 6):
        number.fill_(value)
        out = ringattn.ring_attention(*tensors, **{name: given})  # type: ignore[arg-type]
        plain = tuple(map(int, given))
        expected = ringattn.ring_attention(*tensors, **{name: plain})  # type: ignore[arg-type]
        assert torch.equal(out, expected)


def test_calls_in_inference_mode_leave_later_ones_a_backward() -> None:
    boundaries = (0, 5, 8)
    with torch.inference_mode():
        q, k, v = operands()
        partition = Partition.pieces([[(0, 8)]])
        ringattn.ring_attention(q, k, v, partition, cu_seqlens=boundaries)
        device_boundaries = torch.tensor(boundaries)
        ringattn.ring_attention(q, k, v, partition, cu_seqlens=device_boundaries)
    q, k, v = (x.requires_grad_() for x in operands())
    for given in (boundaries, device_boundaries):
        ringattn.ring_attention(q, k, v, partition, cu_seqlens=given).sum().backward()
    assert q.grad is not None


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_call_and_one_after_it() -> None:
    tensors = operands(11)
    traced = torch.jit.trace(lambda q, k, v: ringattn.ring_attention(q, k, v), tensors)
    assert torch.equal(traced(*tensors), ringattn.ring_attention(*tensors))


def test_more_kinds_of_calls_than_are_remembered() -> None:
    for _ in range(2):
        for rows in range(1, 50):
            check_single(*operands(rows))


# ---- several ranks -----------------------------------------------------------------------------


def check_ring(case: Case, rank: int, group: dist.ProcessGroup | None = None) -> None:
    """This rank's rows of the whole attention, of which every rank has the inputs."""
    tensors = case.inputs("cpu")
    shards = (case.partition.shard(x, rank) for x in tensors)
    out = ringattn.ring_attention(*shards, case.partition, causal=case.causal, group=group)
    wide = [x.double() for x in tensors]
    expected, _ = reference.attention(*wide, diagonal=0 if case.causal else None)
    own = case.partition.shard(expected, rank)
    torch.testing.assert_close(out.double(), own, rtol=0, atol=4e-6)


def partitions_of_the_same_shapes() -> None:
    """Calls whose tensors have the same shapes on the first rank."""
    one = Case(Partition.zigzag([8, 6, 4]))
    others = [
        Case(Partition.zigzag([8, 6, 5])),
        Case(Partition.zigzag([8, 6, 4], [2, 0, 1])),
        Case(Partition.contiguous([8, 6, 4])),
        Case(Partition.zigzag([8, 6, 4]), causal=False),
    ]
    for other in others:
        for case in (one, one, other, one, other):
            check_ring(case, this().rank)


def test_partitions_of_the_same_shapes_are_told_apart(rank_pool) -> None:
    rank_pool(3).run(partitions_of_the_same_shapes)


def groups_of_one_name() -> None:
    """Each time the ranks have other places in the group of the same name, and the same shapes."""
    world, case = this().world_size, Case(Partition.zigzag([6, 6, 6]))
    for number in range(3):
        dist.destroy_process_group()
        rank = (this().rank + number) % world
        store = dist.PrefixStore(f"repeated{number}", this().store)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        for _ in range(2):
            check_ring(case, rank)


def test_a_call_is_not_known_by_the_name_of_its_group() -> None:
    with RankPool(3) as ring:
        ring.run(groups_of_one_name)


def two_groups() -> None:
    """The middle rank is in both, in other places, and makes the same calls in each."""
    groups = [[0, 1], [1, 2]]
    rings = [dist.new_group(ranks) for ranks in groups]
    case = Case(Partition.zigzag([6, 6]))
    for _ in range(3):
        for ring, ranks in zip(rings, groups, strict=True):
            if this().rank in ranks:
                check_ring(case, ranks.index(this().rank), ring)


def test_groups_do_not_know_each_others_calls(rank_pool) -> None:
    rank_pool(3).run(two_groups)
