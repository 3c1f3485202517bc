# SPDX-License-Identifier: Apache-2.0
"""Plans: how many tokens each rank should own when ranks are not equally fast.

The arithmetic is ``csrc/planner``: ``time_model.cpp`` and ``planner.cpp``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ringattn import _C
from ringattn._checks import (
    check_flag,
    check_floating,
    check_int64,
    check_int64_or_none,
    check_integer,
    check_positive,
    shown,
)
from ringattn._masks import CuSeqlens, check_window, documents
from ringattn.partition import Partition, check_layout, check_partition_type, partition_arguments
from ringattn.profiles import AttentionTile, RankProfile, check_amount, check_profiles

_CONFIG_FIELDS = (  # our names and those of Hugging Face
    ("emb_dim", "hidden_size"),
    ("nheads", "num_attention_heads"),
    ("kvheads", "num_key_value_heads"),
    ("head_dim", "head_dim"),
    ("hidden_dim", "intermediate_size"),
)


@dataclass(frozen=True)
class ModelCost:
    """Operations and bytes of one layer, forward.

    Args:
        attention_flops: operations for every visible pair of a query and a key, ``4 * H * D``.
        linear_flops: operations of all matrix products for every token.
        kv_bytes: key and value of one token, in bytes.

    Raises:
        ValueError: numbers that are negative or above 1e30, no attention at all.
    """

    attention_flops: float
    linear_flops: float = 0.0
    kv_bytes: int = 0

    def __post_init__(self) -> None:
        check_positive("attention_flops", self.attention_flops)
        check_amount("attention_flops", self.attention_flops)
        check_amount("linear_flops", self.linear_flops)
        check_int64("kv_bytes", self.kv_bytes, least=0)

    @classmethod
    def attention_only(
        cls,
        num_heads: int,
        head_dim: int,
        *,
        num_kv_heads: int | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> ModelCost:
        """The cost of ring attention alone.

        Args:
            num_heads: H.
            head_dim: D.
            num_kv_heads: H_kv; None is H.
            dtype: of keys and values.

        Raises:
            ValueError: numbers that are not positive integers, a dtype that is not floating.
        """
        num_heads = check_integer("num_heads", num_heads, least=1)
        head_dim = check_integer("head_dim", head_dim, least=1)
        if num_kv_heads is None:
            num_kv_heads = num_heads
        num_kv_heads = check_integer("num_kv_heads", num_kv_heads, least=1)
        kv_bytes = 2 * num_kv_heads * head_dim * check_floating(dtype).itemsize
        return cls(4.0 * num_heads * head_dim, 0.0, kv_bytes)

    @classmethod
    def from_config(cls, config: Any, *, dtype: torch.dtype = torch.bfloat16) -> ModelCost:
        """The cost of one layer of a LLaMA: attention, its four projections, and the gated
        feed-forward layer.

        Args:
            config: :class:`ringattn.models.LLaMAConfig`, or Hugging Face's ``LlamaConfig``.
            dtype: of keys and values.

        Raises:
            ValueError: another kind of object, a dtype that is not floating.
        """
        width, num_heads, num_kv_heads, head_dim, hidden = (
            getattr(config, ours, getattr(config, theirs, None)) for ours, theirs in _CONFIG_FIELDS
        )
        if width is None or hidden is None or num_heads is None:
            raise ValueError(
                "config must be a LLaMAConfig or a Hugging Face LlamaConfig, "
                f"got {type(config).__name__}"
            )
        num_kv_heads = num_kv_heads or num_heads
        head_dim = head_dim or width // num_heads
        attention = cls.attention_only(num_heads, head_dim, num_kv_heads=num_kv_heads, dtype=dtype)
        weights = width * head_dim * (2 * num_heads + 2 * num_kv_heads) + 3 * width * hidden
        return cls(attention.attention_flops, 2.0 * weights, attention.kv_bytes)


@dataclass(frozen=True)
class Plan:
    """A partition and its predicted times, for one layer and one sequence. ``print`` shows a table.

    Args:
        partition: which rank owns which tokens.
        depth: how many blocks should be under way ahead of the one being attended to.
        min_depth: the smallest depth at which, by the profiles, ranks wait no longer for each
            other than at ``depth``.
        rank_ms: time of each rank, ``[W]``; 0 for one without tokens.
        ideal_ms: time without overheads, limits of memory, and rounding to whole tokens.
        memory_bytes: key/value buffers of a ring call on each rank, ``[W]``: its own block as it is
            sent, and the visiting ones. In training those of its backward: all visiting blocks, and
            gradients of keys and values.
    """

    partition: Partition
    depth: int
    min_depth: int
    rank_ms: tuple[float, ...]
    ideal_ms: float
    memory_bytes: tuple[int, ...]

    @property
    def predicted_ms(self) -> float:
        """Time of the slowest rank."""
        return max(self.rank_ms)

    @property
    def efficiency(self) -> float:
        """``ideal_ms / predicted_ms``; 1 for an empty sequence."""
        return self.ideal_ms / self.predicted_ms if self.predicted_ms > 0 else 1.0

    def __str__(self) -> str:
        partition = self.partition
        rows = [("rank", "tokens", "share", "ms", "busy", "buffers MiB")]
        rows += [
            (
                str(rank),
                str(tokens),
                f"{100 * tokens / max(1, partition.seq_len):.1f} %",
                f"{ms:.3f}",
                f"{100 * ms / self.predicted_ms if self.predicted_ms > 0 else 0:.1f} %",
                f"{memory / 2**20:.1f}",
            )
            for rank, (tokens, ms, memory) in enumerate(
                zip(partition.lengths, self.rank_ms, self.memory_bytes, strict=True)
            )
        ]
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = [
            f"{partition.seq_len} tokens, {partition.layout}, "
            f"order {' '.join(map(str, partition.order))}, depth {self.depth} "
            f"(at least {self.min_depth}): "
            f"{self.predicted_ms:.3f} ms a layer, {100 * self.efficiency:.1f} % of ideal "
            f"({self.ideal_ms:.3f} ms)"
        ]
        lines += [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(lines)


def plan(
    seq_len: int,
    profiles: Sequence[RankProfile],
    cost: ModelCost,
    *,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: CuSeqlens | None = None,
    layout: str | None = None,
    depth: int | None = None,
    training: bool = False,
) -> Plan:
    """The partition whose slowest rank is fastest.

    The time of a rank is its overhead; for each token the matrix products, and attention to half
    the sequence (zigzag, causal), to the tokens before it (contiguous, causal) or to all tokens;
    and its waits for blocks that computation does not hide. Where no rank waits, and zigzag has
    neither documents nor a window, no partition into whole tokens is more than 0.5 % faster than
    the planned one, and none is faster at all for sequences below 4096 tokens a rank; longer ones
    are split in units of 16, 64 or 256 tokens, which costs no more. Where kernels compute whole
    tiles (``RankProfile.tiles``), the time includes the padding; lengths that fill tiles are
    searched for, and taken where they are predicted to gain 1 % over even ones. Where the bandwidth
    of links or a small ``depth`` makes ranks wait, plans without the k ranks with the slowest links
    and without the k slowest ranks are tried, and tokens move between ranks while that helps; for
    two or three ranks the result is within 1 % of the best in most cases, for more ranks there is
    no bound. The latency of links is predicted, but moves no tokens. The even partition is taken
    wherever it is as fast without latency, and kept for equal ranks that wait, or whose tiles it
    does not fill, unless another is 10 % faster. A rank whose overhead or link costs more than it
    contributes gets no tokens.

    Contiguous and causal, the order of the ranks is chosen too: among all orders up to 8 ranks,
    above that from fast to slow. Under zigzag the order does not change times without waits, and
    the one with the smallest ``min_depth`` is chosen. Where ranks wait, it is searched as well.

    Under a window, and with packed documents, attention is counted by visible pairs: all times,
    ``ideal_ms`` too, are those of the mask. Padding of tiles is not counted then. Packed documents
    are cut where attention and matrix products together take equally long: ranks own unequal
    numbers of tokens, which ``max_tokens`` limits, and only a document that lies across a cut
    travels. (:meth:`ringattn.Partition.packed` knows no costs: its ranks own equal numbers of
    tokens and pairs, in more pieces.)

    Args:
        seq_len: S.
        profiles: one per rank, ``[W]``.
        cost: of one layer.
        causal: a query sees the keys at its own and at earlier positions.
        window_size: keys before and after a query that it sees, as in
            :func:`ringattn.ring_attention`.
        cu_seqlens: boundaries of packed documents, likewise.
        layout: "zigzag" or "contiguous". None: zigzag where there is neither a window nor more than
            one document; contiguous for documents. Under a window alone the one that is predicted
            to be faster; where they are equally fast contiguous, whose ranks fetch half as many
            rows, unless one of them owns 10 % more tokens than any under zigzag.
        depth: how many blocks may be under way; None: all, W - 1, so that no rank waits for a peer
            that computes. A smaller depth takes less memory, see ``Plan.min_depth``.
        training: a step of training, forward and backward: 3.5 times the attention and 3 times the
            matrix products of forward alone, at the same speed
            (https://arxiv.org/abs/2307.08691, section 4.1). Backward moves each block again, and
            its gradients, which are float32 and count as twice the bytes of keys and values: these
            have 16 bits, or it is too much. Predicted times have what ranks wait for gradients that
            others compute, whatever the links; lengths follow the work and the bytes.

    Returns:
        The plan; it prints as a table.

    Raises:
        ValueError: no profiles, a ``seq_len`` that is negative or 2**31 or more, ``max_tokens``
            that do not hold the sequence, an unknown layout, a depth below 1, a mask that breaks a
            rule.
    """
    if layout is not None:
        check_layout(layout)
    planned = _C.plan(
        _num_tokens("seq_len", seq_len),
        _compiled_profiles(profiles),
        _compiled_cost(cost),
        layout,
        check_flag("causal", causal),
        check_flag("training", training),
        check_int64_or_none("depth", depth, least=1),
        *_compiled_mask(window_size, cu_seqlens),
    )
    return Plan(
        Partition(planned.layout, tuple(planned.lengths), tuple(planned.order)),
        planned.depth,
        planned.min_depth,
        tuple(planned.rank_ms),
        planned.ideal_ms,
        tuple(planned.memory_bytes),
    )


def predict(
    partition: Partition,
    profiles: Sequence[RankProfile],
    cost: ModelCost,
    *,
    causal: bool = True,
    window_size: Sequence[int] = (-1, -1),
    cu_seqlens: CuSeqlens | None = None,
    depth: int | None = None,
    training: bool = False,
) -> tuple[float, ...]:
    """The times that :func:`plan` predicts for any partition: milliseconds of each rank, ``[W]``,
    waits included. Arguments as there.

    Raises:
        ValueError: another number of profiles than ranks, a depth below 1, a mask that breaks a
            rule.
    """
    lengths, order, layout, _ = partition_arguments(check_partition_type(partition))
    check_layout(layout)
    return tuple(
        _C.predict(
            layout,
            lengths,
            order,
            _compiled_profiles(profiles),
            _compiled_cost(cost),
            check_flag("causal", causal),
            check_flag("training", training),
            check_int64_or_none("depth", depth, least=1),
            *_compiled_mask(window_size, cu_seqlens),
        )
    )


def work_in_tiles(
    partition: Partition,
    rank: int,
    cost: ModelCost,
    tiles: tuple[AttentionTile, ...],
    **mask: Any,
) -> float:
    """Computed over visible work of a rank's attention: attention computes whole tiles, and padding
    of a tile does not make a rank slow. Below 1 where the tiles taken mask less than those that the
    rank's speed was measured in. ``mask``: keywords of :func:`predict`."""
    if not tiles or partition.lengths[rank] == 0:
        return 1.0
    attention = replace(cost, linear_flops=0.0, kv_bytes=0)
    computed, seen = (
        predict(
            partition,
            [RankProfile(1, 1, tiles=of)] * partition.world_size,
            attention,
            **mask,
        )[rank]
        for of in (tiles, ())
    )
    return computed / seen


def plan_cache(num_tokens: int, profiles: Sequence[RankProfile], cost: ModelCost) -> list[int]:
    """How many cached keys each rank should hold, so that decoding is fastest on the slowest rank:
    in proportion to ``memory_gbps``, within ``max_tokens``; evenly where that is as fast, and where
    no bandwidth is known.

    Args:
        num_tokens: of the prompt and of what will follow it.
        profiles: one per rank, ``[W]``.
        cost: of one layer.

    Returns:
        Tokens of each rank, ``[W]``; the sum is ``num_tokens``.

    Raises:
        ValueError: no profiles, ``num_tokens`` that are negative or 2**31 or more, ``max_tokens``
            that do not hold them, ``memory_gbps`` of some ranks only or for a ``cost`` without
            ``kv_bytes``.
    """
    compiled = (
        _num_tokens("num_tokens", num_tokens),
        _compiled_profiles(profiles),
        _compiled_cost(cost),
    )
    if cost.kv_bytes == 0 and any(profile.memory_gbps for profile in profiles):
        raise ValueError(f"cost must have kv_bytes where profiles have memory_gbps, got {cost}")
    return _C.plan_cache(*compiled)


def _num_tokens(name: str, value: Any) -> int:
    if isinstance(value, (list, tuple)):
        raise ValueError(
            f"{name} must be an integer, got {shown(value)}: the order is {name}, profiles, cost"
        )
    if (num_tokens := check_int64(name, value, least=0)) >= 2**31:  # pairs are counted in 64 bits
        raise ValueError(f"{name} must be less than 2**31, got {num_tokens}")
    return num_tokens


def _compiled_profiles(profiles: Sequence[RankProfile]) -> list[_C.RankProfile]:
    check_profiles(profiles)
    return [
        _C.RankProfile(
            **asdict(profile) | {"tiles": [_C.AttentionTile(**asdict(t)) for t in profile.tiles]}
        )
        for profile in profiles
    ]


def _compiled_mask(
    window_size: Sequence[int], cu_seqlens: CuSeqlens | None
) -> tuple[tuple[int, int], list[int] | None]:
    boundaries = documents(cu_seqlens)
    return check_window(window_size), None if boundaries is None else boundaries.tolist()


def _compiled_cost(cost: ModelCost) -> _C.ModelCost:
    if not isinstance(cost, ModelCost):
        raise ValueError(f"cost must be a ModelCost, got {type(cost).__name__}")
    return _C.ModelCost(**asdict(cost))
