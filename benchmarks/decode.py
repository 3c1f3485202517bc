# SPDX-License-Identifier: Apache-2.0
"""Time per generated token from a sharded cache, beside what memory bandwidth allows.

    torchrun --nproc-per-node 4 benchmarks/decode.py --shapes 8b --contexts 65536 --dtype bfloat16
    python benchmarks/decode.py --shapes 8b,demo --contexts 4096,65536

Weights are random, on the device; the cache is filled with random keys and values, spread evenly.
Each token is timed by the host, from its predecessor's value to its own: as a long generation runs
it, launches and the exchange between ranks included, with CUDA graphs where it has them. The
slowest rank counts. Columns:

floor ms  bytes a rank must read for a token, its weights and its cached keys and values, over
          --bandwidth; of the rank with the most
x floor   ms / floor ms
error     largest difference of rank 0's logits from those of the model's layers on rank 0 alone,
          with all keys, over the largest logit
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from lib.cli import at_least, counts, names_of, parse, positive, timing_arguments
from lib.problem import DTYPES, relative_error
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, Timing, measure
from ringattn import Partition
from ringattn._distributed.one_rank import OnOneRank
from ringattn.cache import ShardedKVCache
from ringattn.generation import choose, decode
from ringattn.models import LLaMA, LLaMAConfig, demo_model_path, load_model
from ringattn.models.decode_step import DecodeStep
from ringattn.sampling import Sampling

SHAPES = {
    "8b": LLaMAConfig(
        src_vocab_size=128256,
        emb_dim=4096,
        nlayers=32,
        nheads=32,
        kvheads=8,
        hidden_dim=14336,
        max_expected_seq_len=2**20,
        rope_theta=500000.0,
    ),
    "1b": LLaMAConfig(
        src_vocab_size=128256,
        emb_dim=2048,
        nlayers=16,
        nheads=32,
        kvheads=8,
        hidden_dim=8192,
        max_expected_seq_len=2**20,
        rope_theta=500000.0,
        tie_heads=True,
    ),
    "tiny": LLaMAConfig(
        src_vocab_size=512,
        emb_dim=64,
        nlayers=2,
        nheads=4,
        kvheads=2,
        hidden_dim=128,
        max_expected_seq_len=2**20,
    ),
}
COLUMNS = ("what", "context", "batch", "ms", "p10", "p90", "us a layer", "floor ms", "x floor")


def random_model(config: LLaMAConfig, device: torch.device, dtype: torch.dtype) -> LLaMA:
    """The same weights on every rank, drawn on the device."""
    model = LLaMA(config, device="meta", dtype=dtype).to_empty(device=device)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        model.reset_parameters()
    return model.requires_grad_(False).eval()


def random_cache(model: LLaMA, partition: Partition, batch: int, tokens: int) -> ShardedKVCache:
    """A cache with this rank's share, or with the shares of all ranks for a partition of one."""
    cache = model.new_cache(partition, new_tokens=tokens)
    kv_heads, head_dim = model.config.kvheads, model.config.head_dim
    split = Partition.even(partition.seq_len, world_size()).lengths
    alone = partition.world_size == 1
    for layer in range(model.config.nlayers):
        shares = []
        for owner, length in enumerate(split):
            if not alone and owner != model.ring.rank:
                continue
            seed = layer * len(split) + owner
            generator = torch.Generator(model.device).manual_seed(seed)
            shape = (2, batch, length, kv_heads, head_dim)
            shares.append(
                torch.randn(shape, generator=generator, device=model.device, dtype=model.dtype)
            )
        cache.store(layer, *torch.cat(shares, 2).unbind(0))
    return cache


@torch.inference_mode()
def logits(model: LLaMA, partition: Partition, batch: int, graphs: bool = False) -> torch.Tensor:
    """[B, V] of the second token 1 after a random context; by the model's layers or by graphs."""
    cache = random_cache(model, partition, batch, 2)
    tokens = torch.ones(batch, dtype=torch.int64, device=model.device)
    step = DecodeStep.of(model, cache, batch) if graphs else None
    decode(model, tokens, cache, step)
    if step is not None:
        step.record(required=True)
    return model.project(decode(model, tokens, cache, step)).float()


def error(model: LLaMA, partition: Partition, batch: int, graphs: bool) -> float:
    """Error of rank 0 against the layers of its model, alone with all keys."""
    found = 0.0
    ours = logits(model, partition, batch, graphs)
    if rank() == 0:
        alone = logits(model.alone(), Partition.even(partition.seq_len, 1), batch)
        found = relative_error(ours, alone)
    return from_all_ranks([found])[0].item()


