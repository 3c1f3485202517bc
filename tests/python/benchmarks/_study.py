# SPDX-License-Identifier: Apache-2.0
"""A sweep and a trace as the study would write them, from a model instead of a machine."""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from study.splits import STRATEGIES
from study.tables import sweep_columns, sweep_rows, trace_columns

SPEED = 600.0  # TFLOPS of a rank left alone
LENGTHS = (8192, 32768)


def work(layout: str, lengths: Sequence[int], rank: int) -> float:
    """Causal pairs of a rank's queries."""
    before = sum(lengths[:rank]) + lengths[rank] / 2
    return lengths[rank] * (sum(lengths) / 2 if layout == "zigzag" else before)


def shares(strategy: str, speeds: Sequence[float]) -> list[float]:
    """Of each rank, for strategies that are simple enough."""
    if strategy.startswith("even"):
        return [1 / len(speeds)] * len(speeds)
    return [speed / sum(speeds) for speed in speeds]


def sweep(sets: Sequence[tuple[int, ...]], what: str = "attention") -> list[dict[str, Any]]:
    """Raw rows: a rank at p % has 0.9 p % of the speed, 100 % is all of it."""
    rows = []
    for percentages in sets:
        speeds = [SPEED * (1.0 if p == 100 else 0.009 * p) for p in percentages]
        for seq_len in LENGTHS:
            for strategy in STRATEGIES:
                contiguous = strategy in STRATEGIES[:4] or strategy.endswith("contiguous")
                layout = "contiguous" if contiguous else "zigzag"
                tokens = [round(seq_len * share) for share in shares(strategy, speeds)]
                tokens[0] += seq_len - sum(tokens)
                ms = [
                    16384e-9 * work(layout, tokens, r) / speeds[r] for r in range(len(percentages))
                ]
                row: dict[str, Any] = {
                    "split_type": strategy,
                    "seq_len": seq_len,
                    "what": what,
                    "percentages": ",".join(map(str, percentages)),
                    "layout": layout,
                    "depth": 1,
                    "overall_latency_ms": max(ms),
                    "p10_ms": 0.99 * max(ms),
                    "p90_ms": 1.01 * max(ms),
                    "rounds": 3,
                    "ideal_ms": 8192e-9 * seq_len**2 / sum(speeds),
                    "predicted_ms": max(ms),
                    "max_error": 1e-3,
                    "note": "",
                }
                for r, speed in enumerate(speeds):
                    row |= {
                        f"rank{r}_tokens": tokens[r],
                        f"rank{r}_latency_ms": ms[r],
                        f"rank{r}_tflops": speed,
                        f"rank{r}_linear_tflops": 1.1 * speed,
                        f"rank{r}_own_ms": 0.5 * ms[r],
                        f"rank{r}_remote_ms": 0.5 * ms[r],
                        f"rank{r}_transfer_ms": 0.1,
                        f"rank{r}_wait_ms": max(ms) - ms[r],
                    }
                rows.append(row)
    return rows


def trace(changes: Sequence[tuple[int, float]], requests: int, late: int) -> list[dict[str, Any]]:
    """Rows of a rebalancer on two ranks that plans anew `late` requests after each change of the
    last rank's speed: (request, speed), the first at request 0."""
    rows: list[dict[str, Any]] = []
    planned = changes[0][1]
    for request in range(requests):
        since, speed = [change for change in changes if change[0] <= request][-1]
        before = planned
        if request >= since + late:
            planned = speed
        rows.append(
            {
                "scenario": "drift",
                "what": "attention",
                "seq_len": 8192,
                "request": request,
                "asked_speed": speed,
                "replanned": int(request > 0 and planned != before),
                "rebalanced_ms": max(1 / (1 + planned), planned / (1 + planned) / speed),
                "oracle_ms": 1 / (1 + speed),
                "even_zigzag_ms": 0.5 / speed,
                "rank0_tokens": round(8192 / (1 + planned)),
                "rank0_oracle_tokens": round(8192 / (1 + speed)),
                "rank1_tokens": 8192 - round(8192 / (1 + planned)),
                "rank1_oracle_tokens": 8192 - round(8192 / (1 + speed)),
            }
        )
    return rows


def write(path: Path, columns: Sequence[str], rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_sweep(path: Path, rows: Sequence[dict[str, Any]], world_size: int) -> Path:
    return write(path, sweep_columns(world_size), sweep_rows(rows))


def write_trace(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    return write(path, trace_columns(2), rows)
