# SPDX-License-Identifier: Apache-2.0
"""The sharded cache: which rank holds a token, and that no token is copied for another."""

import copy
import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _distributed import this
from ringattn._distributed.collectives import complete
from ringattn._key_positions import KeyPositions
from ringattn.cache import ShardedKVCache, next_owner, plan_moves
from ringattn.partition import Partition

LAYERS, BATCH, KV_HEADS, HEAD_DIM = 2, 2, 3, 8


def new_cache(
    lengths: list[int], rank: int, new_tokens: int | None = 0, targets: list[int] | None = None
) -> ShardedKVCache:
    """With zeros in every layer, where they are not stored again."""
    cache = ShardedKVCache(lengths, rank, new_tokens=new_tokens, targets=targets)
    for layer in range(LAYERS):
        cache.store(layer, *torch.zeros(2, BATCH, lengths[rank], KV_HEADS, HEAD_DIM))
    return cache


def rows(first: int, count: int, layer: int) -> torch.Tensor:
    """[B, count, H_kv, D]: rows that encode token and layer."""
    values = torch.arange(first, first + count, dtype=torch.float32) + 1000 * layer
    return values[None, :, None, None].expand(BATCH, count, KV_HEADS, HEAD_DIM).contiguous()


def test_a_new_token_goes_to_the_least_loaded_rank_the_lowest_where_several_are() -> None:
    lengths = [4, 2, 3]
    owners = []
    for _ in range(6):
        owners.append(next_owner(lengths, [0, 0, 0]))
        lengths[owners[-1]] += 1
    assert owners == [1, 1, 2, 0, 1, 2]
    assert lengths == [5, 5, 5]


def test_with_targets_a_new_token_goes_where_the_most_are_lacking() -> None:
    lengths, targets = [4, 2, 3], [5, 9, 3]
    owners = []
    for _ in range(8):
        owners.append(next_owner(lengths, targets))
        lengths[owners[-1]] += 1
    assert owners == [1, 1, 1, 1, 1, 1, 0, 1]
    assert lengths == targets


@pytest.mark.parametrize(
    ("lengths", "targets", "expected"),
    [
        ([5, 5], [5, 5], []),
        ([8, 2], [5, 7], [(0, 1, 3)]),
        ([2, 9, 0, 4], [1, 5, 7, 2], [(0, 2, 1), (1, 2, 4), (3, 2, 2)]),
        ([9, 0, 0], [2, 3, 9], [(0, 1, 3), (0, 2, 4)]),
        ([3, 3], [0, 2], []),
    ],
)
def test_tokens_move_from_ranks_above_their_targets_to_those_below(
    lengths: list[int], targets: list[int], expected: list[tuple[int, int, int]]
) -> None:
    assert plan_moves(lengths, targets) == expected


def rebalanced(lengths: list[int], targets: list[int], new_tokens: int) -> list[list[float]]:
    """The tokens in each layer of this rank, after it has rebalanced and grown."""
    rank, first = this().rank, sum(lengths[: this().rank])
    cache = new_cache(lengths, rank, new_tokens, targets)
    for layer in range(LAYERS):
        k = rows(first, lengths[rank], layer)
        cache.store(layer, k, -k)
    cache.rebalance(None)
    address = cache.view(0)[0].data_ptr()
    for token in range(sum(lengths), sum(lengths) + new_tokens):
        cache.advance()
        for layer in range(LAYERS):
            k = rows(token, 1, layer)
            cache.append(layer, k, -k)
    assert cache.lengths == targets and cache.view(0)[0].data_ptr() == address
    held = []
    for layer in range(LAYERS):
        keys, values = cache.view(layer)
        assert torch.equal(values, -keys) and keys.eq(keys[:1, :, :1, :1]).all()
        held.append((keys[0, :, 0, 0] - 1000 * layer).tolist())
    return held


@pytest.mark.parametrize(
    ("lengths", "targets"),
    [([6, 2, 4], [3, 8, 5]), ([0, 12, 0], [7, 2, 7]), ([4, 4, 4], [6, 5, 5])],
)
def test_a_rebalanced_cache_ends_at_its_targets_with_every_token_once(
    rank_pool, lengths: list[int], targets: list[int]
) -> None:
    held = rank_pool(3).run(rebalanced, lengths, targets, sum(targets) - sum(lengths))
    for layer in range(LAYERS):
        tokens = [token for of_rank in held for token in of_rank[layer]]
        assert sorted(tokens) == list(range(sum(targets)))
        assert [len(of_rank[layer]) for of_rank in held] == targets


def exchanges_of_a_rebalance() -> int:
    cache = new_cache([4, 2, 3], this().rank, targets=[3, 3, 3])
    with mock.patch("ringattn.cache.complete", wraps=complete) as exchange:
        cache.rebalance(None)
    assert cache.lengths == [3, 3, 3]
    return exchange.call_count


