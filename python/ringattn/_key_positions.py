# SPDX-License-Identifier: Apache-2.0
"""Where the keys of a rank's cache lie in the sequence, for windows over it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class KeyPositions:
    """Positions of one rank's cached keys, which ascend in its storage. The host counts them: a
    step waits for no device.

    New tokens are numbered from the end of the prompt, because in a padded batch that is where the
    real tokens of each row end.

    Args:
        pieces: of the prompt that this rank holds, ``[(start, stop), ...]``, after rows have been
            rolled.
        prompt_lengths: real tokens of the prompt of each batch row, ``[B]``; one number where all
            rows have as many.
    """

    def __init__(self, pieces: Sequence[tuple[int, int]], prompt_lengths: Sequence[int]) -> None:
        self._pieces = list(pieces)
        self._prompt_lengths = list(prompt_lengths)
        self._new: list[int] = []  # numbers of the new tokens here

    def append(self, first: int, count: int) -> None:
        """New tokens ``[first, first + count)`` come to this rank."""
        self._new.extend(range(first, first + count))

    def select(self, rows: Sequence[int]) -> None:
        """Keeps these batch rows."""
        if len(self._prompt_lengths) > 1:
            self._prompt_lengths = [self._prompt_lengths[row] for row in rows]

    def before(self, place: int) -> list[int]:
        """How many keys of this rank come before new token number ``place``, which may be negative,
        in each batch row: ``[B]``, or ``[1]`` where all rows have as many."""
        new = bisect_left(self._new, place)
        return [
            new
            + sum(max(0, min(length + min(place, 0), stop) - start) for start, stop in self._pieces)
            for length in self._prompt_lengths
        ]
