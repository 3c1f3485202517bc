# SPDX-License-Identifier: Apache-2.0
"""One prompt and the tokens after it: timed, looked into, and attempted where memory may not do."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ringattn
import torch
import torch.distributed as dist
from lib.ranks import rank
from llama_models import RING, Strategy, regular_attention
from ringattn._distributed.collectives import barrier, gather_objects
from ringattn._distributed.errors import report_to_peers
from ringattn._distributed.groups import resolve_group
from torch.profiler import DeviceType, ProfilerActivity, profile

#: What a layer's time over the ring is made of.
PARTS = ("own_ms", "remote_ms", "transfer_ms", "wait_ms")
#: Parts of the names of kernels that are built on tensor cores: products of cuBLAS and CUTLASS, and
#: attention of PyTorch and of this package in half types.
TENSOR_CORES = (
    *("gemm", "nvjet", "xmma", "cutlass", "16816", "1688", "hmma", "gmma"),
    *("flash", "fmha", "sdpa", "block_attention", "decode_attention"),
)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Generation:
    """What a prompt and the tokens after it showed on this rank."""

    logits: torch.Tensor  # [B, V], of the prompt's last token, float32 on the CPU
    times: list[float]  # ms of the first token and of each after it
    peak_gib: float | None  # of the prompt; None on CPU


def generation(strategy: Strategy, ids: torch.Tensor, options: Any) -> Generation | None:
    """A prompt ``[B, S]`` and tokens after it; None on ranks without a part in it. Collective."""
    if dist.is_initialized():
        dist.barrier()
    if strategy.alone and rank() != 0:
        return None
    if ids.is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    state, times, prompt_logits, peak = None, [], None, None
    for _ in range(1 + options.tokens):
        start = time.perf_counter()
        with contextlib.nullcontext() if times else around(strategy, options):
            logits, state = strategy.step(ids, state)
        tokens = logits.argmax(-1)
        if not strategy.alone and dist.is_initialized():
            dist.broadcast(tokens, 0)  # equal logits on all ranks; a generation makes sure
        tokens.tolist()  # waits for the device, as a check for the end of the text does
        times.append(1e3 * (time.perf_counter() - start))
        if prompt_logits is None:
            prompt_logits = logits.float().cpu()
            peak = torch.cuda.max_memory_allocated() / 2**30 if ids.is_cuda else None
        ids = tokens[:, None]
    assert prompt_logits is not None
    return Generation(prompt_logits, times, peak)


def around(strategy: Strategy, options: Any) -> contextlib.AbstractContextManager[Any]:
    """What a prompt of this strategy runs in."""
    return regular_attention(options.flash) if strategy.alone else contextlib.nullcontext()


def attempt(strategy: Strategy, work: Callable[[], _Value]) -> tuple[bool, _Value | None]:
    """Whether no rank ran out of memory in ``work`` with a strategy, and what it returned on this
    one. Collective.

    Raises:
        RuntimeError, ValueError: what ``work`` raised, where no rank ran out of memory.
    """
    ring = resolve_group(None)
    done, ran_out = None, False
    problem: Exception | None = None
    try:
        done = work()
    except (RuntimeError, ValueError) as error:
        problem, ran_out = error, is_out_of_memory(error)
        if ran_out and not strategy.alone and not str(error).startswith("rank "):
            report_to_peers(ring, error)  # a peer may wait for a block of this rank
    if strategy.alone and dist.is_initialized():
        dist.barrier()  # waits for rank 0 without a report of the wait
    if any(gather_objects(ring, "benchmarks/llama.py", ran_out)):
        problem = None  # with the tensors of its frames
        gc.collect()
        torch.cuda.empty_cache()
        return False, None
    if problem is not None:
        raise problem
    return True, done


def is_out_of_memory(error: Exception) -> bool:
    """Of this rank or, as it was told, of another; also where it was no tensor's memory."""
    texts = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in texts)


@dataclass(frozen=True)
class Breakdown:
    """How a prompt's time is made up on this rank."""

    layers: list[float]  # PARTS of one layer after the other; empty without a ring
    tensor_core_share: float | None

    @classmethod
    def of(cls, strategy: Strategy, ids: torch.Tensor, options: Any) -> Breakdown | None:
        """One of a prompt; None on ranks that have no part in it."""
        if strategy.alone and rank() != 0:
            return None
        layers = layers_of(strategy, ids) if strategy.name == RING else []
        return cls(layers, tensor_core_share(strategy, ids, options))


def layers_of(strategy: Strategy, ids: torch.Tensor) -> list[float]:
    """PARTS of each layer in a prompt over the ring, blocks attended one by one."""
    for _ in range(2):  # those are other kernels than the ones before: once to warm up
        with ringattn.record_timings() as timings:
            strategy.step(ids, None)
    found = []
    for steps in timings.calls:
        for kind in ("own", "remote"):
            found.append(sum(step.attention_ms for step in steps if step.kind == kind))
        found.append(sum(step.transfer_ms for step in steps))
        found.append(sum(step.wait_ms for step in steps))
    return found


def tensor_core_share(strategy: Strategy, ids: torch.Tensor, options: Any) -> float | None:
    """Of the CUDA time of a prompt on this rank; None on CPU, in float32, and where the profiler
    sees no kernel."""
    if not ids.is_cuda or options.dtype not in ("float16", "bfloat16"):
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, around(strategy, options):
        if not strategy.alone:  # a kernel that waits for a peer's profiler would count
            barrier(resolve_group(None), "benchmarks/llama.py")
        strategy.step(ids, None)
        torch.cuda.synchronize()
    times = [
        (event.key.lower(), event.self_device_time_total)
        for event in profiler.key_averages()
        if event.device_type == DeviceType.CUDA
    ]
    return share_on_tensor_cores(times)


def share_on_tensor_cores(times: list[tuple[str, float]]) -> float | None:
    """From the names of kernels, in lower case, and their times; None without any."""
    total = sum(time for _, time in times)
    built_on_them = sum(t for name, t in times if any(part in name for part in TENSOR_CORES))
    return built_on_them / total if total else None
