#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the machine code (SASS) of every CUDA kernel of two builds; fails where any differs.

    scripts/compare_sass.py build/before build/after
    scripts/compare_sass.py old/libringattn_kernels.so new/libringattn_kernels.so

A build is an object file, a library or a build folder. A folder stands for libringattn_kernels.so
below it, or else for all CUDA objects (*.cu.o) below it. Kernels are compared by architecture and
name. Names of internal linkage hold the name of the source file and a hash of its path: both are
left out.

With --renamed, kernels whose names are in one build only are paired by their code: a mangled name
changes with every identifier in it. Kernels without a partner of the same code fail as before.
"""

import argparse
import collections
import importlib.util
import itertools
import pathlib
import re
import shutil
import subprocess
import sys

CODE = re.compile(r"^\s*code for (\w+)")
FUNCTION = re.compile(r"^\s*Function : (\S+)")
# nvcc's name of an anonymous namespace or a static symbol, behind its length.
INTERNAL = re.compile(r"(\d+)(?=_GLOBAL__N__|_INTERNAL_)")
ANONYMOUS = "12_GLOBAL__N_1"  # the C++ ABI's name of it, which c++filt knows

# (architecture, mangled name) -> the code of all kernels of that name: internal ones may share it.
Kernels = dict[tuple[str, str], list[tuple[str, ...]]]


def without_path(text: str) -> str:
    """A line of text in which names of internal linkage hold no source file."""
    rest, parts = text, []
    while found := INTERNAL.search(rest):
        parts += [rest[: found.start()], ANONYMOUS]
        rest = rest[found.end() + int(found[1]) :]
    return "".join(parts) + rest


def parse(text: str) -> Kernels:
    """The kernels in what `cuobjdump -sass` printed. A listing ends at a blank or a dotted line."""
    kernels: dict[tuple[str, str], list[list[str]]] = collections.defaultdict(list)
    architecture, listing = "", None
    for line in text.splitlines():
        if found := CODE.match(line):
            architecture, listing = found[1], None
        elif found := FUNCTION.match(line):
            listing = []
            kernels[architecture, without_path(found[1])].append(listing)
        elif not line.strip(". \t"):
            listing = None
        elif listing is not None:
            listing.append(without_path(" ".join(line.split())))
    return {key: sorted(map(tuple, listings)) for key, listings in kernels.items()}


def find_cuobjdump() -> str | None:
    """The program of the toolkit, or the one that comes with Triton, as torch for CUDA does."""
    if program := shutil.which("cuobjdump"):
        return program
    if nvcc := shutil.which("nvcc"):
        beside = pathlib.Path(nvcc).resolve().parent / "cuobjdump"
        if beside.exists():
            return str(beside)
    triton = importlib.util.find_spec("triton")
    if triton and triton.origin:
        program = pathlib.Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
        return str(program) if program.exists() else None
    return None


def files_of(build: pathlib.Path) -> list[pathlib.Path]:
    """The files that hold the kernels of a build. Objects of sources that are gone may lie around,
    hence the library first."""
    if build.is_file():
        return [build]
    return sorted(build.rglob("libringattn_kernels.so")) or sorted(build.rglob("*.cu.o"))


def kernels_of(build: pathlib.Path, cuobjdump: str) -> Kernels:
    """All kernels of a build; ValueError where it has none."""
    kernels: Kernels = {}
    for file in files_of(build):
        command = [cuobjdump, "-sass", str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            raise ValueError(f"{file} must be readable by cuobjdump, got: {done.stderr.strip()}")
        for key, listings in parse(done.stdout).items():
            kernels[key] = sorted([*kernels.get(key, []), *listings])
    if not kernels or not all(all(listings) for listings in kernels.values()):
        raise ValueError(f"{build} must hold CUDA kernels with code for a device, got none")
    return kernels


def demangle(names: list[str]) -> dict[str, str]:
    """Mangled name -> readable name, where c++filt is installed."""
    if not names or not shutil.which("c++filt"):
        return {name: name for name in names}
    done = subprocess.run(
        ["c++filt"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return dict(zip(names, done.stdout.splitlines(), strict=True))


def first_difference(old: list[tuple[str, ...]], new: list[tuple[str, ...]]) -> str:
    """Where two lists of listings part."""
    if len(old) != len(new):
        return f"{len(old)} kernels of this name in OLD, {len(new)} in NEW"
    before, after = next(pair for pair in zip(old, new, strict=True) if pair[0] != pair[1])
    lines = itertools.zip_longest(before, after, fillvalue="(end)")
    number, (left, right) = next(
        (number, pair) for number, pair in enumerate(lines, 1) if pair[0] != pair[1]
    )
    return f"line {number} of {len(before)} and {len(after)}: {left} | {right}"


def differences(old: Kernels, new: Kernels) -> list[tuple[str, str, str, str]]:
    """(what, architecture, mangled name, detail) of each kernel that is not the same in both."""
    found = []
    for architecture, name in sorted(old.keys() | new.keys()):
        before, after = old.get((architecture, name)), new.get((architecture, name))
        if before is None or after is None:
            found.append(("new" if before is None else "missing", architecture, name, ""))
        elif before != after:
            found.append(("differs", architecture, name, first_difference(before, after)))
    return found


def pair_renamed(old: Kernels, new: Kernels) -> int:
    """Removes kernels of the same architecture and code whose names are in one build only, pair by
    pair, and returns how many pairs."""
    by_code: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = collections.defaultdict(
        list
    )
    for key in new.keys() - old.keys():
        for listing in new[key]:
            by_code[key[0], listing].append(key)
    pairs = 0
    for key in old.keys() - new.keys():
        for listing in list(old[key]):
            partners = by_code[key[0], listing]
            if not partners:
                continue
            partner = partners.pop()
            for kernels, name in ((old, key), (new, partner)):
                kernels[name].remove(listing)
                if not kernels[name]:
                    del kernels[name]
            pairs += 1
    return pairs


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=pathlib.Path, help="a build: folder, library or object file")
    parser.add_argument("new", type=pathlib.Path, help="the build to compare with it")
    parser.add_argument(
        "--renamed", action="store_true", help="pair kernels that have new names by their code"
    )
    parser.add_argument("--cuobjdump", help="the program to disassemble with, if not the one found")
    arguments = parser.parse_args()
    for build in (arguments.old, arguments.new):
        if not build.exists():
            parser.error(f"a build must be a folder or a file, got {build}")
    cuobjdump = arguments.cuobjdump or find_cuobjdump()
    if cuobjdump is None:
        parser.error("cuobjdump must be installed, or named with --cuobjdump, got none")
    try:
        old, new = (kernels_of(build, cuobjdump) for build in (arguments.old, arguments.new))
    except ValueError as error:
        parser.error(str(error))
    numbers = [sum(map(len, kernels.values())) for kernels in (old, new)]
    pairs = pair_renamed(old, new) if arguments.renamed else 0
    found = differences(old, new)
    readable = demangle([name for _, _, name, _ in found])
    for what, architecture, name, detail in found:
        print(f"{what:<8} {architecture:<7} {readable[name]}" + (f"\n  {detail}" if detail else ""))
    counts = collections.Counter(what for what, _, _, _ in found)
    print(
        f"compare_sass: {numbers[0]} kernels in OLD, {numbers[1]} in NEW: "
        f"{counts['differs']} differ, {counts['missing']} missing, {counts['new']} new"
        + (f", {pairs} renamed" if arguments.renamed else "")
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
