# SPDX-License-Identifier: Apache-2.0
"""A transformer of diffusers over all ranks: ringattn beside diffusers' own ring and Ulysses.

    torchrun --nproc-per-node 2 benchmarks/diffusers_ring.py --grids 32x32x32,21x45x80 --heads 40
    torchrun --nproc-per-node 2 benchmarks/diffusers_ring.py --device cpu --dtype float32 \\
        --grids 4x4x4 --heads 4 --head-dim 16

The model has the shape of Wan (`WanTransformer3DModel`), a few blocks and random weights. `forward`
is a call of the model, which diffusers splits over the ranks and gathers; `one device` is the whole
model on each rank, and the error of a forward is its largest difference from that, in parts of the
largest value. `attention` is one block's self-attention with its exchange, by the calls of
diffusers' models; "all_to_all + cuDNN" is Ulysses without diffusers, one exchange of Q, K and V and
one of the result. Its error is from float64 attention over sampled rows. `x ringattn` is the time
in those of ringattn: below 1, the row is faster. A peer that fails is left out, with a remark.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import ringattn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from diffusers import ContextParallelConfig, WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.utils import logging
from lib.cli import at_least, counts, parse_under_torchrun, timing_arguments
from lib.problem import DTYPES, Problem, relative_error
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, max_error, measure
from ringattn.integrations import diffusers as ring_backend
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

OURS, ONE_DEVICE = "ringattn", "one device, SDPA"
WAYS = {  # name: diffusers' name of the attention backend, the degree that is the number of ranks
    OURS: ("ringattn", "ring"),
    "diffusers ring, cuDNN": ("_native_cudnn", "ring"),
    "diffusers ring, FlashAttention-2": ("_native_flash", "ring"),
    "diffusers Ulysses, cuDNN": ("_native_cudnn", "ulysses"),
    "diffusers Ulysses, SDPA": ("native", "ulysses"),
}
_NUM_TEXT, _TEXT_DIM, _CHANNELS = 512, 4096, 16  # as Wan has them
COLUMNS = ["S", "what", "ms", "p10", "p90", "x ringattn", "max error"]
Models = dict[str, WanTransformer3DModel]


def grids(text: str) -> list[tuple[int, ...]]:
    """A type of arguments: "32x32x32,21x45x80" as frames, height and width, in tokens."""
    found = [tuple(counts(part.replace("x", ","))) for part in text.split(",")]
    if any(len(grid) != 3 for grid in found):
        raise argparse.ArgumentTypeError(f"must be frames x height x width, got {text!r}")
    return found


# ---- the model ---------------------------------------------------------------------------------


def new_model(arguments: argparse.Namespace, device: torch.device) -> WanTransformer3DModel:
    """The same weights in every call."""
    torch.manual_seed(0)
    dim = arguments.heads * arguments.head_dim
    with device:
        model = WanTransformer3DModel(
            num_attention_heads=arguments.heads,
            attention_head_dim=arguments.head_dim,
            in_channels=_CHANNELS,
            out_channels=_CHANNELS,
            text_dim=_TEXT_DIM,
            ffn_dim=int(2.7 * dim),
            num_layers=arguments.blocks,
        )
    return model.to(DTYPES[arguments.dtype]).eval().requires_grad_(False)


def parallel_model(
    way: str, meshes: dict[str, DeviceMesh], arguments: argparse.Namespace, device: torch.device
) -> WanTransformer3DModel:
    backend, degree = WAYS[way]
    model = new_model(arguments, device)
    model.set_attention_backend(backend)
    degrees = {f"{degree}_degree": world_size()}
    model.enable_parallelism(config=ContextParallelConfig(**degrees, mesh=meshes[degree]))
    return model


def inputs(grid: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """A token is one frame of 2 x 2 latents."""
    frames, height, width = grid
    generator = torch.Generator(device).manual_seed(1)
    draw = partial(torch.randn, generator=generator, dtype=dtype, device=device)
    return {
        "hidden_states": draw(1, _CHANNELS, frames, 2 * height, 2 * width),
        "timestep": torch.tensor([500], device=device),
        "encoder_hidden_states": draw(1, _NUM_TEXT, _TEXT_DIM),
        "return_dict": False,
    }


# ---- attention ---------------------------------------------------------------------------------


def all_to_all(x: torch.Tensor) -> torch.Tensor:
    """x: [W, ...], a part for each rank. Returns [W, ...], a part from each rank."""
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x)
    return received


def ulysses(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q, k, v: [1, S_r, H, D], S_r and H alike on all ranks. Returns out [1, S_r, H, D]."""
    size = world_size()
    parts = torch.cat((q, k, v)).unflatten(2, (size, -1))  # [3, S_r, W, H/W, D]
    parts = all_to_all(parts.permute(2, 0, 1, 3, 4).contiguous())  # [W, 3, S_r, H/W, D]
    q, k, v = parts.permute(1, 3, 0, 2, 4).flatten(2, 3).unsqueeze(1)  # [1, H/W, S, D] each
    if q.is_cuda:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(q, k, v)
    else:
        out = F.scaled_dot_product_attention(q, k, v)
    out = out.transpose(1, 2).unflatten(1, (size, -1))[0]  # [W, S_r, H/W, D]
    return all_to_all(out.contiguous()).permute(1, 0, 2, 3).flatten(1, 2)[None]


