# SPDX-License-Identifier: Apache-2.0
"""What ranks give to a parallelized model of transformers must be the same on all of them; where it
is not, every rank says so at once, on CUDA at the latest a call later, and the group works on."""

from collections.abc import Callable
from typing import Any

import pytest
import ringattn
import torch
from _agreement import cases, fails_at_once, refusal, returns_while_the_gpu_is_busy
from _distributed import RankPool, this
from _transformers import CACHE, assert_near, model_of, token_ids
from ringattn.parallel import unparallelize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from transformers import DynamicCache, LogitsProcessor, StoppingCriteria

Pools = Callable[..., RankPool]

_ONES = [[1] * 8, [1] * 8]
_EMBEDDED = torch.ones(2, 8, 64).tolist()
_PADDED = [[[0, 0] + [1] * 6, [1] * 8], [[0] * 3 + [1] * 5, [1] * 8]]


def _same(name: str) -> str:
    return rf"{name} must be the same on all ranks, got different ones on ranks 0 and 1"


def _cached(num_tokens: int, seed: int) -> Callable[[Any], dict[str, Any]]:
    def fill(model: Any) -> dict[str, Any]:
        cache = DynamicCache()
        model(token_ids(num_tokens, seed=seed), **{CACHE: cache})
        return {CACHE: cache, "input_ids": token_ids(1)}

    return fill


#: What rank 0 and rank 1 give beside ids [2, 8], and the error of both.
CALLS: dict[str, tuple[Any, Any, str]] = {
    "ids": ({}, {"input_ids": token_ids}, _same("input_ids")),
    "two ids": ({"input_ids": [[3, 1]]}, {"input_ids": [[1, 2]]}, _same("input_ids")),
    "shards": ("first half", "second half", _same("input_ids")),
    "lengths": ({}, {"input_ids": [[1, 2], [3, 4]]}, r"shape of input_ids, got \[2, 8\] on rank 0"),
    "embeddings": (
        {},
        {"input_ids": None, "inputs_embeds": _EMBEDDED},
        "the argument with the tokens, got 'input_ids' on rank 0 and 'inputs_embeds' on rank 1",
    ),
    "masks": (
        {"attention_mask": _PADDED[0]},
        {"attention_mask": _PADDED[1]},
        _same("attention_mask"),
    ),
    "one mask": ({}, {"attention_mask": _PADDED[1]}, _same("attention_mask")),
    "positions": (
        {"position_ids": [[*range(8)]]},
        {"position_ids": [[*range(1, 9)]]},
        _same("position_ids"),
    ),
    "one logit beside two": (
        {"logits_to_keep": 1},
        {"logits_to_keep": 2},
        "logits_to_keep, got 1 on rank 0 and 2 on rank 1",
    ),
    "one logit beside all": (
        {"logits_to_keep": 1},
        {"logits_to_keep": 0},
        "logits_to_keep, got 1 on rank 0 and 0 on rank 1",
    ),
    "columns": ({"logits_to_keep": [3]}, {"logits_to_keep": [5]}, _same("logits_to_keep")),
    "hidden states": ({}, {"output_hidden_states": True}, "output_hidden_states, got False on"),
    "a cache": ({"use_cache": False}, {}, "use_cache, got False on rank 0 and True on rank 1"),
    "labels": ({"labels": _ONES}, {"labels": _PADDED[0]}, _same("labels")),
    "conversations": (_cached(5, 2), _cached(5, 3), _same("cache")),
    "turns": (_cached(5, 2), _cached(6, 2), _same("cache")),
}


def _given(what: Any, model: Any) -> dict[str, Any]:
    ids = token_ids(8)
    if callable(what):
        return what(model)
    if isinstance(what, str):
        return {"input_ids": ids[:, :4] if what == "first half" else ids[:, 4:]}
    given: dict[str, Any] = {"input_ids": ids}
    for name, value in what.items():
        if value is token_ids:
            value = token_ids(8, seed=9)
        given[name] = torch.tensor(value, device=ids.device) if type(value) is list else value
    return given


