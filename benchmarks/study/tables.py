# SPDX-License-Identifier: Apache-2.0
"""What follows from the cells: ratios between them, and what they show."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from study.rebalancing import POLICIES
from study.sweep import STEP_COLUMNS

Row = dict[str, Any]

#: What a plan of ours has to reach of the ideal: tokens per rank from which on, share.
TARGETS = ((4096, 0.90), (8193, 0.93), (32768, 0.95))
OURS = ("planned", "rebalanced")
REFERENCE = "reference_homogeneous"  # their name for even contiguous on equal ranks
_SETTLED = 3  # requests after a change that do not count
_CLOSE = 1.05  # to the oracle


#: Columns of tables that are no numbers, and those (of a rank: without its name) that may hold
#: nothing: what only ours have, what takes equal ranks or even splits beside them.
TEXTS = ("split_type", "what", "percentages", "layout", "note", "scenario")
MAY_BE_EMPTY = (
    *("slowdown", "t_homogeneous_over_t", "speedup_over_even", "speedup_over_even_zigzag"),
    *("predicted_ms", "depth", "tflops_unthrottled"),
)


def sweep_columns(world_size: int) -> list[str]:
    """The first ones are those of https://github.com/AnshSG13/hetero_gpu_context_parallelism, in
    its order, for any number of ranks."""
    per_rank = ["tflops", "tflops_unthrottled", "linear_tflops", *STEP_COLUMNS]
    return [
        *("split_type", "seq_len", "overall_latency_ms"),
        *(f"rank{r}_{name}" for r in range(world_size) for name in ("tokens", "latency_ms")),
        *("slowdown_pct", "what", "percentages", "layout", "p10_ms", "p90_ms", "rounds"),
        *("max_error", "ideal_ms", "efficiency", "slowdown", "t_homogeneous_over_t"),
        *("speedup_over_even", "speedup_over_even_zigzag", "predicted_ms", "depth"),
        *(f"rank{r}_{name}" for r in range(world_size) for name in per_rank),
        "note",
    ]


def sweep_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows with everything that takes more than one of them.

    `slowdown` is T over the time of the same problem on equal ranks under even zigzag (a balanced
    ring), `speedup_over_even` is over even contiguous. A rank's speed, and with it the ideal, is
    that of its fastest median for the whole problem: as it was timed alone, or under a split that
    gave it everything. `reference_homogeneous`, the even contiguous ring of equal ranks, stands
    beside every set of ranks, as in the earlier study.
    """
    rows = [row for row in rows if row["split_type"] != REFERENCE]  # derived anew
    cells: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in _at_their_fastest(rows):
        cells.setdefault(_key(row), {})[row["split_type"]] = row
    derived: list[Row] = []
    references = []
    for (what, percentages, seq_len), cell in cells.items():
        asked = [int(part) for part in percentages.split(",")]
        equal = cells.get((what, ",".join(["100"] * len(asked)), seq_len), {})
        homogeneous = equal.get("even_zigzag")
        for row in cell.values():
            ms = row["overall_latency_ms"]
            row["slowdown_pct"] = min(asked)
            row["efficiency"] = row["ideal_ms"] / ms
            for column, name in (
                ("speedup_over_even", "even"),
                ("speedup_over_even_zigzag", "even_zigzag"),
            ):
                if other := cell.get(name):
                    row[column] = other["overall_latency_ms"] / ms
            if homogeneous:
                row["slowdown"] = ms / homogeneous["overall_latency_ms"]
                row["t_homogeneous_over_t"] = 1 / row["slowdown"]
                for r in range(len(asked)):
                    row[f"rank{r}_tflops_unthrottled"] = homogeneous[f"rank{r}_tflops"]
        derived += cell.values()
        if even := equal.get("even"):
            references.append((even, percentages, min(asked)))
    return derived + [
        {**even, "split_type": REFERENCE, "percentages": percentages, "slowdown_pct": least}
        for even, percentages, least in references
    ]


def _key(row: Row) -> tuple[str, str, int]:
    return row["what"], row["percentages"], row["seq_len"]


def _at_their_fastest(rows: Sequence[Row]) -> list[Row]:
    """Copies with `rank*_tflops` and `ideal_ms` from the fastest whole problem of each rank."""
    whole: dict[tuple[str, str, int], dict[int, float]] = {}  # cell -> rank -> ms
    for row in rows:
        fastest_ms = whole.setdefault(_key(row), {})
        for r in range(len(row["percentages"].split(","))):
            if row[f"rank{r}_tokens"] == row["seq_len"]:
                fastest_ms[r] = min(row["overall_latency_ms"], fastest_ms.get(r, math.inf))
    fastest = []
    for row in rows:
        names = [f"rank{r}_tflops" for r in range(len(row["percentages"].split(",")))]
        total = sum(row[name] for name in names)
        alone = [row["ideal_ms"] * total / row[name] for name in names]  # ms of each rank
        best = [min(ms, whole[_key(row)].get(r, ms)) for r, ms in enumerate(alone)]
        speeds = {
            name: row[name] * ms / least for name, ms, least in zip(names, alone, best, strict=True)
        }
        fastest.append({**row, **speeds, "ideal_ms": 1 / sum(1 / ms for ms in best)})
    return fastest


