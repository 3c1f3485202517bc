# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of code that uses ringattn: ways to make ranks unequal.

:func:`slowdown` repeats work and needs nothing; :class:`MPS`, :func:`green_context` and
:func:`sm_cap` give a process fewer multiprocessors of a CUDA device. None of them touches a setting
of the device. The speed that a rank reaches differs from the requested one:
:func:`ringattn.measure_profiles` measures it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from ringattn import _C
from ringattn._checks import check_int64, check_integer, check_percentage, is_finite, shown

# ---- repeated work -----------------------------------------------------------------------------

_factors = [1.0]  # of the contexts entered, innermost last
_caps: list[int | None] = [None]  # likewise


@contextmanager
def slowdown(factor: float) -> Iterator[None]:
    """Makes this process a slower rank: it repeats the computation of every attention block of
    :func:`ringattn.ring_attention` and of every linear layer (``torch.nn.functional.linear``)
    inside the context, and of their backwards, so that they take about ``factor`` times as long,
    with the same result. An unequal ring anywhere, on CPU too. Contexts nest; the innermost factor
    holds.

    Attention is slower in the whole process, linear layers in the thread that entered the context.

    Args:
        factor: how many times slower, a number of at least 1; 2.5 repeats everything once, and half
            the rows once more.

    Raises:
        ValueError: a factor below 1 or not finite.
    """
    _check_factor(factor)
    with _Slowdown() as speed:
        speed.set(factor)
        yield


@contextmanager
def slowdown_schedule(factors: Mapping[int, float]) -> Iterator[Callable[[int], float]]:
    """A slowdown that changes while a program runs::

        with slowdown_schedule({50: 2.5, 100: 1.4}) as at_request:
            for request in range(200):
                at_request(request)
                ...

    Args:
        factors: number of a request -> the factor from that request on, see :func:`slowdown`; 1
            before the first.

    Yields:
        A function that is called with the number of a request, puts its factor into force, and
        returns it. The end of the context restores what held before.

    Raises:
        ValueError: a factor below 1 or not finite, requests that are no integers, or no mapping.
    """
    if not isinstance(factors, Mapping):
        raise ValueError(f"factors must be a dict of request: factor, got {shown(factors)}")
    for request, factor in factors.items():
        check_integer("request", request)
        _check_factor(factor)
    changes = sorted(factors)
    with _Slowdown() as speed:

        def at_request(request: int) -> float:
            place = bisect_right(changes, request)
            factor = factors[changes[place - 1]] if place else 1.0
            speed.set(factor)
            return factor

        yield at_request


def _check_factor(factor: float) -> None:
    if not is_finite(factor) or factor < 1:
        raise ValueError(f"factor must be a finite number of at least 1, got {factor!r}")


