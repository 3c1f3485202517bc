# SPDX-License-Identifier: Apache-2.0
"""The scripts say how they are used, and refuse what they do not know, before they do anything."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def script(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    name, *arguments = command.split()
    return subprocess.run(
        ["bash", ROOT / "scripts" / name, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=60,
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
        *("setup.sh", "study_heterogeneous.sh", "test.sh"),
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
        ("setup.sh --extras", "setup: extras must be as in pyproject.toml, got --extras; usage: "),
        ("setup.sh test catch", "clang-format, clang-tidy, got catch; usage: "),
        ("study_heterogeneous.sh --seconds", "--seconds must be followed by a value, got none; "),
        ("study_heterogeneous.sh --seconds abc", "--seconds must be a number from 1 on, got abc; "),
        ("study_heterogeneous.sh --out", "--out must be followed by a value, got none; usage: "),
        ("study_heterogeneous.sh --fast", "study: options must be of these, got --fast; usage: "),
        ("test.sh all", "spills, tidy, oldest, torches, python, got all; usage: "),
    ],
)
def test_wrong_usage_is_one_line(command: str, message: str) -> None:
    done = script(command)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_help_of_setup_leaves_the_shell_that_sources_it() -> None:
    command = ["bash", "-euc", ". scripts/setup.sh --help; echo still here"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "still here"


def check_includes(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/check_includes.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


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


def commands_on(folder: Path, **stubs: str) -> str:
    """A PATH with what the scripts use of coreutils, and commands that are shell scripts of a line.
    Each of these writes its name and arguments to the file ``calls`` beside the folder."""
    folder.mkdir(parents=True)
    coreutils = "awk basename bash cat dirname env grep ln mkdir sh sleep sort tail tr true"
    for name in coreutils.split():
        (folder / name).symlink_to(shutil.which(name))
    for name, body in stubs.items():
        stub = folder / name.replace("_", "-")
        stub.write_text(f'#!/bin/sh\necho "$(basename $0) $*" >>{folder.parent}/calls\n{body}\n')
        stub.chmod(0o755)
    return str(folder)


def copy_of_scripts(folder: Path, **replaced: str) -> Path:
    """A checkout of scripts alone, some replaced; its build folder is its own."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name, text in replaced.items():
        (folder / "scripts" / f"{name}.sh").write_text(text)
        (folder / "scripts" / f"{name}.sh").chmod(0o755)
    return folder


#: Stub commands: root, or not; an installation that brings the tool, or fails.
ROOT_USER, OTHER_USER = {"id": "echo 0"}, {"id": "echo 1000"}
SUDO = {"sudo": 'test "$1" = -n && shift; exec "$@"'}
BRINGS = 'case "$*" in *install*) ln -s "$(dirname $0)/true" "$(dirname $0)/ninja" ;; esac'
#: `python -m pip install` brings the tool; `python -c` is asked for versions.
INDEX = {"python": f'case "$1" in -c) echo 2.11.0 ;; *) {BRINGS} ;; esac'}
APT, DNF = {"apt_get": BRINGS}, {"dnf": BRINGS}
NO_APT, NO_INDEX = {"apt_get": "exit 100"}, {"python": '[ "$1" != -m ] && echo 2.11.0'}
NINJA_BY_APT = "install --no-install-recommends ninja-build"
PIP_NINJA = "python -m pip install --constraint"


def need(
    tool: str, folder: Path, stubs: dict[str, str]
) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """How `ringattn_need TOOL` ends, and which commands it calls beside those that only ask."""
    path = commands_on(folder / "bin", **stubs)
    copy_of_scripts(folder)
    done = subprocess.run(
        [shutil.which("bash"), "-c", f". scripts/setup_tools.sh; ringattn_need {tool}"],
        cwd=folder,
        env={"PATH": path},
        capture_output=True,
        text=True,
        timeout=60,
    )
    calls = folder / "calls"
    called = calls.read_text().splitlines() if calls.exists() else []
    asks = ("id ", "ninja --version", "python -c", "env ", "c++ ")
    return done, [call for call in called if not call.startswith(asks)]


