# SPDX-License-Identifier: Apache-2.0
"""Calls of a model to which two ranks give different things, on CPUs and on GPUs."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from _distributed import this

TWO_GPUS = [pytest.mark.multi_gpu(size=2), pytest.mark.nccl]
DEVICES = ["cpu", pytest.param("cuda", marks=TWO_GPUS)]

#: About two seconds of a GPU: a call that has been made before takes its host a hundredth of it.
_CYCLES = 2**32


def cases(calls: Mapping[str, tuple[Any, Any, str]]) -> list[Any]:
    """(name, device type) of calls, each of which is what the ranks give and their error. On CUDA,
    those that differ in values: what the host knows is compared as arguments of operators are."""
    by_value = [name for name, (*_, error) in calls.items() if "got different ones" in error]
    on_gpus = [pytest.param(name, "cuda", marks=TWO_GPUS) for name in by_value]
    return [*((name, "cpu") for name in calls), *on_gpus]


def fails_at_once() -> bool:
    """Whether a call that differs is refused itself; on CUDA it may be the next one."""
    return this().device.type == "cpu"


def refusal(call: Callable[[Any], Any], given: Any, next_given: Any, match: str) -> str:
    """The ValueError of ``call(given)``, on CUDA at the latest of ``call(next_given)``."""
    with pytest.raises(ValueError, match=match) as error:
        call(given)
        if not fails_at_once():
            call(next_given)
    return str(error.value)


def returns_while_the_gpu_is_busy(call: Callable[[], Any]) -> bool:
    """Whether ``call`` leaves the host free while this rank's GPU does what came before it."""
    call()
    for _ in range(2):  # memory that waits for the GPU to become free is allocated the first time
        torch.cuda.synchronize()
        torch.cuda._sleep(_CYCLES)
        asleep = torch.cuda.Event()
        asleep.record()
        call()
        is_free = not asleep.query()
    torch.cuda.synchronize()
    return is_free
