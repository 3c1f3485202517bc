# SPDX-License-Identifier: Apache-2.0
"""Rings of unequal ranks: every way to split a sequence, at every length, on every set of ranks.

    python benchmarks/heterogeneous.py sweep --percentages 90,50,25,10 --out build/het
    python benchmarks/heterogeneous.py sweep --ranks 4 --slow-ranks 1,2,3 --percentages 50,25,10
    python benchmarks/heterogeneous.py sweep --positions every --what attention,layer
    python benchmarks/heterogeneous.py rebalance --out build/het_rebalance
    python benchmarks/plot.py build/het.csv --trace build/het_rebalance.csv --out build/figures

    python benchmarks/heterogeneous.py sweep --out build/het --then rebalance --out build/trace

Starts its own ranks, once for each set of percentages: under CUDA MPS, with a private daemon, each
with its CUDA_MPS_ACTIVE_THREAD_PERCENTAGE (`--throttle mps`), or repeating their work (`repeat`,
any device). A percentage is a request; results refer to the measured speeds: `rank*_tflops` are
speeds of the whole problem on one rank, with all ranks computing at once until clocks settle.
The ideal is the time that ranks of these speeds would take together without any overhead.
Equal ranks are always in the sweep: slowdowns refer to them. Where there are more ranks than GPUs,
--ranks-per-gpu gives each its part of one, and percentages refer to that part.

Finished cells are kept in STEM.cells.jsonl and are not run again; --report-only runs none. Writes
STEM.{csv,json,md} and STEM_findings.{csv,json,md}, of the finished cells where it is interrupted.
Parts behind --then are further studies of the same command, in order of importance. Cells of all
parts with the same ranks share the start of these ranks and their profiles. Parts may share a STEM
if all their settings are the same. SEQ_LEN (or SWEEP_SEQ_LEN) and WEAK_GPU_PERCENTAGE (or
SWEEP_SLOWDOWN_PCT) stand in for --seq-lens and --percentages. STRONG_GPU_PERCENTAGE must be 100.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from lib.cli import at_least, integers, names_of, timing_arguments
from lib.problem import DTYPES, shape_text
from lib.report import PERCENTAGE_VARIABLES, SEQ_LEN_VARIABLES, Report, command
from ringattn import strategies
from study import tables
from study.rebalancing import SCENARIOS
from study.running import Part, run
from study.settings import SWEEP, Cell, Settings, Store, cells_path, check_writable, set_name
from study.splits import STRATEGIES

_SMALL = {  # default sizes without a GPU
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 64,
    "hidden_dim": 512,
    "dtype": "float32",
    "seq_lens": [1024, 2048],
}
THEN = "--then"  # between parts of the command line
STRONG_VARIABLE = "STRONG_GPU_PERCENTAGE"  # beside that of weak ranks, in the earlier study
_LLAMA_3_8B = {
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "hidden_dim": 14336,
    "dtype": "bfloat16",
    "seq_lens": [4096, 8192, 16384, 32768, 65536, 131072],
}


# ---- what is to be measured --------------------------------------------------------------------


def sweep_sets(arguments: argparse.Namespace) -> list[tuple[int, ...]]:
    """Percentages of the ranks, equal ones first, each set once."""
    world_size = arguments.ranks
    sets = [(100,) * world_size]
    if arguments.sets is not None:
        sets += arguments.sets
    else:
        for percentage in arguments.percentages:
            for slow in arguments.slow_ranks:
                base = (100,) * (world_size - slow) + (percentage,) * slow
                turns = world_size if arguments.positions == "every" else 1
                sets += [base[turn:] + base[:turn] for turn in range(turns)]
    return list(dict.fromkeys(sets))


def cells_of(arguments: argparse.Namespace) -> list[Cell]:
    if arguments.study == "rebalance":
        everyone = (100,) * arguments.ranks
        return [
            Cell(scenario, everyone, what, seq_len)
            for scenario in arguments.scenarios
            for what in arguments.what
            for seq_len in arguments.seq_lens
        ]
    return [
        Cell(SWEEP, percentages, what, seq_len)
        for percentages in sweep_sets(arguments)
        for what in arguments.what
        for seq_len in arguments.seq_lens
    ]


def settings_of(arguments: argparse.Namespace) -> Settings:
    # A rebalancing trace changes speeds while it runs, which MPS cannot.
    throttle = "repeat" if arguments.study == "rebalance" else arguments.throttle
    return Settings(
        device=arguments.device,
        throttle=throttle,
        ranks_per_gpu=arguments.ranks_per_gpu,
        transport=arguments.transport,
        dtype=arguments.dtype,
        heads=arguments.heads,
        kv_heads=arguments.kv_heads,
        head_dim=arguments.head_dim,
        hidden_dim=arguments.hidden_dim,
        strategies=tuple(arguments.strategies),
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        cell_seconds=arguments.cell_seconds,
        settle_seconds=arguments.settle_seconds,
        watched=arguments.watched,
        requests=arguments.requests,
        noise=arguments.noise,
        lut=arguments.lut,
        regression=arguments.regression,
    )


# ---- reports -----------------------------------------------------------------------------------


class WandbLog:
    """Rows to Weights & Biases, where that was asked for: with all that follows from them, which
    takes all cells, those of earlier runs too."""

    def __init__(self, wanted: bool, config: dict[str, Any]) -> None:
        self._run = None
        if wanted:
            import wandb

            self._run = wandb.init(project="ringattn", job_type="heterogeneous", config=config)

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        if self._run is not None:
            for row in rows:
                self._run.log(row)

    def close(self) -> None:
        if self._run is not None:
            self._run.finish()


def headers_of(of_cells: Sequence[dict[str, str]]) -> dict[str, str]:
    """What the ranks said of their machine, cell by cell: each fact once, or all there are of it,
    where cells were measured on other days or with other commits."""
    names = dict.fromkeys(name for header in of_cells for name in header)
    return {
        name: ", ".join(dict.fromkeys(header[name] for header in of_cells if name in header))
        for name in names
    }


def write_reports(
    arguments: argparse.Namespace, cells: Sequence[Cell], settings: Settings, store: Store
) -> list[dict[str, Any]]:
    """The whole table, which it writes."""
    header = headers_of([store.header(settings, cell) for cell in cells])
    header |= {
        "tensors": f"{shape_text(settings)}, causal",
        "throttle": f"{settings.throttle}, transport {settings.transport}"
        + (f", {settings.ranks_per_gpu} ranks on a GPU" if settings.ranks_per_gpu > 1 else ""),
        "profiles": f"all ranks at once, settled for {settings.settle_seconds:g} s",
    }
    rows = [row for cell in cells for row in store.rows(settings, cell)]
    world_size = arguments.ranks
    if arguments.study == "rebalance":
        header["noise"] = f"{settings.noise:g}, of what the rebalancer is told, beside the real"
        table, columns = rows, tables.trace_columns(world_size)
        found, found_columns = tables.trace_findings(rows), tables.TRACE_FINDING_COLUMNS
    else:
        header["rounds"] = (
            f"up to {settings.rounds}, medians; all strategies, and every rank alone, "
            "interleaved, each over the same stretch since it began"
        )
        table, columns = tables.sweep_rows(rows), tables.sweep_columns(world_size)
        found, found_columns = tables.findings(table), tables.FINDING_COLUMNS
    title = f"Unequal ranks, {arguments.study}, {world_size} ranks"
    # The whole table is for files; people look at what follows from it.
    Report(title, header, columns, table).write(arguments.out)
    summary = Report(f"{title}: findings", header, found_columns)
    summary.start()
    for row in found:
        summary.add(row)
    summary.write(arguments.out and f"{arguments.out}_findings")
    return table


# ---- command line ------------------------------------------------------------------------------


def percentage_sets(text: str) -> list[tuple[int, ...]]:
    """ "100,50;50,100" as tuples."""
    return [tuple(integers(part)) for part in text.split(";")]


def of_environment(*variables: str) -> list[int] | None:
    """The numbers of the first variable that is set to anything."""
    for name in variables:
        text = os.environ.get(name, "")
        try:
            if text:
                return integers(text)
        except ValueError:
            raise ValueError(f"{name} must be whole numbers with commas, got {text!r}") from None
    return None


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """One part of the command line, or all of it."""
    parser = timing_arguments(__doc__)
    parser.add_argument("study", choices=["sweep", "rebalance"])
    parser.add_argument("--ranks", type=int, default=2, metavar="W")
    parser.add_argument("--seq-lens", type=integers, help="S, with commas")
    parser.add_argument("--what", type=names_of("attention", "layer"), default=["attention"])
    parser.add_argument(
        *("--throttle",), choices=["mps", "repeat"], help="default: mps on CUDA, repeat on CPU"
    )
    parser.add_argument("--ranks-per-gpu", type=at_least(1), default=1, help="under MPS (1)")
    parser.add_argument("--transport", default="auto")
    for size in ("heads", "kv-heads", "head-dim", "hidden-dim"):
        parser.add_argument(f"--{size}", type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    parser.add_argument("--settle-seconds", type=float, help="default: 1 on CUDA, 0.1 on CPU")
    parser.set_defaults(rounds=5)
    parser.add_argument("--cell-seconds", type=float, default=20.0, help="of samples, about")
    parser.add_argument("--limit-seconds", type=float, default=3600.0, help="of one start of ranks")
    parser.add_argument("--watched", type=int, default=12, help="requests before `rebalanced`")
    parser.add_argument("--report-only", action="store_true", help="of the cells that are there")
    parser.add_argument("--wandb", action="store_true", help="log to Weights & Biases as well")

    sweep = parser.add_argument_group("sweep")
    sweep.add_argument("--percentages", type=integers, help="of slow ranks (90,80,...,10)")
    sweep.add_argument("--slow-ranks", type=integers, default=[1], help="how many, with commas")
    sweep.add_argument("--positions", choices=["last", "every"], default="last")
    sweep.add_argument("--sets", type=percentage_sets, help='instead: "100,50;10,100"')
    sweep.add_argument("--strategies", type=names_of(*STRATEGIES), default=list(STRATEGIES))
    sweep.add_argument("--lut", metavar="CSV", help="table of `lut` (this run's matrix products)")
    sweep.add_argument("--regression", metavar="JSON", help="of `formula` (the published one)")

    rebalance = parser.add_argument_group("rebalance")
    rebalance.add_argument("--scenarios", type=names_of(*SCENARIOS), default=list(SCENARIOS))
    rebalance.add_argument("--requests", type=int, default=200)
    rebalance.add_argument("--noise", type=float, default=0.02, help="of observations, relative")
    arguments = parser.parse_args(words)

    on_cuda = arguments.device == "cuda"
    if arguments.throttle is None:
        arguments.throttle = "mps" if on_cuda else "repeat"
    if arguments.settle_seconds is None:
        arguments.settle_seconds = 1.0 if on_cuda else 0.1
    try:
        seq_lens = of_environment(*SEQ_LEN_VARIABLES)
        percentages = of_environment(*PERCENTAGE_VARIABLES)
        strong = of_environment(STRONG_VARIABLE) or [100]
    except ValueError as error:
        parser.error(str(error))
    if arguments.study == "sweep" and arguments.sets is None and strong != [100]:
        got = os.environ[STRONG_VARIABLE]
        parser.error(f"{STRONG_VARIABLE} must be 100 (others: --sets), got {got}")
    arguments.seq_lens = arguments.seq_lens or seq_lens
    arguments.percentages = (
        arguments.percentages or percentages or [90, 80, 70, 60, 50, 40, 30, 20, 10]
    )
    for name, value in (_LLAMA_3_8B if on_cuda else _SMALL).items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    check(parser, arguments)
    return arguments


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    world_size = arguments.ranks
    if "TORCHELASTIC_RUN_ID" in os.environ or os.environ.get("WORLD_SIZE", "1") != "1":
        parser.error("ranks must be --ranks, which this starts by itself, got a start by torchrun")
    if arguments.throttle == "mps" and arguments.device == "cpu":
        parser.error("--throttle must be repeat on CPU, got mps")
    if arguments.ranks_per_gpu > 1 and arguments.device == "cpu":
        parser.error(f"--ranks-per-gpu must be 1 on CPU, got {arguments.ranks_per_gpu}")
    room = torch.cuda.device_count() * arguments.ranks_per_gpu
    if arguments.device == "cuda" and room < world_size and not arguments.report_only:
        places = "the number of devices times --ranks-per-gpu"
        parser.error(f"--ranks must be at most {places}, {room}, got {world_size}")
    for name, least in (
        ("ranks", 2),
        ("seq_lens", 1),
        ("requests", 1),
        ("watched", 0),
        ("noise", 0),
    ):
        values = getattr(arguments, name)
        for value in values if isinstance(values, list) else [values]:
            if not least <= value < math.inf:
                option = name.replace("_", "-")
                parser.error(f"--{option} must be at least {least}, got {value}")
    if not all(0 < slow < world_size for slow in arguments.slow_ranks):
        parser.error(f"--slow-ranks must lie in 1..{world_size - 1}, got {arguments.slow_ranks}")
    for percentages in sweep_sets(arguments):
        if len(percentages) != world_size or not all(0 < p <= 100 for p in percentages):
            parser.error(
                f"--sets and --percentages must give {world_size} numbers in 1..100, "
                f"got {set_name(percentages)}"
            )
    for name in ("cell_seconds", "settle_seconds", "limit_seconds"):
        if not 0 < getattr(arguments, name) < math.inf:
            option = name.replace("_", "-")
            parser.error(f"--{option} must be positive, got {getattr(arguments, name)}")
    try:
        if arguments.lut is not None:
            strategies.read_table(arguments.lut)
        if arguments.regression is not None:
            strategies.Regression.read(arguments.regression)
    except (OSError, ValueError) as error:
        parser.error(f"--lut and --regression must be tables that can be read, got: {error}")
    if arguments.wandb and importlib.util.find_spec("wandb") is None:
        parser.error("--wandb must find the package wandb, got none (pip install wandb)")
    if arguments.report_only and arguments.out is None:
        parser.error("--report-only must have the --out of an earlier command, got none")
    try:
        if arguments.out is not None:
            check_writable(cells_path(arguments.out))
    except OSError as error:
        parser.error(f"--out must be the stem of files that can be written, got: {error}")


def parts_of(words: Sequence[str]) -> list[Part]:
    """What the command line asks for, part by part."""
    parts: list[Part] = []
    while words:
        end = words.index(THEN) if THEN in words else len(words)
        arguments = parse(words[:end])
        settings = settings_of(arguments)
        alike = [part for part in parts if arguments.out and part.arguments.out == arguments.out]
        for part in alike:
            kinds = [(of.study, of.ranks) for of in (part.arguments, arguments)]
            if part.settings != settings or kinds[0] != kinds[1]:
                sys.exit(f"parts with one --out must have the same settings, got {arguments.out}")
        path = cells_path(arguments.out) if arguments.out else None
        try:
            store = alike[0].store if alike else Store(path)
        except ValueError as error:
            sys.exit(str(error))
        own = command(words[:end])
        parts.append(Part(arguments, settings, cells_of(arguments), store, own))
        words = words[end + 1 :]
    return parts


def reports(parts: Sequence[Part]) -> None:
    """Writes one report per stem: all finished cells of these settings, of earlier commands too."""
    for first in {id(part.store): part for part in reversed(parts)}.values():
        asked = [cell for part in parts if part.store is first.store for cell in part.cells]
        there = [
            cell
            for cell in first.store.cells(first.settings)
            if (cell.kind == SWEEP) == (first.arguments.study == "sweep")
            and len(cell.percentages) == first.arguments.ranks
        ]
        cells = [cell for cell in dict.fromkeys([*asked, *there]) if cell in there]
        if cells:
            log = WandbLog(first.arguments.wandb, vars(first.arguments))
            try:
                log.add(write_reports(first.arguments, cells, first.settings, first.store))
            finally:
                log.close()


def main() -> None:
    # Told to end, it ends as after an error: no rank and no daemon stays behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    parts = parts_of(sys.argv[1:] or [""])
    wanted = [part for part in parts if not part.arguments.report_only]
    for part in parts:
        if part.arguments.report_only and not part.done():
            sys.exit(
                f"{part.arguments.out}.cells.jsonl must have cells of these settings, got none"
            )
    try:
        problems = run(wanted)
    finally:
        reports(parts)
    if problems:
        sys.exit(
            "\n".join([*problems, "finished cells are kept; the same command goes on from here"])
        )


if __name__ == "__main__":
    main()
