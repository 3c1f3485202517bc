# SPDX-License-Identifier: Apache-2.0
"""A training step of a LLaMA over the ring, beside the same stack with the attention of others.

    python benchmarks/training_step.py --layers 8 --seq-lens 65536,262144 --out build/training_step
    python benchmarks/training_step.py --percentages 100,50 --partitions even,auto --ways ring
    python benchmarks/training_step.py --device cpu --seq-lens 512

Starts its ranks itself (--world-size) where torchrun has not. Random weights, of LLaMA-3-8B's shape
on GPUs, the same on every rank, in --dtype; one sequence of random tokens a step: forward, loss,
backward, gradients summed over the ranks and clipped, and with --adamw the optimizer's step.

The ways differ in attention alone, and none attends twice: a layer keeps its input, q, k, v and
what attention returned, and computes everything else again in the backward; what follows attention
in chunks of --rows rows. The head and its loss go through --head-rows rows at a time and are
computed again as well: no rank holds the logits of all its tokens. --partitions are those of the
ring: "even", "auto" (profiles measured now, and ringattn.plan for training), or shares of the
tokens as 2:1. Ranks are made unequal by --percentages: on GPUs by CUDA MPS, which this command
starts, on CPU by repeated work. Columns:

ms             a step of the slowest rank, by the host's clock; median, with p10 and p90
tokens_per_s   of the sequence
mfu            3 x (2 x weights of products x S + 4 x H x D x layers x S (S + 1) / 2) operations,
               over those that the ranks could do in that time; what is computed again does not
               count
peak_gib       of PyTorch's tensors during steps, weights and gradients included; the most of a rank
device_gib     of its GPU in use after the steps, as the driver counts it: what PyTorch keeps for
               reuse, buffers of transports, libraries
loss           of a token, in the last step; equal for all ways but for rounding, without --adamw
gradient_norm  likewise, before it is clipped
status         "ok", or what was raised
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import launching
import ringattn
import roofline
import torch
import torch.distributed as dist
import torch.nn.functional as F
from decode import SHAPES, random_model
from lib.cli import at_least, common_arguments, counts, names_of, parse
from lib.problem import DTYPES
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from llama_timing import is_out_of_memory
from ringattn import ModelCost
from ringattn._distributed.collectives import gather_objects
from ringattn._distributed.errors import report_to_peers
from ringattn._distributed.groups import resolve_group
from ringattn.models import LLaMA
from torch.utils.checkpoint import checkpoint
from training_ways import MAKERS, Trained, Way, partition_name

COLUMNS = (
    *("S", "way", "partition", "lengths", "ms", "p10", "p90", "tokens_per_s", "mfu", "peak_gib"),
    *("device_gib", "loss", "gradient_norm", "note", "status"),
)
WAYS = ("ring", "context_parallel", "ulysses")


# ---- a step -------------------------------------------------------------------------------------


def again(function: Callable[..., Any], *tensors: Any) -> Any:
    """The function's result, of which only the arguments are kept for the backward."""
    return checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)


def sum_of_losses(
    model: LLaMA, way: Way, ids: torch.Tensor, targets: torch.Tensor, options: argparse.Namespace
) -> torch.Tensor:
    """Of this rank's tokens. ids, targets: int64 [S], the same on every rank."""
    base, partition = model.base_model, way.partition
    own, expected = (partition.shard(x, rank(), dim=0) for x in (ids, targets))
    rotation = base.rotary(partition.position_ids(rank(), ids.device))
    x = base.embedding(own[None])  # [1, S_r, E]
    for layer in base.layers:
        q, k, v = again(layer.before, x, rotation)
        attended = way.attend(q, k, v).flatten(2)
        chunks = zip(x.split(options.rows, 1), attended.split(options.rows, 1), strict=True)
        x = torch.cat([again(layer.after, *chunk) for chunk in chunks], 1)
    hidden = base.dec_norm(x)[0]  # [S_r, E]

    def loss_of(rows: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.project(rows).float(), expected, reduction="sum")

    size = options.head_rows
    chunks = zip(hidden.split(size), expected.split(size), strict=True)
    return torch.stack([again(loss_of, *chunk) for chunk in chunks]).sum()


