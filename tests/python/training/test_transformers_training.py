# SPDX-License-Identifier: Apache-2.0
"""Losses and gradients of a parallelized model of transformers are the unmodified model's."""

import copy
import functools
import itertools
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _training import assert_near, assert_same_gradients, gradients_of, summed_gradients
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForTokenClassification, DynamicCache, LlamaForCausalLM

sys.path.append(str(Path(__file__).parents[1] / "integrations"))
from _transformers import CACHE, MASKED, MASKS, WEIGHTS, model_of, token_ids

SIZE = 13  # tokens of MASKS
DOCUMENTS = [0, 4, 5, 11, 13]

#: (family, changes of its config)
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in ("llama", "qwen3", "granite")},
    **{name: MASKED[name] for name in ("mistral", "qwen2", "gemma2", "gemma3", "gpt_oss")},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
}

#: Eager attention alone has their softcap or sinks. Its rows of padding are not defined.
EAGER = ("gemma2", "gpt_oss")

TOLERANCES = {torch.float32: 3e-5, torch.float64: 3e-6}  # losses are float32 in any case


def both(
    name: str = "llama", partition: Any = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any]:
    """(unmodified, parallelized), in training mode."""
    family, changes = MODELS[name]
    plain = model_of(family, **changes).to(dtype).requires_grad_(True).train()
    if name in EAGER:
        plain.set_attn_implementation("eager")
    return plain, ringattn.parallelize(copy.deepcopy(plain), partition=partition)


def partitions() -> Iterator[Any]:
    """Even; uneven with an empty rank, or one that has all."""
    yield None
    yield WEIGHTS[this().world_size]


def packed() -> dict[str, Any]:
    """Arguments of packed documents, as position ids say them."""
    pieces = [torch.arange(b - a) for a, b in itertools.pairwise(DOCUMENTS)]
    positions = torch.cat(pieces)[None].expand(2, -1).to(this().device)
    return {"position_ids": positions, "use_cache": False}


