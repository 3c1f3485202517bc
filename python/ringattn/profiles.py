# SPDX-License-Identifier: Apache-2.0
"""Profiles of ranks: speeds and limits as plain numbers, and JSON files of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import cast

from ringattn._checks import (
    check_int64,
    check_integer,
    check_not_negative,
    check_positive,
    read_json,
)

MAX_TILE = 2**16  # tokens, far beyond any kernel's
# Of speeds and bandwidths, and of operations and times: within them, the time of any sequence is a
# finite number.
_SLOWEST, _MOST = 1e-30, 1e30


@dataclass(frozen=True)
class AttentionTile:
    """Rows and keys that an attention kernel computes together, whether they exist or not, and how
    long that takes.

    Args:
        rows: query rows of a tile.
        keys: keys and values of a tile.
        rows_per_warpgroup: rows that are computed side by side, a divisor of ``rows``. A tile of
            whose n warpgroups only m have rows takes ``(m + 2) / (n + 2)`` of the time. None:
            ``rows``.
        relative_cost: time of a full tile, relative to the kernel's other tiles.
        overhead_keys: keys that rows could attend in the time of a tile's prologue and epilogue.

    Raises:
        ValueError: numbers that are not integers or not in 1..65536 (``overhead_keys``: 0..65536),
            ``rows_per_warpgroup`` of which ``rows`` are no multiple.
    """

    rows: int
    keys: int
    _: KW_ONLY
    rows_per_warpgroup: int | None = None
    relative_cost: int = 1
    overhead_keys: int = 0

    def __post_init__(self) -> None:
        if self.rows_per_warpgroup is None:
            object.__setattr__(self, "rows_per_warpgroup", self.rows)
        for name in ("rows", "keys", "rows_per_warpgroup", "relative_cost", "overhead_keys"):
            value = check_integer(name, getattr(self, name))
            least = 0 if name == "overhead_keys" else 1
            if not least <= value <= MAX_TILE:
                raise ValueError(f"{name} must lie in {least}..{MAX_TILE}, got {value}")
            object.__setattr__(self, name, value)
        if self.rows % cast(int, self.rows_per_warpgroup) != 0:
            raise ValueError(
                f"rows must be a multiple of rows_per_warpgroup, got {self.rows} and "
                f"{self.rows_per_warpgroup}"
            )


@dataclass(frozen=True)
class RankProfile:
    """Speeds and limits of one rank.

    Args:
        attention_tflops: speed of its attention, 1e12 operations a second.
        linear_tflops: speed of its matrix products, 1e12 operations a second.
        max_tokens: how many tokens it can hold; None is any number.
        overhead_ms: what a layer takes beside the work, once, where the rank has tokens at all.
        memory_gbps: bandwidth of its memory, 1e9 bytes a second; None where it is not known.
        link_gbps: bandwidth of its links to other ranks, 1e9 bytes a second; None: bytes take no
            time.
        link_latency_us: of one message, in microseconds; None is 0.
        tiles: in which its attention computes, all of one kind in a call: that which is done first.
            What rows and keys do not fill takes time too; ``attention_tflops`` is what it does in
            whole ones of the first kind, the fastest. Empty: it computes what is there.

    Raises:
        ValueError: speeds and bandwidths that are not finite or below 1e-30, ``max_tokens`` that
            are negative or do not fit into 64 bits, an overhead or a latency that is negative or
            above 1e30, ``tiles`` that are none, or of which the first kind is not the fastest.
    """

    attention_tflops: float
    linear_tflops: float
    _: KW_ONLY
    max_tokens: int | None = None
    overhead_ms: float = 0.0
    memory_gbps: float | None = None
    link_gbps: float | None = None
    link_latency_us: float | None = None
    tiles: tuple[AttentionTile, ...] = ()

    def __post_init__(self) -> None:
        for name in ("attention_tflops", "linear_tflops", "memory_gbps", "link_gbps"):
            value = getattr(self, name)
            if value is None and name.endswith("_gbps"):
                continue
            value = check_positive(name, value)
            if value < _SLOWEST:
                raise ValueError(f"{name} must be {_SLOWEST} at least, got {value}")
            object.__setattr__(self, name, value)
        for name in ("overhead_ms", "link_latency_us"):
            value = getattr(self, name)
            if value is None and name == "link_latency_us":
                continue
            object.__setattr__(self, name, check_amount(name, value))
        if self.max_tokens is not None:
            max_tokens = check_int64("max_tokens", self.max_tokens, least=0)
            object.__setattr__(self, "max_tokens", max_tokens)
        if not isinstance(self.tiles, (list, tuple)) or not all(
            isinstance(tile, AttentionTile) for tile in self.tiles
        ):
            raise ValueError(f"tiles must be a sequence of AttentionTile, got {self.tiles!r}")
        object.__setattr__(self, "tiles", tuple(self.tiles))
        times = [tile.relative_cost / (tile.rows * tile.keys) for tile in self.tiles]
        if times and min(times) < times[0]:
            raise ValueError(f"tiles must have the fastest kind first, got {self.tiles!r}")


def check_amount(name: str, value: object) -> float:
    """Of operations or time."""
    amount = check_not_negative(name, value)
    if amount > _MOST:
        raise ValueError(f"{name} must be {_MOST} at most, got {amount}")
    return amount


def check_profiles(profiles: Sequence[RankProfile]) -> None:
    if not isinstance(profiles, Sequence):
        raise ValueError(f"profiles must be a list of RankProfiles, got {type(profiles).__name__}")
    for rank, profile in enumerate(profiles):
        if not isinstance(profile, RankProfile):
            raise ValueError(
                f"profiles must be RankProfiles, got {type(profile).__name__} for rank {rank}"
            )


def save_profiles(path: str | Path, profiles: Sequence[RankProfile]) -> None:
    """Writes profiles as JSON: an object whose ``profiles`` are one object per rank, in rank order,
    with the fields of :class:`RankProfile`.

    Args:
        path: of the file; what it held is replaced.
        profiles: one per rank, ``[W]``.

    Returns:
        Nothing.

    Raises:
        OSError: the file cannot be written.
        ValueError: no profiles, or others than :class:`RankProfile`.
    """
    profiles = list(profiles) if isinstance(profiles, Iterable) else profiles
    check_profiles(profiles)
    if not profiles:
        raise ValueError("profiles must be one per rank, got none")
    content = {"profiles": [asdict(profile) for profile in profiles]}
    Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_profiles(path: str | Path) -> list[RankProfile]:
    """The profiles in a JSON file, as :func:`save_profiles` and ``python -m ringattn profile``
    write them; what else the file holds is ignored.

    Args:
        path: of the file.

    Returns:
        One profile per rank, in rank order.

    Raises:
        OSError: the file cannot be read.
        ValueError: it holds no profiles, or a profile with missing, unknown or wrong fields.
    """
    content = read_json(path)
    entries = content.get("profiles") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        got = type(content).__name__ if not isinstance(content, dict) else repr(entries)[:80]
        raise ValueError(
            f'{path} must hold an object with a list of objects named "profiles", got {got}'
        )
    if not entries:
        raise ValueError(f"{path} must hold at least one profile, got none")
    names = [field.name for field in fields(RankProfile)]
    profiles = []
    for rank, entry in enumerate(entries):
        unknown = [name for name in entry if name not in names]
        missing = [name for name in names[:2] if name not in entry]
        if unknown or missing:
            wrong = f"unknown {unknown[0]!r}" if unknown else f"no {missing[0]!r}"
            raise ValueError(
                f"profile of rank {rank} in {path} must have the fields of RankProfile, got {wrong}"
            )
        try:
            profiles.append(RankProfile(**entry | {"tiles": _tiles(entry.get("tiles", []))}))
        except ValueError as error:
            raise ValueError(f"profile of rank {rank} in {path}: {error}") from None
    return profiles


def _tiles(entries: object) -> tuple[AttentionTile, ...]:
    """The tiles of a profile in a file."""
    names = {field.name for field in fields(AttentionTile)}
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and {"rows", "keys"} <= set(entry) <= names for entry in entries
    ):
        raise ValueError(f"tiles must be objects with fields of AttentionTile, got {entries!r}")
    return tuple(AttentionTile(**entry) for entry in entries)
