# SPDX-License-Identifier: Apache-2.0
"""The example of a ring with a slow rank: what it refuses, and what it says of a noisy machine."""

import importlib.util
import sys
from pathlib import Path

import pytest
import ringattn
from _commands import run_command

ROOT = Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location(
    "heterogeneous_demo", ROOT / "examples/heterogeneous_demo.py"
)
demo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(demo)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--seq-len 0", "--seq-len must be at least 1, got 0"),
        ("--speed 0", "--speed must lie in (0, 1], got 0"),
        ("--speed 1.5", "--speed must lie in (0, 1], got 1.5"),
        ("--speed nan", "--speed must lie in (0, 1], got nan"),
        (
            "--figure nowhere/x.png",
            "--figure must be a file that can be written, got nowhere/x.png",
        ),
        ("--figure x.txt", "--figure must end in .png or .svg, got x.txt"),
        ("", "ranks must be started by torchrun, got a process without it"),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["heterogeneous_demo.py", *options.split()])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_it_runs_on_ranks_of_any_number_and_length() -> None:
    command = ["examples/heterogeneous_demo.py", "--seq-len", "48"]
    done = run_command(command, ranks=3, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "3 ranks on cpu, 48 tokens" in done.stdout
    assert "even zigzag" in done.stdout and "rebalanced" in done.stdout
    # What the last rank did, or why that could not be seen.
    report = done.stdout.partition("from request 12 on the last rank runs at 0.8")[2].splitlines()
    assert len(report[1].split()) == demo.REQUESTS
    assert all(line.startswith("note: timings on this machine were too") for line in report[2:])


def test_ranks_that_were_measured_as_equal_are_noticed() -> None:
    def told_apart(speed: float, *tflops: float) -> bool:
        return demo.told_apart(speed, [ringattn.RankProfile(x, 1.0) for x in tflops])

    assert told_apart(0.4, 1.0, 1.0, 0.5)
    assert not told_apart(0.4, 1.0, 1.0)
    assert not told_apart(0.4, 1.0, 0.5, 0.7)
    assert told_apart(1.0, 1.0, 1.0)  # they are equal
    assert told_apart(0.4, 1.0)


@pytest.mark.parametrize(
    ("change", "before", "after", "seen"),
    [
        (2.0, (1.0, 1.0), (1.0, 2.0), True),
        (2.0, (1.0, 1.0), (1.1, 1.2), False),  # everything became faster
        (2.0, (1.0, 1.0, 1.0), (1.0, 1.0, 1.3), False),
        (0.8, (1.0, 1.0), (1.0, 0.82), True),
        (0.8, (1.0, 1.0), (1.0, 1.1), False),
        (1.0, (1.0, 1.0), (1.0, 0.9), True),  # nothing to follow
        (2.0, (1.0,), (1.0,), True),
    ],
)
def test_a_change_that_was_not_believed_is_noticed(change, before, after, seen) -> None:
    assert demo.followed(change, before, after) is seen


def test_noise_is_reported_with_its_size() -> None:
    text = demo.noise(["tell the ranks apart"], {"even": [1.0, 1.0, 1.1], "planned": [2, 4, 5]})
    assert text == (
        "note: timings on this machine were too noisy to tell the ranks apart: calls that should "
        "take the same differed by up to 75 %"
    )
