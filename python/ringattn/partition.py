# SPDX-License-Identifier: Apache-2.0
"""Partitions: which rank owns which tokens.

The arithmetic is that of ``csrc/partition/partition.cpp``, in plain Python integers so that
``torch.compile`` traces it with symbolic lengths; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ringattn._checks import (
    check_collective,
    check_integer,
    check_integers,
    check_is_tensor,
    check_tensors,
    is_dtensor,
)
from ringattn._distributed.errors import call, check_real, report_to_peers
from ringattn._distributed.groups import Group, GroupInfo, resolve_group

LAYOUTS = ("zigzag", "contiguous")


def check_layout(layout: object) -> None:
    if layout not in LAYOUTS:
        got = f'"{layout}"' if isinstance(layout, str) else repr(layout)
        if isinstance(layout, (list, tuple)):
            got += f": pass ringattn.Partition.zigzag({list(layout)}) or .contiguous"
        raise ValueError(f'layout must be "zigzag" or "contiguous", got {got}')


_MAX_TOKENS = 2**63 - 1  # positions are 64 bits wide


@dataclass(frozen=True)
class Partition:
    """Which positions of a sequence each rank owns.

    ``zigzag``: the ranks are nested, the first in ``order`` outermost. Each owns a piece of the
    head of the sequence, ``S_r // 2`` tokens, and the mirror piece at the tail, the rest of its
    ``S_r`` tokens. Causal work of rank i's queries on rank j's keys is then ``S_i * S_j / 2`` for
    any lengths (exactly for even ones, within half a row for odd ones), so a rank's work is
    proportional to its tokens. ``contiguous``: one piece per rank, one after the other in
    ``order``.

    Immutable, hashable, comparable and picklable.

    Args:
        layout: "zigzag" or "contiguous".
        lengths: tokens of each rank, ``[W]``; 0 is a rank without tokens.
        order: ranks outermost first (zigzag) or first to last (contiguous); empty means ``0 ..
            W-1``. Key/value blocks visit in this order, those of ranks without tokens last.

    Raises:
        ValueError: an unknown layout, no ranks, lengths that are not non-negative integers or add
            up to 2**63 or more, an order that is not a permutation of the ranks.

    The symmetry argument: a set of positions that is its own mirror image sees, causally, half of
    any other such set. Head/tail pairing is Llama 3's context parallelism
    (https://arxiv.org/abs/2407.21783, section 3.3.2), here with unequal pieces.
    """

    layout: str
    lengths: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_layout(self.layout)
        lengths = check_integers("lengths", self.lengths, least=0)
        order = check_integers("order", self.order) or tuple(range(len(lengths)))
        if not lengths:
            raise ValueError("lengths must name at least one rank, got none")
        # Sizes of tensors, which is what traced lengths are made of, are in range.
        if not torch.compiler.is_compiling() and sum(lengths) > _MAX_TOKENS:
            raise ValueError(f"lengths must add up to less than 2**63 tokens, got {sum(lengths)}")
        if sorted(order) != list(range(len(lengths))):
            raise ValueError(
                f"order must name each of the {len(lengths)} ranks once, got {list(order)}"
            )
        object.__setattr__(self, "lengths", lengths)
        object.__setattr__(self, "order", order)

    @classmethod
    def zigzag(
        cls, lengths: Sequence[int], order: Sequence[int] | None = None, *refused: object
    ) -> Partition:
        """Nested head and tail pieces: rank r owns ``lengths[r]`` tokens. See
        :class:`Partition`; more arguments are refused."""
        return cls._of("zigzag", lengths, order, refused)

    @classmethod
    def contiguous(
        cls, lengths: Sequence[int], order: Sequence[int] | None = None, *refused: object
    ) -> Partition:
        """One piece per rank: rank r owns ``lengths[r]`` tokens. See :class:`Partition`; more
        arguments are refused."""
        return cls._of("contiguous", lengths, order, refused)

    @classmethod
    def _of(
        cls,
        layout: str,
        lengths: Sequence[int],
        order: Sequence[int] | None,
        refused: tuple[object, ...],
    ) -> Partition:
        if isinstance(lengths, int):
            given = [length for length in (lengths, order, *refused) if isinstance(length, int)]
            raise ValueError(
                f"lengths must be a list, one length for each rank, got {lengths}: pass "
                f"ringattn.Partition.{layout}({given})"
            )
        if refused:
            raise ValueError(
                f"Partition.{layout} must have lengths and at most an order, "
                f"got {2 + len(refused)} arguments"
            )
        return cls(layout, lengths, () if order is None else order)  # type: ignore[arg-type]

    @classmethod
    def even(cls, seq_len: int, world_size: int, *, layout: str = "zigzag") -> Partition:
        """``seq_len`` tokens over ``world_size`` ranks; lengths differ by at most one, the lower
        ranks have the longer ones.

        Raises:
            ValueError: no ranks, a number of tokens that is negative or no integer, an unknown
                layout.
        """
        seq_len = check_integer("seq_len", seq_len, least=0)
        world_size = check_integer("world_size", world_size, least=1)
        short, num_longer = seq_len // world_size, seq_len % world_size
        lengths = tuple(short + (1 if rank < num_longer else 0) for rank in range(world_size))
        return cls(layout, lengths)

    @property
    def seq_len(self) -> int:
        """Tokens of the whole sequence, S."""
        return sum(self.lengths)

    @property
    def world_size(self) -> int:
        """Number of ranks, W."""
        return len(self.lengths)

    def segments(self, rank: int) -> list[tuple[int, int]]:
        """The positions of ``rank``: ``[(start, stop), ...]``, ascending, at most two pieces (head
        and tail) under zigzag and one under contiguous; empty pieces are left out.

        Raises:
            ValueError: a rank out of range, or no integer.
        """
        rank = self._check_rank(rank)
        return [piece for owner, piece in self._pieces() if owner == rank and piece[0] < piece[1]]

    def position_ids(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Positions of the tokens of ``rank``, ascending, int64 ``[S_r]``: what a rotary embedding
        needs.

        Raises:
            ValueError: a rank out of range, or no integer.
        """
        pieces = [
            torch.arange(start, stop, dtype=torch.int64, device=device)
            for start, stop in self.segments(rank)
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)

    def owner(self, position: int) -> int:
        """The rank that owns ``position``.

        Raises:
            ValueError: a position outside ``[0, seq_len)``, or no integer.
        """
        position = check_integer("position", position)
        for rank, (start, stop) in self._pieces():
            if start <= position < stop:
                return rank
        raise ValueError(f"position must lie in [0, {self.seq_len}), got {position}")

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1) -> torch.Tensor:
        """The rows of ``rank`` out of a global tensor, in position order; differentiable.

        Args:
            x: S rows along ``dim``, any other dimensions, dtype and device.
            rank: whose rows.
            dim: the sequence dimension.

        Returns:
            ``x`` with S_r rows along ``dim``; a view of ``x`` where they are one segment.

        Raises:
            ValueError: a rank or dimension out of range, ``x`` that is no tensor or without S rows.
        """
        rank = self._check_rank(rank)
        _check_tensor("x", x)
        dim = _check_dim("x", x, dim)
        if x.size(dim) != self.seq_len:
            swapped = x.dim() == 4 and dim == 1 and x.size(2) == self.seq_len
            raise ValueError(
                f"x must have {self.seq_len} rows in dim {dim}, got {x.size(dim)}"
                + ("; this looks like [B, H, S, D]: pass x.transpose(1, 2)" if swapped else "")
            )
        pieces = [x.narrow(dim, start, stop - start) for start, stop in self.segments(rank)]
        if not pieces:
            return x.narrow(dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)

    def unshard(self, shards: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """The global tensor out of one tensor per rank, the inverse of :meth:`shard`;
        differentiable.

        Args:
            shards: W tensors in rank order, the r-th with S_r rows along ``dim``.
            dim: the sequence dimension.

        Returns:
            A new tensor with S rows along ``dim``.

        Raises:
            ValueError: another number of tensors than W, a dimension out of range, a tensor without
                S_r rows, tensors that differ in dtype or in sizes but along ``dim``.
        """
        try:
            shards = list(shards)
        except TypeError:
            raise ValueError(
                f"shards must be {self.world_size} tensors, got {type(shards).__name__}"
            ) from None
        if len(shards) != self.world_size:
            raise ValueError(f"shards must be {self.world_size} tensors, got {len(shards)}")
        heads, tails = [], []
        for rank, shard in enumerate(shards):
            _check_tensor(f"shard {rank}", shard)
            axis, length = _check_dim(f"shard {rank}", shard, dim), self.lengths[rank]
            if shard.size(axis) != length:
                raise ValueError(
                    f"shard {rank} must have {length} rows in dim {axis}, got {shard.size(axis)}"
                )
            if shard.dtype != shards[0].dtype:
                raise ValueError(
                    f"shard {rank} must have dtype {shards[0].dtype}, got {shard.dtype}"
                )
            others, first = _other_sizes(shard, axis), _other_sizes(shards[0], axis)
            if others != first:
                raise ValueError(f"shard {rank} must have other sizes {first}, got {others}")
        for rank in self.order:
            shard, length = shards[rank], self.lengths[rank]
            head = self._head(length)
            heads.append(shard.narrow(axis, 0, head))
            tails.append(shard.narrow(axis, head, length - head))
        return torch.cat(heads + tails[::-1], axis)  # the last tail is the innermost

    def gather(self, x: torch.Tensor, group: Group = None, dim: int = 1) -> torch.Tensor:
        """The global tensor on every rank, out of each rank's own rows. Collective: every rank of
        the group calls it, with equal dtypes and equal sizes but along ``dim``.

        Args:
            x: the S_r rows of this rank along ``dim``, any dtype.
            group: as in :func:`ringattn.ring_attention`.
            dim: the sequence dimension.

        Returns:
            A new tensor with S rows along ``dim``.

        Raises:
            ValueError: a group this process is not in or whose size is not W, ``x`` that is no
                plain tensor on a device with a kernel, has no S_r rows, or requires grad under
                grad mode (the gathered rows are not differentiable), DTensors, ``torch.vmap``,
                ranks that disagree.
            torch.distributed.DistBackendError: a peer died or never arrived.
        """
        ring = resolve_group(group)
        try:
            dim = self._check_gather(x, ring, dim)
        except Exception as error:
            report_to_peers(ring, error)
            raise
        if ring.world_size == 1:
            return self.unshard([x], dim)
        check_real("gather")
        who = (list(self.lengths), list(self.order), self.layout)
        blocks = call(torch.ops.ringattn.gather, x.movedim(dim, 0), *who, dim, ring.name)
        shards = [
            block.narrow(0, 0, length).movedim(0, dim)
            for block, length in zip(blocks, self.lengths, strict=True)
        ]
        return self.unshard(shards, dim)

    def _check_gather(self, x: torch.Tensor, ring: GroupInfo, dim: int) -> int:
        """``dim`` counted from the front."""
        check_num_ranks(self.world_size, ring.world_size)
        check_tensors(x=x)
        dim = _check_dim("x", x, dim)
        rows = self.lengths[ring.rank]
        if x.size(dim) != rows:
            raise ValueError(
                f"x must have the {rows} rows that the partition gives rank {ring.rank}, "
                f"got {x.size(dim)}"
            )
        check_collective(x=x)
        return dim

    def _head(self, length: int) -> int:
        """How many of a rank's tokens are its head piece."""
        return length // 2 if self.layout == "zigzag" else length

    def _pieces(self) -> list[tuple[int, tuple[int, int]]]:
        """(rank, (start, stop)) of every rank's head piece and tail piece, empty ones included. A
        contiguous piece is a head without a tail."""
        pieces = []
        head_start, tail_stop = 0, self.seq_len
        for rank in self.order:
            length = self.lengths[rank]
            head = self._head(length)
            tail = length - head
            pieces.append((rank, (head_start, head_start + head)))
            pieces.append((rank, (tail_stop - tail, tail_stop)))
            head_start, tail_stop = head_start + head, tail_stop - tail
        return pieces

    def _check_rank(self, rank: int) -> int:
        rank = check_integer("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must lie in [0, {self.world_size}), got {rank}")
        return rank


def _check_tensor(name: str, x: torch.Tensor) -> None:
    check_is_tensor(name, x)
    if is_dtensor(x):
        raise ValueError(f"{name} must be a plain tensor, got a DTensor")


def _other_sizes(x: torch.Tensor, dim: int) -> list[int]:
    return [*x.shape[:dim], *x.shape[dim + 1 :]]


def _check_dim(name: str, x: torch.Tensor, dim: int) -> int:
    """``dim`` counted from the front."""
    dim = check_integer("dim", dim)
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"dim must be a dimension of {name} with shape {list(x.shape)}, got {dim}")
    return dim % x.dim()


