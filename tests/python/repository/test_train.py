# SPDX-License-Identifier: Apache-2.0
"""examples/train.py: losses do not depend on how many ranks share them, or on a run that ended."""

import csv
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from _commands import ROOT, run_command
from ringattn.models import load_model
from transformers import AutoModelForCausalLM

SCRIPT = "examples/train.py"
STEPS = 20
OPTIONS = [
    *("--tokens", 96, "--steps", STEPS, "--accumulate", 2, "--checkpoint-every", 5),
    *("--layers", 2, "--width", 32, "--heads", 4, "--kv-heads", 2, "--hidden", 48),
    *("--learning-rate", 0.01, "--dtype", "float32"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short documents, several in a sequence."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(60):
        text = "".join(f"{number * place % 11} apples and " for place in range(3 + number % 5))
        (folder / f"{number:02}.txt").write_text(text)
    done = run_command(["scripts/prepare_data.py", folder, "--out", folder / "data"])
    assert done.returncode == 0, done.stderr
    return folder / "data"


def train(data: Path, out: Path, *more: Any, ranks: int = 1) -> list[dict[str, float]]:
    """Rows of losses.csv."""
    command = [SCRIPT, "--data", data, "--out", out, *OPTIONS, *more]
    done = run_command(command, ranks=ranks, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stderr + done.stdout and "tok/s" in done.stderr
    with (out / "losses.csv").open() as file:
        return [{name: float(x) for name, x in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--accumulate", 0], "--accumulate must be at least 1, got 0"),
        (["--checkpoint-every", 0], "--checkpoint-every must be at least 1, got 0"),
        (
            ["--partition", "auto", "--weights", 1],
            "--weights must be left out with --partition auto",
        ),
        (["--data", "nowhere"], "--data must be a folder of scripts/prepare_data.py, got nowhere"),
        (["--weights", 1, 2], "--weights must be 1 finite numbers"),
        (["--weights", -1], "--weights must be 1 finite numbers, not negative"),
        (["--kv-heads", 3], "--kv-heads must divide --heads"),
        (["--width", 0], "--width must be at least 1, got 0"),
        (["--width", 63], "--width must be a multiple of 64, at most 2048, with --heads 8, got 63"),
        (["--dropout", 2], "--dropout must be from 0 to 1, got 2.0"),
        (["--init", "model", "--tie-heads"], "--tie-heads must be left out with --init"),
    ],
)
def test_wrong_usage_is_said_before_anything_runs(
    data: Path, tmp_path: Path, more: list[Any], sentence: str
) -> None:
    command = [SCRIPT, "--data", data, "--out", tmp_path / "out", *more]
    done = run_command(command, ranks=1, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2 and sentence in done.stderr
    assert not (tmp_path / "out").exists()


def losses(rows: list[dict[str, float]]) -> list[float]:
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return [row["loss"] for row in rows]


@pytest.fixture(scope="module")
def alone(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on one process."""
    out = tmp_path_factory.mktemp("runs") / "alone"
    train(data, out)
    return out


def of(run: Path) -> list[float]:
    with (run / "losses.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize(
    ("ranks", "more"), [(2, []), (3, ["--weights", 5, 1, 2, "--recompute"])], ids=["even", "uneven"]
)
def test_losses_of_several_ranks_are_those_of_one(
    data: Path, alone: Path, tmp_path: Path, ranks: int, more: list[Any]
) -> None:
    expected = of(alone)
    assert expected[-1] < 0.8 * expected[0]
    for given, right in zip(
        losses(train(data, tmp_path, *more, ranks=ranks)), expected, strict=True
    ):
        assert math.isclose(given, right, rel_tol=1e-4)


def test_ranks_that_are_measured_have_the_same_losses(
    data: Path, alone: Path, tmp_path: Path
) -> None:
    rows = train(data, tmp_path, "--partition", "auto", ranks=2)
    for given, right in zip(losses(rows), of(alone), strict=True):
        assert math.isclose(given, right, rel_tol=1e-4)


def test_a_run_that_was_killed_goes_on_with_the_same_losses(
    data: Path, alone: Path, tmp_path: Path
) -> None:
    command = [sys.executable, SCRIPT, "--data", data, "--out", tmp_path, *OPTIONS]
    process = subprocess.Popen(
        [str(part) for part in command], cwd=ROOT, stderr=subprocess.DEVNULL, env=_environment()
    )
    deadline = time.monotonic() + 300
    while not (tmp_path / "checkpoints" / "step-00000010").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.kill()
    process.wait()
    with (tmp_path / "losses.csv").open("a") as file:
        file.write("\n")  # as an editor leaves it
    assert losses(train(data, tmp_path, "--resume")) == of(alone)
    refused = run_command([SCRIPT, "--data", data, "--out", tmp_path, *OPTIONS])
    assert refused.returncode != 0 and "without --resume" in refused.stderr


def test_a_start_without_a_step_leaves_the_folder_new(
    data: Path, alone: Path, tmp_path: Path
) -> None:
    more = ["--init", alone / "model", "--steps", 1]
    command = [SCRIPT, "--data", data, "--out", tmp_path, *OPTIONS, *more]
    refused = run_command([*command, "--tokens", 97], CUDA_VISIBLE_DEVICES="")
    assert refused.returncode == 1 and "at most the 96 tokens" in refused.stderr
    assert [row["step"] for row in train(data, tmp_path, *more)] == [1]


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--layers", 1], "--layers must be 2 with --resume, got 1"),
        (["--layers", 3], "--layers must be 2 with --resume, got 3"),
        (["--heads", 2, "--kv-heads", 1], "--heads must be 4 with --resume, got 2"),  # same shapes
        (["--tie-heads"], "--tie-heads must be False with --resume, got True"),
    ],
)
def test_another_model_does_not_go_on_from_a_checkpoint(
    data: Path, alone: Path, tmp_path: Path, more: list[Any], sentence: str
) -> None:
    def files() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    shutil.copytree(alone, tmp_path, dirs_exist_ok=True)
    before = files()
    command = [SCRIPT, "--data", data, "--out", tmp_path, *OPTIONS, "--resume", *more]
    refused = run_command(command, CUDA_VISIBLE_DEVICES="")
    assert refused.returncode == 1 and refused.stderr.endswith(f"{sentence}\n")
    assert files() == before


def test_dropout_depends_on_the_step_alone(data: Path, alone: Path, tmp_path: Path) -> None:
    more = ["--dropout", 0.2, "--across-documents", "--recompute"]
    expected = losses(train(data, tmp_path, *more, ranks=2))
    assert expected != of(alone)
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000020")
    shutil.rmtree(tmp_path / "model")
    assert losses(train(data, tmp_path, *more, "--resume", ranks=2)) == expected


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def test_the_trained_model_is_a_hugging_face_directory(alone: Path) -> None:
    ours = load_model(alone / "model", group="single")
    theirs = AutoModelForCausalLM.from_pretrained(alone / "model", dtype=torch.float32)
    ids = torch.tensor([list(b"\0apples and apples")])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)
    kept = sorted(path.name for path in (alone / "checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000020"]
