# SPDX-License-Identifier: Apache-2.0
"""Partitions: which rank owns which tokens.

The arithmetic is that of ``csrc/partition/partition.cpp``, in plain Python integers so that
``torch.compile`` traces it with symbolic lengths; the tests hold the two together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.autograd.function import once_differentiable

from ringattn import _C
from ringattn._checks import (
    check_collective,
    check_flag,
    check_integer,
    check_integers,
    check_is_tensor,
    check_tensors,
    is_dtensor,
    is_finite,
    shown,
)
from ringattn._distributed.errors import ErrorsToPeers, call, check_real
from ringattn._distributed.groups import Group, GroupInfo, resolve_group
from ringattn._masks import CuSeqlens, check_window, checked_documents, documents, made_to_last
from ringattn._pieces import Pieces, flat_pieces, normal_pieces, num_tokens

LAYOUTS = ("zigzag", "contiguous")  # of lengths; "pieces" is of Partition.pieces alone


def _flat_tensor(assigned: Pieces) -> torch.Tensor:
    """Rank, start and stop of each piece, ``[n, 3]``."""
    return torch.tensor(flat_pieces(assigned), dtype=torch.int64, device="cpu").reshape(-1, 3)


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
    ``order``. ``pieces``: any pieces of any ranks, see :meth:`pieces`.

    Immutable, hashable, comparable and picklable.

    Args:
        layout: "zigzag" or "contiguous"; :meth:`pieces` makes the others.
        lengths: tokens of each rank, ``[W]``; 0 is a rank without tokens.
        order: ranks outermost first (zigzag) or first to last (contiguous); empty means ``0 ..
            W-1``. Key/value blocks visit in this order, those of ranks without tokens last.
        assigned: the pieces of each rank, with layout "pieces" alone.

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
    assigned: tuple[tuple[tuple[int, int], ...], ...] = ()
    # With layout "pieces", what operators get: a tensor, which other pieces do not recompile for.
    _flat: ClassVar[torch.Tensor | None] = None

    def __post_init__(self) -> None:
        if self.layout == "pieces":
            assigned = normal_pieces(self.assigned)
            object.__setattr__(self, "assigned", assigned)
            for name, own in (
                ("lengths", tuple(map(num_tokens, assigned))),
                ("order", tuple(range(len(assigned)))),
            ):
                given = getattr(self, name)
                if given and check_integers(name, given) != own:
                    raise ValueError(
                        f"{name} must be left out with pieces, which say it, got {given}"
                    )
                object.__setattr__(self, name, own)
            object.__setattr__(self, "_flat", made_to_last(_flat_tensor, assigned))
            return
        check_layout(self.layout)
        if self.assigned:
            raise ValueError(
                f'assigned must be left out with layout "{self.layout}", got {self.assigned}'
            )
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
        check_layout(layout)
        short, num_longer = seq_len // world_size, seq_len % world_size
        lengths = tuple(short + (1 if rank < num_longer else 0) for rank in range(world_size))
        return cls(layout, lengths)

    @classmethod
    def pieces(cls, pieces: Sequence[Sequence[Sequence[int]]]) -> Partition:
        """Any assignment: what other packages' loaders give, or :meth:`packed` chooses.

        Args:
            pieces: for each rank its pieces ``(start, stop)`` of the sequence, in any order,
                ``[W]``; a rank may have none. Together they cover ``[0, S)`` once. They are
                normalised: sorted, neighbours joined, empty ones dropped.

        Raises:
            ValueError: no ranks, pieces that are no pairs of non-negative integers in order, a
                position that is in two pieces or in none.
        """
        return cls("pieces", assigned=pieces)  # type: ignore[arg-type]

    @classmethod
    def packed(
        cls,
        cu_seqlens: CuSeqlens,
        world_size: int,
        *,
        causal: bool = True,
        window_size: Sequence[int] = (-1, -1),
        weights: Sequence[float] | None = None,
    ) -> Partition:
        """Pieces that balance packed documents: each rank has as many tokens and, within 2 %, as
        much attention. Of such pieces those whose ranks fetch few rows of others: a short document
        stays whole. The same arguments give the same pieces.

        Args:
            cu_seqlens: boundaries of the documents, as in :func:`ringattn.ring_attention`.
            world_size: W.
            causal: of the attention whose work is balanced; so is ``window_size``.
            window_size: keys before and after a query that it sees.
            weights: shares of the ranks, ``[W]``, in any unit; None: equal ones. Tokens follow them
                within one token, work within 2 %. A rank of weight 0 has no tokens.

        Raises:
            ValueError: no ranks, a mask that breaks a rule, weights that are negative, not finite,
                all 0 or not W.
        """
        boundaries = documents(cu_seqlens)
        ends = [] if boundaries is None else boundaries.tolist()
        world_size = check_integer("world_size", world_size, least=1)
        given = weights.tolist() if isinstance(weights, torch.Tensor) else weights
        listed = isinstance(given, Iterable) and not isinstance(given, (Mapping, Set))
        shares = list(given) if listed else []  # type: ignore[arg-type]
        if weights is not None and not (
            len(shares) == world_size
            and all(is_finite(share) and share >= 0 for share in shares)
            and any(share > 0 for share in shares)
        ):
            raise ValueError(
                f"weights must be {world_size} finite numbers, not negative and not all 0, "
                f"got {shown(weights)}"
            )
        mask = (check_flag("causal", causal), check_window(window_size))
        shares = [float(share) for share in shares]
        return cls.pieces(_C.packed_pieces(ends, world_size, *mask, shares))

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
        if self.assigned:
            return list(self.assigned[rank])
        return [piece for owner, piece in self._pieces() if owner == rank and piece[0] < piece[1]]

    def position_ids(
        self,
        rank: int,
        device: torch.device | str | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """Positions of the tokens of ``rank``, in ascending order of the sequence, int64 ``[S_r]``:
        what a rotary embedding needs.

        Args:
            rank: whose tokens.
            device: of the result.
            cu_seqlens: boundaries of packed documents, as in :func:`ringattn.ring_attention`: the
                positions are then counted from the start of each document.

        Raises:
            ValueError: a rank out of range, or no integer; ``cu_seqlens`` that are no boundaries.
        """
        pieces = [
            torch.arange(start, stop, dtype=torch.int64, device=device)
            for start, stop in self.segments(rank)
        ]
        ids = torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)
        if cu_seqlens is None:
            return ids
        boundaries = checked_documents(cu_seqlens, self.seq_len).to(ids.device)
        return ids - boundaries[torch.searchsorted(boundaries, ids, right=True) - 1]

    def num_pairs(
        self,
        rank: int,
        *,
        causal: bool = True,
        window_size: Sequence[int] = (-1, -1),
        cu_seqlens: CuSeqlens | None = None,
    ) -> int:
        """Visible pairs of a query of ``rank`` and a key of the sequence, of one head and batch
        row: the work of its attention, by which balance is measured.

        Args:
            rank: whose queries.
            causal: as in :func:`ringattn.ring_attention`; so are the others.
            window_size: keys before and after a query that it sees.
            cu_seqlens: boundaries of packed documents.

        Raises:
            ValueError: a rank out of range, or no integer; a mask that breaks a rule; ranks with so
                many tokens that 64 bits do not hold the pairs.
        """
        rank = self._check_rank(rank)
        if max(self.lengths) >= 2**31:
            raise ValueError(
                "pairs are counted where no rank has 2**31 tokens, got a partition with "
                f"{max(self.lengths)} on one"
            )
        ends = None if cu_seqlens is None else checked_documents(cu_seqlens, self.seq_len).tolist()
        visits = _C.schedule(
            *(self.layout, list(self.lengths), list(self.order), rank),
            *(check_flag("causal", causal), flat_pieces(self.assigned), check_window(window_size)),
            ends,
        )
        return sum(visit.num_pairs for visit in visits)

    def owner(self, position: int) -> int:
        """The rank that owns ``position``.

        Raises:
            ValueError: a position outside ``[0, seq_len)``, or no integer.
        """
        position = check_integer("position", position)
        for start, stop, rank in self._in_order():
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
                S_r rows, tensors that differ in dtype, device or in sizes but along ``dim``.
        """
        try:
            shards = list(shards)
        except TypeError:
            raise ValueError(
                f"shards must be {self.world_size} tensors, got {type(shards).__name__}"
            ) from None
        if len(shards) != self.world_size:
            raise ValueError(f"shards must be {self.world_size} tensors, got {len(shards)}")
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
            if shard.device != shards[0].device:
                raise ValueError(
                    f"shard {rank} must be on the device of shard 0, {shards[0].device}, "
                    f"got {shard.device}"
                )
            others, first = _other_sizes(shard, axis), _other_sizes(shards[0], axis)
            if others != first:
                raise ValueError(f"shard {rank} must have other sizes {first}, got {others}")
        taken = [0] * len(shards)
        parts = []
        for start, stop, rank in self._in_order():
            parts.append(shards[rank].narrow(axis, taken[rank], stop - start))
            taken[rank] += stop - start
        return torch.cat(parts or shards, axis)  # of no pieces: shards without rows

    def gather(self, x: torch.Tensor, group: Group = None, dim: int = 1) -> torch.Tensor:
        """The global tensor on every rank, out of each rank's own rows. Collective: every rank of
        the group calls it, with equal dtypes and equal sizes but along ``dim``.

        Differentiable, for ranks that all compute the same loss from the global tensor: the
        gradient of ``x`` is the rank's own rows of the global one, neither summed nor exchanged. A
        rank that computes a part of the loss gathers nothing.

        Args:
            x: the S_r rows of this rank along ``dim``, any dtype.
            group: as in :func:`ringattn.ring_attention`.
            dim: the sequence dimension.

        Returns:
            A new tensor with S rows along ``dim``.

        Raises:
            ValueError: a group this process is not in or whose size is not W, ``x`` that is no
                plain tensor on a device with a kernel or has no S_r rows, dual tensors (there is no
                forward-mode derivative), DTensors, ``torch.vmap``, ranks that disagree.
            RuntimeError: a gradient that is differentiated again, on more than one rank.
            torch.distributed.DistBackendError: a peer died or never arrived.
        """
        return self._gather(x, resolve_group(group), dim)

    def _gather(self, x: torch.Tensor, ring: GroupInfo, dim: int = 1) -> torch.Tensor:
        """:meth:`gather` over a ring that is known."""
        with ErrorsToPeers(ring):
            dim = self._check_gather(x, ring, dim)
        if ring.world_size == 1:
            return self.unshard([x], dim)
        check_real("gather")
        if torch.is_grad_enabled() and x.requires_grad:
            whole: torch.Tensor = _Gathered.apply(x, self, ring.rank, ring.name, dim)
            return whole
        return self._gathered(x, ring.name, dim)

    def _gathered(self, x: torch.Tensor, group_name: str, dim: int) -> torch.Tensor:
        lengths, order, layout, pieces = partition_arguments(self)
        arguments = (x.movedim(dim, 0), lengths, order, layout, dim, group_name, pieces)
        blocks = call(torch.ops.ringattn.gather, *arguments)
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

    def _in_order(self) -> list[tuple[int, int, int]]:
        """(start, stop, rank) of the pieces that cover the sequence, ascending. Under zigzag and
        contiguous their number does not depend on lengths: empty ones are among them."""
        if self.assigned:
            return sorted((*piece, r) for r, owned in enumerate(self.assigned) for piece in owned)
        pieces = self._pieces()
        heads, tails = pieces[::2], pieces[1::2]  # the last tail is the innermost
        return [(start, stop, rank) for rank, (start, stop) in heads + tails[::-1]]

    def _check_rank(self, rank: int) -> int:
        rank = check_integer("rank", rank)
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank must lie in [0, {self.world_size}), got {rank}")
        return rank


