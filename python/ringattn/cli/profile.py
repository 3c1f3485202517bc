# SPDX-License-Identifier: Apache-2.0
"""ringattn profile: how fast every rank is, for plans made here or elsewhere.

torchrun --nproc-per-node 4 -m ringattn profile --json profiles.json

With --percentages (CUDA MPS) or --slowdowns (repeated work), one device is measured at every speed,
and the tables and the formula of ringattn.strategies are written to a folder:

python -m ringattn profile --percentages 100,90,80,70,60,50,40,30,20,10 --out speeds
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from ringattn import _library, profiling
from ringattn._distributed.groups import resolve_group
from ringattn._profiling.devices import settling_seconds
from ringattn._profiling.timers import Spread, bursts, repeat
from ringattn._profiling.workloads import ProbeWorkload
from ringattn.cli.common import (
    DTYPES,
    add_device_argument,
    aligned,
    check_json,
    process_group,
)
from ringattn.profiles import RankProfile
from ringattn.profiling import RankMeasurement, equalize, measure_ranks
from ringattn.strategies import LatencyRow, MatmulRow, Regression, read_table, write_table
from ringattn.testing import MPS, slowdown

#: Rows of the square matrices that a sweep multiplies.
SIZES = {"cuda": [2**e for e in range(6, 16)], "cpu": [2**e for e in range(6, 10)]}
#: How long a sweep waits for one percentage.
POINT_TIMEOUT_S = 300
#: What a sweep writes.
LATENCIES, MATMULS, REGRESSION = (
    "ring_attention_profile.csv",
    "matmul_mps_sweep.csv",
    "regression.json",
)


def add_parser(commands: Any) -> None:
    """Adds the command to ``argparse``'s sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "profile",
        help="how fast every rank is",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="F", help="write profiles, or a sweep, to F (default: no)"
    )
    for name, default, what in (
        ("num-heads", profiling.NUM_HEADS, "query heads"),
        ("num-kv-heads", profiling.NUM_KV_HEADS, "key/value heads"),
        ("num-layers", profiling.NUM_LAYERS, "layers of the model"),
        ("head-dim", profiling.HEAD_DIM, "numbers of a head"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{what} (default: {default})"
        )
    parser.add_argument(
        "--num-tokens",
        type=int,
        metavar="N",
        help="tokens of a typical shard (default: 8192 on CUDA, 256 on CPU)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="of tensors (default: bfloat16 on CUDA, float32 on CPU)"
    )
    add_device_argument(parser)
    parser.add_argument(
        "--seconds",
        type=float,
        metavar="T",
        help="how long all ranks compute before it counts (default: 1 on CUDA, 0.2 on CPU)",
    )
    parser.add_argument("--transport", default="auto", help="how blocks travel (default: auto)")
    parser.add_argument(
        "--noise",
        type=float,
        default=profiling.NOISE,
        metavar="X",
        help=f"smallest relative difference that counts; for speeds half of it where hardware "
        f"differs, for all twice where it is equal (default: {profiling.NOISE})",
    )
    sweep = parser.add_mutually_exclusive_group()
    sweep.add_argument(
        "--percentages",
        metavar="P,P,...",
        help="of the device's threads, through CUDA MPS (default: no sweep)",
    )
    sweep.add_argument(
        "--slowdowns", metavar="F,F,...", help="factors, 1 for full speed (default: no sweep)"
    )
    largest = " and ".join(f"{sizes[-1]} on {name.upper()}" for name, sizes in SIZES.items())
    parser.add_argument(
        "--sizes",
        metavar="N,N,...",
        help="rows of the matrices a sweep multiplies (default: powers of two from 64 to "
        f"{largest})",
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder for what a sweep finds; a sweep needs one"
    )


def run(options: argparse.Namespace) -> int:
    """Runs the command on this rank; only rank 0 prints."""
    if not 0 <= options.noise < 1:
        raise ValueError(f"--noise must lie in [0, 1), got {options.noise}")
    if options.percentages is not None or options.slowdowns is not None:
        _sweep(options)
        return 0
    for name in ("sizes", "out"):
        if getattr(options, name) is not None:
            raise ValueError(f"--{name} must come with --percentages or --slowdowns, got neither")
    check_json(options.json)
    with process_group(options.device) as (device, world_size):
        # Note: a function of its own, so that nothing of it is left when the group is destroyed.
        _profile(options, device, world_size)
    return 0


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    """What is measured: the arguments of :meth:`ProbeWorkload.on` after the device."""
    return {
        "num_heads": options.num_heads,
        "num_kv_heads": options.num_kv_heads,
        "head_dim": options.head_dim,
        "num_layers": options.num_layers,
        "num_tokens": options.num_tokens,
        "dtype": DTYPES.get(options.dtype),
    }


def _profile(options: argparse.Namespace, device: torch.device, world_size: int) -> None:
    measured = measure_ranks(
        None,
        **_shape(options),
        device=device,
        seconds=options.seconds,
        transport=options.transport,
    )
    profiles = equalize(measured, options.noise)
    if resolve_group(None).rank != 0:
        return
    for line in aligned(_rows(measured, profiles), left=("device",)):
        print(line)
    if options.json is not None:
        content = {
            **_facts(),
            "profiles": [dataclasses.asdict(profile) for profile in profiles],
            "measured": [dataclasses.asdict(measurement) for measurement in measured],
        }
        options.json.write_text(json.dumps(content, indent=1) + "\n")


def _rows(
    measured: Sequence[RankMeasurement], profiles: Sequence[RankProfile]
) -> list[tuple[str, ...]]:
    """The table: what was measured, with quartiles, and what speeds count as without the noise."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.3g}" if value < 1000 else f"{value:.0f}"

    def text(spread: Spread | None) -> str:
        if spread is None:
            return ""
        return f"{number(spread.median)} ({number(spread.low)}-{number(spread.high)})"

    columns = (
        *("rank", "attention TFLOPS", "counts as", "linear TFLOPS", "counts as", "overhead ms"),
        *("memory GB/s", "link GB/s", "latency us", "tokens", "device"),
    )
    return [
        columns,
        *(
            (
                str(rank),
                text(measurement.attention_tflops),
                number(profile.attention_tflops),
                text(measurement.linear_tflops),
                number(profile.linear_tflops),
                number(measurement.overhead_ms.median),
                text(measurement.memory_gbps),
                text(measurement.link_gbps),
                text(measurement.link_latency_us),
                str(measurement.max_tokens),
                measurement.device,
            )
            for rank, (measurement, profile) in enumerate(zip(measured, profiles, strict=True))
        ),
    ]


def _facts() -> dict[str, Any]:
    return {
        "command": sys.argv[1:],
        "versions": {
            "ringattn": _library.VERSION,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "python": platform.python_version(),
        },
    }


# ---- one device at many speeds -----------------------------------------------------------------


def _sweep(options: argparse.Namespace) -> None:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("a sweep must run on one rank, got several (leave torchrun out)")
    if options.out is None:
        raise ValueError("--out must name a folder for what the sweep finds, got none")
    if options.percentages is not None:
        for percentage in _numbers("--percentages", options.percentages):
            if percentage > 100:
                raise ValueError(f"--percentages must lie in (0, 100], got {percentage:g}")
        points = _under_mps(options)
    else:
        for factor in _numbers("--slowdowns", options.slowdowns):
            with slowdown(factor):  # refuses what is none
                pass
        points = _slowed(options)
    if options.sizes is not None:
        _sizes(options.sizes)
    options.out.mkdir(parents=True, exist_ok=True)
    check_json(options.json)
    latencies: list[LatencyRow] = []
    matmuls: list[MatmulRow] = []
    print("percentage  attention ms  of the fastest  TFLOPS of the largest product", flush=True)
    for latency, products in points:
        latencies.append(latency)
        matmuls += products
        best = min(row.latency_ms for row in latencies)
        print(
            f"{latency.mps_pct:>10.4g}  {latency.latency_ms:>12.3f}  "
            f"{best / latency.latency_ms:>14.1%}  {products[-1].tflops:>29.4g}",
            flush=True,
        )
    write_table(options.out / LATENCIES, latencies)
    write_table(options.out / MATMULS, matmuls)
    content: dict[str, Any] = {
        **_facts(),
        "latencies": [dataclasses.asdict(row) for row in latencies],
        "matmuls": [dataclasses.asdict(row) for row in matmuls],
        "regression": None,
    }
    num_sizes = len({row.size for row in matmuls})
    if len(latencies) < 3 or num_sizes < 3:
        print("no formula: it takes at least three speeds and three sizes")
    else:
        regression = Regression.fit(matmuls)
        regression.write(options.out / REGRESSION)
        print(regression)
        content["regression"] = dataclasses.asdict(regression)
    if options.json is not None:
        options.json.write_text(json.dumps(content, indent=1) + "\n")


_Point = tuple[LatencyRow, list[MatmulRow]]


def _slowed(options: argparse.Namespace) -> Iterator[_Point]:
    """This process at one factor after the other."""
    factors = _numbers("--slowdowns", options.slowdowns)
    with process_group(options.device) as (device, _):
        for factor in factors:
            with slowdown(factor), torch.no_grad():
                point = _point(options, device, 100 / factor)
            yield point


def _under_mps(options: argparse.Namespace) -> Iterator[_Point]:
    """A process for each percentage: it is fixed when a process first uses the device."""
    percentages = _numbers("--percentages", options.percentages)
    if options.device == "cpu" or not torch.cuda.is_available():
        raise ValueError("--percentages must have a CUDA device, got none (see --slowdowns)")
    command = [sys.executable, "-m", "ringattn", "profile", "--slowdowns", "1", "--device", "cuda"]
    for name in ("num_heads", "num_kv_heads", "head_dim", "num_tokens", "dtype", "seconds"):
        if getattr(options, name) is not None:
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    if options.sizes is not None:
        command += ["--sizes", options.sizes]
    with MPS() as mps, tempfile.TemporaryDirectory() as folder:
        for percentage in percentages:
            _run_under(mps, percentage, [*command, "--out", folder])
            latency, *_ = read_table(Path(folder) / LATENCIES)
            products = read_table(Path(folder) / MATMULS)
            assert isinstance(latency, LatencyRow)
            yield (
                dataclasses.replace(latency, mps_pct=percentage),
                [
                    dataclasses.replace(row, mps_pct=percentage)
                    for row in products
                    if isinstance(row, MatmulRow)
                ],
            )


def _run_under(mps: MPS, percentage: float, command: Sequence[str]) -> None:
    """Runs a command with a share of the device.

    Raises:
        OSError: it failed or took too long; the message holds what it said last.
    """
    try:
        subprocess.run(
            command,
            env={**os.environ, **mps.environment(percentage)},
            capture_output=True,
            text=True,
            timeout=POINT_TIMEOUT_S,
            check=True,
        )
        return
    except subprocess.TimeoutExpired:
        reason = f"nothing in {POINT_TIMEOUT_S} s"
    except subprocess.CalledProcessError as error:
        reason = (error.stderr.strip().splitlines() or ["no reason"])[-1]
    raise OSError(f"the process at {percentage:g} % must measure, got {reason}")


def _point(options: argparse.Namespace, device: torch.device, percentage: float) -> _Point:
    """What one device does at the speed it has now."""
    probe = ProbeWorkload.on(device, **_shape(options))
    seconds = settling_seconds(device, options.seconds)
    attention, _ = probe.attention(probe.num_tokens)
    attention()
    repeat(attention, device, seconds, at_least=1)
    latency_ms = statistics.median(repeat(attention, device, seconds / 4))

    products = []
    for size in SIZES[device.type] if options.sizes is None else _sizes(options.sizes):
        x, weight = probe.random(size, size), probe.random(size, size)

        def multiply(x: torch.Tensor = x, weight: torch.Tensor = weight) -> torch.Tensor:
            return F.linear(x, weight)

        multiply()
        times = repeat(multiply, device, seconds / 10)
        if statistics.median(times) < 1:  # the host may take longer to ask than the device to do
            times = bursts(multiply, device)
        ms = statistics.median(times)
        products.append(
            MatmulRow(
                mps_pct=percentage,
                size=size,
                dtype=str(probe.dtype).removeprefix("torch."),
                avg_ms=ms,
                tflops=2e-9 * size**3 / ms,
            )
        )
    return LatencyRow(mps_pct=percentage, latency_ms=latency_ms), products


def _numbers(name: str, text: str) -> list[float]:
    try:
        numbers = list(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{name} must be positive numbers such as 1,2,4, got {text!r}")
    return numbers


def _sizes(text: str) -> list[int]:
    sizes = _numbers("--sizes", text)
    if not all(size.is_integer() and size < 2**20 for size in sizes):  # 2 TB a matrix
        raise ValueError(f"--sizes must be whole numbers below 2**20, got {text!r}")
    return [int(size) for size in sizes]
