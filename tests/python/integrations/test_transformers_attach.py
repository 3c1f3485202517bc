# SPDX-License-Identifier: Apache-2.0
"""What parallelize() changes of a model of transformers, and what it leaves as it was."""

import copy
import pickle
from typing import Any

import pytest
import ringattn
import ringattn.integrations.transformers  # registers "ringattn" as an attention implementation
import torch
from _distributed import RankPool, this
from _transformers import CACHE, WEIGHTS, assert_near, config_of, model_of, token_ids
from ringattn.integrations.transformers.attention import mask
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import StaticCache


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


def alone(**changes: Any) -> Any:
    """A model of one process, as from_pretrained(attn_implementation="ringattn") gives it."""
    model = model_of(device="cpu", **changes)
    model.set_attn_implementation("ringattn")
    return model


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_one_process_runs_it_as_an_attention_implementation(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 61, (2, 13), generator=generator)
    model, plain = alone(family=family), model_of(family, device="cpu")
    assert_near(model(ids).logits, plain(ids).logits)
    ones = torch.ones_like(ids)
    assert_near(model(ids, attention_mask=ones).logits, plain(ids).logits)
    for use_cache in (True, False):
        options = {"max_new_tokens": 5, "use_cache": use_cache}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    cache = model(ids[:, :9])[CACHE]
    for start, stop in ((9, 12), (12, 13)):
        logits = model(ids[:, start:stop], **{CACHE: cache}).logits
        assert_near(logits, plain(ids).logits[:, start:stop])
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, plain(ids).logits)


PADDED = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"attention_mask": PADDED}, "attention_mask must be all ones, got padding"),
        ({"family": "mistral", "sliding_window": 3}, {}, "window"),
        ({"family": "mistral", "sliding_window": 3}, {"use_cache": False}, "window"),
        (
            {},
            {"position_ids": torch.tensor([[0, 1, 0, 1]]), "use_cache": False},
            "got another mask .*packed",
        ),
        ({"attention_dropout": 0.5, "train": True}, {}, "dropout must be 0, got 0.5"),
    ],
    ids=["padding", "window", "window without cache", "packed", "dropout"],
)
def test_one_process_refuses_what_is_not_causal_attention(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    train = changes.pop("train", False)
    model = alone(**changes).train(train)
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 4, dtype=torch.int64), **options)


def within_blocks(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Causal, but for a block of the keys 1 and 2, which see each other."""
    return (key <= query) | ((query - 1) // 2 == (key - 1) // 2) & (query < 3)


def test_one_process_refuses_blocks_without_an_order() -> None:
    device = torch.device("cpu")
    for places in (
        {"q_offset": 0, "q_length": 4, "device": device},  # transformers 5
        {"cache_position": torch.arange(4)},  # and 4
    ):
        mask(batch_size=2, kv_length=4, mask_function=lambda *at: at[3] <= at[2], **places)
        with pytest.raises(ValueError, match="got another mask"):
            mask(batch_size=2, kv_length=4, mask_function=within_blocks, **places)


def test_one_process_refuses_a_static_cache() -> None:
    model = alone()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ValueError, match="static or sliding cache is not supported"):
        model(torch.ones(1, 4, dtype=torch.int64), **{CACHE: cache})


def unparallelized() -> None:
    model = alone().to(this().device)
    with pytest.raises(ValueError, match=r"group of 2: pass the model to ringattn.parallelize"):
        model(token_ids(4))


def test_the_error_on_several_ranks_names_parallelize(rank_pool: Any) -> None:
    rank_pool(2).run(unparallelized)
