# SPDX-License-Identifier: Apache-2.0
"""How C++ is called: what it says of arguments becomes a ValueError, and what one rank says of its
own is told to the others."""

import pickle
import re
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from ringattn import _C
from ringattn._distributed.groups import Ring

_PREFIX = "ringattn: "
_Value = TypeVar("_Value")

_POLL_S = 0.1  # between looks for Ctrl-C, and for news of peers, while this rank waits


def call(operator: Callable[..., Any], *args: Any, names: Mapping[str, str] | None = None) -> Any:
    """Calls an operator or a function of ``_C``; what it says about a caller's arguments becomes a
    ValueError, with ``names`` for those that the caller knows by another one. Failures of the other
    kind (a peer died, a timeout) pass through unchanged."""
    if torch.compiler.is_compiling():
        return operator(*args)
    try:
        return operator(*args)
    except dist.DistBackendError:
        raise
    except RuntimeError as error:
        message = str(error)
        if not message.startswith(_PREFIX):
            raise
        # With TORCH_SHOW_CPP_STACKTRACES=1 the C++ stack follows the sentence.
        sentence = message.removeprefix(_PREFIX).split("\nException raised from")[0]
        if names is not None:
            sentence = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), sentence)
        raise ValueError(sentence) from None


def tell_peers(ring: Ring, error: Exception) -> None:
    """So that all ranks fail at once and name this one, instead of waiting for it. While compiling,
    or with fake tensors, nobody is told: the others may run the call, with nothing to tell them
    from."""
    if ring.world_size > 1 and not torch.compiler.is_compiling() and detect_fake_mode() is None:
        with suppress(RuntimeError):  # no store any more: this rank's mistake is still its own
            _C.refuse_call(ring.name, str(error))


def check_real(operation: str) -> None:
    """ValueError under FakeTensorMode, where nothing can be had from other ranks: to be asked
    before ranks meet."""
    if detect_fake_mode() is not None:
        raise ValueError(f"{operation} must have real tensors, got a call under FakeTensorMode")


def complete(
    ring: Ring,
    operation: str,
    device: torch.device,
    begin: Callable[[], Iterable[dist.Work | None]],
) -> None:
    """Begins collectives or messages of torch.distributed's own with tensors on ``device`` and
    waits for them.

    Where one fails a peer is gone, which the error says of ``operation``, and so does every later
    call of this group. On CPU the wait ends with Ctrl-C too, where a peer ends the group, and after
    four fifths of the group's timeout; ``Work.wait()`` can do none of that, so it blocks a thread
    of its own. On CUDA it does not block the host, and NCCL has a watchdog of its own.
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


def _wait_in_thread(ring: Ring, operation: str, works: Iterable[dist.Work]) -> None:
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
    """Runs a function; a daemon, so that one which never returns keeps no process alive."""

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


def gather_objects(ring: Ring, operation: str, own: _Value) -> list[_Value]:
    """What every rank gives, in rank order. Collective, through the group's store."""
    if ring.world_size == 1:
        return [own]
    check_real(operation)
    call(_C.check_group, ring.name)
    return [
        pickle.loads(given) for given in call(_C.exchange, ring.name, pickle.dumps(own), operation)
    ]


def agree(
    ring: Ring, operation: str, mistake: str | None, facts: Mapping[str, Any], own: Any = None
) -> list[Any]:
    """What every rank gives as ``own``, in rank order, where all may go on. Collective.

    Raises:
        ValueError: on every rank, where any has made a mistake, and where facts (by the names that
            errors call them) are not the same on all.
    """
    of_ranks = gather_objects(ring, operation, (mistake, facts, own))
    for rank, (problem, _, _) in enumerate(of_ranks):
        if problem is not None:
            raise ValueError(problem if rank == ring.rank else f"rank {rank}: {problem}")
    for name, first in of_ranks[0][1].items():
        for rank, (_, theirs, _) in enumerate(of_ranks):
            if theirs[name] != first:
                raise ValueError(
                    f"{name} must be the same on all ranks, "
                    f"got {first} on rank 0 and {theirs[name]} on rank {rank}"
                )
    return [given for _, _, given in of_ranks]


def meet(ring: Ring, operation: str) -> None:
    """Returns once all ranks have come here."""
    if ring.world_size > 1:
        call(_C.check_group, ring.name)
        call(_C.exchange, ring.name, b"", operation)
