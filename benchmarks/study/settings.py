# SPDX-License-Identifier: Apache-2.0
"""What the study measures, in what units it is done, and where finished units are kept."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SWEEP = "sweep"


@dataclass(frozen=True)
class Cell:
    """What is measured together, all of it interleaved: it is run whole or not at all."""

    kind: str  # SWEEP, or the scenario of a trace
    percentages: tuple[int, ...]  # [W], asked of the throttle; 100 is a rank left alone
    what: str  # "attention" or "layer"
    seq_len: int

    @property
    def label(self) -> str:
        return f"{self.kind} {self.what} {set_name(self.percentages)} % S {self.seq_len}"


@dataclass(frozen=True)
class Settings:
    """What all cells of a run share. Cells that were run under other settings do not count."""

    device: str  # "cpu" or "cuda"
    throttle: str  # "mps" or "repeat"
    ranks_per_gpu: int  # each has its part of one, under MPS
    transport: str
    dtype: str
    heads: int
    kv_heads: int
    head_dim: int
    hidden_dim: int  # of the layer's feed-forward part
    strategies: tuple[str, ...]
    rounds: int  # samples of each strategy, fewer where `cell_seconds` are over
    warmup: int
    cell_seconds: float
    settle_seconds: float  # all ranks compute for so long before a speed counts
    watched: int  # requests that the rebalancer sees before its plan is timed, or a trace begins
    requests: int  # of a trace
    lut: str | None  # CSV; None: this run's own matrix products
    regression: str | None  # JSON; None: the published one
    noise: float = 0.0  # relative, added to the timings that the rebalancer observes in a trace

    @property
    def under_mps(self) -> bool:
        return self.throttle == "mps" or self.ranks_per_gpu > 1

    def mps_percentage(self, percentage: float) -> float:
        """Percentage of a GPU for a rank with `percentage` of its part of the GPU."""
        return (percentage if self.throttle == "mps" else 100) / self.ranks_per_gpu


def set_name(percentages: Sequence[int]) -> str:
    """ "100,50": how tables name a set of ranks."""
    return ",".join(map(str, percentages))


@dataclass(frozen=True)
class Job:
    """The cells that one start of the ranks measures, all with the same percentages."""

    settings: Settings
    percentages: tuple[int, ...]
    cells: tuple[Cell, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        content = json.loads(text)
        settings = content["settings"]
        settings["strategies"] = tuple(settings["strategies"])
        cells = tuple(
            Cell(**{**cell, "percentages": tuple(cell["percentages"])}) for cell in content["cells"]
        )
        return cls(Settings(**settings), tuple(content["percentages"]), cells)


def cells_path(stem: str) -> Path:
    return Path(f"{stem}.cells.jsonl")


def check_writable(path: Path) -> None:
    """Checks that the file can be appended to. Creates its folder, and leaves no file behind.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    was_there = path.exists()
    path.open("a").close()
    if not was_there:
        path.unlink()


class Store:
    """Finished cells: one JSON object a line, `{"key", "header", "rows"}`, appended as they come.

    A line that a crash cut short is skipped. Without a path everything stays in memory.

    Raises:
        ValueError: a file of something else.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._done: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            for line in path.read_text(errors="replace").splitlines():
                try:
                    entry = json.loads(line)
                except json.JSONDecodeError:
                    continue
                kinds = {"key": str, "header": dict, "rows": list}
                if not isinstance(entry, dict) or not all(
                    isinstance(entry.get(name), kind) for name, kind in kinds.items()
                ):
                    raise ValueError(f"{path} must hold finished cells, got {line[:40]!r}")
                self._done[entry["key"]] = entry

    @staticmethod
    def _key(settings: Settings, cell: Cell) -> str:
        named = asdict(settings)
        for name in ("lut", "regression"):
            if named[name] is not None:  # another table under the same name is another one
                digest = hashlib.sha256(Path(named[name]).read_bytes()).hexdigest()
                named[f"{name}_digest"] = digest
        return json.dumps([named, asdict(cell)], sort_keys=True)

    def cells(self, settings: Settings) -> list[Cell]:
        """All that were finished under these settings."""
        found = []
        for key in self._done:
            named = json.loads(key)[1]
            cell = Cell(**{**named, "percentages": tuple(named["percentages"])})
            if self._key(settings, cell) == key:
                found.append(cell)
        return found

    def has(self, settings: Settings, cell: Cell) -> bool:
        return self._key(settings, cell) in self._done

    def rows(self, settings: Settings, cell: Cell) -> list[dict[str, Any]]:
        return self._done[self._key(settings, cell)]["rows"]

    def header(self, settings: Settings, cell: Cell) -> dict[str, str]:
        """What the ranks said of their machine when they ran the cell."""
        return self._done[self._key(settings, cell)]["header"]

    def add(
        self, settings: Settings, cell: Cell, header: dict[str, str], rows: list[dict[str, Any]]
    ) -> None:
        entry = {"key": self._key(settings, cell), "header": header, "rows": rows}
        self._done[entry["key"]] = entry
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # In a line of its own, also behind one that a killed run has left half written.
            with self._path.open("a+b") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(0, size - 1))
                begin = b"\n" if file.read(1) not in (b"", b"\n") else b""
                file.write(begin + json.dumps(entry).encode() + b"\n")
