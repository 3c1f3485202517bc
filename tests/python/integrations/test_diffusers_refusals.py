# SPDX-License-Identifier: Apache-2.0
"""What the ring cannot compute of diffusers' transformers is refused in words, on every rank."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import _diffusers as tiny
import diffusers
import pytest
import torch
from _diffusers import RINGATTN, close, qkv
from _distributed import AT_ONCE_S, RankPool, this
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn as dispatch
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor
from diffusers.models.transformers.transformer_flux2 import Flux2KVAttnProcessor
from ringattn.integrations import diffusers as integration
from torch.distributed.device_mesh import init_device_mesh

Pools = Callable[[int], RankPool]

MASK = torch.ones(4, 4)
OTHER = '(the attention backend is ringattn; another one is model.set_attention_backend("native"))'


@pytest.fixture(autouse=True)
def _native_afterwards() -> Any:
    """set_attention_backend() of one model changes the default of all."""
    with attention_backend(AttentionBackendName.NATIVE):
        yield


def test_another_release_of_diffusers_is_refused() -> None:
    assert diffusers.__version__.startswith("0.42.")
    with mock.patch.object(diffusers, "__version__", "0.43.0"):
        said = r"diffusers must be 0.42 for the ringattn backend, got 0.43.0: type `pip"
        with pytest.raises(ValueError, match=said):
            integration.register()


def test_a_call_gives_every_reason_why_it_is_refused() -> None:
    q, k, v = qkv(9, kv_heads=2)
    mask = torch.ones(9, 9, dtype=torch.bool)
    with pytest.raises(ValueError) as caught:
        dispatch(q, k, v, attn_mask=mask, dropout_p=0.5, backend=RINGATTN)
    assert str(caught.value) == (
        "attn_mask must be None, got a torch.bool tensor [9, 9]; dropout_p must be 0, got 0.5; "
        "key must have the 4 heads of query without enable_gqa, got 2 (the attention backend is "
        'ringattn; another one is model.set_attention_backend("native"))'
    )


def test_gradients_on_one_process_are_those_of_the_unmodified_model() -> None:
    model, given = tiny.wan(), tiny.wan_inputs(5)
    gradients = []
    for backend in ("native", "ringattn"):
        model.set_attention_backend(backend)
        model.zero_grad()
        model(**given)[0].square().sum().backward()
        gradients.append([x.grad for x in model.parameters() if x.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for native, mine in zip(*gradients, strict=True):
        close(mine, native)


def test_text_of_ltx_is_attended_to_on_one_process_where_it_has_no_mask() -> None:
    model = tiny.ltx()
    given, masked = (tiny.ltx_inputs(6, masked) for masked in (False, True))
    expected = tiny.sample(model, given)
    model.set_attention_backend("ringattn")
    close(tiny.sample(model, given), expected)
    with pytest.raises(ValueError, match=r"attn_mask must be None, got a torch\.float32 tensor"):
        tiny.sample(model, masked)


# ---- several ranks ---------------------------------------------------------------------------


def refused_model(
    make: Callable[[], Any], backend_first: bool, plan: Any = None, **options: Any
) -> str:
    """Why; the model is as it was before the call that refuses it."""
    model = make()
    with pytest.raises(ValueError) as caught:
        tiny.parallel(model, backend_first, plan, **options)
    processors = integration._processors(model)
    backends = {getattr(processor, "_attention_backend", None) for processor in processors}
    assert backends - {None} == ({RINGATTN} if backend_first else set())
    assert (model._parallel_config is None) == backend_first
    assert len(model._forward_pre_hooks) == (0 if backend_first else 1)
    return str(caught.value)


@pytest.mark.parametrize("backend_first", [True, False], ids=["backend first", "parallel first"])
@pytest.mark.parametrize("make", [tiny.wan, tiny.flux])
def test_ulysses_is_refused_on_all_ranks(
    rank_pool: Pools, make: Callable[[], Any], backend_first: bool
) -> None:
    degrees = {"ring_degree": 1, "ulysses_degree": 2}
    said = f"ulysses_degree must be 1, got 2: pass ring_degree=2 {OTHER}"
    assert rank_pool(2).run(refused_model, make, backend_first, **degrees) == [said] * 2


def mesh_for_ulysses(backend_first: bool) -> str:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ring", "ulysses"))
    return refused_model(tiny.wan, backend_first, mesh=mesh)


@pytest.mark.parametrize("backend_first", [True, False], ids=["backend first", "parallel first"])
def test_a_mesh_with_ranks_for_ulysses_is_refused(rank_pool: Pools, backend_first: bool) -> None:
    said = f"ulysses_degree must be 1, got 2: pass ring_degree=4 {OTHER}"
    assert rank_pool(2).run(mesh_for_ulysses, backend_first) == [said] * 2


MODELS = "FluxTransformer2DModel or WanTransformer3DModel"
PROCESSORS = "FluxAttnProcessor or WanAttnProcessor"


def other_processor() -> Any:
    model = tiny.flux()
    model.transformer_blocks[0].attn.processor = Flux2KVAttnProcessor()
    return model


@pytest.mark.parametrize("backend_first", [True, False], ids=["backend first", "parallel first"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (tiny.ltx, f"model must be {MODELS} over several ranks, got LTXVideoTransformer3DModel; "),
        (
            other_processor,
            f"attention processors must be {PROCESSORS} over several ranks, "
            "got Flux2KVAttnProcessor ",
        ),
    ],
)
def test_models_and_processors_that_are_not_served_are_refused_on_all_ranks(
    rank_pool: Pools, make: Callable[[], Any], said: str, backend_first: bool
) -> None:
    for message in rank_pool(2).run(refused_model, make, backend_first):
        assert message.startswith(said) and message.endswith(OTHER)


def another_plan(backend_first: bool) -> str:
    """A plan of the caller's own, which leaves the text whole on every rank."""
    plan = {"proj_out": tiny.flux()._cp_plan["proj_out"]}
    return refused_model(tiny.flux, backend_first, plan)


