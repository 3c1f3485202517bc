# SPDX-License-Identifier: Apache-2.0
"""Attention under general masks: packed documents, windows, sinks and softcap.

    python benchmarks/masks.py --out build/masks
    torchrun --nproc-per-node 4 benchmarks/masks.py --out build/masks-ring
    python benchmarks/masks.py --percentages 100,50 --seq-lens 65536 --out build/masks-uneven
    python benchmarks/masks.py --device cpu --dtype float32 --heads 8 --seq-lens 2048 --median 256

In one process: each mask beside other kernels for one device. `ringattn` is ring_attention on one
rank with the keywords of the mask, `ringattn kernel` is block_attention with the same mask as
key_ranges. `of causal` is the TFLOP/s over those of ringattn's own causal kernel on a batch of
sequences whose rows see as many keys: B = S / L sequences of L = 2 pairs / S tokens.

Under torchrun: packed documents and windows over all ranks. Ideal is the time of one device for
the whole sequence, measured on rank 0 alone, divided by W. `rows fetched` are the most keys that a
rank needs of others, `busiest` is the largest part of the pairs that a rank has, in even shares.

With --percentages, packed documents over unequal ranks, which this command starts: on GPUs under
CUDA MPS, on CPU repeating work. `even` is Partition.packed, `planned` is ringattn.plan for profiles
measured just before. `rank R alone` is the whole problem on that rank, all ranks computing at once;
ideal is the time that ranks of these speeds would take together without any overhead. All are timed
as calls in a row, so that clocks are the same.

TFLOP/s count the pairs that the mask lets through. The error is the largest difference from
float64 attention over sampled rows.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from functools import partial
from typing import Any

import launching
import ringattn
import torch
import torch.distributed as dist
from lib.cli import at_least, counts, parse, shape_arguments, timing_arguments
from lib.masked import MaskedProblem, Masking, random_documents, rows_fetched
from lib.problem import Problem, busiest, shape_text
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import EACH_ALONE, Contestant, Timing, max_error, measure, sustain
from peers.masked import PEERS, positions
from ringattn.profiling import tokens_to_measure

COLUMNS = ["S", "seed", "documents", "window", "sinks", "softcap", "what", "ms", "p10", "p90"]
COLUMNS += ["TFLOP/s", "of causal", "max error", "note"]
RING_COLUMNS = ["S", "seed", "documents", "window", "what", "ms", "p10", "p90", "TFLOP/s"]
RING_COLUMNS += ["share of ideal", "busiest", "rows fetched", "rows fetched / S", "max error"]
YARDSTICK = "ringattn causal"
SOFTCAP = 50.0


def maskings(arguments: argparse.Namespace, seq_len: int) -> list[Masking]:
    """The masks of one length: documents of each seed, windows, then the first of each with sinks,
    with softcap and with both."""
    packs = [
        Masking(random_documents(seq_len, seed, arguments.median), seed=seed)
        for seed in arguments.seeds
    ]
    sizes = arguments.windows if seq_len <= arguments.longest_window else []
    windows = [Masking(window=size) for size in sizes if size < seq_len]
    scores = [{"sinks": True}, {"softcap": SOFTCAP}, {"sinks": True, "softcap": SOFTCAP}]
    first = [*packs[:1], *windows[:1]]
    return [*packs, *windows, *(replace(mask, **more) for mask in first for more in scores)]


def ours(problem: MaskedProblem) -> list[Contestant]:
    rest = {"softcap": problem.softcap, "sinks": problem.sinks}
    ring = partial(
        ringattn.ring_attention,
        *problem.tensors,
        group="single",
        window_size=problem.window_size,
        cu_seqlens=problem.masking.cu_seqlens,
        **rest,
    )

    def kernel() -> torch.Tensor:
        return ringattn.block_attention(*problem.tensors, key_ranges=problem.key_ranges, **rest)[0]

    rows = positions(problem)
    return [Contestant("ringattn", ring, rows), Contestant("ringattn kernel", kernel, rows)]


def yardstick(problem: MaskedProblem, arguments: argparse.Namespace) -> tuple[Problem, Contestant]:
    """ringattn's causal kernel where a row sees as many keys in the mean."""
    length = min(problem.seq_len, round(2 * problem.pairs / problem.seq_len))
    plain = Problem.random(
        length,
        arguments.heads,
        arguments.kv_heads,
        arguments.head_dim,
        dtype=problem.q.dtype,
        device=problem.q.device,
        causal=True,
        batch=max(1, round(problem.seq_len / length)),
    )

    def call() -> torch.Tensor:
        return ringattn.block_attention(*plain.tensors, diagonal=0)[0]

    rows = torch.arange(length, device=plain.q.device)
    note = f"B {plain.q.size(0)}, S {length}"
    return plain, Contestant(YARDSTICK, call, rows, note=note)


