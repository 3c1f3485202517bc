# SPDX-License-Identifier: Apache-2.0
"""Strong and weak scaling of ring attention over 1, 2, 4, 8 ranks, its roofline, its errors.

    python benchmarks/scaling.py --out build/scaling --save-fig build/figures
    python benchmarks/scaling.py --device cpu --world-sizes 8 --parts correctness

Starts its ranks itself where torchrun has not. The reference is the fastest fused kernel for the
whole problem on one device (on CPU: one process with all cores), in the same run. Parts:

correctness  16 problems over all ranks: causal and dense, 512 and 2048 tokens, 8 and 16 heads of 64
             and 128, float16. The command fails where one is wrong
roofline     --seq-lens over all ranks
strong       --strong-seqs tokens in all, over each number of ranks
weak         --weak-seq-locals tokens a rank, over each number of ranks. Causal work of a rank grows
             with their number W: its time is ideal where it is W times that of one rank

Columns:

ring_ms             median of the slowest rank, with p10 and p90
ref_ms              the reference's time for the same problem
speedup             ref_ms / ring_ms; ideal_speedup is world_size, on CPU the share of the cores
                    that the ranks have; scaling_efficiency is their ratio
ring_tflops         of one rank; ref_tflops of the reference's device. Masked pairs do not count
flops_per_byte      of a rank: its operations over the bytes of its queries and results, and of the
                    keys and values of all ranks
error               largest difference from float64 attention over sampled rows; in `correctness`
                    inputs are a tenth of unit normal
x_torch             error / that of PyTorch's attention on one device in the same rows; 2 at most
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launching
import ringattn
import roofline
import torch
import torch.distributed as dist
from lib.cli import at_least, counts, names_of, parse, timing_arguments
from lib.problem import DTYPES, Problem
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, max_error, measure
from peers import torch_sdpa
from ring import singles
from ringattn import Partition

PARTS = ("correctness", "roofline", "strong", "weak")
COLUMNS = (
    *("part", "shape", "mask", "total_seq", "world_size", "seq_local", "ring_ms", "p10", "p90"),
    *("ref_ms", "reference", "speedup", "ideal_speedup", "scaling_efficiency", "ring_tflops"),
    *("ref_tflops", "flops_per_byte", "peak_tflops", "peak_gbps", "error", "x_torch"),
)
LARGEST_ERROR, MOST_OF_TORCH = 2e-2, 2.0  # of a problem of `correctness`
SAMPLED_ROWS = 8  # of each rank


@dataclass(frozen=True)
class Heads:
    """What problems of any length share, a Shape."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str

    @property
    def name(self) -> str:
        grouped = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        return f"H{self.heads}{grouped} D{self.head_dim} {self.dtype}"


SHAPES = {
    "h16d64": Heads(16, 16, 64, "float16"),
    "h32d128": Heads(32, 32, 128, "float16"),
    "gqa": Heads(32, 8, 128, "bfloat16"),
    "tiny": Heads(4, 2, 16, "float32"),
}


@dataclass(frozen=True)
class Groups:
    """The first ranks, as many as there are to be."""

    sizes: list[int]
    groups: dict[int, Any]  # number of ranks -> what ring_attention() takes as group

    @classmethod
    def made(cls, sizes: list[int]) -> Groups:
        """Collective: every rank makes every group."""
        groups: dict[int, Any] = {1: "single", world_size(): None}
        for size in sizes:
            if size not in groups:
                groups[size] = dist.new_group(list(range(size)))
        return cls(sizes, groups)

    def ring(self, problem: Problem, size: int) -> Contestant:
        """The problem over the first ``size`` ranks; the others do nothing."""
        if rank() >= size:
            return Contestant(f"{size}", lambda: problem.q, torch.empty(0, dtype=torch.int64))
        partition = Partition.even(problem.seq_len, size)
        q, k, v = (partition.shard(x, rank()) for x in problem.tensors)
        group, causal = self.groups[size], problem.causal
        return Contestant(
            f"{size}",
            lambda: ringattn.ring_attention(q, k, v, partition, group=group, causal=causal),
            partition.position_ids(rank(), problem.q.device),
        )


# ---- correctness --------------------------------------------------------------------------------


