# SPDX-License-Identifier: Apache-2.0
"""Decoding from a cache that is spread across ranks."""

import pytest
import ringattn
import torch
from _decode import CACHES, DTYPES, Cache
from _distributed import RankPool, this
from _numerics import check_attention, poisoned_memory
from torch.utils.flop_counter import FlopCounterMode


def decode(cache: Cache) -> torch.Tensor:
    with poisoned_memory():
        return ringattn.decode_attention(*cache.local_inputs(), scale=cache.scale)


def check(ring: RankPool, cache: Cache) -> None:
    outs = ring.run(decode, cache)
    assert all(torch.equal(out, outs[0]) for out in outs), "the ranks must have the same bits"
    on_device = [x.to(ring.device_type) for x in (outs[0], *cache.inputs("cpu"))]
    check_attention(on_device[0], None, *on_device[1:], scale=cache.scale, what=f"{cache}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_queries", [1, 3])
def test_every_rank_has_attention_over_all_keys(ring, dtype, num_queries):
    for lengths in CACHES[ring.world_size]:
        check(ring, Cache(tuple(lengths), dtype, num_queries))


@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (8, 1)])
def test_every_shape_of_heads(ring, head_dim, num_heads, num_kv_heads):
    lengths = tuple(CACHES[ring.world_size][0])
    for dtype in (torch.float32, torch.bfloat16):
        check(ring, Cache(lengths, dtype, 1, num_heads, num_kv_heads, head_dim, scale=0.2))


def test_no_keys_anywhere_give_zeros(ring):
    outs = ring.run(decode, Cache((0,) * ring.world_size))
    assert all((out == 0).all() for out in outs)


def test_long_caches(ring):
    lengths = tuple(1000 + 333 * rank for rank in range(ring.world_size))
    check(ring, Cache(lengths, torch.bfloat16, num_heads=8))


