# SPDX-License-Identifier: Apache-2.0
"""Ring attention over all ranks, beside one device, PyTorch's context_parallel and other rings.

    torchrun --nproc-per-node 4 benchmarks/ring.py --seq-lens 16384,65536,131072 --out build/ring
    torchrun --nproc-per-node 2 benchmarks/ring.py --device cpu --dtype float32 --heads 8

Every row is measured in one run. Ideal is the time of the fastest kernel on one device for the
whole problem, divided by W (for devices that differ: divided by the sum of their speeds). On CPU
the ranks share the cores of one machine, so ideal is one process that uses all of them. `wait
share` is the part of a ring's time in which attention stood still because a block had not
arrived, on the worst rank, with blocks attended one by one. Calls begin on a device that is busy,
so that host time does not count: `host us` is how long it takes to enqueue one, the device idle
before it, or before the first of those in a row. `--launches` adds calls from an idle device, calls
back to back, and CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import ringattn
import torch
from attention import contestants as single_device_contestants
from lib.cli import (
    check_transports,
    integers,
    names_of,
    parse_under_torchrun,
    shape_arguments,
    timing_arguments,
    transport_names,
)
from lib.problem import Problem, busiest, shape_text
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, Timing, max_error, measure
from peers import contenders, ring_flash_attn_package, torch_context_parallel, zigzag_on_torch

PEERS = {
    "context_parallel": torch_context_parallel,
    "zigzag on torch": zigzag_on_torch,
    "ring_flash_attn": ring_flash_attn_package,
}
_LONG = 32768  # tokens; of more, fewer calls in a row make a sample
_WATCHED_CALLS = 3  # whose waits are looked at
_HOST_SAMPLES = 30  # of how long the host takes for a call
COLUMNS = [
    *("S", "what", "ms", "p10", "p90", "share of ideal", "wait share", "host us", "max error"),
    "note",
]


def partitions(problem: Problem, arguments) -> dict[str, ringattn.Partition]:
    """Name -> partition: the even ones, and the one of --shares."""
    found = {
        layout: ringattn.Partition.even(problem.seq_len, world_size(), layout=layout)
        for layout in arguments.layouts
    }
    if arguments.shares:
        shares = [int(share) for share in arguments.shares.split(":")]
        ends = [problem.seq_len * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
        lengths = [end - begin for begin, end in pairwise(ends)]
        found[f"zigzag {arguments.shares}"] = ringattn.Partition.zigzag(lengths)
    return found


def captured(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """The same call as a CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def rings(
    problem: Problem, splits: dict[str, ringattn.Partition], transports: list[str]
) -> list[Contestant]:
    """ringattn.ring_attention, for each partition and transport."""
    found = []
    for name, partition in splits.items():
        q, k, v = (partition.shard(x, rank()) for x in problem.tensors)
        positions = partition.position_ids(rank(), problem.q.device)
        for transport in transports:
            call = partial(
                ringattn.ring_attention,
                *(q, k, v, partition),
                causal=problem.causal,
                transport=transport,
            )
            found.append(Contestant(f"ringattn {name} {transport}", call, positions))
    return found


def launches(contestant: Contestant, in_a_row: int) -> list[Contestant]:
    """The same call, begun in other ways; some of them calls in a row."""
    name = contestant.name
    row = {"back_to_back": in_a_row, "note": f"{in_a_row} calls in a row"}
    others = [
        dataclasses.replace(contestant, name=f"{name}, from idle", from_idle=True),
        dataclasses.replace(contestant, name=f"{name}, back to back", **row),
    ]
    if "symmetric" in name:
        graph = dataclasses.replace(
            contestant, name=f"{name}, CUDA graph", call=captured(contestant.call)
        )
        others += [graph, dataclasses.replace(graph, name=f"{graph.name}, back to back", **row)]
    return others


def singles(problem: Problem) -> list[Contestant]:
    """One device on the whole problem: each rank its own, on CPU rank 0 with all cores."""
    found = [item for item in single_device_contestants(problem) if item.name != "ringattn fold"]
    if not problem.q.is_cuda:
        found = [alone_with_all_cores(contestant) for contestant in found]
    return [dataclasses.replace(item, name=f"one device: {item.name}") for item in found]


def alone_with_all_cores(contestant: Contestant) -> Contestant:
    def call() -> torch.Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        try:
            with contestant.around():
                return contestant.call()
        finally:
            torch.set_num_threads(before)

    return Contestant(contestant.name, call, contestant.positions, alone=True)


