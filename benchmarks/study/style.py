# SPDX-License-Identifier: Apache-2.0
"""How figures look, and how they are written: PNG, SVG and, with the same stem, their data."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no display

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

Row = dict[str, Any]

#: Okabe and Ito's colours, which people with any colour vision tell apart
#: (https://jfly.uni-koeln.de/color/), and a marker each, for print in grey.
STYLES = {
    "even": ("#999999", "o", "even, contiguous"),
    "uneven": ("#E69F00", "s", "by percentage, contiguous"),
    "lut": ("#F0E442", "^", "look-up table, contiguous"),
    "formula": ("#CC79A7", "v", "formula, contiguous"),
    "even_zigzag": ("#000000", "D", "even zigzag"),
    "uneven_zigzag": ("#56B4E9", "P", "by percentage, zigzag"),
    "planned_contiguous": ("#D55E00", "X", "planned, contiguous"),
    "planned": ("#0072B2", "o", "planned"),
    "rebalanced": ("#009E73", "*", "rebalanced"),
    "oracle": ("#E69F00", "s", "oracle"),
}
plt.rcParams.update(
    {
        "font.size": 10,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": "#dddddd",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "lines.markersize": 5,
        "figure.constrained_layout.use": True,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "ringattn",  # the same figure is the same file
    }
)


@dataclass(frozen=True)
class Drawing:
    """A figure and the numbers in it."""

    figure: Figure
    rows: Sequence[Row]

    def write(self, folder: Path, name: str) -> list[Path]:
        table = folder / f"{name}.csv"
        with table.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(self.rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        return [*save(self.figure, folder, name), table]


def read_rows(path: Path, column: str, without: str, texts: Sequence[str]) -> list[Row]:
    """Rows of a table; the columns ``texts`` as they are, others as numbers, empty cells as None.

    Raises:
        OSError: a file that cannot be read.
        ValueError: ``without``, where the table has no rows or no ``column``.
    """
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows or column not in rows[0]:
        raise ValueError(without)
    return [
        {
            name: value if name in texts else float(value) if value else None
            for name, value in row.items()
        }
        for row in rows
    ]


def hardware(table: Path) -> str:
    """The ranks of a table and their device, from the header of the Markdown file beside it; empty
    where there is none."""
    beside = table.with_suffix(".md")
    lines = beside.read_text().split("```")[1].splitlines() if beside.is_file() else []
    header = dict(line.split(": ", 1) for line in lines if ": " in line)
    return f"{header['ranks']} ranks, {header['device']}" if "ranks" in header else ""


def overlaid(count: int) -> list[float]:
    """Widths of so many lines, first to last drawn: where they lie on each other, all are seen."""
    return [1.2 + 0.8 * above for above in reversed(range(count))]


def save(figure: Figure, folder: Path, name: str) -> list[Path]:
    """Writes the figure as PNG and as SVG, and closes it."""
    paths = [folder / f"{name}.{kind}" for kind in ("png", "svg")]
    figure.savefig(paths[0], dpi=150)
    figure.savefig(paths[1], metadata={"Date": None})
    plt.close(figure)
    return paths


def panels(
    count: int, title: str, *, width: float = 4.2, height: float = 3.2, columns: int = 3
) -> tuple[Figure, list[Axes]]:
    """`count` panels, at most `columns` in a row."""
    columns = min(count, columns)
    lines = math.ceil(count / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(max(5.5, width * columns), height * lines + 0.6), squeeze=False
    )
    figure.suptitle(title)
    flat = list(axes.flat)
    for unused in flat[count:]:
        unused.set_visible(False)
    return figure, flat[:count]


def legend_below(figure: Figure, axes: Axes, *more: Artist) -> None:
    """A legend of the labelled artists in `axes`, and of `more`, below the panels."""
    handles = [*axes.get_legend_handles_labels()[0], *more]
    fitting = max(1, int(figure.get_figwidth() / 2.5))
    columns = min(fitting, len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)


def log_scale(axis_of: Axes) -> None:
    """A logarithmic y axis whose labels are plain numbers, for what is drawn already."""
    axis_of.set_yscale("log")
    low, high = axis_of.get_ylim()
    decades = math.log10(high / low)
    # The longer the axis, the fewer labels of a decade have room.
    subs = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0) if decades <= 1 else (1.0, 2.0, 5.0)
    axis_of.yaxis.set_major_locator(LogLocator(subs=subs if decades <= 2.5 else (1.0,)))
    axis_of.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis_of.yaxis.set_minor_formatter(NullFormatter())


def lines(
    rows: Sequence[Row],
    title: str,
    *,
    panel: str,
    x: str,
    y: str,
    y_label: str,
    panel_label: Callable[[Any], str],
    x_tick: Callable[[Any], str],
    x_label: str,
    log_y: bool = False,
    level: Callable[[Any], Sequence[float]] | None = None,
) -> Drawing:
    """One panel for each value of the column `panel`, one line for each split type: `y` over the
    values of `x`, which stand side by side in the order in which they come. At each value the
    markers of the split types stand side by side as well: their `y` may be equal."""
    values = list(dict.fromkeys(row[panel] for row in rows))
    places = {value: place for place, value in enumerate(dict.fromkeys(row[x] for row in rows))}
    names = [name for name in STYLES if any(row["split_type"] == name for row in rows)]
    apart = min(0.14, 0.6 / len(names))
    figure, axes = panels(len(values), title)
    for value, ax in zip(values, axes, strict=True):
        here = [row for row in rows if row[panel] == value]
        for number, (name, width) in enumerate(zip(names, overlaid(len(names)), strict=True)):
            colour, marker, label = STYLES[name]
            line = sorted((places[row[x]], row[y]) for row in here if row["split_type"] == name)
            if line:
                at = [place + apart * (number - (len(names) - 1) / 2) for place, _ in line]
                look = {"color": colour, "marker": marker, "linewidth": width, "label": label}
                ax.plot(at, [height for _, height in line], **look)
        for height in level(value) if level else ():
            ax.axhline(height, color="#555555", linewidth=1, linestyle="--")
        ax.set_xticks(list(places.values()), [x_tick(value) for value in places])
        ax.set_xlim(-0.5, len(places) - 0.5)
        ax.set_title(panel_label(value), fontsize=10)
        ax.set_xlabel(x_label)
        ax.set_ylabel(y_label)
        if log_y:
            log_scale(ax)
        else:
            ax.set_ylim(bottom=0)
    legend_below(figure, axes[0])
    columns = (panel, x, "split_type", y)
    return Drawing(figure, [{name: row[name] for name in columns} for row in rows])


def short(tokens: int) -> str:
    """65536 as "64K", 1000 as "1000", 65000 as "63.5K"."""
    if tokens % 1024 == 0:
        return f"{tokens // 1024}K"
    return str(tokens) if tokens < 10240 else f"{tokens / 1024:.1f}K"
