# SPDX-License-Identifier: Apache-2.0
"""What operators refuse by themselves, called without the functions around them, on one rank, and
what is refused while a call is compiled."""

from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import AT_ONCE_S, RankPool, this
from _rings import Case, check_ring
from ringattn import Partition
from torch._subclasses import FakeTensorMode


def even(world_size: int, rows: int = 6) -> Case:
    return Case(Partition.even(rows * world_size, world_size))


@pytest.fixture
def shared_ring(own_pool) -> RankPool:
    """Two ranks that have not agreed on any call of this file yet."""
    return own_pool(2)


def operator_with_tangent(culprit: int) -> None:
    rows = 23  # a signature that the ranks have not agreed on yet
    q, k, v = even(this().world_size, rows=rows).local_inputs()
    if this().rank != culprit:
        ringattn.ring_attention(q, k, v, even(this().world_size, rows=rows).partition)
        return
    scale = q.size(-1) ** -0.5
    name = dist.group.WORLD.group_name
    lengths = [rows] * this().world_size
    arguments = (lengths, [], "zigzag", True, scale, name, "auto", None)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        torch.ops.ringattn.ring_forward(dual, k, v, *arguments)


def traced_on_one_rank(culprit: int) -> None:
    size = this().world_size
    if this().rank != culprit:
        return
    name, lengths = dist.group.WORLD.group_name, [4] * size
    arguments = (lengths, [], "zigzag", True, 1.0, name, "auto", None)
    with FakeTensorMode():
        batched = torch.empty(3, 1, 4, 2, 8)
        forward = torch.ops.ringattn.ring_forward
        with pytest.raises(RuntimeError, match=r"q must not be batched by torch\.vmap"):
            torch.vmap(lambda q: forward(q, q, q, *arguments)[0])(batched)


def test_a_refusal_while_tracing_is_not_reported_to_peers(shared_ring):
    shared_ring.run(traced_on_one_rank, 0)
    check_ring(shared_ring, even(shared_ring.world_size, rows=29))


def test_a_refusal_of_an_operator_itself_is_reported_to_peers(shared_ring):
    for outcome in shared_ring.outcomes(operator_with_tangent, 0):
        assert outcome.error == ("RuntimeError" if outcome.rank == 0 else "ValueError")
        assert "q must have no tangent" in outcome.message and outcome.seconds < AT_ONCE_S
    check_ring(shared_ring, even(shared_ring.world_size))


def refused_without_tokens() -> None:
    """The last rank, which owns nothing, refuses a call that the other one knows. The next call, of
    a new kind, is right on both."""
    partition = Partition.zigzag([6, 0])
    q, k, v = Case(partition).local_inputs()
    ringattn.ring_attention(q, k, v, partition)
    with pytest.raises(ValueError, match="depth must be"):
        ringattn.ring_attention(q, k, v, partition, depth=None if this().rank == 0 else 0)
    out = ringattn.ring_attention(q, k, v, partition, causal=False)
    expected, _ = ringattn.block_attention(q, k, v)
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-6)
    ringattn.synchronize()


def test_a_group_works_on_after_a_refusal_of_a_rank_without_tokens() -> None:
    with RankPool(2) as ring:
        ring.run(refused_without_tokens)


def refused_while_compiling() -> list[str]:
    x = Case(Partition.even(8 * this().world_size, this().world_size)).local_inputs()[1]
    partition = Partition.even(8 * this().world_size, this().world_size)
    calls = [
        lambda x: ringattn.ring_attention(x[0], x, x, partition),
        lambda x: ringattn.ring_attention(x, x, x, partition, depth=0),
        lambda x: ringattn.ring_attention(x, x, x),
        lambda x: ringattn.ring_attention(x, x, x, Partition.even(5, this().world_size)),
        lambda x: ringattn.rotate_kv(x, partition).wait(),
    ]
    messages = []
    for call in calls:
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"must .*, got ") as caught:
            torch.compile(call, fullgraph=True, backend="aot_eager")(x)
        messages.append(str(caught.value))
    return messages


def test_a_refusal_while_compiling_has_the_same_sentence(rank_pool):
    for messages in rank_pool(2).run(refused_while_compiling):
        assert "q must be [B, S_r, H, D], got shape [8, 2, 64]" in messages[0]
        assert "depth must be positive, got 0" in messages[1]
        assert "partition must say which tokens each of the 2 ranks owns, got None" in messages[2]
        assert "q must have the " in messages[3]
        assert "kv must be [2, B, S_r, H_kv, D], got shape " in messages[4]


@pytest.mark.parametrize(
    ("layout", "lengths", "order", "rank"),
    [
        ("spiral", [3, 1], [], 0),
        ("zigzag", [], [], 0),
        ("zigzag", [3, -1], [], 0),
        ("zigzag", [3, 1], [0], 0),
        ("zigzag", [3, 1], [0, 0], 0),
        ("contiguous", [3, 1], [0, 2], 0),
        ("contiguous", [3, 1], [0, -1], 0),
        ("zigzag", [3, 1], [1, 0], 2),
        ("zigzag", [3, 1], [1, 0], -1),
    ],
)
def test_partitions_are_refused_in_the_same_sentence_by_python_and_cpp(
    layout: str, lengths: list[int], order: list[int], rank: int
) -> None:
    with pytest.raises(ValueError) as python:
        Partition(layout, lengths, order).segments(rank)
    with pytest.raises(ValueError) as cpp:
        ringattn._C.segments(layout, lengths, order, rank)
    assert str(cpp.value) == str(python.value)


@pytest.mark.parametrize(
    "given",
    [
        {"key_pieces": torch.tensor([[0, 0, 2]])},
        {"key_layout": "contiguous"},
        {"key_order": [0]},
    ],
)
def test_a_part_of_a_key_partition_is_refused(given: dict[str, Any]) -> None:
    q = torch.zeros(1, 2, 2, 8)
    arguments = ([2], [0], "zigzag", True, 1.0, "", "auto", None)
    with pytest.raises(RuntimeError, match="key_partition must have the 1 ranks of the group, got"):
        torch.ops.ringattn.ring_forward(q, q, q, *arguments, **given)


def test_states_of_another_dtype_are_refused_in_torchs_names() -> None:
    q = torch.zeros(1, 2, 2, 8)
    lse = torch.zeros(1, 2, 2)
    fold, merge = torch.ops.ringattn.block_attention_, torch.ops.ringattn.merge_states_
    with pytest.raises(
        RuntimeError, match=r"out must be a torch\.float32 state, got torch\.float64"
    ):
        fold(q.double(), lse.double(), q, q, q, 1.0, None)
    with pytest.raises(RuntimeError, match=r"out must be a float32 state, .* got torch\.float16"):
        merge(q.half(), lse.half(), q, lse)
    with pytest.raises(RuntimeError, match=r"torch\.float32 on cpu, got torch\.float64 on cpu"):
        merge(q, lse.double(), q, lse)
    with pytest.raises(RuntimeError, match=r"dtype of out, torch\.float32, got torch\.bfloat16"):
        merge(q, lse, q.bfloat16(), lse)
    with pytest.raises(RuntimeError, match=r"kv must be of a floating point .* got torch\.int64"):
        torch.ops.ringattn.rotate_kv(torch.zeros(2, 1, 2, 2, 8).long(), [2], [], "", "auto")


def test_an_unknown_group_is_named():
    rows = torch.zeros(1, 6, 2)
    with pytest.raises(RuntimeError, match="group_name must be of a process group that is there"):
        torch.ops.ringattn.gather(rows, [6], [0], "zigzag", 1, "nope", None)
