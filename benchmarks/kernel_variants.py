# SPDX-License-Identifier: Apache-2.0
"""Variants of the Hopper kernels against each other: what a change of them gains.

    python benchmarks/kernel_variants.py build before
    python benchmarks/kernel_variants.py build after --tree ../changed
    python benchmarks/kernel_variants.py time before,after,cudnn --cases 2048:causal,8192:dense:fold
    python benchmarks/kernel_variants.py time before,after --cases 16384:causal,16384:causal:ring4
    python benchmarks/kernel_variants.py time before,after --cases 16384:causal:backward

A variant is the kernels of one source tree, for bfloat16 and head dims up to 64, 128 or 256 (the
one that holds --head-dim), compiled by itself in seconds; variants are loaded side by side and
timed in the same rounds. A case is a number of tokens, a mask (causal or dense) and one of

    fold           a float32 state that the result is added to
    backward       dq, dk and dv, with the zeros of dq; its error is the largest difference from the
                   first variant's dq
    backward-deterministic
    ring4          each rank of a ring of four (2 to 16), one after the other: it stages its block,
                   fetches those of the others and attends all
    ring4-there    the same with local blocks

"ratio" is the time over the first variant's; TFLOP/s of a rank over those of the whole sequence,
the case without a ring, is its share of the ideal. A rank alone shows what larger rings than there
are devices will take. It gives itself the signals of its peers, at the moment at which it would
signal to them. Their blocks lie on the second device, which does the same at the same time with
blocks on the first one, so that links are as busy as in a ring; where there is one device, on it.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import math
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import ringattn
import torch
from isolated_rank import MAX_RANKS, IsolatedRank, given_up_after
from lib.cli import shape_arguments, timing_arguments
from lib.problem import Problem, shape_text
from lib.report import Report, environment
from lib.timing import Contestant, max_error, measure
from peers import torch_sdpa

HERE = Path(__file__).resolve().parent
FOLDER = HERE.parent / "build" / "variants"
COLUMNS = ["case", "what", "ms", "p10", "p90", "TFLOP/s", "ratio", "max error"]
HEAD_DIMS = (64, 128, 256)  # that kernels are made for
_SAMPLE_FLOPS = 7e11  # a millisecond, about
_MOST_IN_A_ROW = 50  # which the host enqueues while the device is kept busy
_PATIENCE = 60.0  # seconds, with one rank of a ring
_FLAGS = ["-O3", "-DNDEBUG", "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a"]
_FLAGS += ["--expt-relaxed-constexpr", "-Xcompiler=-fPIC,-fvisibility=hidden"]
_EXPORTS = ["attend", "attend_as_rank", "attend_backward", "prepare_signals", "reach", "*_bytes"]


def library(name: str, head_dim: int) -> Path:
    """Where a variant lies."""
    return FOLDER / f"{name}_{next(dim for dim in HEAD_DIMS if head_dim <= dim)}.so"


def build(name: str, tree: Path, head_dim: int, defines: list[str]) -> Path:
    """Compiles a variant and shows what nvcc says of spills and errors; CalledProcessError then."""
    to = library(name, head_dim)
    kernel_dim = to.stem.rpartition("_")[2]
    sm90 = tree / "csrc/attention/cuda/sm90"
    sources = {
        sm90 / "instantiations" / f"block_attention_bfloat16_{kernel_dim}.cu": ["-Xptxas=-v"],
        sm90 / "backward/instantiations" / f"block_attention_backward_bfloat16_{kernel_dim}.cu": [
            "-Xptxas=-v"
        ],
        sm90 / "tensor_map.cu": [],
        tree / "csrc/attention/cuda/sm90/scheduler/makespan.cpp": [],
        tree / "csrc/partition/block_rows.cpp": [],
        tree / "csrc/partition/partition.cpp": [],
        tree / "csrc/partition/schedule.cpp": [],
        tree / "csrc/partition/visit_order.cpp": [],
        tree / "csrc/transport/symmetric/kernels/stage.cu": [],
        HERE / "kernel_variant.cu": [f"-DVARIANT_HEAD_DIM={kernel_dim}"],
    }
    flags = [*_FLAGS, f"-I{tree / 'csrc'}", *(f"-D{define}" for define in defines)]
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        objects = [str(Path(scratch, f"{source.stem}.o")) for source in sources]
        compilers = [
            subprocess.Popen(
                ["nvcc", *flags, *more, "-c", str(source), "-o", to_object],
                stderr=subprocess.STDOUT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for (source, more), to_object in zip(sources.items(), objects, strict=True)
        ]
        for compiler in compilers:
            said, _ = compiler.communicate()
            for line in said.splitlines():
                if "spill" in line or "error" in line.lower():
                    print(line.strip())
        for compiler in compilers:
            if compiler.returncode != 0:
                raise subprocess.CalledProcessError(compiler.returncode, compiler.args)
        # Of several in one process, each has its own of everything else.
        exports = Path(scratch, "exports")
        exports.write_text(
            f"{{ global: {' '.join(f'{name};' for name in _EXPORTS)} local: *; }};\n"
        )
        link = ["nvcc", "-shared", f"-Xlinker=--version-script={exports}", *objects]
        subprocess.run([*link, "-o", str(to)], check=True)
    described = subprocess.run(
        ["git", "-C", str(tree), "describe", "--always", "--dirty"], capture_output=True, text=True
    )
    told = [described.stdout.strip() or str(tree), *defines]
    to.with_suffix(".txt").write_text(" ".join(told) + "\n")
    return to


@dataclass(frozen=True)
class Case:
    """What is computed: `text` is as the command line has it."""

    text: str
    rows: int
    causal: bool
    fold: bool = False
    ranks: int = 1
    there: bool = False  # a ring's blocks are local, not fetched
    backward: bool = False
    deterministic: bool = False

    @classmethod
    def of(cls, text: str) -> Case:
        found = re.fullmatch(
            r"([0-9]+):(causal|dense)(?::(fold)|:ring([0-9]+)(-there)?|:(backward)(-deterministic)?)?",
            text,
        )
        rows, ranks = (int(found[1]), int(found[4] or 1)) if found else (0, 1)
        if found is None or rows < ranks or (found[4] and not 2 <= ranks <= MAX_RANKS):
            raise argparse.ArgumentTypeError(
                "cases must be like 4096:causal, 4096:dense:fold, 4096:causal:backward, "
                f"16384:causal:ring4 (of 2 to {MAX_RANKS}) or 16384:causal:ring4-there, got {text}"
            )
        fold, there = found[3] is not None, found[5] is not None
        passes = found[6] is not None, found[7] is not None
        return cls(text, rows, found[2] == "causal", fold, ranks, there, *passes)


def cases(text: str) -> list[Case]:
    return [Case.of(case) for case in text.split(",")]


def kernel(name: str, head_dim: int) -> ctypes.CDLL:
    return ctypes.CDLL(str(library(name, head_dim)))


def variant(name: str, problem: Problem, fold: bool, tile_rows: int) -> Callable[[], torch.Tensor]:
    """One launch of a variant; what it returns is written again by the next."""
    batch, rows, heads, head_dim = problem.q.shape
    attend = kernel(name, head_dim).attend
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    attend.argtypes = [pointer] * 6 + [integer] * 7 + [ctypes.c_float, pointer]
    # Nothing yet: however often the same is folded in, the result stays what it is.
    out = torch.zeros_like(problem.q, dtype=torch.float32 if fold else problem.q.dtype)
    lse = torch.full((batch, heads, rows), -math.inf, device=out.device)

    def call() -> torch.Tensor:
        error = attend(
            *(x.data_ptr() for x in problem.tensors),
            *((None, out.data_ptr()) if fold else (out.data_ptr(), None)),
            *(lse.data_ptr(), batch, rows, heads, problem.k.size(2), head_dim),
            *(0 if problem.causal else rows, tile_rows, head_dim**-0.5),
            torch.cuda.current_stream().cuda_stream,
        )
        if error != 0:
            raise RuntimeError(f"{name} failed with CUDA error {error}")
        return out

    return call


def backwards(case: Case, names: list[str], problem: Problem) -> Iterator[Contestant]:
    """In the order of their names. What one returns, dq, is written again by the next."""
    batch, rows, heads, head_dim = problem.q.shape
    diagonal = 0 if problem.causal else None
    out, lse = ringattn.block_attention(*problem.tensors, diagonal=diagonal)
    grad_out = torch.randn_like(problem.q)
    delta = (grad_out.float() * out).sum(-1).transpose(1, 2).contiguous()
    grads = [torch.empty_like(x, dtype=torch.float32) for x in problem.tensors]
    turns = torch.empty(1 + 2 * batch * heads * math.ceil(rows / 64), dtype=torch.int32)
    turns = turns.to(out.device)
    pointer, integer = ctypes.c_void_p, ctypes.c_int

    def call(attend: Callable[..., int]) -> torch.Tensor:
        grads[0].zero_()
        turns.zero_()
        error = attend(
            *(x.data_ptr() for x in (*problem.tensors, grad_out, lse, delta, *grads)),
            *(turns.data_ptr() if case.deterministic else None, batch, rows, heads),
            *(problem.k.size(2), head_dim, rows if diagonal is None else diagonal),
            *(head_dim**-0.5, torch.cuda.current_stream().cuda_stream),
        )
        if error != 0:
            raise RuntimeError(f"a backward failed with CUDA error {error}")
        return grads[0]

    for name in names:
        attend = kernel(name, head_dim).attend_backward
        attend.argtypes = [pointer] * 10 + [integer] * 6 + [ctypes.c_float, pointer]
        yield Contestant(name, functools.partial(call, attend), torch.arange(rows))


def whole_sequence(
    case: Case, names: list[str], problem: Problem, tile_rows: int
) -> Iterator[Contestant]:
    """In the order of their names."""
    positions = torch.arange(case.rows, device=problem.q.device)
    for name in names:
        if name == "cudnn":
            peers = {peer.name: peer for peer in torch_sdpa.prepare(problem)}
            yield replace(peers["torch cuDNN"], name=name)
        else:
            yield Contestant(name, variant(name, problem, case.fold, tile_rows), positions)


def compete(
    report: Report,
    text: str,
    field: list[Contestant],
    problem: Problem,
    flops: float,
    arguments: argparse.Namespace,
    errors: dict[str, float] | None = None,
) -> None:
    """One row for each contestant of a field that does the same work, in its order."""
    in_a_row = min(max(1, round(_SAMPLE_FLOPS / flops)), _MOST_IN_A_ROW)
    field = [replace(contestant, back_to_back=in_a_row) for contestant in field]
    errors = errors or {contestant.name: max_error(contestant, problem) for contestant in field}
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    for name, timing in timings.items():
        report.add(
            {
                "case": text,
                "what": name,
                **timing.columns(),
                "TFLOP/s": flops / timing.median / 1e9,
                "ratio": timing.median / timings[field[0].name].median,
                "max error": errors[name],
            }
        )


def compete_as_ranks(
    report: Report, case: Case, names: list[str], problem: Problem, arguments: argparse.Namespace
) -> None:
    partition = ringattn.Partition.even(case.rows, case.ranks)
    for rank in range(case.ranks):
        ranks = [
            IsolatedRank(
                name,
                kernel(name, arguments.head_dim),
                problem,
                partition,
                rank,
                there=case.there,
                tile_rows=arguments.tile_rows,
            )
            for name in names
        ]
        positions = partition.position_ids(rank, problem.q.device)
        field = [Contestant(each.name, each.call, positions) for each in ranks]
        with given_up_after(_PATIENCE, ranks):
            text = f"{case.text} rank {rank}"
            compete(report, text, field, problem, problem.flops / case.ranks, arguments)


def main() -> None:
    parser = timing_arguments(__doc__)
    shape_arguments(parser)
    parser.add_argument("what", choices=["build", "time"])
    parser.add_argument("names", help="of one variant to build, or several to time, with commas")
    parser.add_argument("--tree", type=Path, default=HERE.parent, help="whose kernel is built")
    parser.add_argument("--define", action="append", default=[], help="NAME=VALUE for its compiler")
    parser.add_argument("--cases", type=cases, default="2048:causal,2048:dense", help="with commas")
    parser.add_argument("--tile-rows", type=int, default=0, help="of a tile; 0: the host's choice")
    arguments = parser.parse_args()
    if not 1 <= arguments.head_dim <= HEAD_DIMS[-1]:
        parser.error(f"--head-dim must lie in 1..{HEAD_DIMS[-1]}, got {arguments.head_dim}")
    if arguments.heads % arguments.kv_heads != 0:
        parser.error(
            f"--heads must be a multiple of --kv-heads, got {arguments.heads}, {arguments.kv_heads}"
        )
    if arguments.what == "build" and arguments.names == "cudnn":
        parser.error("a variant must not be named cudnn, got cudnn")
    if arguments.what == "build":
        print(build(arguments.names, arguments.tree, arguments.head_dim, arguments.define))
        return
    if arguments.device != "cuda" or arguments.dtype != "bfloat16":
        parser.error("variants must be timed on a CUDA device with bfloat16")
    names = arguments.names.split(",")
    if len(set(names)) != len(names):
        parser.error(f"names must differ, got {arguments.names}")
    others = [case.text for case in arguments.cases if case.ranks > 1 or case.backward]
    if "cudnn" in names and others:
        parser.error(f"cudnn must be timed as a forward of one device, got {others[0]}")
    paths = {name: library(name, arguments.head_dim) for name in names if name != "cudnn"}
    for path in paths.values():
        if not path.exists():
            parser.error(f"variants must be built before they are timed, got no {path}")
    header = environment(torch.device("cuda")) | {
        "tensors": shape_text(arguments),
        "variants": ", ".join(
            f"{name} of {path.with_suffix('.txt').read_text().strip()}"
            for name, path in paths.items()
        ),
        "tile rows": str(arguments.tile_rows or "as the host chooses"),
        "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
    }
    report = Report("Variants of the Hopper kernel", header, COLUMNS)
    report.start()
    device = torch.device("cuda", torch.cuda.current_device())
    for case in arguments.cases:
        problem = Problem.of(arguments, case.rows, device, causal=case.causal)
        if case.ranks > 1:
            compete_as_ranks(report, case, names, problem, arguments)
            continue
        if case.backward:
            field = list(backwards(case, names, problem))
            first = field[0].call().clone()
            errors = {each.name: (each.call() - first).abs().max().item() for each in field}
            flops = 2.5 * problem.flops
            compete(report, case.text, field, problem, flops, arguments, errors)
            continue
        field = list(whole_sequence(case, names, problem, arguments.tile_rows))
        compete(report, case.text, field, problem, problem.flops, arguments)
    report.write(arguments.out)


if __name__ == "__main__":
    main()
