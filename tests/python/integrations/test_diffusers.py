# SPDX-License-Identifier: Apache-2.0
"""Transformers of diffusers give the same answers through the ring."""

import copy
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import _diffusers as tiny
import pytest
import torch
import torch.nn.functional as F
from _diffusers import RINGATTN, close, qkv
from _distributed import RankPool, this
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn as dispatch
from ringattn import Partition
from ringattn.integrations import diffusers as integration

Pools = Callable[[int], RankPool]

MODELS = {
    "flux": (tiny.flux, tiny.flux_inputs),
    "wan": (tiny.wan, tiny.wan_inputs),
    "wan with times of tokens": (tiny.wan, tiny.wan_times_of_tokens_inputs),
    "wan from image": (tiny.wan_from_image, tiny.wan_from_image_inputs),
}
# Tokens of image and text (Flux), of frames (Wan): that 2 and 3 divide, and that neither does.
EVEN = {"flux": (24, 12), "wan": (24,), "wan with times of tokens": (12,), "wan from image": (12,)}
UNEVEN = {"flux": (25, 7), "wan": (23,), "wan with times of tokens": (13,), "wan from image": (13,)}


@pytest.fixture(autouse=True)
def _native_afterwards() -> Any:
    """set_attention_backend() of one model changes the default of all."""
    with attention_backend(AttentionBackendName.NATIVE):
        yield


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)


# ---- the name --------------------------------------------------------------------------------


def test_the_name_of_the_backend_is_like_those_that_diffusers_has() -> None:
    integration.register()
    assert [name.value for name in AttentionBackendName].count("ringattn") == 1
    assert AttentionBackendName.RINGATTN is AttentionBackendName["RINGATTN"] is RINGATTN
    assert isinstance(RINGATTN, AttentionBackendName) and RINGATTN == "ringattn"
    assert len(AttentionBackendName) == len(set(AttentionBackendName))
    assert pickle.loads(pickle.dumps(RINGATTN)) is copy.deepcopy(RINGATTN) is RINGATTN
    assert AttentionBackendName.NATIVE is not RINGATTN


# ---- one process -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_one_process_gives_the_answers_of_sdpa(name: str) -> None:
    make, inputs = MODELS[name]
    model, given = make(), inputs(*UNEVEN[name])
    expected = tiny.sample(model, given)
    model.set_attention_backend("ringattn")
    with mock.patch.object(F, "scaled_dot_product_attention", side_effect=AssertionError):
        close(tiny.sample(model, given), expected)
    ours = mock.patch.object(integration, "block_attention", side_effect=RuntimeError("ours"))
    with ours, pytest.raises(RuntimeError, match="ours"):
        tiny.sample(model, given)


@pytest.mark.parametrize(
    "options", [{}, {"scale": 0.3}, {"is_causal": True}], ids=["plain", "scale", "causal"]
)
@pytest.mark.parametrize("num_keys", [9, 5])
def test_one_call_means_what_sdpa_means_by_it(options: dict[str, Any], num_keys: int) -> None:
    q, k, v = qkv(9, num_keys, kv_heads=2)
    out = dispatch(q, k, v, **options, enable_gqa=True, backend=RINGATTN)
    close(out, sdpa(q, k, v, **options, enable_gqa=True))


def test_a_call_returns_the_lse_as_other_backends_do() -> None:
    q, k, v = qkv(9, 5)
    wanted = {"attention_kwargs": {"return_lse": True}, "backend": RINGATTN}
    _, lse = dispatch(q, k, v, **wanted)  # [B, S, H]
    close(lse, (torch.einsum("bqhd,bkhd->bqhk", q, k) / 4).logsumexp(-1))


# ---- several ranks ---------------------------------------------------------------------------


def answers(name: str, sizes: list[tuple[int, ...]], **options: Any) -> list[torch.Tensor]:
    """Of one model, to inputs of these sizes in turn."""
    make, inputs = MODELS[name]
    model = tiny.parallel(make(), **options)
    return [tiny.sample(model, inputs(*size)) for size in sizes]


def alone(name: str, *size: int) -> torch.Tensor:
    make, inputs = MODELS[name]
    return tiny.sample(make(), inputs(*size))


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend_first", [True, False], ids=["backend first", "parallel first"])
@pytest.mark.parametrize("name", MODELS)
def test_ranks_together_answer_as_the_model_alone(
    rank_pool: Pools, name: str, backend_first: bool, world_size: int
) -> None:
    size = EVEN[name]
    expected = alone(name, *size)
    for given in rank_pool(world_size).run(answers, name, [size], backend_first=backend_first):
        close(given[0], expected)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_uneven_lengths_are_learnt_anew_in_each_forward(
    rank_pool: Pools, name: str, world_size: int
) -> None:
    """The first rank has as many tokens of both, the last one has not."""
    sizes = [tuple(n + more for n in UNEVEN[name]) for more in (0, 1, 0)]
    expected = [alone(name, *size) for size in sizes]
    for given in rank_pool(world_size).run(answers, name, sizes, ring_anything=True):
        for actual, wanted in zip(given, expected, strict=True):
            close(actual, wanted)


