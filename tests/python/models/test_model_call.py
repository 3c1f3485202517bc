# SPDX-License-Identifier: Apache-2.0
"""One forward over the ranks: rows, columns and attention are those of one process."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from _distributed import RankPool, this
from ringattn import Partition, block_attention
from ringattn._distributed.groups import resolve_group
from ringattn._masks import CAUSAL, Mask
from ringattn.model_call import ModelCall
from ringattn.model_inputs import Padding

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
PROMPT, STEPS = 11, (1, 3, 1)  # tokens of the prompt, and of each step after it

#: Real tokens: all; padding before; padding after; both, down to one token.
MASKS = {
    "none": None,
    "before": [[0] * 3 + [1] * 8, [0] * 10 + [1]],
    "after": [[1] * 5 + [0] * 6, [1] * 11],
    "around": [[0, 0] + [1] * 6 + [0] * 3, [0] * 4 + [1] + [0] * 6],
}

#: A rank without tokens, and a last rank that has almost all.
LENGTHS = {1: [11], 2: [0, 11], 3: [4, 0, 7], 4: [1, 1, 0, 9]}


def padding_of(name: str) -> Padding | None:
    mask = MASKS[name]
    return None if mask is None else Padding.of(torch.tensor(mask))


def real_tokens(name: str) -> torch.Tensor:
    """bool [2, S]."""
    return torch.tensor(MASKS[name] or [[1] * PROMPT] * 2) != 0


def prefill(name: str, *, keeps: bool = False) -> ModelCall:
    ring, partition = resolve_group(None), Partition.zigzag(LENGTHS[this().world_size])
    padding, device = padding_of(name), this().device
    cache = ModelCall.new_cache(ring, partition, padding=padding, device=device) if keeps else None
    return ModelCall.prefill(ring, partition, cache=cache, padding=padding)


def test_padding_is_where_the_mask_has_none() -> None:
    padding = padding_of("around")
    assert padding == Padding((2, 4), (6, 1), PROMPT)
    assert padding.ends == (3, 6)
    assert torch.equal(padding.mask(torch.device("cpu")), real_tokens("around"))
    longer = padding.mask(torch.device("cpu"), new_tokens=2)
    assert torch.equal(longer[:, :PROMPT], real_tokens("around")) and longer[:, PROMPT:].all()
    assert padding_of("none") is None and Padding.of(torch.ones(2, 3)) is None


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1], [1, 0, 1]], "tokens of each row in one run, .* got a hole in row 1"),
        ([[0, 0, 0], [1, 1, 0]], "must have a token in each row, got none in 0"),
    ],
)
def test_other_padding_is_refused(mask: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Padding.of(torch.tensor(mask))


def rows_come_back(name: str) -> None:
    call, device = prefill(name), this().device
    x = torch.arange(2 * PROMPT * 3, device=device, dtype=torch.float32).view(2, PROMPT, 3) + 1
    rows = call.rows(x)
    assert rows.size(1) == max(1, call.num_rows)
    assert torch.equal(call.whole(rows), x)
    for columns in ([0], [-1], [7, 2, 7, -2], list(range(PROMPT))):
        # A rank without tokens may have a row that is not its own, or none.
        for mine in (rows, call.own(rows)):
            chosen = call.select(mine, torch.tensor(columns))
            assert torch.equal(chosen, x[:, columns])
    mine = call.own(rows).clone().requires_grad_()
    assert call.select(mine, torch.tensor([0])).requires_grad  # backwards are collective
    assert torch.equal(call.last(rows, 4), x[:, -4:])
    assert torch.equal(call.last(rows, 99), x)
    positions = torch.arange(PROMPT, device=device)[None, :].expand(2, -1)
    assert torch.equal(call.position_ids(device).expand(2, -1), call.rows(positions))


@pytest.mark.nccl
@pytest.mark.parametrize("name", MASKS)
def test_rows_and_columns_come_back_in_the_order_of_the_caller(ring: RankPool, name: str) -> None:
    ring.run(rows_come_back, name)


def heads(num_tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(2, num_tokens, num, HEAD_DIM) for num in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def attended(
    name: str, mask: Mask = CAUSAL, sinks: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Attention of a prompt and of the steps after it, over the ring, put together."""
    device = this().device
    call = prefill(name, keeps=True)
    q, k, v = (call.rows(x.to(device)) for x in heads(PROMPT, seed=0))
    sinks = None if sinks is None else sinks.to(device)
    outs = [call.whole(call.attend(5, q, k, v, None, mask, sinks))]
    assert call.cache is not None
    for step, num_tokens in enumerate(STEPS, start=1):
        call = ModelCall.decode(call.ring, call.cache, num_tokens)
        q, k, v = (x.to(device) for x in heads(num_tokens, seed=step))
        assert call.position_ids(device)[0, 0] == call.num_before
        assert call.num_before == PROMPT + sum(STEPS[: step - 1])
        outs.append(call.attend(5, q, k, v, None, mask, sinks))
    return [out.cpu() for out in outs]


