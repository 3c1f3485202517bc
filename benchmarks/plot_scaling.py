# SPDX-License-Identifier: Apache-2.0
"""Six panels of a table that benchmarks/scaling.py wrote: roofline, strong scaling (time,
speed-up), weak scaling (time, efficiency), TFLOPS of a rank. A figure for each shape of heads.

python benchmarks/plot_scaling.py TABLE.csv --out FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from study.style import Row, log_scale, panels, read_rows, save, short

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_TEXTS = ("part", "shape", "mask", "reference")


def read(path: Path) -> list[Row]:
    """Rows of a table; numbers as numbers, empty cells as None.

    Raises:
        OSError: a file that cannot be read.
        ValueError: no rows, or another table's.
    """
    return read_rows(path, "part", "no rows of parts", _TEXTS)


def draw(rows: Sequence[Row], shape: str) -> Figure:
    """The six panels of one shape."""
    of_shape = [row for row in rows if row["shape"] == shape]
    strong, weak = (
        by_length([row for row in of_shape if row["part"] == part], column)
        for part, column in (("strong", "total_seq"), ("weak", "seq_local"))
    )
    figure, axes = panels(6, f"Ring attention, {shape}")
    roofline(axes[0], [row for row in of_shape if row["part"] == "roofline"])
    over_ranks(axes[1], strong, "ring_ms", "strong scaling, ms", ideal=True)
    over_ranks(axes[2], strong, "speedup", "strong scaling, x one device")
    over_ranks(
        axes[3], weak, "ring_ms", "weak scaling (tokens a rank), ms", lambda rows, size: size
    )
    over_ranks(axes[4], weak, "scaling_efficiency", "weak scaling, efficiency")
    over_ranks(axes[5], strong, "ring_tflops", "TFLOPS of a rank")
    for ax in (axes[1], axes[3]):
        log_scale(ax)
    ideal = {row["world_size"]: row["ideal_speedup"] for row in of_shape}
    axes[2].plot(sorted(ideal), sorted(ideal.values()), "--", color="#999999", label="ideal")
    axes[4].axhline(1.0, linestyle="--", color="#999999", label="ideal")
    for ax in axes:
        if ax.get_legend_handles_labels()[0]:
            ax.legend(fontsize=7)
    return figure


def by_length(rows: Sequence[Row], column: str) -> dict[int, list[Row]]:
    """Rows of each length, by their number of ranks."""
    lengths = sorted({int(row[column]) for row in rows})
    return {
        length: sorted((r for r in rows if r[column] == length), key=lambda r: r["world_size"])
        for length in lengths
    }


def over_ranks(
    ax: Axes, lines: dict[int, list[Row]], column: str, title: str, ideal: bool = False
) -> None:
    """One line for each length; dashed the ideal: ref_ms over ideal_speedup."""
    for colour, (length, rows) in zip(COLOURS, lines.items(), strict=False):
        sizes = [row["world_size"] for row in rows]
        ax.plot(sizes, [row[column] for row in rows], "o-", color=colour, label=short(length))
        if ideal:
            best = [row["ref_ms"] / row["ideal_speedup"] for row in rows]
            ax.plot(sizes, best, "--", color=colour)
        ax.set_xticks(sizes, [f"{size:.0f}" for size in sizes])
    ax.set_xlabel("ranks")
    ax.set_title(title, fontsize=10)


def roofline(ax: Axes, rows: Sequence[Row]) -> None:
    """TFLOPS of a rank over operations a byte, under the device's roof where it is known."""
    if not rows:
        return
    rows = sorted(rows, key=lambda row: row["flops_per_byte"])
    ax.plot(
        [r["flops_per_byte"] for r in rows], [r["ring_tflops"] for r in rows], "o-", label="ring"
    )
    for row in rows:
        place = (row["flops_per_byte"], row["ring_tflops"])
        ax.annotate(short(int(row["total_seq"])), place, fontsize=7)
    if rows[0]["peak_tflops"]:
        peak, gbps = rows[0]["peak_tflops"], rows[0]["peak_gbps"]
        ridge = 1e3 * peak / gbps
        ends = [min(ridge / 4, rows[0]["flops_per_byte"]), ridge]
        ends.append(max(2 * ridge, rows[-1]["flops_per_byte"]))
        roof = [min(peak, intensity * gbps / 1e3) for intensity in ends]
        ax.plot(ends, roof, "--", color="#999999", label="device")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("operations a byte")
    ax.set_title("roofline, TFLOPS of a rank", fontsize=10)


def write(rows: Sequence[Row], folder: Path) -> list[Path]:
    """A figure for each shape that was timed, as PNG and SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    shapes = dict.fromkeys(row["shape"] for row in rows if row["part"] != "correctness")
    written = []
    for shape in shapes:
        name = "scaling_" + shape.replace(" ", "_").replace("/", "of").lower()
        written += save(draw(rows, shape), folder, name)
    return written


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("table", type=Path, metavar="TABLE.csv")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    try:
        rows = read(arguments.table)
    except (OSError, ValueError) as error:
        parser.error(f"TABLE.csv must be a table of benchmarks/scaling.py, got {error}")
    for path in write(rows, arguments.out):
        print(path)


if __name__ == "__main__":
    main()
