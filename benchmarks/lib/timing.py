# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks share: problems and their float64 check, interleaved timing, reports.

Times are medians over rounds. In each round every contestant runs once, in an order drawn anew,
after a rest as long as the run before it, of LONGEST_REST at most, or after calls of its own that
do not count: clocks follow what a device did just now, and treat all alike. Across ranks the
slowest one counts, sample by sample.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ringattn
import torch
import torch.distributed as dist

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


# ---- problems ----------------------------------------------------------------------------------


class Shape(Protocol):
    """What problems of any length share; what shape_arguments() makes of a command line is one."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # a name in DTYPES


def shape_text(shape: Shape) -> str:
    """As headers name it."""
    return f"B 1, H {shape.heads}, H_kv {shape.kv_heads}, D {shape.head_dim}, {shape.dtype}"


@dataclass(frozen=True)
class Problem:
    """One attention problem: the global tensors, equal on every rank, and what of them to check."""

    q: torch.Tensor  # [B, S, H, D]
    k: torch.Tensor  # [B, S, H_kv, D]
    v: torch.Tensor  # [B, S, H_kv, D]
    causal: bool

    @classmethod
    def random(
        cls,
        seq_len: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        causal: bool,
        batch: int = 1,
    ) -> Problem:
        """Unit-normal tensors, the same on every rank."""
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(
                batch, seq_len, num, head_dim, generator=generator, device=device, dtype=dtype
            )
            for num in (heads, kv_heads, kv_heads)
        )
        return cls(q, k, v, causal)

    @classmethod
    def of(cls, shape: Shape, seq_len: int, device: torch.device, *, causal: bool) -> Problem:
        """A random one of this shape."""
        return cls.random(
            seq_len,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            dtype=DTYPES[shape.dtype],
            device=device,
            causal=causal,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def seq_len(self) -> int:
        return self.q.size(1)

    @property
    def flops(self) -> float:
        """Two matrix products over the pairs that the mask lets through."""
        batch, seq_len, heads, head_dim = self.q.shape
        pairs = seq_len * (seq_len + 1) / 2 if self.causal else seq_len**2
        return 4.0 * batch * heads * head_dim * pairs

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V repeated to H heads, for those who cannot group queries. [B, S, H, D]."""
        repeats = self.q.size(2) // self.k.size(2)
        return self.k.repeat_interleave(repeats, 2), self.v.repeat_interleave(repeats, 2)

    def even_zigzag(self) -> tuple[Problem, torch.Tensor]:
        """This rank's tensors under the even zigzag partition, and their positions, int64 [S_r]."""
        partition = ringattn.Partition.even(self.seq_len, world_size())
        shards = (partition.shard(x, rank()) for x in self.tensors)
        return Problem(*shards, self.causal), partition.position_ids(rank(), self.q.device)

    def max_error(self, out: torch.Tensor, positions: torch.Tensor, samples: int = 32) -> float:
        """Largest difference from float64 attention, over some rows.

        out: [B, S_r, H, D]; positions: int64 [S_r], where its rows stand in the sequence.
        """
        if positions.numel() == 0:
            return 0.0
        stride = max(1, positions.numel() // samples)
        rows = torch.arange(positions.numel() - 1, -1, -stride, device=positions.device)
        asked = positions[rows]  # [R]
        hidden = torch.arange(self.seq_len, device=out.device) > asked[:, None]  # [R, S]
        repeats = self.q.size(2) // self.k.size(2)
        worst = 0.0
        for head in range(self.q.size(2)):
            q = self.q[:, asked, head].double()  # [B, R, D]
            k = self.k[:, :, head // repeats].double()  # [B, S, D]
            v = self.v[:, :, head // repeats].double()
            scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))  # [B, R, S]
            if self.causal:
                scores.masked_fill_(hidden, -math.inf)
            error = (scores.softmax(-1) @ v - out[:, rows, head].double()).abs().max().item()
            # max() of Python would drop a NaN.
            worst = error if math.isnan(error) else max(worst, error)
            if math.isnan(worst):
                break
        return worst


# ---- ranks -------------------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def process_group(device: str, ranks_per_gpu: int = 1) -> Iterator[torch.device]:
    """The group that torchrun describes, if it does, and the device of this rank."""
    on, backend = torch.device("cpu"), "gloo"
    if device == "cuda":
        backend = "nccl" if ranks_per_gpu == 1 else "cpu:gloo,cuda:gloo"  # NCCL shares no GPU
        on = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) // ranks_per_gpu)
        torch.cuda.set_device(on)
    launched = "WORLD_SIZE" in os.environ
    if launched:
        dist.init_process_group(backend)
    yield on
    # Not after an exception: NCCL would wait for ranks that are in a collective operation, and
    # torchrun ends them only once this rank has ended.
    if launched:
        dist.destroy_process_group()


