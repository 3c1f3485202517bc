# SPDX-License-Identifier: Apache-2.0
"""What follows from the cells: ratios between them, and what they show."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from study.rebalancing import POLICIES
from study.sweep import STEP_COLUMNS

Row = dict[str, Any]

#: What a plan of ours has to reach of the ideal: tokens per rank from which on, share.
TARGETS = ((4096, 0.90), (8193, 0.93), (32768, 0.95))
OURS = ("planned", "rebalanced")
_SETTLED = 3  # requests after a change that do not count
_CLOSE = 1.05  # to the oracle


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
    ring), `speedup_over_even` is over even contiguous.
    """
    found = {
        (row["what"], row["percentages"], row["seq_len"], row["split_type"]): row for row in rows
    }
    derived = []
    for raw in rows:
        row = dict(raw)
        what, percentages, seq_len = row["what"], row["percentages"], row["seq_len"]
        ms = row["overall_latency_ms"]
        asked = [int(part) for part in percentages.split(",")]
        row["slowdown_pct"] = min(asked)
        row["efficiency"] = row["ideal_ms"] / ms
        for column, name in (
            ("speedup_over_even", "even"),
            ("speedup_over_even_zigzag", "even_zigzag"),
        ):
            if other := found.get((what, percentages, seq_len, name)):
                row[column] = other["overall_latency_ms"] / ms
        unthrottled = ",".join(["100"] * len(asked))
        if homogeneous := found.get((what, unthrottled, seq_len, "even_zigzag")):
            row["slowdown"] = ms / homogeneous["overall_latency_ms"]
            row["t_homogeneous_over_t"] = 1 / row["slowdown"]
            for r in range(len(asked)):
                row[f"rank{r}_tflops_unthrottled"] = homogeneous[f"rank{r}_tflops"]
        derived.append(row)
        # Their name for the even split of equal ranks.
        if row["split_type"] == "even" and set(asked) == {100}:
            derived.append({**row, "split_type": "reference_homogeneous"})
    return derived


FINDING_COLUMNS = (
    *("what", "percentages", "tokens_per_rank", "seq_len", "slow_over_fast", "best_of_ours"),
    *("efficiency", "target", "equal_ring_efficiency", "points_behind_equal_ring"),
    *("slowdown", "slowdown_bound", "over_even", "over_even_zigzag", "worst_ours_over_even_zigzag"),
    "spread",
)


def findings(rows: Sequence[Row]) -> list[Row]:
    """One row for each problem on each set of ranks: the better of ours beside what it should
    reach. `rows` come from :func:`sweep_rows`."""
    cells: dict[tuple[str, str, int], dict[str, Row]] = {}
    for row in rows:
        key = (row["what"], row["percentages"], row["seq_len"])
        cells.setdefault(key, {})[row["split_type"]] = row
    found = []
    for (what, percentages, seq_len), cell in cells.items():
        ours = [cell[name] for name in OURS if name in cell]
        if not ours:
            continue
        best = min(ours, key=lambda row: row["overall_latency_ms"])
        world_size = len(percentages.split(","))
        speeds = [best[f"rank{r}_tflops"] for r in range(world_size)]
        tokens = seq_len // world_size
        targets = [share for least, share in TARGETS if tokens >= least]
        finding: Row = {
            "what": what,
            "percentages": percentages,
            "seq_len": seq_len,
            "tokens_per_rank": tokens,
            "slow_over_fast": min(speeds) / max(speeds),
            "best_of_ours": best["split_type"],
            "efficiency": best["efficiency"],
            "target": targets[-1] if targets else None,
            "slowdown": best.get("slowdown"),
            # A balanced ring of these ranks, and 5 %.
            "slowdown_bound": 1.05 * world_size * max(speeds) / sum(speeds),
            "over_even": best.get("speedup_over_even"),
            "over_even_zigzag": best.get("speedup_over_even_zigzag"),
        }
        equal = cells.get((what, ",".join(["100"] * world_size), seq_len), {}).get("even_zigzag")
        if equal is not None:
            finding["equal_ring_efficiency"] = equal["efficiency"]
            finding["points_behind_equal_ring"] = 100 * (equal["efficiency"] - best["efficiency"])
        if zigzag := cell.get("even_zigzag"):
            worst = max(row["overall_latency_ms"] for row in ours)
            finding["worst_ours_over_even_zigzag"] = worst / zigzag["overall_latency_ms"]
            both = (zigzag, best)
            finding["spread"] = max(
                (row["p90_ms"] - row["p10_ms"]) / row["overall_latency_ms"] for row in both
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
