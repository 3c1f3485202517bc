# SPDX-License-Identifier: Apache-2.0
"""The command line: ``python -m ringattn COMMAND``, or under torchrun with one process per rank."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

import torch.distributed as dist

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
    usage and 3 for a group that failed, said in one sentence on stderr, and that of SIGPIPE where
    stdout is a closed pipe."""
    options = parser().parse_args(arguments)
    try:
        command = {"generate": generate, "profile": profile, "info": info}[options.command]
        code = command.run(options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for the last flush
        return 128 + signal.SIGPIPE
    except (ValueError, OSError, dist.DistError) as error:
        rank = os.environ.get("RANK", "0")
        failed = isinstance(error, dist.DistError)
        sentence = str(error).partition("\n")[0] if failed else error  # a stack follows
        print(f"ringattn: {'' if rank == '0' else f'rank {rank}: '}{sentence}", file=sys.stderr)
        return 3 if failed else 2


if __name__ == "__main__":
    sys.exit(main())