class _Gathered(torch.autograd.Function):
    """:meth:`Partition.gather` of ranks that compute the same loss."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, partition: Partition, rank: int, group_name: str, dim: int
    ) -> torch.Tensor:
        ctx.place = (partition, rank, dim)
        return partition._gathered(x, group_name, dim)

    @staticmethod
    @once_differentiable  # a second derivative would lack the rows of other ranks
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        partition, rank, dim = ctx.place
        return partition.shard(grads[0], rank, dim), None, None, None, None


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


def check_partition_type(partition: object, name: str = "partition") -> Partition:
    """A Partition, or a ValueError that says what to write."""
    if isinstance(partition, Partition):
        return partition
    raise ValueError(f"{name} must be a Partition, got {shown_partition(partition)}")


def shown_partition(given: object) -> str:
    """What was given where a partition is due, and what was meant by it where that is known."""
    if isinstance(given, (list, tuple)):
        pass_lengths = f"ringattn.Partition.zigzag({shown(list(given))})"
        return f"{type(given).__name__}: pass {pass_lengths}"
    kind = type(given).__name__
    if isinstance(getattr(given, "partition", None), Partition):  # of the planner
        return f"{kind}: pass plan.partition"
    if isinstance(given, bool):
        return f"{given}: causality is causal={given}"
    if isinstance(given, torch.Tensor):
        return f"{kind}: the masks are causal=, window_size= and cu_seqlens="
    if isinstance(given, float):
        return f"{given}: the factor of the scores is scale={given}"
    if isinstance(given, (str, int)):
        return shown(given)
    return kind


# Of an operator: lengths, order, layout, pieces.
PartitionArguments = tuple[list[int], list[int], str, torch.Tensor | None]


def partition_arguments(partition: Partition) -> PartitionArguments:
    """The operators' arguments for a partition."""
    return list(partition.lengths), list(partition.order), partition.layout, partition._flat
