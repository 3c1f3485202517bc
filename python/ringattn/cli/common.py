# SPDX-License-Identifier: Apache-2.0
"""What the commands share: where they run, and how they print tables."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from ringattn import _build_info, _library

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def add_device_argument(parser: argparse.ArgumentParser) -> None:
    """``--device``, as :func:`process_group` takes it."""
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA where every rank has a device of its own, else the CPU (default: auto)",
    )


def check_json(path: Path | None) -> None:
    """Refuses, before there are results, a ``--json`` that they could not be written to."""
    if path is None or os.environ.get("RANK", "0") != "0":  # only rank 0 writes
        return
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ValueError(f"--json must name a file in a folder that can be written to, got {path}")


@contextmanager
def process_group(device: str, flag: str = "--device") -> Iterator[tuple[torch.device, int]]:
    """The group that torchrun describes, if it does: this rank's device and the number of ranks.
    ``flag``: what errors call ``device``."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_devices = torch.cuda.device_count() if "cuda" in _library.DEVICES else 0
    if device == "auto":
        device = "cuda" if 0 < local_ranks <= num_devices else "cpu"
    if device == "cuda" and not _build_info.WITH_CUDA:
        raise ValueError(
            f"{flag} cuda must have a ringattn built with CUDA kernels, got one without "
            f"({_build_info.NO_CUDA_BECAUSE})"
        )
    if device == "cuda" and local_ranks > num_devices:
        raise ValueError(f"{flag} cuda must find {local_ranks} CUDA devices, got {num_devices}")
    place = torch.device(device, local_rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(place)
    if world_size == 1:
        yield place, 1
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    try:
        yield place, world_size
    finally:
        dist.destroy_process_group()


def aligned(rows: list[tuple[str, ...]], left: tuple[str, ...] = ()) -> list[str]:
    """Lines of a table whose first row names the columns; columns not in ``left`` align right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if name in left else cell.rjust(width)
            for cell, width, name in zip(row, widths, rows[0], strict=True)
        ).rstrip()
        for row in rows
    ]
