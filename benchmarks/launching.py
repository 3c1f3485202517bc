# SPDX-License-Identifier: Apache-2.0
"""Commands that start their ranks themselves, where no launcher has."""

from __future__ import annotations

import argparse
import os
import sys

import torch
from lib.cli import at_least
from torch.distributed import run


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