def from_all_ranks(values: Sequence[float]) -> torch.Tensor:
    """What every rank gave, float64 [W, len(values)], on every rank."""
    own = torch.tensor(values, dtype=torch.float64)
    if not dist.is_initialized():
        return own[None]
    own = own.to("cuda" if dist.get_backend() == "nccl" else "cpu")
    gathered = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(gathered, own)
    return torch.stack(gathered).cpu()


# ---- timing ------------------------------------------------------------------------------------

LONGEST_REST = 0.2  # seconds
_draw = random.Random(0)


@dataclass(frozen=True)
class Contestant:
    """Something to time: `call` is timed, `around` is entered before and left after it."""

    name: str
    call: Callable[[], torch.Tensor]  # -> out [B, S_r, H, D], a view of any strides
    positions: torch.Tensor  # int64 [S_r]: where the rows of out stand in the sequence
    around: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    note: str = ""
    alone: bool = False  # rank 0 runs it while the others wait, for what uses the whole machine
    from_idle: bool = False  # on CUDA: the device waits for the host, so its launches count too
    back_to_back: int = 1  # calls in a row that make one sample
    lead_in: int = 0  # calls before them, until clocks and temperature have settled
    tail: int = 0  # calls after them, until other ranks are done too


@dataclass(frozen=True)
class Timing:
    """Milliseconds over the rounds."""

    samples: Sequence[float]  # of the slowest rank
    own_samples: Sequence[float]  # of this rank

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def own_median(self) -> float:
        return statistics.median(self.own_samples)

    def columns(self) -> dict[str, float]:
        """Median and spread, as tables name them."""
        return {"ms": self.median, "p10": self.quantile(0.1), "p90": self.quantile(0.9)}

    def quantile(self, share: float) -> float:
        ordered = sorted(self.samples)
        return ordered[round(share * (len(ordered) - 1))]


def measure(
    contestants: Sequence[Contestant], device: torch.device, *, rounds: int, warmup: int
) -> dict[str, Timing]:
    """Times all contestants, one after the other in every round. On all ranks in one order."""
    own: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    for count in range(-warmup, rounds):
        for contestant in _draw.sample(contestants, len(contestants)):
            sample = _sample(contestant, device)
            if contestant.lead_in == 0:
                time.sleep(min(sample * contestant.back_to_back / 1e3, LONGEST_REST))
            if count >= 0:
                own[contestant.name].append(sample)
    return {
        name: Timing(from_all_ranks(samples).amax(0).tolist(), samples)
        for name, samples in own.items()
    }


def _sample(contestant: Contestant, device: torch.device) -> float:
    """Milliseconds of one call, all ranks having started together."""
    with contestant.around():
        if dist.is_initialized():
            dist.barrier()
        if contestant.alone and rank() != 0:
            elapsed = 0.0
        else:
            for _ in range(contestant.lead_in):
                contestant.call()
            elapsed = (_on_cuda if device.type == "cuda" else _on_cpu)(contestant)
            for _ in range(contestant.tail):
                contestant.call()
        if contestant.alone and dist.is_initialized():
            dist.barrier()
    return elapsed