def exchanges(ring_anything: bool) -> list[int]:
    """How often ranks exchange lengths in each of two forwards."""
    model = tiny.parallel(tiny.flux(), ring_anything=ring_anything)
    counted = []
    for _ in range(2):
        with mock.patch.object(
            Partition, "gather", autospec=True, side_effect=Partition.gather
        ) as m:
            tiny.sample(model, tiny.flux_inputs(24, 12))
        counted.append(m.call_count)
    return counted


@pytest.mark.parametrize(("ring_anything", "times"), [(True, 1), (False, 0)])
def test_lengths_are_exchanged_once_in_a_forward_if_at_all(
    rank_pool: Pools, ring_anything: bool, times: int
) -> None:
    assert rank_pool(2).run(exchanges, ring_anything) == [[times, times]] * 2


def after_a_failure() -> torch.Tensor:
    """A forward ends in its last layer; the next one has other lengths."""
    model = tiny.parallel(tiny.wan(), ring_anything=True)
    broken = mock.patch.object(model.blocks[-1].ffn, "forward", side_effect=RuntimeError("lost"))
    with broken, pytest.raises(RuntimeError, match="lost"):
        tiny.sample(model, tiny.wan_inputs(5))
    return tiny.sample(model, tiny.wan_inputs(6))


def test_a_forward_that_failed_leaves_no_lengths_behind(rank_pool: Pools) -> None:
    for given in rank_pool(2).run(after_a_failure):
        close(given, alone("wan", 6))


def two_models() -> list[torch.Tensor]:
    """As in a pipeline: one config, two models, one forward after the other."""
    config = ContextParallelConfig(ring_degree=this().world_size, ring_anything=True)
    models = [tiny.wan(), tiny.wan()]
    with tiny.cpu_as_accelerator(), attention_backend(AttentionBackendName.NATIVE):
        for model in models:
            model.set_attention_backend("ringattn")
            model.enable_parallelism(config=config)
    return [tiny.sample(models[i % 2], tiny.wan_inputs(5 + i)) for i in range(4)]


def test_two_models_share_a_config(rank_pool: Pools) -> None:
    for given in rank_pool(2).run(two_models):
        for i, actual in enumerate(given):
            close(actual, alone("wan", 5 + i))


def compiled(sizes: list[tuple[int, int]], blocks: bool, **options: Any) -> list[torch.Tensor]:
    model = tiny.parallel(tiny.flux(), **options)
    if blocks:
        fullgraph = not options["ring_anything"]  # reading lengths from tensors breaks a graph
        model.compile_repeated_blocks(backend="eager", fullgraph=fullgraph)
    else:
        model.compile(backend="eager")
    return [tiny.sample(model, tiny.flux_inputs(*size)) for size in sizes]


@pytest.mark.parametrize(("blocks", "ring_anything"), [(True, False), (True, True), (False, True)])
def test_compiled_models_answer_alike_and_their_blocks_without_breaks_where_lengths_are_even(
    rank_pool: Pools, blocks: bool, ring_anything: bool
) -> None:
    sizes = [UNEVEN["flux"], (26, 7)] if ring_anything else [EVEN["flux"], (26, 8)]
    for given in rank_pool(2).run(compiled, sizes, blocks, ring_anything=ring_anything):
        for actual, size in zip(given, sizes, strict=True):
            close(actual, alone("flux", *size))


HALVES = ("hidden_states", "encoder_hidden_states", "pooled_projections")  # not positions, times
LONG = {"flux": (120, 60), "wan": (120,)}


def in_bfloat16(name: str) -> tuple[Any, tiny.Inputs]:
    """The model and its inputs."""
    make, inputs = MODELS[name]
    given = inputs(*LONG[name])
    halves = {key: value.bfloat16() for key, value in given.items() if key in HALVES}
    return make().bfloat16(), given | halves


def together_in_bfloat16(name: str) -> torch.Tensor:
    model, given = in_bfloat16(name)
    return tiny.sample(tiny.parallel(model), given)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", LONG)
def test_ranks_together_are_as_exact_in_bfloat16_as_sdpa_alone(
    rank_pool: Pools, name: str, world_size: int
) -> None:
    model, given = in_bfloat16(name)
    alone = tiny.sample(model, given)
    wide = {key: value.double() if key in HALVES else value for key, value in given.items()}
    exact = tiny.sample(model.double(), wide)
    for together in rank_pool(world_size).run(together_in_bfloat16, name):
        ours, sdpas = (out.double() - exact for out in (together, alone))
        assert ours.abs().max() <= 2 * sdpas.abs().max()
        assert ours.square().mean().sqrt() <= 1.1 * sdpas.square().mean().sqrt()