def rows_of_unequal_length(cache: Cache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a row does not see are NaN."""
    q, k, v = cache.local_inputs()
    lengths = visible_rows(cache)[:, this().rank]
    for row, length in enumerate(lengths.clamp(0, k.size(1)).tolist()):
        k[row, length:] = v[row, length:] = torch.nan
    with poisoned_memory():
        return ringattn.decode_attention(
            *(q, k, v), key_lengths=lengths.to(q.device, dtype), return_lse=True
        )


def visible_rows(cache: Cache) -> torch.Tensor:
    """int64 [B, W]: -1, 0, some, all, and one more than all, over the rows and ranks."""
    choices = [[-1, 0, length // 2, length, length + 1] for length in cache.lengths]
    return torch.tensor(
        [[some[(2 + 2 * row + rank) % 5] for rank, some in enumerate(choices)] for row in range(2)]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths_dtype", [torch.int32, torch.int64])
def test_key_lengths_hide_the_rest_of_the_cache(ring, dtype, lengths_dtype):
    for lengths in CACHES[ring.world_size]:
        cache = Cache(tuple(lengths), dtype, num_queries=3)
        results = ring.run(rows_of_unequal_length, cache, lengths_dtype)
        out, lse = results[0]
        for other_out, other_lse in results[1:]:
            assert torch.equal(other_out, out) and torch.equal(other_lse, lse)
        q, k, v = cache.inputs("cpu")
        for row, seen in enumerate(visible_rows(cache).tolist()):
            visible = torch.cat(
                [torch.arange(length) < sees for length, sees in zip(lengths, seen, strict=True)]
            ).expand(cache.num_queries, -1)
            one = slice(row, row + 1)
            on_device = [x[one].to(ring.device_type) for x in (out, lse, q, k, v)]
            check_attention(
                *on_device, visible=visible.to(ring.device_type), what=f"row {row} {cache}"
            )


def test_key_lengths_that_are_all_keys_change_no_bit(ring):
    for lengths in CACHES[ring.world_size]:
        cache = Cache(tuple(lengths), torch.bfloat16)
        everything = ring.run(decode_with_all_lengths, cache)
        assert all(torch.equal(a, b) for a, b in everything)


def decode_with_all_lengths(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = cache.local_inputs()
    full = torch.full((2,), k.size(1), device=q.device)
    return ringattn.decode_attention(q, k, v, key_lengths=full), ringattn.decode_attention(q, k, v)


@pytest.mark.parametrize("name", ["key_lengths", "key_begins"])
@pytest.mark.parametrize(
    ("bounds", "sentence"),
    [
        (torch.tensor([1.0, 2.0]), "must be torch.int32 or torch.int64, got torch.float32"),
        (torch.tensor([1, 2, 3]), r"must have shape \[B\], B = 2, got \[3\]"),
        ([1, 2], "must be a tensor, got list"),
    ],
)
def test_wrong_bounds_of_keys_are_refused(name, bounds, sentence):
    q, k, v = (x.contiguous() for x in Cache((4,)).inputs("cpu"))
    with pytest.raises(ValueError, match=f"{name} {sentence}"):
        ringattn.decode_attention(q, k, v, **{name: bounds})


def test_bounds_of_keys_that_are_no_cache_are_refused():
    with pytest.raises(ValueError, match=r"k_shard must be \[B, S, H_kv, D\], got shape \[\]"):
        q, k = torch.zeros(1, 1, 2, 16), torch.tensor(1.0)
        ringattn.decode_attention(q, k, k, key_lengths=torch.tensor([1]))


def bounds_of_rows(cache: Cache) -> list[list[tuple[int, int]]]:
    """(begin, length) over the rows and ranks: none, some and all keys, also past both ends."""
    return [
        [
            [(-3, n + 2), (n // 3, n), (n // 2, n // 2 + 1), (n, n), (n // 2, n // 4), (1, n + 9)][
                (5 * row + rank) % 6
            ]
            for rank, n in enumerate(cache.lengths)
        ]
        for row in range(2)
    ]


def rows_with_begins(cache: Cache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values that a row does not see are NaN."""
    q, k, v = cache.local_inputs()
    k, v = k.clone(), v.clone()
    bounds = [row[this().rank] for row in bounds_of_rows(cache)]
    for row, (begin, length) in enumerate(bounds):
        for x in (k, v):
            x[row, : max(0, begin)] = x[row, max(0, length) :] = torch.nan
    begins, lengths = torch.tensor(bounds, device=q.device, dtype=dtype).unbind(1)
    with poisoned_memory():
        return ringattn.decode_attention(
            *(q, k, v), key_begins=begins, key_lengths=lengths, return_lse=True
        )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bounds_dtype", [torch.int32, torch.int64])
def test_key_begins_hide_the_start_of_the_cache(ring, dtype, bounds_dtype):
    for lengths in CACHES[ring.world_size]:
        cache = Cache(tuple(lengths), dtype, num_queries=3)
        results = ring.run(rows_with_begins, cache, bounds_dtype)
        out, lse = results[0]
        for other_out, other_lse in results[1:]:
            assert torch.equal(other_out, out) and torch.equal(other_lse, lse)
        q, k, v = cache.inputs("cpu")
        for row, bounds in enumerate(bounds_of_rows(cache)):
            seen = [
                (torch.arange(n) >= begin) & (torch.arange(n) < end)
                for n, (begin, end) in zip(lengths, bounds, strict=True)
            ]
            visible = torch.cat(seen).expand(cache.num_queries, -1).to(ring.device_type)
            one = slice(row, row + 1)
            on_device = [x[one].to(ring.device_type) for x in (out, lse, q, k, v)]
            check_attention(*on_device, visible=visible, what=f"row {row} {cache}")


def decode_with_no_begins(cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = cache.local_inputs()
    none = torch.zeros(2, dtype=torch.int32, device=q.device)
    return ringattn.decode_attention(q, k, v, key_begins=none), ringattn.decode_attention(q, k, v)


def test_key_begins_that_hide_nothing_change_no_bit(ring):
    for lengths in CACHES[ring.world_size]:
        everything = ring.run(decode_with_no_begins, Cache(tuple(lengths), torch.float32))
        assert all(torch.equal(a, b) for a, b in everything)


def begins_on_one_rank(cache: Cache) -> None:
    q, k, v = cache.local_inputs()
    begins = torch.zeros(2, dtype=torch.int32) if this().rank == 1 else None
    ringattn.decode_attention(q, k, v, key_begins=begins)


def test_ranks_that_differ_in_what_they_mask_with_are_told_so(rank_pool):
    for outcome in rank_pool(2).outcomes(begins_on_one_rank, Cache((4, 4))):
        assert outcome.error is not None and "key_begins" in outcome.message


def step_by_step(num_steps: int) -> torch.Tensor:
    """Keys are appended where there is room, as a generation does; every step is compared."""
    generator = torch.Generator().manual_seed(4)
    size = this().world_size
    keys = [[] for _ in range(size)]
    for step in range(num_steps):
        q, k, v = torch.randn(3, 1, 1, 2, 16, generator=generator).to(this().device)
        keys[step * step % size].append((k, v))
        empty = torch.empty(1, 0, 2, 16, device=this().device)
        mine = keys[this().rank]
        shard = [torch.cat([empty, *(pair[i] for pair in mine)], dim=1) for i in (0, 1)]
        out = ringattn.decode_attention(q, *shard)
        everything = [pair for held in keys for pair in held]
        whole = [torch.cat([pair[i] for pair in everything], dim=1) for i in (0, 1)]
        expected, _ = ringattn.block_attention(q, *whole)
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)
    return out


def test_a_growing_cache(ring):
    outs = ring.run(step_by_step, 12)
    assert all(torch.equal(out, outs[0]) for out in outs)


def count_flops(cache: Cache) -> int:
    with FlopCounterMode(display=False) as counter:
        ringattn.decode_attention(*cache.local_inputs())
    return counter.get_total_flops()


def test_flops_are_those_of_the_own_keys(ring):
    lengths = tuple(CACHES[ring.world_size][0])
    assert ring.run(count_flops, Cache(lengths, num_queries=3)) == [
        4 * 64 * 4 * 2 * 3 * length for length in lengths
    ]


def well_behaved(cache: Cache) -> None:
    name = torch.distributed.group.WORLD.group_name
    operator = torch.ops.ringattn.decode_attention
    q, k, v = cache.local_inputs()
    torch.library.opcheck(operator, (q, k, v, 0.1, name))
    lengths = torch.ones(2, dtype=torch.int32, device=q.device)
    torch.library.opcheck(operator, (q, k, v, 0.1, name, lengths))
    torch.library.opcheck(operator, (q, k, v, 0.1, name, None, lengths))
    if q.is_cuda:
        sinks = torch.ones(q.size(2), device=q.device)
        torch.library.opcheck(operator, (q, k, v, 0.1, name, lengths, lengths, 30.0, sinks))


def test_the_operator_is_well_behaved(ring):
    ring.run(well_behaved, Cache(tuple(CACHES[ring.world_size][0])))
