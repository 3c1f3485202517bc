# SPDX-License-Identifier: Apache-2.0
"""Every test that needs GPUs is in exactly one of the groups that scripts/gpu_results.sh runs."""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from _gpus import GROUPS, group_of, num_gpus, parameters
from _scripts import ROOT, copy_of_scripts

# What pytest collects is asked in a process of its own: this one may have been given a selection.
COLLECT = """
import sys
import pytest
sys.path[:0] = ["tests/python", "tests/python/repository"]
from test_gpu_groups import Listing
sys.exit(pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", "tests/python"],
                     plugins=[Listing()]))
"""


class Listing:
    """Prints the tests that are collected: number of GPUs, group, ranks and name of each."""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            ranks = parameters(item).get("world_size", num_gpus(item))
            marked = any(item.iter_markers("cuda")) or any(item.iter_markers("multi_gpu"))
            print("TEST", num_gpus(item), group_of(item), ranks, int(marked), item.nodeid)


def test_every_test_that_needs_gpus_is_in_one_group() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COLLECT], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    tests = [line.split(" ", 5)[1:] for line in done.stdout.splitlines() if line[:5] == "TEST "]
    names = Counter(name for *_, name in tests)
    assert len(tests) > 2000 and max(names.values()) == 1
    sizes: dict[str, Counter[str]] = {"0": Counter()} | {str(n): Counter() for n in range(1, 5)}
    for size, group, ranks, marked, name in tests:
        assert (size != "0") == (group != "None") == (marked == "1"), name
        assert size == "0" or size == ranks, f"{name} must be marked multi_gpu(size={ranks})"
        sizes[size][group] += 1
    assert {group for of_size in sizes.values() for group in of_size} == {"None", *GROUPS}
    for of_size in sizes.values():  # groups of one number of GPUs are about as large
        assert max(of_size.values()) < 1.3 * min(of_size.values()), sizes


def groups_run(tmp_path: Path, num_gpus_here: int, *stages: str) -> list[tuple[str, str, str, str]]:
    """Group, kernels, GPUs and ranks that share one, of each run of pytest."""
    copy_of_scripts(tmp_path)
    programs = {
        "nvidia-smi": f"seq {num_gpus_here}",
        "python3": 'echo "$*" "|$RINGATTN_KERNEL_FAMILY|$CUDA_VISIBLE_DEVICES|'
        '$RINGATTN_RANKS_PER_GPU" >>calls; touch "$(echo "$*" | grep -o "[^ ]*[.]xml")"',
    }
    (tmp_path / "bin").mkdir()
    for name, body in programs.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    done = subprocess.run(
        ["bash", tmp_path / "scripts/gpu_results.sh", tmp_path / "out", *stages],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    runs = []
    for line in (tmp_path / "calls").read_text().splitlines():
        arguments, family, gpus, shared = line.split("|")
        group = re.search(r"--gpu-group (\S+)", arguments)
        assert group and " -k " not in arguments
        runs.append((group[1], family, gpus, shared))
    return runs


@pytest.mark.parametrize("num_gpus_here", [1, 2, 4])
def test_all_groups_run_whatever_the_number_of_gpus(tmp_path: Path, num_gpus_here: int) -> None:
    runs = groups_run(tmp_path, num_gpus_here, "tests")
    assert Counter(group for group, family, *_ in runs if not family) == Counter(GROUPS.keys())
    assert [group for group, family, *_ in runs if family == "sm80"] == ["1"]
    for group, _, gpus, shared in runs:
        size, places = GROUPS[group], len(gpus.split(","))
        assert set(gpus.split(",")) <= {str(gpu) for gpu in range(num_gpus_here)}
        assert places == min(size, num_gpus_here)
        assert size <= places * int(shared) < size + places


def test_a_group_is_a_stage(tmp_path: Path) -> None:
    runs = groups_run(tmp_path, 4, "tests_2b", "tests_2a")
    assert sorted(runs) == [("2a", "", "2,3", "1"), ("2b", "", "0,1", "1")]
