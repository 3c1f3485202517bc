# SPDX-License-Identifier: Apache-2.0
"""One rank of a ring, run by a kernel variant (kernel_variants.py) without the other ranks."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator, Sequence

import torch
from lib.problem import Problem
from ringattn import Partition

MAX_RANKS = 16


class RankCall(ctypes.Structure):
    """As in kernel_variant.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "out", "lse", "staged")),
        ("blocks", ctypes.c_void_p * MAX_RANKS),
        *((name, ctypes.c_void_p) for name in ("fetched", "signals", "host")),
        ("lengths", ctypes.c_int64 * MAX_RANKS),
        *(
            (name, ctypes.c_int)
            for name in (
                *("world_size", "rank", "batch", "heads", "kv_heads", "head_dim", "causal"),
                "tile_rows",
            )
        ),
        ("scale", ctypes.c_float),
    ]


class _OnDevice:
    """The rank's call and memory on one device, the blocks of the others being on another one."""

    def __init__(
        self,
        kernel: ctypes.CDLL,
        problem: Problem,
        partition: Partition,
        rank: int,
        device: torch.device,
        others: torch.device,
        *,
        there: bool,
        tile_rows: int,
    ) -> None:
        self._attend = kernel.attend_as_rank
        self._attend.argtypes = [ctypes.POINTER(RankCall), ctypes.c_void_p]
        self.device = device
        if others != device:
            with torch.cuda.device(device):
                _check(kernel.reach(others.index), "reaching the other device")

        def block(source: int) -> torch.Tensor:  # [H_kv, 2, B, S_r, D]
            shards = [partition.shard(x, source) for x in (problem.k, problem.v)]
            return torch.stack(shards).permute(3, 0, 1, 2, 4).to(others).contiguous()

        q, k, v = (partition.shard(x, rank).to(device).contiguous() for x in problem.tensors)
        batch, rows, heads, head_dim = q.shape
        self.out = torch.zeros_like(q)
        lse = torch.zeros(batch, heads, rows, device=device)
        staged = torch.zeros(k.size(2), 2, *(batch, rows, head_dim), dtype=k.dtype, device=device)
        blocks = {r: block(r) for r in range(partition.world_size) if r != rank}
        largest = max(partition.lengths) * len(blocks)
        fetched = torch.zeros(
            2 * batch * k.size(2) * largest * head_dim, dtype=k.dtype, device=device
        )
        self._signals = torch.empty(
            kernel.rank_signals_bytes() // 4, dtype=torch.int32, device=device
        )
        with torch.cuda.device(device):
            signals = ctypes.c_void_p(self._signals.data_ptr())
            _check(kernel.prepare_signals(signals), "preparing a rank's signals")
        host = torch.zeros(kernel.host_mirrors_bytes() // 4, dtype=torch.int32).pin_memory()
        # Alive as long as the call is.
        self._memory = (q, k, v, lse, staged, fetched, host, *blocks.values())

        self._call = RankCall(
            *(x.data_ptr() for x in (q, k, v, self.out, lse, staged)),
            fetched=None if there else fetched.data_ptr(),
            signals=self._signals.data_ptr(),
            host=host.data_ptr(),
            world_size=partition.world_size,
            rank=rank,
            batch=batch,
            heads=heads,
            kv_heads=k.size(2),
            head_dim=head_dim,
            causal=problem.causal,
            tile_rows=tile_rows,
            scale=head_dim**-0.5,
        )
        for source, memory in blocks.items():
            self._call.blocks[source] = memory.data_ptr()
        self._call.lengths[: partition.world_size] = partition.lengths
        self._one = torch.ones(1, dtype=torch.int32).pin_memory()
        self._side = torch.cuda.Stream(device)
        torch.cuda.synchronize(device)
        torch.cuda.synchronize(others)

    def call(self) -> None:
        with torch.cuda.device(self.device):
            stream = torch.cuda.current_stream()
            _check(self._attend(self._call, stream.cuda_stream), "a rank's call")

    def give_up(self) -> None:
        """Kernels of this rank wait for nothing any more. By a copy engine: they hold the rest."""
        with torch.cuda.stream(self._side):
            self._signals[:1].copy_(self._one, non_blocking=True)


class IsolatedRank:
    """One rank of the ring over ``partition``, on the problem's device, and with there being a
    second one the same rank there: each has the blocks of the others on the other device.

    name: of the variant; kernel: its library. there: blocks lie on the device itself and are not
    fetched.
    """

    def __init__(
        self,
        name: str,
        kernel: ctypes.CDLL,
        problem: Problem,
        partition: Partition,
        rank: int,
        *,
        there: bool,
        tile_rows: int,
    ) -> None:
        here = problem.q.device
        pair = [here]
        if not there and torch.cuda.device_count() > 1:
            pair.append(torch.device("cuda", (here.index + 1) % torch.cuda.device_count()))
        self.name = name
        self._ranks = [
            _OnDevice(
                *(kernel, problem, partition, rank, device, others),
                there=there,
                tile_rows=tile_rows,
            )
            for device, others in zip(pair, reversed(pair), strict=True)
        ]

    def call(self) -> torch.Tensor:
        """Both begin together. Returns this device's result, [B, S_r, H, D], that the next call
        writes again."""
        first, *mirrors = self._ranks
        begin = torch.cuda.current_stream(first.device).record_event()
        for mirror in mirrors:
            torch.cuda.current_stream(mirror.device).wait_event(begin)
            mirror.call()
        first.call()
        return first.out

    def give_up(self) -> None:
        for rank in self._ranks:
            rank.give_up()


@contextlib.contextmanager
def given_up_after(seconds: float, ranks: Sequence[IsolatedRank]) -> Iterator[None]:
    """A kernel that waits for what never comes ends after that time; RuntimeError then."""
    over = threading.Event()

    def give_up() -> None:
        over.set()
        for rank in ranks:
            rank.give_up()

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
    if over.is_set():
        names = ", ".join(rank.name for rank in ranks)
        raise RuntimeError(
            f"a rank must be done within {seconds:g} s, got one of {names} that is not"
        )


def _check(error: int, what: str) -> None:
    if error != 0:
        raise RuntimeError(f"{what} failed with CUDA error {error}")
