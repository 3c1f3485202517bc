# SPDX-License-Identifier: Apache-2.0
"""scripts/test.sh prints its parts in order, and long commands show how far they are."""

import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import conftest
import pytest
import torch
from _scripts import commands_on, copy_of_scripts
from _waiting import eventually


def test_a_long_command_says_how_far_it_is(tmp_path: Path) -> None:
    copy_of_scripts(tmp_path)
    command = (
        ". scripts/progress.sh; ringattn_log_every=1;"
        "ringattn_progress_or_log name 'x: building'"
        ' sh -c \'echo "[3/9] c++ file"; until grep -q "3 of 9" said; do sleep 0.1; done\'; '
        "ringattn_progress_or_log name 'x: more' sh -c 'echo because; exit 3' || echo status $?"
    )
    with (tmp_path / "said").open("w") as said:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=said,
            text=True,
            timeout=600,
        )
    lines = (tmp_path / "said").read_text().splitlines()
    assert re.fullmatch(r"x: building, \d+ s \(3 of 9 steps\)", lines[1])
    assert re.fullmatch(r"x: building: done in \d+ s", lines[-4])
    assert lines[0] == "x: building" and lines[-1] == "because"
    assert re.fullmatch(r"x: more: failed after \d+ s \(build/name.log\)", lines[-2])
    assert done.stdout == "status 1\n"


@pytest.mark.parametrize(("cpp", "status"), [("exit 0", 0), ("exit 8", 1)])
def test_parts_are_printed_in_order_and_pytest_comes_last(
    tmp_path: Path, cpp: str, status: int
) -> None:
    copy_of_scripts(
        tmp_path,
        setup="ringattn_build_dir() { echo build; }; ringattn_progress_or_log() { :; }",
        # It waits for pytest to run beside it.
        lint="for _ in {1..6000}; do [ -e ran ] || sleep 0.1; done; cat ran && echo lint is slow",
    )
    path = commands_on(
        tmp_path / "bin", ctest=f"echo 1 test; {cpp}", python=": >ran; echo $1 $2 $3; echo 3 passed"
    )
    done = subprocess.run(
        ["bash", "scripts/test.sh", "python", "cpp", "lint"],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join([path, os.environ["PATH"]])},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == status
    about, *lines = [re.sub(r", \d+ s$", "", line) for line in done.stdout.splitlines()]
    assert re.fullmatch(r"test: lint cpp python: about \d+ min on two idle cores", about)
    assert lines[:4] == ["== lint", "lint is slow", "== lint: ok", "== cpp"]
    assert lines[4:7] == ["1 test", f"== cpp: {'FAILED' if status else 'ok'}", "== python"]
    assert lines[7:9] == ["-u -m pytest", "3 passed"]
    # What failed is there once more, last.
    again = ["== python: ok", "== cpp, once more", "1 test"]
    assert lines[9:] == (again if status else [])
    assert done.stderr == ("test: failed: cpp\n" if status else "")


def test_the_oldest_torch_runs_the_tests_on_which_torch_has_a_say(tmp_path: Path) -> None:
    copy_of_scripts(
        tmp_path,
        setup="ringattn_build_dir() { echo build; }; ringattn_progress_or_log() { :; }",
        test_torch='printf "%s\\n" "$@"',
        test_transformers="true",
    )
    done = subprocess.run(
        ["bash", "scripts/test.sh", "oldest", "transformers", "--", "-x"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    about, title, *arguments = done.stdout.splitlines()
    # Parts that run one after the other.
    assert about == "test: oldest transformers: about 17 min on two idle cores, less with -x"
    assert title == "== oldest"
    assert arguments[:4] == ["oldest", "--", "-k", "not cpu-1 and not cpu-3 and not cpu-4"]
    paths = arguments[4 : arguments.index("-x")]
    root = Path(__file__).parents[3]
    assert "tests/python/ops" in paths and all((root / path).exists() for path in paths)


def test_an_interrupt_ends_every_part_and_prints_what_there_is(tmp_path: Path) -> None:
    copy_of_scripts(
        tmp_path,
        setup="ringattn_build_dir() { echo build; }; ringattn_progress_or_log() { :; }",
        lint="echo lint begins; sleep 100",
    )
    (tmp_path / "wait.py").write_text(
        "import time\n"
        "try:\n"
        "    open('ran', 'w')\n"
        "    time.sleep(100)\n"
        "except KeyboardInterrupt:\n"
        "    print('2 passed')\n"
    )
    path = commands_on(tmp_path / "bin", python=f"exec {sys.executable} wait.py")
    process = subprocess.Popen(
        ["bash", "scripts/test.sh", "lint", "python"],
        cwd=tmp_path,
        env={**os.environ, "PATH": os.pathsep.join([path, os.environ["PATH"]])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    log = tmp_path / "build/test-results/lint.log"  # Python listens, and lint has printed
    assert eventually(lambda: (tmp_path / "ran").exists() and bool(log.read_text()))
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=600)
    assert process.returncode == 1
    assert out.splitlines()[1:6] == [
        *("== lint", "lint begins", "== lint: FAILED, interrupted", "== python", "2 passed")
    ]


@pytest.mark.parametrize(("num_devices", "num_workers"), [(0, 2), (1, 0), (4, 0)])
def test_two_workers_run_the_tests_unless_they_would_share_a_gpu(
    num_devices: int, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    assert conftest.pytest_xdist_auto_num_workers() == num_workers


class Worker:
    """Takes the tests that a scheduler of pytest-xdist gives it."""

    shutting_down = False

    def __init__(self, name: str) -> None:
        self.gateway = types.SimpleNamespace(id=name)
        self.given: list[int] = []

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def test_a_worker_without_files_of_its_own_takes_those_of_the_other() -> None:
    pytest.importorskip("xdist")
    files = ["cli/test_a.py", "ops/test_b.py", "models/test_c.py", "ops/test_d.py"]
    tests = [f"tests/python/{file}::test_{i}" for file in files for i in range(4)]
    options = types.SimpleNamespace(loadscopereorder=False)
    config: Any = types.SimpleNamespace(getvalue=lambda name: ["2*popen"], option=options)
    scheduler = conftest.pytest_xdist_make_scheduler(config, None)
    waits, computes = Worker("gw0"), Worker("gw1")
    for worker in (waits, computes):
        scheduler.add_node(worker)
        scheduler.add_node_collection(worker, tests)
    scheduler.schedule()
    assert (waits.given, computes.given) == ([0, 1, 2, 3], [4, 5, 6, 7])
    for index in range(2):  # of four: it is given more before it is done
        scheduler.mark_test_complete(waits, index)
    assert waits.given[4:] == [8, 9, 10, 11]
    for index in range(4, 6):
        scheduler.mark_test_complete(computes, index)
    assert computes.given[4:] == [12, 13, 14, 15]
