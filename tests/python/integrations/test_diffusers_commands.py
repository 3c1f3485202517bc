# SPDX-License-Identifier: Apache-2.0
"""The example and the benchmark of diffusers' transformers run, small and on CPU."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest
from _commands import run_command

if importlib.util.find_spec("diffusers") is None:
    pytest.skip("needs diffusers", allow_module_level=True)


def test_the_example_gives_the_answer_of_one_device() -> None:
    done = run_command(["examples/diffusers_wan.py"], ranks=2)
    assert done.returncode == 0, done.stderr
    # Both ranks print at once, and a line and its end are two writes.
    said = re.findall(r"rank (\d): differs from one device by ([\d.e+-]+)", done.stdout)
    assert sorted(rank for rank, _ in said) == ["0", "1"]
    assert all(float(error) < 1e-5 for _, error in said)


def test_the_benchmark_compares_and_goes_on_where_a_peer_fails(tmp_path: Path) -> None:
    """diffusers' ring has no kernel on CPU. 3 tokens for each of 2 ranks, 4 heads."""
    stem = tmp_path / "ring"
    rounds = ["--rounds", "2", "--warmup", "0"]
    sizes = ["--grids", "1x2x3", "--heads", "4", "--head-dim", "16", "--blocks", "1"]
    options = ["--device", "cpu", "--dtype", "float32", *sizes, *rounds, "--out", str(stem)]
    done = run_command(["benchmarks/diffusers_ring.py", *options], ranks=2)
    assert done.returncode == 0, done.stderr
    with Path(f"{stem}.csv").open() as file:
        rows = {row["what"]: row for row in csv.DictReader(file)}
    ways = ["ringattn", "diffusers Ulysses, SDPA"]
    assert [*rows] == [
        *(f"forward: {way}" for way in (*ways, "one device, SDPA")),
        *(f"attention: {way}" for way in (*ways, "all_to_all + SDPA")),
    ]
    for row in rows.values():
        assert row["S"] == "6" and float(row["ms"]) > 0 and float(row["max error"]) < 2e-6
    assert float(rows["attention: ringattn"]["x ringattn"]) == 1
    remarks = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert sum("FlashAttention-2 left out: NotImplementedError: " in x for x in remarks) == 2
    assert sum("ringattn takes" in x and "of the fastest peer, " in x for x in remarks) == 2


@pytest.mark.parametrize(
    ("grids", "said"),
    [
        ("1x2x3,4x4", "must be frames x height x width, got '1x2x3,4x4'"),
        ("1x1x3", "--grids must have tokens that 2 ranks divide, got 3 tokens"),
    ],
)
def test_grids_that_cannot_be_split_are_wrong_usage(grids: str, said: str) -> None:
    command = ["benchmarks/diffusers_ring.py", "--device", "cpu", "--grids", grids]
    done = run_command(command, WORLD_SIZE="2")
    assert done.returncode == 2 and said in done.stderr.splitlines()[-1]
