# SPDX-License-Identifier: Apache-2.0
"""How well partitions balance packed documents under a causal mask, and what they fetch.

    python benchmarks/packing.py --out build/packing

For documents of four kinds and 2, 4 and 8 ranks, the worst of --seeds packs each: `busiest` is the
largest part of the visible pairs that a rank has, in even shares; `tokens` the same of tokens;
`rows fetched / S` the most keys that a rank fetches, over the sequence. `dealt` are chunks of
S / 32 W, largest first to the rank with the fewest pairs that has room, as dispatching solvers do
it. `ms` is what Partition.packed costs the host: processor time, the median over seeds; then for
1,000 and 10,000 documents.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from lib.cli import at_least
from lib.masked import random_documents, rows_fetched
from lib.problem import busiest
from lib.report import Report, environment
from ringattn import Partition

COLUMNS = ("documents", "W", "what", "busiest", "tokens", "rows fetched / S", "ms")
RANKS = (2, 4, 8)


def packed_to(seq_len: int, lengths: Iterator[float]) -> list[int]:
    """Boundaries of documents so long, the last one cut at ``seq_len``."""
    ends = [0]
    while ends[-1] < seq_len:
        ends.append(min(seq_len, ends[-1] + max(1, round(next(lengths)))))
    return ends


def half_and_short(seq_len: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    short = packed_to(seq_len // 2, iter(lambda: draw.lognormvariate(7.3, 0.5), None))
    at = draw.choice(short)  # where the long one lies
    return [
        *(end for end in short if end <= at),
        *(end + seq_len // 2 for end in short if end >= at),
    ]


def pareto(seq_len: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return packed_to(seq_len, iter(lambda: 256 * draw.paretovariate(0.7), None))


DOCUMENTS: dict[str, Callable[[int, int], list[int]]] = {
    "2K each": lambda seq_len, _: packed_to(seq_len, iter(lambda: 2048, None)),
    "lognormal around 4K": random_documents,
    "one of S / 2, others around 1.5K": half_and_short,
    "Pareto 0.7": pareto,
}


def dealt(ends: list[int], world_size: int) -> Partition:
    """Chunks of S / 32 W, largest first to the rank with the fewest pairs that has room."""
    seq_len, chunk = ends[-1], ends[-1] // (32 * world_size)
    chunks = Partition.contiguous([chunk] * (32 * world_size))
    pairs = [chunks.num_pairs(i, cu_seqlens=ends) for i in range(chunks.world_size)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    loads = [0] * world_size
    for i in sorted(range(len(pairs)), key=lambda i: -pairs[i]):
        rank = min((r for r in range(world_size) if len(pieces[r]) < 32), key=lambda r: loads[r])
        loads[rank] += pairs[i]
        pieces[rank].append((i * chunk, (i + 1) * chunk))
    assert chunk * 32 * world_size == seq_len
    return Partition.pieces([sorted(owned) for owned in pieces])


WAYS: dict[str, Callable[[list[int], int], Partition]] = {
    "packed": Partition.packed,
    "dealt": dealt,
    "contiguous": lambda ends, ranks: Partition.even(ends[-1], ranks, layout="contiguous"),
    "zigzag": lambda ends, ranks: Partition.even(ends[-1], ranks),
}


def quality(partition: Partition, ends: list[int]) -> tuple[float, float, float]:
    tokens = max(partition.lengths) * partition.world_size / partition.seq_len
    fetched = rows_fetched(partition, ends) / partition.seq_len
    return busiest(partition, cu_seqlens=ends), tokens, fetched


def timed(way: Callable[[], Partition]) -> tuple[Partition, float]:
    start = time.thread_time()
    partition = way()
    return partition, 1e3 * (time.thread_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seq-len", type=at_least(1024), default=131072, help="S")
    parser.add_argument("--seeds", type=at_least(1), default=6, help="packs of each kind")
    parser.add_argument("--out", metavar="STEM", help="for .md, .csv and .json")
    arguments = parser.parse_args()
    if arguments.seq_len % (32 * max(RANKS)) != 0:
        parser.error(f"--seq-len must be a multiple of 256, got {arguments.seq_len}")

    header = environment(torch.device("cpu")) | {
        "packs": f"{arguments.seq_len} tokens, {arguments.seeds} of each kind"
    }
    report = Report("Packed documents over ranks", header, COLUMNS)
    report.start()
    for kind, documents in DOCUMENTS.items():
        packs = [documents(arguments.seq_len, seed) for seed in range(arguments.seeds)]
        for ranks in RANKS:
            for name, way in WAYS.items():
                made = [(pack, *timed(lambda: way(pack, ranks))) for pack in packs]  # noqa: B023
                found = [quality(partition, pack) for pack, partition, _ in made]
                worst = dict(zip(COLUMNS[3:6], map(max, zip(*found, strict=True)), strict=True))
                ms = statistics.median(each for *_, each in made) if name == "packed" else None
                report.add({"documents": kind, "W": ranks, "what": name, **worst, "ms": ms})
    for count in (1000, 10000):
        ends = [0]
        draw = random.Random(count)
        for _ in range(count):
            ends.append(ends[-1] + max(1, round(draw.lognormvariate(6.0, 1.0))))
        for ranks in RANKS:
            partition, ms = timed(lambda: Partition.packed(ends, ranks))  # noqa: B023
            named = dict(zip(COLUMNS[3:6], quality(partition, ends), strict=True))
            row = {"documents": f"{count} around 400", "W": ranks, "what": "packed"}
            report.add(row | named | {"ms": ms})
    report.write(arguments.out)


if __name__ == "__main__":
    main()
