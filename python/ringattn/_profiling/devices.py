# SPDX-License-Identifier: Apache-2.0
"""The device of a measured rank: which one, its defaults, its hardware and its free memory."""

from __future__ import annotations

import contextlib
import os
import platform
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist

from ringattn import _C, _library
from ringattn._checks import check_device, check_positive
from ringattn._distributed.collectives import gather_objects
from ringattn._distributed.groups import GroupInfo
from ringattn.profiles import AttentionTile

_MEMORY_SHARE = 0.9  # share of the free memory that tokens may fill


def resolve_device(device: torch.device | str | None, ring: GroupInfo) -> torch.device:
    """The device that ``device`` means on this rank of a ring.

    Raises:
        ValueError: a device without kernels.
    """
    if device is None:
        usable = "cuda" in _library.DEVICES and torch.cuda.is_available()
        if usable and ring.process_group is not None:
            usable = "nccl" in str(dist.get_backend_config(ring.process_group))
        device = "cuda" if usable else "cpu"
    return check_device(device)


def usual_tokens(device: torch.device) -> int:
    """Default tokens of a measured shard: enough for a call to outlast its overhead."""
    return 8192 if device.type == "cuda" else 256


def settling_seconds(device: torch.device, seconds: float | None) -> float:
    """How long a device computes before its speed counts; None means the device's default.

    Raises:
        ValueError: seconds that are not finite and positive.
    """
    if seconds is None:
        return 1.0 if device.type == "cuda" else 0.2
    return check_positive("seconds", seconds)


def hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs"


def attention_tiles(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[AttentionTile, ...]:
    """The tiles in which attention computes on the device."""
    tiles = _C.attention_tiles(str(device), str(dtype).removeprefix("torch."), head_dim)
    names = [field.name for field in fields(AttentionTile)]
    return tuple(AttentionTile(**{name: getattr(tile, name) for name in names}) for tile in tiles)


def spare_bytes(ring: GroupInfo, device: torch.device) -> int:
    """Memory that this rank may fill: ranks on one device share it. Collective."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        free += torch.cuda.memory_reserved(device)
        free -= torch.cuda.memory_allocated(device)
        memory = str(torch.cuda.get_device_properties(device).uuid)
    else:
        free, memory = _free_host_memory(), "cpu"
    place = (platform.node(), memory)
    num_sharing = gather_objects(ring, "measure_profiles", place).count(place)
    return int(_MEMORY_SHARE * free / num_sharing)


def _free_host_memory() -> int:
    """Bytes that can be allocated on the host without swapping."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
