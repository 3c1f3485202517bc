# SPDX-License-Identifier: Apache-2.0
"""Attention in training: the forward, the backward, and both together.

    python benchmarks/gradients.py --seq-lens 4096,16384 --out build/gradients
    torchrun --nproc-per-node 4 benchmarks/gradients.py --out build/gradients-ring
    python benchmarks/gradients.py --device cpu --dtype float32 --heads 8 --seq-lens 1024

In one process: ringattn.block_attention beside PyTorch's kernels and flash-attn-4, where it is
installed; then packed documents and windows, where `x best` is over FlexAttention and flash-attn-4.
Under torchrun: ring_attention over all ranks, one row for each transport, beside one device. Ideal
is the fastest time of one device, ours included, measured on rank 0 alone, divided by W.

The backward is timed alone, of a forward that is kept; `both` is a forward and its backward. A
backward counts 2.5 times the operations of its forward, by visible pairs. The error is the largest
difference of dq, dk and dv from those of float64 attention, of the last key head, where S is at
most 4096.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import ringattn
import torch
import torch._functorch.config
from lib.cli import counts, parse, shape_arguments, timing_arguments, transport_names
from lib.masked import MaskedProblem, Masking, random_documents
from lib.problem import Problem, shape_text
from lib.ranks import process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, measure
from peers import flash_attn_package, masked, torch_sdpa
from ringattn import reference

COLUMNS = ["S", "mask", "what", "pass", "ms", "p10", "p90", "TFLOP/s", "x best", "max error"]
RING_COLUMNS = [*COLUMNS[:-2], "share of ideal", "max error"]
WORK = {"forward": 1.0, "backward": 2.5, "both": 3.5}
LONGEST_CHECK = 4096
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Documents of the benchmark of masks, one of its packs.
MEDIAN, SEED = 4096, 0


@dataclass(frozen=True)
class Differentiable:
    """A way to attend, timed like `contestant`: its call is of `inputs`, which require grad."""

    contestant: Contestant
    inputs: Inputs

    @property
    def name(self) -> str:
        return self.contestant.name

    def gradients(self, of_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """dq, dk, dv of a forward and its backward."""
        return torch.autograd.grad(self.contestant.call(), self.inputs, of_out)

    def passes(self) -> list[Contestant]:
        """The forward, the backward and both."""
        of_out = torch.randn_like(self.inputs[0])
        kept: list[torch.Tensor] = []

        def forward() -> torch.Tensor:
            with torch.no_grad():
                return self.contestant.call()

        def backward() -> torch.Tensor:
            if not kept:
                kept.append(self.contestant.call())
            return torch.autograd.grad(kept[0], self.inputs, of_out, retain_graph=True)[0]

        def both() -> torch.Tensor:
            return self.gradients(of_out)[0]

        calls = {"forward": forward, "backward": backward, "both": both}
        return [
            replace(self.contestant, name=f"{self.name}|{which}", call=call)
            for which, call in calls.items()
        ]


def leaves(problem: Problem) -> Inputs:
    q, k, v = (x.detach().requires_grad_() for x in problem.tensors)
    return q, k, v


def error_of(way: Differentiable, problem: Problem, mine: Callable) -> float | None:
    """Of the rows of this rank, and of the last key head and its query heads. `mine` takes a global
    tensor to this rank's rows."""
    if problem.seq_len > LONGEST_CHECK:
        return None
    generator = torch.Generator(problem.q.device).manual_seed(1)
    of_out = torch.randn(problem.q.shape, generator=generator, device=problem.q.device)
    of_out = of_out.to(problem.q.dtype)
    heads = problem.q.size(2) // problem.k.size(2)
    last = [problem.q[:, :, -heads:], problem.k[:, :, -1:], problem.v[:, :, -1:]]
    wide = [x.double().requires_grad_() for x in last]
    masked = isinstance(problem, MaskedProblem)
    out, _ = reference.attention(
        *wide,
        diagonal=0 if problem.causal and not masked else None,
        key_ranges=problem.key_ranges if masked else None,
    )
    expected = torch.autograd.grad(out, wide, of_out[:, :, -heads:].double())
    with way.contestant.around():
        actual = way.gradients(mine(of_out))
    return max(
        (gradient[:, :, -size:].double() - mine(right)).abs().max().item()
        for gradient, right, size in zip(actual, expected, (heads, 1, 1), strict=True)
    )


def single_device(problem: Problem, alone: bool, report: Report) -> list[Differentiable]:
    """Kernels of one device, ours first."""
    rows = torch.arange(problem.seq_len, device=problem.q.device)
    inputs = leaves(problem)
    grouped = problem.q.size(2) != problem.k.size(2)
    diagonal = 0 if problem.causal else None

    def ours() -> torch.Tensor:
        return ringattn.block_attention(*inputs, diagonal=diagonal)[0]

    field = [Contestant("ringattn", ours, rows)]
    for peer in torch_sdpa.prepare(problem):
        attend = partial(torch_sdpa.attend, causal=problem.causal, grouped=grouped)
        field.append(replace(peer, call=partial(attend, *inputs)))
    if flash_attn_package.available(problem) is None:
        field += flash_attn_package.prepare(Problem(*inputs, problem.causal))
    ways = [Differentiable(replace(contestant, alone=alone), inputs) for contestant in field]
    return [way for way in ways if differentiates(way, report)]


