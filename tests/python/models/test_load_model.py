# SPDX-License-Identifier: Apache-2.0
"""Hugging Face directories of every kind give the logits that transformers gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from _llama import LLAMA3_ROPE, random_ids, save, tiny_llama
from ringattn.generation import generate
from ringattn.models import demo_model_path, load_model
from ringattn.models.loading import config_from_hf, read_json
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

TOLERANCE = 1e-4


def edit_config(folder: Path, **changes: Any) -> None:
    """Sets fields of config.json; ``...`` removes one."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != ...}))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Sets tensors of model.safetensors; None removes one."""
    weights = {**load_file(folder / "model.safetensors"), **changes}
    kept = {name: tensor for name, tensor in weights.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 24},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"rope_parameters": LLAMA3_ROPE},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        {"rms_norm_eps": 0.1},
    ],
    ids=["plain", "tied", "mha", "mqa", "bias", "mlp-bias", "llama3", "linear", "eps"],
)
def test_logits_agree_with_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    theirs = tiny_llama(**changes)
    ours = load_model(save(theirs, tmp_path))
    ids = random_ids(2, 101)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours(ids), theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)


def test_many_files_load_like_one(tmp_path: Path) -> None:
    theirs = tiny_llama()
    ours = load_model(save(theirs, tmp_path, max_shard_size="40KB"))
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    ids = random_ids(1, 40)
    torch.testing.assert_close(ours(ids), theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)


def test_loading_says_how_far_it_is(tmp_path: Path) -> None:
    said: list[tuple[int, int]] = []
    save(tiny_llama(), tmp_path)
    model = load_model(tmp_path, on_weights=lambda done, total: said.append((done, total)))
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    assert [total for _, total in said] == [num_bytes] * len(said)
    done = [done for done, _ in said]
    assert len(done) > 3 and done == sorted(set(done)) and done[-1] == num_bytes


def test_files_of_any_name_load_without_an_index(tmp_path: Path) -> None:
    theirs = tiny_llama()
    save(theirs, tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "weights.safetensors")
    ids = random_ids(1, 40)
    logits = load_model(tmp_path)(ids)
    torch.testing.assert_close(logits, theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)


def test_weights_are_converted_to_the_dtype_asked_for(tmp_path: Path) -> None:
    save(tiny_llama().bfloat16(), tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, dtype=torch.float32)
    ids = random_ids(1, 40)
    torch.testing.assert_close(ours(ids), theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)
    assert load_model(tmp_path, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_bfloat16_is_no_less_exact_than_in_transformers(tmp_path: Path) -> None:
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE)
    ours = load_model(save(theirs, tmp_path), dtype=torch.bfloat16)
    ids = random_ids(2, 101)
    exact = theirs(ids).logits.detach()
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    error = (ours(ids).float() - exact).square().mean().sqrt()
    their_error = (theirs(ids).logits.detach().float() - exact).square().mean().sqrt()
    assert error <= 1.2 * their_error


@pytest.mark.parametrize("scaled", [False, True])
def test_a_config_of_transformers_4_means_the_same(scaled: bool, tmp_path: Path) -> None:
    rope = LLAMA3_ROPE if scaled else {"rope_type": "default", "rope_theta": 3000.0}
    theirs = tiny_llama(rope_parameters=rope)
    save(theirs, tmp_path)
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    edit_config(
        tmp_path,
        rope_parameters=...,
        rope_theta=rope["rope_theta"],
        rope_scaling=scaling if scaled else None,
    )
    ids = random_ids(1, 101)
    logits = load_model(tmp_path)(ids)
    torch.testing.assert_close(logits, theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)


