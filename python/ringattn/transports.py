# SPDX-License-Identifier: Apache-2.0
"""The transport that calls took."""

from ringattn import _C
from ringattn._distributed.groups import Group, resolve_group


def last_transport(group: Group = None) -> str | None:
    """The transport that this rank's latest call of ``group`` took.

    Args:
        group: a process group, a one-dimensional DeviceMesh, None for the default group, or
            "single".

    Returns:
        "symmetric", "nccl" or "process_group"; None before any call, and for a group of one rank,
        where nothing is sent.

    Raises:
        ValueError: a group this process is not in.
    """
    ring = resolve_group(group)
    return _C.last_transport(ring.name) if ring.world_size > 1 else None
