# SPDX-License-Identifier: Apache-2.0
"""Partitions of any pieces, and those that balance packed documents."""

import pickle
import random
from dataclasses import replace

import pytest
import torch
from ringattn import _C, Partition, reference

PIECES = [[(0, 4), (12, 16)], [(4, 6), (6, 12)], []]


def test_pieces_are_sorted_joined_and_without_empty_ones():
    p = Partition.pieces([[(12, 16), (0, 4), (7, 7)], [(6, 12), (4, 6)], []])
    assert p == Partition.pieces(PIECES) and hash(p) == hash(Partition.pieces(PIECES))
    assert pickle.loads(pickle.dumps(p)) == p
    assert (p.layout, p.lengths, p.order, p.seq_len) == ("pieces", (8, 8, 0), (0, 1, 2), 16)
    assert [p.segments(rank) for rank in range(3)] == [[(0, 4), (12, 16)], [(4, 12)], []]
    assert [p.owner(position) for position in (3, 4, 11, 12)] == [0, 1, 1, 0]
    assert p != Partition.zigzag([8, 8, 0])


def test_rows_are_sharded_in_position_order_and_come_back():
    p, x = Partition.pieces(PIECES), torch.randn(2, 16, 3)
    shards = [p.shard(x, rank) for rank in range(3)]
    assert torch.equal(shards[0], torch.cat([x[:, :4], x[:, 12:]], 1))
    assert torch.equal(p.unshard(shards), x)
    assert p.position_ids(0).tolist() == [0, 1, 2, 3, 12, 13, 14, 15]
    assert p.position_ids(0, cu_seqlens=[0, 2, 14, 16]).tolist() == [0, 1, 0, 1, 10, 11, 0, 1]


def test_pieces_of_no_tokens_come_back_without_rows():
    partition = Partition.pieces([[], [(0, 0)]])
    shards = [partition.shard(torch.ones(2, 0, 3), rank) for rank in range(2)]
    assert partition.seq_len == 0 and partition.unshard(shards).shape == (2, 0, 3)


@pytest.mark.parametrize(
    ("pieces", "sentence"),
    [
        ([], "pieces must be [[(start, stop), ...] of rank 0, "),
        ([[(0, 3)], [(4, 5)]], "pieces must cover each position once, got 3 nowhere"),
        ([[(0, 3)], [(2, 5)]], "pieces must cover each position once, got 2 twice"),
        ([[(3, 1)]], "a piece of rank 0 must be (start, stop) with start <= stop, got (3, 1)"),
        ([[(0, 1, 2)]], "a piece of rank 0 must be (start, stop), got (0, 1, 2)"),
        ([[(0, 1.5)]], "a piece of rank 0 must be (start, stop), got (0, 1.5)"),
        ([(0, 1)], "a piece of rank 0 must be (start, stop), got 0"),
        ([[(0, 2**63)]], "pieces must end below 2**63, got 9223372036854775808"),
    ],
)
def test_pieces_that_are_no_assignment_are_refused(pieces, sentence):
    with pytest.raises(ValueError) as error:
        Partition.pieces(pieces)
    assert str(error.value).startswith(sentence)


@pytest.mark.parametrize("other", [{"lengths": (10, 20)}, {"order": (1, 0)}], ids=str)
def test_what_pieces_say_by_themselves_is_not_given_otherwise(other):
    p = Partition.pieces([[(0, 3)], [(3, 5)]])
    assert replace(p) == p
    name = next(iter(other))
    with pytest.raises(ValueError, match=f"{name} must be left out with pieces"):
        replace(p, **other)


def test_pairs_are_counted_as_a_query_sees_keys():
    draw = random.Random(3)
    for _ in range(40):
        seq_len = draw.randint(1, 40)
        ends = [0, *sorted(draw.randint(0, seq_len) for _ in range(3)), seq_len]
        window = (draw.choice([-1, 3]), draw.choice([-1, 2]))
        mask = (draw.random() < 0.5, window, ends)
        p = Partition.packed(ends, 3, causal=mask[0], window_size=window)
        every = torch.arange(seq_len)
        for rank in range(3):
            visible = reference.visible_keys(p.position_ids(rank), every, *mask)
            counted = p.num_pairs(rank, causal=mask[0], window_size=window, cu_seqlens=ends)
            assert counted == int(visible.sum())


def test_pairs_that_64_bits_do_not_hold_are_not_counted():
    assert Partition.even(2**32 - 2, 2).num_pairs(0, causal=False) == (2**31 - 1) * (2**32 - 2)
    with pytest.raises(
        ValueError, match=r"where no rank has 2\*\*31 tokens, got .* 2147483648 on one"
    ):
        Partition.even(2**32, 2).num_pairs(0)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_packed_documents_are_balanced_in_tokens_and_work(world_size):
    draw = random.Random(world_size)
    for _ in range(6):
        ends = [0]
        while ends[-1] < 30000:
            ends.append(ends[-1] + min(int(draw.lognormvariate(7.0, 1.2)) + 1, 16384))
        p = Partition.packed(ends, world_size)
        assert max(p.lengths) - min(p.lengths) <= 1
        pairs = [p.num_pairs(rank, cu_seqlens=ends) for rank in range(world_size)]
        assert max(pairs) <= 1.02 * sum(pairs) / world_size


def test_short_documents_stay_whole():
    ends = list(range(0, 131073, 2048))
    p = Partition.packed(ends, 4)
    for rank in range(4):
        assert _C.rows_fetched(p.segments(rank), ends, True, (-1, -1)) == 0


def test_tokens_follow_weights():
    p = Partition.packed([0, 700, 800, 1000], 3, weights=[2, 0, 3])
    assert p.lengths == (400, 0, 600)
    assert p == Partition.packed([0, 700, 800, 1000], 3, weights=torch.tensor([2.0, 0.0, 3.0]))
    lists = ([1, 1], [1, -1, 1], [0, 0, 0], [1, float("nan"), 1])
    for wrong in (*lists, 3, torch.tensor(3.0), {0: 1, 1: 2, 2: 3}):
        with pytest.raises(ValueError, match="weights must be 3 finite numbers"):
            Partition.packed([0, 10], 3, weights=wrong)
