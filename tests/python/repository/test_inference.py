# SPDX-License-Identifier: Apache-2.0
"""scripts/inference.py: models of FMS over the ring say what they say on one rank."""

import re
from pathlib import Path

import pytest
from _commands import run_command
from _llama import save, tiny_llama
from ringattn._library import DEVICES

pytest.importorskip("fms")

SCRIPT = "scripts/inference.py"
SHORT = ["--device_type", "cpu", "--max_new_tokens", "6", "--compare"]


def test_prompts_of_unequal_lengths_from_a_sharded_cache() -> None:
    prompts = ["--prompt", "a first prompt", "--prompt", "another one that is longer"]
    flags = ["--architecture", "llama", "--variant", "micro", "--tokenizer", "char_tokenizer"]
    flags += ["--distributed", "--distributed_strategy", "ring"]
    done = run_command([SCRIPT, *SHORT, *flags, *prompts], ranks=2)
    assert done.returncode == 0, done.stderr
    header, first, second, times = done.stdout.split("\n\n", 3)
    assert header.startswith("model: llama micro, random weights: its text means nothing, fp32 on ")
    assert "\nprompt: 15 and 27 tokens over 2 ranks\nweights: " in header
    assert "a first prompt" in first and "another one that is longer" in second
    for line in ("time to first token: ", "time per token: ", "one rank alone: the same tokens"):
        assert line in times


def test_weights_of_hugging_face_on_unequal_shards_without_a_cache(tmp_path: Path) -> None:
    model = save(tiny_llama(vocab_size=256), tmp_path / "model")
    (tmp_path / "prompt.txt").write_text("x" * 40)
    weights = ["--architecture", "hf_pretrained", "--model_path", model, "--no_use_cache"]
    options = ["--prompt_file", tmp_path / "prompt.txt", "--block_lens", "10,30"]
    done = run_command([SCRIPT, *SHORT, *weights, *options], ranks=2)
    assert done.returncode == 0, done.stderr
    assert "one rank alone: the same tokens" in done.stdout


def test_without_a_model_it_is_a_small_random_one() -> None:
    done = run_command([SCRIPT, "--max_new_tokens", "2"])
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(loading the weights, \d+ s\n)*", done.stderr)  # every ten seconds
    header, text, times = done.stdout.split("\n\n", 2)
    assert header.startswith("model: llama micro, random weights: its text means nothing, fp32 on ")
    assert text.startswith("The ring passes keys and values on, ")
    assert all(
        char.isprintable() or char == "\n" for char in done.stdout
    )  # whatever the model says
    assert times.startswith("time to first token: ")


def test_a_folder_alone_is_in_the_format_of_hugging_face(tmp_path: Path) -> None:
    model = save(tiny_llama(vocab_size=256), tmp_path / "model")
    done = run_command([SCRIPT, *SHORT, "--model_path", model], ranks=2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("model: model, fp32 on cpu\n")
    assert "one rank alone: the same tokens" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--model_path", "nowhere"],
            "path must be a folder with config.json and *.safetensors, got 'nowhere'",
        ),
        (
            ["--variant", "7b", "--model_path", "nowhere"],
            "--model_path must be a folder or a file, got no such path nowhere",
        ),
        (
            ["--architecture", "granite"],
            "--variant must be of 8b, 3_1_2b for granite, got none",
        ),
        (["--architecture", "lama"], "llama, "),
        (["--prompt_file", "nowhere"], "No such file or directory: 'nowhere'"),
        (["--tokenizer", "nowhere.model"], "--tokenizer must be a folder with a tokenizer, or "),
        (["--max_new_tokens", "0"], "--max_new_tokens must be at least 1, got 0"),
    ],
)
def test_wrong_usage_is_one_sentence(arguments: list[str], message: str) -> None:
    done = run_command([SCRIPT, *arguments])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("inference: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_more_tokens_than_the_model_has_positions_are_refused_before_the_first() -> None:
    done = run_command([SCRIPT, "--device_type", "cpu", "--max_new_tokens", "2000000"])
    assert done.returncode == 2 and "time" not in done.stdout
    message = "prompt and --max_new_tokens must be at most the model's 1024 tokens together, got 76"
    assert done.stderr.splitlines()[-1] == f"inference: {message} and 2000000"


@pytest.mark.skipif("cuda" in DEVICES, reason="a build without CUDA kernels refuses the device")
def test_a_device_that_is_not_there_is_refused_under_the_name_of_the_flag() -> None:
    done = run_command([SCRIPT, "--device_type", "cuda"])
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("inference: --device_type cuda must have a ringattn built with ")


def test_a_prompt_beside_a_file_is_refused() -> None:
    done = run_command([SCRIPT, "--prompt", "a", "--prompt_file", "prompt.txt"])
    assert (done.returncode, done.stdout) == (2, "")
    assert "--prompt_file: not allowed with argument --prompt" in done.stderr


def test_wrong_lengths_are_one_sentence() -> None:
    done = run_command([SCRIPT, "--partition", "half"])
    assert (done.returncode, done.stdout) == (2, "")
    message = (
        "--partition/--block_lens: must be even, auto or lengths such as 3000,1096, got 'half'"
    )
    assert message in done.stderr.splitlines()[-1]
