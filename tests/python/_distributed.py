# SPDX-License-Identifier: Apache-2.0
"""Runs functions in the processes of a real process group, and hands back what each rank returned.

A pool keeps its processes, so that a suite starts them once per number of ranks. A function is any
function of a test module; it is called with the given arguments on every rank at once and asks
:func:`this` about its rank and device.
"""

import atexit
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from ringattn.testing import MPS
from torch.testing._internal.distributed.fake_pg import FakeStore

#: What no test reaches, on a busy machine either.
GROUP_TIMEOUT_S = 600.0
CALL_TIMEOUT_S = 600.0
#: What happens at once takes a fraction of a second, on a busy machine more, but no timeout.
AT_ONCE_S = 120.0
#: So many ranks may share a GPU where a test needs more than there are.
RANKS_PER_GPU = int(os.environ.get("RINGATTN_RANKS_PER_GPU", "1"))

#: Its processes start with these modules imported.
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["torch", "torch.distributed.tensor", "ringattn"])
_mps: MPS | None = None


def _part_of_a_gpu(ranks_per_gpu: int) -> dict[str, str]:
    """Environment of ranks that share a GPU and are to run at once, not in turn."""
    global _mps
    if _mps is None:
        _mps = MPS().__enter__()
        atexit.register(_mps.__exit__)
    return _mps.environment(100 / ranks_per_gpu)


@dataclass(frozen=True)
class Place:
    """Where a function runs."""

    rank: int
    world_size: int
    device: torch.device
    store: dist.Store


_this: Place | None = None


def this() -> Place:
    """The rank this process is."""
    assert _this is not None, "only the processes of a pool have a rank"
    return _this


@dataclass(frozen=True)
class Outcome:
    """What a call did on one rank. ``died``: the process ended instead of answering."""

    rank: int
    value: Any = None
    error: str | None = None  # name of the exception's type
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0
    died: bool = False

    @property
    def ok(self) -> bool:
        return self.error is None and not self.died


