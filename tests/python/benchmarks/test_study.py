# SPDX-License-Identifier: Apache-2.0
"""Parts of the study of unequal ranks: cells that are kept, splits, clocks, starts."""

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ringattn
import torch
from lib import timing
from study import figures, running, sweep, worker
from study.settings import Cell, Job, Settings, Store
from study.splits import PlanInputs, split

BASE: dict[str, Any] = {
    **{"device": "cpu", "throttle": "repeat", "transport": "auto", "dtype": "float32"},
    **{"heads": 4, "kv_heads": 2, "head_dim": 16, "hidden_dim": 96, "strategies": ("even",)},
    **{"rounds": 2, "warmup": 0, "cell_seconds": 1.0, "settle_seconds": 0.1, "watched": 2},
    **{"requests": 4, "lut": None, "regression": None, "ranks_per_gpu": 1},
}


def test_other_settings_are_other_cells(tmp_path: Path) -> None:
    cell = Cell("sweep", (100, 50), "attention", 256)
    store = Store(tmp_path / "cells.jsonl")
    store.add(Settings(**BASE), cell, {"device": "here"}, [{"ms": 1.0}])
    again = Store(tmp_path / "cells.jsonl")
    assert again.rows(Settings(**BASE), cell) == [{"ms": 1.0}]
    assert again.header(Settings(**BASE), cell) == {"device": "here"}
    assert not again.has(Settings(**{**BASE, "rounds": 3}), cell)
    assert not again.has(Settings(**BASE), Cell("sweep", (50, 100), "attention", 256))


@pytest.mark.parametrize(
    ("throttle", "ranks_per_gpu", "of_a_gpu"),
    [("mps", 1, 40), ("mps", 4, 10), ("repeat", 4, 25), ("repeat", 1, None)],
)
def test_ranks_that_share_a_gpu_have_their_part_of_it(
    throttle: str, ranks_per_gpu: int, of_a_gpu: float | None
) -> None:
    settings = Settings(**{**BASE, "throttle": throttle, "ranks_per_gpu": ranks_per_gpu})
    assert settings.under_mps == (of_a_gpu is not None)
    if settings.under_mps:
        assert settings.mps_percentage(40) == of_a_gpu


ODD_KEY = '{"key": [], "header": {}, "rows": []}'


@pytest.mark.parametrize("line", ["123", "null", "[]", '{"a": 1}', ODD_KEY])
def test_cells_are_not_read_from_another_file(tmp_path: Path, line: str) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ValueError, match="must hold finished cells, got"):
        Store(path)


def test_a_table_that_was_edited_is_another_one(tmp_path: Path) -> None:
    cell = Cell("sweep", (100, 50), "attention", 256)
    store = Store(None)
    for name in ("lut", "regression"):
        path = tmp_path / name
        path.write_text("first")
        settings = Settings(**{**BASE, name: str(path)})
        store.add(settings, cell, {}, [{"ms": 1.0}])
        assert store.has(settings, cell)
        path.write_text("second")
        assert not store.has(settings, cell)


def test_the_lut_has_what_was_measured_and_plans_have_it_without_the_noise() -> None:
    profiles = [ringattn.RankProfile(100, 95)] * 2  # 100 and 90, taken as equal
    cost = ringattn.ModelCost.attention_only(4, 16)
    inputs = PlanInputs(1900, (100, 90), profiles, [100.0, 90.0], cost, Settings(**BASE))
    assert split("lut", inputs).partition.lengths == (1000, 900)
    assert split("planned", inputs).partition.lengths == (950, 950)


def test_ranks_of_one_percentage_are_one_line_of_the_lut() -> None:
    profiles = [ringattn.RankProfile(100, 95)] * 3
    cost = ringattn.ModelCost.attention_only(4, 16)
    speeds = [100.0, 90.0, 38.0]  # no two ranks are equal to the last digit
    inputs = PlanInputs(2400, (100, 100, 40), profiles, speeds, cost, Settings(**BASE))
    assert split("lut", inputs).partition.lengths == (1000, 1000, 400)


