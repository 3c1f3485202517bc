# SPDX-License-Identifier: Apache-2.0
"""Ring attention as a module."""

import functools
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from ringattn._checks import check_keywords, finite_softcap, refuse_keywords
from ringattn._distributed.errors import report_to_peers
from ringattn._distributed.groups import Group, GroupInfo, keep, kept, resolve_group
from ringattn._masks import CuSeqlens, Mask, check_window
from ringattn.functional import attend
from ringattn.partition import Partition, check_partition_type


def _partition_or_group_first(init: Callable[..., None]) -> Callable[..., None]:
    """A constructor whose first argument may be the partition instead of the group."""

    @functools.wraps(init)
    def flexible(self: Any, *args: Any, **kwargs: Any) -> None:
        first = args[0] if args else None
        is_plan = isinstance(getattr(first, "partition", None), Partition)
        if is_plan or isinstance(first, Partition):
            if kwargs.get("partition") is not None:
                raise ValueError("partition must be given once, got it as first argument, too")
            kwargs["partition"] = check_partition_type(first)
            args = args[1:]
        init(self, *args, **kwargs)

    return flexible


class RingAttention(nn.Module):
    """:func:`ringattn.ring_attention` with its options held: a drop-in for the attention core of a
    model, without parameters.

    Args:
        group: as in :func:`ringattn.ring_attention`; None is looked up in each call.
        partition: which rank owns which tokens, for calls without a partition of their own. It may
            be the first argument, as it is the one behind the tensors in the function.
        causal: a query sees the keys at its own and at earlier positions.
        window_size: as in :func:`ringattn.ring_attention`; so is ``softcap``.
        softcap: of the scores.
        scale: of the scores; None means ``1 / sqrt(D)``.
        transport: how blocks travel, see :func:`ringattn.ring_attention`.
        depth: how many blocks may be under way ahead of the one being attended to.

    The group is kept by its name: the module can be copied and pickled, and does not keep a group
    alive that is destroyed.

    Raises:
        ValueError: keywords of other packages, as in :func:`ringattn.ring_attention`, here or in
            the call, and here a window or softcap that breaks a rule; the other ranks of the group
            get an error from their next call. A partition that is given twice.

    The method is ring attention (Liu et al., https://arxiv.org/abs/2310.01889).
    """

    @_partition_or_group_first
    def __init__(
        self,
        group: Group = None,
        *,
        partition: Partition | None = None,
        causal: bool = True,
        window_size: Sequence[int] = (-1, -1),
        softcap: float = 0.0,
        scale: float | None = None,
        transport: str = "auto",
        depth: int | None = None,
        **refused: object,
    ) -> None:
        super().__init__()
        try:
            check_keywords("RingAttention", refused)
            self.window_size = check_window(window_size)
            self.softcap = finite_softcap(softcap)
        except Exception as error:
            with suppress(ValueError):  # a group that does not exist has no peers
                report_to_peers(resolve_group(group), error)
            raise
        self._group = keep(group)
        self.partition = partition
        self.causal = causal
        self.scale = scale
        self.transport = transport
        self.depth = depth

    @property
    def group(self) -> Group:
        """The group it was given, or the one that has its name now; ValueError where none has."""
        return kept(self._group)

    @property
    def ring(self) -> GroupInfo:
        """This process among the ranks of the group, as it is now."""
        return resolve_group(self._group)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        partition: Partition | None = None,
        *,
        cu_seqlens: CuSeqlens | None = None,
        sinks: torch.Tensor | None = None,
        key_partition: Partition | None = None,
        **refused: object,
    ) -> torch.Tensor:
        """out ``[B, S_r, H, D]`` of this rank's queries, in the dtype of ``q``. Collective; shapes,
        ``cu_seqlens``, ``sinks``, ``key_partition`` and errors as in
        :func:`ringattn.ring_attention`. ``partition``, where it is given, comes before the module's
        own."""
        ring = self.ring
        if refused:
            refuse_keywords("RingAttention.forward", ring, refused)
        mask = Mask(self.causal, self.window_size, self.softcap, cu_seqlens)
        partition = self.partition if partition is None else partition
        options = (mask, self.scale, self.transport, self.depth, sinks, key_partition)
        out, _ = attend(ring, q, k, v, partition, *options)
        return out

    def extra_repr(self) -> str:
        return (
            f"partition={self.partition}, causal={self.causal}, window_size={self.window_size}, "
            f"softcap={self.softcap}, scale={self.scale}, transport={self.transport!r}, "
            f"depth={self.depth}"
        )
