# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call: what ``group=`` may be, resolved to a name, a rank and a number of ranks."""

from typing import NamedTuple

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

Group = dist.ProcessGroup | DeviceMesh | None


class Ring(NamedTuple):
    """This process among the ranks of one call."""

    name: (
        str  # what the operators resolve the process group by; "" is a single rank without a group
    )
    rank: int
    world_size: int
    process_group: dist.ProcessGroup | None


def resolve_group(group: Group) -> Ring:
    """The ring that ``group`` means: a process group, a one-dimensional DeviceMesh, or None for the
    default group (a single rank where there is none).

    Raises ValueError for a group this process is not in and for a mesh with more dimensions.
    """
    if group is None:
        if not dist.is_initialized():
            return Ring("", 0, 1, None)
        process_group = dist.group.WORLD
    elif isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a one-dimensional DeviceMesh, got {group.ndim} dimensions"
            )
        if group.get_coordinate() is None:
            raise ValueError("group must contain this process, got a DeviceMesh without it")
        process_group = group.get_group()
    else:
        process_group = group
    # new_group() hands processes outside the group a plain number.
    if isinstance(process_group, int):
        raise ValueError("group must contain this process, got GroupMember.NON_GROUP_MEMBER")
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(
            "group must be a ProcessGroup, a one-dimensional DeviceMesh or None, "
            f"got {type(process_group).__name__}"
        )
    rank = process_group.rank()
    if rank < 0:
        raise ValueError(f"group must contain this process, got group {process_group.group_name}")
    return Ring(process_group.group_name, rank, process_group.size(), process_group)