def test_every_rank_takes_part_in_a_rebalance_also_one_that_keeps_its_tokens(rank_pool) -> None:
    """A group's first operation over NCCL waits for all ranks."""
    assert rank_pool(3).run(exchanges_of_a_rebalance) == [LAYERS] * 3


def first_operation_of_a_group(dtype: torch.dtype) -> list[float]:
    size, rank, device = this().world_size, this().rank, this().device
    lengths = [4, 2] + [3] * (size - 2)
    cache = ShardedKVCache(lengths, rank, targets=[3] * size)
    first = sum(lengths[:rank])
    k = rows(first, lengths[rank], 0).to(device, dtype)
    cache.store(0, k, -k)
    group = dist.new_group(list(range(size)))
    cache.rebalance(group)
    keys, values = cache.view(0)
    assert torch.equal(values, -keys)
    dist.destroy_process_group(group)
    return keys[0, :, 0, 0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_rebalance_may_be_the_first_operation_of_a_group(ring, dtype: torch.dtype) -> None:
    if ring.world_size < 3:
        pytest.skip("every rank gives or takes")
    held = ring.run(first_operation_of_a_group, dtype)
    assert [len(tokens) for tokens in held] == [3] * ring.world_size
    assert sorted(itertools.chain(*held)) == list(range(3 * ring.world_size))


@pytest.mark.parametrize("new_tokens", [0, 3, 40])
def test_ranks_together_hold_every_token_once_in_every_layer(new_tokens: int) -> None:
    lengths, tokens = [5, 0, 2], 40
    caches = [new_cache(lengths, rank, new_tokens) for rank in range(3)]
    held: list[list[int]] = [list(range(0, 5)), [], list(range(5, 7))]
    for rank, cache in enumerate(caches):
        for layer in range(LAYERS):
            k = rows(held[rank][0] if held[rank] else 0, lengths[rank], layer)
            cache.store(layer, k, -k)
    for token in range(7, 7 + tokens):
        shares = {tuple(cache.advance()) for cache in caches}
        assert len(shares) == 1
        held[shares.pop().index(1)].append(token)
        for cache in caches:
            for layer in range(LAYERS):
                k = rows(token, 1, layer)
                cache.append(layer, k, -k)
    assert caches[0].lengths == caches[1].lengths == [16, 16, 15]
    assert caches[0].seq_len == 47
    for cache, tokens_held in zip(caches, held, strict=True):
        for layer in range(LAYERS):
            keys, values = cache.view(layer)
            expected = torch.tensor(tokens_held, dtype=torch.float32) + 1000 * layer
            assert torch.equal(keys, expected[None, :, None, None].expand_as(keys))
            assert torch.equal(values, -keys)


def test_announced_tokens_are_never_moved() -> None:
    cache = new_cache([3000, 1000], rank=1, new_tokens=500)
    address = cache.view(0)[0].data_ptr()
    assert cache.capacity == 1500  # all of them come here: rank 0 has more to the end
    for _ in range(500):
        cache.advance()
        keys, _ = cache.append(0, rows(0, 1, 0), rows(0, 1, 0))
        assert keys.data_ptr() == address


def test_tokens_past_the_announced_ones_move_storage_seldom() -> None:
    cache = new_cache([100], rank=0)
    moves, copied, address = 0, 0, cache.view(0)[0].data_ptr()
    for _ in range(10_000):
        held = cache.lengths[0]
        cache.advance()
        keys, _ = cache.append(0, rows(0, 1, 0), rows(0, 1, 0))
        if keys.data_ptr() != address:
            moves, copied, address = moves + 1, copied + held, keys.data_ptr()
    assert moves <= 12  # 100 * 1.5 ** 12 > 10_000
    assert copied <= 3 * 10_000  # a geometric series


@pytest.mark.parametrize("kind", ["rows", "padded rows", "rebalanced", "spread"])
@pytest.mark.parametrize("count", [1, 9])
def test_a_step_that_is_undone_leaves_what_a_cache_held(kind: str, count: int) -> None:
    prompt, lengths = Partition.zigzag([5, 3]), [5, 3]
    padding = torch.tensor([3, 4], dtype=torch.int32) if kind == "padded rows" else None
    spread = Partition.even(count, 2) if kind == "spread" else None
    caches = []
    for _ in range(2):
        cache = new_cache(lengths, rank=0)
        cache.key_lengths = padding
        if kind != "rebalanced":
            real = None if padding is None else [6, 8]
            cache.positions = KeyPositions([prompt.segments(rank) for rank in range(2)], 0, real)
        caches.append(cache)
    spoiled, right = caches
    for token in range(3):
        spoiled.begin(spoiled.history)
        spoiled.advance(count, spread)
        spoiled.append(0, *torch.full((2, BATCH, count, KV_HEADS, HEAD_DIM), torch.nan))
        spoiled.history = -1
        for _ in range(2):  # once more changes nothing
            spoiled.undo()
        for cache in caches:
            assert cache.lengths == right.lengths and cache.history == token
            cache.begin(cache.history)
            cache.advance(count, spread)
            cache.history = token + 1
            for layer in range(LAYERS):
                k = rows(100 * token, count, layer)
                cache.append(layer, k, -k)
        for layer in range(LAYERS):
            keys, values = (
                torch.stack(each) for each in zip(*(x.view(layer) for x in caches), strict=True)
            )
            seen = slice(None) if padding is None else slice(None, int(right.key_lengths.min()))
            assert torch.equal(keys[0, :, seen], keys[1, :, seen])
            assert torch.equal(values[0, :, seen], values[1, :, seen])
        if padding is not None:
            assert torch.equal(spoiled.key_lengths, right.key_lengths)
        if kind != "rebalanced":
            assert spoiled.partition == right.partition
            assert spoiled.first_keys(4, count) == right.first_keys(4, count)


def test_a_step_without_memory_to_grow_leaves_what_a_cache_held() -> None:
    cache = new_cache([4], rank=0)
    with (
        mock.patch("ringattn.cache._empty_like", side_effect=MemoryError),
        pytest.raises(MemoryError),
    ):
        cache.advance()
    assert cache.lengths == [4] and cache.capacity == 4
    cache.advance()
    assert cache.append(0, rows(0, 1, 0), rows(0, 1, 0))[0].size(1) == 5


def test_a_crop_of_the_newest_step_is_one_that_never_was() -> None:
    """A rank whose step failed and one that has cropped it, and more, compare equal."""
    cache = new_cache([4], rank=0)
    cache.positions = KeyPositions([[(0, 4)]], 0)
    cache.history = 7
    cache.begin(cache.history)
    cache.advance(2)
    cache.history = 8
    once = copy.deepcopy(cache)
    cache.crop(4)
    assert cache.history == 7
    cache.crop(3)
    once.crop(3)
    assert cache.history == once.history != 7


def filled() -> ShardedKVCache:
    """Of two ranks, after a step; the batch rows differ."""
    cache = new_cache([4, 3], rank=0, new_tokens=1)
    cache.history = torch.tensor(7)
    cache.begin(cache.history)
    cache.advance()
    for layer in range(LAYERS):
        keys, values = cache.view(layer)
        keys.copy_(torch.arange(BATCH).view(-1, 1, 1, 1).expand_as(keys))
        values.copy_(-keys)
    return cache


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        (torch.tensor([1, 0, 1]), [1, 0, 1]),
        (torch.tensor([-1]), [1]),
        (torch.tensor([False, True]), [1]),
        ([1, -2], [1, 0]),
        ([True, False], [0]),
        (slice(1, None), [1]),
    ],
)
def test_batch_rows_are_selected_as_those_of_a_tensor(given: Any, numbers: list[int]) -> None:
    cache, by_number = filled(), filled()
    expected = cache.view(0)[0][given]
    cache.select(given)
    by_number.select(torch.tensor(numbers))
    for layer in range(LAYERS):
        keys, values = cache.view(layer)
        assert torch.equal(keys, expected) and torch.equal(values, -expected)
    assert cache.history == by_number.history != 7


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (torch.tensor([0, 2]), "[0, 2]"),
        ([-3], "[-3]"),
        (torch.tensor([True, False, True]), "[True, False, True]"),
        (torch.tensor([0.0]), "[0.0]"),
        (1, "1"),
        (None, "None"),
        ("all", "'all'"),
    ],
)
def test_batch_rows_that_are_not_there_are_refused_before_anything_changes(
    given: Any, got: str
) -> None:
    cache = filled()
    with pytest.raises(ValueError, match="batch rows must be of the 2 of the cache, got ") as error:
        cache.select(given)
    assert str(error.value).endswith(f"got {got}")
    assert cache.history == 7 and cache.storage_version == 0
    cache.undo()  # the step is still known
    assert cache.lengths == [4, 3] and cache.view(0)[0].size(0) == BATCH


def test_views_share_the_storage() -> None:
    cache = new_cache([4], rank=0, new_tokens=4)
    cache.store(0, rows(0, 4, 0), rows(0, 4, 0))
    keys, values = cache.view(0)
    assert keys.shape == (BATCH, 4, KV_HEADS, HEAD_DIM)
    keys.fill_(7)
    values.fill_(8)
    assert cache.view(0)[0].eq(7).all() and cache.view(0)[1].eq(8).all()
