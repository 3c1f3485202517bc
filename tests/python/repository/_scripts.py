# SPDX-License-Identifier: Apache-2.0
"""Copies of the scripts, and commands in the place of those that they call."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def commands_on(folder: Path, **stubs: str) -> str:
    """A PATH with what the scripts use of coreutils, and commands that are shell scripts of a line.
    Each of these writes its name and arguments to the file ``calls`` beside the folder."""
    folder.mkdir(parents=True)
    coreutils = "awk basename bash cat dirname env grep ln mkdir sh sleep sort tail tr true"
    for name in coreutils.split():
        (folder / name).symlink_to(shutil.which(name))
    for name, body in stubs.items():
        stub = folder / name.replace("_", "-")
        stub.write_text(f'#!/bin/sh\necho "$(basename $0) $*" >>{folder.parent}/calls\n{body}\n')
        stub.chmod(0o755)
    return str(folder)


def copy_of_scripts(folder: Path, **replaced: str) -> Path:
    """A checkout of scripts alone, some replaced; its build folder is its own."""
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    for name, text in replaced.items():
        (folder / "scripts" / f"{name}.sh").write_text(text)
        (folder / "scripts" / f"{name}.sh").chmod(0o755)
    return folder