def problems(device: torch.device) -> Iterator[tuple[Heads, Problem]]:
    """The 16 of them, parts of the largest."""
    largest = Problem.of(Heads(16, 16, 128, "float16"), 2048, device, causal=True)
    for causal in (True, False):
        for seq_len in (512, 2048):
            for heads in (8, 16):
                for head_dim in (64, 128):
                    parts = (x[:, :seq_len, :heads, :head_dim] for x in largest.tensors)
                    tensors = [(0.1 * part).contiguous() for part in parts]
                    yield Heads(heads, heads, head_dim, "float16"), Problem(*tensors, causal)


def check(report: Report, groups: Groups, device: torch.device) -> bool:
    """A row for each problem. Whether all are right."""
    right, size = True, world_size()
    for shape, problem in problems(device):
        ring = groups.ring(problem, size)
        of_torch = torch.empty_like(problem.q)
        if rank() == 0:
            of_torch = torch_sdpa.attend(*problem.tensors, problem.causal, False).contiguous()
        if size > 1:
            dist.broadcast(of_torch, 0)
        error, torch_error = from_all_ranks(
            [
                problem.max_error(out, ring.positions, SAMPLED_ROWS)
                for out in (ring.call(), of_torch[:, ring.positions])
            ]
        ).amax(0)
        row = head_of("correctness", shape, problem, size)
        report.add(row | {"error": error.item(), "x_torch": (error / torch_error).item()})
        right = right and bool(error <= min(LARGEST_ERROR, MOST_OF_TORCH * torch_error))
    return right


