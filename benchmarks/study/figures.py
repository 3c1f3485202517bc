# SPDX-License-Identifier: Apache-2.0
"""The figures of the sweep. Each takes its rows and returns a drawing, or None where the rows do
not have what it shows. Names of the first ten are those of the study they come from
(https://github.com/AnshSG13/hetero_gpu_context_parallelism); slowdowns refer to a balanced ring of
equal ranks, where that study's refer to its contiguous one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.patches import Patch
from ringattn import strategies

from study.style import STYLES, Drawing, Row, legend_below, lines, log_scale, panels, short
from study.tables import TARGETS

_OURS = ("planned", "rebalanced")
_PERCENTAGES = range(10, 101, 2)
_SIZES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


def slow_last(rows: Sequence[Row]) -> list[Row]:
    """Each set of ranks once: with the slow ones last, as they stand in all figures but one."""
    return [row for row in rows if row["percentages"] == _sorted(row["percentages"])]


def _sorted(percentages: str) -> str:
    return ",".join(map(str, sorted(map(int, percentages.split(",")), reverse=True)))


def _unequal(rows: Sequence[Row]) -> list[Row]:
    return [row for row in slow_last(rows) if set(row["percentages"].split(",")) != {"100"}]


def _drawn(rows: Sequence[Row], *columns: str) -> list[Row]:
    """Rows of strategies that have all the columns, the shortest sequences first: a study that was
    added to has them in the order in which they were measured."""
    drawn = [
        row
        for row in rows
        if row["split_type"] in STYLES and all(row[column] is not None for column in columns)
    ]
    return sorted(drawn, key=lambda row: row["seq_len"])


def _most_unequal(rows: Sequence[Row]) -> list[Row]:
    least = min((total_percentage(row["percentages"]) for row in rows), default=0)
    return [row for row in rows if total_percentage(row["percentages"]) == least]


def total_percentage(percentages: str) -> int:
    return sum(map(int, percentages.split(",")))


def _set_label(percentages: str) -> str:
    return f"ranks at {percentages.replace(',', ', ')} %"


def _ticks(percentages: str) -> str:
    """The label of a set: its slow ranks."""
    slow = [part for part in percentages.split(",") if part != "100"]
    return "\n".join([slow[0], f"x {len(slow)}"] if len(slow) > 1 else slow or ["100"])


def _over_length(rows: Sequence[Row], title: str, y: str, y_label: str, **more) -> Drawing:
    return lines(
        rows,
        title,
        panel="percentages",
        panel_label=_set_label,
        x="seq_len",
        x_tick=short,
        x_label="tokens",
        y=y,
        y_label=y_label,
        **more,
    )


def _over_heterogeneity(rows: Sequence[Row], title: str, y: str, y_label: str, **more) -> Drawing:
    return lines(
        rows,
        title,
        panel="seq_len",
        panel_label=lambda seq_len: f"{short(seq_len)} tokens",
        x="percentages",
        x_tick=_ticks,
        x_label="percentage asked of the slow ranks",
        y=y,
        y_label=y_label,
        **more,
    )


# ---- figures known from the earlier study ------------------------------------------------------


def strategy_eval(rows: Sequence[Row]) -> Drawing | None:
    rows = _drawn(_unequal(rows), "slowdown")
    if not rows:
        return None
    sets = list(dict.fromkeys(row["percentages"] for row in rows))
    lengths = sorted({row["seq_len"] for row in rows})
    names = [name for name in STYLES if any(row["split_type"] == name for row in rows)]
    figure, axes = panels(len(sets), "Slowdown against equal, balanced ranks", width=5.5)
    width = 0.85 / len(names)
    for percentages, ax in zip(sets, axes, strict=True):
        for place, name in enumerate(names):
            bars = {
                row["seq_len"]: row["slowdown"]
                for row in rows
                if row["percentages"] == percentages and row["split_type"] == name
            }
            colour, _, label = STYLES[name]
            at = [
                lengths.index(seq_len) + (place - len(names) / 2 + 0.5) * width for seq_len in bars
            ]
            ax.bar(at, bars.values(), width, color=colour, edgecolor="white", label=label)
        ax.axhline(1.0, color="#555555", linewidth=1, linestyle="--")
        log_scale(ax)
        ax.set_xticks(range(len(lengths)), [short(seq_len) for seq_len in lengths])
        ax.set_title(_set_label(percentages), fontsize=10)
        ax.set_xlabel("tokens")
        ax.set_ylabel("T / T of equal ranks")
    legend_below(figure, axes[0])
    columns = ("percentages", "seq_len", "split_type", "slowdown")
    return Drawing(figure, [{name: row[name] for name in columns} for row in rows])


def speedup_heatmap(rows: Sequence[Row]) -> Drawing | None:
    rows = _drawn(_unequal(rows), "speedup_over_even")
    names = [n for n in ("uneven", *_OURS) if any(row["split_type"] == n for row in rows)]
    if not names:
        return None
    sets = list(dict.fromkeys(row["percentages"] for row in rows))
    lengths = sorted({row["seq_len"] for row in rows})
    cells = {
        (r["split_type"], r["seq_len"], r["percentages"]): r["speedup_over_even"] for r in rows
    }
    highest = max(cells.values())
    figure, axes = panels(len(names), "Speedup over the even contiguous split")
    for name, ax in zip(names, axes, strict=True):
        grid = [[cells.get((name, s, p), float("nan")) for p in sets] for s in lengths]
        image = ax.imshow(
            grid, cmap="cividis", vmin=min(1.0, min(cells.values())), vmax=highest, aspect="auto"
        )
        for i, line in enumerate(grid):
            for j, value in enumerate(line):
                colour = "black" if value > 0.6 * highest else "white"
                ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=9)
        ax.grid(False)
        ax.set_xticks(range(len(sets)), [_ticks(p) for p in sets])
        ax.set_yticks(range(len(lengths)), [short(s) for s in lengths])
        ax.set_title(STYLES[name][2], fontsize=10)
        ax.set_xlabel("percentage asked of the slow ranks")
        ax.set_ylabel("tokens")
    figure.colorbar(image, ax=axes, label="T even / T")
    return Drawing(
        figure,
        [
            {"split_type": n, "seq_len": s, "percentages": p, "speedup_over_even": v}
            for (n, s, p), v in cells.items()
            if n in names
        ],
    )


def extreme_heterogeneity(rows: Sequence[Row]) -> Drawing | None:
    rows = _most_unequal(_drawn(_unequal(rows), "overall_latency_ms"))
    if not rows:
        return None
    return _over_length(
        rows, "The most unequal ranks", "overall_latency_ms", "latency, ms", log_y=True
    )


def efficiency_vs_heterogeneity(rows: Sequence[Row]) -> Drawing | None:
    rows = [
        {**row, "percent": 100 * row["t_homogeneous_over_t"]}
        for row in _drawn(slow_last(rows), "t_homogeneous_over_t")
    ]
    if not rows:
        return None
    return _over_heterogeneity(
        rows, "Speed against equal, balanced ranks", "percent", "100 T of equal ranks / T"
    )


def latency_vs_heterogeneity(rows: Sequence[Row]) -> Drawing | None:
    rows = _drawn(slow_last(rows), "overall_latency_ms")
    if not rows:
        return None
    return _over_heterogeneity(rows, "Latency", "overall_latency_ms", "latency, ms", log_y=True)


def speedup_over_even(rows: Sequence[Row]) -> Drawing | None:
    rows = _drawn(slow_last(rows), "speedup_over_even")
    if not rows:
        return None
    return _over_heterogeneity(
        rows,
        "Speedup over the even contiguous split",
        "speedup_over_even",
        "T even / T",
        level=lambda _: (1.0,),
    )


def token_distribution(rows: Sequence[Row]) -> Drawing | None:
    last = max(int(name[4:-7]) for name in rows[0] if name.endswith("_tokens"))
    shares = [
        {**row, "share": 100 * row[f"rank{last}_tokens"] / row["seq_len"]}
        for row in _drawn(slow_last(rows), f"rank{last}_tokens")
    ]
    if not shares:
        return None
    return _over_heterogeneity(
        shares, "Tokens of the last rank", "share", "share of the sequence, %"
    )


def latency_scaling(rows: Sequence[Row]) -> Drawing | None:
    rows = _drawn(slow_last(rows), "overall_latency_ms")
    if not rows:
        return None
    return _over_length(
        rows, "Latency over length", "overall_latency_ms", "latency, ms", log_y=True
    )


def matmul_mps_sweep(rows: Sequence[Row]) -> Drawing | None:
    """Measured speeds of the last rank over the percentage that was asked for."""
    last = max(int(name[4:-7]) for name in rows[0] if name.endswith("_tokens"))
    longest = max(row["seq_len"] for row in rows)
    points = {}
    for row in slow_last(rows):
        if row["seq_len"] == longest and row[f"rank{last}_linear_tflops"] is not None:
            points[int(row["percentages"].split(",")[-1])] = (
                row[f"rank{last}_linear_tflops"],
                row[f"rank{last}_tflops"],
            )
    if len(points) < 2 or 100 not in points:
        return None
    figure, (ax,) = panels(1, "What a percentage does", width=6)
    asked = sorted(points)
    data = [
        {"percentage": p, "gemm_tflops": points[p][0], "what_tflops": points[p][1]} for p in asked
    ]
    for place, (colour, marker, label) in enumerate(
        (("#D55E00", "s", "matrix products"), ("#0072B2", "o", f"what was split, {short(longest)}"))
    ):
        relative = [points[p][place] / points[100][place] for p in asked]
        ax.plot(asked, relative, color=colour, marker=marker, label=label)
    ax.plot([0, 100], [0, 1], color="#555555", linewidth=1, linestyle="--", label="proportional")
    ax.set_xlabel("percentage asked for")
    ax.set_ylabel("measured speed / speed at 100 %")
    ax.legend()
    return Drawing(figure, data)


def regression_surface(regression: strategies.Regression) -> Drawing:
    """The polynomial of the `formula` strategy, and where it is negative."""
    figure, (ax,) = panels(1, f"Regression, R² = {regression.r_squared:.3f}", width=6.5, height=4)
    grid = [[regression(size, p) for p in _PERCENTAGES] for size in _SIZES]
    ax.grid(False)
    places = list(_PERCENTAGES), range(len(_SIZES))
    levels = ax.contourf(*places, grid, 14, cmap="cividis")
    below = ax.contourf(*places, grid, levels=[-1e9, 0], colors="none", hatches=["//"])
    below.set(edgecolor="white", linewidth=0)  # the hatch's: what is low is dark
    ax.set_yticks(range(len(_SIZES)), [short(size) for size in _SIZES])
    ax.set_xlabel("percentage")
    ax.set_ylabel("size")
    dark = levels.cmap(0.0)
    label = "negative: taken as 0"
    legend_below(figure, ax, Patch(facecolor=dark, edgecolor="white", hatch="//", label=label))
    figure.colorbar(levels, ax=ax, label="speed, % of the best")
    return Drawing(
        figure,
        [
            {"size": size, "percentage": p, "speed_percent": value}
            for size, line in zip(_SIZES, grid, strict=True)
            for p, value in zip(_PERCENTAGES, line, strict=True)
        ],
    )


# ---- figures of this one -----------------------------------------------------------------------


def share_of_ideal(rows: Sequence[Row]) -> Drawing | None:
    rows = [
        {**row, "percent": 100 * row["efficiency"]} for row in _drawn(slow_last(rows), "efficiency")
    ]
    if not rows:
        return None
    world_size = len(rows[0]["percentages"].split(","))
    longest = max(row["seq_len"] for row in rows) // world_size
    target = [100 * share for least, share in TARGETS if longest >= least][-1:]
    return _over_length(
        rows,
        "Share of what these ranks could do",
        "percent",
        "100 T* / T",
        level=lambda _: (*target, 100.0),
    )


def slow_positions(rows: Sequence[Row]) -> Drawing | None:
    """The same ranks in every order."""
    moved = {
        _sorted(r["percentages"]) for r in rows if r["percentages"] != _sorted(r["percentages"])
    }
    rows = [
        {**row, "percent": 100 * row["efficiency"]}
        for row in _drawn(rows, "efficiency")
        if _sorted(row["percentages"]) in moved
    ]
    if not rows:
        return None
    return lines(
        rows,
        "The slow rank at every position",
        panel="seq_len",
        panel_label=lambda seq_len: f"{short(seq_len)} tokens",
        x="percentages",
        x_tick=lambda percentages: percentages.replace(",", "\n"),
        x_label="percentages asked of ranks 0, 1, ...",
        y="percent",
        y_label="100 T* / T",
    )


def rank_timeline(rows: Sequence[Row]) -> Drawing | None:
    """Where each rank's time goes, before and after, on the most unequal ranks."""
    rows = _most_unequal(_drawn(_unequal(rows), "rank0_own_ms"))
    names = [n for n in ("even_zigzag", *_OURS) if any(row["split_type"] == n for row in rows)]
    if len(names) < 2:
        return None
    longest = max(row["seq_len"] for row in rows)
    chosen = {row["split_type"]: row for row in rows if row["seq_len"] == longest}
    world_size = len(rows[0]["percentages"].split(","))
    title = f"{short(longest)} tokens, {_set_label(rows[0]['percentages'])}"
    figure, axes = panels(len(names), title, height=1.6 + 0.4 * world_size)
    parts = (("own", "#0072B2", ""), ("remote", "#56B4E9", ""), ("wait", "#E69F00", "//"))
    data = []
    for name, ax in zip(names, axes, strict=True):
        row = chosen[name]
        left = [0.0] * world_size
        for part, colour, hatch in parts:
            widths = [row[f"rank{r}_{part}_ms"] for r in range(world_size)]
            ax.barh(range(world_size), widths, 0.6, left, color=colour, hatch=hatch, label=part)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        for r in range(world_size):
            data.append(
                {"split_type": name, "rank": r, "tokens": row[f"rank{r}_tokens"]}
                | {f"{part}_ms": row[f"rank{r}_{part}_ms"] for part, _, _ in parts}
                | {"transfer_ms": row[f"rank{r}_transfer_ms"]}
            )
        labels = [f"rank {r}\n{short(row[f'rank{r}_tokens'])}" for r in range(world_size)]
        ax.set_yticks(range(world_size), labels)
        ax.invert_yaxis()
        ax.set_title(STYLES[name][2], fontsize=10)
        ax.set_xlabel("attention, ms")
    furthest = max(ax.get_xlim()[1] for ax in axes)
    for ax in axes:
        ax.set_xlim(0, furthest)
    legend_below(figure, axes[0])
    return Drawing(figure, data)


#: Name of the files -> what draws them from the rows of a sweep.
OF_SWEEP: dict[str, Callable[[Sequence[Row]], Drawing | None]] = {
    draw.__name__: draw
    for draw in (
        *(strategy_eval, speedup_heatmap, extreme_heterogeneity, efficiency_vs_heterogeneity),
        *(latency_vs_heterogeneity, speedup_over_even, token_distribution, latency_scaling),
        *(matmul_mps_sweep, share_of_ideal, slow_positions, rank_timeline),
    )
}
