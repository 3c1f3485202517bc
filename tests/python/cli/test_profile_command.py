# SPDX-License-Identifier: Apache-2.0
"""``ringattn profile`` as a user runs it: tables, sweeps, and what it refuses in one sentence."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import ringattn
import torch
from _commands import command_line
from _profiles import check_profiles
from ringattn.__main__ import main
from ringattn.cli import profile
from ringattn.strategies import MatmulRow, Regression, read_table
from ringattn.testing import MPS

FLAGS = ("--device", "cpu", "--num-heads", "4", "--num-kv-heads", "2", "--head-dim", "64")


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_command_writes_profiles_that_load(tmp_path: Path, ranks: int) -> None:
    file = tmp_path / "profiles.json"
    done = command_line("profile", *FLAGS, "--json", file, ranks=ranks)
    assert done.returncode == 0, done.stderr
    profiles = ringattn.load_profiles(file)
    check_profiles(profiles, ranks)
    content = json.loads(file.read_text())
    assert content["versions"]["torch"] == torch.__version__
    for of_rank in content["measured"]:
        spread = of_rank["attention_tflops"]
        assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    header, *rows = done.stdout.splitlines()
    assert "attention TFLOPS" in header and "counts as" in header
    assert [row.split()[0] for row in rows] == [str(rank) for rank in range(ranks)]


def test_a_sweep_over_slowdowns_writes_tables_and_a_formula(tmp_path: Path) -> None:
    done = command_line(
        *("profile", *FLAGS, "--slowdowns", "1,20,400", "--sizes", "64,96,128"),
        *("--out", tmp_path, "--json", tmp_path / "sweep.json", "--seconds", "0.1"),
    )
    assert done.returncode == 0, done.stderr
    latencies = read_table(tmp_path / "ring_attention_profile.csv")
    assert [row.mps_pct for row in latencies] == [100, 5, 0.25]
    first, second, third = (row.latency_ms for row in latencies)  # type: ignore[union-attr]
    assert first < second < third  # by twenty each: other programs may have the cores meanwhile
    products = [
        row for row in read_table(tmp_path / "matmul_mps_sweep.csv") if isinstance(row, MatmulRow)
    ]
    assert [(row.mps_pct, row.size) for row in products] == [
        (percentage, size) for percentage in (100, 5, 0.25) for size in (64, 96, 128)
    ]
    for row in products:
        assert (row.dtype, row.bg_streams) == ("float32", 0)
        assert row.tflops == pytest.approx(2e-9 * row.size**3 / row.avg_ms, rel=1e-4)
    regression = Regression.read(tmp_path / "regression.json")
    again = Regression.fit(products)
    assert regression.r_squared == pytest.approx(again.r_squared, abs=1e-3)
    assert f"R^2 = {regression.r_squared:.3f}" in done.stdout
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert content["regression"]["r_squared"] == regression.r_squared
    # What it wrote splits a sequence.
    fast, slow = ringattn.strategies.lut(1000, [100, 5], latencies).lengths
    assert fast > slow


def test_a_sweep_too_small_for_a_formula_writes_the_rest(tmp_path: Path) -> None:
    done = command_line(
        *("profile", *FLAGS, "--slowdowns", "1,4", "--sizes", "64,96"),
        *("--out", tmp_path, "--json", tmp_path / "sweep.json", "--seconds", "0.05"),
    )
    assert done.returncode == 0, done.stderr
    assert "no formula" in done.stdout and not (tmp_path / "regression.json").exists()
    content = json.loads((tmp_path / "sweep.json").read_text())
    assert len(content["latencies"]) == 2 and len(content["matmuls"]) == 4
    assert content["regression"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--slowdowns", "1,2"), "--out must name a folder for what the sweep finds, got none"),
        (("--slowdowns", "1,x", "--out", "."), "--slowdowns must be positive numbers .* '1,x'"),
        (("--slowdowns", "0.5", "--out", "."), "factor must be a finite number of at least 1"),
        (("--percentages", "100", "--out", "."), "--percentages must have a CUDA device, got none"),
        (("--slowdowns=", "--out", "."), "--slowdowns must be positive numbers .* got ''"),
        (("--percentages=", "--out", "."), "--percentages must be positive numbers .* got ''"),
        (("--percentages", "101", "--out", "."), r"--percentages must lie in \(0, 100\], got 101"),
        (("--slowdowns", "1,inf", "--out", "."), "--slowdowns must be positive numbers .* '1,inf'"),
        (("--slowdowns", "1,0.5", "--out", "."), "factor must be a finite number of at least 1"),
        (("--slowdowns", "1", "--sizes", "inf", "--out", "."), "--sizes must be positive numbers"),
        (("--slowdowns", "1", "--sizes", "0.5", "--out", "."), "--sizes must be whole .* '0.5'"),
        (
            ("--slowdowns", "1", "--json", "nowhere/f.json", "--out", "."),
            "--json must name a file in a folder that can be written to, got nowhere/f.json",
        ),
        (("--json", "nowhere/f.json"), "--json must name a file in a folder that can be written"),
        (("--json", "."), "--json must name a file in a folder that can be written"),
        (("--sizes", "64"), "--sizes must come with --percentages or --slowdowns, got neither"),
        (("--out", "."), "--out must come with --percentages or --slowdowns, got neither"),
        (("--noise", "2"), r"--noise must lie in \[0, 1\), got 2.0"),
        (("--seconds", "-1"), "seconds must be finite and positive, got -1.0"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--device", "cpu", *arguments]) == 2
    out, error = capsys.readouterr()
    (line,) = error.splitlines()
    assert line.startswith("ringattn: ")
    assert re.search(message, line)
    assert len(out.splitlines()) <= 1  # a sweep's header, and nothing that was measured


# Writes how many multiprocessors a process has.
COUNT = """import sys, torch
with open(sys.argv[1], "a") as file:
    print(torch.cuda.get_device_properties(0).multi_processor_count, file=file)
"""


@pytest.mark.cuda
def test_a_sweep_over_percentages_writes_tables_and_a_formula(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process has its share of the device. Latencies do not tell: other processes may use the
    device, now more and now less."""
    counts, run_under = tmp_path / "counts", profile._run_under

    def run_and_count(mps: MPS, percentage: float, command: Sequence[str]) -> None:
        run_under(mps, percentage, command)
        run_under(mps, percentage, [sys.executable, "-c", COUNT, str(counts)])

    monkeypatch.setattr(profile, "_run_under", run_and_count)
    sweep = ["profile", "--percentages", "100,50,25", "--sizes", "1024,2048,4096"]
    assert main([*sweep, "--out", str(tmp_path), "--seconds", "0.2"]) == 0
    latencies = read_table(tmp_path / "ring_attention_profile.csv")
    assert [row.mps_pct for row in latencies] == [100, 50, 25]
    full, half, quarter = map(int, counts.read_text().split())
    assert 0.4 * full <= half <= 0.6 * full and 0.4 * half <= quarter <= 0.6 * half
    assert 0 < Regression.read(tmp_path / "regression.json").r_squared <= 1
