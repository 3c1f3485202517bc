#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Enforces who may include what in csrc/: each folder is a room, each room names what it may see.

Kernels do not know torch, the ring does not know the dispatcher, nothing knows Python but bindings.
What the included headers of the project include counts too: no ban is dodged through a header.
A header and the source of the same stem are one unit; units must not include each other in a cycle.
"""

import argparse
import dataclasses
import pathlib
import re
import sys

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)

# What lies outside the project, by the start of the include path; the first match counts.
LIBRARIES = {
    "python": ("pybind11/", "Python.h", "torch/extension.h", "torch/python.h", "torch/csrc/utils/"),
    "c10d": ("torch/csrc/distributed/",),
    "nccl": ("nccl",),
    "dispatcher": (
        "torch/library.h",
        "torch/custom_class.h",
        "torch/csrc/autograd/",
        "torch/torch.h",
        "torch/all.h",
        "ATen/core/dispatch/",
        "ATen/core/op_registration/",
    ),
    "torch": ("ATen/", "c10/", "torch/"),
    "cuda": (
        "cuda",
        "cub/",
        "cute/",
        "cutlass/",
        "cooperative_groups",
        "nvtx3/",
        "mma.h",
        "vector_",
    ),
}


@dataclasses.dataclass(frozen=True)
class Room:
    """A folder of csrc/, or the files of one stem: which rooms and which libraries they may see.

    What is named is seen with the rooms inside of it. A room inside of another one is not of it.
    """

    rooms: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


# The standard library and a room's own files are always allowed. The longest matching name rules.
ROOMS = {
    "core": Room(),
    "testing": Room(rooms=("core",)),
    "peer_sync": Room(
        rooms=("core", "peer_sync/protocol.h", "peer_sync/partial_exchange.h"), libraries=("cuda",)
    ),
    "peer_sync/protocol": Room(),
    "peer_sync/partial_exchange": Room(rooms=("peer_sync/protocol.h",)),
    "partition": Room(rooms=("core",)),
    "planner": Room(rooms=("core", "partition")),
    "attention": Room(
        rooms=(
            *("core", "testing", "peer_sync/protocol.h", "peer_sync/partial_exchange.h"),
            *("attention/params.h", "attention/cpu", "attention/cuda"),
        ),
        libraries=("torch", "cuda"),
    ),
    "attention/params": Room(rooms=("core", "peer_sync/protocol.h")),
    "attention/cpu": Room(
        rooms=("core", "attention/attention_call.h", "attention/merge_states.h"),
        libraries=("torch",),
    ),
    "attention/cuda": Room(
        rooms=(
            *("core", "peer_sync", "attention/params.h"),
            *("attention/cuda/sm80", "attention/cuda/sm90"),
        ),
        libraries=("cuda",),
    ),
    "attention/cuda/sm80": Room(
        rooms=(
            *("core", "attention/params.h", "attention/cuda/numeric.cuh"),
            *("attention/cuda/key_bounds.h", "attention/cuda/softcap.cuh"),
            *("attention/cuda/query_bounds.h", "peer_sync/dependent_launch.cuh"),
        ),
        libraries=("cuda",),
    ),
    "attention/cuda/sm90": Room(
        rooms=(
            *("core", "peer_sync", "attention/params.h", "attention/cuda/alignment.h"),
            *("attention/cuda/numeric.cuh", "attention/cuda/key_bounds.h"),
            *("attention/cuda/query_bounds.h", "attention/cuda/softcap.cuh"),
            "attention/cuda/sm90/scheduler",
        ),
        libraries=("cuda",),
    ),
    "attention/cuda/sm90/scheduler": Room(
        rooms=("core", "attention/params.h", "attention/cuda/key_bounds.h")
    ),
    "decode_step": Room(rooms=("core", "attention/params.h")),
    "decode_step/cuda": Room(
        rooms=("core", "attention/params.h", "decode_step/params.h"), libraries=("cuda",)
    ),
    "transport": Room(
        rooms=("core", "peer_sync/protocol.h", "peer_sync/partial_exchange.h"), libraries=("torch",)
    ),
    "transport/registry": Room(rooms=("core",), libraries=("torch",)),
    "transport/runtime": Room(
        rooms=(
            *("core", "transport/p2p_transport.h"),
            "transport/runtime/fill_nan_if_failed.h",
        ),
        libraries=("torch", "cuda"),
    ),
    "transport/runtime/fill_nan_if_failed": Room(rooms=("core",), libraries=("cuda",)),
    "transport/group": Room(
        rooms=("core", "transport/p2p_transport.h", "transport/registry.h", "transport/runtime"),
        libraries=("torch",),
    ),
    "transport/p2p": Room(
        rooms=(
            *("core", "transport/p2p_transport.h", "transport/registry.h", "transport/runtime"),
            *("transport/group/rendezvous.h", "transport/group/peer_wait.h"),
        ),
        libraries=("torch", "cuda"),
    ),
    "transport/symmetric": Room(
        rooms=(
            *("core", "testing", "peer_sync", "transport/transport.h", "transport/p2p_transport.h"),
            *("transport/registry.h", "transport/runtime", "transport/symmetric/kernels"),
            *("transport/group/rendezvous.h", "transport/group/peer_wait.h"),
            "transport/symmetric/stream_memops.h",
        ),
        libraries=("torch", "cuda"),
    ),
    "transport/symmetric/kernels": Room(rooms=("core", "peer_sync"), libraries=("cuda",)),
    "transport/symmetric/stream_memops": Room(rooms=("core",), libraries=("cuda",)),
    "ring": Room(
        rooms=(
            *("core", "testing", "partition", "attention/params.h", "transport/transport.h"),
            *("transport/p2p_transport.h", "attention/attention_call.h"),
            *("attention/block_attention.h", "attention/block_attention_backward.h"),
            "attention/sum_rows.h",
        ),
        libraries=("torch", "cuda"),
    ),
    "ops": Room(
        rooms=(
            *("core", "partition", "ring", "transport/group/group_context.h"),
            *("transport/p2p_transport.h", "transport/registry.h"),
            *("attention/block_attention.h", "attention/block_attention_backward.h"),
            *("attention/decode_attention.h", "attention/merge_states.h"),
            *("attention/tensor_params.h", "decode_step"),
        ),
        libraries=("torch", "cuda", "dispatcher"),
    ),
    "bindings": Room(
        rooms=(
            *("core", "testing", "partition", "planner"),
            *("attention/block_attention.h", "ring/step_recorder.h"),
            *("transport/group/group_context.h", "transport/group/peer_wait.h"),
            "transport/registry.h",
        ),
        libraries=("torch", "python"),
    ),
}

# Single files that may see one library or one header more, and why. A new line here needs a reason
# in review.
EXCEPTIONS = {
    "transport/p2p/nccl.cpp": {"nccl": "the only caller of NCCL"},
    "transport/p2p/process_group.h": {"c10d": "what the two files below share"},
    "transport/p2p/process_group.cpp": {"c10d": "the only one that sends through process groups"},
    "transport/p2p/process_group_backend.cpp": {
        "c10d": "the only one that knows their names and stores",
        "transport/group/group_backend.h": "implements it",
    },
    "bindings/module.cpp": {
        "cuda": "the version it was built with",
        "nccl": "the version it was built with",
    },
}


def library_of(include: str) -> str | None:
    """The library that an include path belongs to; None for the standard library."""
    for library, starts in LIBRARIES.items():
        if include.startswith(starts):
            return library
    return None


def room_of(path: str) -> str:
    """The room of a path below csrc/: the longest of ROOMS that is its stem or a folder of it."""
    name = path.rpartition(".")[0]
    while name:
        if name in ROOMS:
            return name
        name = name.rpartition("/")[0]
    raise KeyError(f"csrc/{path} is in no room: add it to ROOMS")


def may_include(room: str, path: str) -> bool:
    """Whether `path` is of `room`, or is, or lies in, what it lists."""
    listed = ROOMS[room].rooms
    return room_of(path) == room or any(
        path == name or path.startswith(name + "/") for name in listed
    )


class Sources:
    """The files below csrc/ and their includes."""

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.includes: dict[str, list[tuple[int, str]]] = {}  # path -> (line number, include path)
        for path in sorted(root.rglob("*")):
            if path.suffix in {".h", ".cpp", ".cu", ".cuh"}:
                text = path.read_text()
                self.includes[path.relative_to(root).as_posix()] = [
                    (text.count("\n", 0, found.start()) + 1, found[2])
                    for found in INCLUDE.finditer(text)
                ]

    def resolve(self, path: str, include: str) -> str | None:
        """The project file that `include` in `path` means: below csrc/, or beside the file."""
        beside = (pathlib.PurePosixPath(path).parent / include).as_posix()
        return next((name for name in (include, beside) if name in self.includes), None)

    def libraries_seen(self, path: str) -> dict[str, list[str]]:
        """Library -> the shortest chain of includes from `path` to a header of that library."""
        seen: dict[str, list[str]] = {}
        visited, queue = {path}, [[path]]
        for chain in queue:  # breadth first: the list grows while it is walked
            for _, include in self.includes[chain[-1]]:
                target = self.resolve(chain[-1], include)
                if target is None:
                    if library := library_of(include):
                        seen.setdefault(library, [*chain, include])
                elif target not in visited:
                    visited.add(target)
                    queue.append([*chain, target])
        return seen


def violations(sources: Sources) -> list[str]:
    """One line per breach: what a file sees and may not."""
    found = []
    for path, includes in sources.includes.items():
        room = room_of(path)
        excepted = EXCEPTIONS.get(path, {})
        for line, include in includes:
            target = sources.resolve(path, include)
            if target and target not in excepted and not may_include(room, target):
                found.append(f"csrc/{path}:{line}: {room} may not include {target}")
        allowed = {*ROOMS[room].libraries, *excepted}
        for library, chain in sources.libraries_seen(path).items():
            if library not in allowed:
                found.append(f"csrc/{path}: {room} may not see {library}: {' -> '.join(chain)}")
    return found + cycles(sources) + stale_exceptions(sources)


def unit_of(path: str) -> str:
    """A path without its suffix: a header and its source are one unit."""
    return path.rpartition(".")[0]


class Units:
    """What includes what, by units, below `folder` of csrc/ (empty: all of it)."""

    def __init__(self, sources: Sources, folder: str = "") -> None:
        self.arrows: dict[str, set[str]] = {}
        # Arrows that a room's list lacks, to a room whose list has the way back.
        self.num_upward = 0
        for path, includes in sources.includes.items():
            if not path.startswith(folder):
                continue
            seen = self.arrows.setdefault(unit_of(path), set())
            targets = {sources.resolve(path, include) for _, include in includes}
            for target in targets:
                if target is not None and target.startswith(folder):
                    seen.add(unit_of(target))
                    listed = may_include(room_of(path), target)
                    self.num_upward += not listed and may_include(room_of(target), path)
            seen.discard(unit_of(path))
        self.reached = {unit: self._reach(unit) for unit in self.arrows}

    def _reach(self, unit: str) -> set[str]:
        reached: set[str] = set()
        queue = [unit]
        for current in queue:
            new = self.arrows[current] - reached
            reached |= new
            queue += new
        return reached

    def cycle_of(self, unit: str) -> frozenset[str]:
        """The units that see `unit` and that it sees; empty without a cycle."""
        return frozenset(other for other in self.reached[unit] if unit in self.reached[other])

    def cycles(self) -> set[frozenset[str]]:
        return {cycle for unit in self.arrows if (cycle := self.cycle_of(unit))}

    def num_levels(self) -> int:
        """Units of the longest chain of arrows; a cycle counts as one."""
        levels: dict[str, int] = {}
        for unit in sorted(self.arrows, key=lambda unit: len(self.reached[unit] | {unit})):
            below = self.reached[unit] - self.cycle_of(unit)
            levels[unit] = 1 + max((levels[other] for other in below), default=0)
        return max(levels.values(), default=0)

    def summary(self) -> str:
        cycles = self.cycles()
        in_cycles = f" of {sum(map(len, cycles))} units" if cycles else ""
        return (
            f"{len(self.arrows)} units, {self.num_levels()} levels, "
            f"{self.num_upward} upward arrows, {len(cycles)} cycles{in_cycles}"
        )


def cycles(sources: Sources) -> list[str]:
    """One line per cycle of units."""
    return [
        f"csrc/{min(cycle)}: units include each other in a cycle: {', '.join(sorted(cycle))}"
        for cycle in Units(sources).cycles()
    ]


def stale_exceptions(sources: Sources) -> list[str]:
    """One line per exception for a file that is gone, or for a header that it does not include."""
    found = []
    for path, excepted in EXCEPTIONS.items():
        listed = "scripts/check_includes.py: EXCEPTIONS names"
        if path not in sources.includes:
            found.append(f"{listed} csrc/{path}, which is not there")
            continue
        included = {sources.resolve(path, include) for _, include in sources.includes[path]}
        found += [
            f"{listed} {name} for csrc/{path}, which does not include it"
            for name in excepted
            if name not in LIBRARIES and name not in included
        ]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    csrc = pathlib.Path(__file__).resolve().parent.parent / "csrc"
    parser.add_argument(
        "root", nargs="?", type=pathlib.Path, default=csrc, help="in place of csrc/ of this project"
    )
    parser.add_argument(
        "--summary",
        action="store_true",
        help="print how many levels of units, arrows upward and cycles each folder has",
    )
    arguments = parser.parse_args()
    root = arguments.root
    if not root.is_dir():
        parser.error(f"root must be a folder, got {root}")
    sources = Sources(root)
    breaches = violations(sources)
    print(*breaches, sep="\n", end="\n" if breaches else "")
    if arguments.summary:
        folders = sorted({path.partition("/")[0] for path in sources.includes if "/" in path})
        for folder in folders:
            print(f"{folder}/: {Units(sources, folder + '/').summary()}")
        print(f"all: {Units(sources).summary()}")
    print(f"check_includes: {len(sources.includes)} files, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
