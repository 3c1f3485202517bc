# SPDX-License-Identifier: Apache-2.0
"""What ``ringattn generate`` says of its run: the values of --json, and lines for a person."""

from __future__ import annotations

import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn import _library
from ringattn.cli.auto import AutoPartition, describe
from ringattn.cli.common import aligned
from ringattn.cli.run import Run
from ringattn.cli.text import Tokenizer
from ringattn.models import LLaMA, LLaMAConfig, demo_model_path
from ringattn.partition import Partition
from ringattn.timings import Timings


def show_header(
    folder: Path,
    config: LLaMAConfig,
    place: str,
    num_tokens: int,
    world_size: int,
    partition: Partition | None,
) -> None:
    """What is known before anything is loaded."""
    print(f"model: {folder.resolve().name}, {config.nlayers} layers, {place}")
    if folder == demo_model_path():
        print("       small, to try the ring: it writes text that looks like Python's help()")
    ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
    how = "planned for their speeds" if partition is None else partition.layout
    print(f"prompt: {num_tokens} tokens over {ranks}, {how}", flush=True)


def show_weights(model: LLaMA, seconds: float) -> None:
    """What there is to say once they are loaded."""
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"weights: {count:,} parameters, loaded in {seconds:.1f} s\n", flush=True)


def result_of(
    folder: Path,
    model: LLaMA,
    prompt_ids: list[int],
    generated: Run,
    compared: dict[str, Any] | None,
    tokenizer: Tokenizer,
    auto: AutoPartition | None,
) -> dict[str, Any]:
    """All there is to say, of all ranks. Collective."""
    partition = generated.partition
    rank, world_size = model.ring.rank, model.ring.world_size
    on_cuda = model.device.type == "cuda"
    own = {
        "rank": rank,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "tokens": partition.lengths[rank],
        "segments": partition.segments(rank),
        **generated.clock(),
        "ring": generated.timings.summary(),
        "steps": ring_steps(generated.timings),
    }
    ranks: list[Any] = [own]
    if world_size > 1:
        ranks *= world_size
        dist.all_gather_object(ranks, own)
    return {
        "command": sys.argv[1:],
        "versions": {
            "ringattn": _library.VERSION,
            "torch": torch.__version__,
            "cuda": torch.version.cuda if on_cuda else None,
            "python": platform.python_version(),
        },
        "model": {
            "path": str(folder),
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "layers": model.config.nlayers,
            "dtype": str(model.dtype).removeprefix("torch."),
        },
        "world_size": world_size,
        "partition": {
            "layout": partition.layout,
            "lengths": list(partition.lengths),
            "order": list(partition.order),
        },
        "plan": None if auto is None else auto.result(),
        "prompt_ids": prompt_ids,
        "generated_ids": generated.generated_ids,
        "text": tokenizer.decode(generated.generated_ids),
        **generated.clock(),
        "ranks": ranks,
        "compare": compared,
    }


def show(result: dict[str, Any]) -> None:
    """The text is there already: the run has printed it."""
    if result["plan"] is not None:
        print(describe(result["plan"]))
    print()
    columns = ("rank", "tokens", "attention ms", "transfer ms", "wait ms", "device", "positions")
    rows = [
        (
            str(report["rank"]),
            str(report["tokens"]),
            *(f"{report['ring'][f'{name}_ms']:.1f}" for name in ("attention", "transfer", "wait")),
            report["device"],
            " ".join(f"{start}-{stop - 1}" for start, stop in report["segments"]) or "none",
        )
        for report in result["ranks"]
    ]
    for line in aligned([columns, *rows], left=("device", "positions")):
        print(line)
    print()
    print(f"time to first token: {result['time_to_first_token_ms']:.1f} ms")
    if result["time_per_token_ms"] is not None:
        print(
            f"time per token: {result['time_per_token_ms']:.2f} ms "
            f"(median of {len(result['token_ms'])})"
        )
    if result["compare"] is not None:
        print(f"one rank alone: {_comparison(result)}")


def _comparison(result: dict[str, Any]) -> str:
    ours, alone = result["generated_ids"], result["compare"]
    if alone["same"]:
        return f"the same {len(ours)} tokens, first after {alone['time_to_first_token_ms']:.1f} ms"
    pairs = zip(ours, alone["generated_ids"], strict=False)
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return f"{len(alone['generated_ids'])} tokens instead of {len(ours)}"
    return f"other tokens, from token {first} of {len(ours)} on"


def ring_steps(timings: Timings) -> list[dict[str, Any]]:
    """One entry per visiting block, in visiting order, summed over the layers."""
    steps: dict[int, dict[str, Any]] = {}  # by source
    for step in timings.steps:
        total = steps.setdefault(step.source, {"source": step.source, "kind": step.kind})
        for name, value in asdict(step).items():
            if name.endswith("_ms"):
                total[name] = total.get(name, 0.0) + value
    return list(steps.values())
