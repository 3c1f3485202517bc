# SPDX-License-Identifier: Apache-2.0
"""Measurements of ranks, and profiles made of them. Decides which ranks are equal."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial

from ringattn._checks import is_number
from ringattn._profiling.timers import Spread
from ringattn.profiles import AttentionTile, RankProfile

#: Relative difference of two speeds that counts as noise, see :func:`equalize`.
NOISE = 0.05

_COMPUTE = ("attention_tflops", "linear_tflops")


@dataclass(frozen=True)
class RankMeasurement:
    """The measurements of one rank, with the names of :class:`ringattn.RankProfile`."""

    device: str  # hardware: model and multiprocessors in use, equal where the hardware is
    attention_tflops: Spread
    linear_tflops: Spread
    overhead_ms: Spread
    memory_gbps: Spread
    link_gbps: Spread | None
    link_latency_us: Spread | None
    max_tokens: int
    tiles: tuple[AttentionTile, ...] = ()


def equalize(measured: Sequence[RankMeasurement], noise: float = NOISE) -> list[RankProfile]:
    """Profiles from measurements, with differences that are noise removed.

    For each quantity, ranks whose medians are close, and ranks whose median lies between the
    quartiles of the other, are equal and get the mean of their medians. Medians are close that are
    less than ``noise`` below the other, with two exceptions:

    * ``2 * noise`` for ranks on the same model of device with as many multiprocessors: under load,
      speeds of equal GPUs drift apart and back by that much, and a plan that follows them is slower
      than an even one. ``noise`` holds where their matrix products, which hardly drift, differ by
      more than ``noise``: one of the devices has less than was asked for.
    * ``noise / 2`` for the computing speed of ranks on other hardware: these ranks have no reason
      to be equal. Quartiles do not count either: single calls swing with the clocks by more.

    Raises:
        ValueError: noise outside [0, 1).
    """
    check_noise(noise)
    values: list[dict[str, float]] = [{} for _ in measured]
    for field in fields(RankMeasurement):
        spreads = [getattr(measurement, field.name) for measurement in measured]
        if not all(isinstance(spread, Spread) for spread in spreads):
            continue
        medians = [spread.median for spread in spreads]
        equal = partial(_equal, field.name, measured, noise)
        for own, value in zip(values, snap_equal(medians, equal), strict=True):
            own[field.name] = value
    return [
        RankProfile(max_tokens=measurement.max_tokens, tiles=measurement.tiles, **own)
        for measurement, own in zip(measured, values, strict=True)
    ]


def check_noise(noise: float) -> None:
    if not is_number(noise) or not 0 <= noise < 1:
        raise ValueError(f"noise must lie in [0, 1), got {noise!r}")


def snap_equal(values: Sequence[float], equal: Callable[[int, int], bool]) -> list[float]:
    """The values of ranks, ``[W]``, equal ranks having the mean of theirs.

    The rank with the largest value and those for which ``equal(first, rank)`` holds are one class,
    with ``first`` the former; the remaining ranks are divided in the same way. So a class does not
    creep from neighbour to neighbour.
    """
    snapped = list(values)
    left = sorted(range(len(values)), key=lambda rank: -values[rank])
    while left:
        ranks = [rank for rank in left if equal(left[0], rank)]
        mean = statistics.fmean(values[rank] for rank in ranks)
        for rank in ranks:
            snapped[rank] = mean
        left = [rank for rank in left if rank not in ranks]
    return snapped


def is_close(lower: float, upper: float, tolerance: float) -> bool:
    """Whether ``lower`` is less than ``tolerance``, a share, below ``upper``."""
    return lower >= (1 - tolerance) * upper


def _equal(
    name: str, measured: Sequence[RankMeasurement], noise: float, first: int, rank: int
) -> bool:
    """Whether a quantity of ``rank`` equals that of ``first``, which is not smaller."""
    faster, slower = measured[first], measured[rank]
    upper, lower = getattr(faster, name), getattr(slower, name)
    same_hardware = faster.device == slower.device
    if not same_hardware and name in _COMPUTE:
        return is_close(lower.median, upper.median, noise / 2)
    less, more = sorted((faster.linear_tflops.median, slower.linear_tflops.median))
    drifts = same_hardware and is_close(less, more, noise)
    return (
        is_close(lower.median, upper.median, 2 * noise if drifts else noise)
        or lower.explains(upper)
        or upper.explains(lower)
    )
