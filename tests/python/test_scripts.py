# SPDX-License-Identifier: Apache-2.0
"""The scripts say how they are used, and refuse what they do not know, before they do anything."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(command: str) -> subprocess.CompletedProcess[str]:
    name, *arguments = command.split()
    return subprocess.run(
        ["bash", ROOT / "scripts" / name, *arguments], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    "name",
    [
        *("demo.sh", "demo_heterogeneous.sh", "gpu_results.sh", "lint.sh", "sanitize.sh"),
        "study_heterogeneous.sh",
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
        ("sanitize.sh all", "usage: scripts/sanitize.sh"),
    ],
)
def test_wrong_usage_is_one_line(command: str, message: str) -> None:
    done = script(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_setup_is_told_its_extras_wherever_it_is_sourced() -> None:
    """Sourced without arguments, a script sees those of the one that sources it."""
    sourced = {
        path.name: re.findall(r"^\. scripts/setup\.sh *(\S*)", path.read_text(), re.MULTILINE)
        for path in (ROOT / "scripts").glob("*.sh")
    }
    with_setup = {name: extras for name, extras in sourced.items() if extras}
    assert {"demo.sh", "demo_heterogeneous.sh", "sanitize.sh", "test.sh"} <= with_setup.keys()
    assert all(extras[0] not in ("", "#") for extras in with_setup.values()), with_setup


def test_lint_fails_where_the_first_of_a_tools_commands_does(tmp_path: Path) -> None:
    """An unused name: `ruff check` refuses it, `ruff format` has nothing to say."""
    pytest.importorskip("ruff")
    (tmp_path / "unused.py").write_text("import os\n")
    done = script(f"lint.sh ruff {tmp_path / 'unused.py'}")
    assert done.returncode == 1 and "lint: failed: ruff" in done.stderr
