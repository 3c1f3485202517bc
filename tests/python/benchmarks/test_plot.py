# SPDX-License-Identifier: Apache-2.0
"""Tables and figures of the study say what the measurements say, on measurements from a model."""

import csv
import json
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import _study
import plot as plot_script
import pytest
import timeline
from _commands import run_command
from matplotlib.figure import Figure
from ringattn.strategies import PUBLISHED
from study import style
from study.figures import regression_surface
from study.tables import findings, sweep_rows, trace_findings

ROOT = Path(__file__).resolve().parents[3]
SETS = [(100, 100), (100, 50), (50, 100)]
FIGURES = {
    *("strategy_eval", "speedup_heatmap", "extreme_heterogeneity", "efficiency_vs_heterogeneity"),
    *("latency_vs_heterogeneity", "speedup_over_even", "token_distribution", "latency_scaling"),
    *("matmul_mps_sweep", "regression_surface", "share_of_ideal", "slow_positions"),
    *("rank_timeline", "drift_trace"),
}
TRACE = [(0, 1.0), (20, 0.4), (50, 0.7)]


def plot(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return run_command(["benchmarks/plot.py", *arguments])


def read(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All figures of a sweep over two ranks and of a trace."""
    folder = tmp_path_factory.mktemp("figures")
    sweep = _study.write_sweep(folder / "sweep.csv", _study.sweep(SETS), 2)
    trace = _study.write_trace(folder / "trace.csv", _study.trace(TRACE, 80, late=3))
    done = plot(sweep, "--trace", trace, "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    return folder / "out"


def test_every_figure_is_a_picture_a_drawing_and_a_table(folder: Path) -> None:
    assert {path.stem for path in folder.iterdir()} == FIGURES
    for name in FIGURES:
        png = (folder / f"{name}.png").read_bytes()
        assert png.startswith(b"\x89PNG") and len(png) > 10_000, name
        svg = ElementTree.parse(folder / f"{name}.svg").getroot()
        assert any(element.tag.endswith("}text") for element in svg.iter()), name  # text stays text
        rows = read(folder / f"{name}.csv")
        assert rows and all(cell != "" for row in rows for cell in row.values()), name


def test_figures_show_what_was_measured(folder: Path) -> None:
    # Ranks at 1 and 0.45: even zigzag takes 0.5 / 0.45, the planned split 1 / 1.45.
    ideal = {
        (row["percentages"], row["split_type"]): float(row["percent"])
        for row in read(folder / "share_of_ideal.csv")
    }
    assert ideal["100,50", "planned"] == pytest.approx(100, rel=1e-3)
    assert ideal["100,50", "even_zigzag"] == pytest.approx(100 * 0.9 / 1.45, rel=1e-3)
    assert ("50,100", "planned") not in ideal  # that is for slow_positions
    assert {row["percentages"] for row in read(folder / "slow_positions.csv")} == {
        *("100,50", "50,100")
    }
    # Even contiguous, the slow rank last: 0.75 / 0.45.
    speedup = {
        (row["percentages"], row["split_type"]): float(row["speedup_over_even"])
        for row in read(folder / "speedup_heatmap.csv")
    }
    assert speedup["100,50", "rebalanced"] == pytest.approx(0.75 * 1.45 / 0.45 / 0.5 / 2, rel=1e-3)
    shares = {
        (row["percentages"], row["split_type"]): float(row["share"])
        for row in read(folder / "token_distribution.csv")
    }
    assert shares["100,50", "even"] == 50
    assert shares["100,50", "planned"] == pytest.approx(100 * 0.45 / 1.45, rel=1e-3)


def test_strategies_differ_in_colour_and_marker() -> None:
    looks = [look[:2] for name, look in style.STYLES.items() if name != "oracle"]
    assert len({colour for colour, _ in looks}) == len(looks)
    assert len(set(looks)) == len(looks)


def test_a_sweep_of_layers_and_of_attention_gets_a_folder_each(tmp_path: Path) -> None:
    rows = _study.sweep(SETS[:1]) + _study.sweep(SETS[:1], what="layer")
    rows = [row for row in rows if row["seq_len"] == _study.LENGTHS[0]]
    done = plot(_study.write_sweep(tmp_path / "s.csv", rows, 2), "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert {"attention", "layer"} < {path.name for path in (tmp_path / "out").iterdir()}
    # Equal ranks alone: nothing to compare with.
    assert not (tmp_path / "out/layer/speedup_heatmap.png").exists()


def drawn(figure: Figure) -> Figure:
    """With everything where it will be."""
    figure.canvas.draw()
    style.plt.close(figure)
    return figure


@pytest.mark.parametrize("values", [(0.7, 7.0), (1.0, 3.0, 9.0), (0.7, 70.0), (0.7, 10.0, 900.0)])
def test_labels_of_a_logarithmic_axis_have_room(values: tuple[float, ...]) -> None:
    rows = [
        {"split_type": "planned", "set": panel, "place": place, "ms": ms}
        for panel in range(7)
        for place, ms in enumerate(values)
    ]
    words = {"y_label": "latency, ms", "x_label": "tokens", "panel_label": str, "x_tick": str}
    drawing = style.lines(rows, "Times", panel="set", x="place", y="ms", log_y=True, **words)
    for ax in drawn(drawing.figure).axes[:7]:
        low, high = ax.get_ylim()
        ticks = zip(ax.get_yticks(), ax.get_yticklabels(), strict=True)
        boxes = [text.get_window_extent() for tick, text in ticks if low <= tick <= high]
        assert len(boxes) >= 3
        assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_lines_of_equal_values_are_all_seen() -> None:
    names = ("even_zigzag", "planned", "rebalanced")
    rows = [{"split_type": name, "set": 0, "place": p, "ms": 1.0} for name in names for p in (0, 1)]
    words = {"y_label": "ms", "x_label": "tokens", "panel_label": str, "x_tick": str}
    drawing = style.lines(rows, "Times", panel="set", x="place", y="ms", **words)
    lines = drawn(drawing.figure).axes[0].lines
    assert [line.get_label() for line in lines] == [style.STYLES[name][2] for name in names]
    # Markers stand side by side, around their tick; what lies above is thinner.
    assert len({line.get_xdata()[0] for line in lines}) == 3
    assert all(abs(line.get_xdata()[0]) < 0.4 for line in lines)
    widths = [line.get_linewidth() for line in lines]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3


def test_figures_name_the_hardware_of_their_table(tmp_path: Path) -> None:
    rows = [row for row in _study.sweep(SETS[:1]) if row["seq_len"] == _study.LENGTHS[0]]
    sweep = _study.write_sweep(tmp_path / "s.csv", rows, 2)
    assert style.hardware(sweep) == ""
    (tmp_path / "s.md").write_text("# T\n\n```\nranks: 2\ndevice: a GPU\n```\n\n| a |\n")
    assert style.hardware(sweep) == "2 ranks, a GPU"
    done = plot(sweep, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert "2 ranks, a GPU" in (tmp_path / "out/latency_scaling.svg").read_text()


def test_the_legend_of_the_regression_lies_below_what_is_drawn() -> None:
    figure = drawn(regression_surface(PUBLISHED).figure)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["negative: taken as 0"]
    assert legend.get_window_extent().y1 <= figure.axes[0].get_tightbbox().y0
    assert all(ax.get_legend() is None for ax in figure.axes)


def test_plotting_nothing_is_refused(tmp_path: Path) -> None:
    done = plot("--out", tmp_path)
    assert done.returncode == 2 and "a sweep or a --trace must be given" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("nowhere.csv", "nowhere.csv must be the CSV of a sweep, got: [Errno 2] No such file"),
        ("empty.csv", "empty.csv must be the CSV of a sweep, got: no rows"),
        ("few.csv", "few.csv must be the CSV of a sweep, got: no columns split_type, overall_"),
        ("less.csv", "less.csv must be the CSV of a sweep, got: no columns rank1_tokens, what"),
        ("cut.csv", "cut.csv must be the CSV of a sweep, got: lines that do not have "),
        (
            "words.csv",
            "words.csv must be the CSV of a sweep, got: p10_ms 'fast', which is no number",
        ),
        (
            "gaps.csv",
            "gaps.csv must be the CSV of a sweep, got: rank1_tokens '', which is no number",
        ),
        (
            "half.csv",
            "half.csv must be the CSV of a sweep, got: percentages '100,half', which are ",
        ),
        ("trace.csv", "trace.csv must be the CSV of a sweep, got: no columns split_type, "),
        ("--trace sweep.csv", "sweep.csv must be the CSV of a rebalancing trace, got: no columns "),
        ("sweep.csv --regression nowhere.json", "nowhere.json must be the JSON of a regression, "),
        ("sweep.csv --regression sweep.csv", "sweep.csv must be JSON, got Expecting value"),
        ("sweep.csv --regression other.json", "other.json must have six finite coefficients, "),
        ("sweep.csv --out sweep.csv/out", "--out must be a folder that can be written, got: "),
    ],
)
def test_wrong_files_are_refused_before_anything_is_written(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: str,
    message: str,
) -> None:
    sweep = _study.write_sweep(tmp_path / "sweep.csv", _study.sweep(SETS[:1]), 2)
    _study.write_trace(tmp_path / "trace.csv", _study.trace(TRACE, 60, late=1))
    columns, *rows = csv.reader(sweep.read_text().splitlines())
    _study.write(tmp_path / "empty.csv", columns, [])
    _study.write(tmp_path / "few.csv", ["seq_len"], [{"seq_len": 64}])
    less = [name for name in columns if name not in ("rank1_tokens", "what")]
    named = [dict(zip(columns, row, strict=True)) for row in rows]
    _study.write(tmp_path / "less.csv", less, [{name: row[name] for name in less} for row in named])
    for name, change in (
        ("words", {"p10_ms": "fast"}),
        ("gaps", {"rank1_tokens": ""}),
        ("half", {"percentages": "100,half"}),
    ):
        _study.write(tmp_path / f"{name}.csv", columns, [*named[:-1], {**named[-1], **change}])
    (tmp_path / "cut.csv").write_text(sweep.read_text()[:-40])
    (tmp_path / "other.json").write_text("{}")
    before = sorted(tmp_path.iterdir())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["plot.py", "--out", "out", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        plot_script.main()
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "")
    assert message in said.err.splitlines()[-1]
    assert sorted(tmp_path.iterdir()) == before


def test_sets_of_other_sizes_and_without_equal_ranks_or_even_splits_are_read(
    tmp_path: Path,
) -> None:
    rows = [
        row for row in _study.sweep([(100, 50), (100, 50, 25)]) if "even" not in row["split_type"]
    ]
    read_back = plot_script.read_sweep(_study.write_sweep(tmp_path / "sweep.csv", rows, 3))
    assert [(row["percentages"], row["split_type"]) for row in read_back] == [
        (row["percentages"], row["split_type"])
        for percentages in ("100,50,25", "100,50")
        for row in rows
        if row["percentages"] == percentages
    ]
    assert {row.get("slowdown") for row in read_back} == {None}
    assert {row["rank2_tokens"] for row in read_back if row["percentages"] == "100,50"} == {None}


def test_slowdowns_refer_to_the_balanced_ring_of_equal_ranks() -> None:
    rows = sweep_rows(_study.sweep(SETS))
    (planned,) = [
        row
        for row in rows
        if (row["split_type"], row["seq_len"], row["percentages"]) == ("planned", 32768, "100,50")
    ]
    assert planned["slowdown"] == pytest.approx(2 / 1.45, rel=1e-3)
    assert planned["slowdown"] * planned["t_homogeneous_over_t"] == pytest.approx(1)
    assert planned["speedup_over_even_zigzag"] == pytest.approx(0.5 * 1.45 / 0.45, rel=1e-3)
    assert planned["slowdown_pct"] == 50
    assert planned["rank1_tflops"] == pytest.approx(0.45 * planned["rank1_tflops_unthrottled"])


def test_every_set_of_ranks_has_the_baseline_of_the_earlier_study() -> None:
    rows = sweep_rows(_study.sweep(SETS))
    even = {
        row["seq_len"]: row["overall_latency_ms"]
        for row in rows
        if (row["split_type"], row["percentages"]) == ("even", "100,100")
    }
    found = {
        (row["percentages"], row["seq_len"]): row
        for row in rows
        if row["split_type"] == "reference_homogeneous"
    }
    assert found.keys() == {(",".join(map(str, p)), s) for p in SETS for s in even}
    for (percentages, seq_len), row in found.items():
        assert row["overall_latency_ms"] == even[seq_len]
        assert row["slowdown_pct"] == min(map(int, percentages.split(",")))


def test_the_ideal_counts_the_fastest_whole_problem_of_each_rank() -> None:
    raw = _study.sweep(SETS)
    (given_all,) = [
        row
        for row in raw
        if (row["split_type"], row["seq_len"], row["percentages"]) == ("formula", 8192, "100,50")
    ]
    alone_ms = 8192e-9 * 8192**2 / _study.SPEED
    given_all |= {"rank0_tokens": 8192, "rank1_tokens": 0, "overall_latency_ms": 0.9 * alone_ms}
    rows = sweep_rows(raw)
    for row in rows:
        if (row["seq_len"], row["percentages"]) != (8192, "100,50"):
            continue
        if row["split_type"] == "reference_homogeneous":
            continue
        assert row["rank0_tflops"] == pytest.approx(_study.SPEED / 0.9)
        assert row["rank1_tflops"] == pytest.approx(_study.SPEED * 0.45)
        assert row["ideal_ms"] == pytest.approx(alone_ms / (1 / 0.9 + 0.45))
        assert row["efficiency"] == row["ideal_ms"] / row["overall_latency_ms"]
    again = sweep_rows(rows)  # once derived, they stay
    assert [row["ideal_ms"] for row in again] == pytest.approx([row["ideal_ms"] for row in rows])
    assert len(again) == len(rows)


def test_each_of_ours_is_compared_with_its_targets() -> None:
    rows = _study.sweep(SETS)
    for row in rows:
        if row["percentages"] == "100,50":
            slower = {"planned": 1.25, "rebalanced": 1.1}
            row["overall_latency_ms"] *= slower.get(row["split_type"], 1.0)
    found = {
        (row["percentages"], row["seq_len"], row["split_type"]): row
        for row in findings(sweep_rows(rows))
    }
    assert len(found) == 2 * len(SETS) * len(_study.LENGTHS)
    for name, slower_by in (("planned", 1.25), ("rebalanced", 1.1)):
        finding = found["100,50", 8192, name]
        assert finding["efficiency"] == pytest.approx(1 / slower_by, rel=1e-3)
        assert finding["slow_over_fast"] == pytest.approx(0.45)
        assert finding["target"] == 0.90  # 4096 tokens a rank
        assert found["100,50", 32768, name]["target"] == 0.93  # 16384
        assert finding["slowdown_bound"] == pytest.approx(1.05 * 2 / 1.45)
        behind = finding["points_behind_equal_ring"]
        assert behind == pytest.approx(100 - 100 / slower_by, abs=0.1)
        row = next(
            row
            for row in rows
            if (row["percentages"], row["seq_len"], row["split_type"]) == ("100,50", 8192, name)
        )
        assert finding["predicted_over_measured"] == pytest.approx(
            row["predicted_ms"] / row["overall_latency_ms"]
        )
        faster = finding["over_even_zigzag"]
        assert faster == pytest.approx(1.45 / 0.9 / slower_by, rel=1e-3)


def test_findings_can_be_had_of_a_sweep_that_was_measured_before(tmp_path: Path) -> None:
    content = {"title": "A sweep", "header": {"commit": "abc"}, "rows": _study.sweep(SETS)}
    (tmp_path / "het.json").write_text(json.dumps(content))
    done = run_command(["benchmarks/findings.py", tmp_path / "het.json"])
    assert done.returncode == 0, done.stderr
    found = read(tmp_path / "het_findings.csv")
    assert len(found) == 2 * len(SETS) * len(_study.LENGTHS)
    assert json.loads((tmp_path / "het_findings.json").read_text())["header"] == {"commit": "abc"}


def test_each_length_of_a_scenario_is_a_trace_of_its_own() -> None:
    rows = _study.trace(TRACE, 80, 2)
    both = [*rows, *({**row, "seq_len": 2 * row["seq_len"]} for row in rows)]
    once, twice = trace_findings(both)
    assert twice == {**once, "seq_len": 2 * once["seq_len"]}
    assert once["requests"] == len(rows)


@pytest.mark.parametrize("late", [0, 2, 6])
def test_a_trace_shows_how_late_the_rebalancer_was(late: int) -> None:
    (finding,) = trace_findings(_study.trace(TRACE, 80, late))
    assert finding["requests_to_follow"] == late
    assert (finding["changes"], finding["replans"]) == (2, 2)
    # What is within three requests of a change does not count.
    settled = finding["over_oracle_settled"]
    assert settled > 1.01 if late > 3 else settled == pytest.approx(1)
    assert finding["even_zigzag_over_oracle"] > 1.1


@pytest.mark.parametrize(
    ("category", "name", "us", "expected"),
    [
        ("kernel", "void ringattn::cuda::sm90::block_attention_kernel<...>", 200.0, "attention"),
        ("kernel", "ringattn::cuda::stage_kernel(ringattn::cuda::Launch)", 8.0, "staging"),
        ("kernel", "ncclDevKernel_SendRecv(...)", 50.0, "NCCL"),
        ("kernel", "void at::native::vectorized_elementwise_kernel<...>", 5.0, "other"),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 14.0, "copy"),
        ("gpu_memcpy", "Memcpy PtoP (Device -> Device)", 1.5, None),
        ("cuda_runtime", "cudaLaunchKernel", 8.0, None),
    ],
)
def test_activities_of_a_device_have_names(
    category: str, name: str, us: float, expected: str | None
) -> None:
    assert timeline.kind({"cat": category, "name": name, "dur": us}) == expected


def test_a_timeline_has_a_bar_for_everything_a_device_did(tmp_path: Path) -> None:
    rows = [
        {"transport": transport, "rank": rank, "what": what, "begin us": begin, "us": us}
        for transport in ("symmetric", "nccl")
        for rank in range(2)
        for what, begin, us in (("staging", 0.0, 8.0), ("attention", 10.0, 200.0))
    ]
    timeline.draw(rows, "One ring", tmp_path, "timeline")
    svg = (tmp_path / "timeline.svg").read_text()
    texts = ["".join(node.itertext()) for node in ElementTree.fromstring(svg).iter()]
    for label in ("symmetric", "nccl", "rank 1 transfers", "staging", "microseconds"):
        assert any(label == text.strip() for text in texts), label
    for what in ("staging", "attention"):
        colour = timeline.KINDS[what][0].lower()
        # Every bar, and the legends' patches.
        assert svg.lower().count(f"fill: {colour}") == 4 + 2
    assert (tmp_path / "timeline.png").stat().st_size > 1000
