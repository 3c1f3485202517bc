# SPDX-License-Identifier: Apache-2.0
"""One generation of ``ringattn generate``, its clock, and what it shows meanwhile."""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ringattn.cli.auto import AutoPartition
from ringattn.cli.progress import GenerationProgress, Progress, TextStream
from ringattn.generation import generate
from ringattn.models import LLaMA
from ringattn.partition import Partition
from ringattn.timings import Timings, record_timings


@dataclass(frozen=True)
class Run:
    """One generation and its clock."""

    partition: Partition
    generated_ids: list[int]
    first_token_ms: float
    token_ms: list[float]  # of each token after the first
    timings: Timings  # of the prompt's way through the ring, block by block

    @classmethod
    def timed(
        cls,
        model: LLaMA,
        prompt_ids: list[int],
        partition: Partition | None,
        options: argparse.Namespace,
        auto: AutoPartition | None = None,
        *,
        label: str = "",
        text: TextStream | None = None,
    ) -> Run:
        """Generates as the options say, first without a clock as often as they say. ``auto`` plans
        each run; without it and a ``partition``, shares are even. The last run prints its tokens on
        ``text``, on rank 0."""
        prompt = torch.tensor([prompt_ids], device=model.device)
        generated_ids: list[int] = []
        ticks: list[float] = []
        quiet = model.ring.rank != 0

        def generated(show: GenerationProgress) -> Timings:
            """One run, into ``generated_ids`` and ``ticks``."""
            printing = 0.0  # is not counted: the device waits for the host meanwhile

            def tick(tokens: torch.Tensor) -> None:
                nonlocal printing
                generated_ids.append(int(tokens))  # waits for the device
                now = time.perf_counter()
                ticks.append(now - printing)
                show.add(generated_ids[-1])
                printing += time.perf_counter() - now

            generated_ids.clear()
            ticks[:] = [time.perf_counter()]
            with record_timings(by_block=False) as timings:
                generate(
                    model,
                    prompt,
                    max_new_tokens=options.max_new_tokens,
                    partition=partition,
                    cache_lengths=None if auto is None else auto.cache_lengths,
                    temperature=options.temperature,
                    top_k=options.top_k,
                    top_p=options.top_p,
                    eos_token_id=None if options.ignore_eos else "config",
                    seed=options.seed,
                    cuda_graphs=options.cuda_graphs,
                    on_tokens=tick,
                )
            return timings

        layers = model.base_model.layers
        for number in range(options.warmup + 1):
            last = number == options.warmup
            if auto is not None:
                partition = auto.next()
            of_run = "prompt" if last else f"warm-up {number + 1} of {options.warmup}"
            with GenerationProgress(
                ", ".join(filter(None, (label, of_run))),
                layers,
                options.max_new_tokens,
                text if last else None,
                quiet=quiet,
            ) as show:
                timings = generated(show)
            if auto is not None:
                auto.learn(timings)
        if partition is None:
            partition = Partition.even(len(prompt_ids), model.ring.world_size)
        if model.ring.world_size > 1:
            # As calls go, blocks may share a launch, and no transfer is timed. Without the clock,
            # what each block takes by itself.
            with Progress("timing every block", quiet=quiet):
                for _ in range(min(options.warmup, 1) + 1):
                    with record_timings() as timings:
                        generate(
                            model, prompt, max_new_tokens=1, partition=partition, eos_token_id=None
                        )
        times = [1e3 * (after - before) for before, after in pairwise(ticks)]
        return cls(partition, list(generated_ids), times[0], times[1:], timings)

    def clock(self) -> dict[str, Any]:
        """Milliseconds, as the JSON has them."""
        return {
            "time_to_first_token_ms": self.first_token_ms,
            "time_per_token_ms": statistics.median(self.token_ms) if self.token_ms else None,
            "token_ms": self.token_ms,
        }
