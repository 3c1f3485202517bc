# SPDX-License-Identifier: Apache-2.0
"""Milliseconds over sequence length, from tables that benchmarks/ring.py wrote, as an SVG.

python benchmarks/plot_ring.py TABLE.csv... --out docs/ring-times.svg
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path

from study.style import log_scale, plt, short

#: Colour, marker, label of a line, and the rows it takes: the fastest of them at each length.
LINES = (
    ("#999999", "s", "one GPU, ringattn", ("one device: ringattn",)),
    ("#D55E00", "v", "zigzag ring on FlashAttention-2", ("zigzag on FlashAttention-2",)),
    (
        "#E69F00",
        "^",
        "context_parallel on cuDNN",
        ("context_parallel cuDNN allgather", "context_parallel cuDNN alltoall"),
    ),
    ("#0072B2", "o", "ringattn", ("ringattn zigzag symmetric",)),
)


def fastest(paths: Sequence[Path], names: Sequence[str]) -> dict[int, float]:
    """The least milliseconds of these rows at each length.

    Raises:
        ValueError: no such row.
    """
    times: dict[int, float] = {}
    for path in paths:
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row["what"] in names:
                    length, ms = int(row["S"]), float(row["ms"])
                    times[length] = min(ms, times.get(length, ms))
    if not times:
        raise ValueError(f"tables must have a row {names[0]!r}, got none")
    return dict(sorted(times.items()))


def draw(paths: Sequence[Path], title: str, out: Path) -> None:
    """One line for each of :data:`LINES`, both axes logarithmic."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for colour, marker, label, names in LINES:
        times = fastest(paths, names)
        axes.plot(list(times), list(times.values()), color=colour, marker=marker, label=label)
    lengths = list(fastest(paths, LINES[-1][3]))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    log_scale(axes)
    axes.set_xlabel("tokens")
    axes.set_ylabel("ms")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=9)
    figure.savefig(out, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="+", metavar="TABLE.csv")
    parser.add_argument("--title", default="Causal ring forward", help="(default: %(default)s)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.svg")
    arguments = parser.parse_args()
    try:
        draw(arguments.tables, arguments.title, arguments.out)
    except (OSError, KeyError, ValueError) as error:
        parser.error(f"TABLE.csv must be a table of benchmarks/ring.py, got {error}")


if __name__ == "__main__":
    main()
