# SPDX-License-Identifier: Apache-2.0
"""Attention problems under general masks: packed documents, windows, sinks, softcap."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from ringattn import _C, Partition

from lib.problem import Problem, Shape

_MEDIAN = 4096  # tokens of a document


def random_documents(seq_len: int, seed: int, median: int = _MEDIAN) -> list[int]:
    """Boundaries of documents whose lengths are lognormal (sigma 1) around ``median``, the last one
    cut at ``seq_len``: [0, ..., S]."""
    draw = random.Random(seed)
    ends = [0]
    while ends[-1] < seq_len:
        length = max(1, round(draw.lognormvariate(math.log(median), 1.0)))
        ends.append(min(seq_len, ends[-1] + length))
    return ends


def rows_fetched(
    partition: Partition, ends: Sequence[int], window: tuple[int, int] = (-1, -1)
) -> int:
    """The most keys of others that a rank sees, of causal documents with these boundaries."""
    owned = map(partition.segments, range(partition.world_size))
    return max(_C.rows_fetched(pieces, ends, True, window) for pieces in owned)


@dataclass(frozen=True)
class Masking:
    """Which keys causal attention sees, and what becomes of its scores."""

    cu_seqlens: Sequence[int] | None = None  # [0, ..., S]
    seed: int | None = None  # of the documents
    window: int | None = None  # keys that a query sees, its own among them
    sinks: bool = False
    softcap: float = 0.0


@dataclass(frozen=True)
class MaskedProblem(Problem):
    """A causal problem under more masks than that; B is 1."""

    masking: Masking

    @classmethod
    def of_masking(
        cls, shape: Shape, seq_len: int, device: torch.device, masking: Masking
    ) -> MaskedProblem:
        plain = Problem.of(shape, seq_len, device, causal=True)
        return cls(*plain.tensors, causal=True, masking=masking)

    @property
    def window_size(self) -> tuple[int, int]:
        """As ringattn and FlashAttention count: the keys before and after a query's own."""
        window = self.masking.window
        return (-1, -1) if window is None else (window - 1, 0)

    @property
    def softcap(self) -> float:
        return self.masking.softcap

    @cached_property
    def boundaries(self) -> torch.Tensor:
        """int32 [N + 1], on the device; one document where none are packed."""
        ends = self.masking.cu_seqlens or [0, self.seq_len]
        return torch.tensor(ends, dtype=torch.int32, device=self.q.device)

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.boundaries.diff().max())

    @cached_property
    def sinks(self) -> torch.Tensor | None:
        """[H] in the dtype of q."""
        if not self.masking.sinks:
            return None
        return torch.linspace(-1, 2, self.q.size(2), device=self.q.device, dtype=self.q.dtype)

    @cached_property
    def key_ranges(self) -> torch.Tensor:
        """int32 [S, 2]: the keys that each row sees, as ringattn.block_attention takes them."""
        rows = torch.arange(self.seq_len, dtype=torch.int32, device=self.q.device)
        documents = torch.searchsorted(self.boundaries, rows, right=True, out_int32=True) - 1
        begins = self.boundaries[documents]
        if self.masking.window is not None:
            begins = torch.maximum(begins, rows + 1 - self.masking.window)
        return torch.stack([begins, rows + 1], dim=1).contiguous()

    @cached_property
    def pairs(self) -> int:
        """Visible pairs of a query and a key, of one head."""
        ends = self.boundaries.tolist()
        return sum(self._pairs_of(end - begin) for begin, end in itertools.pairwise(ends))

    def _pairs_of(self, length: int) -> int:
        window = min(length, self.masking.window or length)
        return window * (window + 1) // 2 + (length - window) * window

    @property
    def flops(self) -> float:
        return 4.0 * self.q.size(2) * self.q.size(3) * self.pairs

    def weights(self, scores: torch.Tensor, rows: torch.Tensor, head: int) -> torch.Tensor:
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        begins, ends = self.key_ranges[rows].unbind(1)
        keys = torch.arange(self.seq_len, device=scores.device)
        hidden = (keys < begins[:, None]) | (keys >= ends[:, None])
        scores = scores.masked_fill(hidden, -math.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sink = self.sinks[head].to(scores.dtype).expand(*scores.shape[:-1], 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
