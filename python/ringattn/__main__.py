# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m ringattn COMMAND``, or under torchrun with one process per rank."""

import argparse
import os
import sys
from collections.abc import Sequence

from ringattn import __version__
from ringattn.cli import generate, info, profile


def parser() -> argparse.ArgumentParser:
    """All commands and their options."""
    top = argparse.ArgumentParser(
        prog="python -m ringattn",
        description="Ring attention for PyTorch. Under torchrun, every process is a rank.",
    )
    top.add_argument("--version", action="version", version=f"ringattn {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    generate.add_parser(commands)
    profile.add_parser(commands)
    info.add_parser(commands)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit code: 0, 1 for a comparison that failed, 2 for wrong
    usage, said in one sentence on stderr."""
    options = parser().parse_args(arguments)
    try:
        command = {"generate": generate, "profile": profile, "info": info}[options.command]
        return command.run(options)
    except (ValueError, OSError) as error:
        rank = os.environ.get("RANK", "0")
        print(f"ringattn: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
