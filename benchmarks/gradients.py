# SPDX-License-Identifier: Apache-2.0
"""Attention in training: the forward, the backward, and both together.

    python benchmarks/gradients.py --seq-lens 4096,16384 --out build/gradients
    torchrun --nproc-per-node 4 benchmarks/gradients.py --out build/gradients-ring
    python benchmarks/gradients.py --device cpu --dtype float32 --heads 8 --seq-lens 1024

In one process: ringattn.block_attention beside PyTorch's kernels. Under torchrun: ring_attention
over all ranks, one row for each transport, beside one device. Ideal is the fastest time of one
device, ours included, measured on rank 0 alone, divided by W.

The backward is timed alone, of a forward that is kept; `both` is a forward and its backward. A
backward counts 2.5 times the operations of its forward. The error is the largest difference of dq,
dk and dv from those of float64 attention, of the last key head, where S is at most 4096.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial

import ringattn
import torch
from lib.cli import counts, parse, shape_arguments, timing_arguments, transport_names
from lib.problem import Problem, shape_text
from lib.ranks import process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, measure
from peers import torch_sdpa
from ringattn import reference

COLUMNS = ["S", "mask", "what", "pass", "ms", "p10", "p90", "TFLOP/s", "x best", "max error"]
RING_COLUMNS = [*COLUMNS[:-2], "share of ideal", "max error"]
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
LONGEST_CHECK = 4096
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def gradients(attend: Attend, inputs: Sequence[torch.Tensor], of_out: torch.Tensor) -> torch.Tensor:
    """dq of a forward and its backward."""
    return torch.autograd.grad(attend(*inputs), inputs, of_out)[0]


def passes(contestant: Contestant, attend: Attend, problem: Problem) -> list[Contestant]:
    """The forward, the backward and both of one way to attend, timed like `contestant`."""
    inputs = [x.detach().requires_grad_() for x in problem.tensors]
    of_out = torch.randn_like(problem.q)

    def once() -> torch.Tensor:
        with torch.no_grad():
            return attend(*inputs)

    kept: list[torch.Tensor] = []

    def backward() -> torch.Tensor:
        if not kept:
            kept.append(attend(*inputs))
        return torch.autograd.grad(kept[0], inputs, of_out, retain_graph=True)[0]

    calls = {
        "forward": once,
        "backward": backward,
        "both": partial(gradients, attend, inputs, of_out),
    }
    return [
        Contestant(
            f"{contestant.name}|{name}",
            call,
            contestant.positions,
            contestant.around,
            contestant.note,
            alone=contestant.alone,
        )
        for name, call in calls.items()
    ]


def error_of(
    attend: Attend, problem: Problem, partition: ringattn.Partition | None
) -> float | None:
    """Of the rows of this rank, and of the last key head and its query heads."""
    if problem.seq_len > LONGEST_CHECK:
        return None
    generator = torch.Generator(problem.q.device).manual_seed(1)
    of_out = torch.randn(problem.q.shape, generator=generator, device=problem.q.device)
    of_out = of_out.to(problem.q.dtype)
    heads = problem.q.size(2) // problem.k.size(2)
    last = [problem.q[:, :, -heads:], problem.k[:, :, -1:], problem.v[:, :, -1:]]
    wide = [x.double().requires_grad_() for x in last]
    out, _ = reference.attention(*wide, diagonal=0 if problem.causal else None)
    expected = torch.autograd.grad(out, wide, of_out[:, :, -heads:].double())

    def shard(x: torch.Tensor) -> torch.Tensor:
        return x if partition is None else partition.shard(x, rank())

    inputs = [shard(x).detach().requires_grad_() for x in problem.tensors]
    actual = torch.autograd.grad(attend(*inputs), inputs, shard(of_out))
    sizes = (heads, 1, 1)
    return max(
        (mine[:, :, -size:].double() - shard(right)).abs().max().item()
        for mine, right, size in zip(actual, expected, sizes, strict=True)
    )


def single_device(problem: Problem, alone: bool) -> dict[str, tuple[Contestant, Attend]]:
    """Kernels of one device by name."""
    rows = torch.arange(problem.seq_len, device=problem.q.device)
    diagonal = 0 if problem.causal else None

    def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ringattn.block_attention(q, k, v, diagonal=diagonal)[0]

    found: dict[str, tuple[Contestant, Attend]] = {}
    first = Contestant("ringattn", lambda: ours(*problem.tensors), rows, alone=alone)
    found[first.name] = (first, ours)
    grouped = problem.q.size(2) != problem.k.size(2)
    for peer in torch_sdpa.prepare(problem):
        attend = partial(torch_sdpa.attend, causal=problem.causal, grouped=grouped)
        peer = Contestant(peer.name, peer.call, rows, peer.around, peer.note, alone=alone)
        try:
            with peer.around():
                inputs = [x.detach().requires_grad_() for x in problem.tensors]
                gradients(attend, inputs, torch.zeros_like(problem.q))
        except RuntimeError:  # no backward for grouped queries
            continue
        found[peer.name] = (peer, attend)
    return found


def compete(report: Report, problem: Problem, arguments: argparse.Namespace) -> None:
    """One problem: a row for each contestant and pass."""
    over_ranks = world_size() > 1
    partition = ringattn.Partition.even(problem.seq_len, world_size()) if over_ranks else None
    single = single_device(problem, alone=over_ranks)
    field: list[Contestant] = []
    errors: dict[str, float | None] = {}
    for name, (contestant, attend) in single.items():
        field += passes(contestant, attend, problem)
        with contestant.around():
            errors[name] = None if over_ranks else error_of(attend, problem, None)
    for transport in arguments.transports if over_ranks else []:
        attend = partial(
            ringattn.ring_attention,
            partition=partition,
            causal=problem.causal,
            transport=transport,
        )
        local = Problem(*(partition.shard(x, rank()) for x in problem.tensors), problem.causal)
        name = f"ring, {transport}"
        field += passes(
            Contestant(name, partial(attend, *local.tensors), torch.arange(0)), attend, local
        )
        errors[name] = error_of(attend, problem, partition)
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    for contestant in field:
        name, _, which = contestant.name.partition("|")
        timing = timings[contestant.name]
        best = min(
            timings[f"{other}|{which}"].median
            for other in single
            if over_ranks or other != name or len(single) == 1
        )
        ratio = best / timing.median
        report.add(
            {
                "S": problem.seq_len,
                "mask": "causal" if problem.causal else "dense",
                "what": name,
                "pass": which,
                **timing.columns(),
                "TFLOP/s": WORK[which] * problem.flops / timing.median / 1e9,
                "share of ideal" if over_ranks else "x best": (
                    ratio if not over_ranks else None if name in single else ratio / world_size()
                ),
                "max error": errors[name] if which == "both" else None,
            }
        )


def main() -> None:
    parser = timing_arguments(__doc__)
    over_ranks = "WORLD_SIZE" in os.environ
    lengths = [8192, 16384, 32768, 65536] if over_ranks else [2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--seq-lens", type=counts, default=lengths, help="S, with commas")
    parser.add_argument("--causal-only", action="store_true", help="leave out dense attention")
    parser.add_argument("--transports", type=transport_names, default=["auto"])
    shape_arguments(parser)
    arguments = parse(parser)

    with process_group(arguments.device) as device:
        header = environment(device) | {
            "tensors": shape_text(arguments),
            "units": "ms: median, 10th and 90th percentile",
            "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
        }
        title = f"Gradients over {world_size()} ranks" if over_ranks else "Gradients"
        report = Report(title, header, RING_COLUMNS if over_ranks else COLUMNS)
        report.start()
        for causal in (True,) if arguments.causal_only or over_ranks else (True, False):
            for seq_len in arguments.seq_lens:
                problem = Problem.of(arguments, seq_len, device, causal=causal)
                compete(report, problem, arguments)
        report.write(arguments.out)


if __name__ == "__main__":
    main()
