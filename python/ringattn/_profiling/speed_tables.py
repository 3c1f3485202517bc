# SPDX-License-Identifier: Apache-2.0
"""Tables of a device's speed under MPS percentages: CSV files and lookups of :mod:`strategies`."""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ringattn._checks import check_positive


@dataclass(frozen=True, kw_only=True)
class LatencyRow:
    """How long one attention call takes. The fields are the columns of the file."""

    mps_pct: float
    latency_ms: float


@dataclass(frozen=True, kw_only=True)
class MatmulRow:
    """How fast a device multiplies square matrices. The fields are the columns of the file."""

    mps_pct: float
    size: int  # rows and columns of the matrices
    dtype: str = ""
    bg_streams: int = 0  # streams that keep the device busy meanwhile
    avg_ms: float = math.nan
    tflops: float


Table = Sequence[LatencyRow] | Sequence[MatmulRow]
_Row = TypeVar("_Row", LatencyRow, MatmulRow)


def matmul_table(percentages: Sequence[float], tflops: Sequence[float]) -> list[MatmulRow]:
    """The table of measured ranks; ranks with the same percentage have their mean.

    Args:
        percentages: of each rank, ``[W]``.
        tflops: of each rank's matrix products, ``[W]``.

    Raises:
        ValueError: another number of speeds than of percentages.
    """
    if len(percentages) != len(tflops):
        raise ValueError(
            f"tflops must be one for each of {len(percentages)} percentages, got {len(tflops)}"
        )
    measured: dict[float, list[float]] = {}
    for percentage, speed in zip(percentages, tflops, strict=True):
        measured.setdefault(percentage, []).append(speed)
    # All rows have one size, so this size is the nearest to every sequence.
    return [
        MatmulRow(mps_pct=percentage, size=1, tflops=statistics.fmean(speeds))
        for percentage, speeds in measured.items()
    ]


def read_table(path: Path | str) -> Table:
    """A table from a CSV file: columns ``mps_pct,latency_ms``, or ``mps_pct,size,tflops`` and, if
    there, ``dtype,bg_streams,avg_ms``. ``python -m ringattn profile`` writes both.

    Raises:
        ValueError: columns that are missing, no rows, a value that is not a positive number.
        OSError: a file that cannot be read.
    """
    with Path(path).open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        try:
            columns = reader.fieldnames or []
            cells = [(reader.line_num, row) for row in reader]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(f"{path} must be a CSV file in UTF-8, got {error}") from None
    latencies = "latency_ms" in columns
    required = ("mps_pct", "latency_ms") if latencies else ("mps_pct", "size", "tflops")
    if missing := [name for name in required if name not in columns]:
        raise ValueError(
            f"{path} must have the columns mps_pct,latency_ms or mps_pct,size,tflops, "
            f"got {','.join(columns) or 'none'} (missing: {','.join(missing)})"
        )
    if not cells:
        raise ValueError(f"{path} must have at least one row, got none")
    if latencies:
        return [_row(LatencyRow, path, line, row) for line, row in cells]
    return [_row(MatmulRow, path, line, row) for line, row in cells]


def write_table(path: Path | str, table: Table) -> None:
    """Writes a table as :func:`read_table` reads it."""
    columns = [field.name for field in dataclasses.fields(table[0])]
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        for row in table:
            cells = dataclasses.asdict(row).items()
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in cells})


def _row(kind: type[_Row], path: Path | str, line: int, cells: dict[str, str]) -> _Row:
    values: dict[str, float | str] = {}
    for field in dataclasses.fields(kind):
        text = cells.get(field.name)
        is_optional = field.default is not dataclasses.MISSING
        if text is None and is_optional:
            continue
        if field.name == "dtype":
            values[field.name] = text or ""
            continue
        is_whole = field.type == "int"
        try:
            value = float(text or "")
        except ValueError:
            value = math.nan
        if (
            not math.isfinite(value)
            or value < 0
            or (value == 0 and field.name != "bg_streams")
            or (is_whole and value != int(value))
        ):
            rule = "a positive whole number" if is_whole else "positive"
            raise ValueError(
                f"{field.name} in line {line} of {path} must be {rule}, got {text or 'nothing'}"
            )
        values[field.name] = int(value) if is_whole else value
    return kind(**values)  # type: ignore[arg-type]


def check_table(table: Table) -> None:
    if not isinstance(table, Sequence):
        raise ValueError(f"table must be a list of rows, got {type(table).__name__}")
    if not table:
        raise ValueError("table must have at least one row, got none")
    kind = type(table[0])
    for number, row in enumerate(table):
        if not isinstance(row, LatencyRow | MatmulRow) or type(row) is not kind:
            raise ValueError(
                "table must have rows that are all LatencyRows or all MatmulRows, "
                f"got {type(row).__name__} as row {number}"
            )
        names = ["mps_pct", "latency_ms"] if kind is LatencyRow else ["mps_pct", "size", "tflops"]
        for name in names:
            check_positive(f"{name} in row {number} of the table", getattr(row, name))


def look_up(table: Table, seq_len: int, percentage: float) -> float:
    """The weight of a rank with this percentage, see :func:`ringattn.strategies.lut`."""
    latencies = [(row.mps_pct, row.latency_ms) for row in table if isinstance(row, LatencyRow)]
    if latencies:
        return 1.0 / _interpolate(_by_percentage(latencies), percentage)
    rows = [row for row in table if isinstance(row, MatmulRow)]

    # With several background loads the smallest counts: a rank has the device to itself.
    def preference(place: tuple[int, int]) -> tuple[bool, int, int, int]:
        bg_streams, size = place
        compares = len({row.mps_pct for row in rows if (row.bg_streams, row.size) == place}) > 1
        return not compares, bg_streams, abs(size - seq_len), size

    best = min({(row.bg_streams, row.size) for row in rows}, key=preference)
    speeds = [(row.mps_pct, row.tflops) for row in rows if (row.bg_streams, row.size) == best]
    return _interpolate(_by_percentage(speeds), percentage)


def _by_percentage(rows: Iterable[tuple[float, float]]) -> dict[float, float]:
    values: dict[float, float] = {}
    for percentage, value in rows:
        if values.setdefault(percentage, value) != value:
            raise ValueError(
                f"table must have one value for a percentage (and a size, of one dtype), got "
                f"{values[percentage]:g} and {value:g} for {percentage:g}"
            )
    return values


def _interpolate(values: dict[float, float], at: float) -> float:
    """Piecewise linear through (key, value), constant beyond the ends."""
    keys = sorted(values)
    if at <= keys[0] or at >= keys[-1]:
        return values[keys[0] if at <= keys[0] else keys[-1]]
    above = next(key for key in keys if key >= at)
    below = max(key for key in keys if key <= at)
    if above == below:
        return values[above]
    share = (at - below) / (above - below)
    return values[below] + share * (values[above] - values[below])
