# SPDX-License-Identifier: Apache-2.0
"""Text generation over a ring: the prompt in shards through ring attention, then token by token
from the sharded cache.

One rank, the owner of the prompt's last token, computes logits and draws; every rank gets its
token. So all go on with the same token even where their hardware rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from ringattn._calls import collective, tell_peers
from ringattn._checks import check_flag, is_integer
from ringattn.models.cache import ShardedKVCache
from ringattn.models.graphs import DecodeGraphs, record
from ringattn.models.llama import LLaMA
from ringattn.partition import Partition
from ringattn.sampling import Sampling

# Tokens before CUDA graphs are recorded, and that must be left then: recording takes as much time
# as the graphs save in some dozens of tokens.
_TOKENS_BEFORE_GRAPHS = 16

# What the sampler sends where it could not draw a token.
_NO_TOKEN = -1

#: One token id, several, None for no end, or "config" for those of the model.
EndIds = int | Sequence[int] | None | Literal["config"]


def generate(
    model: LLaMA,
    prompt_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    partition: Partition | None = None,
    cache_lengths: Sequence[int] | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    eos_token_id: EndIds = "config",
    pad_token_id: int | None = None,
    seed: int | None = None,
    cuda_graphs: bool | None = None,
    on_tokens: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """The prompt and what follows it. Collective: every rank of the model's group calls it, with
    the same arguments.

    Args:
        model: from :func:`ringattn.models.load_model`.
        prompt_ids: int64 ``[B, T]``, the whole prompt on every rank, prompts of one length.
        max_new_tokens: N, how many tokens follow at most.
        partition: who owns which tokens of the prompt; None is the even zigzag partition.
        cache_lengths: how many keys and values each rank shall hold in the end, T + N - 1 together,
            as from :func:`ringattn.plan_cache`: ranks with more of the prompt give some to others
            once, and new tokens go where the most are lacking. None: nothing moves, new tokens go
            to the rank that holds the fewest.
        do_sample: draw tokens, or take the likeliest; None draws if ``temperature``, ``top_k`` or
            ``top_p`` is given.
        temperature: see :class:`Sampling`; None is 1.
        top_k: see :class:`Sampling`.
        top_p: see :class:`Sampling`.
        eos_token_id: tokens that end a row, None for none; "config" means the model's.
        pad_token_id: what follows the end of a row while others go on; None means the model's, and
            where it has none the first end token.
        seed: makes draws repeatable, on devices of one kind; None takes torch's default generator.
        cuda_graphs: record what lies between two attention calls as CUDA graphs, and replay them
            for each token: the same tokens, in less time. None does so once a generation has gone
            on for some tokens, on CUDA, if nothing but this package's own layers would run and
            nobody looks on (hooks); True from the first token on, whatever the layers are.
        on_tokens: called on every rank with each step's tokens, int64 ``[B]`` on the model's
            device, as soon as they are queued there: for streaming and for clocks.

    Returns:
        ``[B, T + n]``, the same on every rank, on the device of ``prompt_ids``; n < N where all
        rows have ended before.

    Raises:
        ValueError: arguments that break a rule above, differ between ranks, or ask for more tokens
            than the model was trained for; on all ranks, before anything is computed.
        RuntimeError: a token could not be drawn (logits that are NaN, say); on a CPU on all ranks,
            on CUDA the others say that the one that draws is gone.
        torch.distributed.DistBackendError: a peer died or never arrived.
    """
    request, summary, message = None, None, None
    try:
        if do_sample is None:
            do_sample = any(option is not None for option in (temperature, top_k, top_p))
        do_sample = check_flag("do_sample", do_sample)
        sampling = Sampling(temperature, top_k, top_p, greedy=not do_sample)
        request = _Request.checked(
            *(model, prompt_ids, max_new_tokens, partition, cache_lengths, sampling),
            *(eos_token_id, pad_token_id, seed, cuda_graphs),
        )
        summary = {"model": model.config, "dtype": model.dtype, **request.summary()}
    except ValueError as error:
        message = str(error)
    except TypeError as error:
        message = f"arguments must be of the types that generate() names, got: {error}"
    except Exception as error:  # whatever it is: the peers wait
        message = f"arguments must be such that generation can begin, got: {error}"
    _agree(model, summary, message)
    assert request is not None  # _agree has raised otherwise
    new_ids = []
    for tokens in _tokens(model, request):
        new_ids.append(tokens)
        if on_tokens is not None:
            on_tokens(tokens)
    return torch.cat((prompt_ids, torch.stack(new_ids, 1).to(prompt_ids)), 1)


@dataclass(frozen=True)
class _Request:
    """The checked arguments of a generation."""

    prompt_ids: torch.Tensor  # int64 [B, T] on the model's device
    partition: Partition
    cache_lengths: tuple[int, ...] | None
    max_new_tokens: int
    sampling: Sampling
    eos_ids: tuple[int, ...]
    pad_id: int
    seed: int | None
    cuda_graphs: bool | None

    @classmethod
    def checked(
        cls,
        model: LLaMA,
        prompt_ids: torch.Tensor,
        max_new_tokens: int,
        partition: Partition | None,
        cache_lengths: Sequence[int] | None,
        sampling: Sampling,
        eos_token_id: EndIds,
        pad_token_id: int | None,
        seed: int | None,
        cuda_graphs: bool | None,
    ) -> _Request:
        if not is_integer(max_new_tokens) or max_new_tokens < 1:
            raise ValueError(
                f"max_new_tokens must be an integer of at least 1, got {max_new_tokens!r}"
            )
        max_new_tokens = int(max_new_tokens)
        if seed is not None and not is_integer(seed):
            raise ValueError(f"seed must be an integer or None, got {seed!r}")
        if seed is not None and not -(2**63) <= seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {seed}")
        seed = None if seed is None else int(seed)
        if cuda_graphs and model.device.type != "cuda":
            raise ValueError(f"cuda_graphs must have a model on CUDA, got {model.device}")
        partition = model.check(prompt_ids, partition, new_tokens=max_new_tokens)
        if prompt_ids.numel() == 0:
            raise ValueError(f"prompt_ids must hold tokens, got shape {list(prompt_ids.shape)}")
        model.check_in_vocabulary("prompt_ids", prompt_ids)
        if cache_lengths is not None:
            cache_lengths = _cache_lengths(cache_lengths, partition, max_new_tokens)
        eos_ids = _end_ids(eos_token_id, model)
        if pad_token_id is None:
            pad_token_id = model.config.pad_id
        vocabulary = model.config.src_vocab_size
        if pad_token_id is None or pad_token_id == -1:  # some configurations write none as -1
            pad_token_id = next((end for end in eos_ids if 0 <= end < vocabulary), 0)
        if not is_integer(pad_token_id):
            raise ValueError(f"pad_token_id must be an integer or None, got {pad_token_id!r}")
        if not 0 <= pad_token_id < vocabulary:
            raise ValueError(f"pad_token_id must lie in [0, {vocabulary}), got {pad_token_id}")
        return cls(
            prompt_ids.to(model.device, torch.int64),
            partition,
            cache_lengths,
            max_new_tokens,
            sampling,
            eos_ids,
            pad_token_id,
            seed,
            cuda_graphs,
        )

    def summary(self) -> dict[str, Any]:
        """What must be equal on all ranks, by the name an error calls it."""
        flat = self.prompt_ids.flatten()
        places = torch.arange(1, flat.numel() + 1, device=flat.device)
        return {
            "prompt_ids' shape": tuple(self.prompt_ids.shape),
            "prompt_ids' checksum": int(((flat + 1) * places * 0x9E3779B1).sum()),
            "partition": self.partition,
            "cache_lengths": self.cache_lengths,
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling,
            "eos_token_id": self.eos_ids,
            "pad_token_id": self.pad_id,
            "seed": self.seed,
        }


def _cache_lengths(given: Sequence[int], partition: Partition, new_tokens: int) -> tuple[int, ...]:
    lengths = tuple(given)
    if not all(is_integer(length) and length >= 0 for length in lengths):
        raise ValueError(f"cache_lengths must be integers of at least 0, got {list(lengths)}")
    lengths = tuple(map(int, lengths))
    if len(lengths) != partition.world_size:
        raise ValueError(
            f"cache_lengths must be {partition.world_size} lengths, got {len(lengths)}"
        )
    total = partition.seq_len + new_tokens - 1  # nothing attends to the last one
    if sum(lengths) != total:
        raise ValueError(f"cache_lengths must add up to {total} tokens, got {sum(lengths)}")
    return lengths


def _end_ids(eos_token_id: EndIds, model: LLaMA) -> tuple[int, ...]:
    if eos_token_id is None:
        return ()
    if eos_token_id == "config":
        return model.config.eos_ids
    ids: tuple[Any, ...] = (eos_token_id,)
    if isinstance(eos_token_id, Iterable):
        ids = tuple(eos_token_id)
    if not all(is_integer(token) for token in ids):
        raise ValueError(f'eos_token_id must be integers, None or "config", got {eos_token_id!r}')
    return ids


def _agree(model: LLaMA, summary: dict[str, Any] | None, message: str | None) -> None:
    """Raises on every rank what is wrong on any, before anything is computed."""
    ring = model.ring
    if ring.world_size == 1:
        if message is not None:
            raise ValueError(message)
        return
    of_ranks: list[Any] = [None] * ring.world_size
    with _on_device(model), collective(ring, "generate"):
        dist.all_gather_object(of_ranks, (message, summary), group=ring.process_group)
    for rank, (problem, _) in enumerate(of_ranks):
        if problem is not None:
            raise ValueError(problem if rank == ring.rank else f"rank {rank}: {problem}")
    first = of_ranks[0][1]
    for rank, (_, summary) in enumerate(of_ranks):
        for name, value in summary.items():
            if value != first[name]:
                raise ValueError(
                    f"{name} must be the same on all ranks, "
                    f"got {first[name]} on rank 0 and {value} on rank {rank}"
                )


def _on_device(model: LLaMA) -> AbstractContextManager[Any]:
    """Where collectives of objects put what they send."""
    return torch.cuda.device(model.device) if model.device.type == "cuda" else nullcontext()


def _tokens(model: LLaMA, request: _Request) -> Iterator[torch.Tensor]:
    prompt_ids, device = request.prompt_ids, model.device
    batch, prompt_len = prompt_ids.shape
    cache = model.new_cache(
        request.partition,
        batch=batch,
        new_tokens=request.max_new_tokens - 1,
        targets=request.cache_lengths,
    )
    sampler = request.partition.owner(prompt_len - 1)
    generator = None
    if request.seed is not None:
        generator = torch.Generator(device).manual_seed(request.seed)
    ends = torch.tensor(request.eos_ids, device=device)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)

    graphs: DecodeGraphs | None = None
    hidden = _prefill(model, prompt_ids, request.partition, cache)
    end = prompt_len + request.max_new_tokens
    for position in range(prompt_len, end):
        tokens = _choose(model, hidden, sampler, batch, request.sampling, generator)
        if request.eos_ids:
            tokens = torch.where(finished, request.pad_id, tokens)
            finished = finished | torch.isin(tokens, ends)
        yield tokens
        left = end - position - 1
        if left == 0 or (request.eos_ids and bool(finished.all())):
            return
        if position == prompt_len and request.cache_lengths is not None:
            cache.settle(model.ring.process_group)
        if request.cuda_graphs and graphs is None:
            graphs = DecodeGraphs(model.base_model, batch)
        if request.cuda_graphs is None and position - prompt_len == _TOKENS_BEFORE_GRAPHS <= left:
            graphs = record(model.base_model, batch)
        hidden = _decode(model, tokens, position, cache, graphs)


# Note: inference mode saves about a microsecond in each of the many small calls of a token. It must
# not stay on across a yield.


@torch.inference_mode()
def _prefill(
    model: LLaMA, prompt_ids: torch.Tensor, partition: Partition, cache: ShardedKVCache
) -> torch.Tensor:
    """Hidden state of this rank's last token, ``[B, E]``; without tokens, of none, ``[0, E]``."""
    rank = model.ring.rank
    position_ids = partition.position_ids(rank, device=model.device)
    hidden = model.base_model(partition.shard(prompt_ids, rank), position_ids, partition, cache)
    return hidden[:, -1:].flatten(0, 1)