OLD_LLAMA3 = {name: value for name, value in LLAMA3_ROPE.items() if name != "rope_theta"}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_theta": 300.0},
        {"rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 70.0}},
        {"rope_scaling": OLD_LLAMA3, "rope_theta": 300.0},
        {"rope_scaling": {}, "rope_theta": 300.0},
        {"rope_scaling": None},
    ],
    ids=["linear", "type", "theta", "llama3", "empty", "null"],
)
def test_a_config_of_both_transformers_means_what_it_means_there(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    save(tiny_llama(rope_parameters={"rope_type": "default", "rope_theta": 3000.0}), tmp_path)
    edit_config(tmp_path, **changes)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    ids = random_ids(1, 101)
    logits = load_model(tmp_path)(ids)
    torch.testing.assert_close(logits, theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)


def test_what_a_config_leaves_out_is_what_transformers_takes(tmp_path: Path) -> None:
    theirs = LlamaConfig()
    left_out = ("rms_norm_eps", "rope_parameters", "tie_word_embeddings", "attention_bias")
    save(tiny_llama(rms_norm_eps=0.1, attention_bias=True), tmp_path)
    edit_config(tmp_path, **dict.fromkeys(left_out, ...))
    config = config_from_hf(read_json(tmp_path / "config.json"))
    assert config.norm_eps == theirs.rms_norm_eps
    assert config.rope_theta == theirs.rope_parameters["rope_theta"]
    assert (config.tie_heads, config.attn_bias) == (False, False)


@pytest.mark.parametrize(("eos", "ends"), [(None, ()), (7, (7,)), ([7, 9], (7, 9)), (..., ())])
def test_end_tokens_come_from_the_config(eos: Any, ends: tuple[int, ...], tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    edit_config(tmp_path, eos_token_id=eos)
    assert load_model(tmp_path).config.eos_ids == ends


@pytest.mark.parametrize("named", [{"eos_token_id": [9, 3], "pad_token_id": 5}, {}, None])
@pytest.mark.parametrize(("eos", "ends"), [(7, (7,)), (None, ())])
def test_the_generation_config_has_no_say_in_end_tokens(
    eos: int | None, ends: tuple[int, ...], named: dict[str, Any] | None, tmp_path: Path
) -> None:
    save(tiny_llama(), tmp_path)
    edit_config(tmp_path, eos_token_id=eos, pad_token_id=4)
    file = tmp_path / "generation_config.json"
    file.unlink() if named is None else file.write_text(json.dumps(named))
    config = load_model(tmp_path).config
    assert (config.eos_ids, config.pad_id) == (ends, 4)


def test_generations_end_where_the_config_says_and_only_there(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    prompt = random_ids(1, 9)
    without_end = generate(load_model(tmp_path), prompt, max_new_tokens=8)
    assert without_end.size(1) == 17
    third = int(without_end[0, 11])
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": third}))
    assert torch.equal(generate(load_model(tmp_path), prompt, max_new_tokens=8), without_end)
    edit_config(tmp_path, eos_token_id=third)
    first = without_end[0, 9:].tolist().index(third)
    ended = generate(load_model(tmp_path), prompt, max_new_tokens=8)
    assert torch.equal(ended, without_end[:, : 10 + first])


def test_old_files_with_frequencies_and_a_repeated_tied_head_load(tmp_path: Path) -> None:
    theirs = tiny_llama(tie_word_embeddings=True)
    save(theirs, tmp_path)
    extra = {
        "lm_head.weight": theirs.lm_head.weight.detach().clone(),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
    }
    edit_weights(tmp_path, **extra)
    ids = random_ids(1, 40)
    logits = load_model(tmp_path)(ids)
    torch.testing.assert_close(logits, theirs(ids).logits.detach(), atol=TOLERANCE, rtol=0)


def test_the_model_needs_no_gradients_and_is_in_eval_mode(tmp_path: Path) -> None:
    model = load_model(save(tiny_llama(), tmp_path))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_model_of_the_package_continues_text() -> None:
    model = load_model(demo_model_path())
    text = torch.tensor([list(b"import os\n\ndef f(x):\n    retur")])
    assert int(model(text)[0, -1].argmax()) == ord("n")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mixtral"}, "model_type must be 'llama' in config.json, got 'mixtral'"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'"),
        ({"vocab_size": ...}, "config.json must have 'vocab_size'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be one of .*, got 'yarn'"),
        ({"vocab_size": "many"}, "vocab_size must be an integer in config.json, got 'many'"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers must be an integer .*, got 2.0"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be an integer .*, got True"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number in config.json, got 'small'"),
        ({"rope_scaling": ["yarn"]}, r"rope_scaling must be an object .*, got \['yarn'\]"),
        ({"rope_scaling": {"type": "linear", "factor": "4x"}}, "factor must be a number"),
        ({"rope_parameters": ..., "rope_theta": "1e4"}, "rope_theta must be a number"),
        ({"attention_bias": "no"}, "attention_bias must be true or false in config.json, got 'no'"),
        ({"eos_token_id": [7, "end"]}, "eos_token_id must be an integer .*, got 'end'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type must be one of .*, got 'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "rope_scaling must have 'factor'"),
        ({"head_dim": 20}, "head_dim must be a multiple of 8 from 8 to 256, got 20"),
        ({"num_key_value_heads": 3}, "nheads must be a multiple of kvheads 3, got 4"),
        ({"quantization_config": {"bits": 4}}, "quantization_config must be None"),
        (
            {"partial_rotary_factor": 0.5},
            "partial_rotary_factor must be 1.0 in config.json, got 0.5",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
            "partial_rotary_factor must be 1.0 in config.json, got 0.25",
        ),
        (
            {"num_hidden_layers": 3},
            "weights must have model.layers.2.* and 6 more, got files without",
        ),
        ({"num_hidden_layers": 1}, "got also model.layers.1.* and 6 more"),
        (
            {"intermediate_size": 96},
            r"down_proj.weight must have shape \[64, 96\], got \[64, 112\]",
        ),
    ],
)
def test_other_models_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_missing_head_is_refused(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    edit_weights(tmp_path, **{"lm_head.weight": None})
    with pytest.raises(ValueError, match=r"weights must have lm_head\.weight, got files without"):
        load_model(tmp_path)


def test_a_broken_file_is_refused(tmp_path: Path) -> None:
    save(tiny_llama(), tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model\.safetensors must be a whole safetensors file"):
        load_model(tmp_path)


def test_a_name_of_the_hub_says_how_to_get_a_folder(tmp_path: Path) -> None:
    wanted = r"^path must be a folder with config\.json and \*\.safetensors, got '"
    fetch = r"': pass huggingface_hub\.snapshot_download\('meta-llama/Llama-3\.2-1B'\)$"
    with pytest.raises(FileNotFoundError, match=f"{wanted}meta-llama/Llama-3\\.2-1B{fetch}"):
        load_model("meta-llama/Llama-3.2-1B")
    (tmp_path / "model.safetensors").touch()
    for path in (tmp_path / "nowhere", "./no/where", "nowhere", tmp_path / "model.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"{wanted}{path}'$"):
            load_model(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_model(tmp_path)
    save(tiny_llama(), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"must hold \*.safetensors"):
        load_model(tmp_path)


def test_a_dtype_that_is_not_floating_is_refused(tmp_path: Path) -> None:
    for dtype in (torch.int8, "float32", None):
        with pytest.raises(ValueError, match=r"dtype must be a floating torch\.dtype, got "):
            load_model(save(tiny_llama(), tmp_path), dtype=dtype)


def test_what_is_no_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path must be that of a folder, got None"):
        load_model(None)


@pytest.mark.parametrize("device", ["zz", "meta", 1.5, torch.zeros(1)])
def test_a_device_without_kernels_is_refused(device: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^device must be one with a kernel \(cpu.*\), got "):
        load_model(save(tiny_llama(), tmp_path), device=device)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"transport": "pigeon"}, 'transport must be .* got "pigeon"'),
        ({"transport": None}, "transport must be a name, got None"),
        ({"depth": 0}, "depth must be positive, got 0"),
    ],
)
def test_a_wrong_way_to_travel_is_refused_by_the_first_call(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = load_model(save(tiny_llama(), tmp_path), **options)
    with pytest.raises(ValueError, match=message):
        model(random_ids(1, 9))
    with pytest.raises(ValueError, match=message):
        model.alone()(random_ids(1, 9))