def _on_cpu(contestant: Contestant) -> float:
    start = time.perf_counter()
    for _ in range(contestant.back_to_back):
        contestant.call()
    return 1e3 * (time.perf_counter() - start) / contestant.back_to_back


def _on_cuda(contestant: Contestant) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if contestant.from_idle:
        torch.cuda.synchronize()
    elif contestant.lead_in == 0:
        meet(everybody=not contestant.alone)
    begin.record()
    for _ in range(contestant.back_to_back):
        contestant.call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / contestant.back_to_back


def meet(everybody: bool = True) -> None:
    """The device is busy for some milliseconds while the host enqueues what follows: what is timed
    is the device, not Python. Then the devices of all ranks meet: their clocks differ."""
    torch.cuda._sleep(5_000_000)
    if everybody and dist.is_initialized():
        dist.all_reduce(torch.zeros(1, device="cuda"))


def max_error(contestant: Contestant, problem: Problem) -> float:
    """Largest error of one call over sampled rows of all ranks; NaN if it is NaN on any."""
    error = 0.0
    with contestant.around():
        if rank() == 0 or not contestant.alone:
            error = problem.max_error(contestant.call(), contestant.positions)
    return from_all_ranks([error]).max().item()


# ---- command line -------------------------------------------------------------------------------


def integers(text: str) -> list[int]:
    """ "1024,2048" as numbers."""
    return [int(part) for part in text.split(",")]


def at_least(least: int) -> Callable[[str], int]:
    """A type of arguments: whole numbers from ``least`` on."""

    def number(text: str) -> int:
        if not text.lstrip("-").isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer from {least} on, got {text!r}")
        return int(text)

    return number


def counts(text: str) -> list[int]:
    """A type of arguments: "1024,2048" as numbers, all of them from 1 on."""
    return [at_least(1)(part) for part in text.split(",")]


def names_of(*known: str) -> Callable[[str], list[str]]:
    """A type of arguments: some of the ``known`` names, with commas."""

    def names(text: str) -> list[str]:
        for name in text.split(","):
            if name not in known:
                raise argparse.ArgumentTypeError(f"must be of {', '.join(known)}, got {name!r}")
        return text.split(",")

    return names


transport_names = names_of("auto", "process_group", "nccl", "symmetric")
_ON_CPU = ("auto", "process_group")


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments; wrong usage where the device, or its kernels for the dtype, are not there."""
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device must be cpu without a CUDA device, got cuda")
    if arguments.device == "cuda" and getattr(arguments, "dtype", None) == "float64":
        parser.error("--dtype must not be float64 on CUDA, got float64")
    return arguments


def parse_under_torchrun(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The same; wrong usage where no launcher says which rank this is."""
    arguments = parse(parser)
    if "WORLD_SIZE" not in os.environ:
        parser.error("ranks must be started by torchrun, got a process without it")
    return arguments


def check_transports(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Wrong usage where the device does not have one of them."""
    for name in arguments.transports:
        if arguments.device == "cpu" and name not in _ON_CPU:
            parser.error(f"--transports must be of {', '.join(_ON_CPU)} on CPU, got {name!r}")


def shape_arguments(parser: argparse.ArgumentParser) -> None:
    """What makes the command line a Shape."""
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def common_arguments(description: str | None) -> argparse.ArgumentParser:
    """--device and --out, alike in every benchmark."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=["cpu", "cuda"], default=default)
    parser.add_argument("--out", metavar="STEM", help="write STEM.md, STEM.csv and STEM.json")
    return parser


def timing_arguments(description: str | None) -> argparse.ArgumentParser:
    """:func:`common_arguments`, --rounds and --warmup, alike wherever contestants are timed."""
    parser = common_arguments(description)
    parser.add_argument("--rounds", type=at_least(1), default=20, help="samples of each contestant")
    parser.add_argument("--warmup", type=at_least(0), default=3, help="rounds that do not count")
    return parser
