# SPDX-License-Identifier: Apache-2.0
"""What a ring does not compute is refused by name, on every rank, before anything runs."""

import copy
import inspect
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ringattn
import torch
from _distributed import this
from _transformers import CACHE, assert_near, model_of, token_ids
from ringattn.integrations.transformers.support import check_attention_keywords
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTextToWaveform,
    DynamicCache,
    Gemma3ForCausalLM,
    LlamaModel,
    LlamaPreTrainedModel,
)
from transformers.cache_utils import StaticCache

TINY = {
    "vocab_size": 61,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 2.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0] * 8,
    "original_max_position_embeddings": 128,
}
MLA = {
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
}
#: family, changes of its config, and a part of each reason.
MODELS = [
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["of type 'dynamic'"]),
    ("llama", {"rope_scaling": LONGROPE}, ["of type 'longrope'"]),
    ("llama", {"head_dim": 12}, ["head dimension must be a multiple of 8 from 8 to 256, got 12"]),
    ("gemma3_text", {"use_bidirectional_attention": True}, ["is_causal=False"]),
    ("llama4_text", {"num_local_experts": 2}, ["chunked attention"]),
    ("qwen3_next", {"num_experts": 2, "num_experts_per_tok": 1}, ["linear attention"]),
    ("mamba", {}, ["state-space (SSM) layers"]),
    ("bamba", {}, ["state-space (SSM) layers"]),
    ("deepseek_v3", MLA, ["latent attention (MLA)"]),
    ("gemma", {}, ["family must be one of llama, qwen2, qwen3, mistral, granite"]),
    ("bert", {}, ["family must be one of llama"]),
]


@pytest.mark.parametrize(
    ("family", "changes", "reasons"), MODELS, ids=lambda value: value if type(value) is str else ""
)
@pytest.mark.filterwarnings("ignore")
def test_models_are_refused_with_every_reason(
    family: str, changes: dict[str, Any], reasons: list[str]
) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **{**TINY, **changes})
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"must be one that the ring computes, got {family}") as e:
        ringattn.parallelize(model, group="single")
    for reason in reasons:
        assert reason in str(e.value)
    assert model.config is config and "generate" not in vars(model)


