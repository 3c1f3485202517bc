# SPDX-License-Identifier: Apache-2.0
"""Releases of torch that the package is tested with, and the build of the library for each.

The library is built for a release of torch (2.11), not for a version (2.11.1): patch versions keep
the headers and the binary interface of their release, a new release changes both. Scripts read
TESTED from this file without importing the package, so it imports nothing of it.
"""

import re
import shlex
import sys
from pathlib import Path

#: From the oldest, which is the lower bound in pyproject.toml, to the newest.
TESTED = ("2.11", "2.12", "2.13", "2.14", "2.15")

_FOLDER = "torch-"  # of release 2.11: torch-2.11 (CMakeLists.txt)


def release(version: str) -> str:
    """The release of a version: "2.11" of "2.11.0+cu130"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def _number(version: str) -> tuple[int, int]:
    major, minor = release(version).split(".")
    return int(major), int(minor)


def check_not_older(version: str) -> None:
    """ImportError for a torch that is older than the oldest one tested."""
    oldest = TESTED[0]
    if _number(version) < _number(oldest):
        raise ImportError(
            f"torch must be {oldest} or newer for ringattn, got {version}: type "
            f"`{_pip()} install 'torch>={oldest}'`"
        )


def untested_warning(version: str) -> str | None:
    """The warning where torch is newer than the newest release tested; None where it is not."""
    if _number(version) <= _number(TESTED[-1]):
        return None
    return (
        f"ringattn is tested with torch {TESTED[0]} to {TESTED[-1]}, got {version}: "
        "its tests (scripts/test_torch.sh) show whether it works"
    )


def library_folder(package: Path | None, version: str) -> Path:
    """The folder of the library that is built for a version of torch, in the folder where the
    package is installed (None: it is not). ImportError where there is none."""
    folders = sorted(package.glob(f"{_FOLDER}*")) if package else []
    built_for = [folder.name.removeprefix(_FOLDER) for folder in folders]
    if release(version) in built_for:
        return folders[built_for.index(release(version))]
    if not folders:
        raise ImportError(
            f"ringattn must be built before it is imported, got no build: {rebuild_hint()}"
        )
    raise ImportError(_must_be_rebuilt(version.split("+")[0], ", ".join(built_for)))


def check_build(built_for: str, built_for_cuda: str | None, version: str, cuda: str | None) -> None:
    """A library built for another torch crashes or computes wrong results: ImportError before it is
    loaded. A build without CUDA goes with a torch for any CUDA, one with CUDA with that major
    version of it."""
    wanted, found = built_for.split("+")[0], version.split("+")[0]
    # Development versions and release candidates of a release differ.
    if wanted != found and not all(re.fullmatch(r"[\d.]+", text) for text in (wanted, found)):
        raise ImportError(_must_be_rebuilt(found, wanted))
    if built_for_cuda is not None and built_for_cuda.split(".")[0] != (cuda or "").split(".")[0]:
        raise ImportError(
            _must_be_rebuilt(f"{found} (CUDA {cuda})", f"{wanted} (CUDA {built_for_cuda})")
        )


def rebuild_hint() -> str:
    """The command that builds the library for the torch that is installed."""
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").exists():
        return f"type `{_pip()} install --no-build-isolation -e {shlex.quote(str(checkout))}`"
    return (
        f"type, in a checkout of ringattn, `{_pip()} install scikit-build-core ninja` and "
        f"`{_pip()} install --no-build-isolation .`"
    )


def _must_be_rebuilt(found: str, built_for: str) -> str:
    return (
        f"ringattn must be rebuilt for this torch {found}, got a build for {built_for}: "
        f"{rebuild_hint()}"
    )


def _pip() -> str:
    return f"{shlex.quote(sys.executable or 'python')} -m pip"
