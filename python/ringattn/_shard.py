# SPDX-License-Identifier: Apache-2.0
"""What a rank works on while its speed is measured."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ringattn import _library
from ringattn._calls import call
from ringattn._checks import is_integer
from ringattn._group import Ring
from ringattn.profiles import is_positive

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Shard:
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
            size = getattr(self, name)
            if not is_integer(size) or size < 1:
                raise ValueError(f"{name} must be a positive integer, got {size!r}")
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
    ) -> Shard:
        """With what suits the device where None is given."""
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
        """One token's keys and values in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device)

    def attention(
        self, num_tokens: int, transport: str = "auto"
    ) -> tuple[Callable[[], Any], float]:
        """Causal attention of tokens on themselves, on this rank alone, and its operations."""
        q = self.random(1, num_tokens, self.num_heads, self.head_dim)
        k, v = (self.random(1, num_tokens, self.num_kv_heads, self.head_dim) for _ in range(2))
        scale = 1 / math.sqrt(self.head_dim)
        arguments = (q, k, v, [num_tokens], [0], "contiguous", True, scale, "", transport, None)
        flops = 4.0 * self.width * num_tokens * (num_tokens + 1) / 2
        return lambda: call(torch.ops.ringattn.ring_forward, *arguments), flops

    def linear(self) -> tuple[Callable[[], Any], float]:
        """A square projection, and its operations."""
        x = self.random(self.num_tokens, self.width)
        weight = self.random(self.width, self.width)
        return lambda: F.linear(x, weight), 2.0 * x.size(0) * weight.numel()

    def decode(self, num_cached: int) -> tuple[Callable[[], Any], float]:
        """One new token on a cache, on this rank alone, and the bytes it reads."""
        q = self.random(1, 1, self.num_heads, self.head_dim)
        k, v = (self.random(1, num_cached, self.num_kv_heads, self.head_dim) for _ in range(2))
        arguments = (q, k, v, 1 / math.sqrt(self.head_dim), "")
        return (
            lambda: call(torch.ops.ringattn.decode_attention, *arguments),
            float(num_cached * self.token_bytes),
        )


def usual_tokens(device: torch.device) -> int:
    """Of a shard, where nobody says: enough for a call to take longer than what is around it."""
    return 8192 if device.type == "cuda" else 256


def tokens_to_measure(seq_len: int, world_size: int, device: torch.device) -> int:
    """Tokens of a shard with which to measure for plans of ``seq_len`` tokens, because speeds
    depend on length. Measuring takes a few calls, a prefill one for each layer."""
    return max(usual_tokens(device), math.ceil(seq_len / world_size))


def resolve_device(device: torch.device | str | None, ring: Ring) -> torch.device:
    """The device that ``device`` means on this rank of a ring.

    Raises:
        ValueError: a device without kernels.
    """
    if device is None:
        usable = "cuda" in _library.DEVICES and torch.cuda.is_available()
        if usable and ring.process_group is not None:
            usable = "nccl" in str(dist.get_backend_config(ring.process_group))
        device = "cuda" if usable else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        place = None
    if place is None or place.type not in _library.DEVICES:
        got = repr(device) if place is None else place
        raise ValueError(
            f"device must be one with a kernel ({', '.join(_library.DEVICES)}), got {got}"
        )
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device must be there, got {place} where there are {count} CUDA devices")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place


def settling_seconds(device: torch.device, seconds: float | None) -> float:
    """How long a device computes before its speed counts, None being what suits it.

    Raises:
        ValueError: seconds that are not finite and positive.
    """
    if seconds is None:
        return 1.0 if device.type == "cuda" else 0.2
    if not is_positive(seconds):
        raise ValueError(f"seconds must be finite and positive, got {seconds!r}")
    return seconds