def masked_kernels(problem: MaskedProblem, report: Report) -> list[Differentiable]:
    """Kernels of one device that take documents and windows, ours first."""
    inputs = leaves(problem)
    given = MaskedProblem(*inputs, causal=True, masking=problem.masking)

    def ours() -> torch.Tensor:
        return ringattn.block_attention(*inputs, key_ranges=given.key_ranges)[0]

    ways = [Differentiable(Contestant("ringattn", ours, masked.positions(given)), inputs)]
    for prepare in (masked.flex, masked.varlen, masked.flash_attn_4):
        peer = prepare(given)
        if isinstance(peer, Contestant):
            ways.append(Differentiable(peer, inputs))
        else:
            report.remark(f"{prepare.__name__} left out: {peer}")
    return [way for way in ways if differentiates(way, report)]


def differentiates(way: Differentiable, report: Report) -> bool:
    """Whether it has gradients. Another project's failure is a remark."""
    try:
        with way.contestant.around():
            way.gradients(torch.zeros_like(way.inputs[0]))
    except Exception as error:
        report.remark(f"{way.name} left out: {str(error).splitlines()[0][:100]}")
        return False
    return True


def rings(
    problem: Problem, partition: ringattn.Partition, transports: Sequence[str]
) -> list[Differentiable]:
    """Over all ranks, by transport."""
    local = Problem(*(partition.shard(x, rank()) for x in problem.tensors), problem.causal)
    ways = []
    for transport in transports:
        inputs = leaves(local)
        attend = partial(
            ringattn.ring_attention,
            *inputs,
            partition,
            causal=problem.causal,
            transport=transport,
        )
        contestant = Contestant(f"ring, {transport}", attend, torch.arange(0))
        ways.append(Differentiable(contestant, inputs))
    return ways


def compete(report: Report, problem: Problem, mask: str, arguments: argparse.Namespace) -> None:
    """One problem: a row for each contestant and pass."""
    over_ranks = world_size() > 1
    if isinstance(problem, MaskedProblem):
        single = masked_kernels(problem, report)
    else:
        single = single_device(problem, over_ranks, report)
    errors: dict[str, float | None] = {}
    ways = list(single)
    if over_ranks:
        partition = ringattn.Partition.even(problem.seq_len, world_size())
        for way in rings(problem, partition, arguments.transports):
            ways.append(way)
            errors[way.name] = error_of(way, problem, lambda x: partition.shard(x, rank()))
    else:
        errors = {way.name: error_of(way, problem, lambda x: x) for way in single}
    field = [contestant for way in ways for contestant in way.passes()]
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    singles = {way.name for way in single}
    for contestant in field:
        name, _, which = contestant.name.partition("|")
        timing = timings[contestant.name]
        best = min(
            timings[f"{other}|{which}"].median
            for other in singles
            if over_ranks or other != name or len(singles) == 1
        )
        ratio = best / timing.median
        report.add(
            {
                "S": problem.seq_len,
                "mask": mask,
                "what": name,
                "pass": which,
                **timing.columns(),
                "TFLOP/s": WORK[which] * problem.flops / timing.median / 1e9,
                "share of ideal" if over_ranks else "x best": (
                    ratio if not over_ranks else None if name in singles else ratio / world_size()
                ),
                "max error": errors.get(name) if which == "both" else None,
            }
        )


def problems(
    arguments: argparse.Namespace, device: torch.device, over_ranks: bool
) -> Iterator[tuple[Problem, str]]:
    """Each with the name of its mask."""
    for causal in (True,) if arguments.causal_only or over_ranks else (True, False):
        for seq_len in arguments.seq_lens:
            problem = Problem.of(arguments, seq_len, device, causal=causal)
            yield problem, "causal" if causal else "dense"
    for seq_len in [] if over_ranks or arguments.causal_only else arguments.masked_seq_lens:
        documents = random_documents(seq_len, SEED, min(MEDIAN, seq_len // 8))
        maskings = {f"{len(documents) - 1} documents": Masking(documents)}
        maskings |= {f"window {w}": Masking(window=w) for w in arguments.windows if w < seq_len}
        for name, masking in maskings.items():
            yield MaskedProblem.of_masking(arguments, seq_len, device, masking), name


def main() -> None:
    parser = timing_arguments(__doc__)
    over_ranks = "WORLD_SIZE" in os.environ
    lengths = [8192, 16384, 32768, 65536] if over_ranks else [2048, 4096, 8192, 16384, 32768]
    parser.add_argument("--seq-lens", type=counts, default=lengths, help="S, with commas")
    parser.add_argument(
        "--masked-seq-lens",
        type=counts,
        default=[32768],
        help="S of packed documents and windows",
    )
    parser.add_argument("--windows", type=counts, default=[1024, 4096], help="keys of a window")
    parser.add_argument("--causal-only", action="store_true", help="leave out all other masks")
    parser.add_argument("--transports", type=transport_names, default=["auto"])
    shape_arguments(parser)
    arguments = parse(parser)

    # A backward is repeated: what a compiled forward has kept must not be used up.
    torch._functorch.config.donated_buffer = False
    with process_group(arguments.device) as device:
        header = environment(device) | {
            "tensors": shape_text(arguments),
            "units": "ms: median, 10th and 90th percentile",
            "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
        }
        title = f"Gradients over {world_size()} ranks" if over_ranks else "Gradients"
        report = Report(title, header, RING_COLUMNS if over_ranks else COLUMNS)
        report.start()
        for problem, mask in problems(arguments, device, over_ranks):
            compete(report, problem, mask, arguments)
        report.write(arguments.out)


if __name__ == "__main__":
    main()
