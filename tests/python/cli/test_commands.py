# SPDX-License-Identifier: Apache-2.0
"""Commands that the tests run behave as under ``python`` and ``torchrun``."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from _commands import run_command
from _distributed import AT_ONCE_S

SCRIPT = """
import os, sys
import helper
print(sys.argv, __name__, os.getcwd(), os.environ["SAID"], helper.VALUE, sys.path[0])
sys.stderr.write("an error\\n")
sys.exit(sys.argv[1] if len(sys.argv) > 1 else 3)
"""


@pytest.mark.parametrize("arguments", [[], ["a reason"]])
@pytest.mark.parametrize("command", [["folder/script.py"], ["-m", "folder.script"]])
def test_a_command_runs_as_under_python(
    tmp_path: Path, command: list[str], arguments: list[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/script.py").write_text(SCRIPT)
    for folder in (tmp_path, tmp_path / "folder"):
        (folder / "helper.py").write_text(f"VALUE = {folder.name!r}\n")
    ours = run_command([*command, *arguments], cwd=tmp_path, SAID="yes")
    theirs = subprocess.run(
        [sys.executable, *command, *arguments],
        cwd=tmp_path,
        env={"SAID": "yes"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert theirs.stdout.count("yes") == 1
    assert (ours.returncode, ours.stdout) == (theirs.returncode, theirs.stdout)
    assert ours.stderr == theirs.stderr


def test_ranks_meet_as_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor(dist.get_rank() + 1)\n"
        "dist.all_reduce(x)\n"
        "sys.stdout.write(f'{int(x)}\\n')\n"  # one write: print() may interleave ranks
        "dist.destroy_process_group()\n"
    )
    done = run_command(["script.py"], ranks=3, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "6\n6\n6\n"), done.stderr


def test_a_rank_that_fails_ends_the_others(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import os, sys, time\nif os.environ['RANK'] == '1':\n    sys.exit(5)\ntime.sleep(6000)\n"
    )
    start = time.monotonic()
    done = run_command(["script.py"], ranks=2, cwd=tmp_path)
    assert done.returncode == 1 and time.monotonic() - start < AT_ONCE_S


def test_a_command_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import time; time.sleep(6000)")
    with pytest.raises(subprocess.TimeoutExpired):
        run_command(["script.py"], cwd=tmp_path, timeout=0.5)
