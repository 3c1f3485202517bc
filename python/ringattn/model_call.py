# SPDX-License-Identifier: Apache-2.0
"""One forward of a model whose tokens are spread over the ranks.

A :class:`ModelCall` goes with the call through the layers: which rows this rank has, how attention
is computed, and how results become those of the whole sequence again. It knows tensors and ranks,
no model library.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ringattn._cached_attention import LayerInputs, attend_newest, attend_next
from ringattn._checks import check_collective
from ringattn._distributed.agreement import Given
from ringattn._distributed.checksums import chained, checksum, number_of
from ringattn._distributed.errors import ErrorsToPeers
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.sums import sum_over_ranks
from ringattn._key_positions import KeyPositions
from ringattn._masks import CAUSAL, Mask, check_window
from ringattn._spreading import is_faster_spread
from ringattn.cache import ShardedKVCache
from ringattn.functional import attend
from ringattn.model_inputs import Inputs, Padding
from ringattn.partition import Partition


class ModelCall:
    """One forward of a model, of a prompt (:meth:`prefill`) or of new tokens after one
    (:meth:`after`, :meth:`decode`).

    A prompt's rows are spread by a partition. A rank without tokens runs one row of another rank's,
    whose results are dropped, because layers of other libraries take no empty tensors. New tokens
    are spread likewise where they are many; else they are on every rank, and their keys and values
    are spread by the cache.

    Every rank makes the same calls in the same order. What the caller gave to a call is compared
    between ranks (:meth:`compare`). Not thread safe.
    """

    def __init__(
        self,
        ring: GroupInfo,
        num_tokens: int,
        *,
        partition: Partition | None,
        cache: ShardedKVCache | None,
        padding: Padding | None = None,
        transport: str = "auto",
        depth: int | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        self.ring = ring
        self.num_tokens = num_tokens  # S of a prompt, T of new tokens
        self.partition = partition
        self.cache = cache
        # Of the cached keys and this call's, where rows are spread after a cache.
        self._key_partition: Partition | None = None
        self.padding = padding
        self.transport = transport
        self.depth = depth
        self._inputs = inputs
        # Layers whose keys the cache has. One that a backward computes again stores nothing: by
        # then the cache may hold other tokens.
        self._stored: set[int] = set()
        self._columns: dict[torch.device, torch.Tensor] = {}
        self._padded: tuple[torch.Tensor, torch.Tensor] | None = None  # of _padding_rows()
        history = 0 if cache is None else cache.history
        if inputs is not None and inputs.tokens.device.type == "cpu":
            self.compare()
        if cache is not None:
            cache.begin(history)

    @classmethod
    def prefill(
        cls,
        ring: GroupInfo,
        partition: Partition,
        *,
        cache: ShardedKVCache | None = None,
        padding: Padding | None = None,
        transport: str = "auto",
        depth: int | None = None,
        inputs: Inputs | None = None,
    ) -> ModelCall:
        """A prompt, or a whole sequence.

        Args:
            ring: the ranks.
            partition: which rank owns which of the S tokens, after rows have been rolled.
            cache: empty, from :meth:`new_cache`; None: keys are not kept.
            padding: where rows have fewer than S tokens.
            transport: as in :func:`ringattn.ring_attention`.
            depth: likewise.
            inputs: what the caller gave; None: all ranks are known to have the same.
        """
        return cls(
            ring,
            partition.seq_len,
            partition=partition,
            cache=cache,
            padding=padding,
            transport=transport,
            depth=depth,
            inputs=inputs,
        )

    @classmethod
    def decode(
        cls,
        ring: GroupInfo,
        cache: ShardedKVCache,
        num_tokens: int = 1,
        *,
        inputs: Inputs | None = None,
    ) -> ModelCall:
        """``num_tokens`` new tokens per batch row, after what ``cache`` holds. Advances the
        cache."""
        call = cls(ring, num_tokens, partition=None, cache=cache, inputs=inputs)
        call._advance(cache)
        return call

    @classmethod
    def after(
        cls,
        ring: GroupInfo,
        cache: ShardedKVCache,
        num_tokens: int,
        partition_of: Callable[[int], Partition],
        *,
        device: torch.device,
        transport: str = "auto",
        depth: int | None = None,
        inputs: Inputs | None = None,
    ) -> ModelCall:
        """``num_tokens`` new tokens per batch row, after what ``cache`` holds: spread over the
        ranks where that is faster, else as :meth:`decode` has them, as after padded prompts and
        where keys are out of order. Advances the cache.

        Args:
            ring: the ranks.
            cache: of a prompt, and of what came after it.
            num_tokens: T.
            partition_of: the partition of so many tokens.
            device: of the tokens.
            transport: as in :func:`ringattn.ring_attention`.
            depth: likewise.
            inputs: as in :meth:`prefill`.

        Raises:
            ValueError: tokens of another number of batch rows.
        """
        if inputs is not None:
            cache.check_rows(inputs.name, inputs.tokens)
        faster = is_faster_spread(num_tokens, cache.seq_len, ring.world_size, device.type)
        if not faster or cache.partition is None:
            return cls.decode(ring, cache, num_tokens, inputs=inputs)
        partition = partition_of(num_tokens)
        call = cls(
            ring,
            num_tokens,
            partition=partition,
            cache=cache,
            transport=transport,
            depth=depth,
            inputs=inputs,
        )
        call._advance(cache, partition)
        call._key_partition = cache.partition
        return call

    def _advance(self, cache: ShardedKVCache, partition: Partition | None = None) -> None:
        try:
            cache.advance(self.num_tokens, partition)
        except Exception:  # such as too little memory; the history has this call's tokens already
            cache.undo()
            raise

    def compare(self) -> None:
        """Compares what the caller gave with what other ranks got. Collective, and done once: on a
        CPU as the call is made, before the cache is advanced; on CUDA by the first :meth:`whole` or
        :meth:`select`, because layers are exchanges in which a rank that refused its call is
        noticed.

        Raises:
            ValueError: on every rank, see ``Agreement``.
        """
        inputs, self._inputs = self._inputs, None
        if inputs is None or (self.ring.world_size == 1 and not inputs.more.may_be_flawed):
            return
        with ErrorsToPeers(self.ring):
            self._compare(inputs)

    def _compare(self, inputs: Inputs) -> None:
        tokens, more = inputs.tokens, inputs.more
        if not tokens.is_floating_point():
            check_collective(**{inputs.name: tokens})
        ids = None if tokens.is_floating_point() else checksum(tokens)
        places = None if inputs.position_ids is None else checksum(inputs.position_ids)
        # Of new tokens, the mask follows from the prompt's, or is a flaw.
        padding = number_of(self.padding)
        cache = self.cache
        given = Given(
            {
                "the argument with the tokens": inputs.name,  # first: the next name depends on it
                f"shape of {inputs.name}": list(tokens.shape[:2]),
                **more.facts,
            },
            {
                "cache": None if cache is None else chained(cache.history, cache.seq_len),
                inputs.name: ids,
                inputs.mask_name: padding,
                "position_ids": places,
                **more.values,
            },
            more.flaws,
            more.hints,
            more.trained,
        )
        inputs.agreement.compare(self.ring, "forward", tokens.device, given)
        if cache is not None:
            numbers = (0 if number is None else number for number in (ids, places, padding))
            cache.history = chained(cache.history, *numbers)

    @staticmethod
    def new_cache(
        ring: GroupInfo,
        partition: Partition,
        *,
        padding: Padding | None = None,
        device: torch.device | None = None,
        new_tokens: int | None = None,
        targets: Sequence[int] | None = None,
    ) -> ShardedKVCache:
        """An empty cache for a prompt spread by ``partition``; the rest as in
        :class:`ringattn.cache.ShardedKVCache`."""
        key_lengths = None
        if padding is not None:
            # Rows are in position order, so the real ones of a rank come first.
            columns = partition.position_ids(ring.rank, "cpu")
            real = torch.tensor(padding.lengths, device="cpu")
            key_lengths = (columns[None, :] < real[:, None]).sum(1, dtype=torch.int32).to(device)
        return ShardedKVCache(
            partition.lengths,
            ring.rank,
            new_tokens=new_tokens,
            targets=targets,
            key_lengths=key_lengths,
            positions=KeyPositions(
                [partition.segments(rank) for rank in range(partition.world_size)],
                ring.rank,
                None if padding is None else padding.lengths,
            ),
        )

    def undo(self) -> None:
        """Leaves the cache as it was before this call, which has failed."""
        if self.cache is not None and not self.is_prefill:
            self.cache.undo()

    @property
    def is_prefill(self) -> bool:
        """Whether these are the first tokens of a sequence."""
        return self.partition is not None and self._key_partition is None

    @property
    def num_rows(self) -> int:
        """Rows of the sequence that this rank computes; where it is 0, layers still run one."""
        return self.num_tokens if self.partition is None else self.partition.lengths[self.ring.rank]

    @property
    def num_before(self) -> int:
        """Tokens of the sequence that come before this call's."""
        if self.is_prefill:
            return 0
        assert self.cache is not None
        return self.cache.seq_len - self.num_tokens

    def rows(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``x``, ``[B, S, ...]``: ``[B, max(1, S_r), ...]``. With padding,
        ``x`` may be ``[1, S, ...]`` for all batch rows."""
        if self.partition is None:
            return x
        if self.padding is None:
            if self.num_rows == 0:
                return x.narrow(1, 0, 1)
            return self.partition.shard(x, self.ring.rank)
        x = x.expand(len(self.padding.starts), *x.shape[1:])
        places = torch.zeros(1, dtype=torch.int64, device=x.device)
        if self.num_rows > 0:
            places = self._own_columns(x.device)
        return _take(x, self.padding.columns(places))

    def whole(self, x: torch.Tensor) -> torch.Tensor:
        """The results of all tokens in the caller's order, ``[B, S, ...]``, from those of this
        rank's rows, ``[B, max(1, S_r), ...]``. Collective. Its gradient is for ranks that compute
        the same from the result: it reaches this rank's rows unscaled."""
        self.compare()
        if self.partition is None:
            return x
        x = self.partition._gather(self.own(x), self.ring)
        if self.padding is None:
            return x
        columns = torch.arange(self.num_tokens, device=x.device)
        return _take(x, self._rolled(columns[None, :]))

    def select(self, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """:meth:`whole` for the tokens in ``columns`` only, int64 ``[n]``, in the caller's order:
        ``[B, n, ...]``. Collective: the sum over ranks of these rows, 0 on ranks that do not own
        them, such as one without tokens, whose ``x`` may have no row."""
        self.compare()
        columns = columns.to(x.device)
        columns = torch.where(columns < 0, columns + self.num_tokens, columns)
        if self.partition is None:
            return x.index_select(1, columns)
        places = self._rolled(columns[None, :]).expand(x.size(0), -1)
        if columns.numel() * self.ring.world_size > self.num_tokens:
            return self.whole(x).index_select(1, columns)
        own = self._own_columns(x.device)
        rows, missing = torch.zeros_like(places), torch.ones_like(places, dtype=torch.bool)
        if self.num_rows > 0:
            rows = torch.searchsorted(own, places.contiguous()).clamp_(max=self.num_rows - 1)
            missing = own[rows] != places
        if x.size(1) == 0:  # our own layers keep no row for a rank without tokens
            x = torch.cat([x, x.new_zeros(x.size(0), 1, *x.shape[2:])], dim=1)
        chosen = _take(x, rows)
        chosen[missing] = 0
        return sum_over_ranks(self.ring, "select", chosen)

    def own(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's results, ``[B, S_r, ...]``, out of what layers give, ``[B, max(1, S_r),
        ...]``."""
        return x.narrow(1, 0, self.num_rows)

    def loss(self, part: torch.Tensor) -> torch.Tensor:
        """The loss of the whole sequence, a scalar, from what this rank's rows add to it. Its
        gradient reaches ``part`` unscaled. Collective."""
        self.compare()
        if self.partition is None:  # every rank has all rows
            return part
        return sum_over_ranks(self.ring, "loss", part)

    def last(self, x: torch.Tensor, count: int) -> torch.Tensor:
        """:meth:`select` of the last ``count`` columns, at most all."""
        first = max(0, self.num_tokens - count)
        return self.select(x, torch.arange(first, self.num_tokens, device=x.device))

    def position_ids(self, device: torch.device) -> torch.Tensor:
        """int64 ``[1, rows]`` (``[B, rows]`` with padding): the columns of this rank's rows,
        counted from the start of the sequence."""
        columns = torch.arange(self.num_before, self.num_before + self.num_tokens, device=device)
        return self.rows(columns[None, :])

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None,
        mask: Mask = CAUSAL,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Causal attention of layer ``layer``. Collective.

        Args:
            layer: its number, by which the cache knows it.
            q: ``[B, rows, H, D]``, of the rows that :meth:`rows` gives.
            k: ``[B, rows, H_kv, D]``.
            v: like ``k``.
            scale: of the scores; None means ``1 / sqrt(D)``.
            mask: window, softcap, and documents of a prompt without padding.
            sinks: as in :func:`ringattn.ring_attention`.

        Returns:
            ``[B, rows, H, D]``.

        Raises:
            ValueError: a window over a cache whose keys are out of order, see
                :meth:`ringattn.cache.ShardedKVCache.rebalance`; a softcap where padding follows
                tokens.
        """
        scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
        given = LayerInputs(layer, q, k, v, scale, mask, sinks)
        if self.is_prefill:
            return self._attend_to_prompt(given)
        assert self.cache is not None and mask.cu_seqlens is None
        if self.partition is not None:
            return self._attend_spread(given)
        step = attend_newest if self.num_tokens == 1 else attend_next
        return step(self.ring, self.cache, given)

    def _attend_to_prompt(self, given: LayerInputs) -> torch.Tensor:
        layer, q, k, v, scale, mask, sinks = given
        own_q, own_k, own_v = (self.own(x) for x in (q, k, v))
        if self.cache is not None and layer not in self._stored:
            self._stored.add(layer)
            self.cache.store(layer, own_k.detach(), own_v.detach())
        if self.padding is not None and self.padding.hides_keys:
            if mask.softcap:
                raise ValueError(
                    "attention_mask must have its padding before the tokens where scores have a "
                    "softcap, got padding after them"
                )
            own_q, own_k, own_v = self.padding.hide(
                own_q, own_k, own_v, self._padding_rows(own_q.device)
            )
        out, _ = attend(
            *(self.ring, own_q, own_k, own_v, self.partition),
            *(mask, scale, self.transport, self.depth, sinks),
        )
        out = out[..., : q.size(-1)].contiguous()
        if self.num_rows == 0:
            return _one_row(out, q)
        if self.padding is not None and self.padding.sees == "text":
            blind, after = self._padding_rows(out.device)
            left, _ = check_window(mask.window_size)
            if left >= 0 and any(self.padding.ends):
                lengths = torch.tensor(self.padding.lengths, device=out.device)
                places = self._own_columns(out.device)[None, :] - left
                blind = blind | after & (places >= lengths[:, None])
            out = out.masked_fill(blind[:, :, None, None], 0)
        return out

    def _attend_spread(self, given: LayerInputs) -> torch.Tensor:
        layer, q, k, v, scale, mask, sinks = given
        assert self.cache is not None
        keys, values = self.cache.append(layer, k, v)
        own_q, travel = q.narrow(1, 0, self.num_rows), (self.transport, self.depth)
        out, _ = attend(
            *(self.ring, own_q, keys, values, self.partition, mask, scale, *travel, sinks),
            key_partition=self._key_partition,
        )
        return _one_row(out, q) if self.num_rows == 0 else out

    def _padding_rows(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Which of this rank's rows are padding before the tokens, and after them, bool
        ``[B, S_r]`` each."""
        assert self.padding is not None
        if self._padded is None:
            self._padded = self.padding.around(self._own_columns(device))
        return self._padded

    def _rolled(self, columns: torch.Tensor) -> torch.Tensor:
        """Places of the caller's ``columns``, ``[1, n]``, after rows have been rolled: ``[B, n]``,
        without padding ``[1, n]``."""
        return columns if self.padding is None else self.padding.rolled(columns)

    def _own_columns(self, device: torch.device) -> torch.Tensor:
        """Places of this rank's rows in the rolled sequence, ascending, ``[S_r]``."""
        assert self.partition is not None
        if device not in self._columns:
            self._columns[device] = self.partition.position_ids(self.ring.rank, device)
        return self._columns[device]


def _one_row(out: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """What layers of a rank without rows get, out of ``out`` without any. Not without ``out``: the
    rank has a part in the ring's backward, too. In one graph with what follows, inductor would see
    that no row of ``out`` reaches a result, and drop this rank's part in the ring."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg="a rank without tokens has several graphs: fullgraph=False")
    return torch.cat((out, q.new_zeros(q.shape)), 1)


def _take(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``x[b, columns[b]]`` of each batch row: ``[B, n, ...]``."""
    rows = torch.arange(x.size(0), device=x.device)[:, None]
    return x[rows, columns]
