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

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from decode import SHAPES, random_model
from lib.cli import at_least, counts, names_of, parse, timing_arguments
from lib.problem import DTYPES, relative_error
from lib.ranks import from_all_ranks, process_group
from lib.report import Report, environment
from lib.timing import Contestant, measure
from prompts import Prompts
from ringattn import Partition
from ringattn.generation import prefill, split_prompt
from ringattn.models import LLaMA

COLUMNS = ("tokens", "batch", "chunk", "ms", "p10", "p90", "x whole", "peak_gib", "error")


def prompt(model: LLaMA, ids: torch.Tensor, chunks: Sequence[Partition]) -> torch.Tensor:
    """Hidden state [B, E] of this rank's last token of the last chunk."""
    cache = model.new_cache(chunks[0], new_tokens=ids.size(1) - chunks[0].seq_len)
    return prefill(model, ids, chunks, cache)


def last_logits(
    model: LLaMA, ids: torch.Tensor, chunks: Sequence[Partition]
) -> tuple[torch.Tensor, float]:
    """[B, V] of the last token, empty on ranks that do not have it; and the prompt's peak memory on
    this rank, GiB, nan on a CPU."""
    on_cuda = model.device.type == "cuda"
    if on_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    hidden = prompt(model, ids, chunks)
    peak = torch.cuda.max_memory_allocated() / 2**30 if on_cuda else math.nan
    if model.ring.rank != chunks[-1].owner(chunks[-1].seq_len - 1):
        return torch.empty(0, device=model.device), peak
    return model.project(hidden).float(), peak


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--shapes", type=names_of(*SHAPES), default=["8b"], help=", ".join(SHAPES))
    parser.add_argument("--layers", type=at_least(1), help="(default: those of the shape)")
    parser.add_argument("--tokens", type=counts, default=[131072])
    parser.add_argument("--chunks", type=counts, default=[16384], help="tokens, with commas")
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parse(parser)
    with process_group(options.device) as device, torch.inference_mode():
        facts = {"dtype": options.dtype, "shapes": ", ".join(options.shapes)}
        if options.layers:
            facts["layers"] = str(options.layers)
        report = Report("prompts in chunks", environment(device) | facts, COLUMNS)
        report.start()
        for shape in options.shapes:
            config = replace(SHAPES[shape], nlayers=options.layers or SHAPES[shape].nlayers)
            model = random_model(config, device, DTYPES[options.dtype])
            for tokens in options.tokens:
                add_rows(report, model, tokens, options)


def add_rows(report: Report, model: LLaMA, tokens: int, options) -> None:
    ids = Prompts(model.config.src_vocab_size).draw(options.batch, tokens).to(model.device)
    even = Partition.even(tokens, model.ring.world_size)
    sizes = [tokens, *(size for size in options.chunks if size < tokens)]
    chunks = {size: split_prompt(even, size) for size in sizes}
    contestants = [
        Contestant(str(size), partial(prompt, model, ids, chunks[size]), torch.empty(0))
        for size in sizes
    ]
    rounds = {"rounds": options.rounds, "warmup": options.warmup}
    timings = measure(contestants, model.device, **rounds)
    whole = None
    for size in sizes:
        timing = timings[str(size)]
        found, peak = last_logits(model, ids, chunks[size])
        whole = found if whole is None else whole
        difference = 0.0
        if found.shape == whole.shape and whole.numel() > 0:
            difference = relative_error(found, whole)
        report.add(
            {
                "tokens": tokens,
                "batch": options.batch,
                "chunk": size,
                **timing.columns(),
                "x whole": timing.median / timings[str(tokens)].median,
                "peak_gib": from_all_ranks([peak]).max().item(),
                "error": from_all_ranks([difference]).max().item(),
            }
        )
    report.write(options.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
