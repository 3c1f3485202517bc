#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What a wheel holds and links: fails where a wheel would not work beside its releases of torch.

scripts/check_wheel.py dist/ringattn-0.1.0-cp311-cp311-linux_x86_64.whl
"""

import argparse
import base64
import csv
import hashlib
import pathlib
import re
import subprocess
import sys
import tempfile
import zipfile

KERNELS = "ringattn/libringattn_kernels.so"
NAME = re.compile(r"ringattn-[\d.]+-(cp3\d+)-\1-linux_\w+\.whl")
# Libraries of the system that a Python and a torch for Linux need as well.
SYSTEM = ("libc.so", "libm.so", "libgcc_s.so", "libstdc++.so", "libpthread.so", "ld-linux")
KERNELS_MAY_NEED = (*SYSTEM, "libcudart.so")
GLUE_MAY_NEED = (
    *(*KERNELS_MAY_NEED, "libringattn", "libtorch_cpu.so", "libtorch_cuda.so"),
    *("libc10.so", "libc10_cuda.so", "libnccl.so"),
)


def record_faults(wheel: zipfile.ZipFile) -> list[str]:
    """What RECORD and the archive disagree about."""
    (record,) = (name for name in wheel.namelist() if name.endswith(".dist-info/RECORD"))
    listed = {row[0]: row[1] for row in csv.reader(wheel.read(record).decode().splitlines())}
    faults = [
        f"RECORD and the archive must name the same files, got {name} in one of them"
        for name in sorted(listed.keys() ^ set(wheel.namelist()))
    ]
    for name in listed.keys() & set(wheel.namelist()) - {record}:
        digest = base64.urlsafe_b64encode(hashlib.sha256(wheel.read(name)).digest())
        if listed[name] != "sha256=" + digest.rstrip(b"=").decode():
            faults.append(f"RECORD must have the digest of {name}, got {listed[name]}")
    return faults


def layout_faults(names: list[str]) -> list[str]:
    """What is missing beside the compiled files: a release of torch needs three of them."""
    folders = {name.rsplit("/", 1)[0] for name in names if "/torch-" in name}
    faults = [] if folders else ["the wheel must serve a release of torch, got none"]
    for folder in sorted(folders):
        found = {name.rsplit("/", 1)[1].split(".")[0] for name in names if folder + "/" in name}
        if found != {"libringattn", "_C", "_build_info"}:
            faults.append(f"{folder} must hold libringattn, _C, _build_info, got {sorted(found)}")
    return faults


def dynamic_section(library: pathlib.Path) -> tuple[list[str], str]:
    """The libraries that a library needs, and where it searches for them."""
    text = subprocess.run(
        ["readelf", "-d", library], capture_output=True, text=True, check=True
    ).stdout
    path = re.search(r"RUNPATH.*\[(.*)\]", text)
    return re.findall(r"NEEDED.*\[(.*)\]", text), path[1] if path else ""


def link_faults(name: str, needed: list[str], path: str) -> list[str]:
    """What a library links that its place in the wheel cannot give it."""
    allowed = KERNELS_MAY_NEED if name == KERNELS else GLUE_MAY_NEED
    faults = [
        f"{name} must link only {', '.join(allowed)}, got {library}"
        for library in needed
        if not library.startswith(allowed)
    ]
    if not all(folder.startswith("$ORIGIN") for folder in path.split(":")):
        faults.append(f"{name} must search below $ORIGIN, got {path}")
    return faults


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs="+", type=pathlib.Path)
    faults = []
    for file in parser.parse_args().wheels:
        print(f"{file.name}: {file.stat().st_size / 1e6:.1f} MB")
        if not NAME.fullmatch(file.name):
            faults.append(f"the wheel must be named for one Python and Linux, got {file.name}")
        with zipfile.ZipFile(file) as wheel, tempfile.TemporaryDirectory() as folder:
            faults += record_faults(wheel) + layout_faults(wheel.namelist())
            for name in sorted(name for name in wheel.namelist() if name.endswith(".so")):
                needed, path = dynamic_section(pathlib.Path(wheel.extract(name, folder)))
                print(f"  {name}\n    needs {' '.join(needed)}\n    searches {path}")
                faults += link_faults(name, needed, path)
    print(*(f"check_wheel: {fault}" for fault in faults), sep="\n", end="\n" if faults else "")
    print(f"check_wheel: {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
