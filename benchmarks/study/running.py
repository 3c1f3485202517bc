# SPDX-License-Identifier: Apache-2.0
"""Cells of several studies, measured: ranks are started once for each set of percentages."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringattn.testing import MPS
from tqdm import tqdm

from study import ranks
from study.settings import Cell, Job, Settings, Store, set_name


@dataclass(frozen=True)
class Part:
    """One study of the command."""

    arguments: argparse.Namespace
    settings: Settings
    cells: Sequence[Cell]
    store: Store
    command: str  # of this study alone

    def done(self) -> list[Cell]:
        return [cell for cell in self.cells if self.store.has(self.settings, cell)]


def run(parts: Sequence[Part]) -> list[str]:
    """Measures the cells that the stores do not have yet, with one start of the ranks for each set.

    Returns:
        Errors. The rest of a part in which ranks fail is left out.
    """
    jobs: dict[tuple[Settings, tuple[int, ...]], dict[Cell, Part]] = {}
    for part in parts:
        for cell in part.cells:
            if not part.store.has(part.settings, cell):
                jobs.setdefault((part.settings, cell.percentages), {}).setdefault(cell, part)
    total = sum(len(dict.fromkeys(part.cells)) for part in parts)
    left = sum(len(cells) for cells in jobs.values())
    problems: dict[int, str] = {}  # by the number of the part
    with contextlib.ExitStack() as stack:
        under_mps = any(settings.under_mps for settings, _ in jobs)
        mps = stack.enter_context(MPS()) if under_mps else None
        bar = stack.enter_context(tqdm(total=total, initial=total - left, unit="cell"))
        starts = stack.enter_context(contextlib.closing(started(jobs, mps)))
        for job, processes in starts:
            cells = jobs[job.settings, job.percentages]
            numbers = {parts.index(part) for part in cells.values()}
            if numbers <= problems.keys():
                continue
            bar.set_postfix_str(f"{set_name(job.percentages)} %")
            limit_s = max(part.arguments.limit_seconds for part in cells.values())
            try:
                for cell, header, rows in finished(job, processes, limit_s):
                    part = cells[cell]
                    part.store.add(job.settings, cell, header | {"command": part.command}, rows)
                    bar.set_postfix_str(cell.label)
                    bar.update()
            except ranks.RanksFailed as error:
                problems |= {number: str(error) for number in numbers}
    return list(dict.fromkeys(problems.values()))


def started(
    jobs: Mapping[tuple[Settings, tuple[int, ...]], Iterable[Cell]], mps: MPS | None
) -> Iterator[tuple[Job, ranks.Ranks]]:
    """The ranks of each job. Beside GPUs, the next ones load what they need while the present ones
    compute; CPUs are what is timed."""
    todo = [
        Job(settings, percentages, tuple(jobs[settings, percentages]))
        for settings, percentages in jobs
    ]

    def start(job: Job) -> ranks.Ranks:
        return ranks.Ranks(job, mps if job.settings.under_mps else None)

    ahead: ranks.Ranks | None = None
    try:
        for place, job in enumerate(todo):
            with ahead or start(job) as processes:
                ahead = None
                if job.settings.device == "cuda" and place + 1 < len(todo):
                    ahead = start(todo[place + 1])
                yield job, processes
    finally:
        if ahead is not None:
            ahead.end()


def finished(
    job: Job, processes: ranks.Ranks, limit_s: float
) -> Iterator[tuple[Cell, dict[str, str], list[dict[str, Any]]]]:
    """Cells as they are finished, with the header that describes the ranks' machine."""
    header: dict[str, str] = {}
    for report in processes.reports(limit_s):
        if "header" in report:
            header = report["header"]
        else:
            yield job.cells[report["cell"]], header, report["rows"]