class _Slowdown(TorchFunctionMode):
    """Holds a factor while it is entered: attention asks the library for it, linear layers pass
    through here."""

    def __enter__(self) -> _Slowdown:
        self._depth = len(_factors)
        _factors.append(1.0)
        super().__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        _factors.pop()
        _C.set_slowdown(_factors[-1])

    def set(self, factor: float) -> None:
        _factors[self._depth] = float(factor)
        _C.set_slowdown(_factors[-1])

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        kwargs = kwargs or {}
        # Only the innermost context repeats: the outer ones see its repetitions pass.
        if func is F.linear and self._depth == len(_factors) - 1:
            self._repeat(*args, **kwargs)
        result: torch.Tensor = func(*args, **kwargs)
        if func is F.linear and self._depth == len(_factors) - 1 and result.requires_grad:
            result.register_hook(lambda grad: self._repeat_backward(grad, *args, **kwargs))
        return result

    def _repeat(
        self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        rows = input.detach().reshape(-1, input.size(-1))
        for count in self._repeated(rows.size(0)):
            with torch.no_grad():
                F.linear(rows[:count], weight, bias)

    def _repeat_backward(
        self,
        grad: torch.Tensor,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        rows = input.detach().reshape(-1, input.size(-1))
        weight = weight if weight.dim() == 2 else weight.unsqueeze(0)
        grads = grad.detach().reshape(rows.size(0), weight.size(0))
        for count in self._repeated(rows.size(0)):
            with torch.no_grad():  # under autocast, inputs have another dtype
                if input.requires_grad:
                    grads[:count] @ weight.to(grad.dtype)
                if weight.requires_grad:
                    grads[:count].t() @ rows[:count].to(grad.dtype)

    def _repeated(self, num_rows: int) -> Iterator[int]:
        """How many leading rows each repetition computes."""
        extra = _factors[-1] - 1.0
        while extra > 0.0:
            yield round(min(extra, 1.0) * num_rows)
            extra -= 1.0


# ---- fewer multiprocessors ---------------------------------------------------------------------

# Starts the daemon, reports it, and stops it on request or when the parent process is gone, so that
# nothing stays behind after a crash or a kill. `quit -t` ends clients that are still there.
_GUARD = """
nvidia-cuda-mps-control -d </dev/null >"$CUDA_MPS_LOG_DIRECTORY/start.log" 2>&1 || exit 1
echo started
read -r order
echo quit -t 5 | timeout 30 nvidia-cuda-mps-control >/dev/null 2>&1
pid=$(cat "$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid" 2>/dev/null) && kill "$pid"
rm -rf "$1"
"""


class MPS:
    """A private CUDA MPS daemon, for processes that get a share of a device each::

        with MPS() as mps:
            slow = subprocess.Popen(command, env={**os.environ, **mps.environment(50)})

    The daemon uses directories of its own, so other daemons are not affected. It is stopped at the
    end of the context, also where this process dies. A process gets its share when it first uses
    CUDA, and keeps it. Not thread safe.

    Raises:
        OSError: there is no nvidia-cuda-mps-control, or it does not start; the message says which.

    https://docs.nvidia.com/deploy/mps/
    """

    def __enter__(self) -> MPS:
        if shutil.which("nvidia-cuda-mps-control") is None:
            raise OSError("MPS must find nvidia-cuda-mps-control on the PATH, got none")
        # Sockets lie in there, and their names must be short.
        self._folder = Path(tempfile.mkdtemp(prefix="ringattn_mps_", dir="/tmp"))
        self._directories = {}
        for name in ("PIPE", "LOG"):
            (self._folder / name.lower()).mkdir()
            self._directories[f"CUDA_MPS_{name}_DIRECTORY"] = str(self._folder / name.lower())
        environment = {**os.environ, **self._directories}
        # Clients choose their devices themselves.
        environment.pop("CUDA_VISIBLE_DEVICES", None)
        self._guard = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,  # an interrupt from the keyboard is not for the guard
        )
        assert self._guard.stdout is not None
        if self._guard.stdout.readline() != "started\n":
            log = (self._folder / "log" / "start.log").read_text().strip()
            self._stop()
            raise OSError(f"nvidia-cuda-mps-control must start, got {log or 'no reason'}")
        return self

    def environment(self, percentage: float) -> dict[str, str]:
        """Variables for the environment of a process that is to use about ``percentage`` of every
        device's multiprocessors.

        Raises:
            ValueError: a percentage outside (0, 100].
        """
        percentage = check_percentage("percentage", percentage)
        return {**self._directories, "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percentage:g}"}

    def __exit__(self, *_: object) -> None:
        self._stop()

    def _stop(self) -> None:
        self._guard.communicate("stop\n")
        shutil.rmtree(self._folder, ignore_errors=True)


def _check_num_sms(num_sms: int, device: int) -> None:
    available = torch.cuda.get_device_properties(device).multi_processor_count
    if not 1 <= check_integer("num_sms", num_sms) <= available:
        raise ValueError(f"num_sms must lie in [1, {available}], got {num_sms}")


@contextmanager
def green_context(num_sms: int, device: torch.device | int | None = None) -> Iterator[None]:
    """Work that this thread queues on ``device`` inside the context uses about ``num_sms`` of its
    multiprocessors: the driver rounds to what it can part.

    For one process alone: a communicator used inside it ends in an illegal memory access, so that
    groups of several ranks are refused.

    Args:
        num_sms: multiprocessors, at least 1 and at most what the device has.
        device: a CUDA device; None means the current one.

    Raises:
        ValueError: a number out of range, a process that is one of several ranks.
        RuntimeError: no CUDA device, or a torch or driver without green contexts.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("green_context must run on a CUDA device, got none")
    from torch.cuda.green_contexts import GreenContext

    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            "green_context must be left to processes without communicators, "
            f"got one of {dist.get_world_size()} ranks"
        )
    index = torch.cuda._utils._get_device_index(device, optional=True)
    _check_num_sms(num_sms, index)
    create: Any = GreenContext.create  # its type differs between releases of torch
    context = create(num_sms=num_sms, device_id=index)
    context.set_context()
    try:
        yield
    finally:
        context.pop_context()


@contextmanager
def sm_cap(num_sms: int) -> Iterator[None]:
    """Inside the context the attention kernels of this process that stay on their multiprocessors
    use at most ``num_sms`` of them, with the same results: float16 and bfloat16 on Hopper. Other
    kernels are as fast as ever, and so are calls captured outside. Contexts nest.

    Args:
        num_sms: multiprocessors, at least 1 and at most what the current device has.

    Raises:
        ValueError: a number out of range.
        RuntimeError: no CUDA device of compute capability 9.0.
    """
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    if capability != (9, 0):
        got = "none" if capability is None else "one of {}.{}".format(*capability)
        raise RuntimeError(f"sm_cap must run on a CUDA device of compute capability 9.0, got {got}")
    _check_num_sms(num_sms, torch.cuda.current_device())
    _caps.append(num_sms)
    _C.set_sm_cap(num_sms)
    try:
        yield
    finally:
        _caps.pop()
        _C.set_sm_cap(_caps[-1])


# ---- late transfers ----------------------------------------------------------------------------


@contextmanager
def inject_transfer_delays(seed: int = 0) -> Iterator[None]:
    """Exposes reads of a visiting block that come too early: inside the context the memory that
    blocks arrive in is filled with NaN before each ring call, and the copies of the "symmetric"
    transport are delayed by random amounts.

    Args:
        seed: of the delays, at least 0; give every rank another one.

    Raises:
        ValueError: a seed that is no integer or negative.
    """
    _C.inject_transfer_delays(check_int64("seed", seed, least=0))
    try:
        yield
    finally:
        _C.inject_transfer_delays(None)