@pytest.mark.parametrize(
    ("stubs", "calls"),
    [
        (ROOT_USER | APT | INDEX | {"ninja": "exit 0"}, []),
        (ROOT_USER | APT | DNF | INDEX, [NINJA_BY_APT]),
        (ROOT_USER | DNF | INDEX, ["dnf install -y ninja-build"]),
        (OTHER_USER | SUDO | APT | INDEX, ["sudo -n true", "sudo -n env", NINJA_BY_APT]),
        (OTHER_USER | APT | INDEX, [PIP_NINJA]),
        (ROOT_USER | NO_APT | INDEX, [NINJA_BY_APT, " update", PIP_NINJA]),
        (ROOT_USER | NO_APT | NO_INDEX, [NINJA_BY_APT, " update", PIP_NINJA, None]),
        (OTHER_USER | NO_INDEX, [PIP_NINJA, None]),
    ],
    ids=["present", "apt", "dnf", "sudo", "index", "index after apt", "nothing", "nothing tried"],
)
def test_a_tool_is_used_or_installed_or_named(
    tmp_path: Path, stubs: dict[str, str], calls: list[str | None]
) -> None:
    """None at the end: one sentence says what to install."""
    done, called = need("ninja", tmp_path, stubs)
    named = None in calls
    assert done.returncode == named
    wanted = [call for call in calls if call is not None]
    assert len(called) == len(wanted) and all(map(str.__contains__, called, wanted)), called
    sentences = [line for line in done.stderr.splitlines() if "must be installed" in line]
    assert sentences == named * [
        "setup: ninja must be installed, got none; type one of: apt install ninja-build, "
        'dnf install ninja-build, pip install "ninja"'
    ]


def test_catch2_is_downloaded_where_no_package_manager_has_it(tmp_path: Path) -> None:
    download = "mkdir -p build; : >build/catch2-3.tar.gz"
    stubs = ROOT_USER | NO_APT | {"c++": "exit 1", "python": "exit 1", "cmake": download}
    done, called = need("catch2", tmp_path, stubs)
    assert done.returncode == 0 and len(called) == 3
    assert called[-1] == f"cmake -P {tmp_path}/tests/cpp/catch2_source.cmake"
    (tmp_path / "calls").unlink()
    shutil.rmtree(tmp_path / "bin")
    shutil.rmtree(tmp_path / "scripts")
    done, called = need("catch2", tmp_path, stubs)
    assert (done.returncode, done.stderr, called) == (0, "", [])  # it is there now