FINDING_COLUMNS = (
    *("what", "percentages", "tokens_per_rank", "seq_len", "slow_over_fast", "split_type"),
    *("efficiency", "target", "equal_ring_efficiency", "points_behind_equal_ring"),
    "predicted_over_measured",
    *("slowdown", "slowdown_bound", "over_even", "over_even_zigzag", "spread"),
)


def findings(rows: Sequence[Row]) -> list[Row]:
    """One row for each of ours, each problem and each set of ranks, beside what it should reach.
    `rows` come from :func:`sweep_rows`."""
    cells: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        cells.setdefault(_key(row), {})[row["split_type"]] = row
    found = []
    for (what, percentages, seq_len), cell in cells.items():
        world_size = len(percentages.split(","))
        equal = cells.get((what, ",".join(["100"] * world_size), seq_len), {}).get("even_zigzag")
        tokens = seq_len // world_size
        targets = [share for least, share in TARGETS if tokens >= least]
        for row in (cell[name] for name in OURS if name in cell):
            speeds = [row[f"rank{r}_tflops"] for r in range(world_size)]
            finding: Row = {
                "what": what,
                "percentages": percentages,
                "seq_len": seq_len,
                "tokens_per_rank": tokens,
                "slow_over_fast": min(speeds) / max(speeds),
                "split_type": row["split_type"],
                "efficiency": row["efficiency"],
                "target": targets[-1] if targets else None,
                "slowdown": row.get("slowdown"),
                # A balanced ring of these ranks, and 5 %.
                "slowdown_bound": 1.05 * world_size * max(speeds) / sum(speeds),
                "over_even": row.get("speedup_over_even"),
                "over_even_zigzag": row.get("speedup_over_even_zigzag"),
            }
            if row.get("predicted_ms") is not None:
                # The plan's time by speeds measured in a ring.
                finding["predicted_over_measured"] = row["predicted_ms"] / row["overall_latency_ms"]
            if equal is not None:
                behind = equal["efficiency"] - row["efficiency"]
                finding["equal_ring_efficiency"] = equal["efficiency"]
                finding["points_behind_equal_ring"] = 100 * behind
            if zigzag := cell.get("even_zigzag"):
                finding["spread"] = max(
                    (each["p90_ms"] - each["p10_ms"]) / each["overall_latency_ms"]
                    for each in (zigzag, row)
                )
            found.append(finding)
    return found


def trace_columns(world_size: int) -> list[str]:
    return [
        *("scenario", "what", "seq_len", "request", "asked_speed", "replanned"),
        *(f"{policy}_ms" for policy in POLICIES),
        *(f"rank{r}_{name}" for r in range(world_size) for name in ("tokens", "oracle_tokens")),
    ]


TRACE_FINDING_COLUMNS = (
    *("scenario", "what", "seq_len", "requests", "changes", "replans", "requests_to_follow"),
    *("over_oracle", "over_oracle_settled", "even_zigzag_over_oracle"),
)


TRACE = ("scenario", "what", "seq_len")


def traces(rows: Sequence[Row]) -> list[list[Row]]:
    """The requests of each scenario, work and length, in their order."""
    found: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in TRACE), []).append(row)
    return list(found.values())


def trace_findings(rows: Sequence[Row]) -> list[Row]:
    """One row for each trace. `requests_to_follow`: after the worst change, how many requests
    it took until the next three together were within 5 % of the oracle; `over_oracle_settled`:
    total time over the oracle's, from the fourth request after each change on."""
    found = []
    for trace in traces(rows):
        speeds = [row["asked_speed"] for row in trace]
        changes = [i for i in range(1, len(trace)) if speeds[i] != speeds[i - 1]]
        settled = [
            row
            for i, row in enumerate(trace)
            if not any(change <= i < change + _SETTLED for change in changes)
        ]
        found.append(
            {
                **{name: trace[0][name] for name in TRACE},
                "requests": len(trace),
                "changes": len(changes),
                "replans": sum(row["replanned"] for row in trace),
                "requests_to_follow": max((_to_follow(trace, i) for i in changes), default=0),
                "over_oracle": _over_oracle("rebalanced", trace),
                "over_oracle_settled": _over_oracle("rebalanced", settled),
                "even_zigzag_over_oracle": _over_oracle("even_zigzag", trace),
            }
        )
    return found


def _to_follow(trace: Sequence[Row], change: int) -> int:
    for request in range(change, len(trace)):
        if _over_oracle("rebalanced", trace[request : request + _SETTLED]) <= _CLOSE:
            return request - change
    return len(trace) - change


def _over_oracle(policy: str, trace: Sequence[Row]) -> float:
    """Total time over the oracle's."""
    return statistics.fmean(row[f"{policy}_ms"] for row in trace) / statistics.fmean(
        row["oracle_ms"] for row in trace
    )
