# SPDX-License-Identifier: Apache-2.0
"""ringattn generate: text from a LLaMA over a ring of ranks, and where the time went.

torchrun --nproc-per-node 4 -m ringattn generate --model DIR --prompt-file F --max-new-tokens 64
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn import _library
from ringattn.cli.auto import AutoPartition, describe
from ringattn.cli.common import (
    DTYPES,
    add_device_argument,
    aligned,
    check_json,
    process_group,
)
from ringattn.cli.text import Tokenizer, read_tokenizer
from ringattn.generation import generate
from ringattn.models import LLaMA, demo_model_path, load_model
from ringattn.models.loading import model_folder
from ringattn.partition import LAYOUTS, Partition
from ringattn.timings import Timings, record_timings


def add_parser(commands: Any) -> None:
    """Adds the command to ``argparse``'s sub-parsers."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "generate",
        help="text from a LLaMA over a ring",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="Hugging Face LLaMA directory (default: the small one of the package)",
    )
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument(
        "--prompt-file",
        type=Path,
        metavar="F",
        help="file with the prompt: text, or token ids for a model without tokenizer",
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=64, metavar="N", help="at most (default: 64)"
    )
    parser.add_argument(
        "--partition",
        default="even",
        metavar="even|LENGTHS|auto",
        help="tokens of the prompt on each rank, such as 3000,1096; auto: as many as its speed is "
        "worth, followed from run to run (default: even)",
    )
    parser.add_argument(
        "--profiles",
        type=Path,
        metavar="F",
        help="speeds for --partition auto, from ringattn profile (default: measured first)",
    )
    parser.add_argument(
        "--layout",
        choices=LAYOUTS,
        default="zigzag",
        help="one piece at each end of the prompt for every rank, or one in all (default: zigzag)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="draw tokens, after logits are divided by T; 0 takes the likeliest (default: the "
        "likeliest without --top-k and --top-p, 1 with one of them)",
    )
    parser.add_argument(
        "--top-k", type=int, metavar="K", help="draw among the K likeliest (default: among all)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        metavar="P",
        help="draw among the likeliest of mass P (default: among all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the end of the text")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: float32)")
    add_device_argument(parser)
    parser.add_argument(
        "--cuda-graphs",
        action=argparse.BooleanOptionalAction,
        help="record a token's kernels once and replay them (default: in longer generations)",
    )
    parser.add_argument(
        "--warmup", type=int, default=0, metavar="R", help="untimed runs first (default: 0)"
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="generate on one rank alone too; exit code 1 if its tokens differ",
    )
    parser.add_argument("--json", type=Path, metavar="F", help="tokens and timings (default: no)")


def run(options: argparse.Namespace) -> int:
    """Runs the command on this rank; only rank 0 prints."""
    if options.warmup < 0:
        raise ValueError(f"--warmup must not be negative, got {options.warmup}")
    check_json(options.json)
    folder = demo_model_path() if options.model is None else model_folder(options.model)
    tokenizer = read_tokenizer(folder)
    text = options.prompt
    if text is None:
        # Every byte counts: nothing is translated, and what is not UTF-8 survives (see Bytes).
        text = options.prompt_file.read_bytes().decode(errors="surrogateescape")
    prompt_ids = tokenizer.encode(text)
    if not prompt_ids:
        raise ValueError("prompt must have at least one token, got an empty one")
    with process_group(options.device) as (device, world_size):
        # Note: a function of its own, so that nothing of it is left when the group is destroyed. A
        # group that lives on until Python ends may crash then: its threads still free tensors.
        return _run(options, folder, tokenizer, prompt_ids, device, world_size)


def _run(
    options: argparse.Namespace,
    folder: Path,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    device: torch.device,
    world_size: int,
) -> int:
    if options.profiles is not None and options.partition != "auto":
        raise ValueError(f"--profiles must go with --partition auto, got {options.partition}")
    partition = None
    if options.partition != "auto":
        partition = parse_partition(options.partition, len(prompt_ids), world_size, options.layout)
    model = load_model(folder, device=device, dtype=DTYPES[options.dtype])
    auto = None
    if partition is None:
        auto = AutoPartition.measured(
            *(model, len(prompt_ids), options.max_new_tokens, options.layout, options.profiles)
        )
    generated = Run.timed(model, prompt_ids, partition, options, auto)
    compared = None
    if options.compare:
        compared = _on_rank_0(lambda: _compare(model, prompt_ids, generated, options))
    result = _result(folder, model, prompt_ids, generated, compared, tokenizer, auto)
    if model.ring.rank == 0:
        _show(result)
        if options.json is not None:
            options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if compared is None or compared["same"] else 1