@torch.inference_mode()
def _decode(
    model: LLaMA,
    tokens: torch.Tensor,
    position: int,
    cache: ShardedKVCache,
    graphs: DecodeGraphs | None = None,
) -> torch.Tensor:
    """Hidden state ``[B, E]`` of one new token per row, ``tokens`` int64 ``[B]``."""
    cache.advance()
    if graphs is not None:
        return graphs(tokens.unsqueeze(1), position, cache).squeeze(1)
    position_ids = torch.full((1,), position, device=model.device)
    return model.base_model(tokens.unsqueeze(1), position_ids, cache=cache).squeeze(1)


@torch.inference_mode()
def _choose(
    model: LLaMA,
    hidden: torch.Tensor,
    sampler: int,
    batch: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """The next tokens, int64 ``[B]``: drawn on one rank, the same on all. Where that rank cannot
    draw, all say why."""
    ring = model.ring
    # Looking at a token would have every rank wait for its device in each step: on CUDA the others
    # hear of the sampler's failure as of any that keeps a rank from coming.
    can_look = model.device.type == "cpu"
    problem: Exception | None = None
    if ring.rank == sampler:
        try:
            tokens = sampling.draw(model.project(hidden), generator)
        except Exception as error:  # whatever it is: the peers wait
            problem = error
            if not can_look:
                tell_peers(ring, error)
                raise
    if ring.rank != sampler or problem is not None:
        tokens = torch.full((batch,), _NO_TOKEN, dtype=torch.int64, device=model.device)
    if ring.world_size > 1:
        with collective(ring, "generate"):
            dist.broadcast(tokens, group=ring.process_group, group_src=sampler)
    if can_look and int(tokens[0]) == _NO_TOKEN:
        raise RuntimeError(_why_no_token(model, sampler, problem)) from problem
    return tokens


def _why_no_token(model: LLaMA, sampler: int, problem: Exception | None) -> str:
    """The sentence that every rank raises, from the sampler."""
    ring = model.ring
    sentence = [f"rank {sampler} could not draw a token: {problem}"]
    if ring.world_size > 1:
        with _on_device(model), collective(ring, "generate"):
            dist.broadcast_object_list(sentence, group=ring.process_group, group_src=sampler)
    return sentence[0]
