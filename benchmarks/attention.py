# SPDX-License-Identifier: Apache-2.0
"""Block attention on one device, beside the kernels PyTorch brings.

    python benchmarks/attention.py --seq-lens 4096,16384 --head-dims 64,128 --out build/attention
    python benchmarks/attention.py --device cpu --heads 8 --kv-heads 8 --seq-lens 2048
    python benchmarks/attention.py --full --out build/attention

`ringattn` is ringattn.block_attention; `ringattn fold` adds a block to a float32 state, as a ring
step does. TFLOP/s count the pairs that the mask lets through, "x best" is the fastest peer's time
over this one's. The error is the largest difference from float64 attention over sampled rows.
--full is every length, head dim, mask and batch that is reported, beside the peer that is the
fastest there: cuDNN, for float32 the memory-efficient kernel.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

import ringattn
import torch
from lib.cli import at_least, counts, names_of, parse, timing_arguments
from lib.problem import DTYPES, Problem
from lib.report import Report, environment
from lib.timing import Contestant, max_error, measure
from peers import flash_attn_package, torch_sdpa

COLUMNS = ["B", "S", "D", "dtype", "mask", "what"]
COLUMNS += ["ms", "p10", "p90", "TFLOP/s", "x best", "max error", "note"]


@dataclass(frozen=True)
class Grid:
    """Problems: every combination. `names` are the contestants, None: all that there are."""

    batches: Sequence[int]
    seq_lens: Sequence[int]
    head_dims: Sequence[int]
    dtype: str
    masks: Sequence[str] = ("causal", "dense")
    names: Sequence[str] | None = None


POWERS = [2**i for i in range(10, 17)]  # 1K to 64K
FASTEST = ("ringattn", "torch cuDNN")
FULL = [
    Grid([1], POWERS, [64, 128, 256], "bfloat16", names=FASTEST),
    Grid([4], POWERS[:5], [64, 128, 256], "bfloat16", names=FASTEST),
    Grid([1], [4096, 16384], [64, 128], "float32", names=("ringattn", "torch memory-efficient")),
]


def ours(problem: Problem) -> list[Contestant]:
    q, k, v = problem.tensors
    diagonal = 0 if problem.causal else None
    positions = torch.arange(problem.seq_len, device=q.device)
    batch, seq_len, heads, head_dim = q.shape
    state_type = torch.promote_types(q.dtype, torch.float32)
    state = torch.zeros(q.shape, dtype=state_type, device=q.device)
    lse = torch.full((batch, heads, seq_len), -math.inf, dtype=state_type, device=q.device)
    scale = head_dim**-0.5

    def attend() -> torch.Tensor:
        return ringattn.block_attention(q, k, v, diagonal=diagonal)[0]

    # The same keys again and again: the state stays their attention, whatever the number of folds.
    def fold() -> torch.Tensor:
        torch.ops.ringattn.block_attention_(state, lse, q, k, v, scale, diagonal)
        return state

    return [
        Contestant("ringattn", attend, positions),
        Contestant("ringattn fold", fold, positions),
    ]


def contestants(problem: Problem) -> list[Contestant]:
    """Ours and every kernel for one device that takes the problem."""
    found = ours(problem)
    for peer in (torch_sdpa, flash_attn_package):
        if peer.available(problem) is None:
            found += peer.prepare(problem)
    return found


def is_ours(name: str) -> bool:
    return name.startswith("ringattn")


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Wrong usage where ringattn would refuse the problems."""
    if arguments.heads % arguments.kv_heads:
        parser.error(
            f"--heads must be a multiple of --kv-heads, {arguments.kv_heads}, got {arguments.heads}"
        )
    for head_dim in arguments.head_dims:
        if head_dim % 8 or head_dim > 256:
            parser.error(f"--head-dims must be multiples of 8 from 8 to 256, got {head_dim}")


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--seq-lens", type=counts, default=[2048, 8192], help="S, with commas")
    parser.add_argument("--head-dims", type=counts, default=[128], help="D, with commas")
    parser.add_argument("--heads", type=at_least(1), default=32)
    parser.add_argument("--kv-heads", type=at_least(1), default=8)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    masks = names_of("causal", "dense")
    parser.add_argument("--masks", type=masks, default="causal,dense", help="with commas")
    parser.add_argument("--batches", type=counts, default=[1], help="B, with commas")
    parser.add_argument("--full", action="store_true", help="the whole table; sizes do not count")
    arguments = parse(parser)
    check(parser, arguments)

    given = Grid(
        arguments.batches,
        arguments.seq_lens,
        arguments.head_dims,
        arguments.dtype,
        arguments.masks,
    )
    device = torch.device(arguments.device)
    header = environment(device) | {
        "heads": f"H {arguments.heads}, H_kv {arguments.kv_heads}",
        "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
    }
    report = Report("Block attention on one device", header, COLUMNS)
    report.start()
    for grid in FULL if arguments.full else [given]:
        for batch in grid.batches:
            for head_dim in grid.head_dims:
                for seq_len in grid.seq_lens:
                    for mask in grid.masks:
                        problem = Problem.random(
                            seq_len,
                            arguments.heads,
                            arguments.kv_heads,
                            head_dim,
                            dtype=DTYPES[grid.dtype],
                            device=device,
                            causal=mask == "causal",
                            batch=batch,
                        )
                        compete(
                            report, problem, grid.names, device, arguments.rounds, arguments.warmup
                        )
    report.write(arguments.out)


def compete(
    report: Report,
    problem: Problem,
    names: Sequence[str] | None,
    device: torch.device,
    rounds: int,
    warmup: int,
) -> None:
    """One problem: a row for each contestant."""
    field = [one for one in contestants(problem) if names is None or one.name in names]
    errors = {contestant.name: max_error(contestant, problem) for contestant in field}
    timings = measure(field, device, rounds=rounds, warmup=warmup)
    best = min((t.median for name, t in timings.items() if not is_ours(name)), default=math.nan)
    for contestant in field:
        timing = timings[contestant.name]
        report.add(
            {
                "B": problem.q.size(0),
                "S": problem.seq_len,
                "D": problem.q.size(-1),
                "dtype": str(problem.q.dtype).removeprefix("torch."),
                "mask": "causal" if problem.causal else "dense",
                "what": contestant.name,
                **timing.columns(),
                "TFLOP/s": problem.flops / timing.median / 1e9,
                "x best": best / timing.median,
                "max error": errors[contestant.name],
                "note": contestant.note,
            }
        )


if __name__ == "__main__":
    main()
