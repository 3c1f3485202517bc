# SPDX-License-Identifier: Apache-2.0
"""The ranks of a call: ``group=`` resolved to a name, a rank and a number of ranks."""

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group

#: "single": this process alone, whatever groups there are. None: the default group.
Group = dist.ProcessGroup | DeviceMesh | Literal["single"] | None


class GroupInfo(NamedTuple):
    """This process among the ranks of one call. The process group is not in it: what holds one
    cannot outlast a graph break of torch.compile."""

    name: str  # the process group is resolved by it; "" is a single rank without one
    rank: int
    world_size: int

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        return _resolve_process_group(GroupName(self.name)) if self.name else None

    @property
    def group(self) -> dist.ProcessGroup | Literal["single"]:
        """The ``group=`` that means these ranks, whatever default group there is."""
        return self.process_group or "single"


#: One rank by itself.
SINGLE = GroupInfo("", 0, 1)


def resolve_group(group: "Group | GroupByName") -> GroupInfo:
    """This process among the ranks that ``group`` means: a process group, as modules keep it too, a
    one-dimensional DeviceMesh, None for the default group (this process alone where there never was
    one), or "single".

    Raises ValueError for a group this process is not in, for one that has been destroyed, for a
    mesh with more dimensions, and for None where a default group is missing.
    """
    if isinstance(group, str) and group == "single":
        return SINGLE
    if isinstance(group, GroupByName):
        if torch.compiler.is_compiling():
            return group.ring()
        group = group.resolve()
    if group is None:
        if not dist.is_initialized():
            _check_never_distributed()
            return SINGLE
        process_group = dist.group.WORLD
    # A process group first: the test for a mesh is slower.
    elif not isinstance(group, dist.ProcessGroup) and isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group must be a one-dimensional DeviceMesh, got {group.ndim} dimensions"
            )
        if group.get_coordinate() is None:
            raise ValueError("group must contain this process, got a DeviceMesh without it")
        process_group = _group_of(group)
    else:
        process_group = group
    if not isinstance(process_group, dist.ProcessGroup):
        # new_group() hands processes outside the group a plain number, this very object.
        if process_group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group must contain this process, got GroupMember.NON_GROUP_MEMBER")
        got = repr(group) if isinstance(group, str) else type(process_group).__name__
        raise ValueError(
            'group must be a ProcessGroup, a one-dimensional DeviceMesh, None or "single", '
            f"got {got}"
        )
    if torch.compiler.is_compiling():
        # Compiled code finds the group that has this name then: it cannot be looked up now.
        return GroupInfo(*_identity(process_group))
    global _latest
    known = _latest  # read once: other threads have other groups
    if known[0]() is not process_group:
        known = _latest = (weakref.ref(process_group), *_identity(process_group))
    _, name, rank, world_size = known
    # The operators would find the group that has this name now.
    if _registered(name) is not process_group:
        raise ValueError(f"group must not have been destroyed, got {name!r}, which has")
    return GroupInfo(name, rank, world_size)


# The group of the latest call, with its name, rank and size, which it keeps. A weak reference: no
# group is kept alive after destroy_process_group().
_latest: tuple[Callable[[], dist.ProcessGroup | None], str, int, int] = (lambda: None, "", 0, 1)


def _identity(process_group: dist.ProcessGroup) -> tuple[str, int, int]:
    """Its name, this process's rank and the number of ranks; ValueError where it has no rank."""
    name, rank = process_group.group_name, process_group.rank()
    if rank < 0:
        raise ValueError(f"group must contain this process, got group {name}")
    return name, rank, process_group.size()


def _check_never_distributed() -> None:
    """ValueError where this process has no default group and should have one.

    A default group that is gone shows in what ``init_process_group`` leaves behind: c10d's default
    backend, which ``destroy_process_group`` does not reset. A default group that was installed in
    another way leaves nothing and is not noticed.
    """
    if distributed_c10d._backend is not None:
        raise ValueError(
            "group must be a process group that exists, got None after the default group was "
            "destroyed: call init_process_group() again; group='single' is for one process alone"
        )
    # Note: torch.compile reads the environment when it traces, and does not guard it.
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdecimal() and int(world_size) > 1:
        raise ValueError(
            f"a process group must be initialised under torchrun, WORLD_SIZE is {world_size}, got "
            "none; group='single' is for one process alone"
        )


