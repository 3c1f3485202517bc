# SPDX-License-Identifier: Apache-2.0
"""What ranks give to a parallelized model of FMS must be the same on all of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import ringattn
import torch
from _agreement import DEVICES, cases, fails_at_once, refusal, returns_while_the_gpu_is_busy
from _distributed import RankPool, this
from torch import nn

fms_generation = pytest.importorskip("fms.utils.generation")

import ringattn.integrations.fms as ring_fms  # noqa: E402
from _fms import MODELS, check_close, initialized, padded, prompt, tiny, two_of  # noqa: E402

Pools = Callable[..., RankPool]


def _same(name: str) -> str:
    return f"{name} must be the same on all ranks, got different ones on ranks 0 and 1"


def _ids() -> dict[str, Any]:
    return {"x": prompt(2, 6)}


def _padding(*lengths: int) -> dict[str, Any]:
    return {**_ids(), **padded(*lengths)[1]}


def _positions(first: int) -> dict[str, Any]:
    return {**_ids(), "position_ids": torch.arange(first, first + 6, device=this().device)[None]}


#: What rank 0 and rank 1 give, and the error of both.
CALLS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]], str]] = {
    "ids": (_ids, lambda: {"x": prompt(2, 6, seed=5)}, _same("x")),
    "shards": (
        lambda: {"x": prompt(2, 6)[:, :3]},
        lambda: {"x": prompt(2, 6)[:, 3:]},
        _same("x"),
    ),
    "masks": (lambda: _padding(6, 4), lambda: _padding(6, 3), _same("mask")),
    "positions": (lambda: _positions(0), lambda: _positions(1), _same("position_ids")),
    "last tokens": (
        lambda: {**_ids(), "last_n_tokens": 1},
        lambda: {**_ids(), "last_n_tokens": 2},
        "last_n_tokens, got 1 on rank 0 and 2 on rank 1",
    ),
    "last token or all": (
        lambda: {**_ids(), "last_n_tokens": 1},
        _ids,
        "last_n_tokens, got 1 on rank 0 and 0 on rank 1",
    ),
    "a cache": (_ids, lambda: {**_ids(), "use_cache": True}, "use_cache, got False on rank 0"),
}


@torch.no_grad()
def calls_that_differ(name: str) -> list[str]:
    plain, model = two_of()
    ringattn.parallelize(model)
    *calls, message = CALLS[name]
    errors = []
    for known in (False, True):
        for each in calls if known else ():
            model(**each())
        mine = calls[this().rank]()
        errors.append(refusal(lambda given: model(**given), mine, _ids(), message))
        check_close(model(prompt(2, 6)), plain(prompt(2, 6)))
    return errors


@pytest.mark.parametrize(("name", "device_type"), cases(CALLS))
def test_calls_that_differ_fail_every_rank_at_once_or_a_call_later(
    rank_pool: Pools, name: str, device_type: str
) -> None:
    first, second = rank_pool(2, device_type).outcomes(calls_that_differ, name)
    assert first.ok and second.ok, (first.traceback, second.traceback)
    assert first.value == second.value


@torch.no_grad()
def steps_of_another_conversation() -> str:
    plain, model = two_of()
    ringattn.parallelize(model)
    caches = [model(prompt(2, 6, seed=seed), use_cache=True)[1] for seed in (3, 4)]
    one = {"x": prompt(2, 1), "use_cache": True, "past_key_value_states": caches[this().rank]}
    error = refusal(lambda given: model(**given), one, _ids(), "cache must be the same")
    if fails_at_once():  # neither was advanced
        for cache in caches:
            model(prompt(2, 1), use_cache=True, past_key_value_states=cache)
    check_close(model(prompt(2, 6)), plain(prompt(2, 6)))
    return error


@pytest.mark.parametrize("device_type", DEVICES)
def test_a_step_of_another_conversation_fails_every_rank(
    rank_pool: Pools, device_type: str
) -> None:
    first, second = rank_pool(2, device_type).run(steps_of_another_conversation)
    assert first == second == _same("cache")


class Failing(nn.Module):
    """A norm that fails once on rank 1."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.fails = norm, this().rank == 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory, say")
        return self.norm(x)


