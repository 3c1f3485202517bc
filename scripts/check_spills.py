#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Registers and spills of every CUDA kernel, as a table; fails on a spill or a serialised wgmma.

    scripts/check_spills.py build/cmake-cpython-311     # the *.ptxas files of a build folder
    scripts/check_spills.py --log build.log             # the output of a build with -Xptxas -v

A build folder holds *.ptxas files when it was configured with RINGATTN_PTXAS_VERBOSE=ON and with
scripts/record_ptxas.py as CMAKE_CUDA_COMPILER_LAUNCHER (scripts/setup.sh does both).
"""

import argparse
import dataclasses
import json
import pathlib
import re
import shutil
import subprocess
import sys

# Kernels that may spill, by a regular expression on their demangled name, and why.
MAY_SPILL: dict[str, str] = {
    r"block_attention_backward_kernel<.*BackwardTileShape<float, 256>": "8 bytes, read once a tile",
}

ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
PROPERTIES = re.compile(r"Function properties for (\S+)")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SHARED = re.compile(r"(\d+) bytes smem")
# C7510 to C7519: "Potential Performance Loss: wgmma.mma_async instructions are serialized".
SERIALISED = re.compile(r"\(C751\d\).*")
# What a demangled name says without helping to tell kernels apart.
NOISE = {r"\(anonymous namespace\)::|<unnamed>::|\bringattn::(\w+::)*|^void |\(\w+\)(?=\d)": ""}
NOISE |= {r"\b__half\b": "float16", r"\b__nv_bfloat16\b": "bfloat16"}


@dataclasses.dataclass
class Kernel:
    mangled: str
    architecture: str
    name: str = ""
    registers: int = 0
    stack: int = 0  # bytes
    spill_stores: int = 0  # bytes
    spill_loads: int = 0  # bytes
    shared: int = 0  # bytes, static

    @property
    def spills(self) -> bool:
        return self.spill_stores + self.spill_loads > 0

    @property
    def excuse(self) -> str | None:
        return next((why for name, why in MAY_SPILL.items() if re.search(name, self.name)), None)


def parse(text: str) -> tuple[list[Kernel], list[str]]:
    """Kernels, and wgmma warnings, of what `ptxas -v` printed."""
    kernels: list[Kernel] = []
    warnings: list[str] = []
    about_kernel = False  # ptxas also reports functions that a kernel calls
    for line in text.splitlines():
        if found := ENTRY.search(line):
            kernels.append(Kernel(found[1], found[2]))
            about_kernel = True
        elif found := PROPERTIES.search(line):
            about_kernel = bool(kernels) and found[1] == kernels[-1].mangled
        elif found := SERIALISED.search(line):
            warnings.append(found[0])
        elif kernels and (found := FRAME.search(line)):
            kernels[-1].spill_stores += int(found[2])
            kernels[-1].spill_loads += int(found[3])
            if about_kernel:
                kernels[-1].stack = int(found[1])
        elif kernels and (found := REGISTERS.search(line)):
            kernels[-1].registers = int(found[1])
            if found := SHARED.search(line):
                kernels[-1].shared = int(found[1])
    return kernels, warnings


def demangle(kernels: list[Kernel]) -> None:
    """Sets the readable name: no return type, no argument list, no anonymous namespaces."""
    names = [kernel.mangled for kernel in kernels]
    if names and shutil.which("c++filt"):
        command = ["c++filt", "--no-params"]
        names = subprocess.run(
            command, input="\n".join(names), capture_output=True, text=True, check=True
        ).stdout.splitlines()
    for kernel, name in zip(kernels, names, strict=True):
        for noise, instead in NOISE.items():
            name = re.sub(noise, instead, name)
        kernel.name = name


def print_table(kernels: list[Kernel]) -> None:
    print(
        f"{'arch':<8} {'regs':>4} {'stack':>6} {'spill st':>8} {'spill ld':>8} {'smem':>6}  kernel"
    )
    for kernel in sorted(kernels, key=lambda kernel: (kernel.name, kernel.architecture)):
        note = ""
        if kernel.spills:
            note = f"  may spill: {kernel.excuse}" if kernel.excuse else "  SPILLS"
        print(
            f"{kernel.architecture:<8} {kernel.registers:>4} {kernel.stack:>6} "
            f"{kernel.spill_stores:>8} {kernel.spill_loads:>8} {kernel.shared:>6}  "
            f"{kernel.name}{note}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("build_dir", nargs="?", type=pathlib.Path, help="a CMake build folder")
    parser.add_argument("--log", type=pathlib.Path, help="output of a build with -Xptxas -v")
    arguments = parser.parse_args()
    if (arguments.build_dir is None) == (arguments.log is None):
        parser.error("give a build folder or --log FILE")

    if arguments.log:
        files = [arguments.log]
    else:
        # The list of commands, not the files that lie around: sources get renamed.
        commands = json.loads((arguments.build_dir / "compile_commands.json").read_text())
        objects = [
            words[words.index("-o") + 1]
            for command in commands
            if command["file"].endswith(".cu") and (words := command["command"].split())
        ]
        files = [arguments.build_dir / f"{name}.ptxas" for name in objects]
        if missing := [str(path) for path in files if not path.exists()]:
            print("check_spills: compiled without scripts/record_ptxas.py:", *missing, sep="\n  ")
            return 1
        if not files:
            print("check_spills: no CUDA kernel was built")
            return 0

    kernels: list[Kernel] = []
    warnings: list[str] = []
    for file in files:
        more_kernels, more_warnings = parse(file.read_text(errors="replace"))
        kernels += more_kernels
        warnings += [f"{file.name.removesuffix('.o.ptxas')}: {text}" for text in more_warnings]
    demangle(kernels)
    print_table(kernels)
    print(*warnings, sep="\n", end="\n" if warnings else "")

    spilling = [kernel for kernel in kernels if kernel.spills and not kernel.excuse]
    print(
        f"check_spills: {len(kernels)} kernels, {len(spilling)} spill, "
        f"{len(warnings)} warnings of serialised wgmma"
    )
    if not kernels:
        print("check_spills: nothing of `ptxas -v` was found: is RINGATTN_PTXAS_VERBOSE on?")
    return 1 if spilling or warnings or not kernels else 0


if __name__ == "__main__":
    sys.exit(main())
