# SPDX-License-Identifier: Apache-2.0
"""New tokens after a cache, as in a chat's next turn: on one device and, in two ways, on all ranks.

    torchrun --nproc-per-node 2 benchmarks/next_turn.py --cached 65536 --tokens 16,1024,16384

Weights are random, on the device; the cache is filled with random keys and values, spread evenly.
A call goes from token ids to the logits of the last token; the slowest rank counts. Columns:

way           "one device": rank 0 alone, with all keys; "every rank": all ranks compute all tokens
              and attend to the keys that they hold; "spread": each rank computes its share and
              fetches keys
taken         whether calls of a model take this way (ringattn._spreading)
x one device  time of "one device" / ms
error         largest difference of rank 0's logits from those of "one device", over the largest
              logit
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from decode import SHAPES, random_cache, random_model
from lib.cli import at_least, counts, names_of, parse, timing_arguments
from lib.problem import DTYPES, relative_error
from lib.ranks import from_all_ranks, process_group, rank, world_size
from lib.report import Report, environment
from lib.timing import Contestant, measure
from prompts import Prompts
from ringattn import Partition, model_call
from ringattn._spreading import is_faster_spread
from ringattn.cache import ShardedKVCache
from ringattn.model_call import ModelCall
from ringattn.models import LLaMA

COLUMNS = ("way", "cached", "tokens", "batch", "ms", "p10", "p90", "taken", "x one device")


def turn(
    model: LLaMA, cache: ShardedKVCache, ids: torch.Tensor, spread: bool | None = None
) -> torch.Tensor:
    """Logits [B, V] of the last of the tokens, which the cache then drops; None: the model's own
    choice of the way."""
    before, partition = cache.seq_len, Partition.even(ids.size(1), model.ring.world_size)
    if spread is None:
        call = model.call_after(cache, partition)
    elif spread:
        with mock.patch.object(model_call, "is_faster_spread", lambda *_: True):
            call = model.call_after(cache, partition)
    else:
        call = ModelCall.decode(model.ring, cache, ids.size(1))
    positions = call.position_ids(ids.device).flatten()
    hidden = model.base_model(call.rows(ids), positions, call)
    logits = model.project(call.last(hidden, 1)[:, 0])
    cache.crop(before)
    return logits


def error(ways: dict[str, Callable[[], torch.Tensor]], way: str) -> float:
    """Of rank 0 against one device. Every rank calls it."""
    if way == "one device":
        return 0.0
    ours, found = ways[way](), 0.0
    if rank() == 0:
        found = relative_error(ours, ways["one device"]())
    return from_all_ranks([found])[0].item()


def main() -> None:
    parser = timing_arguments(__doc__)
    parser.add_argument("--shapes", type=names_of(*SHAPES), default=["8b"], help=", ".join(SHAPES))
    parser.add_argument("--cached", type=counts, default=[65536])
    parser.add_argument("--tokens", type=counts, default=[16, 256, 1024, 4096, 16384])
    parser.add_argument("--batch", type=at_least(1), default=1)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    options = parse(parser)
    with process_group(options.device) as device, torch.inference_mode():
        report = Report(
            "next turn",
            environment(device) | {"dtype": options.dtype, "shapes": ", ".join(options.shapes)},
            (*COLUMNS, "error"),
        )
        report.start()
        for shape in options.shapes:
            model = random_model(SHAPES[shape], device, DTYPES[options.dtype])
            for cached in options.cached:
                add_rows(report, model, cached, options)


def add_rows(report: Report, model: LLaMA, cached: int, options) -> None:
    batch, most = options.batch, max(options.tokens)
    cache = random_cache(model, Partition.even(cached, world_size()), batch, most)
    alone = model.alone()
    whole = None
    if rank() == 0:
        whole = random_cache(alone, Partition.even(cached, 1), batch, most)
    for tokens in options.tokens:
        ids = Prompts(model.config.src_vocab_size).draw(batch, tokens).to(model.device)
        ways = {
            "one device": partial(turn, alone, whole, ids),
            "every rank": partial(turn, model, cache, ids, False),
            "spread": partial(turn, model, cache, ids, True),
        }
        contestants = [
            Contestant(way, call, torch.empty(0), alone=way == "one device", from_idle=True)
            for way, call in ways.items()
        ]
        rounds = {"rounds": options.rounds, "warmup": options.warmup}
        timings = measure(contestants, model.device, **rounds)
        spread = is_faster_spread(tokens, cached, world_size(), model.device.type)
        for way, timing in timings.items():
            report.add(
                {
                    "way": way,
                    "cached": cached,
                    "tokens": tokens,
                    "batch": batch,
                    **timing.columns(),
                    "taken": {"spread": spread, "every rank": not spread}.get(way, ""),
                    "x one device": timings["one device"].median / timing.median,
                    "error": error(ways, way),
                }
            )
        report.write(options.out)  # a run that is ended early leaves what it has


if __name__ == "__main__":
    main()
