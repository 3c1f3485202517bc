# SPDX-License-Identifier: Apache-2.0
"""Follows the speeds of ranks through noise, and decides when a new plan pays.

Equal observations give equal decisions on every rank, bit for bit: nothing but additions,
multiplications, divisions, square roots and comparisons, which IEEE 754 rounds one way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# A deviation is large beyond 6 %, and beyond what the noise so far explains.
_LARGE = 0.06
_SIGMAS = 4.0
_CHANGE_SIGMAS = 3.0  # what a change adds to the noise at most
_MEMORY = 40  # observations that a belief, or the noise, averages at most

_FALLS = 2
_FALL_WINDOW = 4  # requests
_PATIENCE = 3
_ALONG = 0.03  # a deviation that is believed when another rank's is
_MAX_PATIENCE = 24
_FLAP_WINDOW = 16  # a fall within so many requests after a rise is flapping
_CALM = 48  # after so many requests without a jump that is forgotten

# What a new plan has to gain: 2 %, and more than the beliefs are uncertain. After how many requests
# it may come without a jump, and what each that did adds to that gain: the first corrects what the
# profiles had wrong, those after it follow what goes up and down. A plan that has been calm for
# long has settled that.
_GAIN = 0.02
_GAIN_SIGMAS = 3.0
_PAUSE = 4
_GAIN_PER_CORRECTION = 0.01


def _total(values: Sequence[float]) -> float:
    """From left to right: ``sum`` compensates its rounding in some releases of Python."""
    total = 0.0
    for value in values:
        total += value
    return total


@dataclass
class _Rank:
    speed: float = 1.0
    observations: int = 4  # that ``speed`` is the mean of; the profile is worth so many
    variance: float = 4e-4  # of an observation, relative: (2 %)^2 until more is known
    seen: list[float] = field(default_factory=list)  # the latest, oldest first
    falls: list[tuple[int, float]] = field(default_factory=list)  # large ones: (request, speed)
    rises: list[float] = field(default_factory=list)  # large ones in a row
    patience: int = _PATIENCE  # how many of those it takes
    request: int = 0
    last_jump: int = 0  # the request after which the belief jumped
    rose: bool = False  # and whether it rose

    def update(self, seen: float) -> bool:
        """Returns whether the belief has jumped."""
        self.request += 1
        if self.request - self.last_jump > _CALM:
            self.patience = _PATIENCE
        deviation = seen / self.speed - 1.0
        sigma = math.sqrt(self.variance)
        # Noise is how much one observation differs from the last, so that a lasting change counts
        # once; and it is bounded, so that rare changes do not count as noise.
        if self.seen:
            bound = max(_LARGE, _CHANGE_SIGMAS * sigma)
            change = min(max(seen / self.seen[-1] - 1.0, -bound), bound)
            self.variance += (change * change / 2 - self.variance) / min(self.request, _MEMORY)
        self.seen.append(seen)
        del self.seen[:-_PATIENCE]
        if abs(deviation) <= max(_LARGE, _SIGMAS * sigma):
            self.observations = min(self.observations + 1, _MEMORY)
            self.speed += self.speed * deviation / self.observations
            self.rises.clear()
            return False
        if deviation > 0.0:
            self.rises.append(seen)
            if len(self.rises) < self.patience:
                return False
            believed = self.rises[-_PATIENCE:]
        else:
            self.rises.clear()
            self.falls.append((self.request, seen))
            if self.falls[0][0] <= self.request - _FALL_WINDOW:
                del self.falls[0]
            if len(self.falls) < _FALLS:
                return False
            believed = [speed for _, speed in self.falls]
            if self.rose and self.request - self.last_jump <= _FLAP_WINDOW:
                self.patience = min(2 * self.patience, _MAX_PATIENCE)
        self._believe(believed)
        self.last_jump = self.request
        self.rose = deviation > 0.0
        return True

    def follow(self, first: _Rank) -> None:
        """Follows a rank that has just jumped, where this one moved in the same direction."""
        latest = self.seen[-first.observations :]
        deviation = _total(latest) / len(latest) / self.speed - 1.0
        if deviation >= _ALONG if first.rose else deviation <= -_ALONG:
            self._believe(latest)

    def _believe(self, speeds: Sequence[float]) -> None:
        self.observations = len(speeds)
        self.speed = _total(speeds) / len(speeds)
        self.falls.clear()
        self.rises.clear()


class SpeedTracker:
    """The believed speeds of ranks relative to their profiles, by the law of
    :class:`ringattn.Rebalancer`.

    When the belief about one rank jumps, the beliefs about others follow what they showed in the
    same requests, if in the same direction: clocks of all devices fall and rise together, and ranks
    that followed one by one would look unequal in between.

    Args:
        world_size: W.

    Attributes:
        jumps: how often a belief has jumped: measurements before a jump do not apply after it.
    """

    def __init__(self, world_size: int) -> None:
        self.jumps = 0
        self._ranks = [_Rank() for _ in range(world_size)]
        self._jumped = False
        self._failed_excess = 0.0
        self._corrections = 0  # new plans without a jump, since the last jump
        self._since_plan = 0  # requests

    @property
    def speeds(self) -> list[float]:
        """The believed speeds, ``[W]``."""
        return [rank.speed for rank in self._ranks]

    def observe(self, speeds: Sequence[float | None]) -> None:
        """One request.

        Args:
            speeds: of each rank in it, relative to its profile, ``[W]``; None for a rank without
                work.

        Raises:
            ValueError: another number of ranks, speeds that are not finite and positive.
        """
        if len(speeds) != len(self._ranks):
            raise ValueError(
                f"speeds must be {len(self._ranks)}, one for each rank, got {len(speeds)}"
            )
        for speed in speeds:
            if speed is not None and not 0.0 < speed < math.inf:
                raise ValueError(f"speeds must be finite and positive, got {speed}")
        pairs = zip(self._ranks, speeds, strict=True)
        seen = [(rank, rank.update(speed)) for rank, speed in pairs if speed is not None]
        jumped = [rank for rank, has_jumped in seen if has_jumped]
        if not jumped:
            return
        self.jumps += len(jumped)
        self._jumped = True
        self._settle()
        for rank, has_jumped in seen:
            if not has_jumped:
                rank.follow(jumped[0])

    def should_replan(self, excess: float, slowest: int) -> bool:
        """Whether to replace the plan in use; called once after each request.

        Args:
            excess: how much longer that plan takes than the best one at the believed speeds: 0.02
                is 2 %, the least that counts; 1 % more with each plan since a belief has jumped,
                until one has been in use for 48 requests.
            slowest: the rank for which all others wait under it.

        Raises:
            ValueError: a rank that is none.
        """
        if not 0 <= slowest < len(self._ranks):
            raise ValueError(f"slowest must be one of the {len(self._ranks)} ranks, got {slowest}")
        self._since_plan += 1
        if self._since_plan > _CALM:
            self._settle()
        rank = self._ranks[slowest]
        least = _GAIN + _GAIN_PER_CORRECTION * self._corrections
        if self._failed_excess > 0.0:
            least = max(self._failed_excess + _GAIN, least)
        gain = max(least, _GAIN_SIGMAS * math.sqrt(rank.variance / rank.observations))
        replan = excess > gain and (self._jumped or self._since_plan >= _PAUSE)
        if replan:
            self._since_plan = 0
            self._corrections += not self._jumped
        self._jumped = False
        return replan

    def record_failed_replan(self, excess: float) -> None:
        """A plan that promised to be faster by ``excess`` was not, and has been given up: until a
        belief jumps, or for 48 requests, the next one has to promise 2 % more than that."""
        self._failed_excess = excess

    def _settle(self) -> None:
        """Earlier plans no longer raise what the next one has to gain."""
        self._failed_excess = 0.0
        self._corrections = 0
