# SPDX-License-Identifier: Apache-2.0
"""scripts/setup.sh obtains what is missing, in the order it says, and nothing else."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _scripts import ROOT, commands_on, copy_of_scripts

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
        timeout=600,
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
        timeout=600,
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
        timeout=600,
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


@pytest.mark.parametrize(
    ("nvcc", "gpu", "asked_for", "installed", "built"),
    [
        (True, False, "", "nothing", "OFF"),
        (True, False, "ON", "nothing", "ON"),
        (True, True, "", "nothing", ""),
        (False, False, "", "nothing", ""),  # there are none to leave out
        (True, False, "", "", ""),  # kernels that are there stay
        (True, False, "", "OFF", "OFF"),
    ],
)
def test_kernels_for_a_demo_are_built_where_a_gpu_is(
    tmp_path: Path, nvcc: bool, gpu: bool, asked_for: str, installed: str, built: str
) -> None:
    """`installed`: what RINGATTN_CUDA was when the library was built."""
    stubs = ({"nvcc": "exit 0"} if nvcc else {}) | {"nvidia_smi": "echo GPU 0" if gpu else "exit 9"}
    path = commands_on(tmp_path / "bin", **stubs)
    copy_of_scripts(tmp_path)
    script = f"""
        . scripts/setup_tools.sh
        compgen() {{ false; }}  # devices of the machine that runs the test do not count
        ringattn_is_installed() {{ [ "${{RINGATTN_CUDA:-}}" = "{installed}" ]; }}
        ringattn_leave_out_kernels
        echo "${{RINGATTN_CUDA:-}}"
    """
    done = subprocess.run(
        [shutil.which("bash"), "-c", script],
        cwd=tmp_path,
        env={"PATH": path, "RINGATTN_CUDA": asked_for},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode, done.stdout) == (0, built + "\n")
    said = "setup: no GPU here: without kernels (RINGATTN_CUDA=ON builds them)\n"
    assert done.stderr == (said if built != asked_for else "")


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
        ("test.sh docs", "docs library"),
        ("test.sh tidy", "none library clang-tidy"),
        ("test.sh python", "test library"),
        ("test.sh oldest", "none toolchain"),
        ("test.sh", "lint,docs,test clang-format library catch2 library library library"),
        ("demo.sh --ranks 2", "none library-here"),
        ("demo_heterogeneous.sh", "study library-here"),
    ],
)
def test_a_script_sets_up_what_it_needs(tmp_path: Path, command: str, asked_for: str) -> None:
    copy_of_scripts(tmp_path, setup='echo "asked for: $*"; exit 3')
    done = subprocess.run(
        ["bash", *f"scripts/{command}".split()],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stdout) == (3, f"asked for: {asked_for}\n")
