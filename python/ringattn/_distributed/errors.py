# SPDX-License-Identifier: Apache-2.0
"""How errors of C++ reach the caller, and how the error of one rank reaches all ranks."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.utils.checkpoint import _StopRecomputationError

from ringattn import _C
from ringattn._distributed.groups import GroupInfo

_PREFIX = "ringattn: "
_KNOWN = "known_to_all_ranks"  # an attribute of exceptions


def call(operator: Callable[..., Any], *args: Any, names: Mapping[str, str] | None = None) -> Any:
    """Calls an operator or a function of ``_C``. An error about the caller's arguments becomes a
    ValueError; ``names`` maps the operator's argument names to the caller's. Other failures (a peer
    died, a timeout) pass through unchanged. All of them are :func:`known_to_all`."""
    if torch.compiler.is_compiling():
        return operator(*args)
    try:
        return operator(*args)
    except RuntimeError as error:
        vars(error)[_KNOWN] = True  # the operator has told the peers
        message = str(error)
        if isinstance(error, dist.DistBackendError) or not message.startswith(_PREFIX):
            raise
        # With TORCH_SHOW_CPP_STACKTRACES=1 the C++ stack follows the sentence.
        sentence = message.removeprefix(_PREFIX).split("\nException raised from")[0]
        if names is not None:
            sentence = re.sub(r"\w+", lambda word: names.get(word[0], word[0]), sentence)
        refusal = ValueError(sentence)
        vars(refusal)[_KNOWN] = True
        try:
            raise refusal from None
        finally:
            del refusal  # else it keeps this frame, and the caller's tensors and group, alive


@contextmanager
def known_to_all() -> Iterator[None]:
    """Around an exchange: every rank gets an error of its own for the errors that come out of it,
    so :func:`report_to_peers` does not report them."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        vars(error)[_KNOWN] = True
        raise


def report_to_peers(ring: GroupInfo, error: Exception) -> None:
    """Reports, once for each error, that this rank refuses its call, so that all ranks fail at once
    and name this rank instead of waiting for it. Nothing is reported while compiling or with fake
    tensors: the call that is traced is not the one that the peers run."""
    if ring.world_size == 1 or torch.compiler.is_compiling() or detect_fake_mode() is not None:
        return
    if _KNOWN not in vars(error):
        vars(error)[_KNOWN] = True
        with suppress(RuntimeError):  # the store is gone: this rank still raises its own error
            _C.refuse_call(ring.name, str(error))


class ErrorsToPeers:
    """Around what a rank does alone while its peers wait for it: an Exception is reported, but for
    that by which a checkpoint ends what it computes again once it has all tensors."""

    __slots__ = ("_ring",)

    def __init__(self, ring: GroupInfo) -> None:
        self._ring = ring

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, _StopRecomputationError):
            report_to_peers(self._ring, error)


def refuse(ring: GroupInfo, sentence: str) -> NoReturn:
    """ValueError on all ranks: this one refuses its call."""
    with ErrorsToPeers(ring):
        raise ValueError(sentence)


def check_real(operation: str) -> None:
    """ValueError under FakeTensorMode, where other ranks send nothing, but not while compiling.
    Call it before ranks exchange anything."""
    if not torch.compiler.is_compiling() and detect_fake_mode() is not None:
        raise ValueError(f"{operation} must have real tensors, got a call under FakeTensorMode")
