# SPDX-License-Identifier: Apache-2.0
"""Command lines: options that benchmarks share, and the types of their arguments."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable

import torch

from lib.problem import DTYPES


def integers(text: str) -> list[int]:
    """ "1024,2048" as numbers."""
    return [int(part) for part in text.split(",")]


def at_least(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} on, got {text!r}")
        return int(text)

    return number


def positive(text: str) -> float:
    """A type of arguments: a positive number."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number, got {text!r}")
    return number


def counts(text: str) -> list[int]:
    """A type of arguments: "1024,2048" as numbers, each at least 1."""
    return [at_least(1)(part) for part in text.split(",")]


def names_of(*known: str) -> Callable[[str], list[str]]:
    """A type of arguments: some of the ``known`` names, separated by commas."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {name!r}")
        return text.split(",")

    return names


transport_names = names_of("auto", "process_group", "nccl", "symmetric")
_ON_CPU = ("auto", "process_group")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; wrong usage where the device, or its kernels for the dtype, are missing."""
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu without a CUDA device, got cuda")
    if arguments.device == "cuda" and getattr(arguments, "dtype", None) == "float64":
        parser.error("--dtype must not be float64 on CUDA, got float64")
    return arguments


def parse_under_torchrun(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """:func:`parse`; wrong usage where the process is not started by torchrun."""
    arguments = parse(parser)
    if "WORLD_SIZE" not in os.environ:
        parser.error("ranks must be started by torchrun, got a process without it")
    return arguments


def check_transports(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Wrong usage where the device does not have one of the transports."""
    for name in arguments.transports:
        if arguments.device == "cpu" and name not in _ON_CPU:
            parser.error(f"--transports must be of {', '.join(_ON_CPU)} on CPU, got {name!r}")


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of a problem.Shape."""
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def common_arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with --device and --out, the same in every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--out", metavar="STEM", help="write STEM.md, STEM.csv and STEM.json")
    return parser


def timing_arguments(description: str | None) -> argparse.ArgumentParser:
    """:func:`common_arguments`, --rounds and --warmup, for benchmarks that time contestants."""
    parser = common_arguments(description)
    parser.add_argument("--rounds", type=at_least(1), default=20, help="samples of each contestant")
    parser.add_argument("--warmup", type=at_least(0), default=3, help="rounds that do not count")
    return parser
