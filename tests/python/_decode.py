# SPDX-License-Identifier: Apache-2.0
"""Caches that are spread across ranks, for tests of decoding."""

from dataclasses import dataclass

import torch
from _distributed import this

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

#: Cached keys of each rank.
CACHES = {
    1: [[17], [0], [300]],
    2: [[5, 12], [0, 9], [129, 200]],
    3: [[4, 4, 4], [0, 0, 11], [1, 160, 0]],
    4: [[3, 0, 7, 1], [0, 0, 0, 2], [64, 65, 1, 130]],
}


@dataclass(frozen=True)
class Cache:
    """One call."""

    lengths: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    num_queries: int = 1
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    scale: float | None = None
    softcap: float = 0.0

    def inputs(self, device: torch.device | str):
        generator = torch.Generator().manual_seed(2)
        rows = sum(self.lengths)
        q = torch.randn(2, self.num_queries, self.num_heads, self.head_dim, generator=generator)
        k = torch.randn(2, rows, self.num_kv_heads, self.head_dim, generator=generator)
        v = torch.randn(2, rows, self.num_kv_heads, self.head_dim, generator=generator)
        return tuple(x.to(device, self.dtype) for x in (q, k, v))

    def local_inputs(self):
        q, k, v = self.inputs(this().device)
        rank = this().rank
        return q, k.split(self.lengths, dim=1)[rank], v.split(self.lengths, dim=1)[rank]
