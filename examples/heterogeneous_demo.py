# SPDX-License-Identifier: Apache-2.0
"""A ring whose last rank is slow, under every way to split the sequence.

    torchrun --nproc-per-node 2 examples/heterogeneous_demo.py --speed 0.4 --figure demo.png

The last rank repeats its work, so that it is a slower one, on GPUs and on CPUs. Its speed is
measured, the sequence is split in six ways, each is timed; then the rank recovers while requests
come in, and the rebalancer follows, or it is said that timings are too noisy here.
scripts/demo_heterogeneous.sh prepares and runs all that.
"""

import argparse
import contextlib
import importlib.util
import math
import os
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import ringattn
import torch
import torch.distributed as dist
from ringattn import profiling, strategies
from ringattn.testing import slowdown

ROUNDS = 7
REQUESTS = 24  # half of them after the recovery
RECOVERED = 0.8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seq-len", type=int, help="tokens (65536 on GPUs, 4096 on CPUs)")
    parser.add_argument("--speed", type=float, default=0.4, help="of the last rank, at most 1")
    parser.add_argument("--figure", metavar="FILE", help="bars and a trace, PNG or SVG")
    arguments = parser.parse_args()
    check(parser, arguments)

    device = torch.device("cpu")
    if torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        run(arguments, device)
    finally:
        dist.destroy_process_group()


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    if arguments.seq_len is not None and arguments.seq_len < 1:
        parser.error(f"--seq-len must be at least 1, got {arguments.seq_len}")
    if not 0 < arguments.speed <= 1:
        parser.error(f"--speed must lie in (0, 1], got {arguments.speed:g}")
    if arguments.figure is not None:
        path = Path(arguments.figure)
        if path.suffix.lower() not in (".png", ".svg"):
            parser.error(f"--figure must end in .png or .svg, got {path}")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            parser.error(f"--figure must be a file that can be written, got {path}")
        if importlib.util.find_spec("matplotlib") is None:
            parser.error("--figure must find the package matplotlib, got none")
    if "WORLD_SIZE" not in os.environ:
        parser.error("ranks must be started by torchrun, got a process without it")


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    on_cuda = device.type == "cuda"
    seq_len = arguments.seq_len
    if seq_len is None:
        seq_len = 65536 if on_cuda else 4096
    shape = {"num_heads": 32, "head_dim": 128} if on_cuda else {"num_heads": 4, "head_dim": 64}
    kv_heads = shape["num_heads"] // 4
    dtype = torch.bfloat16 if on_cuda else torch.float32

    def last_rank_at(speed: float) -> contextlib.AbstractContextManager[None]:
        return slowdown(1 / speed if rank == world_size - 1 else 1.0)

    def tensors(partition: ringattn.Partition) -> list[torch.Tensor]:
        tokens = partition.lengths[rank]
        return [
            torch.randn(1, tokens, heads, shape["head_dim"], dtype=dtype, device=device)
            for heads in (shape["num_heads"], kv_heads, kv_heads)
        ]

    def milliseconds(partition: ringattn.Partition, qkv: list[torch.Tensor]) -> float:
        """Of one ring call, on the slowest rank."""
        dist.barrier()
        start = time.perf_counter()
        ringattn.ring_attention(*qkv, partition)
        if on_cuda:
            torch.cuda.synchronize()
        taken = torch.tensor(1e3 * (time.perf_counter() - start), device=device)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    # 1. How fast is every rank?
    with last_rank_at(arguments.speed):
        profiles = ringattn.measure_profiles(
            **shape, num_kv_heads=kv_heads, dtype=dtype, device=device
        )
    say(f"{world_size} ranks on {device.type}, {seq_len} tokens; measured, all at once:")
    for r, profile in enumerate(profiles):
        say(f"  rank {r}: attention {profile.attention_tflops:.3g} TFLOPS")

    # 2. Six ways to split. The first four know percentages, the others what was measured.
    cost = ringattn.ModelCost.attention_only(**shape, num_kv_heads=kv_heads, dtype=dtype)
    percentages = [100.0] * (world_size - 1) + [100 * arguments.speed]
    table = strategies.matmul_table(percentages, [profile.linear_tflops for profile in profiles])
    rebalancer = ringattn.Rebalancer(profiles, cost)
    with warnings.catch_warnings(record=True) as clamped:
        warnings.simplefilter("always", strategies.ClampWarning)
        splits = {
            "even": strategies.even(seq_len, world_size, layout="contiguous"),
            "uneven": strategies.uneven(seq_len, percentages, layout="contiguous"),
            "lut": strategies.lut(seq_len, percentages, table, layout="contiguous"),
            "formula": strategies.formula(seq_len, percentages, layout="contiguous"),
            "even zigzag": strategies.even(seq_len, world_size),
            "planned": ringattn.plan(seq_len, profiles, cost).partition,
        }
    for warning in clamped:
        say(f"note: {warning.message}")
    with last_rank_at(arguments.speed):
        for _ in range(12):
            request(rebalancer, seq_len, tensors)
        splits["rebalanced"] = rebalancer.plan(seq_len).partition
        latencies: dict[str, list[float]] = {name: [] for name in splits}
        inputs = {name: tensors(partition) for name, partition in splits.items()}
        for count in range(-1, ROUNDS):  # one round to warm up
            for name, partition in splits.items():
                taken = milliseconds(partition, inputs[name])
                if count >= 0:
                    latencies[name].append(taken)
    medians = {name: statistics.median(samples) for name, samples in latencies.items()}
    say(f"\n{'split':>12}  {'ms':>9}  {'even / this':>11}  tokens of each rank")
    for name, partition in splits.items():
        say(
            f"{name:>12}  {medians[name]:9.2f}  {medians['even'] / medians[name]:11.2f}  "
            f"{' '.join(map(str, partition.lengths))}, {partition.layout}"
        )

    # 3. The rank recovers, and the plans follow.
    trace = []
    believed = [rebalancer.speeds]
    for number in range(REQUESTS):
        with last_rank_at(arguments.speed if number < REQUESTS // 2 else RECOVERED):
            partition = rebalancer.plan(seq_len).partition
            taken = milliseconds(partition, tensors(partition))
            request(rebalancer, seq_len, tensors)
        trace.append((taken, partition.lengths[-1]))
        believed.append(rebalancer.speeds)
    say(f"\nfrom request {REQUESTS // 2} on the last rank runs at {RECOVERED:g}: its tokens")
    say("  " + " ".join(str(tokens) for _, tokens in trace))
    change = RECOVERED / arguments.speed
    missed = []
    if not told_apart(arguments.speed, profiles):
        missed.append("tell the ranks apart")
    # A rank without tokens shows nothing, on any machine.
    if trace[-1][1] > 0 and not followed(change, believed[REQUESTS // 2], believed[-1]):
        missed.append("follow the last rank")
    if missed:
        say(noise(missed, latencies))
    if arguments.figure and rank == 0:
        draw(arguments.figure, medians, splits, trace)
        say(f"\nfigure: {arguments.figure}")


def told_apart(speed: float, profiles: Sequence[ringattn.RankProfile]) -> bool:
    """Whether a last rank of this speed was measured as the slower one, where that can be seen."""
    *others, last = (profile.attention_tflops for profile in profiles)
    return not others or speed >= 1 - profiling.NOISE or last < min(others)


def followed(change: float, before: Sequence[float], after: Sequence[float]) -> bool:
    """Whether the last rank is believed to have changed by more than half of what it did, beside
    the others, which did not. A change that is hardly one need not be seen."""
    if len(after) < 2 or abs(change - 1) < profiling.NOISE:
        return True
    ratios = [speeds[-1] / statistics.fmean(speeds[:-1]) for speeds in (before, after)]
    return math.log(ratios[1] / ratios[0]) / math.log(change) > 0.5


def noise(missed: Sequence[str], latencies: Mapping[str, Sequence[float]]) -> str:
    """Why something was not seen, in one sentence."""
    spread = max((max(ms) - min(ms)) / statistics.median(ms) for ms in latencies.values())
    return (
        f"note: timings on this machine were too noisy to {' and to '.join(missed)}: calls that "
        f"should take the same differed by up to {100 * spread:.0f} %"
    )


def request(rebalancer: ringattn.Rebalancer, seq_len: int, tensors) -> None:
    """One request as a server would run it: plan, compute, let the rebalancer observe it."""
    planned = rebalancer.plan(seq_len)
    with ringattn.record_timings(by_block=False) as timings:
        ringattn.ring_attention(*tensors(planned.partition), planned.partition, depth=planned.depth)
    rebalancer.observe(timings)


def draw(path: str, medians: dict, splits: dict, trace: list[tuple[float, int]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (bars, shares, follows) = plt.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    names = list(medians)
    colours = ["#999999" if name not in ("planned", "rebalanced") else "#0072B2" for name in names]
    drawn = bars.barh(names, medians.values(), color=colours)
    bars.bar_label(drawn, fmt="%.1f", padding=2)
    bars.invert_yaxis()
    bars.set_xlim(0, 1.15 * max(medians.values()))  # room for the numbers
    bars.set_xlabel("latency, ms")
    left = [0] * len(names)
    palette = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
    for r in range(len(next(iter(splits.values())).lengths)):
        tokens = [partition.lengths[r] for partition in splits.values()]
        colour = palette[r % len(palette)]
        shares.barh(names, tokens, left=left, color=colour, label=f"rank {r}")
        left = [a + b for a, b in zip(left, tokens, strict=True)]
    shares.invert_yaxis()
    shares.set_xlabel("tokens")
    shares.legend(loc="upper center", bbox_to_anchor=(0.5, 1.15), ncols=len(palette))
    follows.plot([taken for taken, _ in trace], color="#009E73", marker="o", label="latency, ms")
    follows.set_xlabel("request")
    follows.set_ylabel("latency, ms", color="#009E73")
    follows.set_ylim(bottom=0)
    tokens_axis = follows.twinx()
    tokens_axis.step(
        range(len(trace)), [tokens for _, tokens in trace], where="post", color="#D55E00"
    )
    tokens_axis.set_ylabel("tokens of the last rank", color="#D55E00")
    tokens_axis.set_ylim(bottom=0)
    figure.savefig(path, dpi=150)


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


if __name__ == "__main__":
    main()