def head_of(part: str, shape: Heads, problem: Problem, size: int) -> dict[str, Any]:
    return {
        "part": part,
        "shape": shape.name,
        "mask": "causal" if problem.causal else "dense",
        "total_seq": problem.seq_len,
        "world_size": size,
        "seq_local": -(-problem.seq_len // size),
    }


# ---- time ---------------------------------------------------------------------------------------


def rows_wanted(options: argparse.Namespace) -> dict[int, list[tuple[str, int]]]:
    """By tokens in all: the parts and the numbers of ranks."""
    wanted: dict[int, list[tuple[str, int]]] = {}
    largest = max(options.world_sizes)
    if "roofline" in options.parts:
        for seq_len in options.seq_lens:
            wanted.setdefault(seq_len, []).append(("roofline", largest))
    for size in options.world_sizes:
        if "strong" in options.parts:
            for seq_len in options.strong_seqs:
                wanted.setdefault(seq_len, []).append(("strong", size))
        if "weak" in options.parts:
            for local in options.weak_seq_locals:
                wanted.setdefault(local * size, []).append(("weak", size))
    return dict(sorted(wanted.items()))


def ideal_speedup(size: int, device: torch.device) -> float:
    """Of so many ranks over the reference, which has one device, or all cores."""
    if device.type != "cpu":
        return size
    cores = os.cpu_count() or 1
    return min(1.0, size * torch.get_num_threads() / cores)


def time_all(report: Report, groups: Groups, device: torch.device, options: Any) -> None:
    """Rows of the other parts."""
    for shape in options.shapes:
        peak = roofline.peak_rates(device, DTYPES[shape.dtype], options)
        for seq_len, wanted in rows_wanted(options).items():
            problem = Problem.of(shape, seq_len, device, causal=not options.no_causal)
            sizes = sorted({size for _, size in wanted})
            rings = {size: groups.ring(problem, size) for size in sizes}
            alone = singles(problem)
            errors = {size: max_error(rings[size], problem) for size in sizes}
            timings = measure(
                [*rings.values(), *alone], device, rounds=options.rounds, warmup=options.warmup
            )
            best = min(alone, key=lambda item: timings[item.name].median).name
            reference = timings[best].median
            for part, size in wanted:
                timing = timings[rings[size].name]
                partition = Partition.even(seq_len, size)
                pairs = roofline.num_pairs(partition, problem.causal)
                flops = 4.0 * shape.heads * shape.head_dim * max(pairs)
                speedup, ideal = reference / timing.median, ideal_speedup(size, device)
                row = head_of(part, shape, problem, size) | {
                    "ring_ms": timing.median,
                    "p10": timing.quantile(0.1),
                    "p90": timing.quantile(0.9),
                    "ref_ms": reference,
                    "reference": best.removeprefix("one device: "),
                    "speedup": speedup,
                    "ideal_speedup": ideal,
                    "scaling_efficiency": speedup / ideal,
                    "ring_tflops": flops / timing.median / 1e9,
                    "ref_tflops": problem.flops / reference / 1e9,
                    "flops_per_byte": flops / roofline.attention_bytes(*problem.tensors[:2], size),
                    "error": errors[size],
                }
                if peak is not None:
                    row |= {"peak_tflops": peak.tflops, "peak_gbps": peak.gbps}
                report.add(row)
        report.write(options.out)  # a run that is ended early leaves what it has


# ---- command line -------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = timing_arguments(__doc__)
    launching.add_world_size(made)
    roofline.add_peak_arguments(made)
    parts = names_of(*PARTS)
    made.add_argument("--parts", type=parts, default=list(PARTS), help="with commas (default: all)")
    shapes = names_of(*SHAPES)
    made.add_argument("--shapes", type=shapes, help=f"of {', '.join(SHAPES)} (CPU: tiny)")
    heads = ("--num-heads", "--num_heads")
    made.add_argument(*heads, type=at_least(1), metavar="H", help="one shape, in place of --shapes")
    made.add_argument(
        "--head-dim", "--head_dim", type=at_least(1), default=64, help="(default: 64)"
    )
    made.add_argument("--dtype", choices=DTYPES, default="float16", help="of that shape")
    rounds = {"dest": "rounds", "type": at_least(1), "default": argparse.SUPPRESS}
    made.add_argument("--iters", **rounds, metavar="N", help="as --rounds")
    sizes = ("--world-sizes", "--world_sizes")
    made.add_argument(*sizes, type=counts, metavar="W,...", help="(default: 1,2,4,...)")
    made.add_argument("--seq-lens", "--seq_lens", type=counts, metavar="S,...", help="of roofline")
    made.add_argument("--strong-seqs", "--strong_seqs", type=counts, metavar="S,...")
    made.add_argument("--weak-seq-locals", "--weak_seq_locals", type=counts, metavar="S_r,...")
    made.add_argument("--no-causal", "--no_causal", action="store_true", help="no mask, when timed")
    made.add_argument("--save-fig", "--save_fig", type=Path, metavar="FOLDER", help="draw it, too")
    return made


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with what follows from the device and from each other."""
    options = parse(parser)
    on_cuda = options.device == "cuda"
    given = options.world_sizes
    if given is not None and options.world_size is None:
        options.world_size = max(given)
    if given is not None and max(given) > options.world_size:
        parser.error(f"--world-sizes must be {options.world_size} ranks at most, got {max(given)}")
    names = options.shapes or (["h16d64", "h32d128", "gqa"] if on_cuda else ["tiny"])
    options.shapes = [SHAPES[name] for name in names]
    if options.num_heads is not None:
        heads, head_dim = options.num_heads, options.head_dim
        options.shapes = [Heads(heads, heads, head_dim, options.dtype)]
    powers = [2**i for i in range(9, 16)]  # 512 to 32768
    options.seq_lens = options.seq_lens or (powers[:6] if on_cuda else [256, 512])
    options.strong_seqs = options.strong_seqs or (powers[3:] if on_cuda else [512, 1024])
    options.weak_seq_locals = options.weak_seq_locals or (powers[1:4] if on_cuda else [256])
    return options


def main() -> None:
    arguments = parser()
    options = parse_options(arguments)
    if not launching.under_launcher(arguments, options):
        return
    with process_group(options.device) as device:
        size = world_size()
        if options.world_sizes is None:
            options.world_sizes = [2**i for i in range(size.bit_length()) if 2**i <= size]
        header = environment(device) | {
            "rounds": f"{options.rounds} after {options.warmup} of warm-up, medians",
            "reference": "one process with all cores"
            if device.type == "cpu"
            else "the fastest fused kernel on one device",
        }
        report = Report(f"Scaling of ring attention up to {size} ranks", header, COLUMNS)
        report.start()
        groups, right = Groups.made(options.world_sizes), True
        if "correctness" in options.parts:
            right = check(report, groups, device)
        time_all(report, groups, device, options)
        report.write(options.out)
        if options.save_fig is not None and rank() == 0:
            import plot_scaling

            plot_scaling.write(report.rows, options.save_fig)
    if not right:
        sys.exit("scaling: every problem of correctness must be right, got errors above the limits")


if __name__ == "__main__":
    main()