def test_a_line_cut_short_costs_no_other_cell(tmp_path: Path) -> None:
    settings = Settings(**BASE)
    first, second, third = (Cell("sweep", (100, 50), "attention", s) for s in (64, 128, 256))
    path = tmp_path / "cells.jsonl"
    for cell in (first, second):
        Store(path).add(settings, cell, {}, [{"ms": 1.0}])
    path.write_text(path.read_text()[:-30])  # killed while it wrote
    for cell in (second, third):
        Store(path).add(settings, cell, {}, [{"ms": 2.0}])
    store = Store(path)
    assert [store.has(settings, cell) for cell in (first, second, third)] == [True] * 3


@pytest.mark.parametrize(
    ("watched", "changes_at", "requests"), [(12, 3, 12), (12, 12, 16), (2, 2, 4)]
)
def test_the_last_plan_is_judged_before_it_is_timed(monkeypatch, watched, changes_at, requests):
    observed = []

    class Watching:
        def __init__(self, profiles, cost):
            pass

        def plan(self, seq_len):
            return SimpleNamespace(partition=len(observed), depth=1, predicted_ms=1.0)

        def observe(self, timings):
            observed.append(timings)
            return len(observed) == changes_at

    monkeypatch.setattr(ringattn, "Rebalancer", Watching)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    settings = SimpleNamespace(watched=watched, device="cpu")
    inputs = SimpleNamespace(profiles=[], cost=None, seq_len=8, settings=settings)
    chosen = sweep.watched(inputs, SimpleNamespace(ring=lambda partition, depth: lambda: None))
    assert len(observed) == requests
    assert chosen.partition == requests  # what it would plan next


class PoweredDevice:
    """A device of simulated time, whose clocks swing for half a second once it is loaded: high,
    low, then where they settle."""

    def __init__(self) -> None:
        self.now_s = self.loaded_s = 0.0

    def begins(self) -> None:
        self.loaded_s = self.now_s

    def computes(self, settled_ms: float) -> None:
        """Work of so long at the clocks that it settles to."""
        left = settled_ms
        while left > 0:
            since = self.now_s - self.loaded_s
            speed = 1.15 if since < 0.02 else 0.94 if 0.2 <= since < 0.5 else 1.0
            step_ms = min(1.0, left / speed)
            left -= step_ms * speed
            self.now_s += 1e-3 * step_ms