def parse_partition(text: str, num_tokens: int, world_size: int, layout: str) -> Partition:
    """``even``, or the tokens of each rank: ``3000,1096``."""
    if text == "even":
        return Partition.even(num_tokens, world_size, layout=layout)
    try:
        lengths = [int(length) for length in text.split(",")]
    except ValueError:
        raise ValueError(
            f"--partition must be even, auto or lengths such as 3000,1096, got {text!r}"
        ) from None
    partition = Partition(layout, tuple(lengths))
    if len(lengths) != world_size:
        raise ValueError(f"--partition must have {world_size} lengths, got {len(lengths)}")
    if partition.seq_len != num_tokens:
        raise ValueError(
            f"--partition must add up to the prompt's {num_tokens} tokens, got {partition.seq_len}"
        )
    return partition


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
    ) -> Run:
        """Generates as the options say, first without a clock as often as they say. ``auto`` plans
        each run; without it and a ``partition``, shares are even."""
        prompt = torch.tensor([prompt_ids], device=model.device)
        generated_ids: list[int] = []
        ticks: list[float] = []

        def tick(tokens: torch.Tensor) -> None:
            generated_ids.append(int(tokens))  # waits for the device
            ticks.append(time.perf_counter())

        for _ in range(options.warmup + 1):
            if auto is not None:
                partition = auto.next()
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
            if auto is not None:
                auto.learn(timings)
        if partition is None:
            partition = Partition.even(len(prompt_ids), model.ring.world_size)
        if model.device.type == "cuda" and model.ring.world_size > 1:
            # One launch took all blocks; without the clock, what each of them takes by itself.
            for _ in range(min(options.warmup, 1) + 1):
                with record_timings() as timings:
                    generate(
                        model, prompt, max_new_tokens=1, partition=partition, eos_token_id=None
                    )
        times = [1e3 * (after - before) for before, after in pairwise(ticks)]
        return cls(partition, generated_ids, times[0], times[1:], timings)

    def clock(self) -> dict[str, Any]:
        """Milliseconds, as the JSON has them."""
        return {
            "time_to_first_token_ms": self.first_token_ms,
            "time_per_token_ms": statistics.median(self.token_ms) if self.token_ms else None,
            "token_ms": self.token_ms,
        }


def ring_steps(timings: Timings) -> list[dict[str, Any]]:
    """One entry per visiting block, in visiting order, summed over the layers."""
    steps: dict[int, dict[str, Any]] = {}  # by source
    for step in timings.steps:
        total = steps.setdefault(step.source, {"source": step.source, "kind": step.kind})
        for name, value in asdict(step).items():
            if name.endswith("_ms"):
                total[name] = total.get(name, 0.0) + value
    return list(steps.values())


def _on_rank_0(work: Any) -> Any:
    """What ``work()`` returns on rank 0, on every rank; the others wait."""
    box = [work() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _compare(
    model: LLaMA, prompt_ids: list[int], generated: Run, options: argparse.Namespace
) -> dict[str, Any]:
    alone = Run.timed(model.alone(), prompt_ids, None, options)
    same = alone.generated_ids == generated.generated_ids
    return {"same": same, "generated_ids": alone.generated_ids, **alone.clock()}


def _result(
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


def _show(result: dict[str, Any]) -> None:
    model, partition = result["model"], result["partition"]
    print(
        f"model: {Path(model['path']).name}, {model['layers']} layers, "
        f"{model['parameters']:,} parameters, {model['dtype']}"
    )
    print(f"prompt: {len(result['prompt_ids'])} tokens, {partition['layout']}")
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
    print()
    print(result["text"])


def _comparison(result: dict[str, Any]) -> str:
    ours, alone = result["generated_ids"], result["compare"]
    if alone["same"]:
        return f"the same {len(ours)} tokens, first after {alone['time_to_first_token_ms']:.1f} ms"
    pairs = zip(ours, alone["generated_ids"], strict=False)
    first = next((at for at, (a, b) in enumerate(pairs) if a != b), None)
    if first is None:
        return f"{len(alone['generated_ids'])} tokens instead of {len(ours)}"
    return f"other tokens, from token {first} of {len(ours)} on"
