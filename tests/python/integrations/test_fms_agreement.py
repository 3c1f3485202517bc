# SPDX-License-Identifier: Apache-2.0
"""What ranks give to a parallelized model of FMS must be the same on all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from torch import nn

fms_generation = pytest.importorskip("fms.utils.generation")

import ringattn.integrations.fms as ring_fms  # noqa: E402
from _fms import MODELS, initialized, padded, prompt, tiny, two_of  # noqa: E402

Pools = Callable[..., RankPool]


def _same(name: str) -> str:
    return f"{name} must be the same on all ranks, got different ones on ranks 0 and 1"


def _ids() -> dict[str, Any]:
    return {"x": prompt(2, 6)}


def _padding(*lengths: int) -> dict[str, Any]:
    ids, extra = padded(*lengths)
    return {"x": prompt(*ids.shape), **extra, "position_ids": padded(2, 6)[1]["position_ids"]}


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
        with pytest.raises(ValueError, match=message) as error:
            model(**calls[this().rank]())
        errors.append(str(error.value))
        torch.testing.assert_close(model(prompt(2, 6)), plain(prompt(2, 6)), atol=1e-4, rtol=1e-4)
    return errors


@pytest.mark.parametrize("name", CALLS)
def test_calls_that_differ_fail_at_once_on_every_rank(rank_pool: Pools, name: str) -> None:
    first, second = rank_pool(2).outcomes(calls_that_differ, name)
    assert first.ok and second.ok, (first.traceback, second.traceback)
    assert first.value == second.value


@torch.no_grad()
def steps_of_another_conversation() -> str:
    _, model = two_of()
    ringattn.parallelize(model)
    caches = [model(prompt(2, 6, seed=seed), use_cache=True)[1] for seed in (3, 4)]
    one = {"use_cache": True, "past_key_value_states": caches[this().rank]}
    with pytest.raises(ValueError, match="cache must be the same") as error:
        model(prompt(2, 1), **one)
    for cache in caches:  # neither was advanced
        model(prompt(2, 1), use_cache=True, past_key_value_states=cache)
    return str(error.value)


def test_a_step_of_another_conversation_fails_every_rank(rank_pool: Pools) -> None:
    first, second = rank_pool(2).run(steps_of_another_conversation)
    assert first == second == _same("cache")


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