@pytest.mark.parametrize("backend_first", [True, False], ids=["backend first", "parallel first"])
def test_another_plan_is_refused(rank_pool: Pools, backend_first: bool) -> None:
    said = f"cp_plan must be None, which is the model's own, got another one {OTHER}"
    assert rank_pool(2).run(another_plan, backend_first) == [said] * 2


def refused_forwards() -> list[str]:
    """What models say that were right when their parallelism was enabled."""
    replaced = tiny.parallel(tiny.flux())
    replaced.set_attn_processor(FluxAttnProcessor())
    unchecked = tiny.ltx()
    with attention_backend(AttentionBackendName.NATIVE), tiny.cpu_as_accelerator():
        unchecked.enable_parallelism(config=ContextParallelConfig(ring_degree=2))
    said = []
    for model, inputs in [
        (replaced, tiny.flux_inputs(4, 4)),
        (unchecked, tiny.ltx_inputs(6, masked=False)),
    ]:
        with attention_backend(RINGATTN), pytest.raises(ValueError) as caught:
            tiny.sample(model, inputs)
        said.append(str(caught.value))
    replaced.set_attention_backend("native")
    tiny.sample(replaced, tiny.flux_inputs(4, 4))  # not the ring's to refuse
    return said


def test_forwards_of_models_that_changed_or_were_never_checked_are_refused(
    own_pool: Pools,
) -> None:
    for replaced, unchecked in own_pool(2).run(refused_forwards):
        assert replaced == (
            "attention processors must be set before enable_parallelism, got FluxAttnProcessor "
            f"after it {OTHER}"
        )
        assert unchecked.startswith(f"model must be {MODELS} over several ranks, got LTX")


def attend(*calls: dict[str, Any], **options: Any) -> None:
    """One attention call of a parallel model: this rank's of the given ones."""
    config = tiny.parallel(tiny.wan(), **options)._parallel_config
    call = dict(calls[this().rank % len(calls)])
    q, k, v = qkv(*call.pop("lengths", (4,)))
    dispatch(q, k, v, **call, backend=RINGATTN, parallel_config=config)


@pytest.mark.parametrize("ring_anything", [False, True])
@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            {"attn_mask": MASK},
            "attn_mask must be None, got a torch.float32 tensor [4, 4]",
        ),
        ({"dropout_p": 0.1}, "dropout_p must be 0, got 0.1"),
        ({"is_causal": True}, "is_causal must be False over several ranks, got True"),
        (
            {"lengths": (4, 6)},
            "key must have the tokens of query over several ranks, got 6 and 4",
        ),
    ],
)
def test_what_the_ring_cannot_compute_is_refused_on_all_ranks(
    rank_pool: Pools, call: dict[str, Any], said: str, ring_anything: bool
) -> None:
    for outcome in rank_pool(2).outcomes(attend, call, ring_anything=ring_anything):
        assert (outcome.error, outcome.message) == ("ValueError", f"{said} {OTHER}")


@pytest.mark.parametrize("ring_anything", [False, True])
def test_a_mask_on_one_rank_ends_the_call_of_all(own_pool: Pools, ring_anything: bool) -> None:
    calls = {}, {"attn_mask": MASK}
    first, second = own_pool(2).outcomes(attend, *calls, ring_anything=ring_anything)
    said = "attn_mask must be None, got a torch.float32 tensor [4, 4]"
    assert second.error == first.error == "ValueError"
    assert said in second.message and "rank 1" in first.message and said in first.message
    assert max(first.seconds, second.seconds) < AT_ONCE_S


def unequal_without_ring_anything() -> None:
    attend({"lengths": (4,)}, {"lengths": (5,)})


def test_unequal_lengths_without_ring_anything_are_an_error_on_all_ranks(own_pool: Pools) -> None:
    for outcome in own_pool(2).outcomes(unequal_without_ring_anything):
        assert outcome.error == "ValueError", outcome
        assert "partition.lengths" in outcome.message


def parallel_before_register(by_context: bool) -> None:
    model = tiny.wan()
    config = ContextParallelConfig(ring_degree=2, ring_anything=True)
    with tiny.cpu_as_accelerator(), attention_backend(AttentionBackendName.NATIVE):
        type(model).enable_parallelism.__wrapped__(model, config=config)
        if not by_context:
            model.set_attention_backend("ringattn")
        with attention_backend(RINGATTN):
            tiny.sample(model, tiny.wan_inputs(5))


@pytest.mark.parametrize("by_context", [False, True])
def test_a_model_that_was_parallel_before_register_is_refused(
    rank_pool: Pools, by_context: bool
) -> None:
    said = "register() must be called before enable_parallelism, got a model that is parallel "
    for outcome in rank_pool(2).outcomes(parallel_before_register, by_context):
        assert (outcome.error, outcome.message) == ("ValueError", said + OTHER)
