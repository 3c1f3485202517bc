# SPDX-License-Identifier: Apache-2.0
"""What a plan costs the host: ringattn.plan for ranks of random speeds.

    python benchmarks/planning.py

The aim is 5 ms for a million tokens over eight ranks, whatever layout, links and tiles. Times are
processor time of this thread: other programs do not count. `slowest` is the largest of all plans.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import ringattn
import torch
from lib.cli import at_least
from lib.report import Report, environment
from ringattn import AttentionTile, ModelCost, RankProfile

COLUMNS = ("layout", "links", "tiles", "plans", "ms", "slowest")


def profiles(draw: random.Random, ranks: int, links: bool, tiles: bool) -> list[RankProfile]:
    """Ranks at 10 to 100 % of 500 TFLOPS, a third of them behind slow links."""
    return [
        RankProfile(
            *[500 * draw.uniform(0.1, 1.0)] * 2,
            link_gbps=draw.choice((1.0, 20.0, 20.0)) if links else None,
            tiles=(AttentionTile(128, 128),) if tiles else (),
        )
        for _ in range(ranks)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=at_least(1), default=1 << 20)
    parser.add_argument("--ranks", type=at_least(1), default=8)
    parser.add_argument("--rounds", type=at_least(1), default=20, help="plans of each kind")
    parser.add_argument("--out", metavar="STEM", help="for .md, .csv and .json")
    arguments = parser.parse_args()

    header = environment(torch.device("cpu")) | {
        "plans": f"{arguments.seq_len} tokens over {arguments.ranks} ranks"
    }
    report = Report("What a plan costs the host", header, COLUMNS)
    report.start()
    cost, draw = ModelCost.attention_only(32, 128, num_kv_heads=8), random.Random(5)
    for layout in ("zigzag", "contiguous"):
        for links in (False, True):
            for tiles in (False, True):
                times = []
                for _ in range(arguments.rounds):
                    ranks = profiles(draw, arguments.ranks, links, tiles)
                    start = time.thread_time()
                    ringattn.plan(arguments.seq_len, ranks, cost, layout=layout)
                    times.append(1e3 * (time.thread_time() - start))
                row = {"layout": layout, "links": int(links), "tiles": int(tiles)}
                row |= {"plans": len(times), "ms": statistics.median(times)}
                report.add(row | {"slowest": max(times)})
    report.write(arguments.out)


if __name__ == "__main__":
    main()
