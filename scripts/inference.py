#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Text from a model of FMS whose prompt is spread over a ring of ranks.

    torchrun --nproc-per-node 2 scripts/inference.py --architecture llama --variant 3-8b \\
        --model_path DIR --model_source hf --tokenizer DIR --default_dtype bf16
    torchrun --nproc-per-node 2 scripts/inference.py --model_path DIR
    torchrun --nproc-per-node 2 scripts/inference.py --compare

Flags are those of FMS's script of this name. --model_path alone is a folder in Hugging Face's
format. Without it the model is small, with random weights, the same on every rank: its text
means nothing. --compare generates on every rank alone as well; the exit status is 1 where tokens
differ, as those of half types may where two tokens are as likely.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import fms.utils.generation
import ringattn
import torch
from fms.models import list_models, list_variants
from fms.utils.generation import pad_input_ids, trim_prefix, truncate_after_eos
from fms.utils.tokenizers import char_tokenizer, get_tokenizer
from ringattn.cli.common import process_group
from ringattn.cli.progress import Progress, TextStream, visible
from ringattn.integrations.fms import generate, get_model
from ringattn.integrations.fms.support import body_of, num_positions
from ringattn.models.loading import model_folder

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PROMPT = "The ring passes keys and values on, and every rank attends to all of them. "
OF_HUGGING_FACE = ("hf_pretrained", "hf_configured")


# FMS calls the methods of its tokenizers that its character tokenizer has deprecated.
warnings.filterwarnings("ignore", "this method will be deprecated", DeprecationWarning)


def choose_model(options: argparse.Namespace) -> None:
    """Fills in the architecture, the variant and the tokenizer where they are not given.

    Raises:
        ValueError: names that FMS does not know; a variant that is missing.
        FileNotFoundError: no such folder.
    """
    path = options.model_path
    if path is not None and options.architecture is None and options.variant is None:
        options.architecture = "hf_pretrained"
    if options.architecture == "hf_pretrained":
        options.model_source = None  # FMS takes none: it is hf
    options.architecture = options.architecture or "llama"
    if options.architecture not in OF_HUGGING_FACE:
        if options.architecture not in list_models():
            known = ", ".join([*OF_HUGGING_FACE, *list_models()])
            raise ValueError(f"--architecture must be of {known}, got {options.architecture}")
        variants = list(list_variants(options.architecture))
        if path is None and options.variant is None and "micro" in variants:
            options.variant = "micro"
        if options.variant not in variants:
            known = ", ".join(variants)
            raise ValueError(
                f"--variant must be of {known} for {options.architecture}, "
                f"got {options.variant or 'none'}"
            )
    if path is not None and options.architecture == "hf_pretrained":
        folder = model_folder(path)
        if options.tokenizer is None and list(folder.glob("tokenizer*")):
            options.tokenizer = path
    elif path is not None and "*" not in path and not Path(path).exists():
        raise FileNotFoundError(f"--model_path must be a folder or a file, got no such path {path}")
    options.tokenizer = options.tokenizer or char_tokenizer


def tokenizer_of(name: str) -> Any:
    """FMS's for this folder or name.

    Raises:
        ValueError: there is none.
    """
    try:
        return get_tokenizer(name)
    except (OSError, RuntimeError, ValueError) as error:
        first_line = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"--tokenizer must be a folder with a tokenizer, or {char_tokenizer}, got {name}: "
            f"{first_line}"
        ) from None


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


def text_of(tokenizer: Any, ids: torch.Tensor) -> str:
    """Without the token that begins it."""
    if ids.numel() > 0 and ids[0] == tokenizer.bos_token_id:
        ids = ids[1:]
    return tokenizer.convert_tokens_to_string(tokenizer.convert_ids_to_tokens(ids))


