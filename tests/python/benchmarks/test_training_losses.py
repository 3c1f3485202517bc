# SPDX-License-Identifier: Apache-2.0
"""benchmarks/training_losses.py: one training over several rings, step by step."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import training_losses
from test_benchmarks import read


def test_losses_of_rings_are_compared_step_by_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With trainings that are not run: tests/python/repository/test_train.py runs them."""
    given: list[list[str]] = []

    def train(command: list[str], **options: Any) -> None:
        assert options["check"] and options["env"]["CUDA_VISIBLE_DEVICES"] == ""
        given.append(command)
        out = Path(command[command.index("--out") + 1])
        out.mkdir()
        apart = 1e-5 if "--weights" in command else 0.0
        losses = [f"{step},{loss * (1 + apart)}\n" for step, loss in ((1, 5.0), (2, 4.0))]
        (out / "losses.csv").write_text("step,loss\n" + "".join(losses))

    stem, figure = tmp_path / "losses", tmp_path / "losses.svg"
    arguments = ["--data", "texts", "--out", str(stem), "--figure", str(figure)]
    arguments += ["--rings", "1,2,2:1", "--", "--steps", "2"]
    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(sys, "argv", ["benchmarks/training_losses.py", *arguments])
    # The commit of a header is git's word, which is not asked for here.
    monkeypatch.setenv("RINGATTN_COMMIT", "0")
    training_losses.main()

    alone, even, uneven = given
    assert "--nproc-per-node" not in alone and "--weights" not in even
    for command in (even, uneven):
        assert command[command.index("--nproc-per-node") + 1] == "2"
    place = uneven.index("--weights")
    assert uneven[place:] == ["--weights", "2", "1"]
    assert all(command[command.index("--dtype") + 1] == "float32" for command in given)

    rows = read(stem)
    names = ["1 rank", "2 ranks", "2 ranks, 2:1"]
    assert [*rows[0]] == ["step", *names, "largest difference"]
    assert [float(row["1 rank"]) for row in rows] == [5.0, 4.0]
    assert all(float(row["largest difference"]) == pytest.approx(1e-5) for row in rows)
    assert "2 ranks, 2:1" in figure.read_text()