def attention_calls(
    problem: Problem, models: Models
) -> dict[str, tuple[Callable[[], torch.Tensor], torch.Tensor]]:
    """Name -> call that computes one block's attention, and the positions of its rows."""
    partition = ringattn.Partition.even(problem.seq_len, world_size(), layout="contiguous")
    q, k, v = (partition.shard(x, rank()) for x in problem.tensors)
    kernel = "cuDNN" if q.is_cuda else "SDPA"
    calls: dict[str, Callable[[], torch.Tensor]] = {
        OURS: partial(ringattn.ring_attention, q, k, v, partition, causal=False),
        f"all_to_all + {kernel}": partial(ulysses, q, k, v),
    }
    for way in models.keys() - {OURS}:
        backend = AttentionBackendName(WAYS[way][0])
        options = {"backend": backend, "parallel_config": models[way]._parallel_config}
        calls[way] = partial(dispatch_attention_fn, q, k, v, **options)
    positions = partition.position_ids(rank(), q.device)
    return {name: (calls[name], positions) for name in sorted(calls, key=[*WAYS, *calls].index)}


# ---- the run -----------------------------------------------------------------------------------


def attempt(report: Report, name: str, action: Callable[[], Any]) -> Any:
    """What it returns; None, and a remark, where it fails on any rank. What is ours may not."""
    try:
        result, failure = action(), None
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except Exception as error:
        if name.endswith(OURS):
            raise
        sentence = next(iter(str(error).splitlines()), "")[:200]
        result, failure = None, f"{type(error).__name__}: {sentence}"
    if from_all_ranks([failure is not None]).any():
        report.remark(f"{name} left out: {failure or 'it failed on another rank'}")
        return None
    return result


def compete(
    report: Report,
    what: str,
    contestants: list[Contestant],
    error: Callable[[Contestant], float],
    problem: Problem,
    arguments: argparse.Namespace,
) -> None:
    """A row for each of those that run."""
    field = [
        item
        for item in contestants
        if attempt(report, f"{what}: {item.name}", item.call) is not None
    ]
    errors = {item.name: error(item) for item in field}
    timings = measure(field, problem.q.device, rounds=arguments.rounds, warmup=arguments.warmup)
    ours = timings[OURS].median
    for item in field:
        timing = timings[item.name]
        report.add(
            {
                "S": problem.seq_len,
                "what": f"{what}: {item.name}",
                **timing.columns(),
                "x ringattn": timing.median / ours,
                "max error": errors[item.name],
            }
        )
    peers = [name for name in timings if name not in (OURS, ONE_DEVICE)]
    if peers:
        best = min(peers, key=lambda name: timings[name].median)
        share = ours / timings[best].median
        report.remark(
            f"{what}, {problem.seq_len} tokens: ringattn takes {share:.2f} of the time of the "
            f"fastest peer, {best}"
        )


def compete_on(
    grid: tuple[int, ...], report: Report, models: Models, device: torch.device, arguments: Any
) -> None:
    dtype = DTYPES[arguments.dtype]
    heads = arguments.heads
    sizes = (math.prod(grid), heads, heads, arguments.head_dim)
    problem = Problem.random(*sizes, dtype=dtype, device=device, causal=False)
    given = inputs(grid, dtype, device)
    nothing = torch.empty(0)
    one_device = new_model(arguments, device)
    one_device.set_attention_backend("native")
    forwards = [
        Contestant(name, lambda model=model: model(**given)[0], nothing)
        for name, model in (models | {ONE_DEVICE: one_device}).items()
    ]
    whole = one_device(**given)[0]

    def differs(item: Contestant) -> float:
        return from_all_ranks([relative_error(item.call(), whole)]).max().item()

    compete(report, "forward", forwards, differs, problem, arguments)
    calls = attention_calls(problem, models)
    field = [Contestant(name, *call) for name, call in calls.items()]
    compete(report, "attention", field, partial(max_error, problem=problem), problem, arguments)


def compete_on_all(arguments: argparse.Namespace, report: Report, device: torch.device) -> None:
    shapes = {"ring": (world_size(), 1), "ulysses": (1, world_size())}
    meshes = {
        degree: init_device_mesh(device.type, shape, mesh_dim_names=("ring", "ulysses"))
        for degree, shape in shapes.items()
    }
    models = {}
    for way in WAYS:
        make = partial(parallel_model, way, meshes, arguments, device)
        if (model := attempt(report, way, make)) is not None:
            models[way] = model
    for grid in arguments.grids:
        compete_on(grid, report, models, device, arguments)
        report.write(arguments.out)  # a run that is ended early leaves what it has


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.set_defaults(rounds=7, warmup=2)
    help = "frames x height x width in tokens, with commas; Wan's 720p is 21x45x80"
    parser.add_argument("--grids", type=grids, default="32x32x32", help=help)
    parser.add_argument("--heads", type=at_least(1), default=24)
    parser.add_argument("--head-dim", type=at_least(1), default=128)
    parser.add_argument("--blocks", type=at_least(1), default=2, help="of the model")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    arguments = parse_under_torchrun(parser)
    ranks = int(os.environ["WORLD_SIZE"])
    for grid in arguments.grids:
        if math.prod(grid) % ranks:
            got = f"{math.prod(grid)} tokens"
            parser.error(f"--grids must have tokens that {ranks} ranks divide, got {got}")

    with process_group(arguments.device) as device, torch.no_grad():
        if device.type == "cpu":
            torch.accelerator.device_count = lambda: 1  # diffusers divides by it
        logging.set_verbosity_error()  # it warns in each call that a timestep is not split
        ring_backend.register()
        header = environment(device) | {
            "model": f"Wan, {arguments.blocks} blocks, B 1, H {arguments.heads}, "
            f"D {arguments.head_dim}, {arguments.dtype}, {_NUM_TEXT} tokens of text",
            "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
        }
        report = Report(f"A transformer of diffusers over {world_size()} ranks", header, COLUMNS)
        report.start()
        compete_on_all(arguments, report, device)
        gc.collect()  # models and meshes: groups that outlive this one may crash as Python ends


if __name__ == "__main__":
    main()
