# SPDX-License-Identifier: Apache-2.0
"""Simple ways to split a sequence over unequal ranks: what :func:`ringattn.plan` is compared with.

Each gives rank r a share of the tokens proportional to one weight. They come from a study of two
GPUs, one of them throttled by CUDA MPS (https://github.com/AnshSG13/hetero_gpu_context_parallelism)
and compute what it computed, for any number of ranks. A rank's *percentage* is the share of a
device's threads that MPS lets it use, 100 for all of them.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from ringattn.partition import Partition
from ringattn.profiles import integer, is_number, is_positive


class ClampWarning(UserWarning):
    """A weight of :func:`formula` was not positive and has been clamped."""


def even(
    seq_len: int, world_size: int, *, layout: str = "zigzag", order: Sequence[int] | None = None
) -> Partition:
    """Equal shares: lengths differ by at most one, the lower ranks have the longer ones.

    Raises:
        ValueError: as :class:`ringattn.Partition`.
    """
    return Partition(layout, Partition.even(seq_len, world_size).lengths, tuple(order or ()))


def uneven(
    seq_len: int,
    speeds: Sequence[float],
    *,
    layout: str = "zigzag",
    order: Sequence[int] | None = None,
) -> Partition:
    """Shares proportional to speeds.

    Args:
        seq_len: tokens of the sequence.
        speeds: of each rank, in any unit, ``[W]``; percentages where nothing better is known.
        layout: "zigzag" or "contiguous".
        order: as in :class:`ringattn.Partition`.

    Raises:
        ValueError: speeds that are not finite and positive; as :class:`ringattn.Partition`.
    """
    for rank, speed in enumerate(speeds):
        if not is_positive(speed):
            raise ValueError(f"speed of rank {rank} must be finite and positive, got {speed!r}")
    return _proportional(seq_len, speeds, layout, order)


def lut(
    seq_len: int,
    percentages: Sequence[float],
    table: Table,
    *,
    layout: str = "zigzag",
    order: Sequence[int] | None = None,
) -> Partition:
    """Shares proportional to speeds looked up in a table.

    A table of latencies gives a rank the weight ``1 / latency``; a table of matrix products its
    TFLOPS at the size nearest to ``seq_len``, the smaller of two, of sizes that have several
    percentages if there are any. Between two percentages of the
    table, the latency or the TFLOPS are interpolated linearly; beyond its ends they stay.

    Args:
        seq_len: tokens of the sequence.
        percentages: of each rank, ``[W]``, in (0, 100].
        table: from :func:`read_table` or of one's own.
        layout: "zigzag" or "contiguous".
        order: as in :class:`ringattn.Partition`.

    Raises:
        ValueError: an empty table, rows of two kinds, values in it that are not positive, two
            values where one is looked up, percentages out of range; as
            :class:`ringattn.Partition`.
    """
    _check_percentages(percentages)
    _check_table(table)
    seq_len = integer("seq_len", seq_len)
    weights = [_look_up(table, seq_len, percentage) for percentage in percentages]
    return _proportional(seq_len, weights, layout, order)


def formula(
    seq_len: int,
    percentages: Sequence[float],
    regression: Regression | None = None,
    *,
    layout: str = "zigzag",
    order: Sequence[int] | None = None,
) -> Partition:
    """Shares proportional to a polynomial in ``log10(seq_len)`` and the percentage.

    Outside the range it was fitted in, the polynomial may be negative: such weights count as 0, and
    where none is positive the percentages take their place.

    Args:
        seq_len: tokens of the sequence.
        percentages: of each rank, ``[W]``, in (0, 100].
        regression: None means :data:`PUBLISHED`.
        layout: "zigzag" or "contiguous".
        order: as in :class:`ringattn.Partition`.

    Raises:
        ValueError: percentages out of range; as :class:`ringattn.Partition`.

    Warns:
        ClampWarning: weights were clamped; it names the ranks.
    """
    _check_percentages(percentages)
    regression = PUBLISHED if regression is None else regression
    seq_len = integer("seq_len", seq_len)
    weights = [regression(max(1, seq_len), percentage) for percentage in percentages]
    clamped = [max(0.0, weight) for weight in weights]
    if clamped != weights or not any(clamped):
        what = ", ".join(f"rank {r} ({w:.1f})" for r, w in enumerate(weights) if w <= 0)
        kind = "negative" if min(weights) < 0 else "no positive"
        instead = "0" if any(clamped) else "their percentages"
        warnings.warn(
            f"the formula gives {kind} weights at {seq_len} tokens: {what}; "
            f"they are taken as {instead}",
            ClampWarning,
            stacklevel=2,
        )
    return _proportional(seq_len, clamped if any(clamped) else percentages, layout, order)


# ---- tables ------------------------------------------------------------------------------------


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
            kind_of = "a positive whole number" if is_whole else "positive"
            raise ValueError(
                f"{field.name} in line {line} of {path} must be {kind_of}, got {text or 'nothing'}"
            )
        values[field.name] = int(value) if is_whole else value
    return kind(**values)  # type: ignore[arg-type]


def _check_table(table: Table) -> None:
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
            if not is_positive(getattr(row, name)):
                raise ValueError(
                    f"{name} in row {number} of the table must be finite and positive, "
                    f"got {getattr(row, name)!r}"
                )


def _look_up(table: Table, seq_len: int, percentage: float) -> float:
    """The weight of a rank with this percentage."""
    latencies = [(row.mps_pct, row.latency_ms) for row in table if isinstance(row, LatencyRow)]
    if latencies:
        return 1.0 / _interpolate(_by_percentage(latencies), percentage)
    rows = [row for row in table if isinstance(row, MatmulRow)]
    # Several loads beside them: the least one counts, as a rank has the device to itself.
    least = min(_comparing((row.bg_streams, row.mps_pct) for row in rows))
    rows = [row for row in rows if row.bg_streams == least]
    sizes = sorted(_comparing((row.size, row.mps_pct) for row in rows))
    nearest = min(sizes, key=lambda size: abs(size - seq_len))
    speeds = _by_percentage((row.mps_pct, row.tflops) for row in rows if row.size == nearest)
    return _interpolate(speeds, percentage)


def _comparing(rows: Iterable[tuple[int, float]]) -> set[int]:
    """The values for which there are several percentages; all where there are none such."""
    percentages: dict[int, set[float]] = {}
    for value, percentage in rows:
        percentages.setdefault(value, set()).add(percentage)
    return {value for value, some in percentages.items() if len(some) > 1} or set(percentages)


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


# ---- regression --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Regression:
    """Speed in percent of a device's best, as a polynomial of degree 2 in ``L = log10(size)`` and
    the percentage ``p``.

    ``coefficients``: of ``1, L, p, L**2, L*p, p**2``. ``r_squared``: how much of the variance of
    the rows it was fitted to it explains.
    """

    coefficients: tuple[float, float, float, float, float, float]
    r_squared: float

    def __call__(self, size: int, percentage: float) -> float:
        """The polynomial's value, which may be negative."""
        return sum(c * x for c, x in zip(self.coefficients, _terms(size, percentage), strict=True))

    @classmethod
    def fit(cls, rows: Sequence[MatmulRow]) -> Regression:
        """Least squares over a table of matrix products.

        Raises:
            ValueError: rows that are no MatmulRows, sizes or percentages that are not positive,
                fewer than three of either, speeds that are not finite, none that is positive.
        """
        for number, row in enumerate(rows):
            if not isinstance(row, MatmulRow):
                raise ValueError(f"rows must be MatmulRows, got {type(row).__name__}")
            for name, right in (
                ("size", is_positive(row.size)),
                ("mps_pct", is_positive(row.mps_pct)),
                ("tflops", is_number(row.tflops) and math.isfinite(row.tflops)),
            ):
                if not right:
                    kind = "finite" if name == "tflops" else "finite and positive"
                    got = getattr(row, name)
                    raise ValueError(f"{name} in row {number} must be {kind}, got {got!r}")
        for name, values in (
            ("sizes", {row.size for row in rows}),
            ("percentages", {row.mps_pct for row in rows}),
        ):
            if len(values) < 3:
                raise ValueError(f"rows must have at least three {name}, got {len(values)}")
        best = max(row.tflops for row in rows)
        if best <= 0:
            raise ValueError(f"rows must have a largest tflops that is positive, got {best!r}")
        terms = torch.tensor([_terms(row.size, row.mps_pct) for row in rows], dtype=torch.float64)
        speeds = torch.tensor([100 * row.tflops / best for row in rows], dtype=torch.float64)
        # Columns of one scale: they range from 1 to 10,000.
        scale = terms.abs().amax(0)
        solution = torch.linalg.lstsq(terms / scale, speeds[:, None]).solution[:, 0] / scale
        residual = (speeds - terms @ solution).square().sum()
        variation = (speeds - speeds.mean()).square().sum()
        r_squared = 1.0 if variation == 0 else 1.0 - float(residual / variation)
        c = solution.tolist()
        return cls((c[0], c[1], c[2], c[3], c[4], c[5]), r_squared)

    def __str__(self) -> str:
        names = ("", " L", " p", " L^2", " L p", " p^2")
        terms = " ".join(f"{c:+.6g}{n}" for c, n in zip(self.coefficients, names, strict=True))
        return f"speed % = {terms}, L = log10(size), p = percentage; R^2 = {self.r_squared:.3f}"

    @classmethod
    def read(cls, path: Path | str) -> Regression:
        """From a file that :meth:`write` made.

        Raises:
            ValueError: anything but six finite coefficients.
            OSError: a file that cannot be read.
        """
        try:
            content = json.loads(Path(path).read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} must be JSON, got {error}") from None
        c = content.get("coefficients") if isinstance(content, dict) else None
        numbers = isinstance(c, list) and all(isinstance(x, int | float) for x in c)
        if c is None or not numbers or len(c) != 6 or not all(math.isfinite(x) for x in c):
            raise ValueError(f"{path} must have six finite coefficients, got {c!r}")
        return cls((c[0], c[1], c[2], c[3], c[4], c[5]), content.get("r_squared", math.nan))

    def write(self, path: Path | str) -> None:
        """As JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


#: The study's own fit, to matrix products on an L40 of up to 32768 rows under MPS.
PUBLISHED = Regression((-662.478, 365.074, 0.195907, -49.6378, 0.337949, -0.00710625), 0.922)


def _terms(size: int, percentage: float) -> tuple[float, ...]:
    log = math.log10(size)
    return 1.0, log, percentage, log**2, log * percentage, percentage**2


# ---- shares ------------------------------------------------------------------------------------


def _check_percentages(percentages: Sequence[float]) -> None:
    for rank, percentage in enumerate(percentages):
        if not is_number(percentage) or not 0 < percentage <= 100:
            raise ValueError(f"percentage of rank {rank} must lie in (0, 100], got {percentage!r}")


def _proportional(
    seq_len: int, weights: Sequence[float], layout: str, order: Sequence[int] | None
) -> Partition:
    """Tokens in proportion to non-negative weights, each rounded by itself (halves to even); the
    last rank makes up for what the rounding added or left out."""
    seq_len = integer("seq_len", seq_len)
    if seq_len < 0:
        raise ValueError(f"seq_len must not be negative, got {seq_len}")
    total = sum(weights)
    if math.isinf(total):  # of finite ones
        weights = [weight / len(weights) for weight in weights]
        total = sum(weights)
    lengths = [round(seq_len * (weight / total)) for weight in weights]
    excess = sum(lengths) - seq_len
    for rank in reversed(range(len(lengths))):
        taken = min(excess, lengths[rank])  # negative: given to the last rank, all of it
        lengths[rank] -= taken
        excess -= taken
    return Partition(layout, tuple(lengths), tuple(order or ()))
