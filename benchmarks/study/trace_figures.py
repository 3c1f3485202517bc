# SPDX-License-Identifier: Apache-2.0
"""The figure of a rebalancing trace."""

from __future__ import annotations

from collections.abc import Sequence

from study.style import STYLES, Drawing, Row, legend_below, overlaid, panels, short
from study.tables import TRACE, traces

_POLICIES = ("even_zigzag", "oracle", "rebalanced")
_WIDTHS = dict(zip(_POLICIES, overlaid(len(_POLICIES)), strict=True))


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
        for policy, width in _WIDTHS.items():
            look = {"color": STYLES[policy][0], "linewidth": width, "label": STYLES[policy][2]}
            above.plot(requests, [row[f"{policy}_ms"] for row in trace], **look)
        for column, policy in (("oracle_tokens", "oracle"), ("tokens", "rebalanced")):
            share = [100 * row[f"rank{last}_{column}"] / row["seq_len"] for row in trace]
            look = {"color": STYLES[policy][0], "linewidth": _WIDTHS[policy]}
            below.step(requests, share, where="post", **look)
        above.set_ylabel("latency, ms")
        above.set_ylim(bottom=0)
        below.set_ylabel(f"tokens of rank {last}, %")
        below.set_ylim(0, 1.05 * below.get_ylim()[1])
        scenario, what, seq_len = (trace[0][name] for name in TRACE)
        title = f"{scenario}, {what}, {short(seq_len)} tokens"
        for ax in (above, below):
            ax.set_title(title, fontsize=10)
            ax.set_xlabel("request")
    legend_below(figure, axes[0])
    return Drawing(figure, list(rows))
