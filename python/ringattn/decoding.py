# SPDX-License-Identifier: Apache-2.0
"""What a generation is made of: the prompt's way through a model, a token's, and its choice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from ringattn._distributed.collectives import complete, gather_objects
from ringattn._distributed.errors import report_to_peers
from ringattn._distributed.groups import Ring
from ringattn.cache import ShardedKVCache
from ringattn.model_call import ModelCall
from ringattn.models.decode_graphs import DecodeGraphs
from ringattn.models.llama import LLaMA
from ringattn.partition import Partition
from ringattn.sampling import Sampling

# What the sampler sends where it could not draw a token.
_NO_TOKEN = -1


def on_device(model: LLaMA) -> AbstractContextManager[Any]:
    """Where collectives of objects put what they send."""
    return torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()


# Note: inference mode saves about a microsecond in each of the many small calls of a token. It must
# not stay on across a yield.


@torch.inference_mode()
def prefill(
    model: LLaMA, prompt_ids: torch.Tensor, partition: Partition, cache: ShardedKVCache
) -> torch.Tensor:
    """Hidden state of this rank's last token, ``[B, E]``; without tokens, of none, ``[0, E]``."""
    rank = model.ring.rank
    position_ids = partition.position_ids(rank, device=model.device)
    call = model.prefill_call(partition, cache)
    hidden = model.base_model(partition.shard(prompt_ids, rank), position_ids, call)
    return hidden[:, -1:].flatten(0, 1)


@torch.inference_mode()
def decode(
    model: LLaMA,
    tokens: torch.Tensor,
    cache: ShardedKVCache,
    graphs: DecodeGraphs | None = None,
) -> torch.Tensor:
    """Hidden state ``[B, E]`` of one new token per row, ``tokens`` int64 ``[B]``."""
    call = ModelCall.decode(model.ring, cache)
    if graphs is not None:
        return graphs(tokens.unsqueeze(1), call).squeeze(1)
    position_ids = torch.full((1,), call.num_before, device=model.device)
    return model.base_model(tokens.unsqueeze(1), position_ids, call).squeeze(1)


@torch.inference_mode()
def choose(
    model: LLaMA,
    hidden: torch.Tensor,
    sampler: int,
    batch: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """The next tokens, int64 ``[B]``: drawn on one rank, the same on all. Where that rank cannot
    draw, all say why."""
    draw = lambda: sampling.draw(model.project(hidden), generator)  # noqa: E731
    return hand_out(model.ring, sampler, batch, model.device, draw)


def checksum(tokens: torch.Tensor) -> torch.Tensor:
    """int64 without a dimension: equal for equal integers in equal order. Stays on the device."""
    flat = tokens.flatten().to(torch.int64)
    places = torch.arange(1, flat.numel() + 1, device=flat.device)
    return ((flat + 1) * places * 0x9E3779B1).sum()


def hand_out(
    ring: Ring, source: int, batch: int, device: torch.device, draw: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """What ``draw()`` returns on rank ``source``, token ids int64 ``[B]``, on every rank.
    Collective.

    Raises:
        RuntimeError: ``draw`` failed; on a CPU on all ranks, on CUDA the others say that ``source``
            is gone.
    """
    # Looking at a token would have every rank wait for its device in each step: on CUDA the others
    # hear of the sampler's failure as of any that keeps a rank from coming.
    can_look = device.type == "cpu"
    problem: Exception | None = None
    if ring.rank == source:
        try:
            tokens = draw()
        except Exception as error:  # whatever it is: the peers wait
            problem = error
            if not can_look:
                report_to_peers(ring, error)
                raise
    if ring.rank != source or problem is not None:
        tokens = torch.full((batch,), _NO_TOKEN, dtype=torch.int64, device=device)
    if ring.world_size > 1:
        group = ring.process_group
        complete(
            *(ring, "generate", device),
            lambda: [dist.broadcast(tokens, group=group, group_src=source, async_op=True)],
        )
    if can_look and int(tokens[0]) == _NO_TOKEN:
        # The sentence that every rank raises, from the sampler.
        sentence = f"rank {source} could not draw a token: {problem}"
        raise RuntimeError(gather_objects(ring, "generate", sentence)[source]) from problem
    return tokens
