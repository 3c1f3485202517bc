# SPDX-License-Identifier: Apache-2.0
"""What ranks have measured, and profiles made of it, the noise taken out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial

from ringattn._checks import is_number
from ringattn._profiling.timers import Spread
from ringattn.profiles import AttentionTile, RankProfile

#: Relative difference of two speeds that is none, see :func:`equalize`.
NOISE = 0.05

_COMPUTE = ("attention_tflops", "linear_tflops")


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured, under the names of :class:`ringattn.RankProfile`."""

    device: str  # ranks with equal ones have equal hardware: model, multiprocessors in use
    attention_tflops: Spread
    linear_tflops: Spread
    overhead_ms: Spread
    memory_gbps: Spread
    link_gbps: Spread | None
    link_latency_us: Spread | None
    max_tokens: int
    tiles: tuple[AttentionTile, ...] = ()


def equalize(measured: Sequence[RankMeasurement], noise: float = NOISE) -> list[RankProfile]:
    """Profiles out of measurements, the noise taken out.

    For each quantity, from the largest median down: ranks whose medians are close to it, and ranks
    whose median lies between its quartiles, or its median between theirs, are one class; all of
    them get the mean of their medians. The rest is divided in the same way. Medians are close that
    are less than ``noise`` below the other, with two exceptions:

    * ``2 * noise`` for ranks on the same model of device with as many multiprocessors: under load,
      speeds of equal GPUs drift apart and back by that much, and a plan that follows them is slower
      than an even one. Not so where their matrix products, which hardly drift, differ by more than
      ``noise``: a device that gave one of them less than was asked for.
    * ``noise / 2`` for how fast ranks on other hardware compute: they have no reason to be equal.
      Nor do quartiles say that they are: single calls swing with the clocks by more than that.

    Raises:
        ValueError: noise outside [0, 1).
    """
    check_noise(noise)
    values: list[dict[str, float]] = [{} for _ in measured]
    for field in fields(RankMeasurement):
        spreads = [getattr(of_rank, field.name) for of_rank in measured]
        if not all(isinstance(spread, Spread) for spread in spreads):
            continue
        medians = [spread.median for spread in spreads]
        for ranks in classes(medians, partial(_equal, field.name, measured, noise)):
            mean = statistics.fmean(medians[rank] for rank in ranks)
            for rank in ranks:
                values[rank][field.name] = mean
    return [
        RankProfile(max_tokens=of_rank.max_tokens, tiles=of_rank.tiles, **own)
        for of_rank, own in zip(measured, values, strict=True)
    ]


def check_noise(noise: float) -> None:
    if not is_number(noise) or not 0 <= noise < 1:
        raise ValueError(f"noise must lie in [0, 1), got {noise!r}")


def classes(values: Sequence[float], equal: Callable[[int, int], bool]) -> Iterator[list[int]]:
    """Ranks, from the largest value down: those that are equal to the first of what is left."""
    left = sorted(range(len(values)), key=lambda rank: -values[rank])
    while left:
        ranks = [rank for rank in left if equal(left[0], rank)]
        yield ranks
        left = [rank for rank in left if rank not in ranks]


def _equal(
    name: str, measured: Sequence[RankMeasurement], noise: float, first: int, rank: int
) -> bool:
    """Whether a rank shows the same of a quantity as the first one, which has no less."""
    faster, slower = measured[first], measured[rank]
    upper, lower = getattr(faster, name), getattr(slower, name)
    alike = faster.device == slower.device
    if not alike and name in _COMPUTE:
        return lower.median >= (1 - noise / 2) * upper.median
    products = sorted((faster.linear_tflops.median, slower.linear_tflops.median))
    closeness = 2 * noise if alike and products[0] >= (1 - noise) * products[1] else noise
    return (
        lower.median >= (1 - closeness) * upper.median
        or lower.explains(upper)
        or upper.explains(lower)
    )