def on_one_process(
    name: str, mask: Mask = CAUSAL, sinks: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """The same, row by row over its real tokens; NaN where a token is padding."""
    parts = [heads(PROMPT, seed=0), *(heads(n, seed=i) for i, n in enumerate(STEPS, start=1))]
    q, k, v = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
    real = torch.cat((real_tokens(name), torch.ones(2, sum(STEPS), dtype=torch.bool)), 1)
    whole = torch.full_like(q, torch.nan)
    for row in range(2):
        own = [x[row : row + 1, real[row]] for x in (q, k, v)]
        places = torch.arange(own[0].size(1), dtype=torch.int32)
        left = mask.window_size[0] if mask.window_size[0] >= 0 else places.numel()
        ranges = torch.stack(((places - left).clamp(min=0), places + 1), 1)
        out, _ = block_attention(*own, key_ranges=ranges, softcap=mask.softcap, sinks=sinks)
        whole[row, real[row]] = out[0]
    return list(whole.split((PROMPT, *STEPS), 1))


@pytest.mark.nccl
@pytest.mark.parametrize("name", MASKS)
def test_attention_of_a_prompt_and_of_what_follows_is_that_of_one_process(
    ring: RankPool, name: str
) -> None:
    expected = on_one_process(name)
    for outs in ring.run(attended, name):
        for out, right in zip(outs, expected, strict=True):
            seen = ~right.isnan()
            assert seen.any()
            torch.testing.assert_close(out[seen], right[seen], rtol=0, atol=2e-6)


WINDOWS = [Mask(window_size=(left, -1)) for left in (0, 2, 7)]
SINKS = torch.linspace(-1, 2, HEADS)


@pytest.mark.nccl
@pytest.mark.parametrize("name", MASKS)
def test_windows_softcap_and_sinks_are_those_of_one_process(ring: RankPool, name: str) -> None:
    capped = [] if name in ("after", "around") else [Mask(window_size=(2, -1), softcap=0.7)]
    for mask in (*WINDOWS, *capped, CAUSAL):
        for sinks in (None, SINKS):
            expected = on_one_process(name, mask, sinks)
            for outs in ring.run(attended, name, mask, sinks):
                for out, right in zip(outs, expected, strict=True):
                    seen = ~right.isnan()
                    torch.testing.assert_close(out[seen], right[seen], rtol=0, atol=2e-6)


def refuses_capped_padding_and_windows_out_of_order() -> None:
    device = this().device
    call = prefill("after", keeps=True)
    q, k, v = (call.rows(x.to(device)) for x in heads(PROMPT, seed=0))
    with pytest.raises(ValueError, match="padding before the tokens where scores have a softcap"):
        call.attend(5, q, k, v, None, Mask(softcap=1.0))
    partition = Partition.zigzag([9, 2])
    cache = ModelCall.new_cache(call.ring, partition, device=device, targets=[4, 8])
    call = ModelCall.prefill(call.ring, partition, cache=cache)
    q, k, v = (call.rows(x.to(device)) for x in heads(PROMPT, seed=0))
    call.attend(5, q, k, v, None)
    cache.rebalance()
    for num_tokens in (1, 2):
        call = ModelCall.decode(call.ring, cache, num_tokens)
        q, k, v = (x.to(device) for x in heads(num_tokens, seed=1))
        with pytest.raises(ValueError, match=r"order of the sequence .* got one that was rebal"):
            call.attend(5, q, k, v, None, WINDOWS[1])


def test_what_a_window_or_a_softcap_cannot_have_is_refused(rank_pool: Callable[..., Any]) -> None:
    rank_pool(2).run(refuses_capped_padding_and_windows_out_of_order)


def select_batch_rows(name: str) -> torch.Tensor:
    call, rows = prefill(name, keeps=True), torch.tensor([1, 0, 1])
    q, k, v = (call.rows(x.to(this().device)) for x in heads(PROMPT, seed=0))
    call.attend(5, q, k, v, scale=None)
    assert call.cache is not None
    call.cache.select(rows)
    step = ModelCall.decode(call.ring, call.cache)
    q, k, v = (x[rows].to(this().device) for x in heads(1, seed=1))
    return step.attend(5, q, k, v, scale=None).cpu()


@pytest.mark.nccl
@pytest.mark.parametrize("name", ["none", "before"])
def test_a_cache_goes_on_with_the_batch_rows_that_were_selected(ring: RankPool, name: str) -> None:
    expected = on_one_process(name)[1][[1, 0, 1]]
    for out in ring.run(select_batch_rows, name):
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-6)


def test_rows_of_padding_need_room_in_the_head_dimension_to_hide_keys() -> None:
    ring, partition = resolve_group("single"), Partition.zigzag([PROMPT])
    q = torch.zeros(2, PROMPT, 1, 256)
    with pytest.raises(
        ValueError, match="head dimension is above 248, got 256: put padding before"
    ):
        ModelCall.prefill(ring, partition, padding=padding_of("after")).attend(0, q, q, q, None)
    call = ModelCall.prefill(ring, partition, padding=padding_of("before"))
    assert call.attend(0, q, q, q, None).shape == q.shape


def test_rows_of_unequal_length_grow_past_the_room_of_an_unknown_number_of_tokens() -> None:
    ring, partition = resolve_group("single"), Partition.zigzag([PROMPT])
    padding = padding_of("before")
    cache = ModelCall.new_cache(ring, partition, padding=padding)
    call = ModelCall.prefill(ring, partition, cache=cache, padding=padding)
    call.attend(0, *(call.rows(x) for x in heads(PROMPT, seed=0)), scale=None)
    room = cache.capacity
    assert room > PROMPT
    for _ in range(room):
        step = ModelCall.decode(ring, cache)
        step.attend(0, *heads(1, seed=1), scale=None)
    assert cache.capacity > room and cache.seq_len == PROMPT + room
    assert cache.key_lengths is not None and cache.key_lengths.tolist() == [8 + room, 1 + room]
    keys, _ = cache.view(0)
    assert torch.equal(keys[1, 1 : 1 + room], heads(1, seed=1)[1][1].expand(room, -1, -1))
