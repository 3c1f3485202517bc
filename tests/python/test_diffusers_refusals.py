# SPDX-License-Identifier: Apache-2.0
"""What the ring cannot compute of diffusers' transformers is refused in words, on every rank."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import _diffusers as tiny
import diffusers
import pytest
import torch
from _diffusers import RINGATTN, close, qkv
from _distributed import RankPool, this
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.attention_dispatch import dispatch_attention_fn as dispatch
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


def test_gradients_are_refused() -> None:
    model = tiny.wan()
    model.set_attention_backend("ringattn")
    with pytest.raises(ValueError, match="grad"):
        model(**tiny.wan_inputs(5))


def test_text_of_ltx_is_attended_to_on_one_process_where_it_has_no_mask() -> None:
    model = tiny.ltx()
    given, masked = (tiny.ltx_inputs(6, masked) for masked in (False, True))
    expected = tiny.sample(model, given)
    model.set_attention_backend("ringattn")
    close(tiny.sample(model, given), expected)
    with pytest.raises(ValueError, match=r"attn_mask must be None, got a torch\.float32 tensor"):
        tiny.sample(model, masked)


# ---- several ranks ---------------------------------------------------------------------------


def refused_model(make: Callable[[], Any], backend_first: bool, **options: Any) -> str:
    """Why; the model is as it was before the call that refuses it."""
    model = make()
    with pytest.raises(ValueError) as caught:
        tiny.parallel(model, backend_first, **options)
    backends = {processor._attention_backend for processor in integration._processors(model)}
    assert backends == ({RINGATTN} if backend_first else {None})
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


@pytest.mark.parametrize("backend_first", [True, False], ids=["backend first", "parallel first"])
def test_ltx_is_refused_by_name_on_all_ranks(rank_pool: Pools, backend_first: bool) -> None:
    said = (
        "model must be one whose tokens all see each other, got LTXVideoTransformer3DModel: its "
        f"text cross attention has a mask, and keys that are split unlike the queries {OTHER}"
    )
    assert rank_pool(2).run(refused_model, tiny.ltx, backend_first) == [said] * 2


def with_processor(processor: Any) -> Any:
    model = tiny.wan()
    model.blocks[1].attn1.processor = processor
    return model


def test_processors_that_attend_to_the_keys_of_one_rank_are_refused(rank_pool: Pools) -> None:
    pool = rank_pool(2)
    parts = "attention processors must take part in context parallelism, got "
    make = partial(with_processor, Flux2KVAttnProcessor())
    said = f"{parts}Flux2KVAttnProcessor: it attends to cached keys on this rank alone {OTHER}"
    assert pool.run(refused_model, make, True) == [said] * 2


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
    assert max(first.seconds, second.seconds) < 20


def unequal_without_ring_anything() -> None:
    attend({"lengths": (4,)}, {"lengths": (5,)})


def test_unequal_lengths_without_ring_anything_are_an_error_on_all_ranks(own_pool: Pools) -> None:
    for outcome in own_pool(2).outcomes(unequal_without_ring_anything):
        assert outcome.error == "ValueError", outcome
        assert "partition.lengths" in outcome.message


def parallel_before_register(by_context: bool) -> torch.Tensor:
    model = tiny.wan()
    config = ContextParallelConfig(ring_degree=2, ring_anything=True)
    with tiny.cpu_as_accelerator(), attention_backend(AttentionBackendName.NATIVE):
        type(model).enable_parallelism.__wrapped__(model, config=config)
        if not by_context:
            model.set_attention_backend("ringattn")
            return tiny.sample(model, tiny.wan_inputs(5))
        with attention_backend(RINGATTN):
            return tiny.sample(model, tiny.wan_inputs(5))


def test_a_model_that_was_parallel_before_register_needs_its_backend_set(rank_pool: Pools) -> None:
    for given in rank_pool(2).run(parallel_before_register, False):
        close(given, tiny.sample(tiny.wan(), tiny.wan_inputs(5)))
    said = 'the backend must be set by model.set_attention_backend("ringattn")'
    for outcome in rank_pool(2).outcomes(parallel_before_register, True):
        assert outcome.error == "ValueError" and outcome.message.startswith(said)
