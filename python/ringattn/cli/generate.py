# SPDX-License-Identifier: Apache-2.0
"""ringattn generate: text from a LLaMA over a ring of ranks, and where the time went.

torchrun --nproc-per-node 4 -m ringattn generate --model DIR --prompt-file F --max-new-tokens 64
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ringattn.cli.auto import AutoPartition, profiles_of
from ringattn.cli.common import DTYPES, add_device_argument, check_json, process_group
from ringattn.cli.progress import Progress, TextStream
from ringattn.cli.report import result_of, show, show_header, show_weights
from ringattn.cli.run import Run
from ringattn.cli.text import Tokenizer, read_tokenizer
from ringattn.models import LLaMA, demo_model_path, load_model
from ringattn.models.loading import model_folder, read_config
from ringattn.partition import LAYOUTS, Partition
from ringattn.sampling import Sampling


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
    # Loading may take minutes: what can be refused without the weights is refused before.
    if options.profiles is not None and options.partition != "auto":
        raise ValueError(f"--profiles must go with --partition auto, got {options.partition}")
    if options.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {options.max_new_tokens}")
    num_tokens, config = len(prompt_ids), read_config(folder)
    Sampling(options.temperature, options.top_k, options.top_p)
    config.check_seq_len(num_tokens + options.max_new_tokens)
    partition, profiles = None, profiles_of(options.profiles, world_size)
    if options.partition != "auto":
        partition = parse_partition(options.partition, num_tokens, world_size, options.layout)
    first = os.environ.get("RANK", "0") == "0"
    if first:
        place = f"{options.dtype} on {device.type}"
        show_header(folder, config, place, num_tokens, world_size, partition)
    begun = time.perf_counter()
    with Progress("loading the weights", quiet=not first) as progress:
        model = load_model(
            folder,
            device=device,
            dtype=DTYPES[options.dtype],
            on_weights=lambda done, total: progress.at(f"{done >> 20} of {total >> 20} MiB"),
        )
    if first:
        show_weights(model, time.perf_counter() - begun)
    auto = None
    if partition is None:
        with Progress("measuring the ranks", quiet=not first or profiles is not None):
            auto = AutoPartition.measured(
                model, num_tokens, options.max_new_tokens, options.layout, profiles
            )
    text = TextStream(tokenizer.decode)
    generated = Run.timed(model, prompt_ids, partition, options, auto, text=text)
    compared = None
    if options.compare:
        compared = _on_rank_0(lambda: _compare(model, prompt_ids, generated, options))
    result = result_of(folder, model, prompt_ids, generated, compared, tokenizer, auto)
    if first:
        show(result)
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


def _on_rank_0(work: Any) -> Any:
    """What ``work()`` returns on rank 0, on every rank; the others wait."""
    box = [work() if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(box, src=0)
    return box[0]


def _compare(
    model: LLaMA, prompt_ids: list[int], generated: Run, options: argparse.Namespace
) -> dict[str, Any]:
    alone = Run.timed(model.alone(), prompt_ids, None, options, label="one rank alone")
    same = alone.generated_ids == generated.generated_ids
    return {"same": same, "generated_ids": alone.generated_ids, **alone.clock()}
