# SPDX-License-Identifier: Apache-2.0
"""benchmarks/scaling.py: right over eight ranks, and its figures add up."""

import json
import os
import sys
from pathlib import Path

import plot_scaling
import pytest
import scaling
import torch
from _commands import run_command

SMALL = ["--device", "cpu", "--rounds", "2", "--warmup", "1"]


def test_all_problems_are_right_over_eight_ranks(tmp_path: Path) -> None:
    stem = tmp_path / "right"
    command = ["benchmarks/scaling.py", *SMALL, "--parts", "correctness", "--out", stem]
    done = run_command(command, ranks=8, timeout=600)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    problems = {(row["mask"], row["total_seq"], row["shape"]) for row in rows}
    assert len(problems) == len(rows) == 16 and {row["world_size"] for row in rows} == {8}
    assert all(0 < row["error"] < 1e-3 and row["x_torch"] <= 2 for row in rows)


def test_a_wrong_problem_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    one = next(scaling.problems(device))
    monkeypatch.setattr(scaling, "problems", lambda _: iter([one]))
    report = scaling.Report("", {}, scaling.COLUMNS)
    groups = scaling.Groups.made([1])
    assert scaling.check(report, groups, device)
    monkeypatch.setattr(scaling, "MOST_OF_TORCH", 1e-6)
    assert not scaling.check(report, groups, device)
    with pytest.raises(ValueError, match="keys of a row must be columns"):
        report.add({"ms": 1.0})


def test_scaling_is_measured_beside_one_device_and_drawn(tmp_path: Path) -> None:
    stem, figures = tmp_path / "scaling", tmp_path / "figures"
    parts = ["--parts", "roofline,strong,weak", "--peak-tflops", "0.1", "--peak-gbps", "10"]
    sizes = ["--seq_lens", "64,128", "--strong_seqs", "128,256", "--weak_seq_locals", "64"]
    command = ["benchmarks/scaling.py", *SMALL, *parts, *sizes, "--out", stem]
    done = run_command([*command, "--save_fig", figures], ranks=2)
    assert done.returncode == 0, done.stderr
    rows = plot_scaling.read(Path(f"{stem}.csv"))
    cells = [(row["part"], row["total_seq"], row["world_size"]) for row in rows]
    assert sorted(cells) == [
        *(("roofline", 64, 2), ("roofline", 128, 2)),
        *(("strong", 128, 1), ("strong", 128, 2), ("strong", 256, 1), ("strong", 256, 2)),
        *(("weak", 64, 1), ("weak", 128, 2)),
    ]
    for row in rows:
        assert row["error"] < 2e-6
        assert row["speedup"] == pytest.approx(row["ref_ms"] / row["ring_ms"])
        # The reference has all cores, a rank one.
        assert row["ideal_speedup"] == min(1.0, row["world_size"] / (os.cpu_count() or 1))
        assert row["scaling_efficiency"] == pytest.approx(row["speedup"] / row["ideal_speedup"])
        pairs = row["total_seq"] * (row["total_seq"] + 1) / 2
        flops = 4 * 4 * 16 * pairs
        assert row["ref_tflops"] == pytest.approx(flops / row["ref_ms"] / 1e9)
        of_rank = row["ring_tflops"] * row["ring_ms"] * 1e9  # the busiest rank's
        assert flops / row["world_size"] <= of_rank * 1.0001 < 1.05 * flops / row["world_size"]
    (wide,) = [row for row in rows if row["part"] == "weak" and row["world_size"] == 2]
    # Queries and results of 64 tokens and 4 heads; keys and values of 128 tokens and 2 heads.
    traffic = 4 * 16 * (2 * 64 * 4 + 2 * 128 * 2)
    assert wide["flops_per_byte"] == pytest.approx(
        wide["ring_tflops"] * wide["ring_ms"] * 1e9 / traffic
    )
    assert {path.name for path in figures.iterdir()} == {
        f"scaling_h4of2_d16_float32.{kind}" for kind in ("png", "svg")
    }


def test_the_figure_has_six_panels() -> None:
    rows = [
        {
            "part": part,
            "shape": "H1",
            "total_seq": 1024.0 * (size if part == "weak" else 1),
            "seq_local": 1024.0 / (1 if part == "weak" else size),
            "world_size": size,
            "ref_ms": 8.0,
            "ring_ms": 10.0 / size,
            "speedup": 0.8 * size,
            "ideal_speedup": size,
            "scaling_efficiency": 0.8,
            "ring_tflops": 0.5,
            "flops_per_byte": 100.0,
            "peak_tflops": None,
        }
        for part in ("roofline", "strong", "weak")
        for size in (1.0, 2.0)
    ]
    figure = plot_scaling.draw(rows, "H1")
    titles = [ax.get_title() for ax in figure.axes]
    assert len(titles) == 6 and "roofline" in titles[0] and "TFLOPS" in titles[5]
    time, speedup = figure.axes[1].lines, figure.axes[2].lines
    assert [list(line.get_ydata()) for line in time] == [[10.0, 5.0], [8.0, 4.0]]  # ours, ideal
    assert [list(line.get_ydata()) for line in speedup] == [[0.8, 1.6], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--parts speed", "--parts: must be of correctness, roofline, strong, weak, got 'speed'"),
        ("--shapes huge", "--shapes: must be of h16d64, h32d128, gqa, tiny, got 'huge'"),
        ("--world-size 2 --world-sizes 4", "--world-sizes must be 2 ranks at most, got 4"),
    ],
)
def test_wrong_usage_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--device", "cpu", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        scaling.parse_options(scaling.parser())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_flags_of_earlier_benchmarks_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    given = "--num_ranks 2 --num_heads 16 --head_dim 128 --dtype bfloat16 --iters 7 --warmup 5"
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--device", "cpu", *given.split()])
    options = scaling.parse_options(scaling.parser())
    assert options.shapes == [scaling.Heads(16, 16, 128, "bfloat16")]
    assert (options.world_size, options.rounds, options.warmup) == (2, 7, 5)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--device", "cpu"])
    options = scaling.parse_options(scaling.parser())
    assert (options.shapes, options.rounds) == ([scaling.SHAPES["tiny"]], 20)


def test_another_table_is_not_drawn(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "other.csv").write_text("S,ms\n1,2\n")
    arguments = [str(tmp_path / "other.csv"), "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["plot_scaling.py", *arguments])
    with pytest.raises(SystemExit):
        plot_scaling.main()
    message = "TABLE.csv must be a table of benchmarks/scaling.py, got no rows of parts"
    assert message in capsys.readouterr().err.splitlines()[-1]
