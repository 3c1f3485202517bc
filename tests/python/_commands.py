# SPDX-License-Identifier: Apache-2.0
"""Runs Python commands as ``python`` and ``torchrun`` do, in processes that have torch already.

An import of torch takes seconds of CPU time, and torchrun pays for one more than there are ranks.
"""

import os
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import torch.distributed as dist
from _distributed import context

ROOT = Path(__file__).resolve().parents[2]


def _main(command: list[str], cwd: str, environment: dict[str, str], outputs: list[str]) -> None:
    """Body of a process: what `python COMMAND` does in that folder and environment."""
    for descriptor, output in enumerate(outputs, start=1):
        os.dup2(os.open(output, os.O_WRONLY | os.O_APPEND), descriptor)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    if command[0] == "-m":
        sys.path.insert(0, cwd)
        sys.argv = command[1:]
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(command[0]).resolve().parent))
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def run_command(
    command: Sequence[str | Path],
    *,
    ranks: int = 1,
    cwd: Path = ROOT,
    timeout: float = 600.0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Runs ``python COMMAND``, or ``torchrun --nproc-per-node RANKS COMMAND`` for several ranks.

    As under torchrun the launcher owns the store, and the first rank that fails ends the others;
    the exit status is 1 then. ``variables`` are added to the environment.
    """
    store = None
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    if ranks > 1:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
        environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
        environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    arguments = [str(argument) for argument in command]
    with TemporaryDirectory() as folder:
        outputs = [f"{folder}/stdout", f"{folder}/stderr"]
        for output in outputs:
            Path(output).touch()
        processes: list[BaseProcess] = []
        for rank in range(ranks):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
            process = context.Process(
                target=_main, args=(arguments, str(cwd), environment | of_rank, outputs)
            )
            process.start()
            processes.append(process)
        try:
            status = _wait(processes, arguments, timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
        stdout, stderr = (Path(output).read_text() for output in outputs)
    del store
    return subprocess.CompletedProcess(arguments, status, stdout, stderr)


def command_line(*arguments: str | Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m ringattn`` on the CPU, under torchrun for several ranks."""
    return run_command(["-m", "ringattn", *arguments], ranks=ranks, CUDA_VISIBLE_DEVICES="")


def _wait(processes: Sequence[BaseProcess], command: list[str], timeout: float) -> int:
    """The exit status once all have ended well or one has not."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        statuses = [process.exitcode for process in processes]
        if any(statuses):
            return 1 if len(statuses) > 1 else statuses[0]
        if None not in statuses:
            return 0
        time.sleep(0.02)
    raise subprocess.TimeoutExpired(command, timeout)
