# SPDX-License-Identifier: Apache-2.0
"""Many tokens after a cache: spread over the ranks or on every rank, they see what they see on one
process."""

import random
from typing import Any

import pytest
import torch
from _distributed import RankPool, this
from ringattn import Partition, _spreading, block_attention
from ringattn._distributed.groups import resolve_group
from ringattn._key_positions import KeyPositions
from ringattn._masks import CAUSAL, Mask
from ringattn._spreading import is_faster_spread
from ringattn.cache import ShardedKVCache, next_owner, shares_of
from ringattn.model_call import ModelCall
from ringattn.model_inputs import Padding

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
#: Tokens of a prompt and of the calls after it; those of 3 tokens or fewer are on every rank.
CALLS = (11, 17, 1, 3, 30, 1, 1, 16)

#: Shares of the ranks: one without tokens, and one that has almost all.
WEIGHTS = {1: [1], 2: [0, 1], 3: [4, 0, 7], 4: [1, 1, 0, 9]}


def split(num_tokens: int) -> Partition:
    weights = WEIGHTS[this().world_size]
    lengths = [num_tokens * weight // sum(weights) for weight in weights]
    lengths[-1] += num_tokens - sum(lengths)
    return Partition.zigzag(lengths)


def heads(num_tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, num_tokens, num, HEAD_DIM) for num in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attended(mask: Mask, sinks: torch.Tensor | None) -> list[torch.Tensor]:
    ring, device = resolve_group(None), this().device
    outs: list[torch.Tensor] = []
    cache, before = None, 0
    sinks = None if sinks is None else sinks.to(device)
    for number, num_tokens in enumerate(CALLS):
        if cache is None:
            cache = ModelCall.new_cache(ring, split(num_tokens), device=device)
            call = ModelCall.prefill(ring, split(num_tokens), cache=cache)
        else:
            call = ModelCall.after(ring, cache, num_tokens, split, device=device)
            assert not call.is_prefill
            assert (call.partition is not None) == (num_tokens > 3 and device.type == "cpu")
        assert call.num_before == before
        before += num_tokens
        assert cache.seq_len == before
        q, k, v = (call.rows(x.to(device)) for x in heads(num_tokens, seed=number))
        outs.append(call.whole(call.attend(5, q, k, v, None, mask, sinks)).cpu())
        last = call.last(call.attend(7, q, k, v, None, mask, sinks), 1).cpu()
        assert torch.equal(last, outs[-1][:, -1:])
        places = call.position_ids(device).flatten()
        expected = torch.arange(before - num_tokens, before, device=device)
        assert torch.equal(places, call.rows(expected[None])[0])
    assert sum(cache.lengths) == cache.seq_len == sum(CALLS)
    return outs


def on_one_process(mask: Mask, sinks: torch.Tensor | None) -> list[torch.Tensor]:
    parts = [heads(num_tokens, seed=number) for number, num_tokens in enumerate(CALLS)]
    q, k, v = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
    places = torch.arange(q.size(1), dtype=torch.int32)
    left = mask.window_size[0] if mask.window_size[0] >= 0 else places.numel()
    ranges = torch.stack(((places - left).clamp(min=0), places + 1), 1)
    out, _ = block_attention(q, k, v, key_ranges=ranges, softcap=mask.softcap, sinks=sinks)
    return list(out.split(CALLS, 1))


@pytest.mark.nccl
def test_calls_of_any_length_after_a_cache_are_those_of_one_process(ring: RankPool) -> None:
    sinks = torch.linspace(-1, 2, HEADS)
    windows = [Mask(window_size=(left, -1)) for left in (0, 9)]
    for mask in (CAUSAL, *windows, Mask(window_size=(20, -1), softcap=0.7)):
        for logits in (None, sinks):
            expected = on_one_process(mask, logits)
            for outs in ring.run(attended, mask, logits):
                for out, right in zip(outs, expected, strict=True):
                    torch.testing.assert_close(out, right, rtol=0, atol=2e-6)


def errors_of_few_tokens(dtype: torch.dtype) -> tuple[float, float]:
    """Of tokens that all ranks attend after a cache, and of results that are rounded once."""
    ring, device, before = resolve_group(None), this().device, 8
    parts = zip(*(heads(11, seed) for seed in range(16)), strict=True)
    q, k, v = (torch.cat(tensors).to(device, dtype) for tensors in parts)
    partition = Partition.even(before, this().world_size)
    cache = ModelCall.new_cache(ring, partition, device=device)
    call = ModelCall.prefill(ring, partition, cache=cache)
    call.attend(0, *(call.rows(x[:, :before]) for x in (q, k, v)), None)
    call = ModelCall.after(ring, cache, 3, lambda n: Partition.even(n, 2), device=device)
    assert call.partition is None
    out = call.attend(0, *(x[:, before:] for x in (q, k, v)), None)
    once, _ = block_attention(q[:, before:], k, v, diagonal=before)
    exact, _ = block_attention(*(x.cpu().double() for x in (q[:, before:], k, v)), diagonal=before)
    error, of_once = ((x.cpu() - exact).square().mean().sqrt().item() for x in (out, once))
    return error, of_once


@pytest.mark.nccl
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_few_tokens_after_a_cache_are_rounded_once(ring: RankPool, dtype: torch.dtype) -> None:
    for error, of_once in ring.run(errors_of_few_tokens, dtype):
        assert error <= 1.05 * of_once


def test_the_faster_way_is_taken_on_either_side() -> None:
    for world_size in (2, 4, 8):
        # 64K cached tokens: weights are read, whatever the rows; then products cost time.
        assert not is_faster_spread(16, 2**16, world_size, "cuda")
        assert is_faster_spread(2**12, 2**16, world_size, "cuda")
        # A few tokens do not pay for the fetch of a million keys.
        assert not is_faster_spread(2**13, 2**20, world_size, "cuda")
        assert is_faster_spread(2**14, 2**20, world_size, "cuda")
    # One rank fetches nothing.
    assert is_faster_spread(_spreading.MIN_ROWS["cuda"], 2**30, 1, "cuda")
    assert is_faster_spread(8, 100, 2, "cpu") and not is_faster_spread(7, 100, 2, "cpu")


def ways_of_padded_and_rebalanced() -> list[bool]:
    ring, partition = resolve_group(None), Partition.zigzag([9, 2])
    padding = Padding((3, 0), (8, 11), 11)
    padded = ModelCall.new_cache(ring, partition, padding=padding)
    moved = ModelCall.new_cache(ring, partition, targets=[4, 8])
    plain = ModelCall.new_cache(ring, partition, targets=[9, 2])
    for cache in (padded, moved, plain):
        cache.store(0, *torch.zeros(2, 2, cache.lengths[ring.rank], 2, 8))
    moved.rebalance()
    plain.rebalance()  # which moves nothing
    calls = (
        ModelCall.after(ring, cache, 20, lambda n: Partition.even(n, 2), device=this().device)
        for cache in (padded, moved, plain)
    )
    return [call.partition is not None for call in calls]


def test_keys_out_of_order_and_rows_of_unequal_length_stay_where_they_are(rank_pool: Any) -> None:
    assert rank_pool(2).run(ways_of_padded_and_rebalanced) == [[False, False, True]] * 2


def test_many_tokens_go_where_one_after_the_other_would() -> None:
    draw = random.Random(5)
    for _ in range(2000):
        world_size, count = draw.randint(1, 5), draw.randint(0, 40)
        lengths = [draw.randint(0, 9) for _ in range(world_size)]
        targets = [draw.choice([0, draw.randint(0, 30)]) for _ in range(world_size)]
        held = list(lengths)
        for _ in range(count):
            held[next_owner(held, targets)] += 1
        shares = [after - before for after, before in zip(held, lengths, strict=True)]
        assert shares_of(count, lengths, targets) == shares


def cached_positions(draw: random.Random, cache: ShardedKVCache, held: list[list[int]]) -> None:
    """Some calls after the prompt, spread and not."""
    for _ in range(draw.randint(1, 8)):
        before, count = cache.seq_len, draw.choice([1, 1, draw.randint(1, 9)])
        if draw.random() < 0.5:
            cuts = sorted(draw.randint(0, count) for _ in range(2))
            partition = Partition.zigzag([cuts[0], cuts[1] - cuts[0], count - cuts[1]])
            cache.advance(count, partition)
            for rank, owned in enumerate(held):
                owned += (before + partition.position_ids(rank)).tolist()
        else:
            first = before
            for rank, share in enumerate(cache.advance(count)):
                held[rank] += range(first, first + share)
                first += share


def test_positions_of_cached_keys_are_counted_through_calls_and_crops() -> None:
    draw = random.Random(4)
    for _ in range(200):
        rank, lengths = draw.randint(0, 2), [draw.randint(0, 6) for _ in range(3)]
        prompt = Partition.zigzag(lengths)
        pieces = [prompt.segments(each) for each in range(3)]
        cache = ShardedKVCache(lengths, rank, positions=KeyPositions(pieces, rank))
        held = [prompt.position_ids(each).tolist() for each in range(3)]
        for turn in range(3):
            if turn > 0:
                kept = draw.randint(0, cache.seq_len)
                cache.crop(kept)
                held = [[at for at in owned if at < kept] for owned in held]
            cached_positions(draw, cache, held)
            assert cache.lengths == [len(owned) for owned in held]
            partition = cache.partition
            assert partition is not None and partition.seq_len == cache.seq_len
            for each, owned in enumerate(held):
                assert partition.position_ids(each).tolist() == owned
            for left in (0, 1, 5, 30):
                first = cache.seq_len - 1 - left
                assert cache.first_keys(left, 1) == [sum(at < first for at in held[rank])]


def test_a_crop_of_less_than_nothing_or_out_of_order_is_refused() -> None:
    cache = ShardedKVCache([3, 4], 0)
    cache.crop(7)
    with pytest.raises(ValueError, match="num_tokens must not be negative, got -1"):
        cache.crop(-1)
    with pytest.raises(ValueError, match="to be cropped, got one that was rebalanced"):
        cache.crop(6)
    rows = KeyPositions([[(0, 3)], [(3, 7)]], 0, [2, 7])
    cache = ShardedKVCache([3, 4], 0, key_lengths=torch.tensor([2, 3]), positions=rows)
    with pytest.raises(ValueError, match="to be cropped, got a padded one"):
        cache.crop(6)
