# SPDX-License-Identifier: Apache-2.0
"""What parallelize() changes of a model of transformers, and what it leaves as it was."""

import copy
import pickle
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _transformers import CACHE, WEIGHTS, assert_near, config_of, model_of, token_ids
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def undone() -> None:
    model, ids = model_of(), token_ids(13)
    attributes, before, configs = set(vars(model)), bits(model), id(model.config)
    logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=4)
    for partition in (None, WEIGHTS[this().world_size]):  # the second replaces the first
        ringattn.parallelize(model, partition=partition)
        assert list(model.state_dict()) == list(before)
        assert id(model.config) != configs
        assert_near(model(ids).logits, logits)
    assert ringattn.unparallelize(model) is model
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4), tokens)
    assert set(vars(model)) == attributes and id(model.config) == configs
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
    ringattn.unparallelize(model)  # of a model on no ring: nothing
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.nccl
def test_unparallelize_gives_back_the_model_bit_for_bit(ring: RankPool) -> None:
    ring.run(undone)


def copied() -> None:
    model, ids = ringattn.parallelize(model_of()), token_ids(13)
    logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=4)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(ids).logits, logits)
        assert twin(ids).get(CACHE).layers[0].store.lengths == [7, 6]
        twin.lm_head.weight.zero_()
        assert not twin(ids).logits.any() and torch.equal(model(ids).logits, logits)
        assert (twin.generate(ids, max_new_tokens=2)[:, 13:] == 0).all()
        ringattn.unparallelize(twin)
        assert not isinstance(twin(ids).get(CACHE).layers[0], type(model(ids).get(CACHE).layers[0]))
    assert torch.equal(model.generate(ids, max_new_tokens=4), tokens)


def test_copies_of_a_parallelized_model_run_by_themselves(rank_pool: Any) -> None:
    rank_pool(2).run(copied)


def with_one_config() -> None:
    config = config_of("llama")
    models = [AutoModelForCausalLM.from_config(config).eval() for _ in range(2)]
    ids = token_ids(13)
    with torch.no_grad():
        logits = models[1](ids).logits
        ringattn.parallelize(models[0])
        assert torch.equal(models[1](ids).logits, logits)
        assert models[0].config._attn_implementation == "ringattn"
        assert models[1].config._attn_implementation == "sdpa" and models[1].config is config


def test_a_model_with_the_same_config_stays_as_it_is(rank_pool: Any) -> None:
    rank_pool(2).run(with_one_config)


class Failing(nn.Module):
    """A layer's MLP that fails once."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp, self.fails = mlp, True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory, say")
        return self.mlp(x)


def after_an_exception() -> None:
    model, ids = ringattn.parallelize(model_of()), token_ids(13)
    logits, cache = model(ids).logits, DynamicCache()
    mlp = model.model.layers[1].mlp
    model.model.layers[1].mlp = Failing(mlp)
    with pytest.raises(RuntimeError, match="out of memory"):
        model(ids, **{CACHE: cache})
    assert cache.get_seq_length() == 0
    assert torch.equal(model(ids, **{CACHE: cache}).logits, logits)
    assert cache.get_seq_length() == 13


def test_a_call_that_fails_leaves_nothing_behind(rank_pool: Any) -> None:
    rank_pool(2).run(after_an_exception)
