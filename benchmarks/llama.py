# SPDX-License-Identifier: Apache-2.0
"""A LLaMA over the ring beside the same LLaMA with regular attention on one device.

    python benchmarks/llama.py --seq-len 8192,32768,65536,131072 --out build/llama
    torchrun --nproc-per-node 4 benchmarks/llama.py --model DIR --library fms --mode ring
    python benchmarks/llama.py --requests draw:40 --percentages 100,50

Starts its ranks itself (--world-size) where torchrun has not. Random weights unless --model is
given, on GPUs of the shape of LLaMA-3-8B, on CPU of a tiny one; through this package's model,
transformers of Hugging Face or FMS. Both strategies have the same weights and alternate, prompt by
prompt. Times are those of the slowest rank by the host's clock, from ids that are there to a token
that is read. Columns:

strategy            "regular": PyTorch's attention on rank 0 alone; "ring": on all ranks
ttft_ms             time to the first token: the prompt, and the choice of the token; median, with
                    p10 and p90
avg_decode_ms       mean of the tokens after it
total_time_ms       the first token and those after it; median
comm_time_ms        transfers of blocks to a rank, most of it beside attention
wait_ms             attention stood still because a block was not there
compute_comm_ratio  time of attention / comm_time_ms. These three are of one more prompt, blocks
                    attended one by one: sums over layers of the slowest rank in each, which
                    STEM_layers has layer by layer
tokens_per_s        of the prompts, over ttft_ms
mfu                 operations of the prompt over those that the ranks could do in ttft_ms
tensor_core_share   time of kernels that are built on tensor cores / of all that CUDA does; rank 0
peak_gib            memory during the prompt, weights included; the rank with the most
x_regular           ttft_ms of "regular" / ttft_ms
error               largest difference of the last prompt token's logits from "regular", over the
                    largest logit
status              "ok"; "out of memory"; "more than N": a prompt of N tokens ran out of it before

--requests serves prompts of these lengths (512,8192,... or draw:N, drawn) one at a time, with even,
planned and rebalanced partitions: benchmarks/llama_requests.py.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import launching
import llama_requests
import prompts
import roofline
import torch
import torch.distributed as dist
from decode import SHAPES
from lib.cli import at_least, common_arguments, counts, parse
from lib.problem import DTYPES, relative_error
from lib.ranks import from_all_ranks, process_group, rank
from lib.report import Report, environment
from lib.timing import Timing
from library_models import LIBRARIES
from llama_models import REGULAR, RING, Strategy, config_of, model_folder, model_text
from llama_models import strategies as make_strategies
from llama_timing import PARTS, Breakdown, Generation, attempt, generation
from tqdm import tqdm

MODES = {"vanilla": [REGULAR], "regular": [REGULAR], "ring": [RING]}
MODES |= {mode: [REGULAR, RING] for mode in ("compare", "both")}
COLUMNS = (
    *("strategy", "library", "ranks", "batch", "prompt_tokens", "ttft_ms", "p10", "p90"),
    *("avg_decode_ms", "total_time_ms", "comm_time_ms", "wait_ms", "compute_comm_ratio"),
    *("tokens_per_s", "mfu", "tensor_core_share", "peak_gib", "x_regular", "error", "status"),
)
LAYER_COLUMNS = ("prompt_tokens", "layer", *PARTS)


class Comparison:
    """The rows of each length, written as they come."""

    def __init__(
        self, strategies: list[Strategy], config: Any, device: torch.device, options: Any
    ) -> None:
        self.strategies, self.config, self.device = strategies, config, device
        self.options = options
        self.peak = roofline.peak_rates(device, DTYPES[options.dtype], options)
        self.prompts = prompts.Prompts.of(options.data, config.src_vocab_size)
        self.ran_out: dict[str, int] = {}  # strategy -> the length that it ran out of memory at
        facts = environment(device) | {
            "model": model_text(config, options),
            "dtype": options.dtype,
            "partition": options.partition,
            "regular attention": "the fastest" if options.flash else "without flash",
            "peak": f"{self.peak.tflops:.0f} TFLOPS a rank" if self.peak else "not known",
            "iterations": f"{options.iterations} after {options.warmup} and one of warm-up",
        }
        self.report = Report("A LLaMA over a ring and on one device", facts, COLUMNS)
        self.layers = Report(f"{self.report.title}, layer by layer", facts, LAYER_COLUMNS)

    def resume(self) -> None:
        """Takes over the rows that an earlier run of the same settings has written. Collective."""
        found: list[Any] = [None]
        stem = self.options.out
        if self.options.resume and rank() == 0 and Path(f"{stem}.json").exists():
            found = [[json.loads(Path(f"{name}.json").read_text()) for name in stems(stem)]]
        if dist.is_initialized():
            dist.broadcast_object_list(found, 0)
        if found[0] is None:
            return
        for report, content in zip((self.report, self.layers), found[0], strict=True):
            for name in report.header.keys() - {"command", "date"}:
                if content["header"].get(name) != report.header[name]:
                    raise ValueError(
                        f"--resume must go on with the same {name}, {report.header[name]}, "
                        f"got {content['header'].get(name)} in {stem}.json"
                    )
            report.rows = content["rows"]
        for row in self.report.rows:
            if row["status"] == "out of memory":
                self.ran_out[row["strategy"]] = row["prompt_tokens"]

    def has(self, seq_len: int) -> bool:
        names = {row["strategy"] for row in self.report.rows if row["prompt_tokens"] == seq_len}
        return names >= {strategy.name for strategy in self.strategies}

    def measure(self, seq_len: int) -> None:
        """The rows of one length. Collective."""
        ids = self.prompts.draw(self.options.batch, seq_len).to(self.device)
        first: dict[str, Generation | None] = {}
        rows: dict[str, dict[str, Any]] = {}
        for strategy in self.strategies:
            if strategy.name in self.ran_out:
                continue
            fits, shown = attempt(strategy, partial(generation, strategy, ids, self.options))
            if fits:
                first[strategy.name], rows[strategy.name] = shown, {}
                work = partial(Breakdown.of, strategy, ids, self.options)
                fits, parts = attempt(strategy, work)  # blocks one by one take more memory
                if fits:
                    rows[strategy.name] = self._breakdown_columns(strategy, parts, seq_len)
        samples = self._samples([s for s in self.strategies if s.name in first], ids)
        for strategy in self.strategies:
            row: dict[str, Any] = dict.fromkeys(COLUMNS)
            row |= {"strategy": strategy.name, "library": self.options.library}
            row |= {"ranks": strategy.ranks, "batch": self.options.batch, "prompt_tokens": seq_len}
            if strategy.name in first:
                row |= self._timed(strategy, seq_len, samples) | rows[strategy.name]
                row |= self._compared(strategy, first, samples) | {"status": "ok"}
            elif strategy.name in self.ran_out:
                row["status"] = f"more than {self.ran_out[strategy.name]}"
            else:
                row["status"] = "out of memory"
                self.ran_out[strategy.name] = seq_len
            self.report.add(row)
        for report, stem in zip((self.report, self.layers), stems(self.options.out), strict=True):
            report.write(stem)  # a run that is ended early leaves what it has

    def _samples(
        self, strategies: list[Strategy], ids: torch.Tensor
    ) -> dict[str, list[list[float]]]:
        """ms of each token of each iteration, the slowest rank's."""
        own: dict[str, list[float]] = {strategy.name: [] for strategy in strategies}
        for count in range(-self.options.warmup, self.options.iterations):
            for strategy in strategies if count % 2 else reversed(strategies):
                shown = generation(strategy, ids, self.options)
                if count >= 0:
                    idle = [0.0] * (1 + self.options.tokens)
                    own[strategy.name] += shown.times if shown else idle
        return {
            name: from_all_ranks(times).amax(0).view(self.options.iterations, -1).tolist()
            for name, times in own.items()
        }

    def _breakdown_columns(
        self, strategy: Strategy, parts: Breakdown | None, seq_len: int
    ) -> dict[str, Any]:
        """Columns of how a prompt's time is made up; its layers are kept. Collective for a ring."""
        found: dict[str, Any] = {"tensor_core_share": parts and parts.tensor_core_share}
        if strategy.name == RING:
            assert parts is not None
            layers = from_all_ranks(parts.layers).amax(0).view(-1, len(PARTS)).tolist()
            own, remote, transfer, wait = map(sum, zip(*layers, strict=True))
            found |= {"comm_time_ms": transfer, "wait_ms": wait}
            found["compute_comm_ratio"] = (own + remote) / transfer if transfer else None
            self.layers.rows += [
                dict(zip(LAYER_COLUMNS, (seq_len, number, *times), strict=True))
                for number, times in enumerate(layers)
            ]
        return found

    def _timed(self, strategy: Strategy, seq_len: int, samples: Any) -> dict[str, Any]:
        of_strategy = samples[strategy.name]
        timing = Timing([times[0] for times in of_strategy], [])
        flops = roofline.prefill_flops(self.config, strategy.split(seq_len), self.options.batch)
        peak = self.peak and self.peak.tflops
        return {
            "ttft_ms": timing.median,
            "p10": timing.quantile(0.1),
            "p90": timing.quantile(0.9),
            "avg_decode_ms": statistics.mean(ms for times in of_strategy for ms in times[1:]),
            "total_time_ms": statistics.median(sum(times) for times in of_strategy),
            "tokens_per_s": 1e3 * self.options.batch * seq_len / timing.median,
            "mfu": roofline.mfu(flops, timing.median, strategy.ranks, peak),
        }

    def _compared(self, strategy: Strategy, first: Any, samples: Any) -> dict[str, Any]:
        shown, regular = first[strategy.name], first.get(REGULAR)
        peak = from_all_ranks([(shown and shown.peak_gib) or 0.0]).max().item()
        found: dict[str, Any] = {"peak_gib": peak or None}
        if REGULAR in first:
            ms = {name: statistics.median(t[0] for t in samples[name]) for name in first}
            found["x_regular"] = ms[REGULAR] / ms[strategy.name]
        if shown is not None and regular is not None:
            found["error"] = relative_error(shown.logits, regular.logits)
        return found