class Shown:
    """What rank 0 prints while tokens come: the text of one prompt, or how many tokens of several.
    FMS calls it after each token, on rank 0; every rank gives one, since all must ask for the
    same."""

    def __init__(
        self, tokenizer: Any, prompts: list[torch.Tensor], num_tokens: int, quiet: bool
    ) -> None:
        self.end = tokenizer.eos_token_id
        self.num_tokens = num_tokens
        self.seconds: list[float] = []  # that printing took, of each token
        self.progress = Progress("prompt" if len(prompts) == 1 else "prompts", quiet=quiet)
        self.text = None
        if len(prompts) == 1 and not quiet:
            self.prompt = visible(text_of(tokenizer, prompts[0]))
            self.text = TextStream(lambda ids: text_of(tokenizer, torch.tensor(ids)))
        self.ended = False

    def __call__(
        self, position: int, logits: torch.Tensor, next_val: torch.Tensor, kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        begun = time.perf_counter()
        if self.text is None:
            self.progress.at(f"{len(self.seconds) + 1} of {self.num_tokens} tokens")
        elif not self.ended:
            token = int(next_val)
            if not self.seconds:
                self.progress.close()
                print(self.prompt, end="", flush=True)
            self.text.add(token)
            self.ended = token == self.end
        self.seconds.append(time.perf_counter() - begun)
        return next_val, kwargs

    def close(self) -> None:
        self.progress.close()
        if self.text is not None:
            self.text.close()


def generated(
    model: Any,
    prompts: list[torch.Tensor],
    device: torch.device,
    over_ring: bool,
    options: Any,
    shown: Shown | None = None,
) -> tuple[torch.Tensor, list[float]]:
    """The prompts and what follows them, ``[B, T + N]``, and the seconds of each token."""
    longest = max(len(prompt) for prompt in prompts)
    if all(len(prompt) == longest for prompt in prompts):
        ids, padding = torch.stack(prompts), None
    else:
        ids, padding = pad_input_ids(prompts)
        padding = {name: value.to(device) for name, value in padding.items()}
    call = generate if over_ring else fms.utils.generation.generate
    result, seconds = call(
        model,
        ids.to(device),
        max_seq_len=longest + options.max_new_tokens,
        max_new_tokens=options.max_new_tokens,
        use_cache=not options.no_use_cache,
        do_sample=False,
        timing="per-token",
        extra_kwargs=padding,
        post_iteration_hook=shown,
    )
    if shown is not None and shown.seconds:
        seconds = [taken - printing for taken, printing in zip(seconds, shown.seconds, strict=True)]
    return result, seconds


def check_lengths(
    model: Any, device: torch.device, prompts: list[torch.Tensor], num_tokens: int
) -> None:
    """ValueError where the model has no position for a token that it is given; the last new one is
    not."""
    longest, most = max(len(prompt) for prompt in prompts), num_positions(body_of(model), device)
    if most is not None and longest + num_tokens - 1 > most:
        raise ValueError(
            f"prompt and --max_new_tokens must be at most the model's {most} tokens together, "
            f"got {longest} and {num_tokens}"
        )


def show_rows(tokenizer: Any, result: torch.Tensor) -> None:
    for row in result:
        ids = truncate_after_eos(trim_prefix(row), tokenizer.eos_token_id).cpu()
        print(visible(text_of(tokenizer, ids)), end="\n\n")


def show_times(seconds: list[float]) -> None:
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
    made.add_argument(
        "--architecture", help="(default: llama; with --model_path alone that of its config.json)"
    )
    made.add_argument("--variant", help="of the architecture, as 3-8b (default: micro)")
    made.add_argument(
        "--model_path",
        metavar="DIR",
        help="folder of the weights, in Hugging Face's format unless --variant is given "
        "(default: random weights)",
    )
    made.add_argument("--model_source", help="hf, fms, ... (default: by the files)")
    made.add_argument(
        "--tokenizer",
        metavar="DIR",
        help="folder, or char_tokenizer (default: of --model_path where it has one, else "
        "char_tokenizer)",
    )
    devices = ["auto", "cuda", "cpu"]
    made.add_argument("--device_type", choices=devices, default="auto", help="(default: auto)")
    made.add_argument("--default_dtype", choices=DTYPES, default="fp32", help="(default: fp32)")
    made.add_argument("--no_use_cache", action="store_true", help="every token a whole prompt")
    prompt = made.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", action="append", metavar="TEXT", help="may be given repeatedly")
    prompt.add_argument("--prompt_file", type=Path, metavar="FILE")
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
    """The exit status: 0, 1 for a comparison that failed, 2 for wrong usage."""
    options = parser().parse_args()
    rank = os.environ.get("RANK", "0")
    try:
        if options.max_new_tokens < 1:
            raise ValueError(f"--max_new_tokens must be at least 1, got {options.max_new_tokens}")
        choose_model(options)
        tokenizer = tokenizer_of(options.tokenizer)
        prompts = prompt_ids(tokenizer, options)
        if options.compare and options.no_use_cache and len({len(ids) for ids in prompts}) > 1:
            # FMS itself, without a cache, says something else for padded prompts than with one.
            raise ValueError(
                "prompts must have one length with --compare and --no_use_cache, "
                f"got {', '.join(str(len(ids)) for ids in prompts)} tokens"
            )
        # Note: FMS is loaded before the group: torch.distributed.nn, which it imports, keeps one
        # alive.
        with process_group(options.device_type, "--device_type") as (device, world_size):
            return run(options, tokenizer, prompts, device, world_size, rank == "0")
    except (ValueError, OSError) as error:
        print(f"inference: {'' if rank == '0' else f'rank {rank}: '}{error}", file=sys.stderr)
        return 2


def run(
    options: argparse.Namespace,
    tokenizer: Any,
    prompts: list[torch.Tensor],
    device: torch.device,
    world_size: int,
    first: bool,
) -> int:
    """The exit status; only the first rank prints."""
    if first:
        show_header(options, prompts, device, world_size)
    torch.manual_seed(0)
    begun = time.perf_counter()
    with Progress("loading the weights", quiet=not first):
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
    check_lengths(model, device, prompts, options.max_new_tokens)
    if first:
        count = sum(parameter.numel() for parameter in model.parameters())
        seconds = time.perf_counter() - begun
        print(f"weights: {count:,} parameters, loaded in {seconds:.1f} s\n", flush=True)
    shown = Shown(tokenizer, prompts, options.max_new_tokens, quiet=not first)
    try:
        result, seconds = generated(model, prompts, device, True, options, shown)
    finally:
        shown.close()
    if first:
        if len(prompts) > 1:
            show_rows(tokenizer, result)
        else:
            print()
        show_times(seconds)
    status = 0
    if options.compare:
        with Progress("one rank alone", quiet=not first):
            alone, seconds = generated(
                ringattn.unparallelize(model), prompts, device, False, options
            )
        same = torch.equal(result, alone)
        status = 0 if same else 1
        if first:
            said = "the same tokens" if same else "other tokens"
            print(f"one rank alone: {said}, the first after {1e3 * seconds[0]:.1f} ms")
    return status


def show_header(
    options: argparse.Namespace, prompts: list[torch.Tensor], device: torch.device, world_size: int
) -> None:
    """What is known before anything is loaded."""
    name = f"{options.architecture} {options.variant}"
    if options.model_path is None and options.architecture not in OF_HUGGING_FACE:
        name += ", random weights: its text means nothing"
    elif options.model_path is not None:
        name = Path(options.model_path).resolve().name
    print(f"model: {name}, {options.default_dtype} on {device.type}")
    lengths = " and ".join(str(len(ids)) for ids in prompts)
    print(
        f"prompt: {lengths} tokens over {world_size} rank{'s' if world_size > 1 else ''}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
