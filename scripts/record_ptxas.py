#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""CMAKE_CUDA_COMPILER_LAUNCHER that keeps what ptxas says beside the object file.

With RINGATTN_PTXAS_VERBOSE=ON, `x.cu.o` gets an `x.cu.o.ptxas` that scripts/check_spills.py reads,
so that no kernel compiles a second time to learn its registers. Warnings and errors pass through.
"""

import pathlib
import subprocess
import sys


def main(command: list[str]) -> int:
    if "-c" not in command or "-o" not in command:
        return subprocess.run(command).returncode
    result = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    is_routine = result.returncode == 0 and "(C75" not in result.stdout
    for line in result.stdout.splitlines():
        # What `ptxas -v` adds: "ptxas info    : Used 64 registers" and an indented line of spills.
        if not (is_routine and ("ptxas info" in line or "bytes spill stores" in line)):
            print(line, file=sys.stderr)
    if result.returncode == 0:
        target = pathlib.Path(command[command.index("-o") + 1])
        target.with_name(target.name + ".ptxas").write_text(result.stdout)
    return result.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
