# SPDX-License-Identifier: Apache-2.0
"""Models of other libraries through the ring, beside the same models unmodified on one device.

    torchrun --nproc-per-node 2 benchmarks/drop_in.py --seq-lens 8192,32768,65536

One LLaMA shape with random weights through this package's own model, Hugging Face transformers and
FMS. Three ways each: "plain", the unmodified model on rank 0 alone, its attention that of PyTorch
(cuDNN where it takes the shapes, else the next best); "1 rank", through the ring of rank 0 alone;
"N ranks". The own model has no "plain": it is compared with that of transformers. Tokens after the
prompt have PyTorch's choice of attention: cuDNN would plan anew for each length. Columns:

ms        until the logits of the last token of a prompt are there, its keys and values kept; the
          slowest rank
x plain   time of "plain" / ms
x 1 rank  time of "1 rank" / ms
token ms  until the next token is on the host, the median of those after the prompt; the own model
          records CUDA graphs, the others launch each kernel
peak GiB  of rank 0's memory during the prompt, without the weights
error     largest difference of the last token's logits from those of "plain", over the largest
          logit
"""

from __future__ import annotations

import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import ringattn
import torch
import torch.distributed as dist
from decode import SHAPES, random_model
from lib.cli import at_least, counts, names_of, parse, timing_arguments
from lib.problem import DTYPES, relative_error
from lib.ranks import process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, measure
from library_models import (
    LIBRARIES,
    Step,
    best_attention,
    fms_model,
    fms_step,
    own_step,
    sharing_weights,
    transformers_model,
    transformers_step,
    whole,
)
from ringattn.models import LLaMAConfig
from ringattn.parallel import Split
from torch import nn

COLUMNS = ("library", "way", "S", "ms", "p10", "p90", "x plain", "x 1 rank", "token ms", "peak GiB")


@dataclass(frozen=True)
class Way:
    """A model of one library, and on how many ranks it runs."""

    library: str
    name: str  # "plain", "1 rank" or "N ranks"
    step: Step
    alone: bool

    @property
    def full_name(self) -> str:
        return f"{self.library}, {self.name}"


def own_ways(config: LLaMAConfig, device: torch.device, options: Any) -> Iterator[Way]:
    model = random_model(config, device, DTYPES[options.dtype])
    yield Way("own", "1 rank", own_step(model.alone(), options.tokens, whole), alone=True)
    if world_size() > 1:
        even = Split(world_size()).partition
        yield Way("own", ranks(), own_step(model, options.tokens, even), alone=False)


def transformers_ways(config: LLaMAConfig, device: torch.device, options: Any) -> Iterator[Way]:
    model = transformers_model(config, device, options)
    yield from three_ways("transformers", model, transformers_step)


def fms_ways(config: LLaMAConfig, device: torch.device, options: Any) -> Iterator[Way]:
    yield from three_ways("fms", fms_model(config, device, options), fms_step)


def three_ways(library: str, model: nn.Module, step_of: Callable[[Any], Step]) -> Iterator[Way]:
    one = ringattn.parallelize(sharing_weights(model), group="single")
    yield Way(library, "plain", step_of(model), alone=True)
    yield Way(library, "1 rank", step_of(one), alone=True)
    if world_size() > 1:
        yield Way(library, ranks(), step_of(ringattn.parallelize(sharing_weights(model))), False)


def ranks() -> str:
    return f"{world_size()} ranks"


@dataclass
class First:
    """What the first prompt of a way showed; ``logits`` of rank 0."""

    logits: torch.Tensor
    token_ms: float
    peak_gib: float | None


def first_prompt(way: Way, ids: torch.Tensor, tokens: int) -> First | None:
    """A prompt, and tokens after it. None on ranks that have no part in it."""
    if way.alone and rank() != 0:
        return None
    on_cuda = ids.is_cuda
    if on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    with best_attention():
        logits, state = way.step(ids, None)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if on_cuda else None
    first, times = logits[0].float().cpu(), []
    for _ in range(tokens):
        start = time.perf_counter()
        token = logits[0].argmax()
        token.item()  # waits for the device, as a check for the end of the text does
        if not way.alone:
            dist.broadcast(token, 0)  # equal logits on all ranks; a generation makes sure
        logits, state = way.step(token.view(1, 1), state)
        logits[0, 0].item()
        times.append(1e3 * (time.perf_counter() - start))
    return First(first, statistics.median(times), peak)


def add_rows(report: Report, ways: list[Way], seq_len: int, device: torch.device, options) -> None:
    """The rows of one length."""
    generator = torch.Generator(device).manual_seed(seq_len)
    ids = torch.randint(1, 500, (1, seq_len), generator=generator, device=device)
    first: dict[str, First | None] = {}
    for way in ways:
        if dist.is_initialized():
            dist.barrier()
        first[way.full_name] = first_prompt(way, ids, options.tokens)
    contestants = [
        Contestant(
            way.full_name,
            lambda way=way: way.step(ids, None)[0],
            torch.empty(0),
            around=best_attention,
            alone=way.alone,
        )
        for way in ways
    ]
    timings = measure(contestants, device, rounds=options.rounds, warmup=options.warmup)
    for way in ways:
        timing, shown = timings[way.full_name], first[way.full_name]
        reference = "transformers" if way.library == "own" else way.library
        plain = timings.get(f"{reference}, plain")
        one = timings[f"{way.library}, 1 rank"]
        right = first.get(f"{way.library}, plain") or first[f"{way.library}, 1 rank"]
        error = None
        if shown is not None and right is not None:
            error = relative_error(shown.logits, right.logits)
        report.add(
            {
                "library": way.library,
                "way": way.name,
                "S": seq_len,
                **timing.columns(),
                "x plain": plain.median / timing.median if plain else None,
                "x 1 rank": one.median / timing.median,
                "token ms": shown.token_ms if shown else None,
                "peak GiB": shown.peak_gib if shown else None,
                "error": error,
            }
        )


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--libraries", type=names_of(*LIBRARIES), default=list(LIBRARIES))
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument("--seq-lens", type=counts, default=[8192, 32768, 65536])
    parser.add_argument("--tokens", type=at_least(1), default=16, help="after the prompt")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parse(parser)
    makers = {"own": own_ways, "transformers": transformers_ways, "fms": fms_ways}
    # Note: torch.distributed.nn, which these libraries load, keeps a group that is there before it,
    # and threads of gloo that outlive the interpreter abort the process.
    for library in options.libraries:
        if library != "own":
            importlib.import_module(f"ringattn.integrations.{library}")
    with process_group(options.device) as device, torch.inference_mode():
        header = environment(device) | {"shape": options.shape, "dtype": options.dtype}
        for library in options.libraries:
            if library != "own":
                name = {"fms": "ibm-fms"}.get(library, library)
                header[library] = importlib.metadata.version(name)
        title = f"Models of other libraries over {ranks()}"
        report = Report(title, header, (*COLUMNS, "error"))
        report.start()
        ways = [
            way
            for library in options.libraries
            for way in makers[library](SHAPES[options.shape], device, options)
        ]
        for seq_len in options.seq_lens:
            add_rows(report, ways, seq_len, device, options)
            report.write(options.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