def calls(ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Arguments beside the ids."""
    some = ids.masked_fill(token_ids(SIZE, seed=5) % 3 == 0, -100)
    calls: dict[str, dict[str, Any]] = {
        "all": {"labels": ids},
        "some": {"labels": some},
        "counted": {"labels": some, "num_items_in_batch": 7},
        "counted by a tensor": {"labels": some, "num_items_in_batch": torch.tensor(5)},
        "shifted": {"labels": ids, "shift_labels": some.roll(-1, 1)},
        "first rank's": {"labels": torch.full_like(ids, -100).index_copy_(1, _few(), ids[:, :2])},
        "packed": {"labels": ids, **packed()},
    }
    for name, rows in MASKS.items():
        mask = torch.tensor(rows, device=this().device)
        counts = (mask != 0) & (mask.cumsum(1) > 1)  # a first token is predicted by padding
        calls[name] = {"labels": ids.masked_fill(~counts, -100), "attention_mask": mask}
        calls[f"{name}, and padding counts"] = {"labels": some, "attention_mask": mask}
    return calls


def _few() -> torch.Tensor:
    return torch.tensor([1, 2], device=this().device)


def losses_agree(name: str, kinds: tuple[str, ...], dtype: torch.dtype = torch.float32) -> None:
    ids, tolerance = token_ids(SIZE), TOLERANCES[dtype]
    options_of = calls(ids)
    for partition in partitions():
        plain, model = both(name, partition, dtype)
        for kind in kinds or options_of:
            options = options_of[kind]
            expected, output = plain(ids, **options).loss, model(ids, **options)
            assert_near(output.loss, expected, tolerance)
            assert output[0] is output.loss
            right = gradients_of(plain, expected)
            output.loss.backward()
            assert_same_gradients(summed_gradients(model), right, tolerance)
            with torch.no_grad():
                assert_near(model(ids, **options).loss, expected, tolerance)


@pytest.mark.nccl
def test_losses_and_gradients_are_those_of_the_unmodified_model(ring: RankPool) -> None:
    ring.run(losses_agree, "llama-tied", ())


#: Some calls of :func:`calls`. Softcaps refuse padding behind tokens; gpt-oss takes no documents
#: from position ids in eager attention.
KINDS = {
    **dict.fromkeys(MODELS, ("some", "packed", "around")),
    "gemma2": ("some", "packed", "before"),
    "gpt_oss": ("some", "counted", "before", "after"),
}


@pytest.mark.nccl
@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-tied"])
def test_so_are_those_of_other_families(rank_pool: Any, name: str) -> None:
    rank_pool(3).run(losses_agree, name, KINDS[name])


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_in_float64_they_are_closer(rank_pool: Any, name: str) -> None:
    rank_pool(2).run(losses_agree, name, KINDS[name], torch.float64)


def documents_by_boundaries_agree() -> None:
    ids, ends = token_ids(SIZE), torch.tensor(DOCUMENTS, dtype=torch.int32, device=this().device)
    for partition in partitions():
        plain, model = both("llama", partition)
        expected = plain(ids, labels=ids, **packed())
        options = {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, **packed()}
        for use_cache in (False, None):  # the config's is True: keys are not kept in training
            loss = model(ids, labels=ids, **{**options, "use_cache": use_cache}).loss
            assert_near(loss, expected.loss, 3e-5)
            loss.backward()
            right = gradients_of(plain, plain(ids, labels=ids, **packed()).loss)
            assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_packed_documents_given_by_their_boundaries_train(ring: RankPool) -> None:
    ring.run(documents_by_boundaries_agree)


def own_losses_agree() -> None:
    ids = token_ids(SIZE)
    for partition in partitions():
        plain, model = both("llama-tied", partition)

        def weighted(x: Any) -> torch.Tensor:
            weights = torch.linspace(0.5, 2, x.numel(), device=x.device).view(x.shape)
            return (x.tanh() * weights).sum()

        last = torch.tensor([11, 0, 5], device=this().device)
        for options in (
            {},
            {"logits_to_keep": 2},
            {"logits_to_keep": last},
            {"return_dict": False},
        ):
            expected, given = plain(ids, **options)[0], model(ids, **options)[0]
            assert torch.allclose(given, expected, rtol=1e-4, atol=1e-4)
            right = gradients_of(plain, weighted(expected))
            weighted(given).backward()
            assert_same_gradients(summed_gradients(model), right, 3e-5)
        options = {"output_hidden_states": True}
        right = gradients_of(plain, weighted(torch.stack(plain(ids, **options).hidden_states)))
        weighted(torch.stack(model(ids, **options).hidden_states)).backward()
        assert_same_gradients(summed_gradients(model), right, 3e-5)
        # Without a head.
        plain, body = plain.model, ringattn.unparallelize(model).model
        model = ringattn.parallelize(body, partition=partition)
        right = gradients_of(plain, weighted(plain(ids).last_hidden_state))
        weighted(model(ids).last_hidden_state).backward()
        assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_a_loss_of_ones_own_on_whole_logits_has_the_right_gradients(ring: RankPool) -> None:
    ring.run(own_losses_agree)


def embeddings_get_gradients() -> None:
    ids = token_ids(SIZE)
    for partition in partitions():
        plain, model = both("llama", partition)
        plain.requires_grad_(False), model.requires_grad_(False)
        given = plain.get_input_embeddings()(ids).requires_grad_(True)
        plain(inputs_embeds=given, labels=ids).loss.backward()
        expected, given.grad = given.grad, None
        model(inputs_embeds=given, labels=ids).loss.backward()
        torch.distributed.all_reduce(given.grad)
        assert_same_gradients({"x": given.grad}, {"x": expected}, 3e-5)


def test_embeddings_that_are_given_get_this_ranks_part_of_their_gradient(rank_pool: Any) -> None:
    rank_pool(3).run(embeddings_get_gradients)


def memory_agrees() -> None:
    """The last hidden states of one call come before the tokens of the next one."""
    ids = token_ids(SIZE)
    labels = torch.cat((ids.new_full((ids.size(0), 4), -100), ids), 1)

    def summed(grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        torch.distributed.all_reduce(grad)
        return grad

    for partition in partitions():
        plain, model = both("llama", partition)
        losses = []
        for one in (plain, model):
            memory = one(ids, output_hidden_states=True).hidden_states[-1][:, -4:]
            if one is model:
                memory.register_hook(summed)
            embeds = torch.cat((memory, one.get_input_embeddings()(ids)), 1)
            warned = pytest.warns(UserWarning, match="inputs_embeds must not depend on what")
            with warned if one is model else warnings.catch_warnings():
                if one is plain:
                    warnings.filterwarnings("error", message="inputs_embeds must")
                losses.append(one(inputs_embeds=embeds, labels=labels).loss)
        losses[1].backward()
        expected = gradients_of(plain, losses[0])
        assert_same_gradients(summed_gradients(model), expected, 3e-5)


def test_results_may_go_into_another_call_with_a_sum_over_ranks(rank_pool: Any) -> None:
    rank_pool(3).run(memory_agrees)


def frozen_parts_agree() -> None:
    ids = token_ids(SIZE)
    for partition in partitions():
        plain, model = both("llama", partition)
        for trained in ("lm_head", "layers.1.mlp", "layers.0.self_attn.v_proj", "embed_tokens"):
            for each in (plain, model):
                for name, parameter in each.named_parameters():
                    parameter.requires_grad_(trained in name)
            right = gradients_of(plain, plain(ids, labels=ids).loss)
            model(ids, labels=ids).loss.backward()
            assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_parts_of_a_model_may_be_frozen(rank_pool: Any) -> None:
    rank_pool(3).run(frozen_parts_agree)


def checkpointed_layers_agree() -> None:
    ids = token_ids(SIZE)
    for partition in partitions():
        for use_reentrant in (False, True):
            plain, model = both("qwen2", partition)
            options = {"use_reentrant": use_reentrant}
            for each in (plain, model):
                each.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)
            kinds = {kind: calls(ids)[kind] for kind in ("some", "packed", "before")}
            # The config's use_cache is True: no cache is kept where layers are computed again.
            kinds["packed by default"] = {**kinds["packed"], "use_cache": None}
            for call in kinds.values():
                right = gradients_of(plain, plain(ids, **call).loss)
                model(ids, **call).loss.backward()
                assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_layers_may_be_computed_again_in_the_backward(ring: RankPool) -> None:
    ring.run(checkpointed_layers_agree)


def caches_are_refused_where_layers_are_computed_again() -> None:
    ids = token_ids(SIZE)
    _, model = both()
    model.gradient_checkpointing_enable()
    cache = DynamicCache()
    with pytest.raises(ValueError, match=f"{CACHE} must be left out where layers are computed"):
        model(ids, labels=ids, **{CACHE: cache})
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        model(ids, **{CACHE: cache})
    assert cache.get_seq_length() == SIZE


def test_a_cache_is_refused_where_layers_are_computed_again(rank_pool: Any) -> None:
    rank_pool(2).run(caches_are_refused_where_layers_are_computed_again)


def cache_keeps_its_keys() -> None:
    ids, cache = token_ids(SIZE), DynamicCache()
    plain, model = both()
    right = gradients_of(plain, plain(ids, labels=ids).loss)
    for layer in model.model.layers:  # not by transformers, which keeps no cache then
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
    loss = model(ids, labels=ids, **{CACHE: cache}).loss
    with torch.no_grad():
        cache.crop(-3)
        model(ids[:, :3].flip(1), **{CACHE: cache})
        step = {"input_ids": ids[:, :1], CACHE: copy.deepcopy(cache)}
        expected = model(**step).logits
    loss.backward()
    assert_same_gradients(summed_gradients(model), right, 3e-5)
    with torch.no_grad():
        assert torch.equal(model(ids[:, :1], **{CACHE: cache}).logits, expected)


def test_a_layer_that_is_computed_again_writes_to_no_cache(rank_pool: Any) -> None:
    rank_pool(2).run(cache_keeps_its_keys)


def checkpointed_model_agrees() -> None:
    ids = token_ids(SIZE)
    plain, model = both()
    right = gradients_of(plain, plain(ids, labels=ids).loss)
    with mock.patch("ringattn.integrations.forward.report_to_peers") as report:
        loss = checkpoint(lambda: model(ids, labels=ids).loss * 1, use_reentrant=False)
        loss.backward()
    assert_same_gradients(summed_gradients(model), right, 3e-5)
    # The second forward ends with an exception, behind the last tensor that the backward needs.
    assert not report.called


def test_a_whole_model_may_be_computed_again_in_the_backward(rank_pool: Any) -> None:
    rank_pool(2).run(checkpointed_model_agrees)


def dropout_is_drawn() -> list[float]:
    torch.manual_seed(3 + this().rank)
    plain = model_of("phi3", resid_pdrop=0.3, embd_pdrop=0.3).requires_grad_(True)
    model, ids = ringattn.parallelize(plain), token_ids(SIZE)
    losses = [model(ids, labels=ids).loss.item()]
    model.train()
    for _ in range(2):
        loss = model(ids, labels=ids).loss
        loss.backward()
        losses.append(loss.item())
    assert all(x.grad.isfinite().all() for x in model.parameters())
    return losses


def test_dropout_outside_of_attention_is_drawn_by_each_rank(rank_pool: Any) -> None:
    losses = rank_pool(2).run(dropout_is_drawn)
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 3


def a_step_without_a_backward() -> None:
    ids = token_ids(SIZE)
    plain, model = both("llama", WEIGHTS[this().world_size])
    model(ids, labels=ids)
    right = gradients_of(plain, plain(ids, labels=ids).loss)
    model(ids, labels=ids).loss.backward()
    assert_same_gradients(summed_gradients(model), right, 3e-5)


def test_a_backward_may_be_left_out_by_all_ranks(rank_pool: Any) -> None:
    rank_pool(3).run(a_step_without_a_backward)


#: (arguments beside the ids, of rank 1 where they differ; what the error says)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "labels that differ": ({"labels": 1}, "labels must be the same on all ranks"),
    "shifted labels that differ": (
        {"shift_labels": 1},
        "shift_labels must be the same on all ranks",
    ),
    "counts that differ": ({"num_items_in_batch": 3}, "num_items_in_batch must be the same on all"),
    "a count on one rank": ({"num_items_in_batch": None}, "num_items_in_batch must be the same on"),
    "shifted labels on one rank": ({"shift_labels": None}, "labels must be the same on all ranks"),
    "ignored labels that differ": ({"ignore_index": 3}, "ignore_index must be the same on all"),
    "labels on one rank": ({"labels": None}, "ranks must agree on labels"),
    "documents on one rank": (
        dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor(DOCUMENTS)),
        "cu_seq_lens_q must be the same on all ranks",
    ),
    "grad mode on one rank": ({"grad": False}, "ranks must agree on gradients"),
    "labels of another shape": (
        {"labels": torch.ones(2, 3)},
        r"labels must be \[B, S\], \[2, 13\]",
    ),
    "labels of some columns": ({"logits_to_keep": 3}, "logits_to_keep must be 0 where labels are"),
    "router losses": (
        {"output_router_logits": True},
        "output_router_logits must be False, got True",
    ),
    "attentions": ({"output_attentions": True}, "output_attentions must be False, got True"),
}


def wrong_calls() -> None:
    plain, model = both("llama", WEIGHTS[this().world_size])
    ids = token_ids(SIZE)
    expected = plain(ids, labels=ids).loss
    for changes, message in WRONG.values():
        options = {"labels": ids, "shift_labels": ids, "num_items_in_batch": 5}
        changes, grad = dict(changes), True
        if this().rank == 1:
            grad = changes.pop("grad", True)
            for name, change in changes.items():
                options[name] = (
                    ids + change
                    if isinstance(change, int) and name in ("labels", "shift_labels")
                    else change
                )
        if "shift_labels" not in changes:
            options.pop("shift_labels")
        with torch.set_grad_enabled(grad), pytest.raises(ValueError, match=message):
            model(ids, **options)
        assert_near(model(ids, labels=ids).loss, expected, 3e-5)


def test_what_ranks_disagree_about_is_an_error_on_all(rank_pool: Any) -> None:
    rank_pool(2).run(wrong_calls)


def labels_without_a_logit() -> str:
    plain, model = both()
    ids, place = token_ids(SIZE), ringattn.Partition.even(SIZE, 2).position_ids(1)[0]
    labels = ids.index_fill(1, place + 1, -1)  # of a row of rank 1
    with pytest.raises((IndexError, ValueError), match="Target -1 is out of bounds") as error:
        model(ids, labels=labels)
    assert_near(model(ids, labels=ids).loss, plain(ids, labels=ids).loss, 3e-5)
    return str(error.value)


def test_what_fails_in_the_model_of_one_rank_is_an_error_on_all(rank_pool: Any) -> None:
    messages = rank_pool(2).run(labels_without_a_logit)
    assert messages[0] == f"rank 1: {messages[1]}"


def forward_with_a_loss_of_its_own(
    self: Any, input_ids: Any = None, labels: Any = None, **kwargs: Any
) -> Any:
    output = LlamaForCausalLM.forward(self, input_ids, labels=labels, **kwargs)
    output.loss = output.loss + output.logits.logsumexp(-1).square().mean()
    return output


def refused_calls() -> None:
    ids = token_ids(SIZE)
    plain, model = both()
    with pytest.raises(ValueError, match="must be called as a whole where gradients are recorded"):
        model.model(ids)
    with torch.no_grad():
        assert torch.isfinite(model.model(ids).last_hidden_state).all()
    given = model(ids, use_cache=True)
    with pytest.raises(ValueError, match="must be empty where gradients are recorded"):
        model(ids[:, :1], **{CACHE: given[CACHE]})
    with torch.no_grad():
        new, theirs = ids[:, :3], plain(ids, use_cache=True)[CACHE]
        expected = plain(new, labels=new, **{CACHE: theirs})
        given = model(new, labels=new, **{CACHE: given[CACHE]})
        assert_near(given.loss, expected.loss, 3e-5)
        step = plain(new[:, :1], **{CACHE: theirs}).logits
        assert torch.allclose(model(new[:, :1], **{CACHE: given[CACHE]}).logits, step, atol=1e-4)
    assert model(ids).get(CACHE) is None  # the config's use_cache: nothing is kept in training
    harmless = model_of().requires_grad_(True)
    harmless.forward = functools.partial(type(harmless).forward, harmless)
    ringattn.parallelize(harmless)(ids, labels=ids)
    renamed = model_of().requires_grad_(True)
    renamed.__class__ = type("Renamed", (type(renamed),), {})
    renamed.loss_type = None  # which transformers finds by the name of the class
    expected = harmless(ids, labels=ids).loss
    assert torch.equal(ringattn.parallelize(renamed)(ids, labels=ids).loss, expected)
    own, patched = (model_of().requires_grad_(True) for _ in range(2))
    own.__class__ = type("Own", (type(own),), {"forward": forward_with_a_loss_of_its_own})
    patched.forward = functools.wraps(patched.forward)(
        functools.partial(forward_with_a_loss_of_its_own, patched)
    )
    for refused in (own, patched):
        ringattn.parallelize(refused)
        with pytest.raises(ValueError, match="got forward_with_a_loss_of_its_own, whose loss may"):
            refused(ids, labels=ids)
    model.loss_function = lambda **kwargs: None
    with pytest.raises(ValueError, match="loss_function must be ForCausalLMLoss of transformers"):
        model(ids, labels=ids)
    family, changes = MODELS["llama"]
    for name in (None, "Renamed"):
        classifier = model_of(family, kind=AutoModelForTokenClassification, **changes)
        if name is not None:
            classifier.__class__ = type(name, (type(classifier),), {})
            classifier.loss_type = None
        ringattn.parallelize(classifier.requires_grad_(True))
        with pytest.raises(ValueError, match="must be a causal language model, or one without a"):
            classifier(ids)
    dropping = ringattn.parallelize(model_of(attention_dropout=0.1).requires_grad_(True).train())
    with pytest.raises(ValueError, match="attention dropout must be 0, got"):
        dropping(ids, labels=ids)


def test_what_has_no_right_gradient_is_refused_by_name(rank_pool: Any) -> None:
    rank_pool(2).run(refused_calls)


def sum_beside_a_part() -> None:
    plain, model = both()
    ids = token_ids(SIZE)
    ringattn.unparallelize(model)
    ringattn.parallelize(model.model)
    expected, loss = plain(ids, labels=ids).loss, model(ids, labels=ids).loss
    assert_near(loss, expected, 3e-5)
    loss.backward()
    with pytest.raises(ValueError, match="parallelized part 'model', got one with a grad"):
        ringattn.all_reduce_gradients(model)
    ringattn.all_reduce_gradients(model.model)
    right = gradients_of(plain, expected)
    assert_same_gradients({name: x.grad for name, x in model.named_parameters()}, right, 3e-5)


class WithValues(nn.Module):
    """A value of each token, as wrappers for reinforcement learning have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.pretrained_model = model
        torch.manual_seed(3)
        self.value = nn.Linear(model.config.hidden_size, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        output = self.pretrained_model(ids, output_hidden_states=True)
        return self.value(output.hidden_states[-1]).square().mean() + output.logits.square().mean()


def sum_beside_a_model() -> None:
    plain, model = map(WithValues, both())
    ids = token_ids(SIZE)
    expected = plain(ids)
    model(ids).backward()
    with pytest.raises(ValueError, match="parallelized part 'pretrained_model', got one with a g"):
        ringattn.all_reduce_gradients(model)
    ringattn.all_reduce_gradients(model.pretrained_model)
    right = gradients_of(plain, expected)
    assert_same_gradients({name: x.grad for name, x in model.named_parameters()}, right, 3e-5)


@pytest.mark.parametrize("kind", [sum_beside_a_part, sum_beside_a_model])
def test_gradients_of_a_head_behind_a_part_are_whole_on_every_rank(
    rank_pool: Any, kind: Any
) -> None:
    rank_pool(2).run(kind)


def bound_forward() -> None:
    """As accelerate's unwrap_model(keep_fp32_wrapper=False) leaves it."""
    plain, model = both()
    ids = token_ids(SIZE)
    model.forward = types.MethodType(model.forward, model)
    assert_near(model(ids, labels=ids).loss, plain(ids, labels=ids).loss, 3e-5)
    ringattn.unparallelize(model)
    assert "forward" not in vars(model)
    assert_near(model(ids, labels=ids).loss, plain(ids, labels=ids).loss, 3e-5)


def test_a_forward_that_was_bound_to_its_model_is_the_same(rank_pool: Any) -> None:
    rank_pool(1).run(bound_forward)


def one_rank_skips_its_backward() -> str:
    _, model = both()
    ids = token_ids(SIZE)
    loss = model(ids, labels=ids).loss
    with pytest.raises((ValueError, RuntimeError)) as error:
        if this().rank == 0:
            loss.backward()
        else:
            model(ids, labels=ids)
    return str(error.value)


def test_a_backward_that_one_rank_leaves_out_is_an_error_on_all(rank_pool: Any) -> None:
    for message in rank_pool(2).run(one_rank_skips_its_backward):
        assert "ring_backward" in message