def stems(stem: str | None) -> list[str | None]:
    """Of the rows, and of their layers."""
    return [stem, stem and f"{stem}_layers"]


def parser() -> argparse.ArgumentParser:
    """Flags of earlier benchmarks of this kind keep their meaning."""
    made = common_arguments(__doc__)
    launching.add_world_size(made)
    roofline.add_peak_arguments(made)
    made.add_argument("--mode", choices=MODES, default="compare", help="(default: compare)")
    made.add_argument("--library", choices=LIBRARIES, default="own", help="(default: own)")
    path = ("--model", "--model-path", "--model_path")
    made.add_argument(
        *path, dest="model", type=model_folder, metavar="DIR", help="of Hugging Face's format"
    )
    made.add_argument("--shape", choices=SHAPES, help="of random weights (default: 8b; CPU: tiny)")
    for name, what in (("dim", "E"), ("n-layers", "L"), ("n-heads", "H"), ("n-kv-heads", "H_kv")):
        made.add_argument(f"--{name}", type=at_least(1), metavar=what, help="in place of --shape's")
    lengths = ("--seq-len", "--seq-lens", "--num-tokens", "--num_tokens")
    made.add_argument(*lengths, dest="seq_lens", type=counts, metavar="S,S,...")
    batch = ("--batch-size", "--batch_size")
    made.add_argument(*batch, dest="batch", type=at_least(1), default=1, metavar="B")
    tokens = ("--tokens", "--num-decode-tokens", "--num_decode_tokens")
    made.add_argument(
        *tokens, dest="tokens", type=at_least(1), default=16, metavar="N", help="after a prompt"
    )
    made.add_argument("--data", type=prompts.data_folder, metavar="DIR", help="prepare_data.py's")
    made.add_argument("--dtype", choices=["float32", "float16", "bfloat16"])
    made.add_argument("--bf16", action="store_true", help="as --dtype bfloat16")
    made.add_argument(
        *("--disable-flash", "--disable_flash"),
        dest="flash",
        action="store_false",
        help="regular attention without FlashAttention's and cuDNN's kernels",
    )
    made.add_argument("--partition", choices=["even", "auto"], help="(default: even)")
    made.add_argument("--num-warmup", dest="warmup", type=at_least(0), default=0, metavar="N")
    made.add_argument("--num-iters", dest="iterations", type=at_least(1), default=3, metavar="N")
    made.add_argument("--resume", action="store_true", help="go on with what --out has already")
    llama_requests.add_arguments(made)
    return made


