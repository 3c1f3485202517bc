# SPDX-License-Identifier: Apache-2.0
"""A prompt that goes through the layers whole, and in chunks: time and memory.

    torchrun --nproc-per-node 2 benchmarks/chunked_prefill.py --tokens 131072 --chunks 16384

Weights are random, on the device. A call goes from token ids to the hidden state of the last token,
with the keys and values of all tokens in a cache; the slowest rank counts. Columns:

chunk     tokens at a time, as ringattn.generate's prefill_chunk_size; all of them at first
x whole   ms / ms of all tokens at a time
peak_gib  memory during the prompt, weights and cache included; the rank with the most
error     largest difference of the last token's logits from those of the whole prompt, over the
          largest logit
"""

from __future__ import annotations

from functools import partial

import torch
from decode import SHAPES, random_model
from lib.cli import at_least, counts, names_of, parse, timing_arguments
from lib.problem import DTYPES
from lib.ranks import from_all_ranks, process_group
from lib.report import Report, environment
from lib.timing import Contestant, measure
from ringattn import Partition
from ringattn.generation import prefill, split_prompt
from ringattn.models import LLaMA

COLUMNS = ("tokens", "batch", "chunk", "ms", "p10", "p90", "x whole", "peak_gib", "error")


def prompt(model: LLaMA, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """Hidden state [B, E] of this rank's last token of the last chunk."""
    chunks = split_prompt(Partition.even(ids.size(1), model.ring.world_size), chunk)
    cache = model.new_cache(chunks[0], new_tokens=ids.size(1) - chunks[0].seq_len)
    return prefill(model, ids, chunks, cache)


def peak_gib(model: LLaMA, ids: torch.Tensor, chunk: int) -> float:
    """The rank with the most. Collective."""
    if model.device.type != "cuda":
        return float("nan")
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    prompt(model, ids, chunk)
    return from_all_ranks([torch.cuda.max_memory_allocated() / 2**30]).max().item()


def logits(model: LLaMA, ids: torch.Tensor, chunk: int) -> torch.Tensor:
    """[B, V] of the last token, from the rank that has it. Collective."""
    chunks = split_prompt(Partition.even(ids.size(1), model.ring.world_size), chunk)
    owner = chunks[-1].owner(chunks[-1].seq_len - 1)
    hidden = prompt(model, ids, chunk)
    if model.ring.rank != owner:
        return torch.empty(0, device=model.device)
    return model.project(hidden).float()


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--shapes", type=names_of(*SHAPES), default=["8b"], help=", ".join(SHAPES))
    parser.add_argument("--tokens", type=counts, default=[131072])
    parser.add_argument("--chunks", type=counts, default=[16384], help="tokens, with commas")
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parse(parser)
    with process_group(options.device) as device, torch.inference_mode():
        facts = {"dtype": options.dtype, "shapes": ", ".join(options.shapes)}
        report = Report("prompts in chunks", environment(device) | facts, COLUMNS)
        report.start()
        for shape in options.shapes:
            model = random_model(SHAPES[shape], device, DTYPES[options.dtype])
            for tokens in options.tokens:
                add_rows(report, model, tokens, options)


def add_rows(report: Report, model: LLaMA, tokens: int, options) -> None:
    generator = torch.Generator().manual_seed(tokens)
    shape = (options.batch, tokens)
    ids = torch.randint(0, model.config.src_vocab_size, shape, generator=generator)
    ids = ids.to(model.device)
    chunks = [tokens, *(chunk for chunk in options.chunks if chunk < tokens)]
    contestants = [
        Contestant(str(chunk), partial(prompt, model, ids, chunk), torch.empty(0))
        for chunk in chunks
    ]
    rounds = {"rounds": options.rounds, "warmup": options.warmup}
    timings = measure(contestants, model.device, **rounds)
    whole = logits(model, ids, tokens)
    for chunk in chunks:
        timing, found = timings[str(chunk)], logits(model, ids, chunk)
        difference = 0.0
        if found.shape == whole.shape and whole.numel() > 0:
            difference = ((found - whole).abs().max() / whole.abs().max()).item()
        report.add(
            {
                "tokens": tokens,
                "batch": options.batch,
                "chunk": chunk,
                **timing.columns(),
                "x whole": timing.median / timings[str(tokens)].median,
                "peak_gib": peak_gib(model, ids, chunk),
                "error": from_all_ranks([difference]).max().item(),
            }
        )
    report.write(options.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
