# SPDX-License-Identifier: Apache-2.0
"""What ranks have measured, and profiles made of it, the noise taken out."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

from ringattn._checks import is_number
from ringattn._clock import Spread
from ringattn.profiles import AttentionTile, RankProfile

#: Relative difference of two speeds that is none, see :func:`equalize`.
NOISE = 0.05


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

    For each quantity, from the largest median down: ranks whose medians are less than ``noise``
    below it, and ranks whose median lies between its quartiles, or its median between theirs, are
    one class; all of them get the mean of their medians. The rest is divided in the same way.

    Ranks on the same model of device with as many multiprocessors are one class up to twice that:
    under load, speeds of equal GPUs drift apart and back by that much, and a plan that follows them
    is slower than an even one. That does not hold for ranks whose matrix products differ by more
    than ``noise``, which hardly drift: a device that gave one of them less than was asked for.
    Ranks on other hardware have no reason to be equal. Medians that are ``noise / 2`` apart tell
    them apart, whatever their quartiles: single calls swing with the clocks by more than that.

    Raises:
        ValueError: noise outside [0, 1).
    """
    check_noise(noise)
    values: list[dict[str, float]] = [{} for _ in measured]
    for field in fields(RankMeasurement):
        spreads = [getattr(of_rank, field.name) for of_rank in measured]
        if not all(isinstance(spread, Spread) for spread in spreads):
            continue
        for ranks in _classes(spreads, measured, noise):
            mean = statistics.fmean(spreads[rank].median for rank in ranks)
            for rank in ranks:
                values[rank][field.name] = mean
    return [
        RankProfile(max_tokens=of_rank.max_tokens, tiles=of_rank.tiles, **own)
        for of_rank, own in zip(measured, values, strict=True)
    ]


def check_noise(noise: float) -> None:
    if not is_number(noise) or not 0 <= noise < 1:
        raise ValueError(f"noise must lie in [0, 1), got {noise!r}")


def _classes(
    spreads: Sequence[Spread], measured: Sequence[RankMeasurement], noise: float
) -> Iterator[list[int]]:
    left = sorted(range(len(spreads)), key=lambda rank: -spreads[rank].median)
    while left:
        first = left[0]
        ranks = []
        for rank in left:
            closeness = _closeness(measured[rank], measured[first], noise)
            if spreads[rank].median >= (1 - closeness) * spreads[first].median or (
                _explained(spreads[rank], spreads[first])
                and measured[rank].device == measured[first].device
            ):
                ranks.append(rank)
        yield ranks
        left = [rank for rank in left if rank not in ranks]


def _closeness(one: RankMeasurement, other: RankMeasurement, noise: float) -> float:
    """Up to which relative difference medians are close."""
    if one.device != other.device:
        return noise / 2
    slower, faster = sorted((one.linear_tflops.median, other.linear_tflops.median))
    return 2 * noise if slower >= (1 - noise) * faster else noise


def _explained(one: Spread, other: Spread) -> bool:
    return one.explains(other) or other.explains(one)