def calls_that_differ(name: str) -> list[str]:
    plain, model = model_of(), ringattn.parallelize(model_of())
    first, second, message = CALLS[name]
    ids, errors = token_ids(8), []
    for known in (False, True):
        if known:  # both kinds of call have been made before, by all ranks
            for each in (first, second):
                if not isinstance(each, str) and not callable(each):
                    model(**_given(each, model))
        if callable(first):  # the ranks make both caches, and take different ones
            caches = [first(model), second(model)]
            mine = caches[this().rank]
        else:
            mine = _given((first, second)[this().rank], model)
        errors.append(refusal(lambda given: model(**given), mine, {"input_ids": ids}, message))
        assert_near(model(ids).logits, plain(ids).logits)
        if callable(first) and fails_at_once():  # neither was advanced
            for cache, each in zip(caches, (first, second), strict=True):
                again = each(model)
                assert_near(model(**cache).logits, model(**again).logits)
    return errors


@pytest.mark.parametrize(("name", "device_type"), cases(CALLS))
def test_calls_that_differ_fail_every_rank_at_once_or_a_call_later(
    rank_pool: Pools, name: str, device_type: str
) -> None:
    first, second = rank_pool(2, device_type).outcomes(calls_that_differ, name)
    assert first.ok and second.ok, (first.traceback, second.traceback)
    assert first.value == second.value


def new_kinds_of_calls_differ() -> str:
    plain, model = model_of(), ringattn.parallelize(model_of())
    ids = token_ids(8)
    with pytest.raises(ValueError, match="ranks must agree on logits_to_keep") as error:
        model(ids, logits_to_keep=1 + this().rank)
    assert_near(model(ids).logits, plain(ids).logits)
    return str(error.value)


@pytest.mark.multi_gpu(size=2)
@pytest.mark.nccl
def test_kinds_of_calls_that_are_new_to_all_ranks_differ_at_once_on_gpus_too(
    own_pool: Pools,
) -> None:
    message = "ranks must agree on logits_to_keep, got 1 on rank 0 and 2 on rank 1"
    assert own_pool(2, "cuda").run(new_kinds_of_calls_differ) == [message] * 2


def calls_while_the_gpu_is_busy() -> bool:
    model, ids = ringattn.parallelize(model_of()), token_ids(8)
    return returns_while_the_gpu_is_busy(lambda: model(ids, logits_to_keep=1))


@pytest.mark.multi_gpu(size=2)
@pytest.mark.nccl
def test_a_call_does_not_wait_for_the_gpu(rank_pool: Pools) -> None:
    assert rank_pool(2, "cuda").run(calls_while_the_gpu_is_busy) == [True, True]


# ---- generate -----------------------------------------------------------------------------------


class Stops(StoppingCriteria):
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        if self.fails:
            raise KeyError("a criterion")
        done = input_ids.size(1) >= 11 - this().rank
        return torch.full((input_ids.size(0),), done, device=input_ids.device)


class Processor(LogitsProcessor):
    def __init__(self, fails: bool = False) -> None:
        self.fails = fails

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.fails and input_ids.size(1) == 10:
            raise KeyError("a processor")
        return scores


class Streamer:
    def __init__(self, fails: bool = False) -> None:
        self.fails, self.given = fails, []
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        if self.fails and len(self.given) == 2:
            raise KeyError("a streamer")
        self.given.append(value)

    def end(self) -> None:
        self.ended = True


#: Arguments that rank 1 gives and rank 0 does not; the errors of both.
GENERATIONS: dict[str, tuple[dict[str, Any], str, str]] = {
    "a criterion": (
        {"stopping_criteria": [Stops()]},
        "stopping_criteria must be the same on all ranks, got ['MaxLengthCriteria'] on rank 0 and "
        "['MaxLengthCriteria', 'Stops'] on rank 1",
        "",
    ),
    "a clock": (
        {"max_time": 1.0},
        "stopping_criteria must be the same on all ranks, got ['MaxLengthCriteria'] on rank 0 and "
        "['MaxLengthCriteria', 'MaxTimeCriteria'] on rank 1",
        "",
    ),
    "a processor": (
        {"logits_processor": [Processor()]},
        "logits_processor must be the same on all ranks, got [] on rank 0 and ['Processor'] on "
        "rank 1",
        "",
    ),
    "ids": (
        {"inputs": "other"},
        "input_ids must be the same on all ranks, got different ones on ranks 0 and 1",
        "",
    ),
    "an unknown argument": ({"colour": 1}, "rank 1: ", "colour"),
    "beams": ({"num_beams": 2}, "rank 1: generation must be greedy or sampling", "generation must"),
    "a custom loop": ({"custom_generate": "x/y"}, "rank 1: custom_generate", "custom_generate"),
    "a streamer that fails": ({"streamer": "fails"}, "rank 1: 'a streamer'", "'a streamer'"),
    "a processor that fails": (
        {"logits_processor": "fails"},
        "rank 1 could not draw a token: 'a processor'",
        "'a processor'",
    ),
    "a criterion that fails": (
        {"stopping_criteria": "fails"},
        "rank 1 could not test whether to stop: 'a criterion'",
        "'a criterion'",
    ),
}


