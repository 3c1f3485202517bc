#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Enforces who may include what in csrc/: each folder is a room, each room names what it may see.

Kernels do not know torch, the ring does not know the dispatcher, nothing knows Python but bindings.
What the included headers of the project include counts too: no ban is dodged through a header.
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
    """A folder of csrc/: which rooms and which libraries its files may see."""

    rooms: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()


# The standard library and a room's own files are always allowed. The longest matching path rules.
ROOMS = {
    "core": Room(),
    "partition": Room(rooms=("core",)),
    "attention": Room(rooms=("core",), libraries=("torch", "cuda")),
    "attention/params.h": Room(rooms=("core",)),
    "attention/turn_order.h": Room(rooms=("core",)),
    "attention/cpu": Room(rooms=("core", "attention"), libraries=("torch",)),
    "attention/cuda": Room(
        rooms=("core", "attention/params.h", "attention/turn_order.h"), libraries=("cuda",)
    ),
    "transport": Room(rooms=("core",), libraries=("torch", "cuda")),
    "transport/cuda": Room(rooms=("core",), libraries=("cuda",)),
    "ring": Room(
        rooms=("core", "partition", "attention", "transport"), libraries=("torch", "cuda")
    ),
    "ops": Room(
        rooms=("core", "partition", "attention", "transport", "ring"),
        libraries=("torch", "cuda", "dispatcher"),
    ),
    "bindings": Room(
        rooms=(
            *("core", "partition", "attention/block_attention.h", "ring/timings.h"),
            *("transport/hostility.h", "transport/peer_wait.h", "transport/ring_group.h"),
        ),
        libraries=("torch", "python"),
    ),
}

# Single files that may see one library more, and why. A new line here needs a reason in review.
EXCEPTIONS = {
    "transport/nccl.cpp": {"nccl": "the only caller of NCCL"},
    "transport/process_group.h": {"c10d": "what the two files below share"},
    "transport/process_group.cpp": {"c10d": "the only one that sends through process groups"},
    "transport/process_group_peers.cpp": {"c10d": "the only one that knows their names and stores"},
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
    """The room whose path is the longest prefix of a path below csrc/."""
    parts = path.split("/")
    for length in range(len(parts), 0, -1):
        if (name := "/".join(parts[:length])) in ROOMS:
            return name
    raise KeyError(f"csrc/{path} is in no room: add it to ROOMS")


def may_include(room: str, path: str) -> bool:
    """Whether `path` lies in `room`, or is, or lies in, what it lists."""
    listed = (room, *ROOMS[room].rooms)
    return any(path == name or path.startswith(name + "/") for name in listed)


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
        for line, include in includes:
            target = sources.resolve(path, include)
            if target and not may_include(room, target):
                found.append(f"csrc/{path}:{line}: {room} may not include {target}")
        allowed = {*ROOMS[room].libraries, *EXCEPTIONS.get(path, ())}
        for library, chain in sources.libraries_seen(path).items():
            if library not in allowed:
                found.append(f"csrc/{path}: {room} may not see {library}: {' -> '.join(chain)}")
    stale = [path for path in EXCEPTIONS if path not in sources.includes]
    found += [
        f"scripts/check_includes.py: EXCEPTIONS names csrc/{path}, which is not there"
        for path in stale
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
    root = parser.parse_args().root
    if not root.is_dir():
        parser.error(f"root must be a folder, got {root}")
    sources = Sources(root)
    breaches = violations(sources)
    print(*breaches, sep="\n", end="\n" if breaches else "")
    print(f"check_includes: {len(sources.includes)} files, {len(breaches)} breaches")
    return 1 if breaches else 0


if __name__ == "__main__":
    sys.exit(main())