def peers(problem: MaskedProblem, report: Report) -> list[Contestant]:
    """Those that take the problem; each other one is a remark."""
    found = []
    for name, prepare in PEERS.items():
        try:
            item = prepare(problem)
            if isinstance(item, Contestant):
                with item.around():
                    item.call()
        except Exception as error:  # another project's: its failure is a remark, not ours
            item = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        if isinstance(item, Contestant):
            found.append(item)
        else:
            report.remark(f"{name} left out: {item}")
    return found


def compete(report: Report, problem: MaskedProblem, arguments: argparse.Namespace) -> None:
    """One mask in one process: a row for each contestant."""
    plain, causal = yardstick(problem, arguments)
    masked = [*ours(problem), *peers(problem, report)]
    errors = {contestant.name: max_error(contestant, problem) for contestant in masked}
    errors[causal.name] = max_error(causal, plain)
    field = [*masked, causal]
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    best = plain.flops / timings[causal.name].median
    for contestant in field:
        timing = timings[contestant.name]
        speed = (plain if contestant is causal else problem).flops / timing.median
        report.add(
            {
                "S": problem.seq_len,
                "seed": problem.masking.seed,
                "documents": problem.boundaries.numel() - 1,
                "window": problem.masking.window,
                "sinks": "yes" if problem.masking.sinks else None,
                "softcap": problem.softcap or None,
                "what": contestant.name,
                **timing.columns(),
                "TFLOP/s": speed / 1e9,
                "of causal": speed / best,
                "max error": errors[contestant.name],
                "note": contestant.note,
            }
        )


def splits(problem: MaskedProblem) -> dict[str, ringattn.Partition]:
    """Partitions by name. The one of documents knows them."""
    ends = problem.masking.cu_seqlens
    known = {} if ends is None else {"packed": ringattn.Partition.packed(ends, world_size())}
    plain = {
        layout: ringattn.Partition.even(problem.seq_len, world_size(), layout=layout)
        for layout in ("contiguous", "zigzag")
    }
    return known | plain


def unequal_splits(problem: MaskedProblem, report: Report) -> dict[str, ringattn.Partition]:
    """Partitions of packed documents by name, for ranks as fast as they are now. Collective."""
    q, ends, device = problem.q, problem.masking.cu_seqlens, problem.q.device
    sizes: dict[str, Any] = {"num_heads": q.size(2), "num_kv_heads": problem.k.size(2)}
    sizes |= {"head_dim": q.size(3), "dtype": q.dtype}
    num_tokens = tokens_to_measure(problem.seq_len, world_size(), device)
    profiles = ringattn.measure_profiles(**sizes, num_tokens=num_tokens, device=device)
    speeds = ", ".join(f"{profile.attention_tflops:.3g}" for profile in profiles)
    report.remark(f"S {problem.seq_len}, seed {problem.masking.seed}: planned for {speeds} TFLOP/s")
    cost = ringattn.ModelCost.attention_only(**sizes)
    planned = ringattn.plan(problem.seq_len, profiles, cost, cu_seqlens=ends).partition
    return {"even": ringattn.Partition.packed(ends, world_size()), "planned": planned}


