# SPDX-License-Identifier: Apache-2.0
"""Text generation over a ring: the prompt in shards through ring attention, then token by token
from the sharded cache.

One rank, the owner of the prompt's last token, computes logits and draws; every rank gets its
token. All ranks continue with the same token, even where their hardware rounds differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ringattn._checks import (
    as_integer,
    check_flag,
    check_int64,
    check_integer,
    check_integers,
    shown,
)
from ringattn._distributed.checksums import checksum
from ringattn._distributed.collectives import Content, agree, gather_objects
from ringattn._distributed.errors import ErrorsToPeers
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.one_rank import OnOneRank
from ringattn.cache import ShardedKVCache
from ringattn.model_call import ModelCall
from ringattn.models.decode_step import DecodeStep, misfit
from ringattn.models.llama import LLaMA
from ringattn.parallel import Split
from ringattn.partition import Partition
from ringattn.sampling import Sampling

# Tokens after the first two before CUDA graphs are recorded; more must be left then: it takes
# as much time to record as the graphs save in some dozens of tokens.
_TOKENS_BEFORE_GRAPHS = 16

#: One token id, several, None for no end, or "config" for those of the model.
EndIds = int | Sequence[int] | None | Literal["config"]


def generate(
    model: LLaMA,
    prompt_ids: torch.Tensor,
    *,
    max_new_tokens: int,
    partition: Partition | None = None,
    cache_lengths: Sequence[int] | None = None,
    prefill_chunk_size: int | None = None,
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
        partition: which rank owns which tokens of the prompt; None is the even zigzag partition.
        cache_lengths: how many keys and values each rank shall hold in the end, T + N - 1 together,
            as from :func:`ringattn.plan_cache`: ranks with more of the prompt give some to others
            once, and new tokens go where the most are lacking. None: nothing moves, new tokens go
            to the rank that holds the fewest. For models without a window alone.
        prefill_chunk_size: tokens of the prompt that go through the layers at a time, each chunk
            spread as ``partition`` spreads the prompt: memory for activations is that of one chunk.
            None: all at once.
        do_sample: draw tokens, or take the likeliest; None draws if ``temperature``, ``top_k`` or
            ``top_p`` is given.
        temperature: see :class:`ringattn.sampling.Sampling`; None is 1.
        top_k: see :class:`ringattn.sampling.Sampling`.
        top_p: see :class:`ringattn.sampling.Sampling`.
        eos_token_id: tokens that end a row, None for none; "config" means the model's.
        pad_token_id: what follows the end of a row while others go on; None means the model's, and
            where it has none the first end token.
        seed: makes draws repeatable, on devices of one kind; None takes torch's default generator.
        cuda_graphs: record the kernels of a token as CUDA graphs, and replay them for each token:
            the same tokens, in less time. None does so once a generation has gone on for some
            tokens, on CUDA, if the model has this package's own layers only and no hooks; True from
            the third token on, whatever layers compute its products, and without their hooks.
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
    ring = getattr(model, "ring", None)
    if not isinstance(ring, GroupInfo):
        raise ValueError(f"model must be a LLaMA, got {type(model).__name__}")
    request, facts, mistake = None, {}, None
    try:
        if do_sample is None:
            do_sample = any(option is not None for option in (temperature, top_k, top_p))
        do_sample = check_flag("do_sample", do_sample)
        sampling = Sampling(temperature, top_k, top_p, greedy=not do_sample)
        request = _Request.checked(
            *(model, prompt_ids, max_new_tokens, partition, cache_lengths, prefill_chunk_size),
            *(sampling, eos_token_id, pad_token_id, seed, cuda_graphs),
        )
        facts = {"model": model.config, "dtype": model.dtype, **request.facts()}
    except ValueError as error:
        mistake = str(error)
    except TypeError as error:
        mistake = f"arguments must be of the types that generate() names, got: {error}"
    except Exception as error:  # whatever it is: the peers wait
        mistake = f"arguments must be such that generation can begin, got: {error}"
    agree(ring, "generate", mistake, facts)
    assert request is not None  # agree() has raised otherwise
    new_ids = []
    with ErrorsToPeers(ring):  # errors of the model too
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
    chunks: tuple[Partition, ...]  # of the prompt, one after the other
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
        prefill_chunk_size: int | None,
        sampling: Sampling,
        eos_token_id: EndIds,
        pad_token_id: int | None,
        seed: int | None,
        cuda_graphs: bool | None,
    ) -> _Request:
        max_new_tokens = check_integer("max_new_tokens", max_new_tokens, least=1)
        if seed is not None:
            number = as_integer(seed)
            if number is None:
                raise ValueError(f"seed must be an integer or None, got {seed!r}")
            if not -(2**63) <= number < 2**64:  # what torch takes, signed or not
                raise ValueError(f"seed must fit into 64 bits, got {number}")
            seed = number
        if cuda_graphs is not None:
            cuda_graphs = check_flag("cuda_graphs", cuda_graphs)
        if cuda_graphs and model.device.type != "cuda":
            raise ValueError(f"cuda_graphs must have a model on CUDA, got {model.device}")
        if cuda_graphs and torch.is_autocast_enabled("cuda"):
            raise ValueError("cuda_graphs must be False or None under torch.autocast, got True")
        if cuda_graphs and (part := misfit(model.base_model)):
            raise ValueError(f"cuda_graphs must have a model that can be recorded, got {part}")
        if partition is None and isinstance(prompt_ids, torch.Tensor) and prompt_ids.dim() == 2:
            partition = Partition.even(prompt_ids.size(1), model.ring.world_size)
        partition = model.check(prompt_ids, partition, new_tokens=max_new_tokens, name="prompt_ids")
        if prompt_ids.numel() == 0:
            raise ValueError(f"prompt_ids must hold tokens, got shape {list(prompt_ids.shape)}")
        model.check_in_vocabulary("prompt_ids", prompt_ids)
        if cache_lengths is not None:
            if model.config.window_size is not None:
                raise ValueError(
                    "cache_lengths must be left out for a model with a window, whose cached keys "
                    f"stay in the order of the sequence, got {shown(cache_lengths)}"
                )
            cache_lengths = _cache_lengths(cache_lengths, partition, max_new_tokens)
        chunks = split_prompt(partition, prefill_chunk_size)
        eos_ids = _end_ids(eos_token_id, model)
        if pad_token_id is None:
            pad_token_id = model.config.pad_id
        vocabulary = model.config.src_vocab_size
        if pad_token_id is None or pad_token_id == -1:  # some configurations write none as -1
            pad_token_id = next((end for end in eos_ids if 0 <= end < vocabulary), 0)
        pad_id = as_integer(pad_token_id)
        if pad_id is None:
            raise ValueError(f"pad_token_id must be an integer or None, got {pad_token_id!r}")
        if not 0 <= pad_id < vocabulary:
            raise ValueError(f"pad_token_id must lie in [0, {vocabulary}), got {pad_id}")
        return cls(
            prompt_ids.to(model.device, torch.int64),
            partition,
            cache_lengths,
            chunks,
            max_new_tokens,
            sampling,
            eos_ids,
            pad_id,
            seed,
            cuda_graphs,
        )

    @property
    def tokens_before_graphs(self) -> int | None:
        """After how many tokens beside the first two CUDA graphs are recorded; None: never."""
        return {None: _TOKENS_BEFORE_GRAPHS, True: 0, False: None}[self.cuda_graphs]

    def facts(self) -> dict[str, Any]:
        """Values that must be equal on all ranks, by their names in errors."""
        return {
            "prompt_ids' shape": tuple(self.prompt_ids.shape),
            "prompt_ids": Content(int(checksum(self.prompt_ids))),
            "partition": self.partition,
            "cache_lengths": self.cache_lengths,
            "prefill_chunk_size": self.chunks[0].seq_len,
            "max_new_tokens": self.max_new_tokens,
            "sampling": self.sampling,
            "eos_token_id": self.eos_ids,
            "pad_token_id": self.pad_id,
            "seed": self.seed,
            "cuda_graphs": self.cuda_graphs,
        }


def split_prompt(partition: Partition, chunk_size: int | None) -> tuple[Partition, ...]:
    """The partitions of a prompt's chunks, each with the shares that ranks have of the prompt.

    Raises:
        ValueError: a size that is not positive, a partition of pieces.
    """
    if chunk_size is None:
        return (partition,)
    chunk_size = check_integer("prefill_chunk_size", chunk_size, least=1)
    if chunk_size >= partition.seq_len:
        return (partition,)
    if partition.layout == "pieces":
        raise ValueError(
            "partition must be zigzag or contiguous with prefill_chunk_size, got pieces"
        )
    split = Split.of(partition, partition.world_size)
    starts = range(0, partition.seq_len, chunk_size)
    return tuple(split.partition(min(chunk_size, partition.seq_len - start)) for start in starts)


def _cache_lengths(given: Sequence[int], partition: Partition, new_tokens: int) -> tuple[int, ...]:
    lengths = check_integers("cache_lengths", given, least=0)
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
    if isinstance(eos_token_id, str) and eos_token_id == "config":
        return model.config.eos_ids
    given = tuple(eos_token_id) if isinstance(eos_token_id, Iterable) else (eos_token_id,)
    if any(as_integer(token) is None for token in given):
        raise ValueError(f'eos_token_id must be integers, None or "config", got {eos_token_id!r}')
    return tuple(check_int64("eos_token_id", token) for token in given)


def _tokens(model: LLaMA, request: _Request) -> Iterator[torch.Tensor]:
    prompt_ids, device = request.prompt_ids, model.device
    batch, prompt_len = prompt_ids.shape
    first, last = request.chunks[0], request.chunks[-1]
    cache = model.new_cache(
        first,
        new_tokens=prompt_len - first.seq_len + request.max_new_tokens - 1,
        targets=request.cache_lengths,
    )
    sampler = OnOneRank(model.ring, last.owner(last.seq_len - 1), "draw a token")
    generator = None
    if request.seed is not None:
        generator = torch.Generator(device).manual_seed(request.seed)
    ends = torch.tensor(request.eos_ids, device=device)
    finished = torch.zeros(batch, dtype=torch.bool, device=device)

    step: DecodeStep | None = None
    hidden = prefill(model, prompt_ids, request.chunks, cache)
    end = prompt_len + request.max_new_tokens
    for position in range(prompt_len, end):
        tokens = choose(model, hidden, sampler, batch, request.sampling, generator)
        if request.eos_ids:
            tokens = torch.where(finished, request.pad_id, tokens)
            finished = finished | torch.isin(tokens, ends)
        yield tokens
        left = end - position - 1
        if left == 0 or (request.eos_ids and bool(finished.all())):
            return
        if position == prompt_len:
            if request.cache_lengths is not None:
                cache.rebalance(model.ring.group)
            step = DecodeStep.of(model, cache, batch, observed=bool(request.cuda_graphs))
        hidden = decode(model, tokens, cache, step)
        before = request.tokens_before_graphs
        if before is not None and position - prompt_len == before < left:
            _record(model.ring, step, required=bool(request.cuda_graphs))


def _record(ring: GroupInfo, step: DecodeStep | None, *, required: bool) -> None:
    """Records the graphs of ``step`` where all ranks have one, and memory. Collective."""
    ready = step is not None and (required or step.has_room())
    if all(gather_objects(ring, "generate", ready)) and step is not None:
        step.record(required=required)


# ---- steps -------------------------------------------------------------------------------------

# Note: inference mode saves about a microsecond in each of the many small calls of a token. It must
# not stay on across a yield.


@torch.inference_mode()
def prefill(
    model: LLaMA, prompt_ids: torch.Tensor, chunks: Sequence[Partition], cache: ShardedKVCache
) -> torch.Tensor:
    """Hidden state of this rank's last token of the last chunk, ``[B, E]``, of no use on a rank
    without tokens; ``chunks`` from :func:`split_prompt`."""
    rank = model.ring.rank
    parts = prompt_ids.split([partition.seq_len for partition in chunks], 1)
    position_ids = chunks[0].position_ids(rank, device=model.device)
    call = model.prefill_call(chunks[0], cache)
    hidden = model.base_model(chunks[0].shard(parts[0], rank), position_ids, call)
    for partition, ids in zip(chunks[1:], parts[1:], strict=True):
        hidden = extend(model, ids, partition, cache)
    return hidden[:, -1:].flatten(0, 1)


@torch.inference_mode()
def extend(
    model: LLaMA, token_ids: torch.Tensor, partition: Partition, cache: ShardedKVCache
) -> torch.Tensor:
    """Hidden states of tokens after what ``cache`` holds, of the rows that ``partition`` gives this
    rank, or, where that is faster, of all of them on every rank."""
    call = model.call_after(cache, partition)
    position_ids = call.position_ids(model.device).flatten()
    return model.base_model(call.rows(token_ids), position_ids, call)


@torch.inference_mode()
def decode(
    model: LLaMA, tokens: torch.Tensor, cache: ShardedKVCache, step: DecodeStep | None = None
) -> torch.Tensor:
    """Hidden state ``[B, E]`` of one new token per row, ``tokens`` int64 ``[B]``."""
    if step is not None:
        return step(tokens)
    call = ModelCall.decode(model.ring, cache)
    position_ids = torch.full((1,), call.num_before, device=model.device)
    return model.base_model(tokens.unsqueeze(1), position_ids, call).squeeze(1)


@torch.inference_mode()
def choose(
    model: LLaMA,
    hidden: torch.Tensor,
    sampler: OnOneRank,
    batch: int,
    sampling: Sampling,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """The next tokens, int64 ``[B]``: drawn on one rank, the same on all ranks."""

    def draw() -> torch.Tensor | None:
        if model.ring.rank != sampler.source:
            return None
        return sampling.draw(model.project(hidden), generator)

    return sampler(batch, model.device, draw)
