# SPDX-License-Identifier: Apache-2.0
"""Who owns which tokens: every position has one owner, and Python and C++ agree about it."""

import itertools
import pickle
import random

import numpy as np
import pytest
import torch
from ringattn import _C, Partition

LENGTHS = [[1], [16], [5, 3, 8], [2, 2, 2, 2], [7, 0, 1], [0, 0, 3, 0], [0], [0, 0], [1, 1, 1]]


def partitions() -> list[Partition]:
    chosen = []
    shuffler = random.Random(0)
    for layout, lengths in itertools.product(["zigzag", "contiguous"], LENGTHS):
        order = list(range(len(lengths)))
        chosen.append(Partition(layout, tuple(lengths)))
        shuffler.shuffle(order)
        chosen.append(Partition(layout, tuple(lengths), tuple(order)))
    return chosen


def positions(partition: Partition, rank: int) -> list[int]:
    return [p for start, stop in partition.segments(rank) for p in range(start, stop)]


@pytest.mark.parametrize("partition", partitions(), ids=str)
class TestEveryPartition:
    def test_every_position_has_one_owner(self, partition):
        owned = [positions(partition, rank) for rank in range(partition.world_size)]
        assert sorted(itertools.chain(*owned)) == list(range(partition.seq_len))
        assert [len(rows) for rows in owned] == list(partition.lengths)
        for rank, rows in enumerate(owned):
            assert all(partition.owner(position) == rank for position in rows)

    def test_segments_are_ascending_and_at_most_two(self, partition):
        for rank in range(partition.world_size):
            segments = partition.segments(rank)
            assert len(segments) <= (2 if partition.layout == "zigzag" else 1)
            assert all(start < stop for start, stop in segments)
            assert positions(partition, rank) == sorted(positions(partition, rank))
            if partition.lengths[rank] == 0:
                assert segments == []

    def test_position_ids_are_the_owned_positions(self, partition):
        for rank in range(partition.world_size):
            ids = partition.position_ids(rank)
            assert ids.dtype == torch.int64 and ids.tolist() == positions(partition, rank)

    @pytest.mark.parametrize("dim", [0, 1, -1])
    def test_unshard_undoes_shard(self, partition, dim):
        shape = [2, 3, 4]
        shape[dim] = partition.seq_len
        x = torch.randn(shape)
        shards = [partition.shard(x, rank, dim) for rank in range(partition.world_size)]
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, x.index_select(dim, partition.position_ids(rank)))
        assert torch.equal(partition.unshard(shards, dim), x)

    def test_the_compiled_arithmetic_agrees(self, partition):
        for rank in range(partition.world_size):
            compiled = _C.segments(
                partition.layout, list(partition.lengths), list(partition.order), rank
            )
            assert [tuple(segment) for segment in compiled] == partition.segments(rank)

    @pytest.mark.parametrize("causal", [True, False])
    def test_the_schedule_visits_what_is_visible_and_nothing_else(self, partition, causal):
        for rank in range(partition.world_size):
            visits = _C.schedule(
                partition.layout, list(partition.lengths), list(partition.order), rank, causal
            )
            with_tokens = [other for other in partition.order if partition.lengths[other] > 0]
            without = [other for other in partition.order if partition.lengths[other] == 0]
            ring = with_tokens if rank in with_tokens else with_tokens + without
            place = ring.index(rank)
            expected_sources = [ring[place - step] for step in range(len(ring))]
            expected_sources += without if rank in with_tokens else []
            assert [visit.source for visit in visits] == expected_sources
            mine = positions(partition, rank)
            for visit in visits:
                theirs = positions(partition, visit.source)
                expected = {
                    (i, j)
                    for i, query in enumerate(mine)
                    for j, key in enumerate(theirs)
                    if not causal or key <= query
                }
                assert visit.num_pairs == len(expected)
                rows, keys = ({pair[side] for pair in expected} for side in (0, 1))
                if expected:  # no row and no key is visited for nothing
                    assert rows == set(range(visit.queries.begin, visit.queries.end))
                    assert keys == set(range(visit.keys.begin, visit.keys.end))

    def test_it_is_a_value(self, partition):
        twin = Partition(partition.layout, list(partition.lengths), list(partition.order))
        assert twin == partition and hash(twin) == hash(partition)
        assert pickle.loads(pickle.dumps(partition)) == partition
        with pytest.raises(AttributeError):
            partition.layout = "contiguous"


def test_zigzag_owns_a_head_piece_and_its_mirror_image():
    partition = Partition.zigzag([5, 3, 8])
    assert partition.segments(0) == [(0, 2), (13, 16)]
    assert partition.segments(1) == [(2, 3), (11, 13)]
    assert partition.segments(2) == [(3, 7), (7, 11)]
    assert partition.order == (0, 1, 2) and partition.seq_len == 16 and partition.world_size == 3


