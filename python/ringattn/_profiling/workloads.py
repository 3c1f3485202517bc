# SPDX-License-Identifier: Apache-2.0
"""The work of a rank while its speed is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from ringattn._checks import check_int64
from ringattn._decode_attention import attend_cached
from ringattn._distributed.groups import SINGLE
from ringattn._profiling.devices import usual_tokens
from ringattn.functional import attend

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class ProbeWorkload:
    """Some tokens of one layer of a model, with random numbers in them."""

    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_layers: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "num_layers"):
            object.__setattr__(self, name, check_int64(name, getattr(self, name), least=1))
        dtypes = _DTYPES if self.device.type != "cpu" else (*_DTYPES, torch.float64)
        if self.dtype not in dtypes:
            names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise ValueError(f"dtype must be a torch.dtype of {names}, got {self.dtype!r}")

    @classmethod
    def on(
        cls,
        device: torch.device,
        *,
        num_tokens: int | None,
        dtype: torch.dtype | None,
        **sizes: int,
    ) -> ProbeWorkload:
        """A workload for ``device``, with the device's defaults where None is given."""
        if num_tokens is None:
            num_tokens = usual_tokens(device)
        if dtype is None:
            dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        return cls(num_tokens=num_tokens, dtype=dtype, device=device, **sizes)

    @property
    def width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device)

    def attention(
        self, num_tokens: int, transport: str = "auto"
    ) -> tuple[Callable[[], Any], float]:
        """Causal attention of tokens on themselves, on this rank alone, and its operations."""
        q = self.random(1, num_tokens, self.num_heads, self.head_dim)
        k, v = (self.random(1, num_tokens, self.num_kv_heads, self.head_dim) for _ in range(2))
        flops = 4.0 * self.width * num_tokens * (num_tokens + 1) / 2
        return lambda: attend(SINGLE, q, k, v, transport=transport), flops

    def linear(self) -> tuple[Callable[[], Any], float]:
        """A square projection, and its operations."""
        x = self.random(self.num_tokens, self.width)
        weight = self.random(self.width, self.width)
        return lambda: F.linear(x, weight), 2.0 * x.size(0) * weight.numel()

    def decode(self, num_cached: int) -> tuple[Callable[[], Any], float]:
        """One new token on a cache, on this rank alone, and the bytes it reads."""
        q = self.random(1, 1, self.num_heads, self.head_dim)
        k, v = (self.random(1, num_cached, self.num_kv_heads, self.head_dim) for _ in range(2))
        scale = 1 / math.sqrt(self.head_dim)
        return (
            lambda: attend_cached(SINGLE, q, k, v, scale)[0],
            float(num_cached * self.token_bytes),
        )
