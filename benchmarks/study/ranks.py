# SPDX-License-Identifier: Apache-2.0
"""Starts the ranks of a job, each with an environment of its own, and ends them in any case."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from ringattn.testing import MPS

from study.settings import Job

FOLDER = Path(__file__).resolve().parents[1]
MARK = "@study "  # begins a line of a rank's output that its parent process reads
_POLL_S = 0.2
_GRACE_S = 10.0  # time for the other ranks to write their errors, once one has failed


class RanksFailed(RuntimeError):
    """A rank ended with an error; the message holds the last lines of all logs."""


class Ranks:
    """The processes of one job. They load what they need and then wait: nothing is computed, and no
    device touched, before :meth:`reports` is asked for. They end with the context, or with the
    process that made them. With `mps`, each is started under it with its percentage of a GPU.
    Where the job is throttled by repeated work, ranks slow themselves down."""

    def __init__(self, job: Job, mps: MPS | None) -> None:
        self._job = job
        # Here, so that no other process can take its port.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: list[subprocess.Popen[str]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ringattn_study_")
        self._logs = [Path(self._folder.name) / f"rank{r}" for r in range(len(job.percentages))]
        try:
            self._start(mps)
        except BaseException:
            self.end()
            raise

    def _start(self, mps: MPS | None) -> None:
        world_size = len(self._job.percentages)
        path = filter(None, [str(FOLDER), os.environ.get("PYTHONPATH")])
        common = {
            **os.environ,
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONPATH": os.pathsep.join(path),
        }
        cores = len(os.sched_getaffinity(0))
        common.setdefault("OMP_NUM_THREADS", str(max(1, cores // world_size)))
        # The percentages of a sweep are given rank by rank, below.
        common.pop("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", None)
        for rank, percentage in enumerate(self._job.percentages):
            environment = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if mps is not None:
                environment |= mps.environment(self._job.settings.mps_percentage(percentage))
            with self._logs[rank].open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "study.worker"],
                        env=environment,
                        stdin=subprocess.PIPE,  # closed where this process ends: the rank ends too
                        stdout=subprocess.PIPE if rank == 0 else log,
                        stderr=log,
                        text=True,
                    )
                )

    def reports(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Has the ranks do the job. What rank 0 reports, as it comes.

        Raises:
            RanksFailed: a rank failed, or the job took longer than `limit_s`.
        """
        order = self._job.to_json()
        for process in self._processes:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it has ended: its log has the error
                process.stdin.write(order + "\n")
                process.stdin.flush()
        reports: queue.Queue[dict[str, Any]] = queue.Queue()
        reader = threading.Thread(
            target=_read, args=(self._processes[0].stdout, reports), daemon=True
        )
        reader.start()
        yield from _watch(self._processes, reports, self._logs, time.monotonic() + limit_s)
        reader.join()
        while not reports.empty():
            yield reports.get()

    def end(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    process.stdin.close()
        self._folder.cleanup()

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def _watch(
    processes: list[subprocess.Popen[str]],
    reports: queue.Queue[dict[str, Any]],
    logs: list[Path],
    deadline: float,
) -> Iterator[dict[str, Any]]:
    while True:
        try:
            yield reports.get(timeout=_POLL_S)
            continue
        except queue.Empty:
            pass
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes):
            return
        late = time.monotonic() > deadline
        if late or any(codes):
            last_word = time.monotonic() + (0 if late else _GRACE_S)
            while time.monotonic() < last_word and any(p.poll() is None for p in processes):
                time.sleep(_POLL_S)
            what = "took too long" if late else f"ended with {codes}"
            said = "\n".join(f"--- rank {r} ---\n{_tail(log)}" for r, log in enumerate(logs))
            raise RanksFailed(f"ranks must end well, got: {what}\n{said}")


def _read(stream: Any, reports: queue.Queue[dict[str, Any]]) -> None:
    for line in stream:
        if line.startswith(MARK):
            reports.put(json.loads(line[len(MARK) :]))
        else:
            sys.stderr.write(line)


def _tail(log: Path, lines: int = 30) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])
