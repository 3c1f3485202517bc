# SPDX-License-Identifier: Apache-2.0
"""What benchmarks/gradients.py measures over several ranks: forward and backward of rings.

Causal attention beside the rings of others: PyTorch's context_parallel, a zigzag ring on PyTorch's
operators, Ulysses on flash-attn-4. Packed documents under three partitions. Ideal is the fastest
time of one device, ours included, measured on rank 0 alone, divided by W.
"""

from __future__ import annotations

import argparse
import dataclasses
from functools import partial

import gradient_kernels
import ringattn
import torch
from lib.cli import at_least, counts, names_of, transport_names
from lib.masked import MaskedProblem, Masking, random_documents
from lib.passes import PASSES, gradient_error, passes
from lib.problem import busiest
from lib.ranks import world_size
from lib.report import Report
from lib.timing import Contestant, measure
from peers import contenders, masked, torch_context_parallel, ulysses, zigzag_on_torch

PEERS = {
    "context_parallel": torch_context_parallel,
    "zigzag": zigzag_on_torch,
    "ulysses": ulysses,
}
COLUMNS = ["S", "mask", "what", "pass", "ms", "p10", "p90", "TFLOP/s", "share of ideal", "busiest"]
COLUMNS += ["max error", "note"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", type=transport_names, default=["auto"], help="with commas")
    parser.add_argument(
        "--peers", type=names_of(*PEERS, "none"), default=[*PEERS], help="with commas, or none"
    )
    parser.add_argument(
        "--packed-lens", type=counts, default=[], help="S of packed documents, with commas"
    )
    parser.add_argument("--seeds", type=counts, default=[1], help="of documents, with commas")
    parser.add_argument("--median", type=at_least(1), default=4096, help="tokens of a document")


def compete_over_ranks(report: Report, device: torch.device, arguments: argparse.Namespace) -> None:
    """Causal attention of each length, then packed documents."""
    for seq_len in arguments.seq_lens:
        problem = MaskedProblem.of_masking(arguments, seq_len, device, Masking()).trained()
        causal(report, problem, arguments)
    if arguments.packed_lens:
        median = arguments.median
        report.remark(f"documents' lengths are lognormal around {median} tokens, sigma 1")
    for seq_len in arguments.packed_lens:
        for seed in arguments.seeds:
            masking = Masking(random_documents(seq_len, seed, arguments.median), seed=seed)
            problem = MaskedProblem.of_masking(arguments, seq_len, device, masking).trained()
            packed(report, problem, arguments)


def causal(report: Report, problem: MaskedProblem, arguments: argparse.Namespace) -> None:
    single = gradient_kernels.unmasked(problem, report, alone=True)
    even = ringattn.Partition.even(problem.seq_len, world_size())
    rings = [ring(f"ring, {name}", problem, even, name) for name in arguments.transports]
    for name in arguments.peers:
        if name != "none":
            rings += contenders(name, PEERS[name], problem, report)
    add_rows(report, problem, arguments, single, rings, "causal", {})


def packed(report: Report, problem: MaskedProblem, arguments: argparse.Namespace) -> None:
    ends = list(problem.masking.cu_seqlens or [])
    others = (masked.varlen, masked.flash_attn_4)
    single = gradient_kernels.under_masks(problem, report, others, alone=True)
    length, ranks = problem.seq_len, world_size()
    partitions = {
        "packed": ringattn.Partition.packed(ends, ranks),
        "contiguous": ringattn.Partition.even(length, ranks, layout="contiguous"),
        "zigzag": ringattn.Partition.even(length, ranks),
    }
    rings, parts = [], {}
    for layout, partition in partitions.items():
        part = busiest(partition, cu_seqlens=ends)
        for transport in arguments.transports:
            item = ring(f"ring, {layout}, {transport}", problem, partition, transport)
            rings.append(item)
            parts[item.name] = part
    mask = f"{len(ends) - 1} documents, seed {problem.masking.seed}"
    add_rows(report, problem, arguments, single, rings, mask, parts)


def ring(
    name: str, problem: MaskedProblem, partition: ringattn.Partition, transport: str
) -> Contestant:
    """ringattn.ring_attention of this rank's rows."""
    shard, positions = problem.shard(partition)
    call = partial(
        ringattn.ring_attention,
        *(*shard.tensors, partition),
        cu_seqlens=problem.masking.cu_seqlens,
        transport=transport,
    )
    return Contestant(name, call, positions, inputs=shard.tensors)


def add_rows(
    report: Report,
    problem: MaskedProblem,
    arguments: argparse.Namespace,
    single: list[Contestant],
    rings: list[Contestant],
    mask: str,
    parts: dict[str, float],  # of the busiest rank
) -> None:
    """A row for each contestant and pass. Collective."""
    single = [dataclasses.replace(one, name=f"one device: {one.name}") for one in single]
    contestants = [*single, *rings]
    errors = {item.name: gradient_error(item, problem) for item in contestants}
    field = [one for item in contestants for one in passes(item)]
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    for item in contestants:
        for which, work in PASSES.items():
            timing = timings[f"{item.name}|{which}"]
            ideal = min(timings[f"{one.name}|{which}"].median for one in single) / world_size()
            report.add(
                {
                    "S": problem.seq_len,
                    "mask": mask,
                    "what": item.name,
                    "pass": which,
                    **timing.columns(),
                    "TFLOP/s": work * problem.flops / timing.median / 1e9,
                    "share of ideal": None if item.alone else ideal / timing.median,
                    "busiest": parts.get(item.name),
                    "max error": errors[item.name] if which == "both" else None,
                    "note": item.note,
                }
            )
    report.write(arguments.out)  # a run that is ended early leaves what it has
