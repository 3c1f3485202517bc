# SPDX-License-Identifier: Apache-2.0
"""Small adapters to other implementations, one file per peer.

Each has `available(problem) -> str | None`, the reason why it cannot run here or None, and
`prepare(problem) -> list[Contestant]`. Whether a peer groups queries or gets expanded K
and V is in the note of its contestants. Where the problem's tensors require gradients, calls record
them for the `inputs` of their contestants.
"""

from types import ModuleType

from lib.passes import trouble
from lib.problem import Problem
from lib.report import Report
from lib.timing import Contestant


def contenders(name: str, peer: ModuleType, problem: Problem, report: Report) -> list[Contestant]:
    """The contestants of a peer that work; why others do not is a remark. Collective."""
    reason = peer.available(problem)
    prepared: list[Contestant] = []
    if reason is None:
        try:
            prepared = peer.prepare(problem)
        except Exception as error:  # another project's: its failure is a remark, not ours
            reason = f"{type(error).__name__}: {error}"
    if reason is not None:
        report.remark(f"{name} left out: {reason}")
    return working(prepared, report)


def working(prepared: list[Contestant], report: Report) -> list[Contestant]:
    """Those of other projects' contestants that raise nothing; the others are remarks. Collective:
    every rank has the same ones."""
    found = []
    for contestant in prepared:
        reason = trouble(contestant)
        if reason is None:
            found.append(contestant)
        else:
            report.remark(f"{contestant.name} left out: {reason}")
    return found
