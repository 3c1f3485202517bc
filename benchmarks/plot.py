# SPDX-License-Identifier: Apache-2.0
"""Figures of benchmarks/heterogeneous.py, each as PNG, SVG and, with the same name, as CSV.

    python benchmarks/plot.py STEM.csv --out build/figures
    python benchmarks/plot.py STEM.csv --trace TRACE.csv --regression FIT.json --out build/figures

What a sweep does not hold is left out: slow_positions needs --positions every, speedups need the
even split. A sweep of attention and of layers gets one folder for each.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ringattn.strategies import PUBLISHED, Regression
from study.figures import OF_SWEEP, regression_surface, total_percentage
from study.style import Drawing
from study.tables import REFERENCE, sweep_rows
from study.trace_figures import drift_trace


def read(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV: numbers as numbers, empty cells as None."""
    with path.open(newline="") as file:
        rows = [
            {name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)
        ]
    if not rows:
        raise SystemExit(f"{path} must have rows, got none")
    return rows


def _value(name: str, text: str) -> Any:
    if text == "":
        return None
    if name == "percentages":  # of one rank it would be a number
        return text
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def drawings(arguments: argparse.Namespace) -> Iterator[tuple[str, Drawing]]:
    """Names of the files, with a folder where there are several kinds, and figures, one by one."""
    if arguments.sweep is not None:
        # Sets of ranks from the fastest to the slowest, whatever was measured first.
        rows = [row for row in sweep_rows(read(arguments.sweep)) if row["split_type"] != REFERENCE]
        rows.sort(key=lambda row: -total_percentage(row["percentages"]))
        kinds = list(dict.fromkeys(row["what"] for row in rows))
        for what in kinds:
            folder = f"{what}/" if len(kinds) > 1 else ""
            of_kind = [row for row in rows if row["what"] == what]
            for name, draw in OF_SWEEP.items():
                drawing = draw(of_kind)
                if drawing is not None:
                    yield f"{folder}{name}", drawing
        fit = Regression.read(arguments.regression) if arguments.regression else PUBLISHED
        yield "regression_surface", regression_surface(fit)
    if arguments.trace is not None:
        yield "drift_trace", drift_trace(read(arguments.trace))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, nargs="?", metavar="STEM.csv", help="of a sweep")
    parser.add_argument("--trace", type=Path, metavar="CSV", help="of a rebalancing trace")
    parser.add_argument("--regression", type=Path, metavar="JSON", help="instead of the published")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.sweep is None and arguments.trace is None:
        parser.error("a sweep or a --trace must be given, got neither")
    for name, drawing in drawings(arguments):
        (arguments.out / name).parent.mkdir(parents=True, exist_ok=True)
        drawing.write(arguments.out, name)
        print(arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