def test_order_puts_ranks_outermost_or_first():
    assert Partition.zigzag([4, 2], [1, 0]).segments(1) == [(0, 1), (5, 6)]
    assert Partition.contiguous([4, 2], [1, 0]).segments(1) == [(0, 2)]
    assert Partition.contiguous([4, 2], [1, 0]).segments(0) == [(2, 6)]


@pytest.mark.parametrize("lengths", [[4, 8, 2], [6, 6], [10, 2, 2, 4]])
def test_causal_work_under_zigzag_is_half_of_all_for_every_pair_of_ranks(lengths):
    partition = Partition.zigzag(lengths)
    for i, j in itertools.permutations(range(len(lengths)), 2):
        queries, keys = partition.position_ids(i), partition.position_ids(j)
        assert (keys[None, :] <= queries[:, None]).sum() == lengths[i] * lengths[j] / 2


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
@pytest.mark.parametrize("seq_len", [0, 1, 6, 100])
def test_even_lengths_differ_by_at_most_one(seq_len, world_size, layout):
    partition = Partition.even(seq_len, world_size, layout=layout)
    assert partition.layout == layout and partition.seq_len == seq_len
    assert len(partition.lengths) == world_size
    assert max(partition.lengths) - min(partition.lengths) <= 1


@pytest.mark.parametrize(
    ("partition", "rank", "start"),
    [
        (Partition.contiguous([3, 4], [1, 0]), 0, 4),
        (Partition.contiguous([7, 0]), 0, 0),
        (Partition.zigzag([1, 6]), 0, 6),  # a tail without a head
    ],
)
def test_rows_in_one_piece_are_a_view(partition, rank, start):
    x = torch.randn(2, 7, 3)
    shard = partition.shard(x, rank)
    assert shard.data_ptr() == x[:, start:].data_ptr() and shard.stride() == x.stride()
    shard.zero_()
    assert torch.equal(x.eq(0).all(2).all(0).nonzero().flatten(), partition.position_ids(rank))


