# SPDX-License-Identifier: Apache-2.0
"""scripts/inference.py: models of FMS over the ring say what they say on one rank."""

from pathlib import Path

import pytest
from _commands import run_command
from _llama import save, tiny_llama

pytest.importorskip("fms")

SCRIPT = "scripts/inference.py"
SHORT = ["--device_type", "cpu", "--max_new_tokens", "6", "--compare"]


def test_prompts_of_unequal_lengths_from_a_sharded_cache() -> None:
    prompts = ["--prompt", "a first prompt", "--prompt", "another one that is longer"]
    flags = ["--architecture", "llama", "--variant", "micro", "--tokenizer", "char_tokenizer"]
    flags += ["--distributed", "--distributed_strategy", "ring"]
    done = run_command([SCRIPT, *SHORT, *flags, *prompts], ranks=2)
    assert done.returncode == 0, done.stderr
    first, second, times = done.stdout.split("\n\n", 2)
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


def test_wrong_lengths_are_one_sentence() -> None:
    done = run_command([SCRIPT, "--partition", "half"])
    assert (done.returncode, done.stdout) == (2, "")
    message = (
        "--partition/--block_lens: must be even, auto or lengths such as 3000,1096, got 'half'"
    )
    assert message in done.stderr.splitlines()[-1]