TEXT = {**TINY, "head_dim": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
#: Configs of models that are no text model, and a part of the reason.
OTHER_MODALITIES = {
    "llava": (
        {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": VISION},
        "its text model alone can be on a ring: pass model.model.language_model",
    ),
    "gemma3": (
        {"text_config": TEXT, "vision_config": VISION, "mm_tokens_per_image": 4},
        "tokens of its images see each other: make Gemma3ForCausalLM(model.config.text_config)",
    ),
    # What they have by the name of a field of a text model's config is something else.
    "swin": ({"image_size": 32, "depths": [1], "num_heads": [2], "embed_dim": 16}, "family must"),
    "segformer": ({}, "family must be one of"),
    "dots3_note_text": ({}, "family must be one of"),
    "musicgen": (
        {
            "text_encoder": {"model_type": "t5", "d_model": 16, "d_ff": 16, "num_layers": 1},
            "audio_encoder": {"model_type": "encodec"},
            "decoder": {"hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1},
        },
        "family must be one of",
    ),
    "gemma4_text": (
        {
            **{**TEXT, "global_head_dim": 32, "hidden_size_per_layer_input": 8},
            **{"vocab_size_per_layer_input": 61, "layer_types": ["sliding_attention"] * 2},
        },
        "family must be one of",
    ),
}


@pytest.mark.parametrize("family", OTHER_MODALITIES)
@pytest.mark.filterwarnings("ignore")
def test_models_of_other_modalities_are_refused_with_what_to_take(family: str) -> None:
    if family not in CONFIG_MAPPING:
        pytest.skip("not in this version of transformers")
    changes, reason = OTHER_MODALITIES[family]
    with torch.device("meta"):
        config = AutoConfig.for_model(family, **changes)
        kind = AutoModelForImageTextToText if "vision_config" in changes else AutoModel
        model = (AutoModelForTextToWaveform if family == "musicgen" else kind).from_config(config)
    message = f"must be one that the ring computes, got {family}: .*{re.escape(reason)}"
    with pytest.raises(ValueError, match=message):
        ringattn.parallelize(model, group="single")
    if family == "llava":  # what the reason says to pass
        ringattn.parallelize(model.model.language_model, group="single")
    elif family == "gemma3":
        text = Gemma3ForCausalLM(model.config.text_config)
        text.model, text.lm_head = model.model.language_model, model.lm_head
        ringattn.parallelize(text, group="single")


class Scores(LlamaPreTrainedModel):
    """A model whose body has another name than ``base_model_prefix`` says."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.backbone = LlamaModel(config)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.backbone(input_ids).last_hidden_state.sum(-1)


def test_a_model_whose_body_is_not_named_is_refused_and_left_as_it_is() -> None:
    config, ids = model_of(device="cpu").config, torch.arange(1, 14)[None]
    model = Scores(config)
    right = model(ids)
    with pytest.raises(ValueError, match=r"base_model_prefix must name its body, .* got 'model'"):
        ringattn.parallelize(model, group="single")
    assert model.config is config and torch.equal(model(ids), right)


def adapters_by_invocation() -> None:
    model, ids = model_of(), token_ids(6)
    model.peft_config = {"default": SimpleNamespace(alora_invocation_tokens=None)}
    right = ringattn.parallelize(model)(ids).logits
    adapters = {
        "an aLoRA": SimpleNamespace(alora_invocation_tokens=[5, 6]),
        "a Lily": SimpleNamespace(peft_type="LILY"),
        "an X-LoRA": SimpleNamespace(peft_type="XLORA"),
    }
    for part in (model, model.model):  # with a head, and without one
        for what, adapter in adapters.items():
            part.peft_config = {"other": adapter}
            for call in (part, ringattn.parallelize):
                with pytest.raises(ValueError, match=f"its adapter 'other' is {what}"):
                    call(*((ids,) if call is part else (part,)))
            del part.peft_config
        assert_near(model(ids).logits, right)


def test_adapters_that_need_all_tokens_are_refused(rank_pool: Any) -> None:
    rank_pool(2).run(adapters_by_invocation)


def adapters_with_a_loss() -> None:
    model, ids = model_of().requires_grad_(True), token_ids(6)
    ringattn.parallelize(model)
    right = model(ids, labels=ids).loss
    model.peft_config = {"mine": SimpleNamespace(orth_reg_weight=0.5)}
    with pytest.raises(ValueError, match="labels must be left out where an adapter is an AdaLoRA"):
        model(ids, labels=ids)
    assert model(ids).logits.requires_grad
    with torch.no_grad():
        assert_near(model(ids, labels=ids).loss, right)


def test_adapters_that_add_to_the_loss_are_refused(rank_pool: Any) -> None:
    rank_pool(2).run(adapters_with_a_loss)


def loops_that_record_gradients() -> None:
    model, ids = ringattn.parallelize(model_of().requires_grad_(True)), token_ids(6)
    assert model.train()(ids).get(CACHE) is None
    assert model.eval()(ids, labels=ids).get(CACHE) is None
    cache = model(ids).get(CACHE)
    with pytest.raises(ValueError, match=r"go on after a cache under torch.no_grad\(\)"):
        model(ids[:, :1], **{CACHE: cache})
    with torch.no_grad():
        step = model(ids[:, :1], **{CACHE: cache}).logits
        assert_near(step, model(torch.cat((ids, ids[:, :1]), 1)).logits[:, -1:])
    # Packed documents, which have no cache, as in training mode.
    ends = torch.tensor([0, 4, 6])
    assert model(ids, cu_seq_lens_q=ends, cu_seq_lens_k=ends).get(CACHE) is None


def test_a_loop_that_records_gradients_is_told_to_go_on_without(rank_pool: Any) -> None:
    rank_pool(2).run(loops_that_record_gradients)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("mistral", {"sliding_window": 256}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ],
)
def test_features_that_a_config_names_and_does_not_use_are_not_refused(
    family: str, changes: dict[str, Any]
) -> None:
    model = model_of(family, device="cpu", **changes)
    ids = torch.arange(1, 14)[None]
    right = copy.deepcopy(model)(ids).logits
    assert_near(ringattn.parallelize(model, group="single")(ids).logits, right)


def arguments() -> None:
    model, other = model_of(), torch.nn.Linear(2, 2)
    rank, logits = this().rank, model(token_ids(5)).logits
    pieces = ringattn.Partition.packed([0, 2, 5], 2)
    for given, message in (
        ({"model": other}, "must be a model of Hugging Face transformers or of FMS, got Linear"),
        ({"model": torch.compile(model)}, "got OptimizedModule: pass model._orig_mod"),
        ({"partition": [1, 2, 3]}, "must have the 2 ranks of the group, got 3"),
        ({"partition": [0, 0]}, "must have a token"),
        ({"partition": "fair"}, 'must be a Partition, a list of lengths, "even" or "auto"'),
        ({"partition": pieces}, "partition must be zigzag or contiguous, got pieces: "),
        ({"transport": "pigeon"}, "transport must be"),
        ({"partition": [1, 1 + rank]}, "partition must be the same on all ranks"),
        ({"model": other if rank else model}, "must be a model of"),
    ):
        with pytest.raises(ValueError, match=message):
            ringattn.parallelize(**{"model": model, **given})
        assert torch.equal(model(token_ids(5)).logits, logits)
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ValueError, match=r"is_causal=False"):
        ringattn.parallelize(model)


def test_arguments_are_refused_on_every_rank(rank_pool: Any) -> None:
    rank_pool(2).run(arguments)


def offloading() -> DynamicCache:
    cache = DynamicCache()
    cache.offloading = True
    return cache


def of_another_model() -> DynamicCache:
    cache = DynamicCache()
    model_of()(token_ids(5), **{CACHE: cache})
    return cache


def of_one_rank() -> DynamicCache:
    cache = DynamicCache()
    ringattn.parallelize(model_of(), group="single")(token_ids(5), **{CACHE: cache})
    return cache


def of_another_depth() -> DynamicCache:
    cache = DynamicCache()
    ringattn.parallelize(model_of(num_hidden_layers=1))(token_ids(5), **{CACHE: cache})
    return cache


def of_other_heads() -> DynamicCache:
    cache = DynamicCache()
    ringattn.parallelize(model_of(num_key_value_heads=1))(token_ids(6), **{CACHE: cache})
    return cache


def caches_of_another_dtype(window: int | None) -> None:
    model, half = (ringattn.parallelize(model_of("mistral", sliding_window=window)) for _ in "ab")
    half.to(torch.bfloat16)
    ids, cache = token_ids(12), DynamicCache()
    half(ids[:, :6], **{CACHE: cache})
    for count in (1, 2, 12):  # on every rank, and spread over them
        message = r"this call's dtype, torch.float32, got torch.bfloat16: go on in the dtype"
        with pytest.raises(ValueError, match=message):
            model(ids[:, :count], **{CACHE: cache})
    given = half(ids[:, 6:], **{CACHE: cache}).logits
    assert_near(given.float(), half(ids).logits[:, 6:].float(), 0.1)


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_of_another_dtype_is_refused(rank_pool: Any, window: int | None) -> None:
    rank_pool(2).run(caches_of_another_dtype, window)


def refused_calls() -> None:
    plain = model_of("mistral", sliding_window=256)
    model, ids = ringattn.parallelize(copy.deepcopy(plain)), token_ids(6)
    ones, device = torch.ones_like(ids), ids.device
    right, cache = plain(ids).logits, DynamicCache()
    model(ids, **{CACHE: cache})
    hole = ones.clone()
    hole[1, 2] = 0
    calls: list[tuple[dict[str, Any], str]] = [
        ({"attention_mask": hole}, "got a hole in row 1"),
        ({"attention_mask": ones[:, None, None, :]}, r"must be \[B, S\], got \[2, 1, 1, 6\]"),
        ({"attention_mask": ones[:, :5]}, r"must be \[B, S\], \[2, 6\] .*got \[2, 5\]"),
        ({"attention_mask": 0 * ones}, "got none in 0"),
        ({"output_attentions": True}, "output_attentions must be False"),
        ({"input_ids": None}, "exactly one of input_ids and inputs_embeds"),
        ({"inputs_embeds": plain.get_input_embeddings()(ids)}, "got both"),
        ({"input_ids": ids[0]}, r"input_ids must be \[B, S\]"),
        ({"input_ids": ids[:, :0]}, "must hold tokens"),
        ({"output_router_logits": True}, "output_router_logits must be False"),
        ({"position_ids": torch.arange(4, device=device)[None]}, "must have the 6 tokens"),
        ({CACHE: StaticCache(plain.config, max_cache_len=9)}, "must be a DynamicCache"),
        ({CACHE: offloading()}, "got an offloading DynamicCache"),
        ({CACHE: of_another_model()}, "got one of 5 tokens that another model filled"),
        ({CACHE: of_one_rank()}, f"must be that of rank {this().rank} of 2, got rank 0 of 1"),
        ({CACHE: of_another_depth()}, "must have 2 layers, got 1"),
        ({CACHE: of_other_heads()}, "must hold keys of the model's 2 heads of 16, got 1 of 16"),
        ({"logits_to_keep": torch.tensor([0, 6], device=device)}, "indices of the 6 tokens, got"),
        ({"logits_to_keep": torch.ones(6, device=device)}, r"got torch.float32 \[6\]"),
        ({"logits_to_keep": torch.tensor(3, device=device)}, r"got torch.int64 \[\]"),
        ({"logits_to_keep": "last"}, "a bool mask of the 6 tokens, got last"),
        ({CACHE: cache, "input_ids": ids[:1]}, "must have the 2 rows of the cache, got 1"),
        ({CACHE: cache, "input_ids": ids.repeat(2, 1)}, "must have the 2 rows of the cache, got 4"),
        ({CACHE: cache, "attention_mask": torch.cat((hole, ones), 1)}, "must be the prompt's mask"),
        ({"is_causal": False}, "is_causal must be True or None, got False"),
        ({"cu_seq_lens_q": torch.tensor([0, 3, 6])}, "got no cu_seq_lens_k"),
        ({"softcap": 30.0}, "softcap must be left out"),
        ({"window_size": (3, 0)}, "window_size must be left out"),
        ({"scale": 0.5}, r"scale must be left out \(each layer has its own\), got 0.5"),
        ({"partition": [1, 5]}, r"left out \(give it to ringattn.parallelize\(\)\), got \[1, 5\]"),
        ({"key_partition": [3, 3]}, "key_partition must be left out"),
    ]
    for options, message in calls:
        with pytest.raises(ValueError, match=message):
            model(**{"input_ids": ids, **options})
        assert_near(model(ids).logits, right)
    for part in (model, model.model):
        for call in (part, part.forward):
            with pytest.raises(TypeError, match="input_ids must be given once"):
                call(ids, input_ids=ids)
            with pytest.raises(TypeError, match="positional arguments at most, got 31"):
                call(ids, *[None] * 30)
    if this().rank == 0:  # alone: the others hear of it at their next call
        with pytest.raises(ValueError, match="got a hole in row 1"):
            model(ids, attention_mask=hole)
        with pytest.raises(ValueError, match="scale must be left out"):
            model(ids, scale=0.5)
        with pytest.raises(TypeError, match="input_ids must be given once"):
            model(ids, input_ids=ids)
    else:
        for message in ("got a hole in row 1", "scale must be left out", "must be given once"):
            with pytest.raises(ValueError, match=f"rank 0: .*{message}"):
                model(ids)
    with pytest.raises(ValueError, match="keys lie on the ranks of a ring"):
        plain(ids, **{CACHE: cache})
    padded = model(ids, attention_mask=torch.cat((ones[:, :1] * 0, ones[:, 1:]), 1))[CACHE]
    with pytest.raises(ValueError, match="to be cropped, got a padded one"):
        padded.crop(-2)
    for name in ("keys", "values"):
        with pytest.raises(
            ValueError, match=r"lie on the ranks of a ring: get_seq_length\(\) is 6"
        ):
            getattr(cache.layers[0], name)
    changes: list[Callable[[], None]] = [
        lambda: model.set_attn_implementation("sdpa"),
        lambda: model.set_attn_implementation("eager"),
        lambda: setattr(model.config, "_attn_implementation", "sdpa"),
        lambda: setattr(model.model.layers[1].self_attn, "config", copy.deepcopy(plain.config)),
    ]
    for change in changes:
        own = model.model.layers[1].self_attn.config
        change()
        with pytest.raises(ValueError, match=r'must stay "ringattn" .*: call ringattn.unparallel'):
            model(ids)
        model.model.layers[1].self_attn.config = own
        model.set_attn_implementation("ringattn")
        assert_near(model(ids).logits, right)
    for owner in (model.config, model.model.layers[0].self_attn):
        owner.is_causal = False
        with pytest.raises(ValueError, match="is_causal must be True, got False"):
            model(ids)
        owner.is_causal = True
    assert cache.get_seq_length() == 6


def test_calls_are_refused_on_every_rank_and_leave_the_model_ready(rank_pool: Any) -> None:
    rank_pool(2).run(refused_calls)


def refused_generations() -> None:
    model, ids = ringattn.parallelize(model_of()), token_ids(6)
    right = model.generate(ids, max_new_tokens=3)
    padded = torch.ones_like(ids)
    padded[0, 4:] = 0
    assistant = model_of()
    calls: list[tuple[dict[str, Any], str]] = [
        ({"num_beams": 2}, "must be greedy or sampling for a parallelized model, got beam search"),
        ({"num_beams": 2, "do_sample": True}, "got beam sample"),
        ({"assistant_model": assistant}, "got assisted generation"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "got contrastive search"),
        ({"custom_generate": lambda *a, **k: None}, "custom_generate must be None"),
        ({"attention_mask": padded}, 'tokenize with padding_side="left"'),
        ({"token_healing": True}, r"False .*: give it the ids that model.heal_tokens\("),
        ({"cache_implementation": "static"}, "got StaticCache: a ring keeps its own"),
        # transformers 4 does not know it.
        ({"cache_implementation": "paged"}, r"continuous batching|Invalid .cache_implementation."),
        ({"max_new_tokens": 3 + this().rank}, "max_length must be the same on all ranks"),
        ({"inputs": ids + this().rank}, "input_ids.* must be the same on all ranks"),
        ({"do_sample": this().rank == 1}, "do_sample must be the same on all ranks"),
    ]
    for options, message in calls:
        with pytest.raises(ValueError, match=message):
            model.generate(**{"inputs": ids, "max_new_tokens": 3, **options})
        assert torch.equal(model.generate(ids, max_new_tokens=3), right)
    with pytest.raises(ValueError, match="for a parallelized model, got continuous batching"):
        model.generate_batch(ids.tolist(), max_new_tokens=3)
    with pytest.raises((TypeError, ValueError), match="inputs must be given once"):
        model.generate(ids, max_new_tokens=3, **({"inputs": ids} if this().rank == 1 else {}))
    assert torch.equal(model.generate(ids, max_new_tokens=3), right)


def test_generations_are_refused_on_every_rank(rank_pool: Callable[..., Any]) -> None:
    rank_pool(2).run(refused_generations)


def test_keywords_of_the_functions_are_refused_in_the_call_of_a_model() -> None:
    neutral = {"softcap": 0.0, "s_aux": None, "sliding_window": 8, "is_causal": True}
    check_attention_keywords({**neutral, "layer_idx": 3}, num_keys=8)
    functions = set(inspect.signature(ringattn.ring_attention).parameters) - {"q", "k", "v"}
    assert "partition" in functions
    for name in {*functions - {"refused"}, "s_aux", "attn_mask", "position_bias", "head_mask"}:
        with pytest.raises(ValueError, match=rf"^{name} must be left out \(.*\), got 7$"):
            check_attention_keywords({name: 7}, num_keys=8)
