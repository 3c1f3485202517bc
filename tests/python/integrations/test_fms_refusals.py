# SPDX-License-Identifier: Apache-2.0
"""Models and calls of FMS that the ring does not compute are refused, with the reasons."""

from collections.abc import Callable
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _fms import SIZES, llama, mistral, pad_input_ids, padded, prompt, tiny, two_of
from ringattn.integrations import fms as ring_fms
from ringattn.integrations.fms.masks import check_values, differs, padding_of, visible
from ringattn.model_inputs import Padding
from torch import nn

fms_generation = pytest.importorskip("fms.utils.generation")
fms_models = pytest.importorskip("fms.models")

Pools = Callable[[int], RankPool]


# ---- models -------------------------------------------------------------------------------------


def no_rope() -> nn.Module:
    model = llama.LLaMA(llama.LLaMAConfig(**SIZES))
    model.base_model.layers[0].attn.position_encoder = object()
    return model


def on_two_devices() -> nn.Module:
    model = llama.LLaMA(llama.LLaMAConfig(**SIZES))
    model.head.to("meta")
    return model


def of(architecture: str, **changes: Any) -> nn.Module:
    """A model of FMS without weights."""
    module = getattr(fms_models, architecture)
    config, kind = {
        "bamba": ("BambaConfig", "Bamba"),
        "gpt_bigcode": ("GPTBigCodeConfig", "GPTBigCode"),
        "granite": ("GraniteConfig", "Granite"),
        "llama": ("LLaMAConfig", "LLaMA"),
        "roberta": ("RoBERTaConfig", "RoBERTa"),
    }[architecture]
    return getattr(module, kind)(getattr(module, config)(**changes))


