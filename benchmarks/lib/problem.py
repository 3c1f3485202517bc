# SPDX-License-Identifier: Apache-2.0
"""Attention problems: global tensors, the same on every rank, and their float64 check."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import ringattn
import torch

from lib.ranks import rank, world_size

DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}


class Shape(Protocol):
    """The sizes that problems of any length share; cli.shape_arguments() parses into one."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: str  # a name in DTYPES


_Problem = TypeVar("_Problem", bound="Problem")


def shape_text(shape: Shape) -> str:
    """The shape as headers show it."""
    return f"B 1, H {shape.heads}, H_kv {shape.kv_heads}, D {shape.head_dim}, {shape.dtype}"


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, over the largest magnitude of what is expected."""
    expected = expected.double()
    return ((found.double() - expected).abs().max() / expected.abs().max()).item()


def busiest(partition: ringattn.Partition, **mask: Any) -> float:
    """The largest part of the visible pairs that a rank has, in even shares.

    Args:
        partition: of the tokens.
        mask: as in ``Partition.num_pairs``.
    """
    pairs = [partition.num_pairs(rank, **mask) for rank in range(partition.world_size)]
    return max(pairs) * len(pairs) / sum(pairs)


@dataclass(frozen=True)
class Problem:
    """One attention problem: the global tensors, equal on every rank, and their float64 check."""

    q: torch.Tensor  # [B, S, H, D]
    k: torch.Tensor  # [B, S, H_kv, D]
    v: torch.Tensor  # [B, S, H_kv, D]
    causal: bool

    @classmethod
    def random(
        cls,
        seq_len: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        causal: bool,
        batch: int = 1,
    ) -> Problem:
        """Unit-normal tensors, the same on every rank."""
        generator = torch.Generator(device).manual_seed(0)
        q, k, v = (
            torch.randn(
                batch, seq_len, num, head_dim, generator=generator, device=device, dtype=dtype
            )
            for num in (heads, kv_heads, kv_heads)
        )
        return cls(q, k, v, causal)

    @classmethod
    def of(cls, shape: Shape, seq_len: int, device: torch.device, *, causal: bool) -> Problem:
        """A random problem of this shape."""
        return cls.random(
            seq_len,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            dtype=DTYPES[shape.dtype],
            device=device,
            causal=causal,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k, self.v

    @property
    def seq_len(self) -> int:
        return self.q.size(1)

    @property
    def flops(self) -> float:
        """Two matrix products over the visible pairs."""
        batch, seq_len, heads, head_dim = self.q.shape
        pairs = seq_len * (seq_len + 1) / 2 if self.causal else seq_len**2
        return 4.0 * batch * heads * head_dim * pairs

    def expanded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V repeated to H heads, [B, S, H, D], for peers that cannot group queries."""
        repeats = self.q.size(2) // self.k.size(2)
        return self.k.repeat_interleave(repeats, 2), self.v.repeat_interleave(repeats, 2)

    def trained(self: _Problem) -> _Problem:
        """The same tensors, as leaves that require gradients."""
        q, k, v = (x.detach().requires_grad_() for x in self.tensors)
        return replace(self, q=q, k=k, v=v)

    def shard(self, partition: ringattn.Partition) -> tuple[Problem, torch.Tensor]:
        """This rank's tensors and their positions, int64 [S_r]; leaves that require gradients where
        those of the problem do."""
        shards = (
            partition.shard(x.detach(), rank()).requires_grad_(x.requires_grad)
            for x in self.tensors
        )
        return Problem(*shards, self.causal), partition.position_ids(rank(), self.q.device)

    def even_zigzag(self) -> tuple[Problem, torch.Tensor]:
        """:meth:`shard` under the even zigzag partition."""
        return self.shard(ringattn.Partition.even(self.seq_len, world_size()))

    def weights(self, scores: torch.Tensor, rows: torch.Tensor, head: int) -> torch.Tensor:
        """Of the values, [B, R, S]: the softmax of scores of these rows, int64 [R], under the
        mask."""
        if self.causal:
            hidden = torch.arange(self.seq_len, device=scores.device) > rows[:, None]  # [R, S]
            scores = scores.masked_fill(hidden, -math.inf)
        return scores.softmax(-1)

    def max_error(self, out: torch.Tensor, positions: torch.Tensor, samples: int = 32) -> float:
        """Largest difference from float64 attention, over some rows.

        out: [B, S_r, H, D]; positions: int64 [S_r], where its rows stand in the sequence.
        """
        if positions.numel() == 0:
            return 0.0
        stride = max(1, positions.numel() // samples)
        rows = torch.arange(positions.numel() - 1, -1, -stride, device=positions.device)
        asked = positions[rows]  # [R]
        repeats = self.q.size(2) // self.k.size(2)
        worst = 0.0
        for head in range(self.q.size(2)):
            q = self.q[:, asked, head].double()  # [B, R, D]
            k = self.k[:, :, head // repeats].double()  # [B, S, D]
            v = self.v[:, :, head // repeats].double()
            scores = q @ k.transpose(1, 2) / math.sqrt(q.size(-1))  # [B, R, S]
            weights = self.weights(scores, asked, head)
            error = (weights @ v - out[:, rows, head].double()).abs().max().item()
            # max() of Python would drop a NaN.
            worst = error if math.isnan(error) else max(worst, error)
            if math.isnan(worst):
                break
        return worst
