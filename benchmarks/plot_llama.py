# SPDX-License-Identifier: Apache-2.0
"""Six panels of a table that benchmarks/llama.py wrote, over the length of the prompt: time to the
first token, speed-up of the ring over regular attention, MFU, time of a token, transfers and waits,
memory.

python benchmarks/plot_llama.py TABLE.csv --out FILE.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study.style import Row, legend_below, log_scale, panels, plt, read_rows, short

#: Colour and marker of each strategy.
STYLES = {"regular": ("#999999", "s"), "ring": ("#0072B2", "o")}
_TEXTS = ("strategy", "library", "status")


def read(path: Path) -> list[Row]:
    """Rows of a table; numbers as numbers, empty cells as None.

    Raises:
        OSError: a file that cannot be read.
        ValueError: no rows, or another table's.
    """
    return read_rows(path, "ttft_ms", "no rows with ttft_ms", _TEXTS)


def pays_from(rows: Sequence[Row]) -> int | None:
    """The shortest prompt from which on the ring is faster than regular attention, or the only one
    with the memory; None where it never is."""
    fastest = {
        int(row["prompt_tokens"]): row["status"] == "ok" and (row["x_regular"] or 2.0) > 1
        for row in rows
        if row["strategy"] == "ring"
    }
    pays = None
    for tokens in sorted(fastest, reverse=True):
        if not fastest[tokens]:
            break
        pays = tokens
    return pays


def draw(rows: Sequence[Row], title: str) -> Figure:
    figure, axes = panels(6, title)
    lines(axes[0], rows, "ttft_ms", "time to the first token, ms")
    lines(axes[1], rows, "x_regular", "speed-up over regular attention")
    axes[1].axhline(1.0, linestyle="--", color="#999999")
    lines(axes[2], rows, "mfu", "MFU")
    lines(axes[3], rows, "avg_decode_ms", "token after the prompt, ms")
    for column, style in (("comm_time_ms", "-"), ("wait_ms", ":")):
        lines(axes[4], rows, column, "transfers (line), waits (dotted), ms", style)
    lines(axes[5], rows, "peak_gib", "peak memory of a rank, GiB")
    log_scale(axes[0])
    axes[0].legend(fontsize=8)
    for ax in axes:
        if not ax.lines:
            ax.set_axis_off()
            ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes, color="#999999")
    return figure


def read_requests(path: Path) -> list[Row]:
    """As :func:`read`, of a table of ``--requests``."""
    return read_rows(path, "p95_ttft_ms", "no rows with p95_ttft_ms", ("partition", "shares"))


def draw_requests(tables: dict[str, Sequence[Row]]) -> Figure:
    """p50 and p95 of the time to the first token side by side for each partition, a panel for each
    machine."""
    figure, axes = panels(len(tables), "Time to the first token of requests", columns=2)
    for ax, (machine, rows) in zip(axes, tables.items(), strict=True):
        for shift, (name, colour) in zip(
            (-0.2, 0.2), (("p50", "#56B4E9"), ("p95", "#0072B2")), strict=True
        ):
            at = [place + shift for place in range(len(rows))]
            bars = ax.bar(
                at, [row[f"{name}_ttft_ms"] for row in rows], 0.38, color=colour, label=name
            )
            ax.bar_label(bars, fmt="%.0f", fontsize=8)
        ax.set_xticks(range(len(rows)), [row["partition"] for row in rows])
        ax.grid(False, axis="x")
        ax.margins(y=0.12)
        ax.set_ylabel("ms")
        ax.set_title(machine, fontsize=10)
    legend_below(figure, axes[0])
    return figure


def lines(ax: Axes, rows: Sequence[Row], column: str, title: str, style: str = "-") -> None:
    """One for each strategy that has values, over the prompts' tokens."""
    lengths = sorted({int(row["prompt_tokens"]) for row in rows})
    for name, (colour, marker) in STYLES.items():
        known = [row for row in rows if row["strategy"] == name and row[column] is not None]
        if known and not (column == "x_regular" and name == "regular"):
            x = [row["prompt_tokens"] for row in known]
            y = [row[column] for row in known]
            ax.plot(x, y, style, color=colour, marker=marker, label=name)
    ax.set_xscale("log", base=2)
    step = 1 + len(lengths) // 6
    ax.set_xticks(lengths[::step], [short(length) for length in lengths[::step]])
    ax.set_xlabel("prompt tokens")
    ax.set_title(title, fontsize=10)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, metavar="TABLE.csv")
    parser.add_argument("--title", default="A LLaMA over a ring and on one device")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    arguments = parser.parse_args()
    try:
        rows = read(arguments.table)
    except (OSError, ValueError) as error:
        parser.error(f"TABLE.csv must be a table of benchmarks/llama.py, got {error}")
    figure = draw(rows, arguments.title)
    figure.savefig(arguments.out, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()
