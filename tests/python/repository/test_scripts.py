# SPDX-License-Identifier: Apache-2.0
"""The scripts say how they are used, and refuse what they do not know, before they do anything."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from _scripts import ROOT


def script(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    name, *arguments = command.split()
    return subprocess.run(
        ["bash", ROOT / "scripts" / name, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )


def path_with(folder: Path, python3: str) -> str:
    """A PATH on which python3 is a shell script of one line."""
    program = folder / "python3"
    program.write_text(f"#!/bin/sh\n{python3}\n")
    program.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


@pytest.mark.parametrize(
    "name",
    [
        *("demo.sh", "demo_heterogeneous.sh", "gpu_results.sh", "lint.sh", "sanitize.sh"),
        *("run_all_benchmarks.sh", "setup.sh", "study_heterogeneous.sh", "test.sh"),
    ],
)
def test_help_is_given(name: str) -> None:
    done = script(f"{name} --help")
    assert (done.returncode, done.stderr) == (0, "") and len(done.stdout) > 50


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("demo.sh --ranks", "demo: --ranks must be a number from 1 on, got none; usage: "),
        ("demo.sh --ranks two", "demo: --ranks must be a number from 1 on, got two; usage: "),
        ("demo.sh --bytes 0", "demo: --bytes must be a number from 1 on, got 0; usage: "),
        ("demo_heterogeneous.sh --ranks 0", "--ranks must be a number from 1 on, got 0; usage: "),
        ("gpu_results.sh", "usage: scripts/gpu_results.sh OUT [stage...]"),
        ("lint.sh pylint", "lint: tool must be one of these, got pylint; usage: "),
        ("run_all_benchmarks.sh fast", "mode must be ring, regular or both, got fast; usage: "),
        ("run_all_benchmarks.sh --nproc 0", "--nproc must be a number from 1 on, got 0; usage: "),
        ("run_all_benchmarks.sh --out", "--out must be followed by a value, got none; usage: "),
        ("sanitize.sh all", "usage: scripts/sanitize.sh"),
        ("setup.sh --extras", "setup: extras must be as in pyproject.toml, got --extras; usage: "),
        ("setup.sh test catch", "clang-format, clang-tidy, got catch; usage: "),
        ("study_heterogeneous.sh --seconds", "--seconds must be followed by a value, got none; "),
        ("study_heterogeneous.sh --seconds abc", "--seconds must be a number from 1 on, got abc; "),
        ("study_heterogeneous.sh --out", "--out must be followed by a value, got none; usage: "),
        ("study_heterogeneous.sh --fast", "study: options must be of these, got --fast; usage: "),
        (
            "test.sh all",
            "spills, docs, tidy, oldest, torches, transformers, python, got all; usage: ",
        ),
    ],
)
def test_wrong_usage_is_one_line(command: str, message: str) -> None:
    done = script(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_help_of_setup_leaves_the_shell_that_sources_it() -> None:
    command = ["bash", "-euc", ". scripts/setup.sh --help; echo still here"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "still here"


def check_includes(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/check_includes.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def test_check_includes_gives_help_and_checks_folders(tmp_path: Path) -> None:
    done = check_includes("--help")
    assert (done.returncode, done.stderr) == (0, "") and "usage: check_includes.py" in done.stdout
    done = check_includes(tmp_path / "nowhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert "root must be a folder, got " in done.stderr.splitlines()[-1]
    (tmp_path / "core").mkdir()
    (tmp_path / "core/shape.h").write_text('#include "ATen/ATen.h"\n')
    done = check_includes(tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("csrc/core/shape.h: core may not see torch: core/shape.h -> ATen")


def test_check_includes_distinguishes_rooms_inside_of_another(tmp_path: Path) -> None:
    (tmp_path / "transport/symmetric").mkdir(parents=True)
    inner, outer = "transport/symmetric/transport.h", "transport/transport.h"
    (tmp_path / inner).write_text(f'#include "{outer}"\n')
    (tmp_path / outer).write_text(f'#include "{inner}"\n')
    done = check_includes(tmp_path)
    breaches = [line for line in done.stdout.splitlines() if line.startswith("csrc/")]
    assert breaches[0] == f"csrc/{outer}:1: transport may not include {inner}"


def test_check_includes_finds_cycles_of_headers_with_their_sources(tmp_path: Path) -> None:
    """Here none of the headers includes the other: the cycle goes through a source."""
    (tmp_path / "planner").mkdir()
    for path, include in (("one.h", "two.h"), ("two.cpp", "one.h"), ("three.h", "one.h")):
        (tmp_path / "planner" / path).write_text(f'#include "planner/{include}"\n')
    (tmp_path / "planner/two.h").touch()
    done = check_includes("--summary", tmp_path)
    breaches = [line for line in done.stdout.splitlines() if line.startswith("csrc/")]
    sentence = "units include each other in a cycle: planner/one, planner/two"
    assert breaches == [f"csrc/planner/one: {sentence}"]
    figures = "3 units, 2 levels, 0 upward arrows, 1 cycles of 2 units"
    assert f"planner/: {figures}\nall: {figures}\n" in done.stdout


def test_check_includes_allows_an_exception_for_as_long_as_it_is_one(tmp_path: Path) -> None:
    header = "transport/group/group_backend.h"
    source = "transport/p2p/process_group_backend.cpp"
    for path in (source, header):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()

    def lines_about_it() -> list[str]:
        lines = check_includes(tmp_path).stdout.splitlines()
        return [line for line in lines if source in line and header in line]

    listed = "scripts/check_includes.py: EXCEPTIONS names"
    assert lines_about_it() == [f"{listed} {header} for csrc/{source}, which does not include it"]
    (tmp_path / source).write_text(f'#include "{header}"\n')
    assert lines_about_it() == []


def test_setup_gets_its_extras_wherever_it_is_sourced() -> None:
    """Sourced without arguments, a script sees those of the one that sources it."""
    sourced = {
        path.name: re.findall(r"^\. scripts/setup\.sh *(\S*)", path.read_text(), re.MULTILINE)
        for path in (ROOT / "scripts").glob("*.sh")
    }
    with_setup = {name: extras for name, extras in sourced.items() if extras}
    assert {"demo.sh", "demo_heterogeneous.sh", "sanitize.sh", "test.sh"} <= with_setup.keys()
    assert all(extras[0] not in ("", "#") for extras in with_setup.values()), with_setup


def test_the_study_is_not_begun_by_a_python_without_torch(tmp_path: Path) -> None:
    path = path_with(tmp_path, f'exec {sys.executable} -I -S "$@"')
    done = script(f"study_heterogeneous.sh --out {tmp_path}", PATH=path)
    assert (done.returncode, done.stdout) == (1, "")
    assert "study: python3 must have what scripts/setup.sh study installs, got: " in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("benchmark", "plot", "status", "said"),
    [
        ("exit 0", "exit 0", 0, []),
        ("exit 1", "exit 0", 1, ["what decides failed", "the rest failed"]),
        ("exit 0", "exit 2", 1, ["figures of ranks2 failed", "figures of rebalance failed"]),
        ("exec sleep 60", "exit 0", 0, ["what decides is not complete"]),  # its time is over
    ],
)
def test_the_study_fails_where_a_part_does(
    tmp_path: Path, benchmark: str, plot: str, status: int, said: list[str]
) -> None:
    for stem in ("ranks2", "rebalance"):
        (tmp_path / f"{stem}.csv").write_text("")
    cases = f'case "$1" in -c) echo 0 ;; */plot.py) {plot} ;; *) {benchmark} ;; esac'
    path = path_with(tmp_path, cases)
    seconds = 2 if "sleep" in benchmark else 50
    done = script(f"study_heterogeneous.sh --seconds {seconds} --out {tmp_path}", PATH=path)
    assert done.returncode == status
    assert done.stderr.splitlines() == [f"study: {line}" for line in said]


def test_lint_fails_where_the_first_of_a_tools_commands_does(tmp_path: Path) -> None:
    """An unused name: `ruff check` refuses it, `ruff format` has nothing to say."""
    pytest.importorskip("ruff")
    (tmp_path / "unused.py").write_text("import os\n")
    done = script(f"lint.sh ruff {tmp_path / 'unused.py'}")
    assert done.returncode == 1 and "lint: failed: ruff" in done.stderr
