# SPDX-License-Identifier: Apache-2.0
"""Pieces of a sequence, (start, stop), that ranks own: checked, and as the operators take them."""

from __future__ import annotations

from collections.abc import Sequence

from ringattn._checks import check_integers

# Of each rank, ascending: [W].
Pieces = tuple[tuple[tuple[int, int], ...], ...]


def flat_pieces(assigned: Pieces) -> list[int]:
    """Rank, start and stop of each piece."""
    return [
        number
        for rank, owned in enumerate(assigned)
        for piece in owned
        for number in (rank, *piece)
    ]


def normal_pieces(pieces: object) -> Pieces:
    """Sorted, joined and without empty ones; ValueError where they break a rule of
    :meth:`ringattn.Partition.pieces`."""
    shape = "[[(start, stop), ...] of rank 0, [...] of rank 1, ...]"
    if not isinstance(pieces, (list, tuple)) or not pieces:
        raise ValueError(f"pieces must be {shape}, at least one rank, got {pieces!r}")
    assigned = []
    for rank, owned in enumerate(pieces):
        if not isinstance(owned, (list, tuple)):
            raise ValueError(f"pieces must be {shape}, got {owned!r} for rank {rank}")
        joined: list[tuple[int, int]] = []
        for piece in sorted(_check_piece(piece, rank) for piece in owned):
            if piece[0] == piece[1]:
                continue
            if joined and joined[-1][1] == piece[0]:
                piece = (joined.pop()[0], piece[1])
            joined.append(piece)
        assigned.append(tuple(joined))
    covered = 0
    for start, stop in sorted(piece for owned in assigned for piece in owned):
        if start != covered:
            times = "twice" if start < covered else "nowhere"
            raise ValueError(
                f"pieces must cover each position once, got {min(start, covered)} {times}"
            )
        covered = stop
    if covered >= 2**63:  # positions are 64 bits wide
        raise ValueError(f"pieces must end below 2**63, got {covered}")
    return tuple(assigned)


def _check_piece(piece: object, rank: int) -> tuple[int, int]:
    name = f"a piece of rank {rank}"
    try:
        start, stop = check_integers(name, piece, least=0)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be (start, stop), got {piece!r}") from None
    if start > stop:
        raise ValueError(f"{name} must be (start, stop) with start <= stop, got {piece!r}")
    return start, stop


def num_tokens(pieces: Sequence[tuple[int, int]]) -> int:
    """Of one rank."""
    return sum(stop - start for start, stop in pieces)
