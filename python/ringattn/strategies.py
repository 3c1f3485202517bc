# SPDX-License-Identifier: Apache-2.0
"""Simple ways to split a sequence over unequal ranks, as a baseline for :func:`ringattn.plan`.

Each gives rank r a share of the tokens proportional to one weight. They come from a study of two
GPUs, one of them throttled by CUDA MPS (https://github.com/AnshSG13/hetero_gpu_context_parallelism)
and compute what it computed, for any number of ranks. A rank's *percentage* is the share of a
device's threads that MPS lets it use, 100 for all of them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ringattn._checks import (
    check_integer,
    check_integers,
    check_percentage,
    check_positive,
    is_finite,
    is_number,
    read_json,
)
from ringattn._profiling.speed_tables import (
    LatencyRow,
    MatmulRow,
    Table,
    check_table,
    look_up,
    matmul_table,
    read_table,
    write_table,
)
from ringattn.partition import Partition, check_layout

__all__ = [
    "PUBLISHED",
    "ClampWarning",
    "LatencyRow",
    "MatmulRow",
    "Regression",
    "Table",
    "even",
    "formula",
    "lut",
    "matmul_table",
    "read_table",
    "uneven",
    "write_table",
]


class ClampWarning(UserWarning):
    """A weight of :func:`formula` was not positive and has been clamped."""


def even(
    seq_len: int, world_size: int, *, layout: str = "zigzag", order: Sequence[int] | None = None
) -> Partition:
    """Equal shares: lengths differ by at most one, the lower ranks have the longer ones.

    Raises:
        ValueError: as :class:`ringattn.Partition`.
    """
    return _partition(layout, Partition.even(seq_len, world_size).lengths, order)


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
    for rank, speed in enumerate(_of_ranks("speeds", speeds)):
        check_positive(f"speed of rank {rank}", speed)
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
    check_table(table)
    seq_len = check_integer("seq_len", seq_len, least=0)
    weights = [look_up(table, seq_len, percentage) for percentage in percentages]
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
    if not callable(regression):
        raise ValueError(f"regression must be a Regression, got {regression!r}")
    seq_len = check_integer("seq_len", seq_len, least=0)
    weights = [regression(max(1, seq_len), percentage) for percentage in percentages]
    clamped = [max(0.0, weight) for weight in weights]
    if clamped != weights or not any(clamped):
        negative = min(weights) < 0
        kind = "negative" if negative else "no positive"
        named = [r for r, weight in enumerate(weights) if weight < 0 or not negative]
        what = ", ".join(f"rank {r} ({weights[r]:.1f})" for r in named)
        instead = "0" if any(clamped) else "their percentages"
        warnings.warn(
            f"the formula gives {kind} weights at {seq_len} tokens: {what}; "
            f"they are taken as {instead}",
            ClampWarning,
            stacklevel=2,
        )
    return _proportional(seq_len, clamped if any(clamped) else percentages, layout, order)


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
            check_positive(f"size in row {number}", row.size)
            check_positive(f"mps_pct in row {number}", row.mps_pct)
            if not is_finite(row.tflops):
                raise ValueError(f"tflops in row {number} must be finite, got {row.tflops!r}")
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
        """The regression in a file that :meth:`write` made.

        Raises:
            ValueError: anything but six finite coefficients, and an r_squared that is a number
                where there is one.
            OSError: a file that cannot be read.
        """
        content = read_json(path)
        c = content.get("coefficients") if isinstance(content, dict) else None
        if not isinstance(c, list) or len(c) != 6 or not all(map(is_finite, c)):
            raise ValueError(f"{path} must have six finite coefficients, got {c!r}")
        r_squared = content.get("r_squared", math.nan)
        if not is_number(r_squared):
            raise ValueError(f"{path} must have an r_squared that is a number, got {r_squared!r}")
        return cls((c[0], c[1], c[2], c[3], c[4], c[5]), r_squared)

    def write(self, path: Path | str) -> None:
        """Writes the regression as JSON."""
        Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")


#: The study's own fit, to matrix products on an L40 of up to 32768 rows under MPS.
PUBLISHED = Regression((-662.478, 365.074, 0.195907, -49.6378, 0.337949, -0.00710625), 0.922)


def _terms(size: int, percentage: float) -> tuple[float, ...]:
    log = math.log10(size)
    return 1.0, log, percentage, log**2, log * percentage, percentage**2


# ---- shares ------------------------------------------------------------------------------------


def _of_ranks(name: str, values: Sequence[float]) -> Sequence[float]:
    if not hasattr(values, "__len__") or not hasattr(values, "__iter__"):
        raise ValueError(f"{name} must be one for each rank, got {values!r}")
    return values


def _check_percentages(percentages: Sequence[float]) -> None:
    if not len(_of_ranks("percentages", percentages)):
        raise ValueError("percentages must be one for each rank, got none")
    for rank, percentage in enumerate(percentages):
        check_percentage(f"percentage of rank {rank}", percentage)


def _proportional(
    seq_len: int, weights: Sequence[float], layout: str, order: Sequence[int] | None
) -> Partition:
    """Tokens in proportion to non-negative weights, each rounded by itself (halves to even); the
    last rank makes up for what the rounding added or left out."""
    seq_len = check_integer("seq_len", seq_len, least=0)
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
    return _partition(layout, lengths, order)


def _partition(layout: str, lengths: Sequence[int], order: Sequence[int] | None) -> Partition:
    check_layout(layout)
    return Partition(
        layout, tuple(lengths), check_integers("order", () if order is None else order)
    )
