# SPDX-License-Identifier: Apache-2.0
"""Block attention on one device, beside the kernels PyTorch brings.

    python benchmarks/attention.py --seq-lens 4096,16384 --head-dims 64,128 --out build/attention
    python benchmarks/attention.py --device cpu --heads 8 --kv-heads 8 --seq-lens 2048

`ringattn` is ringattn.block_attention; `ringattn fold` adds a block to a float32 state, as a ring
step does. TFLOP/s count the pairs that the mask lets through. The error is the largest difference
from float64 attention over sampled rows.
"""

from __future__ import annotations

import math

import ringattn
import torch
from harness import (
    DTYPES,
    Contestant,
    Problem,
    Report,
    common_arguments,
    environment,
    integers,
    max_error,
    measure,
)
from peers import flash_attn_package, torch_sdpa

COLUMNS = ["S", "D", "mask", "what", "ms", "p10", "p90", "TFLOP/s", "max error", "note"]


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


def main() -> None:
    parser = common_arguments(__doc__)
    parser.add_argument("--seq-lens", type=integers, default=[2048, 8192], help="S, with commas")
    parser.add_argument("--head-dims", type=integers, default=[128], help="D, with commas")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--masks", default="causal,dense", help="causal, dense or both")
    arguments = parser.parse_args()

    device = torch.device(arguments.device)
    header = environment(device) | {
        "tensors": f"B 1, H {arguments.heads}, H_kv {arguments.kv_heads}, {arguments.dtype}",
        "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
    }
    report = Report("Block attention on one device", header, COLUMNS)
    report.start()
    for head_dim in arguments.head_dims:
        for seq_len in arguments.seq_lens:
            for mask in arguments.masks.split(","):
                problem = Problem.random(
                    seq_len,
                    arguments.heads,
                    arguments.kv_heads,
                    head_dim,
                    dtype=DTYPES[arguments.dtype],
                    device=device,
                    causal=mask == "causal",
                )
                compete(report, problem, device, arguments.rounds, arguments.warmup)
    report.write(arguments.out)


def compete(
    report: Report, problem: Problem, device: torch.device, rounds: int, warmup: int
) -> None:
    """One problem: a row for each contestant."""
    field = contestants(problem)
    errors = {contestant.name: max_error(contestant, problem) for contestant in field}
    timings = measure(field, device, rounds=rounds, warmup=warmup)
    for contestant in field:
        timing = timings[contestant.name]
        report.add(
            {
                "S": problem.seq_len,
                "D": problem.q.size(-1),
                "mask": "causal" if problem.causal else "dense",
                "what": contestant.name,
                **timing.columns(),
                "TFLOP/s": problem.flops / timing.median / 1e9,
                "max error": errors[contestant.name],
                "note": contestant.note,
            }
        )


if __name__ == "__main__":
    main()
