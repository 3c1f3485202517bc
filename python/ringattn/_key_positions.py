# SPDX-License-Identifier: Apache-2.0
"""Where the keys of a cache lie in the sequence, for windows over it and for tokens after it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ringattn.partition import Partition

_Pieces = list[tuple[int, int]]  # (start, stop), ascending


class KeyPositions:
    """Positions of the cached keys of all ranks, which ascend in each rank's storage. The host
    counts them: a step waits for no device.

    New tokens are numbered from the end of the prompt, because in a padded batch that is where the
    real tokens of each row end.

    Args:
        pieces: of the prompt that each rank holds, ``[W]``, after rows have been rolled.
        rank: this rank.
        prompt_lengths: real tokens of the prompt of each batch row, ``[B]``; None: all rows have
            as many.
    """

    def __init__(
        self,
        pieces: Sequence[Sequence[tuple[int, int]]],
        rank: int,
        prompt_lengths: Sequence[int] | None = None,
    ) -> None:
        self._rank = rank
        self._prompt: list[_Pieces] = [list(owned) for owned in pieces]
        self._new: list[_Pieces] = [[] for _ in pieces]  # numbers of the new tokens
        self._before: list[int] = []  # new tokens of this rank before each of its new pieces
        self._prompt_len = sum(stop - start for owned in pieces for start, stop in owned)
        self._num_new = 0
        self._prompt_lengths = None if prompt_lengths is None else list(prompt_lengths)
        self._partition: Partition | None = None

    def append(self, pieces: Sequence[Sequence[tuple[int, int]]]) -> None:
        """The next tokens, numbered from 0, come to the ranks in these pieces, ``[W]``."""
        self._partition = None
        first = self._num_new
        for rank, owned in enumerate(pieces):
            held = self._new[rank]
            for start, stop in owned:
                if start == stop:
                    continue
                self._num_new += stop - start
                if held and held[-1][1] == first + start:
                    held[-1] = (held[-1][0], first + stop)
                    continue
                if rank == self._rank:
                    self._before.append(_count(held[-1:]) + (self._before or [0])[-1])
                held.append((first + start, first + stop))

    def select(self, rows: Sequence[int]) -> None:
        """Keeps these batch rows."""
        if self._prompt_lengths is not None:
            self._prompt_lengths = [self._prompt_lengths[row] for row in rows]

    def crop(self, num_tokens: int) -> list[int]:
        """Keeps the first tokens of the sequence, of rows of one length. Returns how many of them
        each rank has, ``[W]``."""
        self._partition = None
        num_new = max(0, num_tokens - self._prompt_len)
        self._new = [_cut(owned, num_new) for owned in self._new]
        del self._before[len(self._new[self._rank]) :]
        if num_tokens < self._prompt_len:
            self._prompt = [_cut(owned, num_tokens) for owned in self._prompt]
            self._prompt_len = num_tokens
        self._num_new = num_new
        return [_count(a) + _count(b) for a, b in zip(self._prompt, self._new, strict=True)]

    def before(self, place: int) -> list[int]:
        """How many keys of this rank come before new token number ``place``, which may be negative,
        in each batch row: ``[B]``, or ``[1]`` where all rows have as many."""
        new = self._new[self._rank]
        at = bisect_left(new, (place,))  # pieces that begin before it
        count = 0 if at == 0 else self._before[at - 1] + min(place, new[at - 1][1]) - new[at - 1][0]
        lengths = [self._prompt_len] if self._prompt_lengths is None else self._prompt_lengths
        prompt = self._prompt[self._rank]
        return [count + _count(_cut(prompt, length + min(place, 0))) for length in lengths]

    @property
    def partition(self) -> Partition | None:
        """Which rank has which tokens of the sequence; None where rows have unequal lengths."""
        if self._prompt_lengths is not None:
            return None
        if self._partition is None:
            first = self._prompt_len
            self._partition = Partition.pieces(
                [
                    [*prompt, *((first + start, first + stop) for start, stop in new)]
                    for prompt, new in zip(self._prompt, self._new, strict=True)
                ]
            )
        return self._partition


def _count(pieces: _Pieces) -> int:
    return sum(stop - start for start, stop in pieces)


def _cut(pieces: _Pieces, end: int) -> _Pieces:
    """What lies before ``end``."""
    return [(start, min(stop, end)) for start, stop in pieces if start < end]