def parse_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with what follows from the device."""
    options = parse(parser)
    on_cuda = options.device == "cuda"
    options.strategies = MODES[options.mode]
    options.dtype = options.dtype or ("bfloat16" if on_cuda or options.bf16 else "float32")
    options.shape = options.shape or ("8b" if on_cuda else "tiny")
    default = [8192, 32768, 65536, 131072] if on_cuda else [256, 1024]
    options.seq_lens = sorted(options.seq_lens or default)
    if options.bf16 and options.dtype != "bfloat16":
        parser.error(f"--dtype must be bfloat16 with --bf16, got {options.dtype}")
    if options.resume and options.out is None:
        parser.error("--resume must come with --out STEM, got none")
    llama_requests.check(parser, options)
    options.partition = options.partition or "even"
    return options


def main() -> None:
    arguments = parser()
    options = parse_options(arguments)
    if not launching.under_launcher(arguments, options):
        return
    # Note: before the group is made: torch.distributed.nn, which these libraries load, keeps it.
    if options.library != "own":
        importlib.import_module(f"ringattn.integrations.{options.library}")
    with process_group(options.device) as device, torch.inference_mode():
        config = config_of(options, SHAPES)
        if options.requests is not None:
            llama_requests.replay(config, device, options)
            return
        comparison = Comparison(make_strategies(config, device, options), config, device, options)
        comparison.resume()
        comparison.report.start()
        with tqdm(options.seq_lens, unit="prompt", disable=rank() != 0) as lengths:
            for seq_len in lengths:
                lengths.set_postfix_str(f"{seq_len} tokens")
                if not comparison.has(seq_len):
                    comparison.measure(seq_len)


if __name__ == "__main__":
    main()
