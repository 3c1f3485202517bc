# SPDX-License-Identifier: Apache-2.0
"""benchmarks/llama.py --requests: prompts one at a time, as a service on unequal ranks has them.

Three partitions serve the same list, taking turns request by request: "even"; "planned", from
profiles that are measured first; "rebalanced", planned and then followed by ringattn.Rebalancer. A
prompt's time is until its first token is on the host, the slowest rank's. Columns:

p50_ttft_ms, p95_ttft_ms  over the requests
tokens_per_s              tokens of all prompts over the sum of their times
shares                    of all tokens in percent, rank by rank
x_even                    sum of the times with even partitions / sum of these
replans                   how often plans changed after a request
error                     largest difference of a prompt's logits from those with even partitions,
                          over the largest logit
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ringattn
import torch
import torch.distributed as dist
from launching import repeating
from lib.cli import at_least, counts
from lib.problem import DTYPES, relative_error
from lib.ranks import from_all_ranks, rank, world_size
from lib.report import Report, environment
from llama_models import model_text, own_model, own_step, profiles_of
from prompts import Prompts
from ringattn import ModelCost, Partition, Rebalancer
from tqdm import tqdm

COLUMNS = (
    *("partition", "requests", "p50_ttft_ms", "p95_ttft_ms", "tokens_per_s", "shares"),
    *("x_even", "replans", "error"),
)
_SHORTEST = 256  # tokens of a drawn prompt, where the longest has more


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--requests",
        type=request_lengths,
        metavar="S,S,...|draw:N",
        help="serve prompts of these lengths, or N drawn up to --seq-len's longest, one at a time",
    )
    parser.add_argument(
        "--percentages",
        type=counts,
        metavar="P,P,...",
        help="speeds of the ranks, by repeated work, with --requests (default: as they are)",
    )


def request_lengths(text: str) -> list[int] | int:
    """A type of arguments: lengths, or how many to draw."""
    if text.startswith("draw:"):
        return at_least(1)(text.removeprefix("draw:"))
    return counts(text)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Wrong usage where options do not go together."""
    if options.requests is None:
        if options.percentages is not None:
            parser.error("--percentages must come with --requests, got no requests")
        return
    if options.library != "own":
        parser.error(f"--requests must go through --library own, got {options.library}")
    if options.partition == "even":
        parser.error("--requests must have --partition auto, which compares it with even, got even")
    if max(options.percentages or [0]) > 100:
        parser.error(f"--percentages must be from 1 to 100, got {max(options.percentages)}")


def drawn(requests: list[int] | int, longest: int) -> list[int]:
    """The lengths of all requests, in order; drawn ones evenly on a logarithmic scale."""
    if isinstance(requests, list):
        return requests
    generator = random.Random(0)
    shortest = min(_SHORTEST, longest)
    low, high = math.log(shortest), math.log(longest)
    return [
        max(1, round(math.exp(low + generator.random() * (high - low)))) for _ in range(requests)
    ]


@dataclass
class Policy:
    """One way to split prompts, and what came of it."""

    name: str
    split: Callable[[int], Partition]
    rebalancer: Rebalancer | None = None
    times: list[float] = field(default_factory=list)  # ms of each request, the slowest rank's
    tokens: list[int] = field(default_factory=list)  # of each rank, over the requests
    replans: int = 0
    error: float = 0.0

    def serve(self, step_with: Any, ids: torch.Tensor) -> torch.Tensor:
        """The logits of a prompt, and its time. Collective."""
        partition = self.split(ids.size(1))
        held = self.tokens or [0] * partition.world_size
        self.tokens = [sum(both) for both in zip(held, partition.lengths, strict=True)]
        watched = self.rebalancer is not None
        with ringattn.record_timings(by_block=False) if watched else contextlib.nullcontext() as to:
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            logits, _ = step_with(partition)(ids, None)
            logits.argmax(-1).tolist()
            ms = 1e3 * (time.perf_counter() - start)
        self.times.append(from_all_ranks([ms]).max().item())
        if self.rebalancer is not None:
            self.replans += self.rebalancer.observe(to)
        return logits

    def row(self, even: Policy) -> dict[str, Any]:
        ordered, num_tokens = sorted(self.times), sum(self.tokens)
        return {
            "partition": self.name,
            "requests": len(self.times),
            "p50_ttft_ms": statistics.median(ordered),
            "p95_ttft_ms": ordered[math.ceil(0.95 * len(ordered)) - 1],
            "tokens_per_s": 1e3 * num_tokens / sum(self.times),
            "shares": ",".join(f"{100 * of_rank / num_tokens:.0f}" for of_rank in self.tokens),
            "x_even": sum(even.times) / sum(self.times),
            "replans": self.replans,
            "error": self.error,
        }


def policies(
    config: Any, device: torch.device, options: argparse.Namespace, lengths: list[int]
) -> list[Policy]:
    """Even, planned and rebalanced. Collective."""
    size = world_size()
    profiles = profiles_of(config, device, options, round(statistics.mean(lengths)))
    cost = ModelCost.from_config(config, dtype=DTYPES[options.dtype])
    rebalancer = Rebalancer(profiles, cost)
    return [
        Policy("even", lambda seq_len: Partition.even(seq_len, size)),
        Policy("planned", lambda seq_len: ringattn.plan(seq_len, profiles, cost).partition),
        Policy("rebalanced", lambda seq_len: rebalancer.plan(seq_len).partition, rebalancer),
    ]


def replay(config: Any, device: torch.device, options: argparse.Namespace) -> None:
    """Serves all requests with each policy. Collective."""
    size = world_size()
    percentages = options.percentages or [100] * size
    if len(percentages) != size:
        raise ValueError(f"--percentages must be {size}, one for each rank, got {len(percentages)}")
    lengths = drawn(options.requests, max(options.seq_lens))
    prompts = Prompts.of(options.data, config.src_vocab_size)
    header = environment(device) | {
        "model": model_text(config, options),
        "dtype": options.dtype,
        "percentages": ",".join(map(str, percentages)),
        "prompt tokens": ",".join(map(str, lengths)),
    }
    report = Report("Requests at a time over a ring", header, COLUMNS)
    report.start()
    model = own_model(config, device, options)

    def step_with(partition: Partition) -> Any:
        return own_step(model, 1, lambda _: partition)

    with repeating(percentages[rank()]):
        compared = policies(config, device, options, lengths)
        for seq_len in sorted(set(lengths)):  # what only the first prompt of a length costs
            step_with(Partition.even(seq_len, size))(prompts.draw(1, seq_len).to(device), None)
        for seq_len in tqdm(lengths, unit="request", disable=rank() != 0):
            ids = prompts.draw(1, seq_len).to(device)
            right: torch.Tensor | None = None
            for policy in compared:
                logits = policy.serve(step_with, ids)
                right = logits if right is None else right
                policy.error = max(policy.error, relative_error(logits, right))
    for policy in compared:
        report.add(policy.row(compared[0]))
    report.write(options.out)