class RanksFailed(AssertionError):
    """A call that should have succeeded on every rank did not."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        failed = [outcome for outcome in outcomes if not outcome.ok]
        lines = [f"{len(failed)} of {len(outcomes)} ranks failed"]
        for outcome in failed:
            what = "the process ended" if outcome.died else outcome.traceback
            lines.append(f"--- rank {outcome.rank} ---\n{what}")
        super().__init__("\n".join(lines))


def _serve(
    rank: int,
    world_size: int,
    device_type: str,
    port: int,
    timeout_s: float,
    environment: dict[str, str],
    connection: Any,
) -> None:
    """Body of a process: join the group, then answer calls until the pool closes."""
    global _this
    os.environ.update(environment)
    torch.set_num_threads(1)
    device, backend = torch.device("cpu"), "gloo"
    if device_type == "cuda":
        num_devices = torch.cuda.device_count()
        device = torch.device("cuda", rank % num_devices)
        torch.cuda.set_device(device)
        # NCCL refuses ranks that share a GPU.
        backend = f"cpu:gloo,cuda:{'nccl' if world_size <= num_devices else 'gloo'}"
    patience = timedelta(seconds=GROUP_TIMEOUT_S)
    # The pool holds the store, as torchrun's agent does: it outlives every rank.
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=patience)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=patience,
    )
    # The timeout that ringattn finds. Ranks that start, and groups that they make, have longer.
    for device_of_backend in {"cpu", device_type}:
        options = dist.group.WORLD._get_backend(torch.device(device_of_backend)).options
        options._timeout = timedelta(seconds=timeout_s)
    _this = Place(rank, world_size, device, store)
    while True:
        try:
            function, args, kwargs = pickle.loads(connection.recv_bytes())
        except EOFError:
            break
        if function is None:
            break
        connection.send_bytes(b"ready")
        try:
            connection.recv_bytes()
        except EOFError:
            break
        start = time.monotonic()
        try:
            value = _to_cpu(function(*args, **kwargs))
            outcome = Outcome(rank, value, seconds=time.monotonic() - start)
        except BaseException as error:
            outcome = Outcome(
                rank,
                error=type(error).__name__,
                message=str(error),
                traceback=traceback.format_exc(),
                seconds=time.monotonic() - start,
            )
        connection.send_bytes(pickle.dumps(outcome))
    # No orderly end of the group: peers may be gone, and this process must not wait for them.
    os._exit(0)


def _to_cpu(value: Any) -> Any:
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), value)


class RankPool:
    """W processes of one group: gloo on CPU, NCCL with one GPU per rank on CUDA. More ranks than
    GPUs share them, in a group without NCCL: in turn, or at once where RINGATTN_RANKS_PER_GPU says
    so."""

    def __init__(
        self,
        world_size: int,
        device_type: str = "cpu",
        timeout_s: float = GROUP_TIMEOUT_S,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.world_size = world_size
        self.device_type = device_type
        environment = dict(environment or {})
        if device_type == "cuda" and RANKS_PER_GPU > 1:
            ranks_per_gpu = -(-world_size // torch.cuda.device_count())
            environment |= _part_of_a_gpu(ranks_per_gpu) if ranks_per_gpu > 1 else {}
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._connections, self.processes = [], []
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(
                    *(rank, world_size, device_type, self._store.port, timeout_s),
                    *(environment, theirs),
                ),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self.processes.append(process)

    def outcomes(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Outcome]:
        """Calls ``function(*args, **kwargs)`` on every rank. A rank that does not answer in time
        fails the test and closes the pool."""
        what = f"{function.__name__}{args}"
        # Ranks begin together: one that still imports what it is to call would be late for others.
        self._exchange(pickle.dumps((function, args, kwargs)), what)
        answers = self._exchange(b"go", what)
        return [
            Outcome(rank, died=True) if answer is None else pickle.loads(answer)
            for rank, answer in enumerate(answers)
        ]

    def _exchange(self, message: bytes, what: str) -> list[bytes | None]:
        """What each rank answers to a message; None: it has died."""
        for connection in self._connections:
            with suppress(BrokenPipeError, ConnectionResetError):  # seen as a death below
                connection.send_bytes(message)
        deadline = time.monotonic() + CALL_TIMEOUT_S
        answers: list[bytes | None] = []
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    self.close()
                    raise AssertionError(
                        f"every rank must answer within {CALL_TIMEOUT_S} s, "
                        f"got nothing from rank {rank} in {what}"
                    )
                answers.append(connection.recv_bytes())
            except (EOFError, ConnectionResetError):
                answers.append(None)
        return answers

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Calls ``function(*args, **kwargs)`` on every rank and returns what each returned, tensors
        on the CPU; RanksFailed where one raised."""
        outcomes = self.outcomes(function, *args, **kwargs)
        if not all(outcome.ok for outcome in outcomes):
            self.close()  # the next test begins with a group that nothing has happened to
            raise RanksFailed(outcomes)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        """Ends the processes; those that do not go by themselves are killed."""
        for connection in self._connections:
            with suppress(OSError):  # closed already, here or there
                connection.send_bytes(pickle.dumps((None, (), {})))
        for process in self.processes:
            process.join(timeout=1)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in self._connections:
            connection.close()

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self.processes)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def fake_default_group(store: dist.Store | None = None) -> Iterator[None]:
    """A default group of two ranks without a peer; afterwards it is as if this process never had
    one."""
    store = FakeStore() if store is None else store
    dist.init_process_group("fake", rank=0, world_size=2, store=store)
    try:
        yield
    finally:
        dist.destroy_process_group()
        dist.distributed_c10d._backend = None  # what init_process_group leaves behind


class RankPools:
    """Pools by number of ranks and device type: started on first use, and again after one has been
    closed or has lost a process."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, str], RankPool] = {}

    def __call__(self, world_size: int, device_type: str = "cpu") -> RankPool:
        key = (world_size, device_type)
        if key in self._pools and not self._pools[key].alive:
            self._pools.pop(key).close()
        if key not in self._pools:
            self._pools[key] = RankPool(world_size, device_type)
        return self._pools[key]

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()

    def __enter__(self) -> "RankPools":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
