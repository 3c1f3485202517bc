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
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ringattn.strategies import PUBLISHED, Regression
from study.figures import OF_SWEEP, regression_surface, total_percentage
from study.style import Drawing, Row, hardware
from study.tables import (
    MAY_BE_EMPTY,
    REFERENCE,
    TEXTS,
    sweep_columns,
    sweep_rows,
    trace_columns,
)
from study.trace_figures import drift_trace

_NAMED = 4  # of the columns that a file does not have


def read(path: Path, columns_of: Callable[[int], Sequence[str]]) -> list[Row]:
    """Rows of a CSV with these columns of so many ranks: numbers as numbers, empty cells as None.

    Raises:
        OSError: a file that cannot be read.
        ValueError: no rows, columns that are missing, lines of another length, cells that hold
            something else than they should.
    """
    # A file that is no text is one without the columns.
    with path.open(newline="", errors="replace") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    if not rows:
        raise ValueError("no rows")
    header = reader.fieldnames or []
    ranks = [int(column[1]) for name in header if (column := re.match(r"rank(\d+)_", name))]
    columns = columns_of(1 + max(ranks, default=0))
    missing = [name for name in columns if name not in header]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise ValueError(f"no columns {', '.join(missing[:_NAMED])}{more}")
    if any(None in row or None in row.values() for row in rows):
        raise ValueError(f"lines that do not have {len(header)} cells")
    return [{name: _value(name, row) for name in columns} for row in rows]


def _value(name: str, row: dict[str, str]) -> Any:
    text = row[name]
    if name in TEXTS:
        return text
    if text == "" and _may_be_empty(name, row):
        return None
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    raise ValueError(f"{name} {text!r}, which is no number")


def _may_be_empty(name: str, row: dict[str, str]) -> bool:
    column = re.fullmatch(r"rank(\d+)_(.+)", name)
    if column is None:
        return name in MAY_BE_EMPTY
    # A set of fewer ranks than others has nothing in the columns of the rest.
    num_ranks = row.get("percentages", "").count(",") + 1
    return column[2] in MAY_BE_EMPTY or int(column[1]) >= num_ranks


def read_sweep(path: Path) -> list[Row]:
    """Sets of ranks from the fastest to the slowest, whatever was measured first."""
    measured = read(path, sweep_columns)
    for row in measured:
        if not re.fullmatch(r"[0-9]+(,[0-9]+)*", row["percentages"]):
            raise ValueError(f"percentages {row['percentages']!r}, which are not like 100,50")
    rows = [row for row in sweep_rows(measured) if row["split_type"] != REFERENCE]
    return sorted(rows, key=lambda row: -total_percentage(row["percentages"]))


#: What is drawn, as arguments are named -> what its file is, and what reads it.
SOURCES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "sweep": ("the CSV of a sweep", read_sweep),
    "trace": ("the CSV of a rebalancing trace", lambda path: read(path, trace_columns)),
    "regression": ("the JSON of a regression", Regression.read),
}


def drawings(sources: dict[str, Any]) -> Iterator[tuple[str, str, Drawing]]:
    """Names of the files, with a folder where there are several kinds, the source, and figures, one
    by one."""
    if "sweep" in sources:
        rows = sources["sweep"]
        kinds = list(dict.fromkeys(row["what"] for row in rows))
        for what in kinds:
            folder = f"{what}/" if len(kinds) > 1 else ""
            of_kind = [row for row in rows if row["what"] == what]
            for name, draw in OF_SWEEP.items():
                drawing = draw(of_kind)
                if drawing is not None:
                    yield f"{folder}{name}", "sweep", drawing
        surface = regression_surface(sources.get("regression", PUBLISHED))
        yield "regression_surface", "regression", surface
    if "trace" in sources:
        yield "drift_trace", "trace", drift_trace(sources["trace"])


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
    sources = {}  # all of them, before anything is written
    for name, (kind, reader) in SOURCES.items():
        path = getattr(arguments, name)
        if path is not None:
            try:
                sources[name] = reader(path)
            except (OSError, ValueError, csv.Error) as error:
                parser.error(f"{path} must be {kind}, got: {error}")
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out must be a folder that can be written, got: {error}")
    for name, source, drawing in drawings(sources):
        if (path := getattr(arguments, source)) and (machine := hardware(path)):
            drawing.figure.suptitle(f"{drawing.figure.get_suptitle()}\n{machine}")
        (arguments.out / name).parent.mkdir(parents=True, exist_ok=True)
        drawing.write(arguments.out, name)
        print(arguments.out / f"{name}.png")


if __name__ == "__main__":
    main()
