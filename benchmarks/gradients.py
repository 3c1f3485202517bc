# SPDX-License-Identifier: Apache-2.0
"""Attention in training: the forward, the backward, and both together.

    python benchmarks/gradients.py --seq-lens 4096,16384 --out build/gradients
    torchrun --nproc-per-node 4 benchmarks/gradients.py --packed-lens 131072 --out build/over-ranks
    python benchmarks/gradients.py --device cpu --dtype float32 --heads 8 --seq-lens 1024

In one process: ringattn.block_attention beside PyTorch's kernels and flash-attn-4, where it is
installed; then packed documents and windows, where `x best` is over FlexAttention and flash-attn-4.
Under torchrun: ring_attention over all ranks, one row for each transport, beside one device, the
rings of others and Ulysses; with --packed-lens packed documents under three partitions. Ideal is
the fastest time of one device, ours included, measured on rank 0 alone, divided by W. `busiest` is
the largest part of the pairs that a rank has, in even shares.

The backward is timed alone, of a forward that is kept; `both` is a forward and its backward. A
backward counts 2.5 times the operations of its forward, by visible pairs. The error is the largest
difference of dq, dk and dv from those of float64 attention, of the last key head, where S is at
most 4096.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import gradient_kernels
import ring_gradients
import torch
import torch._functorch.config
from lib.cli import counts, parse, shape_arguments, timing_arguments
from lib.masked import MaskedProblem, Masking, random_documents
from lib.passes import PASSES, gradient_error, passes
from lib.problem import Problem, shape_text
from lib.ranks import process_group, world_size
from lib.report import Report, environment
from lib.timing import measure
from peers import masked

COLUMNS = ["S", "mask", "what", "pass", "ms", "p10", "p90", "TFLOP/s", "x best", "max error"]
# Documents of the benchmark of masks, one of its packs.
MEDIAN, SEED = 4096, 0
OTHERS_UNDER_MASKS = (masked.flex, masked.varlen, masked.flash_attn_4)


def compete(report: Report, problem: Problem, mask: str, arguments: argparse.Namespace) -> None:
    """One problem: a row for each contestant and pass."""
    if isinstance(problem, MaskedProblem):
        kernels = gradient_kernels.under_masks(problem, report, OTHERS_UNDER_MASKS)
    else:
        kernels = gradient_kernels.unmasked(problem, report)
    errors = {kernel.name: gradient_error(kernel, problem) for kernel in kernels}
    field = [one for kernel in kernels for one in passes(kernel)]
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    for name, error in errors.items():
        for which, work in PASSES.items():
            timing = timings[f"{name}|{which}"]
            best = min(
                timings[f"{other}|{which}"].median
                for other in errors
                if other != name or len(errors) == 1
            )
            report.add(
                {
                    "S": problem.seq_len,
                    "mask": mask,
                    "what": name,
                    "pass": which,
                    **timing.columns(),
                    "TFLOP/s": work * problem.flops / timing.median / 1e9,
                    "x best": best / timing.median,
                    "max error": error if which == "both" else None,
                }
            )


def problems(arguments: argparse.Namespace, device: torch.device) -> Iterator[tuple[Problem, str]]:
    """Each with the name of its mask; tensors require gradients."""
    for causal in (True,) if arguments.causal_only else (True, False):
        for seq_len in arguments.seq_lens:
            problem = Problem.of(arguments, seq_len, device, causal=causal)
            yield problem.trained(), "causal" if causal else "dense"
    for seq_len in [] if arguments.causal_only else arguments.masked_seq_lens:
        documents = random_documents(seq_len, SEED, min(MEDIAN, seq_len // 8))
        maskings = {f"{len(documents) - 1} documents": Masking(documents)}
        maskings |= {f"window {w}": Masking(window=w) for w in arguments.windows if w < seq_len}
        for name, masking in maskings.items():
            problem = MaskedProblem.of_masking(arguments, seq_len, device, masking)
            yield problem.trained(), name


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
    ring_gradients.add_arguments(parser)
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
        report = Report(title, header, ring_gradients.COLUMNS if over_ranks else COLUMNS)
        report.start()
        if over_ranks:
            ring_gradients.compete_over_ranks(report, device, arguments)
        else:
            for problem, mask in problems(arguments, device):
                compete(report, problem, mask, arguments)
        report.write(arguments.out)


if __name__ == "__main__":
    main()