def check_num_ranks(num_ranks: int, world_size: int) -> None:
    """ValueError where a partition of ``num_ranks`` ranks meets a group of ``world_size``."""
    if num_ranks != world_size:
        raise ValueError(
            f"partition must have the {world_size} ranks of the group, got {num_ranks}"
        )


def check_partition(partition: Partition | None, ring: GroupInfo) -> Partition:
    """The partition of a call on ``ring``, or a ValueError that says what to write."""
    if partition is not None:
        return check_partition_type(partition)
    rank, world_size = ring.rank, ring.world_size
    raise ValueError(
        f"partition must say which tokens each of the {world_size} ranks owns, got None: pass "
        f"ringattn.Partition.even(S, {world_size}), S the tokens of the whole sequence; its "
        f"shard(x, {rank}) gives the rows of rank {rank}, x.chunk({world_size}, 1)[{rank}] "
        "does not"
    )


def check_partition_type(partition: object) -> Partition:
    """A Partition, or a ValueError that says what to write."""
    if isinstance(partition, Partition):
        return partition
    got = f"got {type(partition).__name__}"
    if isinstance(partition, (list, tuple)):
        got += f": pass ringattn.Partition.zigzag({list(partition)})"
    raise ValueError(f"partition must be a Partition, {got}")


def partition_arguments(partition: Partition) -> tuple[list[int], list[int], str]:
    """The operators' arguments for a partition: lengths, order, layout."""
    return list(partition.lengths), list(partition.order), partition.layout
