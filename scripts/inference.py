#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text from a model of FMS whose prompt is spread over a ring of ranks.

    torchrun --nproc-per-node 2 scripts/inference.py --architecture llama --variant 3-8b \\
        --model_path DIR --model_source hf --tokenizer DIR --default_dtype bf16
    torchrun --nproc-per-node 2 scripts/inference.py --architecture hf_pretrained --model_path DIR
    torchrun --nproc-per-node 2 scripts/inference.py --variant micro --device_type cpu --compare

Flags are those of FMS's script of this name. Without --model_path weights are random, the same on
every rank. --compare generates on every rank alone as well; the exit status is 1 where its tokens
differ, as those of half types may where two tokens are as likely.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import fms.utils.generation
import ringattn
import torch
from fms.utils.generation import pad_input_ids, trim_prefix, truncate_after_eos
from fms.utils.tokenizers import get_tokenizer
from ringattn.cli.common import process_group
from ringattn.integrations.fms import generate, get_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPT = "The ring passes keys and values on, and every rank attends to all of them. "


# FMS calls the methods of its tokenizers that its character tokenizer has deprecated.
warnings.filterwarnings("ignore", "this method will be deprecated", DeprecationWarning)


def prompt_ids(tokenizer: Any, options: argparse.Namespace) -> list[torch.Tensor]:
    """Of each prompt, int64 ``[T]``."""
    texts = options.prompt or [PROMPT]
    if options.prompt_file is not None:
        texts = [options.prompt_file.read_text()]
    found = []
    for text in texts:
        ids = tokenizer.convert_tokens_to_ids(tokenizer.tokenize(text))
        if tokenizer.bos_token_id is not None:
            ids = [tokenizer.bos_token_id, *ids]
        found.append(torch.tensor(ids, dtype=torch.int64))
    return found


def generated(
    model: Any, prompts: list[torch.Tensor], device: torch.device, over_ring: bool, options: Any
) -> tuple[torch.Tensor, list[float]]:
    """The prompts and what follows them, ``[B, T + N]``, and the seconds of each token."""
    longest = max(len(prompt) for prompt in prompts)
    if all(len(prompt) == longest for prompt in prompts):
        ids, padding = torch.stack(prompts), None
    else:
        ids, padding = pad_input_ids(prompts)
        padding = {name: value.to(device) for name, value in padding.items()}
    call = generate if over_ring else fms.utils.generation.generate
    return call(
        model,
        ids.to(device),
        max_seq_len=longest + options.max_new_tokens,
        max_new_tokens=options.max_new_tokens,
        use_cache=not options.no_use_cache,
        do_sample=False,
        timing="per-token",
        extra_kwargs=padding,
    )


def show(tokenizer: Any, result: torch.Tensor, seconds: list[float]) -> None:
    for row in result:
        ids = truncate_after_eos(trim_prefix(row), tokenizer.eos_token_id).cpu()
        words = tokenizer.convert_ids_to_tokens(ids)
        print(tokenizer.convert_tokens_to_string(words), end="\n\n")
    print(f"time to first token: {1e3 * seconds[0]:.1f} ms")
    if len(seconds) > 1:
        print(f"time per token: {1e3 * statistics.median(seconds[1:]):.1f} ms")


def partition_of(text: str) -> str | list[int]:
    """A type of arguments: even, auto, or tokens of each rank."""
    if text in ("even", "auto"):
        return text
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be even, auto or lengths such as 3000,1096, got {text!r}"
        ) from None


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--architecture", default="llama", help="(default: llama)")
    made.add_argument("--variant", help="of the architecture, as 3-8b or micro")
    made.add_argument("--model_path", help="folder of the weights (default: random ones)")
    made.add_argument("--model_source", help="hf, fms, ... (default: by the files)")
    made.add_argument("--tokenizer", default="char_tokenizer", help="folder, or char_tokenizer")
    devices = ["auto", "cuda", "cpu"]
    made.add_argument("--device_type", choices=devices, default="auto", help="(default: auto)")
    made.add_argument("--default_dtype", choices=DTYPES, default="fp32", help="(default: fp32)")
    made.add_argument("--no_use_cache", action="store_true", help="every token a whole prompt")
    made.add_argument("--prompt", action="append", metavar="TEXT", help="may be given repeatedly")
    made.add_argument("--prompt_file", type=Path, metavar="FILE")
    made.add_argument("--max_new_tokens", type=int, default=64, metavar="N", help="(default: 64)")
    made.add_argument(
        *("--partition", "--block_lens"),
        type=partition_of,
        default="even",
        metavar="even|auto|LENGTHS",
        help="tokens of each rank, or their shares (default: even)",
    )
    made.add_argument("--compare", action="store_true", help="one rank alone must say the same")
    made.add_argument("--distributed", action="store_true", help="as always under torchrun")
    made.add_argument("--distributed_strategy", choices=["ring"], help="as always")
    return made


def main() -> int:
    options = parser().parse_args()
    # Note: FMS is loaded before the group: torch.distributed.nn, which it imports, keeps one alive.
    with process_group(options.device_type) as (device, _):
        return run(options, device)


def run(options: argparse.Namespace, device: torch.device) -> int:
    """The exit status; only rank 0 prints."""
    tokenizer = get_tokenizer(options.tokenizer)
    torch.manual_seed(0)
    model = get_model(
        options.architecture,
        options.variant,
        model_path=options.model_path,
        source=options.model_source,
        device_type=device.type,
        data_type=DTYPES[options.default_dtype],
        distributed_strategy="ring",
        block_lens=options.partition,
    )
    model = model.eval().requires_grad_(False)
    prompts = prompt_ids(tokenizer, options)
    if options.compare and options.no_use_cache and len({len(ids) for ids in prompts}) > 1:
        # FMS itself, without a cache, says something else for padded prompts than with one.
        raise ValueError(
            "prompts must have one length with --compare and --no_use_cache, "
            f"got {', '.join(str(len(ids)) for ids in prompts)} tokens"
        )
    result, seconds = generated(model, prompts, device, True, options)
    status = 0
    first = int(os.environ.get("RANK", "0")) == 0
    if first:
        show(tokenizer, result, seconds)
    if options.compare:
        alone, seconds = generated(ringattn.unparallelize(model), prompts, device, False, options)
        same = torch.equal(result, alone)
        status = 0 if same else 1
        if first:
            said = "the same tokens" if same else "other tokens"
            print(f"one rank alone: {said}, the first after {1e3 * seconds[0]:.1f} ms")
    return status


if __name__ == "__main__":
    sys.exit(main())
