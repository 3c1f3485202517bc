# SPDX-License-Identifier: Apache-2.0
"""Commands that start their ranks themselves, where no launcher has."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from lib import ranks
from lib.cli import at_least, counts
from ringattn.testing import MPS, slowdown
from torch.distributed import run

_GRACE_S = 10.0  # for the errors of other ranks, once one has failed


def add_world_size(parser: argparse.ArgumentParser) -> None:
    """--world-size, for :func:`under_launcher`."""
    parser.add_argument(
        *("--world-size", "--world_size", "--nproc", "--num-ranks", "--num_ranks"),
        dest="world_size",
        type=at_least(1),
        metavar="W",
        help="ranks on this host, started by this command (default: one on each GPU, without any "
        "two; under torchrun its ranks)",
    )


def under_launcher(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> bool:
    """Whether this process is a rank. Where it is none yet, runs this command on ``--world-size``
    ranks until they end, and returns False."""
    wanted = arguments.world_size
    if "WORLD_SIZE" in os.environ:
        if wanted is not None and wanted != int(os.environ["WORLD_SIZE"]):
            parser.error(
                f"--world-size must be that of torchrun, {os.environ['WORLD_SIZE']}, got {wanted}"
            )
        return True
    devices = torch.cuda.device_count() if arguments.device == "cuda" else 0
    if wanted is None:
        wanted = devices or 2
    if 0 < devices < wanted:
        parser.error(f"--world-size must be at most the {devices} GPUs of this host, got {wanted}")
    if wanted == 1:
        return True
    # CPU ranks share the cores; torchrun would give each a single thread.
    threads = len(os.sched_getaffinity(0)) // wanted
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, threads)))
    run.main(["--standalone", "--nproc-per-node", str(wanted), *sys.argv])
    return False


def add_percentages(parser: argparse.ArgumentParser) -> None:
    """--percentages, for :func:`under_percentages` and :func:`slowed`."""
    parser.add_argument(
        "--percentages",
        type=counts,
        metavar="P,P,...",
        help="speeds of the ranks: of their GPUs by CUDA MPS, on CPU by repeated work",
    )


def under_percentages(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> bool:
    """:func:`under_launcher` for one rank of each of ``--percentages``, on GPUs
    :func:`under_mps`."""
    percentages = arguments.percentages
    if max(percentages) > 100:
        parser.error(f"--percentages must be at most 100, got {max(percentages)}")
    asked = getattr(arguments, "world_size", None) or len(percentages)
    wanted = int(os.environ.get("WORLD_SIZE", asked))
    if len(percentages) != wanted:
        parser.error(f"--percentages must be {wanted}, one a rank, got {len(percentages)}")
    if arguments.device == "cuda":
        return under_mps(percentages)
    arguments.world_size = wanted
    return under_launcher(parser, arguments)


def slowed(
    percentages: Sequence[int] | None, device: torch.device
) -> contextlib.AbstractContextManager[None]:
    """This rank at its percentage: repeated work on CPU; on GPUs it was started so."""
    return repeating(percentages[ranks.rank()] if percentages and device.type == "cpu" else 100)


def repeating(percentage: int) -> contextlib.AbstractContextManager[None]:
    """This rank at a percentage of its speed, by repeated work."""
    return slowdown(100 / percentage) if percentage < 100 else contextlib.nullcontext()


def under_mps(percentages: Sequence[int]) -> bool:
    """Whether this process is a rank. Where it is none yet, runs this command on one rank for each
    of ``percentages``, with that share of its GPU by a private CUDA MPS, until they end, and
    returns False. A share holds from the first use of CUDA on, so that it is in the environment
    that a rank starts with, which torchrun gives to all alike.

    Raises:
        SystemExit: a rank failed.
    """
    if "WORLD_SIZE" in os.environ:
        return True
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    common["WORLD_SIZE"] = str(len(percentages))
    processes = []
    with MPS() as mps:
        try:
            for rank, percentage in enumerate(percentages):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} | mps.environment(percentage)
                processes.append(subprocess.Popen([sys.executable, *sys.argv], env=common | own))
            while None in (codes := [process.poll() for process in processes]):
                if any(codes):
                    time.sleep(_GRACE_S)
                    break
                time.sleep(0.2)
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        sys.exit(1)
    return False
