# SPDX-License-Identifier: Apache-2.0
"""ringattn info: versions, kernels, devices, peer access, transports."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from ringattn import _C, _build_info, _library
from ringattn._torch_releases import TESTED


def add_parser(commands: Any) -> None:
    """Adds the command to ``argparse``'s sub-parsers."""
    commands.add_parser(
        "info",
        help="versions, kernels built, devices, transports",
        description=__doc__,
    )


def _build_lines() -> Iterator[tuple[str, str]]:
    build = _C.build_info()
    families = build["kernel_families"]
    assert isinstance(families, list)
    yield "ringattn", _library.VERSION
    tested = f"tested with {TESTED[0]} to {TESTED[-1]}"
    yield "torch", f"{torch.__version__} (built for {build['torch_version']}, {tested})"
    if build["cuda"]:
        yield "CUDA", f"{torch.version.cuda} (built for {build['cuda_version']})"
        yield "NCCL", f"built for {build['nccl_version']}"
    else:
        yield "CUDA", f"not built: {_build_info.NO_CUDA_BECAUSE}"
    yield "kernels", ", ".join(["cpu", *families])


def _device_lines() -> Iterator[tuple[str, str]]:
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_devices == 0:
        yield "devices", f"cpu ({torch.get_num_threads()} threads), no CUDA device"
    for index in range(num_devices):
        properties = torch.cuda.get_device_properties(index)
        yield (
            f"cuda:{index}",
            f"{properties.name}, sm_{properties.major}{properties.minor}, "
            f"{properties.multi_processor_count} SMs, {properties.total_memory / 2**30:.0f} GiB",
        )
    for index in range(num_devices):
        peers = [
            other
            for other in range(num_devices)
            if other != index and torch.cuda.can_device_access_peer(index, other)
        ]
        if num_devices > 1:
            reached = ", ".join(f"cuda:{peer}" for peer in peers) or "none"
            yield f"peers of cuda:{index}", reached


_AUTO = {
    "cpu": "process_group (the process group's own backend carries the blocks)",
    "cuda": "symmetric where all ranks are on one host and reach each other's memory (blocks are "
    "read from their owner), else nccl (a stream and a communicator of our own)",
}


def _transport_lines() -> Iterator[tuple[str, str]]:
    yield "transports", ", ".join(_C.transports())
    for device_type in _library.DEVICES:
        yield f"auto on {device_type}", _AUTO[device_type]


def run(options: argparse.Namespace) -> int:
    """Prints one line per fact, names padded to one column."""
    lines = [*_build_lines(), *_device_lines(), *_transport_lines()]
    width = max(len(name) for name, _ in lines)
    for name, fact in lines:
        print(f"{name:<{width}}  {fact}")
    return 0