_TINY = {"emb_dim": 64, "nheads": 4, "kvheads": 2, "nlayers": 1, "src_vocab_size": 99}
#: Constructors, and what the refusal says.
REFUSED: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "state space": (
        lambda: of("bamba", **_TINY, mamba_n_heads=4, state_size=8, head_dim=32),
        ["state-space (SSM) layers"],
    ),
    "learned positions": (lambda: of("gpt_bigcode", nlayers=1, emb_dim=64, nheads=4), ["family"]),
    "encoders": (lambda: of("roberta", nlayers=1, emb_dim=64, nheads=4), ["not causal"]),
    "ntk": (lambda: of("granite", **_TINY, ntk_scaling=True), ["type 'ntk'"]),
    "dynamic": (lambda: of("llama", **_TINY, rope_scaling={"rope_type": "ntk"}), ["type 'ntk'"]),
    "other positions": (no_rope, ["its positions are encoded by object"]),
    "heads": (lambda: of("llama", **{**_TINY, "nheads": 16}), ["a multiple of 8 from 8 to 256"]),
    "devices": (on_two_devices, ["its weights must be on one device, got cpu, meta"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_are_refused_with_every_reason(name: str) -> None:
    build, reasons = REFUSED[name]
    with torch.device("meta" if name != "devices" else "cpu"):
        model = build()
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(ValueError, match="model must be one that the ring computes") as caught:
        ringattn.parallelize(model, group="single")
    for reason in reasons:
        assert reason in str(caught.value)
    assert [set(vars(module)) for module in model.modules()] == before
    ringattn.unparallelize(model)


def test_a_block_alone_is_no_model() -> None:
    block = llama.LLaMA(llama.LLaMAConfig(**SIZES)).base_model.layers[0]
    with pytest.raises(ValueError, match="a whole model or its base_model"):
        ringattn.parallelize(block, group="single")


def test_a_window_that_no_layer_uses_is_none() -> None:
    model = mistral.Mistral(mistral.MistralConfig(**SIZES, head_dim=8, sliding_window=4))
    assert ring_fms.refusal(model) is None


def refused_on_every_rank() -> None:
    model = of("granite", **_TINY, ntk_scaling=True) if this().rank == 1 else tiny()
    ringattn.parallelize(model)


def test_a_refused_model_fails_every_rank(rank_pool: Pools) -> None:
    first, second = rank_pool(2).outcomes(refused_on_every_rank)
    assert first.message == f"rank 1: {second.message}" and "'ntk'" in second.message


# ---- calls --------------------------------------------------------------------------------------

_IDS, _PADDED = (2, 6), (3, 6)
#: Arguments of a call with `prompt(*_IDS)` and `padded(*_PADDED)`, and the error.
CALLS: dict[str, tuple[Callable[[], tuple[torch.Tensor, dict[str, Any]]], str]] = {
    "op": (lambda: (prompt(*_IDS), {"attn_name": "sdpa_bidirectional"}), "attn_name must be"),
    "causality": (lambda: (prompt(*_IDS), {"is_causal_mask": False}), "is_causal_mask must be"),
    "window": (lambda: (prompt(*_IDS), {"sliding_window": 3}), "sliding_window must be 0, got 3"),
    "another's window": (
        lambda: (prompt(*_IDS), {"window_size": (3, 0)}),
        "window_size must be left out",
    ),
    "sinks": (lambda: (prompt(*_IDS), {"sinks": torch.ones(4)}), "sinks must be left out .*Tensor"),
    "scale": (lambda: (prompt(*_IDS), {"scale": 0.5}), "scale must be left out .* got 0.5"),
    "partition": (lambda: (prompt(*_IDS), {"partition": [3, 3]}), "partition must be left out"),
    "another's mask": (
        lambda: (prompt(*_IDS), {"attention_mask": torch.ones(_IDS)}),
        "attention_mask must be left out .the mask is mask=.",
    ),
    "length": (
        lambda: (prompt(1, 65), {}),
        "must fit into max_expected_seq_len, 64 tokens, got 65: pass max_expected_seq_len=",
    ),
    "positions past the table": (
        lambda: (prompt(1, 2), {"position_ids": torch.tensor([[0, 64]], device=this().device)}),
        "got 65",
    ),
    "positions": (
        lambda: (prompt(*_IDS), {"position_ids": torch.arange(5)[None]}),
        r"position_ids must be \[B, S\] or \[1, S\] with the 6 tokens of x, got \[1, 5\]",
    ),
    "shape": (lambda: (prompt(6), {}), r"x must be ids \[B, S\] .* got \[6\]"),
    "nothing": (lambda: (prompt(2, 0), {}), r"x must hold tokens, got shape \[2, 0\]"),
    "cache": (
        lambda: (prompt(2, 1), {"past_key_value_states": [(torch.ones(1),) * 2] * 2}),
        "must be what this parallelized model returned, or None, got a tuple",
    ),
    "padding without positions": (
        lambda: (padded(*_PADDED)[0], {"mask": padded(*_PADDED)[1]["mask"]}),
        "position_ids must be given with a padded mask",
    ),
    "key mask": (
        lambda: (prompt(*_IDS), {"mask": torch.ones(2, 6, dtype=torch.bool)}),
        r"mask must be \[B, S, S\], \[2, 6, 6\] in this call, got \[2, 6\]",
    ),
    "no mask": (lambda: (prompt(*_IDS), {"mask": 1}), "in this call, got int"),
    "integers": (
        lambda: (prompt(*_IDS), {"mask": torch.ones(2, 6, 6, dtype=torch.int64)}),
        "mask must be bool or floating, got torch.int64",
    ),
    "bias": (
        lambda: (prompt(*_IDS), {"mask": torch.full((2, 6, 6), -0.5)}),
        "with -inf or 0, got other values",
    ),
    "not causal": (
        lambda: (prompt(*_IDS), {"mask": torch.ones(2, 6, 6, dtype=torch.bool)}),
        "mask must be causal over the real tokens of each row",
    ),
    "hole": (
        lambda: (prompt(*_IDS), {"mask": torch.tensor([[True, False, True, True, True, True]])}),
        r"got \[1, 6\]",
    ),
    "dropout": (lambda: (prompt(*_IDS), {"train": True}), "dropout must be 0, got 0.5: call model"),
}


def calls_are_refused(world_size: int) -> None:
    plain, model = two_of()
    ringattn.parallelize(model)
    for attention in (layer.attn for layer in model.base_model.layers):
        attention.p_dropout = 0.5  # of training
    for name, (given, message) in CALLS.items():
        ids, kwargs = given()
        model.train(kwargs.pop("train", False))
        with torch.no_grad(), pytest.raises(ValueError, match=message):
            model(ids, **kwargs)
            raise AssertionError(f"{name} must be refused")
    model.eval()
    with torch.no_grad():
        ids = prompt(*_IDS)
        torch.testing.assert_close(model(ids), plain(ids), atol=1e-4, rtol=1e-4)


@pytest.mark.nccl
def test_calls_are_refused_and_the_group_works_on(ring: RankPool) -> None:
    ring.run(calls_are_refused, ring.world_size)


def one_rank_errs() -> None:
    model = ringattn.parallelize(tiny())
    with torch.no_grad():
        model(prompt(*_IDS), **({"sliding_window": 3} if this().rank == 1 else {}))


def test_a_refused_call_fails_every_rank(rank_pool: Pools) -> None:
    first, second = rank_pool(2).outcomes(one_rank_errs)
    assert second.message.startswith("sliding_window must be 0, got 3")
    assert second.message in first.message and "rank 1" in first.message


@torch.no_grad()
def steps_are_refused() -> None:
    plain, model = two_of()
    with pytest.raises(ValueError, match="must be used by a model on a ring"):
        plain(prompt(2, 3), attn_name="ring", use_cache=True)
    ringattn.parallelize(model)
    one = prompt(2, 1)
    _, cache = model(prompt(2, 6), use_cache=True)
    step = {"past_key_value_states": cache, "use_cache": True}
    refusals: list[tuple[dict[str, Any], str]] = [
        ({"use_cache": False}, "use_cache must be True with past_key_value_states"),
        ({"past_key_value_states": cache[:1]}, r"the 2 layers of one call in order, .* \[0\]"),
        ({"mask": padded(3, 7)[1]["mask"][:, -1:]}, "mask must be the prompt's mask and 0 for"),
        ({"position_ids": torch.tensor([[64]])}, "64 tokens, got 65: pass max_expected_seq_len="),
        ({"mask": torch.zeros(2, 1, 6)}, r"\[2, 1, 7\] in this call, got \[2, 1, 6\]"),
    ]
    for changes, message in refusals:
        with pytest.raises(ValueError, match=message):
            model(one, **{**step, **changes})
    with pytest.raises(ValueError, match="x must have the 2 rows of the cache, got 1"):
        model(one[:1], **step)
    with pytest.raises(ValueError, match="lie on the ranks of a ring"):
        plain(one, **step)
    with pytest.raises(ValueError, match="must fit into max_expected_seq_len, 64 tokens, got 65"):
        model(prompt(2, 59), **step)
    model(one, **step)  # nothing has been stored by the refused ones
    for side, kwargs, message in (
        ("left", {}, "position_ids must be given after a padded prompt"),
        ("right", {}, "must have its padding before the prompts to generate"),
        ("left", {"rows": 1}, "x must have the 2 rows of the cache, got 1"),
    ):
        ids, extra = padded(3, 6, side=side)
        _, cache = model(ids, use_cache=True, **extra)
        with pytest.raises(ValueError, match=message):
            model(one[: kwargs.get("rows")], past_key_value_states=cache, use_cache=True)
    with pytest.raises(ValueError, match="must have neither use_cache"), torch.enable_grad():
        model(prompt(2, 6), use_cache=True)[0].sum().backward()


def test_steps_are_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(steps_are_refused)


def generations_are_refused() -> None:
    plain, model = two_of()
    ringattn.parallelize(model)
    ids, extra = padded(3, 6, side="right")
    for use_cache in (True, False):  # of FMS itself
        options = {"do_sample": False, "use_cache": use_cache, "extra_kwargs": dict(extra)}
        with pytest.raises(ValueError, match="padding before the prompts to generate"):
            fms_generation.generate(model, ids, max_new_tokens=3, **options)
    refusals: list[tuple[Any, dict[str, Any], str]] = [
        (plain, {}, "model must be on a ring"),
        (model, {"max_seq_len": 5, "use_cache": True}, "max_seq_len must be 6 or more, got 5"),
        (model, {"max_seq_len": 6, "max_new_tokens": 4}, "max_seq_len must be 9 or more, got 6"),
        (model, {"extra_kwargs": extra}, "padding before the prompts to generate"),
        (model, {"max_new_tokens": 3 + this().rank}, "max_new_tokens must be the same on all"),
        (model, {"input_ids": prompt(2, 6, seed=this().rank)}, "input_ids must be the same on all"),
        (model, {"input_ids": [1]}, r"input_ids must be \[B, S\] or \[S\], got list"),
    ]
    for which, kwargs, message in refusals:
        with pytest.raises(ValueError, match=message):
            ring_fms.generate(which, **{"input_ids": ids, **kwargs})


def test_generations_are_refused(rank_pool: Pools) -> None:
    rank_pool(2).run(generations_are_refused)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"distributed_strategy": "rings"}, "distributed_strategy must be .* which FMS would drop"),
        ({"block_lens": [4]}, 'block_lens must be given with distributed_strategy="ring"'),
        ({"distributed_strategy": "ring", "block_lens": [4, 4]}, "must have the 1 ranks of the"),
    ],
)
def test_get_model_drops_no_strategy(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ring_fms.get_model("llama", "micro", **kwargs)


def test_a_strategy_has_one_partition() -> None:
    with pytest.raises(ValueError, match="partition and block_lens must not be given both"):
        ring_fms.RingAttentionStrategy([4], block_lens=[4])
    with pytest.raises(ValueError, match=r'transport must be "auto".* or .*, got "pigeon"'):
        ring_fms.RingAttentionStrategy(transport="pigeon")
    strategy = ring_fms.RingAttentionStrategy()
    with pytest.raises(ValueError, match="must be given to the RingAttentionStrategy"):
        ring_fms.get_model("llama", "micro", distributed_strategy=strategy, block_lens=[4])


# ---- masks --------------------------------------------------------------------------------------


def recovered(*lengths: int, side: str, dtype: torch.dtype | None = None) -> Padding | None:
    rows = [torch.ones(length, dtype=torch.int64) for length in lengths]
    ids, extra = pad_input_ids(rows, padding_side=side)
    mask = extra["mask"] == 0 if dtype == torch.bool else extra["mask"].to(dtype)
    check_values(mask)
    return padding_of(visible(mask, *ids.shape, ids.size(1)), extra["position_ids"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_padding_of_fms_is_recovered(dtype: torch.dtype) -> None:
    for lengths in ((1, 5), (4, 5, 1), (2, 4, 3)):
        longest = max(lengths)
        before = recovered(*lengths, side="left", dtype=dtype)
        assert before == Padding(tuple(longest - n for n in lengths), lengths, longest)
        after = recovered(*lengths, side="right", dtype=dtype)
        assert after == Padding((0,) * len(lengths), lengths, longest)
    assert recovered(4, 4, side="left") is None and recovered(1, side="right") is None
    # One token and one of padding: as the other row says, and before where none does.
    assert recovered(1, 2, side="left") == Padding((1, 0), (1, 2), 2)


def documents(*lengths: int) -> torch.Tensor:
    document = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (document[:, None] == document[None, :]).tril()[None]


def test_packed_sequences_are_no_padding() -> None:
    packed = [(documents(3, 2), [0, 1, 2, 0, 1]), (documents(2, 2, 2), [0, 1, 0, 1, 0, 1])]
    for mask, positions in packed:
        with pytest.raises(ValueError, match="packed sequences are not supported"):
            padding_of(mask, torch.tensor([positions]))
    mask = documents(3, 2)
    assert padding_of(mask, torch.tensor([[0, 1, 2, 0, 0]])) == Padding((0,), (3,), 5)
    assert padding_of(mask, torch.tensor([[0, 0, 0, 0, 1]])) == Padding((3,), (2,), 5)


def test_a_window_is_no_padding() -> None:
    for window in (2, 3, 4):
        mask = torch.ones(5, 5, dtype=torch.bool).tril().triu(1 - window)[None]
        with pytest.raises(ValueError, match="must be causal over the real tokens"):
            padding_of(mask, torch.arange(5)[None])


def test_masks_of_steps_are_the_prompt_and_ones() -> None:
    padding = Padding((2, 0), (3, 5), 5)
    expected = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7]) != 0
    assert not differs(expected[:, None], padding, 5)
    causal = expected[:, None].expand(-1, 2, -1).tril(5)
    assert not differs(causal, padding, 5) and not differs(causal[1:], None, 5)
    assert differs(causal, None, 5) and differs(expected[:, None, :].expand(-1, 2, -1), padding, 5)