def share_ranks(one: dist.ProcessGroup, other: dist.ProcessGroup | None) -> bool:
    """Whether what one group sums or splits concerns several ranks of the other."""
    return len({*dist.get_process_group_ranks(one)} & {*dist.get_process_group_ranks(other)}) > 1


def _group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of a mesh, which keeps it by its name."""
    if torch.compiler.is_compiling():
        return mesh.get_group()
    try:
        group = mesh.get_group()
    except RuntimeError:
        raise ValueError(
            "group must exist, got a DeviceMesh whose group has been destroyed"
        ) from None
    # The order of ranks in the mesh does not matter.
    ranks, others = sorted(mesh.mesh.tolist()), sorted(dist.get_process_group_ranks(group))
    if others != ranks:
        raise ValueError(
            f"group must be that of ranks {ranks}, got a DeviceMesh whose group has been "
            f"destroyed, and another one of that name, of ranks {others}"
        )
    return group


@dataclass(frozen=True)
class GroupByName:
    """A process group as modules keep it: a name and ranks, looked up when the group is needed.

    A module that keeps it can be copied and pickled, and keeps no group alive after
    destroy_process_group(): threads of such a group may crash as Python ends.
    """

    name: str
    ranks: tuple[int, ...]  # of the default group, in the order of the group's own

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "GroupByName":
        return cls(group.group_name, tuple(dist.get_process_group_ranks(group)))

    def resolve(self) -> dist.ProcessGroup:
        """Raises ValueError where no group of these ranks has this name (any more)."""
        if torch.compiler.is_compiling():
            # Guards what is traced: names begin anew after destroy_process_group().
            dist.group.WORLD  # noqa: B018
        return _find(self.name, self.ranks)

    def ring(self) -> GroupInfo:
        """This process among these ranks, while compiling. No group is in it: after a graph break
        Dynamo would load the function that found it."""
        self.resolve()
        return GroupInfo(self.name, self.ranks.index(dist.get_rank()), len(self.ranks))


def _registered(name: str) -> dist.ProcessGroup | None:
    try:
        return _resolve_process_group(GroupName(name))
    except RuntimeError:
        return None


def _find(name: str, ranks: tuple[int, ...]) -> dist.ProcessGroup:
    group = _registered(name)
    if group is None:
        raise ValueError(
            f"group must exist, got {name!r}, which has been destroyed or is not of this process"
        )
    others = tuple(dist.get_process_group_ranks(group))
    if others != ranks:
        raise ValueError(
            f"group must be {name!r} of ranks {list(ranks)}, "
            f"got another one of that name, of ranks {list(others)}"
        )
    return group


# Dynamo treats its result as a constant. torch.compiler.assume_constant_result() sets this too, but
# imports the compiler, which takes a second, in processes that do not compile.
_find._dynamo_marked_constant = True  # type: ignore[attr-defined]


def keep(group: Group) -> Group | GroupByName:
    """``group`` for a module to keep, see :class:`GroupByName`. A group that this process is not in
    is kept as it is: :func:`resolve_group` refuses it."""
    if isinstance(group, DeviceMesh) and group.ndim == 1 and group.get_coordinate() is not None:
        group = _group_of(group)
    if not isinstance(group, dist.ProcessGroup):
        return group
    # Names cannot be looked up while compiling.
    if torch.compiler.is_compiling() or _registered(group.group_name) is group:
        return GroupByName.of(group)
    return group


def kept(group: Group | GroupByName) -> Group:
    """The group that was given to :func:`keep`, or the group of its ranks that has its name now."""
    return group.resolve() if isinstance(group, GroupByName) else group