def compete_over_ranks(
    report: Report, problem: MaskedProblem, arguments: argparse.Namespace
) -> None:
    """One mask over all ranks: a row for each partition, and one device or each rank alone."""
    unequal = arguments.percentages is not None
    for tensor in problem.tensors:
        # Random numbers depend on how many multiprocessors a process sees.
        dist.broadcast(tensor, 0)
    single, _ = ours(problem)
    alone = replace(single, name=EACH_ALONE if unequal else "one device", alone=not unequal)
    partitions = unequal_splits(problem, report) if unequal else splits(problem)
    field = [alone]
    for name, partition in partitions.items():
        call = partial(
            ringattn.ring_attention,
            *(partition.shard(x, rank()) for x in problem.tensors),
            partition,
            window_size=problem.window_size,
            cu_seqlens=problem.masking.cu_seqlens,
        )
        field.append(Contestant(name, call, partition.position_ids(rank(), problem.q.device)))
    errors = {contestant.name: max_error(contestant, problem) for contestant in field}
    if unequal:
        field, _ = sustain(field, problem.q.device, warmup=1)
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    lone = timings.pop(alone.name)
    whole, ideal_ms = {alone.name: lone}, lone.median / world_size()
    if unequal:
        samples = from_all_ranks(lone.own_samples).tolist()
        whole = {f"rank {r} alone": Timing(own, own) for r, own in enumerate(samples)}
        ideal_ms = 1 / sum(1 / timing.median for timing in whole.values())
    for name, timing in (whole | timings).items():
        partition = partitions.get(name)
        report.add(
            {
                "S": problem.seq_len,
                "seed": problem.masking.seed,
                "documents": problem.boundaries.numel() - 1,
                "window": problem.masking.window,
                "what": name,
                **timing.columns(),
                "TFLOP/s": problem.flops / timing.median / 1e9,
                **({} if partition is None else shares(partition, problem, timing, ideal_ms)),
                "max error": errors.get(name, errors[alone.name]),
            }
        )


def shares(
    partition: ringattn.Partition,
    problem: MaskedProblem,
    timing: Timing,
    ideal_ms: float,
) -> dict[str, float]:
    """What tells partitions apart: the columns of a ring."""
    ends, window = problem.boundaries.tolist(), problem.window_size
    fetched = rows_fetched(partition, ends, window)
    return {
        "share of ideal": ideal_ms / timing.median,
        "busiest": busiest(partition, window_size=window, cu_seqlens=ends),
        "rows fetched": fetched,
        "rows fetched / S": fetched / partition.seq_len,
    }


def main() -> None:
    parser = timing_arguments(__doc__)
    over_ranks = "WORLD_SIZE" in os.environ
    lengths = [65536, 262144] if over_ranks else [32768, 131072]
    parser.add_argument("--seq-lens", type=counts, default=lengths, help="S, with commas")
    shape_arguments(parser)
    parser.add_argument("--seeds", type=counts, default=[1, 2], help="of documents, with commas")
    parser.add_argument("--median", type=at_least(1), default=4096, help="tokens of a document")
    parser.add_argument("--windows", type=counts, default=[1024, 4096], help="keys, with commas")
    longest = max(lengths) if over_ranks else 32768
    parser.add_argument(
        "--longest-window", type=at_least(0), default=longest, help="the largest S of windows alone"
    )
    launching.add_percentages(parser)
    arguments = parse(parser)
    if arguments.percentages:
        if not launching.under_percentages(parser, arguments):
            return
        arguments.windows = []

    with (
        process_group(arguments.device) as device,
        launching.slowed(arguments.percentages, device),
    ):
        header = environment(device) | {
            "tensors": f"{shape_text(arguments)}, causal",
            "documents": f"lengths lognormal around {arguments.median} tokens, sigma 1",
            "units": "ms: median, 10th and 90th percentile; windows in keys with the query's own; "
            f"softcap {SOFTCAP:g}",
            "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
        }
        title = f"Masks over {world_size()} ranks" if over_ranks else "Masks"
        report = Report(title, header, RING_COLUMNS if over_ranks else COLUMNS)
        report.start()
        for seq_len in arguments.seq_lens:
            for masking in maskings(arguments, seq_len):
                if over_ranks and (masking.sinks or masking.softcap):
                    continue
                problem = MaskedProblem.of_masking(arguments, seq_len, device, masking)
                (compete_over_ranks if over_ranks else compete)(report, problem, arguments)
                report.write(arguments.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