def test_shard_and_unshard_are_differentiable():
    partition = Partition.zigzag([3, 0, 4], [2, 0, 1])
    x = torch.randn(2, 7, 3, requires_grad=True)
    weights = torch.randn(2, 7, 3)
    shards = [partition.shard(x, rank) for rank in range(3)]
    (partition.unshard(shards) * weights).sum().backward()
    assert torch.equal(x.grad, weights)


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array])
def test_integers_of_other_kinds_are_integers(kind):
    for make in (Partition.zigzag, Partition.contiguous):
        partition = make(kind([3, 4]), kind([1, 0]))
        assert partition == make([3, 4], [1, 0])
        assert all(type(n) is int for n in (*partition.lengths, *partition.order))
        assert partition.segments(kind([1])[0]) == partition.segments(1)
        assert partition.owner(kind([6])[0]) == partition.owner(6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Partition("diagonal", (1, 2)), 'layout must be "zigzag" or "contiguous", got'),
        (lambda: Partition.even(4, 2, layout="spiral"), 'layout must be .*, got "spiral"'),
        (lambda: Partition.even(4, 2, layout="pieces"), 'layout must be .*, got "pieces"'),
        (lambda: Partition.zigzag([]), "lengths must name at least one rank, got none"),
        (lambda: Partition.zigzag([3, -1]), "lengths must not be negative, got -1"),
        (lambda: Partition.zigzag([3, 1.5]), "lengths must be integers, got"),
        (lambda: Partition.zigzag({0: 32}), r"lengths must be a list of integers, got \{0: 32\}"),
        (lambda: Partition.contiguous({3, 5}), "lengths must be a list of integers, got {3, 5}"),
        (lambda: Partition.zigzag(b"ab"), "lengths must be a list of integers, got b'ab'"),
        (lambda: Partition.zigzag([3, 1], {1: 0, 0: 1}), "order must be a list of integers, got"),
        (lambda: Partition.zigzag([3, True]), r"lengths must be integers, got \[3, True\]"),
        (lambda: Partition.zigzag([3, 1], [1, False]), r"order must be integers, got \[1, False\]"),
        (
            lambda: Partition.zigzag(500, 300),
            r"lengths must be a list, .* 500: pass ringattn\.Partition\.zigzag\(\[500, 300\]\)$",
        ),
        (
            lambda: Partition.zigzag(500, 300, 200, 100),
            r"lengths must be a list, .* 500: pass ringattn\.Partition\.zigzag"
            r"\(\[500, 300, 200, 100\]\)$",
        ),
        (
            lambda: Partition.contiguous([2, 1], [1, 0], "cpu"),
            r"Partition\.contiguous must have lengths and at most an order, got 3 arguments$",
        ),
        (lambda: Partition.contiguous(4), r"got 4: pass ringattn\.Partition\.contiguous\(\[4\]\)$"),
        (lambda: Partition.zigzag("4"), "lengths must be integers, got '4'"),
        (
            lambda: Partition([1, 2]),
            r"layout must be .*, got \[1, 2\]: pass ringattn\.Partition\.zigzag\(\[1, 2\]\) or "
            r"\.contiguous$",
        ),
        (lambda: Partition.zigzag([2**63]), r"lengths must add up to less than 2\*\*63 tokens"),
        (lambda: Partition.contiguous([2**62] * 2), r"lengths must add up to less than 2\*\*63"),
        (lambda: Partition.even(4.0, 2), "seq_len must be an integer, got 4.0"),
        (lambda: Partition.even(4, "2"), "world_size must be an integer, got '2'"),
        (lambda: Partition.even(4, 2).segments(0.5), "rank must be an integer, got 0.5"),
        (lambda: Partition.even(4, 2).position_ids(0.5), "rank must be an integer, got 0.5"),
        (lambda: Partition.even(4, 2).shard(torch.ones(1, 4), 0.5), "rank must be an integer"),
        (lambda: Partition.even(4, 2).shard(torch.ones(1, 4), 0, "1"), "dim must be an integer"),
        (lambda: Partition.even(4, 2).owner(0.5), "position must be an integer, got 0.5"),
        (lambda: Partition.zigzag([3, 1], [0, 0]), r"order must name .* got \[0, 0\]"),
        (lambda: Partition.zigzag([3, 1], [1]), r"order must name .* got \[1\]"),
        (lambda: Partition.zigzag([3, 1], [0, 2]), r"order must name .* got \[0, 2\]"),
        (lambda: Partition.zigzag([3, 1], [0, -1]), r"order must name .* got \[0, -1\]"),
        (lambda: Partition.even(4, 0), "world_size must be positive, got 0"),
        (lambda: Partition.even(-1, 2), "seq_len must not be negative, got -1"),
        (lambda: Partition.even(4, 2).segments(2), r"rank must lie in \[0, 2\), got 2"),
        (lambda: Partition.even(4, 2).segments(-1), r"rank must lie in \[0, 2\), got -1"),
        (lambda: Partition.even(4, 2).position_ids(-1), r"rank must lie in \[0, 2\), got -1"),
        (lambda: Partition.even(4, 2).shard(torch.ones(1, 4), -1), r"rank must lie in .* got -1"),
        (lambda: Partition.even(4, 2).owner(4), r"position must lie in \[0, 4\), got 4"),
        (lambda: Partition.even(4, 2).owner(-1), r"position must lie in \[0, 4\), got -1"),
        (lambda: Partition.even(4, 2).shard(torch.ones(1, 5), 0), "x must have 4 rows in dim 1"),
        (lambda: Partition.even(4, 2).shard(torch.ones(4), 0), "dim must be a dimension of x"),
        (lambda: Partition.even(4, 2).shard([1, 2, 3, 4], 0), "x must be a tensor, got list"),
        (lambda: Partition.even(4, 2).unshard([torch.ones(1, 2)]), "shards must be 2 tensors"),
        (lambda: Partition.even(4, 2).unshard(iter([])), "shards must be 2 tensors, got 0"),
        (lambda: Partition.even(4, 2).unshard(None), "shards must be 2 tensors, got NoneType"),
        (
            lambda: Partition.even(4, 2).unshard([torch.ones(1, 2), None]),
            "shard 1 must be a tensor, got NoneType",
        ),
        (
            lambda: Partition.even(4, 2).unshard([torch.ones(1, 2), torch.ones(1, 2).double()]),
            "shard 1 must have dtype torch.float32, got torch.float64",
        ),
        (
            lambda: Partition.even(4, 2).unshard([torch.ones(1, 2), torch.ones(1, 2).to("meta")]),
            "shard 1 must be on the device of shard 0, cpu, got meta",
        ),
        (
            lambda: Partition.even(4, 2).unshard([torch.ones(1, 2, 3), torch.ones(2, 2, 3)]),
            r"shard 1 must have other sizes \[1, 3\], got \[2, 3\]",
        ),
        (
            lambda: Partition.even(4, 2).unshard([torch.ones(1, 2), torch.ones(1, 3)]),
            "shard 1 must have 2 rows in dim 1, got 3",
        ),
        (
            lambda: Partition.even(4, 2).shard(torch.ones(1, 3, 4, 8), 0),
            r"x must have 4 rows in dim 1, got 3; this looks like \[B, H, S, D\]: "
            r"pass x\.transpose\(1, 2\)$",
        ),
        (
            lambda: Partition.even(4, 2).gather(torch.ones(1, 2)),
            "partition must have the 1 ranks of the group, got 2",
        ),
        (
            lambda: Partition.even(4, 1).gather(torch.ones(1, 3)),
            "x must have the 4 rows that the partition gives rank 0, got 3",
        ),
        (
            lambda: Partition.even(4, 1).gather(torch.ones(1, 4, device="meta")),
            "x must be on a dev",
        ),
        (
            lambda: torch.func.jvp(Partition.even(4, 1).gather, *[(torch.ones(1, 4),)] * 2),
            "x must have no tangent",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
