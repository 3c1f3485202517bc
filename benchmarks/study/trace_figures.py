# SPDX-License-Identifier: Apache-2.0
"""The figure of a rebalancing trace."""

from __future__ import annotations

from collections.abc import Sequence

from study.style import STYLES, Drawing, Row, legend_below, panels, short
from study.tables import TRACE, traces


def drift_trace(rows: Sequence[Row]) -> Drawing:
    """What each request took, and what the last rank was given."""
    drawn = traces(rows)
    last = max(
        int(name[4:-7]) for name in rows[0] if name.endswith("_tokens") and "oracle" not in name
    )
    figure, axes = panels(2 * len(drawn), "The rebalancer follows", width=4.6, columns=2)
    for place, trace in enumerate(drawn):
        above, below = axes[2 * place : 2 * place + 2]
        requests = [row["request"] for row in trace]
        for policy in ("even_zigzag", "oracle", "rebalanced"):
            colour, _, label = STYLES[policy]
            above.plot(requests, [row[f"{policy}_ms"] for row in trace], color=colour, label=label)
        for column, policy in (("oracle_tokens", "oracle"), ("tokens", "rebalanced")):
            share = [100 * row[f"rank{last}_{column}"] / row["seq_len"] for row in trace]
            below.step(requests, share, where="post", color=STYLES[policy][0])
        above.set_ylabel("latency, ms")
        above.set_ylim(bottom=0)
        below.set_ylabel(f"tokens of rank {last}, %")
        below.set_ylim(bottom=0)
        scenario, what, seq_len = (trace[0][name] for name in TRACE)
        title = f"{scenario}, {what}, {short(seq_len)} tokens"
        for ax in (above, below):
            ax.set_title(title, fontsize=10)
            ax.set_xlabel("request")
    legend_below(figure, axes[0])
    return Drawing(figure, list(rows))