def ideal_ms(alone: list[Contestant], timings: dict[str, Timing]) -> float:
    """The fastest single device's time, divided by the sum of the ranks' speeds relative to it."""
    if alone[0].alone:
        return min(timings[contestant.name].median for contestant in alone)
    own_best = min(timings[contestant.name].own_median for contestant in alone)
    return 1.0 / (1.0 / from_all_ranks([own_best])).sum().item()


def wait_share(call) -> float:
    """Part of a ring call's time in which attention waited for data; the worst rank's."""
    with ringattn.record_timings() as timings:
        for _ in range(_WATCHED_CALLS):
            call()
    total = timings.summary()
    share = total["wait_ms"] / max(total["wait_ms"] + total["attention_ms"], 1e-9)
    return from_all_ranks([share]).max().item()


def host_us(contestant: Contestant) -> float:
    """Microseconds until a call on CUDA returns, the device idle before it or before the first of
    those in a row; the slowest rank's median."""
    times = []
    for _ in range(_HOST_SAMPLES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(contestant.back_to_back):
            contestant.call()
        times.append(1e6 * (time.perf_counter() - start) / contestant.back_to_back)
    torch.cuda.synchronize()
    return from_all_ranks([statistics.median(times)]).max().item()


def compete(report: Report, problem: Problem, arguments) -> None:
    """One problem: a row for each contestant."""
    splits = partitions(problem, arguments)
    ours = rings(problem, splits, arguments.transports)
    alone = singles(problem)
    peers = []
    for name, peer in PEERS.items():
        peers += contenders(name, peer, problem, report)

    launched = []
    if arguments.launches and problem.q.is_cuda:
        watched = [item for item in ours if not item.name.endswith("process_group")]
        in_a_row = 10 if problem.seq_len <= _LONG else 4
        launched = [other for item in watched for other in launches(item, in_a_row)]
    timed_on_host = [*ours, *(item for item in launched if not item.from_idle)]
    field = [*ours, *launched, *alone, *peers]
    errors = {contestant.name: max_error(contestant, problem) for contestant in field}
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    ideal = ideal_ms(alone, timings)
    most = {
        f"ringattn {name} ": busiest(split, causal=problem.causal) for name, split in splits.items()
    }
    for contestant in field:
        timing = timings[contestant.name]
        in_ring = contestant not in alone
        note = contestant.note
        for name, shares in most.items():
            if contestant.name.startswith(name) and shares > 1.005:
                allowed = 100 * ideal * shares / timing.median
                note = f"busiest rank: {shares:.2f} even shares; {allowed:.1f} % of what it allows"
        report.add(
            {
                "S": problem.seq_len,
                "what": contestant.name,
                **timing.columns(),
                "share of ideal": ideal / timing.median if in_ring else None,
                "wait share": wait_share(contestant.call) if contestant in ours else None,
                "host us": host_us(contestant)
                if contestant in timed_on_host and problem.q.is_cuda
                else None,
                "max error": errors[contestant.name],
                "note": note,
            }
        )


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--seq-lens", type=integers, default=[8192], help="S, with commas")
    shape_arguments(parser)
    parser.add_argument("--dense", action="store_true", help="no causal mask")
    parser.add_argument("--transports", type=transport_names, default="auto", help="with commas")
    layouts = names_of("zigzag", "contiguous")
    parser.add_argument("--layouts", type=layouts, default="zigzag,contiguous", help="with commas")
    parser.add_argument("--shares", help="of the ranks, as 3:1:2:2: one more partition")
    parser.add_argument(
        "--launches", action="store_true", help="also from idle, back to back, as a CUDA graph"
    )
    arguments = parse_under_torchrun(parser)
    check_transports(parser, arguments)

    with process_group(arguments.device) as device:
        mask = "dense" if arguments.dense else "causal"
        header = environment(device) | {
            "tensors": f"{shape_text(arguments)}, {mask}",
            "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
            "ideal": "one process with all cores"
            if device.type == "cpu"
            else "the fastest kernel on one device, divided by W",
        }
        report = Report(f"Ring attention over {world_size()} ranks", header, COLUMNS)
        report.start()
        for seq_len in arguments.seq_lens:
            problem = Problem.of(arguments, seq_len, device, causal=not arguments.dense)
            compete(report, problem, arguments)
            report.write(arguments.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
