# SPDX-License-Identifier: Apache-2.0
"""The script that compares the machine code of two builds, with a cuobjdump that prints a file."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from _scripts import ROOT

# One kernel in an anonymous namespace, one that is exported; each for two architectures.
STAGE = "_ZN8ringattn4cuda40_GLOBAL__N__b0a92790_8_stage_cu_acf760ba12stage_kernelEv"
STAGE_ELSEWHERE = "_ZN8ringattn4cuda43_GLOBAL__N__00000001_10_staging_cu_0000000212stage_kernelEv"
MERGE = "_ZN8ringattn4cuda5mergeEv"


def listing(name: str, *instructions: str) -> str:
    lines = [f"        /*{16 * i:04x}*/   {text} ;" for i, text in enumerate(instructions)]
    head = [f"\t\tFunction : {name}", '\t.headerflags\t@"EF_CUDA_SM80"']
    return "\n".join([*head, *lines, "\t\t..........", "", ""])


def sass(*listings: str, architectures: tuple[str, ...] = ("sm_80", "sm_90a")) -> str:
    header = "\nFatbin elf code:\n================\narch = {0}\n\n\tcode for {0}\n\n"
    return "".join(header.format(name) + "\n".join(listings) for name in architectures)


BASE = sass(listing(STAGE, "LDG R1", "EXIT"), listing(MERGE, "FADD R1", "EXIT"))


def compare(folder: Path, old: str, new: str, *options: str) -> subprocess.CompletedProcess[str]:
    """The script on two builds: their objects hold what the cuobjdump, which is `cat`, prints."""
    cuobjdump = folder / "cuobjdump"
    cuobjdump.write_text('#!/bin/sh\nexec cat "$2"\n')
    cuobjdump.chmod(0o755)
    for name, text in (("old", old), ("new", new)):
        (folder / name).mkdir()
        (folder / name / "kernels.cu.o").write_text(text)
    command = [sys.executable, str(ROOT / "scripts/compare_sass.py"), f"--cuobjdump={cuobjdump}"]
    command += [*options, str(folder / "old"), str(folder / "new")]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize(
    "new",
    [
        BASE,
        sass(listing(MERGE, "FADD R1", "EXIT"), listing(STAGE_ELSEWHERE, "LDG R1", "EXIT")),
    ],
    ids=["the same", "in another order and from another file"],
)
def test_builds_with_the_same_code_pass(tmp_path: Path, new: str) -> None:
    done = compare(tmp_path, BASE, new)
    assert (done.returncode, done.stderr) == (0, "")
    wanted = "compare_sass: 4 kernels in OLD, 4 in NEW: 0 differ, 0 missing, 0 new\n"
    assert done.stdout == wanted


@pytest.mark.parametrize(
    ("new", "said", "counts"),
    [
        (
            sass(listing(STAGE, "LDG R2", "EXIT"), listing(MERGE, "FADD R1", "EXIT")),
            ["differs sm_80", "stage_kernel", "/*0000*/ LDG R1 ; | /*0000*/ LDG R2 ;"],
            "2 differ, 0 missing, 0 new",
        ),
        (
            sass(listing(STAGE, "LDG R1", "EXIT"), listing(MERGE, "FADD R1")),
            ["differs sm_90a", "merge", "line 3 of 3 and 2: /*0010*/ EXIT ; | (end)"],
            "2 differ, 0 missing, 0 new",
        ),
        (
            sass(listing(STAGE, "LDG R1", "EXIT"), listing("fold", "EXIT")),
            ["missing sm_80", "new sm_90a fold"],
            "0 differ, 2 missing, 2 new",
        ),
        (
            sass(
                *(listing(STAGE, "LDG R1", "EXIT"), listing(MERGE, "FADD R1", "EXIT")),
                architectures=("sm_80",),
            ),
            ["missing sm_90a"],
            "0 differ, 2 missing, 0 new",
        ),
        (
            sass(
                *(listing(STAGE, "LDG R1", "EXIT"), listing(STAGE_ELSEWHERE, "EXIT")),
                listing(MERGE, "FADD R1", "EXIT"),
            ),
            ["1 kernels of this name in OLD, 2 in NEW"],
            "2 differ, 0 missing, 0 new",
        ),
    ],
    ids=["an instruction", "the length", "names", "architectures", "two of one name"],
)
def test_other_code_fails(tmp_path: Path, new: str, said: list[str], counts: str) -> None:
    done = compare(tmp_path, BASE, new)
    assert (done.returncode, done.stderr) == (1, "")
    printed = re.sub(" +", " ", done.stdout)
    assert all(text in printed for text in said), done.stdout
    assert done.stdout.endswith(f": {counts}\n")


def test_kernels_of_new_names_are_paired_by_their_code(tmp_path: Path) -> None:
    fold, other = "_ZN8ringattn4cuda4foldEv", "_ZN8ringattn4cuda9fold_rowsEv"
    renamed = sass(listing(STAGE, "LDG R1", "EXIT"), listing(fold, "FADD R1", "EXIT"))
    changed = sass(listing(STAGE, "LDG R1", "EXIT"), listing(fold, "FADD R2", "EXIT"))
    twice = sass(
        *(listing(STAGE, "LDG R1", "EXIT"), listing(fold, "FADD R1", "EXIT")),
        listing(other, "FADD R1", "EXIT"),
    )
    results = {
        "renamed": (BASE, renamed, ["--renamed"], 0, "0 differ, 0 missing, 0 new, 2 renamed"),
        "not asked for": (BASE, renamed, [], 1, "0 differ, 2 missing, 2 new"),
        "changed": (BASE, changed, ["--renamed"], 1, "0 differ, 2 missing, 2 new, 0 renamed"),
        "two for one": (BASE, twice, ["--renamed"], 1, "0 differ, 0 missing, 2 new, 2 renamed"),
        "one for two": (twice, BASE, ["--renamed"], 1, "0 differ, 2 missing, 0 new, 2 renamed"),
    }
    for name, (old, new, options, status, counts) in results.items():
        folder = tmp_path / name
        folder.mkdir()
        done = compare(folder, old, new, *options)
        assert (done.returncode, done.stderr) == (status, ""), name
        assert done.stdout.endswith(f": {counts}\n"), name


@pytest.mark.parametrize(
    "text", ["", sass(listing(STAGE)).replace('\t.headerflags\t@"EF_CUDA_SM80"', "")]
)
def test_a_build_without_code_is_refused(tmp_path: Path, text: str) -> None:
    """Two empty builds are no proof that nothing has changed."""
    done = compare(tmp_path, text, text)
    assert (done.returncode, done.stdout) == (2, "")
    assert "old must hold CUDA kernels with code for a device, got none" in done.stderr


def test_builds_must_be_there(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/compare_sass.py"), "nowhere", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    assert "a build must be a folder or a file, got nowhere" in done.stderr
