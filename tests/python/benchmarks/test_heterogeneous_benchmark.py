# SPDX-License-Identifier: Apache-2.0
"""The study of unequal ranks, whole and on CPU: profile, plan, run, rebalance, go on, plot.

What is checked is what does not depend on how busy the machine is.
"""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import heterogeneous
import pytest
import torch
from _commands import run_command
from _waiting import eventually
from study.splits import STRATEGIES

ROOT = Path(__file__).resolve().parents[3]
THEIR_COLUMNS = [
    *("split_type", "seq_len", "overall_latency_ms", "rank0_tokens", "rank0_latency_ms"),
    *("rank1_tokens", "rank1_latency_ms", "slowdown_pct"),
]
SMALL = [
    *("--device", "cpu", "--dtype", "float32", "--heads", "4", "--kv-heads", "2"),
    *("--head-dim", "16", "--hidden-dim", "96", "--rounds", "2", "--warmup", "0"),
    *("--settle-seconds", "0.02", "--watched", "2", "--cell-seconds", "1"),
]


def run(*command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_command(command, **variables)


def read(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def stem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep: equal ranks, and the last one at a tenth of its speed."""
    stem = tmp_path_factory.mktemp("study") / "het"
    sizes = ["--percentages", "10", "--what", "attention,layer"]
    done = run("benchmarks/heterogeneous.py", "sweep", *SMALL, *sizes, "--out", stem, SEQ_LEN="256")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "slow_over_fast" in done.stdout and "attention" in done.stdout
    return stem


def test_every_strategy_is_measured_exact_and_in_columns_that_are_known(stem: Path) -> None:
    rows = read(Path(f"{stem}.csv"))
    assert list(rows[0])[: len(THEIR_COLUMNS)] == THEIR_COLUMNS
    for what in ("attention", "layer"):
        for percentages in ("100,100", "100,10"):
            here = [r for r in rows if (r["what"], r["percentages"]) == (what, percentages)]
            splits = {row["split_type"] for row in here}
            assert splits == {*STRATEGIES, "reference_homogeneous"}
    for row in rows:
        assert int(row["rank0_tokens"]) + int(row["rank1_tokens"]) == int(row["seq_len"]) == 256
        assert float(row["max_error"]) < 1e-5
        ms = float(row["overall_latency_ms"])
        assert 0 < float(row["p10_ms"]) <= ms <= float(row["p90_ms"])
        assert float(row["efficiency"]) == pytest.approx(float(row["ideal_ms"]) / ms)
        for rank in "01":
            assert float(row[f"rank{rank}_tflops"]) > 0
            assert float(row[f"rank{rank}_tflops_unthrottled"]) > 0
            parts = ("own_ms", "remote_ms", "transfer_ms", "wait_ms")
            assert all(float(row[f"rank{rank}_{part}"]) >= 0 for part in parts)
    content = json.loads(Path(f"{stem}.json").read_text())
    assert {"command", "commit", "torch", "device"} <= content["header"].keys()
    assert "sweep" in content["header"]["command"]


def test_a_slow_rank_is_measured_as_one_and_gets_fewer_tokens(stem: Path) -> None:
    rows = {
        (row["what"], row["percentages"], row["split_type"]): row
        for row in read(Path(f"{stem}.csv"))
    }
    for what in ("attention", "layer"):
        planned = rows[what, "100,10", "planned"]
        # A tenth, but other programs may have the cores meanwhile.
        assert float(planned["rank1_tflops"]) < float(planned["rank0_tflops"])
        assert int(planned["rank1_tokens"]) < 128
        # As measured: no two ranks are equal to the last digit.
        equal = rows[what, "100,100", "planned"]
        assert equal["rank0_linear_tflops"] != equal["rank1_linear_tflops"]
        assert int(rows[what, "100,10", "uneven"]["rank1_tokens"]) == 23
        # The formula has nothing to say at 256 tokens, and that is said.
        assert "negative weights" in rows[what, "100,10", "formula"]["note"]
        assert int(rows[what, "100,10", "even"]["rank1_tokens"]) == 128


def test_the_rest_of_the_way_is_a_figure_of_each_kind(stem: Path) -> None:
    trace = Path(f"{stem}_trace")
    sizes = ["--seq-lens", "256", "--requests", "16", "--scenarios", "drift"]
    done = run("benchmarks/heterogeneous.py", "rebalance", *SMALL, *sizes, "--out", trace)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = read(Path(f"{trace}.csv"))
    assert [row["asked_speed"] for row in rows] == ["1.0"] * 4 + ["0.4"] * 6 + ["0.7"] * 6
    assert all(float(row[f"{name}_ms"]) > 0 for row in rows for name in ("rebalanced", "oracle"))
    (finding,) = read(Path(f"{trace}_findings.csv"))
    assert (finding["requests"], finding["changes"]) == ("16", "2")

    out = stem.parent / "figures"
    done = run("benchmarks/plot.py", f"{stem}.csv", "--trace", f"{trace}.csv", "--out", out)
    assert done.returncode == 0, done.stderr
    for name in ("attention/share_of_ideal", "layer/rank_timeline", "drift_trace"):
        assert all((out / f"{name}.{kind}").stat().st_size > 0 for kind in ("png", "svg", "csv"))


def test_what_is_finished_is_not_run_again(stem: Path) -> None:
    cells = Path(f"{stem}.cells.jsonl")
    before = cells.read_text().splitlines()
    assert len(before) == 4  # two sets of ranks, attention and layers
    # As after a crash in the middle of writing the last cell.
    cells.write_text("\n".join(before[:3]) + "\n" + before[3][:100] + "\n")
    command = ["benchmarks/heterogeneous.py", "sweep", *SMALL, "--percentages", "10"]
    command += ["--what", "attention,layer", "--seq-lens", "256", "--out", str(stem)]
    done = run(*command)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "1/4" not in done.stderr.split("3/4")[0]  # the bar begins at three
    after = cells.read_text().splitlines()
    assert after[:3] == before[:3] and len(after) == 5
    assert json.loads(after[4])["key"] == json.loads(before[3])["key"]
    # Nothing is left: no ranks are started, the reports are written from what there is.
    Path(f"{stem}.csv").unlink()
    done = run(*command, MASTER_ADDR="nowhere", RINGATTN_COMMIT="none")
    assert done.returncode == 0 and Path(f"{stem}.csv").exists()
    assert cells.read_text().splitlines() == after


def test_a_report_names_every_commit_and_date_of_its_cells() -> None:
    first = {"command": "a", "date": "2026-11-21", "commit": "aaa", "device": "CPU"}
    second = {**first, "date": "2026-11-22", "commit": "bbb", "cuda": "13.0"}
    assert heterogeneous.headers_of([first, second, first]) == {
        "command": "a",
        "date": "2026-11-21, 2026-11-22",
        "commit": "aaa, bbb",
        "device": "CPU",
        "cuda": "13.0",
    }


def test_a_start_by_torchrun_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["heterogeneous.py", "sweep", "--device", "cpu"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        heterogeneous.parse()
    assert "which this starts by itself, got a start by torchrun" in capsys.readouterr().err


def test_lengths_and_percentages_may_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["heterogeneous.py", "sweep", "--device", "cpu"])
    monkeypatch.setenv("SEQ_LEN", "512,64")
    monkeypatch.setenv("WEAK_GPU_PERCENTAGE", "")
    monkeypatch.setenv("SWEEP_SLOWDOWN_PCT", "30")
    arguments = heterogeneous.parse()
    assert arguments.seq_lens == [512, 64] and arguments.percentages == [30]
    monkeypatch.setenv("SEQ_LEN", "4K")
    with pytest.raises(SystemExit):
        heterogeneous.parse()
    assert "SEQ_LEN must be whole numbers with commas, got '4K'" in capsys.readouterr().err


def test_strong_ranks_of_the_environment_are_not_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WEAK_GPU_PERCENTAGE", "10")
    for strong in ("100", ""):
        monkeypatch.setenv("STRONG_GPU_PERCENTAGE", strong)
        arguments = heterogeneous.parse(["sweep", "--device", "cpu"])
        assert heterogeneous.sweep_sets(arguments) == [(100, 100), (100, 10)]
    monkeypatch.setenv("STRONG_GPU_PERCENTAGE", "50")
    heterogeneous.parse(["sweep", "--device", "cpu", "--sets", "50,10"])
    with pytest.raises(SystemExit) as ended:
        heterogeneous.parse(["sweep", "--device", "cpu"])
    assert ended.value.code == 2
    message = "STRONG_GPU_PERCENTAGE must be 100 (others: --sets), got 50"
    assert message in capsys.readouterr().err


def test_where_results_go_is_checked_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ["rebalance", *SMALL, "--out", str(tmp_path / "new/first"), "--then", "sweep", *SMALL]
    assert len(heterogeneous.parts_of([*first, "--out", str(tmp_path / "second")])) == 2
    assert [path.name for path in tmp_path.rglob("*")] == ["new"]  # a folder, no empty files
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as ended:
        heterogeneous.parts_of([*first, "--out", str(tmp_path / "file/second")])
    assert ended.value.code == 2
    message = "--out must be the stem of files that can be written, got: "
    assert message in capsys.readouterr().err.splitlines()[-1]


def test_one_rank_is_refused_as_that(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        heterogeneous.parse(["rebalance", "--device", "cpu", "--ranks", "1"])
    assert "--ranks must be at least 2, got 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--throttle", "mps"], "--throttle must be repeat on CPU, got mps"),
        (["--ranks-per-gpu", "2"], "--ranks-per-gpu must be 1 on CPU, got 2"),
        (["--sets", "100,50,20"], "must give 2 numbers in 1..100, got 100,50,20"),
        (["--percentages", "0"], "must give 2 numbers in 1..100, got 100,0"),
        (["--slow-ranks", "2"], "--slow-ranks must lie in 1..1, got [2]"),
        (["--strategies", "odd"], "must be of even, uneven"),
        (["--seq-lens", "0"], "--seq-lens must be at least 1, got 0"),
        (["--seq-lens", "64,-8"], "--seq-lens must be at least 1, got -8"),
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--rounds", "0"], "--rounds: must be an integer from 1 on, got '0'"),
        (["--warmup", "-1"], "--warmup: must be an integer from 0 on, got '-1'"),
        (["--noise", "nan"], "--noise must be at least 0, got nan"),
        (["--ranks", "0", "--slow-ranks", "0"], "--ranks must be at least 2, got 0"),
        (["--cell-seconds", "0"], "--cell-seconds must be positive, got 0.0"),
        (["--lut", "nowhere.csv"], "No such file or directory: 'nowhere.csv'"),
        (["--regression", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["--report-only"], "--report-only must have the --out of an earlier command, got none"),
        (["--wandb"], "--wandb must find the package wandb, got none"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["heterogeneous.py", "sweep", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as ended:
        heterogeneous.parse()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_a_rank_that_fails_ends_the_run_and_its_error_is_shown(tmp_path: Path) -> None:
    command = ["benchmarks/heterogeneous.py", "sweep", *SMALL, "--seq-lens", "64"]
    done = run(*command, "--transport", "nccl", "--out", tmp_path / "het")
    assert done.returncode == 1
    assert "--- rank 1 ---" in done.stderr and "nccl" in done.stderr
    assert "goes on from here" in done.stderr


@pytest.mark.parametrize(
    ("how", "after_s"),
    [(signal.SIGTERM, 0), (signal.SIGKILL, 6)],  # while they start, and while they compute
    ids=["terminated", "killed"],
)
def test_ranks_end_with_the_command(how: signal.Signals, after_s: float) -> None:
    command = ["benchmarks/heterogeneous.py", "sweep", *SMALL, "--seq-lens", "64"]
    started = subprocess.Popen(
        [sys.executable, *command, "--settle-seconds", "60"],
        cwd=ROOT,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    deadline = time.monotonic() + 600
    while len(ranks := children.read_text().split()) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(ranks) == 2
    time.sleep(after_s)
    started.send_signal(how)
    assert started.wait(timeout=600) != 0
    # A rank that is just being started notices once it has loaded what it needs.
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < deadline, f"ranks must end, got {ranks} still there"
        time.sleep(0.1)


def test_rows_go_to_weights_and_biases_where_it_is_there(tmp_path: Path) -> None:
    (tmp_path / "wandb.py").write_text(
        "class Run:\n"
        "    def log(self, row):\n"
        "        print('LOGGED', row['split_type'], 'slowdown' in row, 'efficiency' in row,\n"
        "              'speedup_over_even' in row)\n"
        "    def finish(self): print('FINISHED')\n"
        "def init(**config): return Run()\n"
    )
    command = ["benchmarks/heterogeneous.py", "sweep", *SMALL, "--seq-lens", "64"]
    command += ["--strategies", "even,even_zigzag,planned", "--wandb"]
    command += ["--out", str(tmp_path / "het")]
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    # The second goes on from the cells of the first: all of them are logged, not only the new one.
    for sets, num_rows in (("100,100", 4), ("100,50", 8)):
        done = run(*command, "--sets", sets, PYTHONPATH=path)
        assert done.returncode == 0, done.stderr
        logged = [line for line in done.stdout.splitlines() if line.startswith("LOGGED")]
        assert len(logged) == num_rows and "LOGGED planned True True True" in logged
        assert all(line.endswith("True True True") for line in logged)
        assert done.stdout.index("LOGGED") < done.stdout.index("FINISHED")


def test_parts_of_one_command_share_starts_and_stores(tmp_path: Path) -> None:
    """Layers of the same ranks come with attention, before other ranks are started; what another
    command has finished is in the report too."""
    part = ["sweep", *SMALL, "--strategies", "even_zigzag", "--seq-lens", "64"]
    part += ["--out", str(tmp_path / "het")]
    first = [*part, "--sets", "100,50"]
    layers = [*part, "--sets", "100,100", "--what", "layer"]
    done = run("benchmarks/heterogeneous.py", *first, "--then", *layers)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    lines = (tmp_path / "het.cells.jsonl").read_text().splitlines()
    order = [json.loads(json.loads(line)["key"])[1] for line in lines]
    assert [(cell["percentages"], cell["what"]) for cell in order] == [
        ([100, 100], "attention"),
        ([100, 100], "layer"),
        ([100, 50], "attention"),
    ]

    done = run("benchmarks/heterogeneous.py", *part, "--sets", "50,100", "--report-only")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    rows = {(row["percentages"], row["what"]) for row in read(tmp_path / "het.csv")}
    assert rows == {("100,50", "attention"), ("100,100", "layer"), ("100,100", "attention")}
    # It names what measured them, not what wrote it.
    commands = json.loads((tmp_path / "het.json").read_text())["header"]["command"].split(
        ", python"
    )
    assert len(commands) == 2 and "--sets 100,50" in commands[0] and "--what layer" in commands[1]


def test_parts_with_one_stem_have_the_same_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    part = ["sweep", *SMALL, "--out", str(tmp_path / "het")]
    assert len(heterogeneous.parts_of([*part, "--then", *part])) == 2
    with pytest.raises(SystemExit, match="parts with one --out must have the same settings"):
        heterogeneous.parts_of([*part, "--then", *part, "--rounds", "9"])


def test_a_terminated_run_reports_its_finished_cells(tmp_path: Path) -> None:
    command = ["benchmarks/heterogeneous.py", "sweep", *SMALL, "--seq-lens", "64,128"]
    command += ["--strategies", "even_zigzag", "--percentages", "50,40,30,20,10"]
    started = subprocess.Popen(
        [sys.executable, *command, "--out", tmp_path / "het"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    cells = tmp_path / "het.cells.jsonl"
    assert eventually(lambda: cells.exists() and "\n" in cells.read_text())
    started.terminate()
    assert started.wait(timeout=600) != 0
    sets = [row["percentages"] for row in read(tmp_path / "het.csv")]
    assert "100,100" in sets and "100,10" not in sets


@pytest.mark.parametrize(
    ("gpus", "ranks_per_gpu", "starts"), [(4, 1, 15), (2, 1, 8), (0, 1, 8), (1, 4, 15), (1, 1, 8)]
)
def test_the_whole_study_asks_for_what_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, ranks_per_gpu: int, starts: int
) -> None:
    """Its command lines are understood; what decides comes first, equal ranks before all others."""
    commands = tmp_path / "commands"
    python = tmp_path / "python3"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo {gpus} || echo "$@" >>"{commands}"\n')
    python.chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    options = ["--out", tmp_path / "out", "--ranks-per-gpu", str(ranks_per_gpu)]
    script = ["bash", ROOT / "scripts/study_heterogeneous.sh", *options]
    subprocess.run(script, env={**os.environ, "PATH": path}, check=True, timeout=600)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)

    first, *rest = commands.read_text().splitlines()
    parts = heterogeneous.parts_of(first.split()[1:])
    sets = list(dict.fromkeys((p.settings, c.percentages) for p in parts for c in p.cells))
    assert len(sets) == starts
    assert all(heterogeneous.parts_of(command.split()[1:]) for command in rest)
    world_size = 4 if (places := gpus * ranks_per_gpu) == 4 else 2
    assert sets[0][1] == (100,) * world_size
    shortest = parts[0].cells[0].seq_len
    asked = {c.percentages for p in parts for c in p.cells if c.seq_len == shortest}
    assert {(100, 10), (100, 25), (100, 50), (100, 90)} <= asked
    if places == 4:
        assert {(100, 100, 100, 10), (100, 100, 50, 50), (50, 100, 100, 100)} <= asked
    # What it promises, two ranks and one of them at 10 %, beside both even splits.
    (both,) = [part for part in parts if part.arguments.out.endswith("ranks2_even")]
    assert {"even", "even_zigzag", "planned"} <= set(both.settings.strategies)
    long = 65536 if places > 1 else 4096
    assert [(c.percentages, c.seq_len) for c in both.cells] == [
        ((100, 100), long),
        ((100, 10), long),
    ]