class Training:
    """A model, and steps of it. Every rank makes each call."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        config = SHAPES[options.shape]
        self.config = config.updated(nlayers=options.layers or config.nlayers)
        self.options, self.device = options, device
        self.model = random_model(self.config, device, DTYPES[options.dtype]).requires_grad_(True)
        parameters = self.model.parameters()
        self.optimizer = torch.optim.AdamW(parameters, lr=1e-5) if options.adamw else None

    def step(self, way: Way, ids: torch.Tensor) -> dict[str, float]:
        """ids: int64 [S + 1]. Milliseconds on this rank, loss and norm of the gradients."""
        self.synchronize()
        begun = time.perf_counter()
        with way.around():
            loss = sum_of_losses(self.model, way, ids[:-1], ids[1:], self.options)
            loss = loss / way.partition.seq_len
            loss.backward()
        ringattn.all_reduce_gradients(self.model)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if self.optimizer is not None:
            self.optimizer.step()
        self.model.zero_grad()
        total = loss.detach()
        if world_size() > 1:
            dist.all_reduce(total)
        found = {"loss": total.item(), "gradient_norm": norm.item()}
        self.synchronize()
        return found | {"ms": 1e3 * (time.perf_counter() - begun)}

    def synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if world_size() > 1:
            dist.barrier()

    def measure(self, way: Way, ids: torch.Tensor) -> dict[str, Any]:
        """Columns of one way. Collective."""
        on_cuda = self.device.type == "cuda"
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        steps = [self.step(way, ids) for _ in range(self.options.warmup + self.options.iterations)]
        own = [step["ms"] for step in steps[self.options.warmup :]]
        times = sorted(from_all_ranks(own).amax(0).tolist())
        ms, seq_len = statistics.median(times), way.partition.seq_len
        peak = in_use = 0.0
        if on_cuda:
            free, total = torch.cuda.mem_get_info()
            peak, in_use = torch.cuda.max_memory_allocated() / 2**30, (total - free) / 2**30
        rates = roofline.peak_rates(self.device, self.model.dtype, self.options)
        flops = training_flops(self.config, seq_len)
        return {
            "ms": ms,
            "p10": times[round(0.1 * (len(times) - 1))],
            "p90": times[round(0.9 * (len(times) - 1))],
            "tokens_per_s": 1e3 * seq_len / ms,
            "mfu": roofline.mfu(flops, ms, world_size(), rates and rates.tflops),
            "peak_gib": from_all_ranks([peak]).max().item() or None,
            "device_gib": from_all_ranks([in_use]).max().item() or None,
            "loss": steps[-1]["loss"],
            "gradient_norm": steps[-1]["gradient_norm"],
        }

    def attempt(self, way: Way, ids: torch.Tensor) -> dict[str, Any]:
        """:meth:`measure`, or what was raised as the status. Collective.

        Raises:
            RuntimeError, ValueError: what the ring raised where no rank ran out of memory.
        """
        ring, found = resolve_group(None), {}
        problem: Exception | None = None
        try:
            found = self.measure(way, ids)
        except Exception as error:
            problem = error
            if way.ours and not str(error).startswith("rank "):
                report_to_peers(ring, error)  # a peer may wait for a block of this rank
        text = "" if problem is None else str(problem).split("\n")[0]
        if problem is not None and is_out_of_memory(problem):
            text = "out of memory"
        statuses = gather_objects(ring, "benchmarks/training_step.py", text)
        if problem is not None and way.ours and "out of memory" not in statuses:
            raise problem
        problem = None  # with the tensors of its frames
        self.model.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return found | {"status": next(filter(None, statuses), "ok")}


def training_flops(config: Any, seq_len: int) -> float:
    """Of a forward and a backward, which is two of them; without what is computed again."""
    cost = ModelCost.from_config(config)
    pairs = seq_len * (seq_len + 1) / 2
    layer = cost.attention_flops * pairs + cost.linear_flops * seq_len
    head = 2.0 * config.emb_dim * config.src_vocab_size * seq_len
    return 3.0 * (config.nlayers * layer + head)


# ---- command line -------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = common_arguments(__doc__)
    launching.add_world_size(made)
    roofline.add_peak_arguments(made)
    add = made.add_argument
    add("--shape", choices=SHAPES, help="(default: 8b; CPU: tiny)")
    add("--layers", type=at_least(1), metavar="L", help="in place of the shape's")
    add("--seq-lens", type=counts, metavar="S,S,...", help="(default: 65536,262144; CPU: 256)")
    known = ", ".join(MAKERS)
    add("--ways", type=names_of(*MAKERS), default=WAYS, help=f"of {known} (default: the first 3)")
    add("--partitions", type=partitions, default=["even"], help="of the ring (default: even)")
    add("--transport", default="auto", help="of the ring (default: auto)")
    add("--dtype", choices=["float32", "float16", "bfloat16"])
    add("--adamw", action="store_true", help="an optimizer's step, too")
    add("--rows", type=at_least(1), default=16384, help="of a chunk after attention")
    add("--head-rows", type=at_least(1), default=4096, help="of a chunk of the head")
    add(
        "--iterations", type=at_least(1), default=3, metavar="N", help="steps of a way (default: 3)"
    )
    add("--warmup", type=at_least(0), default=1, metavar="N", help="before them (default: 1)")
    launching.add_percentages(made)
    return made


def partitions(text: str) -> list[str]:
    """A type of arguments: names of partitions with commas."""
    for name in text.split(","):
        shares = name.split(":")
        is_shares = len(shares) > 1 and all(share.isdecimal() for share in shares)
        if name not in ("even", "auto") and not is_shares:
            raise argparse.ArgumentTypeError(f"must be even, auto or like 2:1, got {name!r}")
    return text.split(",")


def parse_options(arguments: argparse.ArgumentParser) -> argparse.Namespace:
    options = parse(arguments)
    on_cuda = options.device == "cuda"
    options.dtype = options.dtype or ("bfloat16" if on_cuda else "float32")
    options.shape = options.shape or ("8b" if on_cuda else "tiny")
    options.seq_lens = options.seq_lens or ([65536, 262144] if on_cuda else [256])
    return options


def main() -> None:
    arguments = parser()
    options = parse_options(arguments)
    start = launching.under_percentages if options.percentages else launching.under_launcher
    if not start(arguments, options):
        return
    with process_group(options.device) as device:
        training = Training(device, options)
        config = training.config
        percentages = options.percentages or [100] * world_size()
        facts = environment(device) | {
            "model": f"{options.shape}: {config.nlayers} layers of {config.emb_dim} and "
            f"{config.hidden_dim}, {config.nheads}/{config.kvheads} heads of {config.head_dim}, "
            f"vocabulary {config.src_vocab_size}",
            "dtype": options.dtype + (", AdamW" if options.adamw else ", no optimizer"),
            "chunks": f"{options.rows} rows after attention, {options.head_rows} of the head",
            "percentages": ",".join(map(str, percentages)),
            "iterations": f"{options.iterations} after {options.warmup} of warm-up, medians",
        }
        report = Report("A training step over the ring", facts, COLUMNS)
        report.start()
        with launching.slowed(percentages, device):
            for seq_len in options.seq_lens:
                generator = torch.Generator().manual_seed(seq_len)
                shape = (seq_len + 1,)
                ids = torch.randint(config.src_vocab_size, shape, generator=generator).to(device)
                trained = Trained(seq_len, config, device, options, report)
                for name in options.ways:
                    for way in MAKERS[name](trained):
                        row = {"S": seq_len, "way": way.name, "partition": way.partition_text}
                        row |= {"lengths": partition_name(way.partition), "note": way.note}
                        report.add(row | training.attempt(way, ids))
                        report.write(options.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
