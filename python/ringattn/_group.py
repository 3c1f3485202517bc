# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call: what ``group=`` may be, resolved to a name, a rank and a number of ranks."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

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
    if not isinstance(process_group, dist.ProcessGroup):
        # new_group() hands processes outside the group a plain number, this very object.
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group must contain this process, got GroupMember.NON_GROUP_MEMBER")
        raise ValueError(
            "group must be a ProcessGroup, a one-dimensional DeviceMesh or None, "
            f"got {type(process_group).__name__}"
        )
    rank = process_group.rank()
    if rank < 0:
        raise ValueError(f"group must contain this process, got group {process_group.group_name}")
    return Ring(process_group.group_name, rank, process_group.size(), process_group)


@dataclass(frozen=True)
class GroupByName:
    """A process group as modules keep it: whichever has this name when it is asked for.

    So a module can be copied and pickled, and no group outlives destroy_process_group() in one: its
    threads may crash as Python ends.
    """

    name: str

    def resolve(self) -> dist.ProcessGroup:
        """Raises ValueError where no group has this name (any more)."""
        if torch.compiler.is_compiling():
            # Guards what is traced: names begin anew after destroy_process_group().
            dist.group.WORLD  # noqa: B018
        return _find(self.name)


def _find(name: str) -> dist.ProcessGroup:
    try:
        return _resolve_process_group(GroupName(name))
    except RuntimeError:
        raise ValueError(
            f"group must exist, got {name!r}, which has been destroyed or is not of this process"
        ) from None


# Dynamo takes what it returns as a constant. torch.compiler.assume_constant_result() sets this too,
# but imports the compiler, a second, also for those who do not compile.
_find._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep(group: Group) -> Group | GroupByName:
    """``group`` for a module to keep, see :class:`GroupByName`. What is no group of this process is
    kept as it is, for :func:`resolve_group` to refuse."""
    if isinstance(group, DeviceMesh) and group.ndim == 1 and group.get_coordinate() is not None:
        group = group.get_group()
    return GroupByName(group.group_name) if isinstance(group, dist.ProcessGroup) else group


def kept(group: Group | GroupByName) -> Group:
    """The group that :func:`keep` was given, or the one that has its name now."""
    return group.resolve() if isinstance(group, GroupByName) else group
