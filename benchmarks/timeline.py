# SPDX-License-Identifier: Apache-2.0
"""What every rank's device does during one ring forward: kernels and copies, as a figure.

    torchrun --nproc-per-node 4 benchmarks/timeline.py --seq-len 8192 --out build/timeline

Times are those of torch.profiler (CUPTI), which puts the devices of one host on one clock, to some
microseconds. The devices begin together and are busy before, so that host time does not show.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import ringattn
import torch
import torch.distributed as dist
from lib.cli import common_arguments, parse_under_torchrun, shape_arguments, transport_names
from lib.problem import Problem, shape_text
from lib.ranks import process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import meet
from torch.profiler import ProfilerActivity, profile

COLUMNS = ["transport", "rank", "what", "begin us", "us"]
_CALLS = 5  # of which the last is shown
_MARK = "one ring"
_SHORTEST_US = 2.0  # words and counters, not data
KINDS = {  # of work -> colour (Okabe and Ito's), row of a rank
    "attention": ("#0072B2", 0),
    "staging": ("#E69F00", 1),  # the attention kernel begins beside it
    "copy": ("#009E73", 1),
    "NCCL": ("#009E73", 1),
    "other": ("#999999", 0),
}


def kind(event: dict[str, Any]) -> str | None:
    """Which of KINDS an event of the profiler is; None for what is too short to see."""
    if event["dur"] < _SHORTEST_US or event.get("cat") not in ("kernel", "gpu_memcpy"):
        return None
    if event["cat"] == "gpu_memcpy":
        return "copy"
    name = event["name"]
    for part, what in (("nccl", "NCCL"), ("stage_kernel", "staging"), ("attention", "attention")):
        if part in name:
            return what
    return "other"


def profiled(call, transport: str) -> list[dict[str, Any]]:
    """One call's work on this rank's device; times on the host's clock, in microseconds."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(_CALLS):
            dist.barrier()
            with torch.profiler.record_function(_MARK):
                meet()
                call()
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_text())
    epoch_us = trace.get("baseTimeNanoseconds", 0) / 1e3
    events = sorted(
        (event for event in trace["traceEvents"] if "dur" in event), key=lambda event: event["ts"]
    )
    *_, shown = (
        event
        for event in events
        if event["name"] == _MARK and event.get("cat") == "user_annotation"
    )
    work = [
        (what, event)
        for event in events
        if (what := kind(event)) and shown["ts"] <= event["ts"] < shown["ts"] + shown["dur"]
    ]
    met = max(event["ts"] for _, event in work if "AllReduce" in event["name"])
    return [
        {
            "transport": transport,
            "rank": rank(),
            "what": what,
            "begin us": epoch_us + event["ts"],
            "us": event["dur"],
        }
        for what, event in work
        if event["ts"] > met
    ]


def draw(rows: list[dict[str, Any]], title: str, folder: Path, name: str) -> None:
    from matplotlib.patches import Patch
    from study.style import panels, save

    transports = list(dict.fromkeys(row["transport"] for row in rows))
    figure, axes = panels(len(transports), title, width=9.0, height=2.6, columns=1)
    for axis, transport in zip(axes, transports, strict=True):
        shown = [row for row in rows if row["transport"] == transport]
        ranks = sorted({row["rank"] for row in shown})
        for row in shown:
            colour, line = KINDS[row["what"]]
            axis.barh(2.4 * row["rank"] + line, row["us"], left=row["begin us"], color=colour)
        axis.set_yticks(
            [2.4 * r + line for r in ranks for line in (0, 1)],
            [f"rank {r} {what}" for r in ranks for what in ("kernels", "transfers")],
        )
        axis.set_xlim(0, 1.02 * max(row["begin us"] + row["us"] for row in rows))
        axis.invert_yaxis()
        axis.set_title(transport)
        axis.set_xlabel("microseconds")
        used = dict.fromkeys(row["what"] for row in shown)
        axis.legend(
            handles=[Patch(color=KINDS[what][0], label=what) for what in used],
            loc="upper left",
            bbox_to_anchor=(1.0, 1.0),
        )
    save(figure, folder, name)


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--seq-len", type=int, default=8192, metavar="S")
    shape_arguments(parser)
    parser.add_argument(
        "--transports", type=transport_names, default="symmetric,nccl", help="with commas"
    )
    arguments = parse_under_torchrun(parser)
    if arguments.device != "cuda" or arguments.out is None:
        parser.error("a timeline must have a CUDA device and --out")
    with process_group(arguments.device) as device, torch.no_grad():
        tensors = f"S {arguments.seq_len}, {shape_text(arguments)}, causal, even zigzag"
        report = Report(
            f"One ring forward over {world_size()} ranks",
            environment(device) | {"tensors": tensors},
            COLUMNS,
        )
        problem = Problem.of(arguments, arguments.seq_len, device, causal=True)
        partition = ringattn.Partition.even(problem.seq_len, world_size())
        q, k, v = (partition.shard(x, rank()) for x in problem.tensors)
        report.start()
        for transport in arguments.transports:
            call = partial(ringattn.ring_attention, q, k, v, partition, transport=transport)
            gathered: list[Any] = [None] * world_size()
            dist.all_gather_object(gathered, profiled(call, transport))
            rows = [row for own in gathered for row in own]
            begin = min(row["begin us"] for row in rows)
            for row in rows:
                report.add(row | {"begin us": row["begin us"] - begin})
        report.write(arguments.out)
        if rank() == 0:
            stem = Path(arguments.out)
            draw(report.rows, f"{report.title}: {tensors}", stem.parent, stem.name)


if __name__ == "__main__":
    main()
