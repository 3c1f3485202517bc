# SPDX-License-Identifier: Apache-2.0
"""Exchanges between the ranks of a group. Each ends with an error where a peer is gone."""

import pickle
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringattn import _C
from ringattn._distributed.errors import call, check_real
from ringattn._distributed.groups import GroupInfo

_Value = TypeVar("_Value")

_POLL_S = 0.1  # period at which a waiting rank checks for Ctrl-C and for failures of peers


def complete(
    ring: GroupInfo,
    operation: str,
    device: torch.device,
    begin: Callable[[], Iterable[dist.Work | None]],
) -> None:
    """Begins collectives or messages of torch.distributed with tensors on ``device`` and waits for
    them.

    A failure means that a peer is gone: the error names ``operation``, and every later call of this
    group fails too. On CPU the wait also ends with Ctrl-C, where a peer ends the group, and after
    four fifths of the group's timeout. ``Work.wait()`` does none of that, so it blocks a thread of
    its own. On CUDA it does not block the host, and NCCL has a watchdog.
    """
    call(_C.check_group, ring.name)
    try:
        works = [work for work in begin() if work is not None]
        if device.type == "cpu":
            _wait_in_thread(ring, operation, works)
        else:
            for work in works:
                work.wait()
        return
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
    call(_C.end_group, ring.name, operation, reason)


def _wait_in_thread(ring: GroupInfo, operation: str, works: Iterable[dist.Work]) -> None:
    wait = _C.GroupWait(ring.name, operation)
    finished = _InThread(lambda: [work.wait() for work in works])
    try:
        while not finished.wait(_POLL_S):
            wait.poll()
            if wait.expired():
                raise RuntimeError("no data came")
    except KeyboardInterrupt:
        wait.interrupt()
        raise
    if finished.error is not None:
        raise finished.error


class _InThread(threading.Thread):
    """Runs a function in a daemon thread: a function that never returns keeps no process alive."""

    def __init__(self, body: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._body = body
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._body()
        except Exception as error:
            self.error = error
        self._done.set()

    def wait(self, seconds: float) -> bool:
        return self._done.wait(seconds)


def all_gather(
    ring: GroupInfo, operation: str, mine: torch.Tensor, facts: str = ""
) -> torch.Tensor:
    """The tensors of all ranks, which have one shape: ``[W, ...]``. Collective.

    Args:
        ring: the ranks.
        operation: its name in errors.
        mine: this rank's.
        facts: lines "name=value" that the ranks must agree on.

    Raises:
        ValueError: on every rank: ranks in different operations, facts or shapes that differ, a
            rank that refuses its call.
    """
    if ring.world_size == 1:
        return mine.unsqueeze(0)
    check_real(operation)
    return call(torch.ops.ringattn.all_gather, mine, operation, facts, ring.name)


def gather_objects(ring: GroupInfo, operation: str, own: _Value) -> list[_Value]:
    """The objects of all ranks, in rank order. Collective, through the group's store."""
    if ring.world_size == 1:
        return [own]
    check_real(operation)
    call(_C.check_group, ring.name)
    return [
        pickle.loads(given) for given in call(_C.exchange, ring.name, pickle.dumps(own), operation)
    ]


@dataclass(frozen=True)
class Content:
    """A fact too large for a sentence, compared by its checksum."""

    number: int

    def __str__(self) -> str:
        return "one"


def agree(
    ring: GroupInfo, operation: str, mistake: str | None, facts: Mapping[str, Any], own: Any = None
) -> list[Any]:
    """The ``own`` objects of all ranks, in rank order, once all ranks agree. Collective.

    Args:
        ring: the ranks.
        operation: its name in errors.
        mistake: why this rank refuses the call; None: it does not.
        facts: values that must be the same on all ranks, by their names in errors.
        own: this rank's object.

    Raises:
        ValueError: on every rank, where any rank has a mistake or facts differ.
    """
    gathered = gather_objects(ring, operation, (mistake, facts, own))
    for rank, (problem, _, _) in enumerate(gathered):
        if problem is not None:
            raise ValueError(problem if rank == ring.rank else f"rank {rank}: {problem}")
    for name, first in gathered[0][1].items():
        for rank, (_, theirs, _) in enumerate(gathered):
            if theirs[name] == first:
                continue
            got = f"{first} on rank 0 and {theirs[name]} on rank {rank}"
            if isinstance(first, Content) and isinstance(theirs[name], Content):
                got = f"different ones on ranks 0 and {rank}"
            raise ValueError(f"{name} must be the same on all ranks, got {got}")
    return [given for _, _, given in gathered]


def barrier(ring: GroupInfo, operation: str) -> None:
    """Returns once all ranks have called it."""
    if ring.world_size > 1:
        call(_C.check_group, ring.name)
        call(_C.exchange, ring.name, b"", operation)