@torch.no_grad()
def steps_after_one_that_fails(part: str) -> None:
    model = tiny()
    layer = model.base_model.layers[1]
    model = ringattn.parallelize(model.base_model if part == "body" else model)
    _, cache = model(prompt(2, 6), use_cache=True)
    for num_tokens in (1, 3):
        ids, twin = prompt(2, num_tokens), copy.deepcopy(cache)
        right, _ = model(ids, past_key_value_states=twin, use_cache=True)
        norm, layer.ln = layer.ln, Failing(layer.ln)
        with pytest.raises((RuntimeError, ValueError), match="out of memory, say"):
            model(ids, past_key_value_states=cache, use_cache=True)
        layer.ln = norm
        out, cache = model(ids, past_key_value_states=cache, use_cache=True)
        assert torch.equal(out, right)


@pytest.mark.parametrize("part", ["body", "model"])
def test_a_step_that_fails_on_one_rank_fails_all_and_leaves_its_cache_as_it_was(
    rank_pool: Pools, part: str
) -> None:
    rank_pool(2).run(steps_after_one_that_fails, part)


@torch.no_grad()
def calls_while_the_gpu_is_busy() -> bool:
    model, given = ringattn.parallelize(tiny()), _ids()
    return returns_while_the_gpu_is_busy(lambda: model(**given))


@pytest.mark.multi_gpu(size=2)
@pytest.mark.nccl
def test_a_call_does_not_wait_for_the_gpu(rank_pool: Pools) -> None:
    assert rank_pool(2, "cuda").run(calls_while_the_gpu_is_busy) == [True, True]


# ---- generate -----------------------------------------------------------------------------------


def _hook(position: int, logits: Any, tokens: torch.Tensor, kwargs: Any) -> Any:
    return tokens, kwargs


def _fails(position: int, logits: Any, tokens: torch.Tensor, kwargs: Any) -> Any:
    if this().rank == 1 and position == 8:
        raise KeyError("a hook")
    return tokens, kwargs


def generations_that_differ() -> tuple[str, str]:
    model = ringattn.parallelize(tiny())
    settings = {"max_new_tokens": 5, "use_cache": True, "do_sample": False}
    ids = prompt(2, 6)
    right = ring_fms.generate(model, ids, **settings)
    hooks = {} if this().rank == 0 else {"post_iteration_hook": _hook}
    with pytest.raises(ValueError, match="post_iteration_hook must be the same on all ranks"):
        ring_fms.generate(model, ids, **settings, **hooks)
    with pytest.raises((KeyError, RuntimeError)) as error:
        ring_fms.generate(model, ids, **settings, post_iteration_hook=_fails)
    assert torch.equal(ring_fms.generate(model, ids, **settings), right)
    assert torch.equal(fms_generation.generate(model, ids, **settings), right)
    return type(error.value).__name__, str(error.value)


def test_hooks_on_one_rank_fail_every_rank(rank_pool: Pools) -> None:
    first, second = rank_pool(2).outcomes(generations_that_differ)
    assert first.value == ("RuntimeError", "rank 1 could not choose a token: 'a hook'"), first
    assert second.value == ("KeyError", "'a hook'"), second


# ---- weights ------------------------------------------------------------------------------------


def built_with_a_strategy(other: bool) -> nn.Module:
    strategy = ring_fms.RingAttentionStrategy()
    model = initialized(MODELS["llama"](distributed_strategy=strategy), seed=other * this().rank)
    with torch.no_grad():
        model(prompt(2, 6))


def test_weights_that_are_set_after_the_model_was_put_on_a_ring_are_compared(
    rank_pool: Pools,
) -> None:
    rank_pool(2).run(built_with_a_strategy, False)
    for outcome in rank_pool(2).outcomes(built_with_a_strategy, True):
        assert "must be the same on all ranks, got other values on rank 1" in outcome.message