def seconds(
    model: LLaMA, partition: Partition, batch: int, tokens: int, graphs: bool
) -> Iterator[float]:
    """Time of each of ``tokens`` tokens after a random context and one more."""
    cache = random_cache(model, partition, batch, tokens + 1)
    step = DecodeStep.of(model, cache, batch)
    ids = torch.ones(batch, dtype=torch.int64, device=model.device)
    sampler = OnOneRank(model.ring, partition.owner(partition.seq_len - 1), "draw a token")
    decode(model, ids, cache, step)
    if step is not None and graphs:
        start = time.perf_counter()
        step.record(required=True)
        if rank() == 0:
            print(f"# graphs recorded in {1e3 * (time.perf_counter() - start):.0f} ms", flush=True)
    if dist.is_initialized():
        dist.barrier()
    for _ in range(tokens):
        start = time.perf_counter()
        hidden = decode(model, ids, cache, step)
        ids = choose(model, hidden, sampler, batch, Sampling(greedy=True), None)
        ids.tolist()  # waits for the device, as a check for the end of the text does
        yield time.perf_counter() - start


def bytes_read(model: LLaMA, partition: Partition, batch: int) -> int:
    """Bytes for a token on the rank with most keys; of the embedding, used rows only."""
    weights = sum(parameter.nbytes for parameter in model.parameters())
    if model.head is not None:
        weights -= model.base_model.embedding.weight.nbytes
    config = model.config
    row = 2 * config.nlayers * config.kvheads * config.head_dim * model.dtype.itemsize
    return weights + batch * max(partition.lengths) * row


def copy_bandwidth(device: torch.device) -> float:
    """GB/s of a large copy, read and written bytes counted."""
    size = 2**31 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = Contestant("copy", lambda: target.copy_(source), torch.empty(0))
    timing = measure([copy], device, rounds=8, warmup=1)[copy.name]
    return 2 * size / min(timing.own_samples) / 1e6


def main() -> None:
    parser = timing_arguments(__doc__)
    shapes = names_of(*SHAPES, "demo")
    parser.add_argument("--shapes", type=shapes, default="8b", help=f"{', '.join(SHAPES)}, demo")
    parser.add_argument("--contexts", type=counts, default=[4096, 65536])
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--eager", action="store_true", help="time tokens without CUDA graphs too")
    parser.add_argument("--bandwidth", type=positive, help="GB/s of the floor (default: of a copy)")
    options = parse(parser)
    with process_group(options.device) as device, torch.inference_mode():
        header = environment(device)
        bandwidth = options.bandwidth or copy_bandwidth(device)
        measured = "given" if options.bandwidth else "measured, a copy"
        header |= {"dtype": options.dtype, "bandwidth": f"{bandwidth:.0f} GB/s ({measured})"}
        header["tokens timed"] = str(options.rounds)
        report = Report("decode", header, (*COLUMNS, "error"))
        report.start()
        for shape in options.shapes:
            dtype = DTYPES[options.dtype]
            if shape == "demo":
                model = load_model(demo_model_path(), device=device, dtype=dtype)
            else:
                model = random_model(SHAPES[shape], device, dtype)
            for context in options.contexts:
                add_rows(report, model, shape, context, bandwidth, options)
            del model
        report.write(options.out)


def add_rows(
    report: Report, model: LLaMA, shape: str, context: int, bandwidth: float, options
) -> None:
    """One row, two where tokens are to be timed without CUDA graphs too."""
    partition = Partition.even(context, world_size())
    floor = 1e3 * bytes_read(model, partition, options.batch) / (bandwidth * 1e9)
    size = world_size()
    logits(model, Partition.even(size, size), options.batch)  # one-time costs of a first token
    ways = {shape: True, f"{shape}, eager": False} if options.eager else {shape: True}
    for what, graphs in ways.items():
        found = error(model, partition, options.batch, graphs)
        tokens = options.warmup + options.rounds
        times = [
            1e3 * second for second in seconds(model, partition, options.batch, tokens, graphs)
        ][options.warmup :]
        timing = Timing(from_all_ranks(times).amax(0).tolist(), times)
        report.add(
            {
                "what": what,
                "context": context,
                "batch": options.batch,
                **timing.columns(),
                "us a layer": 1e3 * timing.median / model.config.nlayers,
                "floor ms": floor,
                "x floor": timing.median / floor,
                "error": found,
            }
        )


if __name__ == "__main__":
    main()
