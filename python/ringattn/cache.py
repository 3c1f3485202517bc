# SPDX-License-Identifier: Apache-2.0
"""The keys and values of a sequence, spread over the ranks."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ringattn._checks import check_integer
from ringattn._distributed.checksums import chained, checksum
from ringattn._distributed.collectives import complete
from ringattn._distributed.groups import Group, resolve_group
from ringattn._key_positions import KeyPositions
from ringattn.partition import Partition

_GROWTH = 1.5  # factor by which a full storage grows
# Room for an unknown number of new tokens: a share of the prompt's tokens, and at least so many.
_ROOM, _MIN_ROOM = 1 / 16, 64


def next_owner(lengths: Sequence[int], targets: Sequence[int]) -> int:
    """The rank that lacks the most tokens to its target, the lowest of them where several do."""
    return max(range(len(lengths)), key=lambda rank: targets[rank] - lengths[rank])


def shares_of(count: int, lengths: Sequence[int], targets: Sequence[int]) -> list[int]:
    """How many of ``count`` new tokens each rank takes, ``[W]``, each token by
    :func:`next_owner`. Counted without a loop over tokens."""
    lacking = [wanted - held for held, wanted in zip(lengths, targets, strict=True)]
    totals = itertools.accumulate(sorted(lacking, reverse=True))
    # What the ranks that get tokens lack afterwards; the lowest of them get the rest.
    level = max(-((count - total) // ranks) for ranks, total in enumerate(totals, start=1))
    shares = [max(0, lack - level) for lack in lacking]
    lowest = [rank for rank, lack in enumerate(lacking) if lack >= level]
    for rank in lowest[: count - sum(shares)]:
        shares[rank] += 1
    return shares


def plan_moves(lengths: Sequence[int], targets: Sequence[int]) -> list[tuple[int, int, int]]:
    """(from, to, tokens) that bring ranks above their targets down to them, as far as others have
    room below their own."""
    surplus = [max(0, held - wanted) for held, wanted in zip(lengths, targets, strict=True)]
    room = [max(0, wanted - held) for held, wanted in zip(lengths, targets, strict=True)]
    planned = []
    for source in range(len(lengths)):
        for destination in range(len(lengths)):
            tokens = min(surplus[source], room[destination])
            if tokens > 0:
                planned.append((source, destination, tokens))
                surplus[source] -= tokens
                room[destination] -= tokens
    return planned


class ShardedKVCache:
    """This rank's share of the keys and values of all layers of a model.

    Which rank holds how much is plain arithmetic on lengths that all ranks know. A new token goes
    to the rank that lacks the most to its target, without targets to the least loaded. Storage of a
    layer is allocated by its first :meth:`store` or :meth:`append`, in the shape, dtype and on the
    device of those keys, with room for the tokens announced; past them it grows by half, so a token
    is copied a bounded number of times however many follow.

    Batch rows may have caches of unequal length (padded prompts): ``key_lengths`` says how many
    keys of this rank each row sees. ``lengths`` then count the longest possible row.

    Use: one ``store`` per layer for the prompt; with targets, one ``rebalance``; then, for each
    step of new tokens, ``advance`` once and ``append`` once per layer. A step that may fail calls
    ``begin`` before, and ``undo`` when it has failed. Not thread safe; it owns its storage, and
    what ``view`` and ``append`` return is valid until the next ``advance``.

    Args:
        lengths: tokens of the prompt that each rank holds, ``[W]``.
        rank: this rank.
        new_tokens: how many tokens will be appended; None: unknown, some room is made.
        targets: how many tokens each rank shall hold in the end, ``[W]``; None: all the same.
        key_lengths: int32 ``[B]`` on the device of the keys, how many of this rank's tokens each
            batch row has; None: all of them.
        positions: where the ranks' parts of the prompt lie in the sequence, for layers with a
            window and for tokens that are spread over the ranks; None: unknown.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        rank: int,
        *,
        new_tokens: int | None = 0,
        targets: Sequence[int] | None = None,
        key_lengths: torch.Tensor | None = None,
        positions: KeyPositions | None = None,
    ) -> None:
        self.rank = rank
        self.positions = positions  # None after a rebalance(), which leaves keys out of order
        self.prompt_len = sum(lengths)
        self.lengths = list(lengths)  # tokens of each rank, [W]
        self.targets = [0] * len(self.lengths) if targets is None else list(targets)
        self.key_lengths = key_lengths
        # New tokens of the last advance() that this rank takes: [start, start + count) of them.
        self._start, self._count = 0, 0
        self._places: tuple[torch.Tensor, torch.Tensor] | None = None  # (batch row, token) of each
        self.capacity = _with_room(self.lengths, rank, new_tokens, self.targets)
        if targets is not None:  # what :meth:`rebalance` may bring here
            self.capacity = max(self.capacity, targets[rank])
        # A checksum of the tokens that came before, by which ranks compare their caches.
        self.history: torch.Tensor | int = 0
        # Lengths, key_lengths and history of the last begin().
        self._begun: tuple[list[int], torch.Tensor | None, torch.Tensor | int] | None = None
        self._begins: dict[tuple[int, int, torch.device], torch.Tensor] = {}  # of this step
        self._layers: dict[int, torch.Tensor] = {}  # [2, B, capacity, H_kv, D], keys first
        self.storage_version = 0  # changes whenever layers move to other addresses

    @property
    def seq_len(self) -> int:
        """Tokens that all ranks hold together."""
        return sum(self.lengths)

    def check_rows(self, name: str, tokens: torch.Tensor) -> None:
        """ValueError where new tokens ``[B, ...]`` have another number of batch rows than the keys:
        one row would be broadcast into all of them."""
        num_rows = self._num_rows
        if num_rows is not None and num_rows != tokens.size(0):
            raise ValueError(
                f"{name} must have the {num_rows} rows of the cache, got {tokens.size(0)}"
            )

    @property
    def _num_rows(self) -> int | None:
        """Batch rows; None before a layer has keys, unless rows have unequal lengths."""
        for storage in self._layers.values():
            return storage.size(1)
        return None if self.key_lengths is None else self.key_lengths.numel()

    @property
    def older_key_lengths(self) -> torch.Tensor | None:
        """``key_lengths`` without the tokens of the last :meth:`advance`."""
        if self.key_lengths is None or self._count == 0:
            return self.key_lengths
        return self.key_lengths - self._count

    def first_keys(self, left: int, count: int) -> list[int]:
        """The first key of this rank that the newest ``count`` tokens see through a window of
        ``left`` keys before each: of every batch row, or ``[1]`` for all of them.

        Raises:
            ValueError: keys that are out of order.
        """
        if self.positions is None:
            raise ValueError(
                "cache must have its keys in the order of the sequence for layers with a window, "
                "got one that was rebalanced: leave cache_lengths out"
            )
        return self.positions.before(self.seq_len - self.prompt_len - count - left)

    def begins(self, left: int, count: int, device: torch.device) -> torch.Tensor:
        """:meth:`first_keys` of each of these tokens, int32 ``[B, count]`` or ``[1, count]``; made
        once for the layers of a step."""
        key = (left, count, device)
        if key not in self._begins:
            per_token = [self.first_keys(left, each) for each in range(count, 0, -1)]
            self._begins[key] = (
                torch.tensor(per_token, dtype=torch.int32).t().contiguous().to(device)
            )
        return self._begins[key]

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes one layer's keys and values of this rank's part of the prompt, each
        ``[B, S_r, H_kv, D]``."""
        self._allocate(layer, k)
        keys, values = self.view(layer)
        keys.copy_(k)
        values.copy_(v)

    @property
    def partition(self) -> Partition | None:
        """Which rank holds which tokens of the sequence, for :func:`ringattn.ring_attention`; None
        where no partition says it: keys out of order, batch rows of unequal length."""
        return None if self.positions is None else self.positions.partition

    def advance(self, count: int = 1, partition: Partition | None = None) -> list[int]:
        """Makes room for ``count`` more tokens, in every layer. Every rank calls it, once per step.

        Each token goes to the rank that lacks the most; a rank takes neighbouring tokens, rank 0
        the first ones. With a ``partition`` of the new tokens each goes to the rank that owns it,
        and :meth:`append` is given the rows of this rank alone.

        Returns:
            How many of them each rank takes, ``[W]``.
        """
        if partition is None:
            shares = shares_of(count, self.lengths, self.targets)
            ends = list(itertools.accumulate(shares, initial=0))
            pieces = [[piece] for piece in itertools.pairwise(ends)]
            self._start = ends[self.rank]
        else:
            shares = list(partition.lengths)
            pieces = [partition.segments(rank) for rank in range(partition.world_size)]
            self._start = 0
        lengths = [held + share for held, share in zip(self.lengths, shares, strict=True)]
        if lengths[self.rank] > self.capacity:  # first: memory may be short
            self._grow(max(lengths[self.rank], int(self.capacity * _GROWTH)))
        self.lengths = lengths
        self._count = shares[self.rank]
        self._places = None
        self._begins.clear()
        if self.positions is not None:
            self.positions.append(pieces)
        if self.key_lengths is not None and self._count > 0:
            first, device = self.key_lengths.to(torch.int64), self.key_lengths.device
            tokens = first.unsqueeze(1) + torch.arange(self._count, device=device)
            rows = torch.arange(first.numel(), device=device).unsqueeze(1)
            self._places = (rows.expand_as(tokens), tokens)
            self.key_lengths = self.key_lengths + self._count
        return shares

    def begin(self, history: torch.Tensor | int) -> None:
        """Remembers which tokens are there, for :meth:`undo`; ``history`` is theirs."""
        self._begun = (list(self.lengths), self.key_lengths, history)

    def undo(self) -> None:
        """Drops the tokens that came since :meth:`begin`, in every layer."""
        assert self._begun is not None
        lengths, self.key_lengths, self.history = self._begun
        self.lengths = list(lengths)
        if self.positions is not None:
            self.positions.crop(self.seq_len)
        self._count, self._places = 0, None
        self._begins.clear()

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes those of the newest tokens' keys and values, each ``[B, count, H_kv, D]``, that
        this rank takes.

        Returns:
            :meth:`view` of the layer.
        """
        self._allocate(layer, k)
        keys, values = self.view(layer)
        start, count = self._start, self._count
        if count > 0 and self._places is not None:
            keys[self._places] = k.narrow(1, start, count)
            values[self._places] = v.narrow(1, start, count)
        elif count > 0:
            first = keys.size(1) - count
            keys.narrow(1, first, count).copy_(k.narrow(1, start, count))
            values.narrow(1, first, count).copy_(v.narrow(1, start, count))
        return keys, values

    def view(self, layer: int, *, newest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's keys and values of one layer, each ``[B, N_r, H_kv, D]``, without a copy.
        ``newest=False`` leaves out the tokens of the last :meth:`advance`. Where there are
        ``key_lengths`` (``older_key_lengths``), row b has values in its first ones only."""
        length = self.lengths[self.rank] - (0 if newest else self._count)
        keys, values = self._layers[layer].narrow(2, 0, length).unbind(0)
        return keys, values

    def storage(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All memory for keys and values of one layer, each ``[B, capacity, H_kv, D]``, allocated
        like keys ``[B, any, H_kv, D]`` where it is not yet. :meth:`view` has the first tokens of
        it."""
        self._allocate(layer, like)
        keys, values = self._layers[layer].unbind(0)
        return keys, values

    def select(self, rows: Any) -> None:
        """Keeps these batch rows, in this order; one may be named several times. ``rows`` is what
        indexes a tensor ``[B]``: numbers ``[B']``, negative ones from the end, or a bool mask
        ``[B]``, as a tensor or a list. On CUDA the host waits.

        Raises:
            ValueError: rows that are not there.
        """
        if self._num_rows is None:
            return
        rows = _selected(rows, self._num_rows)
        self.storage_version += 1
        self._begun = None
        self._begins.clear()
        if self.key_lengths is not None and self.positions is not None:
            self.positions.select(rows.tolist())
        if isinstance(self.history, torch.Tensor):
            rows = rows.to(self.history.device)  # copied once
            self.history = chained(self.history, checksum(rows))
        for layer, storage in self._layers.items():
            rows = rows.to(storage.device)
            self._layers[layer] = storage.index_select(1, rows)
        if self.key_lengths is not None:
            self.key_lengths = self.key_lengths.index_select(0, rows.to(self.key_lengths.device))

    def crop(self, num_tokens: int) -> None:
        """Keeps the first ``num_tokens`` of the sequence, in every layer; nothing is copied. Every
        rank calls it.

        Raises:
            ValueError: keys that are out of order, batch rows of unequal length, a ``num_tokens``
                that is negative or no integer.
        """
        num_tokens = check_integer("num_tokens", num_tokens, least=0)
        if num_tokens >= self.seq_len:
            return
        if self.positions is None or self.key_lengths is not None:
            what = "one that was rebalanced" if self.positions is None else "a padded one"
            raise ValueError(
                "cache must have its keys in the order of the sequence, and rows of one length, to "
                f"be cropped, got {what}"
            )
        if self._begun is not None and num_tokens <= sum(self._begun[0]) < self.seq_len:
            # The newest step is dropped as by undo(), which other ranks may have called.
            lengths, _, self.history = self._begun
            if num_tokens < sum(lengths):
                self.history = chained(self.history, num_tokens)
        else:
            self.history = chained(self.history, num_tokens)
        self.lengths = self.positions.crop(num_tokens)
        self.prompt_len = min(self.prompt_len, num_tokens)
        self._count = 0
        self._begins.clear()
        self._begun = None

    def rebalance(self, group: Group = None) -> None:
        """Moves tokens of ranks that hold more than their targets to those that hold less, in every
        layer. Collective; once, after the prompt has been stored, for caches with targets.
        ``group`` as in :func:`ringattn.ring_attention`."""
        ring = resolve_group(group)
        planned = plan_moves(self.lengths, self.targets)
        if planned:
            self.positions = None
        for storage in self._layers.values() if planned else ():
            lengths = list(self.lengths)
            leaving = [storage.new_empty(0)]
            places: list[torch.Tensor] = []
            sent, received = [0] * len(lengths), [0] * len(lengths)  # elements, to and from a rank
            for source, destination, tokens in planned:
                lengths[source] -= tokens
                if self.rank == source:
                    leaving.append(storage.narrow(2, lengths[source], tokens).flatten())
                    sent[destination] = leaving[-1].numel()
                if self.rank == destination:
                    places.append(storage.narrow(2, lengths[destination], tokens))
                    received[source] = places[-1].numel()
                lengths[destination] += tokens
            arrived = storage.new_empty(sum(received))
            # Note: by every rank, also one that neither gives nor takes. NCCL's communicator is
            # made by a group's first operation, which waits for all ranks.
            begin = functools.partial(
                _exchange, arrived, torch.cat(leaving), received, sent, ring.process_group
            )
            complete(ring, "rebalance", storage.device, begin)
            arrivals = arrived.split([place.numel() for place in places])
            for place, arrival in zip(places, arrivals, strict=True):
                place.copy_(arrival.view_as(place))
        for source, destination, tokens in planned:
            self.lengths[source] -= tokens
            self.lengths[destination] += tokens

    def _allocate(self, layer: int, k: torch.Tensor) -> None:
        batch, _, num_kv_heads, head_dim = k.shape
        held = self._layers.get(layer)
        if held is None:
            self._layers[layer] = _empty_like(k, 2, batch, self.capacity, num_kv_heads, head_dim)
        elif held.shape[3:] != k.shape[2:]:  # a single head would be broadcast
            raise ValueError(
                f"cache must hold keys of the model's {num_kv_heads} heads of {head_dim}, "
                f"got {held.size(3)} of {held.size(4)}: another model filled it"
            )
        elif held.dtype != k.dtype:  # new keys would be rounded to it
            raise ValueError(
                f"cache must hold keys of this call's dtype, {k.dtype}, got {held.dtype}: go on in "
                "the dtype that filled it"
            )

    def _grow(self, capacity: int) -> None:
        self.storage_version += 1
        for layer, old in self._layers.items():  # one by one: never two caches at a time
            shape = list(old.shape)
            shape[2] = capacity
            grown = _empty_like(old, *shape)
            grown.narrow(2, 0, old.size(2)).copy_(old)
            self._layers[layer] = grown
        self.capacity = capacity


def _exchange(
    arrived: torch.Tensor,
    leaving: torch.Tensor,
    received: list[int],
    sent: list[int],
    group: dist.ProcessGroup | None,
) -> list[dist.Work]:
    """Begins to send ``sent`` elements of ``leaving`` to each rank and to receive ``received`` of
    each; as bytes: any backend takes any dtype then."""
    size = leaving.element_size()
    work = dist.all_to_all_single(
        arrived.view(torch.uint8),
        leaving.view(torch.uint8),
        [size * count for count in received],
        [size * count for count in sent],
        group=group,
        async_op=True,
    )
    assert work is not None  # async_op
    return [work]


def _selected(rows: Any, num_rows: int) -> torch.Tensor:
    """The numbers of the rows that ``x[rows]`` has of ``x``, ``[num_rows, ...]``: int64 ``[B']`` on
    the CPU, whose indexing refuses what is beyond; a CUDA device would be lost."""
    given = rows.cpu() if isinstance(rows, torch.Tensor) else rows
    try:
        found = torch.arange(num_rows, device="cpu")[given, ...]
    except (IndexError, TypeError):
        found = None
    if found is None or found.dim() != 1:
        got = given.tolist() if isinstance(given, torch.Tensor) else given
        raise ValueError(f"batch rows must be of the {num_rows} of the cache, got {got!r}")
    return found


# Note: not an inference tensor, which later steps outside of inference mode could not write to.
@torch.inference_mode(False)
def _empty_like(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _with_room(
    lengths: Sequence[int], rank: int, new_tokens: int | None, targets: Sequence[int]
) -> int:
    """Tokens of ``rank`` once ``new_tokens`` have been appended."""
    if new_tokens is None:
        return lengths[rank] + max(_MIN_ROOM, int(lengths[rank] * _ROOM))
    return lengths[rank] + shares_of(new_tokens, lengths, targets)[rank]