@pytest.mark.parametrize("seq_len", [16384, 65536, 131072])
def test_lone_ranks_and_rings_are_timed_at_the_same_clocks(monkeypatch, seq_len):
    """Four equal ranks, each a fourth of the work: the ring is as fast as its ideal, not faster."""
    device = PoweredDevice()
    alone_ms = 207 * (seq_len / 131072) ** 2
    monkeypatch.setattr(timing.time, "perf_counter", lambda: device.now_s)
    monkeypatch.setattr(timing.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(timing, "_on_cuda", timing._on_cpu)
    contestants = [
        timing.Contestant(
            name, partial(device.computes, ms), torch.empty(0), around=partial(begun, device)
        )
        for name, ms in {"even_zigzag": alone_ms / 4, timing.EACH_ALONE: alone_ms}.items()
    ]
    settings = Settings(**{**BASE, "rounds": 5, "warmup": 1, "cell_seconds": 5.0})
    timings = sweep._timings(contestants, settings, torch.device("cuda"))
    share = timings[timing.EACH_ALONE].own_median / 4 / timings["even_zigzag"].median
    assert share == pytest.approx(1, abs=0.01)


@contextlib.contextmanager
def begun(device: PoweredDevice) -> Iterator[None]:
    device.begins()
    yield


def test_fast_ranks_are_timed_at_once_and_stay_at_work_for_the_slow_one(monkeypatch):
    def measure(contestants, device, *, rounds, warmup):
        return {c.name: timing.Timing([2000.0], [200.0]) for c in contestants}

    monkeypatch.setattr(timing, "measure", measure)
    everyone = torch.tensor([[200.0], [2000.0]])
    monkeypatch.setattr(timing, "from_all_ranks", lambda values: everyone)
    alone = timing.Contestant(timing.EACH_ALONE, lambda: torch.empty(0), torch.empty(0))
    (timed,), round_s = timing.sustain([alone], torch.device("cuda"), warmup=0)
    assert (timed.lead_in, timed.back_to_back, timed.tail, round_s) == (1, 1, 18, 4.0)


def test_requests_are_watched_at_the_clocks_that_they_are_timed_at(monkeypatch):
    """Of 0.5 ms each, one that begins after a rest would be watched before clocks have settled."""
    calls = []

    class Watching:
        def __init__(self, profiles, cost):
            pass

        def plan(self, seq_len):
            return SimpleNamespace(partition=0, depth=1, predicted_ms=0.5)

        def observe(self, timings):
            return False

    monkeypatch.setattr(ringattn, "Rebalancer", Watching)
    monkeypatch.setattr(torch.distributed, "barrier", lambda: None)
    settings = SimpleNamespace(watched=1, device="cuda")
    inputs = SimpleNamespace(profiles=[], cost=None, seq_len=8, settings=settings)
    work = SimpleNamespace(ring=lambda partition, depth: lambda: calls.append(1))
    sweep.watched(inputs, work)
    assert 0.5 * (len(calls) - 3) >= 50


@pytest.mark.parametrize(
    ("device", "order"),
    [
        ("cuda", ["load a", "load b", "a", "end a", "load c", "b", "end b", "end c"]),
        ("cpu", ["load a", "a", "end a", "load b", "b", "end b"]),
    ],
)
def test_beside_gpus_the_next_ranks_load_while_the_present_ones_compute(
    monkeypatch: pytest.MonkeyPatch, device: str, order: list[str]
) -> None:
    happened = []

    class Ranks:
        def __init__(self, job: Job, mps: None) -> None:
            self.name = job.cells[0].what
            happened.append(f"load {self.name}")

        def __enter__(self) -> "Ranks":
            return self

        def __exit__(self, *_: object) -> None:
            self.end()

        def end(self) -> None:
            happened.append(f"end {self.name}")

    monkeypatch.setattr(running.ranks, "Ranks", Ranks)
    settings = Settings(**{**BASE, "device": device})
    jobs = {
        (settings, (100, slow)): [Cell("sweep", (100, slow), name, 64)]
        for name, slow in (("a", 100), ("b", 50), ("c", 10))
    }
    with contextlib.closing(running.started(jobs, None)) as starts:
        for job, _ in starts:
            happened.append(job.cells[0].what)
            if job.cells[0].what == "b":
                break  # as after an error: the ranks that wait are ended too
    assert happened == order


def test_ranks_are_measured_once_for_each_length_that_is_longer_than_usual(monkeypatch):
    asked, planned = [], []
    cells = [Cell("sweep", (100, 50), what, n) for n in (128, 512, 4096) for what in ("a", "b")]
    monkeypatch.setattr(
        worker, "receive_job", lambda: Job(Settings(**BASE), (100, 50), tuple(cells))
    )
    monkeypatch.setattr(worker, "end_with_parent", lambda: None)
    monkeypatch.setattr(worker, "report", lambda content: None)
    monkeypatch.setattr(worker, "environment", lambda device: {})
    device = torch.device("cpu")
    monkeypatch.setattr(worker, "process_group", lambda *_: contextlib.nullcontext(device))
    monkeypatch.setattr(worker, "throttled", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(worker, "measured_ranks", lambda tokens, *_: asked.append(tokens) or tokens)
    monkeypatch.setattr(worker, "measure_cell", lambda cell, tokens, *_: planned.append(tokens))
    monkeypatch.setattr(worker, "rank", lambda: 0)
    worker.main()
    assert asked == [256, 2048]
    assert planned == [256, 256, 256, 256, 2048, 2048]


def test_lengths_stand_in_order_whatever_was_measured_first():
    rows = [
        {"split_type": "planned", "percentages": "100,50", "seq_len": length, "efficiency": share}
        for length, share in ((4096, 0.9), (65536, 0.97), (16384, 0.95))
    ]
    drawing = figures.share_of_ideal(rows)
    axes = drawing.figure.axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["4K", "16K", "64K"]
    assert list(axes.get_lines()[0].get_ydata()) == pytest.approx([90.0, 95.0, 97.0])
    assert [row["seq_len"] for row in drawing.rows] == [4096, 16384, 65536]
