# SPDX-License-Identifier: Apache-2.0
"""The arguments that say which keys a query sees, as the operators take them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from ringattn import _C
from ringattn._checks import (
    as_integer,
    check_flag,
    check_int64,
    check_integers,
    check_tensors,
    finite_softcap,
)

# Boundaries of packed documents in the whole sequence: [0, ..., S].
CuSeqlens = Sequence[int] | torch.Tensor

_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


class Mask(NamedTuple):
    """Which keys a query sees, and how its scores are made of products: the keywords of
    :func:`ringattn.ring_attention`."""

    causal: bool = True
    window_size: Any = (-1, -1)
    softcap: Any = 0.0
    cu_seqlens: CuSeqlens | None = None

    def arguments(self) -> tuple[bool, int, int, float, torch.Tensor | None]:
        """Of the operator: causal, window_left, window_right, softcap, cu_seqlens; ValueError where
        one breaks a rule. Which boundaries are right the operator checks."""
        causal = check_flag("causal", self.causal)
        left, right = check_window(self.window_size)
        return causal, left, right, finite_softcap(self.softcap), documents(self.cu_seqlens)


CAUSAL = Mask()


@functools.lru_cache
def sliding(window: int | None) -> Mask:
    """Causal attention on ``window`` keys, the query's own among them, as models count; None and 0
    are no window. Layers with one window share the mask, by whose identity a
    repeated ring call is known."""
    return Mask(window_size=(window - 1, -1)) if window else CAUSAL


def check_window(window_size: Any) -> tuple[int, int]:
    """(left, right), -1 where it is unlimited."""
    if window_size is None:
        return -1, -1
    sides = None
    if isinstance(window_size, (tuple, list)) and len(window_size) == 2:
        sides = [-1 if side is None else as_integer(side) for side in window_size]
    if sides is None or any(side is None or side < -1 for side in sides):
        got = type(window_size).__name__ if torch.is_tensor(window_size) else repr(window_size)
        raise ValueError(
            "window_size must be (left, right), the keys before and after a query that it sees, "
            f"-1 for all of them, got {got}"
        )
    left, right = (-1 if side > _LONGEST else side for side in sides)  # type: ignore[operator]
    return left, right  # type: ignore[return-value]


_LONGEST = 2**63 - 1  # operators take 64 bits, and no sequence has as many tokens


def made_to_last(make: Callable[[_Given], _Made], given: _Given) -> _Made:
    """``make(given)``, of tensors that outlive the call: those of inference mode could not be saved
    for the backward of a later call."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return make(given)
    return make(given)


def documents(cu_seqlens: CuSeqlens | None) -> torch.Tensor | None:
    """int64 on the CPU, one dimension. A CUDA tensor is read once for each of its versions. One of
    the CPU is copied in every call: NumPy or another process may write to its memory, also between
    a forward and its backward."""
    return made_to_last(_documents, cu_seqlens)


def _documents(cu_seqlens: CuSeqlens | None) -> torch.Tensor | None:
    if cu_seqlens is None:
        return None
    if not isinstance(cu_seqlens, torch.Tensor):
        if not isinstance(cu_seqlens, (list, tuple)):
            raise ValueError(
                "cu_seqlens must be a list or a tensor of boundaries [0, ..., S], "
                f"got {type(cu_seqlens).__name__}"
            )
        ends = check_integers("cu_seqlens", cu_seqlens, least=0)
        if ends and not torch.compiler.is_compiling():
            check_int64("cu_seqlens", max(ends))
        return torch.tensor(ends, dtype=torch.int64, device="cpu")
    check_tensors(cu_seqlens=cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.dim() != 1:
        raise ValueError(
            "cu_seqlens must be int32 or int64 of one dimension, "
            f"got {cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
        )
    if torch.compiler.is_compiling():
        return cu_seqlens.to("cpu", torch.int64).contiguous()
    if cu_seqlens.is_cpu:
        return cu_seqlens.to(torch.int64, copy=True, memory_format=torch.contiguous_format)
    return _read_once(cu_seqlens)


_read: dict[int, tuple[weakref.ref[torch.Tensor], int, torch.Tensor]] = {}


def _read_once(on_device: torch.Tensor) -> torch.Tensor:
    versioned = not on_device.is_inference()
    known = _read.get(id(on_device)) if versioned else None
    if known is not None and known[0]() is on_device and known[1] == on_device._version:
        return known[2]
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            "cu_seqlens must be on the CPU, or have been given to a call before, where a call is "
            "captured in a CUDA graph, got a CUDA tensor that the host has not read"
        )
    values = on_device.to("cpu", torch.int64)
    if versioned:
        key = id(on_device)
        forget = weakref.ref(on_device, lambda _: _read.pop(key, None))
        _read[key] = (forget, on_device._version, values)
    return values


def checked_documents(cu_seqlens: CuSeqlens, seq_len: int) -> torch.Tensor:
    """:func:`documents` that are the boundaries of a sequence of ``seq_len`` tokens, or a
    ValueError in the operator's words. While compiling they are not looked at."""
    boundaries = documents(cu_seqlens)
    assert boundaries is not None
    if not torch.compiler.is_compiling():
        _C.check_documents(boundaries.tolist(), seq_len)
    return boundaries
