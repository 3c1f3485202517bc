# SPDX-License-Identifier: Apache-2.0
"""The keys and values of a sequence, spread over the ranks."""

import functools
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ringattn._calls import complete
from ringattn._group import Group, resolve_group

_GROWTH = 1.5  # how much larger a rank's storage becomes when it is full


def next_owner(lengths: Sequence[int], targets: Sequence[int]) -> int:
    """The rank that lacks the most tokens to its target, the lowest of them where several do."""
    return max(range(len(lengths)), key=lambda rank: targets[rank] - lengths[rank])


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
    to the rank that lacks the most to its target, without targets to the least loaded. Storage is
    allocated once for the tokens announced; past them it grows by half, so a token is copied a
    bounded number of times however many follow.

    Use: one ``store`` per layer for the prompt, and where there are targets one ``settle``; then,
    for each new token, ``advance`` once and ``append`` once per layer. Not thread safe; it owns its
    storage, and what ``view`` and ``append`` return is valid until the next ``advance``.

    Args:
        num_layers: layers of the model.
        lengths: tokens of the prompt that each rank holds, ``[W]``.
        rank: this rank.
        batch: B.
        num_kv_heads: H_kv.
        head_dim: D.
        new_tokens: how many tokens will be appended, as far as is known; room is made for them.
        targets: how many tokens each rank shall hold in the end, ``[W]``; None: all the same.
        dtype: of keys and values.
        device: where they lie.
    """

    def __init__(
        self,
        num_layers: int,
        lengths: Sequence[int],
        rank: int,
        *,
        batch: int,
        num_kv_heads: int,
        head_dim: int,
        new_tokens: int = 0,
        targets: Sequence[int] | None = None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.rank = rank
        self.lengths = list(lengths)  # tokens of each rank, [W]
        self.owner: int | None = None  # the rank that holds the newest token; None: the prompt
        self.targets = [0] * len(self.lengths) if targets is None else list(targets)
        announced = list(lengths)
        for _ in range(new_tokens):
            announced[next_owner(announced, self.targets)] += 1
        if targets is not None:  # what :meth:`settle` may bring here
            announced = [max(pair) for pair in zip(announced, targets, strict=True)]
        self._layers = [  # per layer: [2, B, capacity, H_kv, D], keys first
            torch.empty(
                2, batch, announced[rank], num_kv_heads, head_dim, dtype=dtype, device=device
            )
            for _ in range(num_layers)
        ]

    @property
    def capacity(self) -> int:
        """Tokens of this rank that there is storage for."""
        return self._layers[0].size(2) if self._layers else 0

    @property
    def seq_len(self) -> int:
        """Tokens that all ranks hold together."""
        return sum(self.lengths)

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes one layer's keys and values of this rank's part of the prompt, each
        ``[B, S_r, H_kv, D]``."""
        keys, values = self.view(layer)
        keys.copy_(k)
        values.copy_(v)

    def advance(self) -> int:
        """Makes room for one more token, in every layer, on the rank that lacks the most, and
        returns that rank. Every rank calls it, once per token."""
        self.owner = next_owner(self.lengths, self.targets)
        self.lengths[self.owner] += 1
        if self.lengths[self.rank] > self.capacity:
            self._grow(max(self.lengths[self.rank], int(self.capacity * _GROWTH)))
        return self.owner

    def settle(self, group: Group = None) -> None:
        """Moves tokens of ranks that hold more than their targets to those that hold less, in every
        layer. Collective; once, after the prompt has been stored, for caches with targets.
        ``group`` as in :func:`ringattn.ring_attention`."""
        ring = resolve_group(group)
        group = ring.process_group
        planned = plan_moves(self.lengths, self.targets)
        for storage in self._layers:
            lengths = list(self.lengths)
            operations: list[dist.P2POp] = []
            arrived: list[tuple[torch.Tensor, torch.Tensor]] = []
            for source, destination, tokens in planned:
                lengths[source] -= tokens
                if self.rank == source:
                    leaving = storage.narrow(2, lengths[source], tokens).contiguous()
                    operations.append(
                        dist.P2POp(dist.isend, leaving, group=group, group_peer=destination)
                    )
                if self.rank == destination:
                    place = storage.narrow(2, lengths[destination], tokens)
                    arriving = torch.empty(place.shape, dtype=place.dtype, device=place.device)
                    arrived.append((place, arriving))
                    operations.append(
                        dist.P2POp(dist.irecv, arriving, group=group, group_peer=source)
                    )
                lengths[destination] += tokens
            if operations:
                begin = functools.partial(dist.batch_isend_irecv, operations)
                complete(ring, "settle", storage.device, begin)
            for place, arriving in arrived:
                place.copy_(arriving)
        for source, destination, tokens in planned:
            self.lengths[source] -= tokens
            self.lengths[destination] += tokens

    def append(
        self, layer: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the newest token's key and value, each ``[B, 1, H_kv, D]``, where this rank is its
        owner.

        Returns:
            :meth:`view` of the layer.
        """
        keys, values = self.view(layer)
        if self.owner == self.rank:
            newest = self.lengths[self.rank] - 1
            keys.narrow(1, newest, 1).copy_(k)
            values.narrow(1, newest, 1).copy_(v)
        return keys, values

    def view(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This rank's keys and values of one layer, each ``[B, N_r, H_kv, D]``, without a copy."""
        keys, values = self._layers[layer].narrow(2, 0, self.lengths[self.rank]).unbind(0)
        return keys, values

    def _grow(self, capacity: int) -> None:
        for layer, old in enumerate(self._layers):  # one by one: never two caches at a time
            shape = list(old.shape)
            shape[2] = capacity
            grown = old.new_empty(shape)
            grown.narrow(2, 0, old.size(2)).copy_(old)
            self._layers[layer] = grown