def _arguments(given: dict[str, Any]) -> dict[str, Any]:
    fails, ids = this().rank == 1, token_ids(8)
    arguments: dict[str, Any] = {"inputs": ids, "max_new_tokens": 6}
    kinds = {"streamer": Streamer, "logits_processor": Processor, "stopping_criteria": Stops}
    for name, value in given.items():
        if value == "fails":
            made: Any = kinds[name](fails)
            arguments[name] = made if name == "streamer" else [made]
        elif fails:
            arguments[name] = token_ids(8, seed=5) if name == "inputs" else value
    return arguments


def generations_that_differ(name: str) -> tuple[str, str]:
    model = ringattn.parallelize(model_of())
    right = model_of().generate(token_ids(8), max_new_tokens=6)
    with pytest.raises(Exception, match=r".") as error:
        model.generate(**_arguments(GENERATIONS[name][0]))
    assert torch.equal(model.generate(token_ids(8), max_new_tokens=6), right)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("name", GENERATIONS)
def test_generations_that_differ_fail_at_once_on_every_rank(rank_pool: Pools, name: str) -> None:
    first, second = rank_pool(2).outcomes(generations_that_differ, name)
    assert first.ok and second.ok, (first.traceback, second.traceback)
    _, of_first, of_second = GENERATIONS[name]
    assert first.value[1].startswith(of_first), first.value
    assert (of_second or of_first) in second.value[1], second.value
    if "fails" in name:  # the caller's exception comes out unchanged
        assert second.value[0] == "KeyError"


def one_generates() -> str:
    model = ringattn.parallelize(model_of())
    ids = token_ids(8)
    model.generate(ids, max_new_tokens=2)
    with pytest.raises(ValueError, match="on rank 0 and") as error:
        model.generate(ids, max_new_tokens=2) if this().rank else model(ids)
    right = model_of().generate(ids, max_new_tokens=2)
    assert torch.equal(model.generate(ids, max_new_tokens=2), right)
    return str(error.value)


def test_a_generation_beside_a_call_fails_at_once_on_every_rank(rank_pool: Pools) -> None:
    first, second = rank_pool(2).outcomes(one_generates)
    assert first.ok and second.ok, (first.traceback, second.traceback)
    assert (
        first.value
        == second.value
        == ("ranks must agree on operator, got forward on rank 0 and generate on rank 1")
    )


def streamed(positional: bool) -> list[torch.Tensor] | None:
    model, ids = ringattn.parallelize(model_of()), token_ids(8, batch=1)
    streamer = Streamer() if this().rank == 0 else None
    if positional:
        config = model.generation_config
        config.max_new_tokens = 5
        tokens = model.generate(ids, config, None, None, None, None, None, streamer)
    else:
        tokens = model.generate(ids, max_new_tokens=5, streamer=streamer)
    if streamer is None:
        return None
    assert streamer.ended
    assert torch.equal(torch.cat([x.flatten() for x in streamer.given]), tokens.flatten().cpu())
    assert tokens.size(1) == 13
    return streamer.given


@pytest.mark.parametrize("positional", [False, True])
def test_the_stream_of_the_first_rank_has_all_tokens(rank_pool: Pools, positional: bool) -> None:
    rank_pool(2).run(streamed, positional)


# ---- weights ------------------------------------------------------------------------------------


def _exchange_rows(model: nn.Module) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight[[0, 1]] = weight[[1, 0]].clone()


def _other_buffer(model: nn.Module) -> None:
    model.model.rotary_emb.inv_freq[3] += 1


def _more(model: nn.Module) -> None:
    model.register_buffer("extra", torch.zeros(1))


