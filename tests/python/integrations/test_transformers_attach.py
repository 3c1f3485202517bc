# SPDX-License-Identifier: Apache-2.0
"""What parallelize() changes of a model of transformers, and what it leaves as it was."""

import copy
import gc
import itertools
import pickle
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import ringattn
import torch
import torch.nn.functional as F
from _distributed import RankPool, this
from _transformers import CACHE, MASKS, WEIGHTS, assert_near, config_of, model_of, token_ids
from ringattn.cache import ShardedKVCache
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb


def bits(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def undone() -> None:
    model, ids = model_of(), token_ids(13)
    attributes = [set(vars(module)) for module in model.modules()]
    before, configs = bits(model), id(model.config)
    logits, tokens = model(ids).logits, model.generate(ids, max_new_tokens=4)
    for partition in (None, WEIGHTS[this().world_size]):  # the second replaces the first
        ringattn.parallelize(model, partition=partition)
        assert list(model.state_dict()) == list(before)
        assert id(model.config) != configs
        assert_near(model(ids).logits, logits)
    for part in (model.model, model, model.model):  # each instead of the other
        ringattn.parallelize(part)
        assert_near(model(ids).logits, logits)
        assert torch.equal(model.generate(ids, max_new_tokens=4), tokens)
    assert ringattn.unparallelize(model) is model
    assert torch.equal(model(ids).logits, logits)
    assert torch.equal(model.generate(ids, max_new_tokens=4), tokens)
    assert [set(vars(module)) for module in model.modules()] == attributes
    assert id(model.config) == configs
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    ringattn.unparallelize(model)  # of a model on no ring: nothing
    assert torch.equal(model(ids).logits, logits)


@pytest.mark.nccl
def test_unparallelize_gives_back_the_model_bit_for_bit(ring: RankPool) -> None:
    ring.run(undone)


def test_what_is_set_in_a_config_stays_on_another_ring_and_on_none() -> None:
    model = model_of(device="cpu")
    given, implementation = model.config, model.config._attn_implementation
    given.untouched, given.grows = torch.ones(2), [1]
    untouched = given.untouched
    for value in (False, True, False):
        ringattn.parallelize(model, group="single")
        assert model.config.use_cache is not value
        model.config.use_cache = value
        model.config.a_field_of_mine = [value]
        model.config.grows.append(2)
    ringattn.parallelize(model, group="single")
    assert model.config.use_cache is False
    given.bos_token_id = 5  # through another reference
    ringattn.unparallelize(model)
    assert model.config is given
    assert (given.use_cache, given.a_field_of_mine, given.bos_token_id) == (False, [False], 5)
    assert given.untouched is untouched and given.grows == [1, 2, 2, 2]
    assert given._attn_implementation == implementation


def test_a_model_that_came_off_is_freed_with_its_last_reference() -> None:
    model = ringattn.parallelize(model_of(device="cpu"), group="single")
    model(torch.arange(1, 14)[None])
    ringattn.unparallelize(model)
    body = weakref.ref(model.model)
    gc.disable()
    try:
        del model
        assert body() is None
    finally:
        gc.enable()


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


def copied_layer(model: Any) -> None:
    model.model.layers[1] = copy.deepcopy(model.model.layers[1])


def copied_body(model: Any) -> None:
    model.model = copy.deepcopy(model.model)


def another_config(model: Any) -> None:
    model.config = copy.deepcopy(model.config)


def configs_of_their_own(change: Any) -> None:
    plain, ids = model_of(), token_ids(13)
    change(plain)
    configs = [id(getattr(module, "config", None)) for module in plain.modules()]
    model = copy.deepcopy(plain)
    change(model)
    assert_near(ringattn.parallelize(model)(ids).logits, plain(ids).logits)
    ringattn.parallelize(plain)
    own = {id(module.config) for module in plain.modules() if hasattr(module, "config")}
    assert len(own) == len({*configs} - {id(None)}) and not own & {*configs}
    ringattn.unparallelize(plain)
    assert [id(getattr(module, "config", None)) for module in plain.modules()] == configs


@pytest.mark.parametrize("change", [copied_layer, copied_body, another_config])
def test_parts_with_configs_of_their_own_attend_through_the_ring(
    rank_pool: Any, change: Any
) -> None:
    rank_pool(2).run(configs_of_their_own, change)


class Alone(LlamaAttention):
    """Attention that calls torch's function, as layers that others have patched do."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        q, k, v = (
            part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


def layers_alone() -> None:
    plain, ids = model_of(num_hidden_layers=3), token_ids(13)
    right = plain(ids).logits
    for is_first in (True, False):
        model = copy.deepcopy(plain)
        layers = model.model.layers
        if is_first:
            layers[1].self_attn.__class__ = Alone
            assert_near(model(ids, use_cache=False).logits, right)
            ringattn.parallelize(model)
        else:
            assert_near(ringattn.parallelize(model)(ids).logits, right)
            layers[1].self_attn.__class__ = Alone
        for _ in range(2):
            with pytest.raises(ValueError, match=r"^layers.1.self_attn must attend through the r"):
                model(ids)
        layers[1] = copy.deepcopy(plain.model.layers[1])
        with pytest.raises(ValueError, match=r"^layers.1.self_attn must attend through the r"):
            model(ids)
        # As PEFT keeps the module that it trains a copy of.
        layers[1].original = copy.deepcopy(plain.model.layers[1].self_attn)
        assert_near(ringattn.parallelize(model)(ids).logits, right)
    # Fewer layers: those that are left.
    plain.model.layers = plain.model.layers[:2]
    model.model.layers = model.model.layers[:2]
    assert_near(model(ids).logits, plain(ids).logits)
    model.config.num_hidden_layers = model.model.config.num_hidden_layers = 1
    plain.config.num_hidden_layers = 1
    assert_near(model(ids).logits, plain(ids).logits)
    for layer in model.model.layers:
        del layer.self_attn.is_causal
        layer.self_attn.__class__ = Alone
    with pytest.raises(ValueError, match=r"^every layer must attend through the ring"):
        model(ids)


def test_a_layer_that_attends_by_itself_fails_every_rank(rank_pool: Any) -> None:
    rank_pool(2).run(layers_alone)


class Failing(nn.Module):
    """A part of a model that fails once, on one rank alone where ``on_rank`` is one."""

    def __init__(self, part: nn.Module, on_rank: int | None = None) -> None:
        super().__init__()
        self.part, self.fails = part, on_rank in (None, this().rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            self.fails = False
            raise RuntimeError("out of memory, say")
        return self.part(x)


@contextmanager
def failing(owner: nn.Module, name: str, on_rank: int | None = None) -> Iterator[None]:
    """Within, a call that this part of a model fails, in words on every rank."""
    part = getattr(owner, name)
    setattr(owner, name, Failing(part, on_rank))
    alone = on_rank not in (None, this().rank)
    with pytest.raises((RuntimeError, ValueError), match="out of memory, say") as caught:
        yield
    assert str(caught.value).startswith(f"rank {on_rank}: ") == alone
    setattr(owner, name, part)


def after_an_exception(kind: Any, mask: list[list[int]] | None) -> None:
    plain, model = model_of(kind=kind), ringattn.parallelize(model_of(kind=kind))
    body = getattr(model, "model", model)
    fails: list[tuple[nn.Module, str, int | None]] = [
        (body.layers[1], "mlp", None),
        (body.layers[0], "mlp", 1),
    ]
    if body is not model:
        fails.append((model, "lm_head", None))
    ids, spoiled, cache, expected = token_ids(24), DynamicCache(), DynamicCache(), DynamicCache()
    real = torch.ones_like(ids)
    if mask is not None:
        real[:, :13] = ids.new_tensor(mask)
    stops = (13, 14, 17, 24)
    for start, stop in itertools.pairwise((0, *stops)):
        given = {"input_ids": ids[:, start:stop]}
        if mask is not None:
            given["attention_mask"] = real[:, :stop]
        for owner, name, on_rank in fails:
            with failing(owner, name, on_rank):
                model(**given, **{CACHE: spoiled})
            assert spoiled.get_seq_length() == start
        out, same, right = (
            each(**given, **{CACHE: held})[0]
            for each, held in ((model, spoiled), (model, cache), (plain, expected))
        )
        assert torch.equal(out, same)
        seen = real[:, start:stop] == 1
        assert_near(out[seen], right[seen])
        held = [each.layers[0].store for each in (spoiled, cache)]
        assert held[0].lengths == held[1].lengths and held[0].history == held[1].history


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel])
@pytest.mark.parametrize("mask", [None, MASKS["before"]], ids=["none", "padded"])
def test_a_call_that_fails_leaves_its_cache_as_it_was(
    rank_pool: Any, kind: Any, mask: list[list[int]] | None
) -> None:
    rank_pool(2).run(after_an_exception, kind, mask)


def after_a_head_that_fails() -> None:
    plain, model = model_of(), ringattn.parallelize(model_of())
    ids, cache = token_ids(8), DynamicCache()
    model(ids[:, :5], **{CACHE: cache})
    if this().rank == 1:
        with failing(model, "lm_head"):
            model(ids[:, 5:7], **{CACHE: cache})
    else:  # nothing was left to exchange
        model(ids[:, 5:7], **{CACHE: cache})
        with pytest.raises(ValueError, match="rank 1: out of memory, say"):
            model(ids[:, 7:], **{CACHE: cache})
        assert cache.get_seq_length() == 7
        cache.crop(-2)
    logits = model(ids[:, 5:], **{CACHE: cache}).logits
    assert_near(logits, plain(ids).logits[:, 5:])


def test_a_rank_that_hears_later_of_a_call_that_failed_crops_its_cache(rank_pool: Any) -> None:
    rank_pool(2).run(after_a_head_that_fails)


def after_a_cache_that_cannot_grow(kind: Any) -> None:
    model, ids = ringattn.parallelize(model_of(kind=kind)), token_ids(24)
    cache = DynamicCache()
    model(ids[:, :5], **{CACHE: cache})
    for start, stop in ((5, 6), (6, 24)):
        step = {"input_ids": ids[:, start:stop]}
        expected = model(**step, **{CACHE: copy.deepcopy(cache)})[0]
        short = mock.patch.object(ShardedKVCache, "advance", side_effect=MemoryError("no memory"))
        with (
            short if this().rank == 1 else nullcontext(),
            pytest.raises((MemoryError, ValueError), match="no memory"),
        ):
            model(**step, **{CACHE: cache})
        assert cache.get_seq_length() == start
        assert torch.equal(model(**step, **{CACHE: cache})[0], expected)


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel])
def test_a_rank_whose_cache_cannot_grow_keeps_the_cache_of_the_others(
    rank_pool: Any, kind: Any
) -> None:
    rank_pool(2).run(after_a_cache_that_cannot_grow, kind)


def compiled_without_tokens() -> None:
    """With inductor, which leaves out what reaches no result."""
    torch._dynamo.reset()
    plain, model = model_of(), ringattn.parallelize(model_of(), partition=[0, 1])
    compiled, ids = torch.compile(model), token_ids(9)
    assert_near(compiled(ids).logits, plain(ids).logits)
    for one in (plain, model):
        one.requires_grad_(True)
    loss = compiled(ids, labels=ids).loss
    assert_near(loss, plain(ids, labels=ids).loss)
    loss.backward()
    ringattn.all_reduce_gradients(model)
    plain(ids, labels=ids).loss.backward()
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_a_rank_without_tokens_has_its_part_in_a_compiled_model(rank_pool: Any) -> None:
    rank_pool(2).run(compiled_without_tokens)


@pytest.mark.parametrize("kind", [AutoModelForCausalLM, AutoModel])
def test_a_model_on_one_process_is_compiled_as_one_graph(kind: Any) -> None:
    model = ringattn.parallelize(model_of(kind=kind, device="cpu"), group="single")
    ids = torch.arange(1, 14)[None]
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert_near(compiled(ids)[0], model(ids)[0])
