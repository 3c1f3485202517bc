# SPDX-License-Identifier: Apache-2.0
"""Block attention beside itself: what shapes, folding, odd head dims and short sequences cost.

    python benchmarks/attention_shapes.py --out build/attention_shapes

Each section is measured in rounds of its own, "ratio" is the time over that of the section's first
row, for the same number of operations:

    ring    the calls of a causal zigzag ring: own rows under the diagonal, the tail half of the
            rows with all keys, all rows with the head half of the keys
    fold    results rounded and stored, against the same added to a float32 state
    narrow  head dims that no kernel is made for, against 128; operations are not scaled
    short   B 8 and few tokens: each kernel family by itself, and what a call takes
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from functools import partial

import ringattn
import torch
from lib.cli import integers, timing_arguments
from lib.report import Report, environment
from lib.timing import Contestant, measure
from ringattn import _C

COLUMNS = ["section", "S", "D", "mask", "what", "ms", "p10", "p90", "TFLOP/s", "ratio"]
HEADS, KV_HEADS = 32, 8


def tensors(
    device: torch.device, batch: int, queries: int, keys: int, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Unit-normal q [B, S_q, H, D], k and v [B, S_k, H_kv, D]."""
    generator = torch.Generator(device).manual_seed(0)
    shapes = ((queries, HEADS), (keys, KV_HEADS), (keys, KV_HEADS))
    q, k, v = (
        torch.randn(
            batch, rows, heads, dim, generator=generator, device=device, dtype=torch.bfloat16
        )
        for rows, heads in shapes
    )
    return q, k, v


def pairs(queries: int, keys: int, causal: bool) -> float:
    """Number of visible pairs of a query and a key."""
    return queries * (queries + 1) / 2 if causal else queries * keys


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable:
    return partial(ringattn.block_attention, q, k, v, diagonal=0 if causal else None)


def fold(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Callable:
    batch, rows, heads, dim = q.shape
    state = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full((batch, heads, rows), -math.inf, device=q.device)
    call = torch.ops.ringattn.block_attention_
    return partial(call, state, lse, q, k, v, dim**-0.5, 0 if causal else None)


@contextlib.contextmanager
def family(name: str) -> Iterator[None]:
    """Has a kernel family take the calls; "" is the choice that calls make."""
    variable = "RINGATTN_KERNEL_FAMILY"
    before = os.environ.get(variable)
    os.environ[variable] = name
    _C.reread_environment()
    try:
        yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before
        _C.reread_environment()


class Sections:
    def __init__(self, report: Report, device: torch.device, rounds: int, warmup: int) -> None:
        self.report, self.device, self.rounds, self.warmup = report, device, rounds, warmup

    def measure(
        self,
        place: dict[str, str | int],
        calls: dict[str, Callable],
        flops: Callable[[str], float],
        around: Callable[[str], contextlib.AbstractContextManager] | None = None,
        calls_per_sample: int = 1,
    ) -> None:
        """A row for each call, in the order given; `place` fills its first columns."""

        def repeated(call: Callable) -> torch.Tensor:
            for _ in range(calls_per_sample):
                call()
            return torch.empty(0)

        nowhere = torch.empty(0)
        field = [
            Contestant(name, partial(repeated, call), nowhere)
            if around is None
            else Contestant(name, partial(repeated, call), nowhere, partial(around, name))
            for name, call in calls.items()
        ]
        timings = measure(field, self.device, rounds=self.rounds, warmup=self.warmup)
        first = timings[field[0].name].median / flops(field[0].name)
        for name, timing in timings.items():
            columns = {key: value / calls_per_sample for key, value in timing.columns().items()}
            self.report.add(
                {
                    **place,
                    "what": name,
                    **columns,
                    "TFLOP/s": flops(name) / columns["ms"] / 1e9,
                    "ratio": timing.median / flops(name) / first,
                }
            )

    def ring(self, rows: int, dim: int) -> None:
        shapes = {
            "own rows, causal": (rows, rows, True),
            "tail half x all keys": (rows // 2, rows, False),
            "all rows x head half": (rows, rows // 2, False),
        }
        calls = {
            name: attend(*tensors(self.device, 1, queries, keys, dim), causal)
            for name, (queries, keys, causal) in shapes.items()
        }
        self.measure(
            {"section": "ring", "S": rows, "D": dim},
            calls,
            lambda name: 4.0 * HEADS * dim * pairs(*shapes[name]),
        )

    def fold(self, rows: int, dim: int, causal: bool) -> None:
        q, k, v = tensors(self.device, 1, rows, rows, dim)
        self.measure(
            {"section": "fold", "S": rows, "D": dim, "mask": "causal" if causal else "dense"},
            {"rounded": attend(q, k, v, causal), "folded": fold(q, k, v, causal)},
            lambda name: 4.0 * HEADS * dim * pairs(rows, rows, causal),
        )

    def narrow(self, rows: int, dims: list[int], causal: bool) -> None:
        calls = {
            f"D {dim}": attend(*tensors(self.device, 1, rows, rows, dim), causal) for dim in dims
        }
        self.measure(
            {"section": "narrow", "S": rows, "mask": "causal" if causal else "dense"},
            calls,
            lambda name: 4.0 * HEADS * dims[0] * pairs(rows, rows, causal),
        )

    def short(self, rows: int, dim: int, causal: bool) -> None:
        call = attend(*tensors(self.device, 8, rows, rows, dim), causal)
        families = {"portable": "sm80", "Hopper": "sm90", "a call's choice": ""}
        self.measure(
            {"section": "short", "S": rows, "D": dim, "mask": "causal" if causal else "dense"},
            dict.fromkeys(families, call),
            lambda name: 32.0 * HEADS * dim * pairs(rows, rows, causal),
            around=lambda name: family(families[name]),
            calls_per_sample=20,
        )


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--head-dims", type=integers, default=[64, 128, 256], help="with commas")
    arguments = parser.parse_args()
    if arguments.device != "cuda":
        parser.error(f"shapes must be measured on a CUDA device, got {arguments.device}")
    device = torch.device("cuda")
    header = environment(device) | {
        "tensors": f"B 1 (short: 8), H {HEADS}, H_kv {KV_HEADS}, bfloat16",
        "rounds": f"{arguments.rounds} after {arguments.warmup} of warm-up, medians",
    }
    report = Report("Block attention on one device: shapes", header, COLUMNS)
    report.start()
    sections = Sections(report, device, arguments.rounds, arguments.warmup)
    for dim in arguments.head_dims:
        for rows in (4096, 8192, 16384):
            sections.ring(rows, dim)
            for causal in (True, False):
                sections.fold(rows, dim, causal)
    for rows in (2048, 4096, 8192):
        for causal in (True, False):
            sections.narrow(rows, [128, 72, 80, 96, 112, 120], causal)
    for dim in arguments.head_dims:
        for rows in (1, 16, 64, 128, 256, 512):
            for causal in (True, False):
                sections.short(rows, dim, causal)
    report.write(arguments.out)


if __name__ == "__main__":
    main()
