# SPDX-License-Identifier: Apache-2.0
"""How C++ is called: what it says of arguments becomes a ValueError, and what one rank says of its
own is told to the others."""

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode

from ringattn import _C
from ringattn._group import Ring

_PREFIX = "ringattn: "
_Value = TypeVar("_Value")

_lock = threading.Lock()
_shortened: dict[Any, tuple[timedelta, int]] = {}  # gloo: its own timeout, how many shorten it


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


@contextmanager
def _giving_up_sooner(group: dist.ProcessGroup | None) -> Iterator[timedelta | None]:
    """Gloo's collectives on CPU end after four fifths of the group's timeout, so that by its end it
    is known who is gone. Its messages have the timeout that the group was made with: whoever waits
    for one is to wait no longer than what is yielded. NCCL has a watchdog of its own, and None."""
    backend: Any = None
    with suppress(RuntimeError):  # there is none for CPU
        backend = group._get_backend(torch.device("cpu")) if group is not None else None
    if type(backend).__name__ != "ProcessGroupGloo":
        yield None
        return
    with _lock:
        timeout, users = _shortened.get(backend, (backend.options._timeout, 0))
        _shortened[backend] = (timeout, users + 1)
        backend._set_default_timeout(timeout * 4 / 5)
    try:
        yield timeout * 4 / 5
    finally:
        with _lock:
            timeout, users = _shortened.pop(backend)
            if users > 1:
                _shortened[backend] = (timeout, users - 1)
            else:
                backend._set_default_timeout(timeout)


def check_real(operation: str) -> None:
    """ValueError under FakeTensorMode, where nothing can be had from other ranks: to be asked
    before ranks meet in a :func:`collective`."""
    if detect_fake_mode() is not None:
        raise ValueError(f"{operation} must have real tensors, got a call under FakeTensorMode")


@contextmanager
def collective(ring: Ring, operation: str) -> Iterator[timedelta | None]:
    """Around collectives of torch.distributed's own: where one fails a peer is gone, which the
    error says of ``operation``, with the peer's rank where it is known, and so does every later
    call of this group. Yields how long to wait for single messages; None: as long as they do."""
    if ring.world_size == 1:
        yield None
        return
    call(_C.check_group, ring.name)
    try:
        with _giving_up_sooner(ring.process_group) as patience:
            yield patience
    except RuntimeError as error:
        call(_C.end_group, ring.name, operation, str(error).split("\n")[0])


def gather_objects(ring: Ring, operation: str, own: _Value) -> list[_Value]:
    """What every rank gives, in rank order. Collective."""
    if ring.world_size == 1:
        return [own]
    check_real(operation)
    of_ranks: list[Any] = [None] * ring.world_size
    with collective(ring, operation):
        dist.all_gather_object(of_ranks, own, group=ring.process_group)
    return of_ranks


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
        with collective(ring, operation):
            dist.barrier(ring.process_group)