@pytest.mark.skipif(shutil.which("cmake") is None, reason="needs CMake")
def test_a_catch2_that_cannot_be_downloaded_is_named(tmp_path: Path) -> None:
    (tmp_path / "tests/cpp").mkdir(parents=True)
    source = shutil.copy(ROOT / "tests/cpp/catch2_source.cmake", tmp_path / "tests/cpp")
    done = subprocess.run(
        ["cmake", "-P", source],
        env={**os.environ, "https_proxy": "http://127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Catch2 must be installed (Debian, Ubuntu: apt install catch2)" in done.stderr
    assert not list((tmp_path / "build").iterdir())


#: In the place of scripts/setup_tools.sh: says what is asked for.
TOOLS_THAT_ARE_ASKED_FOR = """
ringattn_root="$PWD"
ringattn_say() { echo "setup: $*" >&2; }
ringattn_need() { echo "need $1"; }
ringattn_from_index() { echo "index $*"; }
ringattn_torch_version() { echo 2.11; }
"""


def setup(folder: Path, arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    copy_of_scripts(folder, setup_tools=TOOLS_THAT_ARE_ASKED_FOR)
    shutil.copy(ROOT / "pyproject.toml", folder)
    environment = {**os.environ, "VIRTUAL_ENV": sys.prefix, **variables}
    environment["PATH"] = f"{sys.prefix}/bin{os.pathsep}{environment['PATH']}"
    return subprocess.run(
        ["bash", "scripts/setup.sh", *arguments.split()],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("arguments", "needs"),
    [
        ("none toolchain", ["headers", "compiler", "cmake", "ninja"]),
        ("none toolchain catch2", ["headers", "compiler", "cmake", "ninja", "catch2"]),
        ("lint clang-format", ["clang-format"]),
    ],
)
def test_only_what_is_needed_is_asked_for(tmp_path: Path, arguments: str, needs: list[str]) -> None:
    done = setup(tmp_path, arguments)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line[5:] for line in lines if line.startswith("need ")] == needs
    installed = " ".join(line for line in lines if line.startswith("index "))
    assert not any(name in installed for name in ("pytest", "transformers", "pre-commit"))


def test_a_torch_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    metadata = tmp_path / "site/torch-2.9.0.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.9.0\n")
    done = setup(tmp_path / "checkout", "test", PYTHONPATH=str(tmp_path / "site"))
    assert done.returncode == 1 and "index" not in done.stdout
    assert re.search(r"^setup: torch must be \S+, got 2.9.0 in ", done.stderr, re.MULTILINE)

    stubs = OTHER_USER | INDEX
    need("ninja", tmp_path / "other", stubs)
    assert (tmp_path / "other/build/constraints.txt").read_text() == "torch==2.11.0\n"


def test_python_must_be_the_one_of_the_active_environment(tmp_path: Path) -> None:
    done = setup(tmp_path / "checkout", "none toolchain", VIRTUAL_ENV=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert "setup: python must be the one of the active environment " in done.stderr


@pytest.mark.parametrize(
    ("command", "asked_for"),
    [
        ("test.sh lint", "lint clang-format"),
        ("test.sh cpp", "none library catch2"),
        ("test.sh spills", "none library"),
        ("test.sh tidy", "none library clang-tidy"),
        ("test.sh python", "test library"),
        ("test.sh oldest", "none toolchain"),
        ("test.sh", "lint,test clang-format library catch2 library library"),
        ("demo.sh --ranks 2", "none library"),
        ("demo_heterogeneous.sh", "study library"),
    ],
)
def test_a_script_sets_up_what_it_needs(tmp_path: Path, command: str, asked_for: str) -> None:
    copy_of_scripts(tmp_path, setup='echo "asked for: $*"; exit 3')
    done = subprocess.run(
        ["bash", *f"scripts/{command}".split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (3, f"asked for: {asked_for}\n")


def test_a_long_command_says_how_far_it_is(tmp_path: Path) -> None:
    copy_of_scripts(tmp_path)
    command = (
        ". scripts/progress.sh; ringattn_log_every=1;"
        "ringattn_progress_or_log name 'x: building' sh -c 'echo \"[3/9] c++ file\"; sleep 2.5'; "
        "ringattn_progress_or_log name 'x: more' sh -c 'echo because; exit 3' || echo status $?"
    )
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    lines = done.stderr.splitlines()
    assert re.fullmatch(r"x: building, [12] s \(3 of 9 steps\)", lines[1])
    assert re.fullmatch(r"x: building: done in [23] s", lines[-4])
    assert lines[0] == "x: building" and lines[-1] == "because"
    assert re.fullmatch(r"x: more: failed after \d s \(build/name.log\)", lines[-2])
    assert done.stdout == "status 1\n"


@pytest.mark.parametrize(("cpp", "status"), [("exit 0", 0), ("exit 8", 1)])
def test_parts_are_printed_in_order_and_pytest_comes_last(
    tmp_path: Path, cpp: str, status: int
) -> None:
    copy_of_scripts(
        tmp_path,
        setup="ringattn_build_dir() { echo build; }; ringattn_progress_or_log() { :; }",
        # It waits for pytest to run beside it.
        lint="for _ in {1..50}; do [ -e ran ] || sleep 0.1; done; cat ran && echo lint is slow",
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
        timeout=60,
    )
    assert done.returncode == status
    lines = [re.sub(r", \d s$", "", line) for line in done.stdout.splitlines()]
    assert lines[:4] == ["== lint", "lint is slow", "== lint: ok", "== cpp"]
    assert lines[4:7] == ["1 test", f"== cpp: {'FAILED' if status else 'ok'}", "== python"]
    assert lines[7:] == ["-u -m pytest", "3 passed", *(["== python: ok"] if status else [])]
    assert done.stderr == ("test: failed: cpp\n" if status else "")


def test_setup_is_told_its_extras_wherever_it_is_sourced() -> None:
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