def _other_dtype(model: nn.Module) -> None:
    model.lm_head.half()


def _all(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.normal_()


#: What happens to the weights of rank 1, and a part of the error of both.
WEIGHTS: dict[str, tuple[Callable[[nn.Module], None], str]] = {
    "rows": (
        _exchange_rows,
        "model.layers.1.mlp.up_proj.weight must be the same on all ranks, got other values on rank "
        "1 than on rank 0",
    ),
    "buffers": (_other_buffer, "model.rotary_emb.inv_freq must be the same on all ranks"),
    "names": (_more, "got extra on rank 1 and none on rank 0"),
    "dtypes": (
        _other_dtype,
        "lm_head.weight must be the same on all ranks, got torch.float32 [61, 64] on rank 0 and "
        "torch.float16 [61, 64] on rank 1",
    ),
    "seeds": (_all, "(and 20 more) must be the same on all ranks"),
}


def other_weights(name: str) -> str:
    model = model_of()
    if this().rank == 1:
        WEIGHTS[name][0](model)
    with pytest.raises(ValueError, match="on all ranks") as error:
        ringattn.parallelize(model)
    assert "_ringattn" not in vars(model.model)
    right = model_of()
    ringattn.parallelize(right)
    unparallelize(right)
    return str(error.value)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_differ_are_named_on_every_rank(rank_pool: Pools, name: str) -> None:
    first, second = rank_pool(2).run(other_weights, name)
    assert first == second and WEIGHTS[name][1] in first


def offloaded() -> tuple[nn.Module, str]:
    model = model_of()
    message = "embed_tokens.weight must be on a device to be compared between ranks, got one on met"
    if this().rank == 1:
        pytest.importorskip("accelerate").cpu_offload(model, torch.device("cpu"))
    return model, message


def split() -> tuple[nn.Module, str]:
    model, mesh = model_of(), init_device_mesh(this().device.type, (2,))
    part = model.lm_head.weight.chunk(2)[this().rank]
    weight = DTensor.from_local(part, mesh, [Shard(0)])
    model.lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return model, "lm_head.weight must be whole on each rank of the ring, got one that tensor paral"


def not_compared(kind: Callable[[], tuple[nn.Module, str]]) -> None:
    model, message = kind()
    with pytest.raises(ValueError, match=message):
        ringattn.parallelize(model)


@pytest.mark.parametrize("kind", [offloaded, split])
def test_weights_that_cannot_be_compared_are_refused_on_every_rank(
    rank_pool: Pools, kind: Any
) -> None:
    rank_pool(2).run(not_compared, kind)


def sharded_by_fsdp() -> None:
    plain, model = model_of(), model_of()
    fully_shard(model, mesh=init_device_mesh(this().device.type, (2,)))
    assert_near(ringattn.parallelize(model)(token_ids(8)).logits, plain(token_ids(8)).logits)


def test_weights_that_fsdp_shards_over_the_ring_are_accepted(rank_pool: Pools) -> None:
    rank_pool(2).run(sharded_by_fsdp)


def equal_nans() -> None:
    model = model_of()
    model.lm_head.weight[3] = torch.nan
    ringattn.parallelize(model)


def test_equal_nans_in_weights_are_accepted(rank_pool: Pools) -> None:
    rank_pool(2).run(equal_nans)


# ---- compiled -----------------------------------------------------------------------------------


def compiled_on_one_rank_at_last() -> int:
    """The number of graphs: past its limit, Dynamo leaves calls of new lengths as they are."""
    limit = 8 if this().rank == 0 else 1
    plain, model, graphs = model_of(), ringattn.parallelize(model_of()), 0

    def backend(graph: Any, _: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph

    compiled = torch.compile(model, backend=backend)
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(recompile_limit=limit):
            for num_tokens in (8, 9, 12):
                ids = token_ids(num_tokens)
                assert_near(compiled(ids).logits, plain(ids).logits)
    finally:
        torch._dynamo.reset()  # what it has left stays so
    refusal(model, token_ids(8, seed=this().rank), token_ids(8), _same("input_ids"))
    return graphs


def test_a_rank_that_compiles_no_more_agrees_with_one_that_does(rank_pool: Pools) -> None:
    many, one = rank_pool(2).run(compiled_on_one_rank_at_last)
    assert many > one
