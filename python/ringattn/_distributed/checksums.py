# SPDX-License-Identifier: Apache-2.0
"""Numbers by which ranks compare what is too large to send."""

import hashlib

import torch

# Of splitmix64, as signed numbers.
_STEP, _FIRST, _SECOND = -7046029254386353131, -4658895280553007687, -7723592293110705685
_CHUNK = 2**22  # words of 8 bytes: a model's weights are not copied whole


def checksum(values: torch.Tensor) -> torch.Tensor:
    """A scalar int64 tensor on the same device: equal for equal integers in equal order, and as
    good as never for others."""
    return _mixed(values.flatten().to(torch.int64), 0)


def chained(history: torch.Tensor | int, *numbers: torch.Tensor | int) -> torch.Tensor | int:
    """A number that stands for ``history`` and what came after it."""
    for number in numbers:
        history = history * _STEP
        if isinstance(history, int):
            history = _signed(history)
        history = history + number
    return _signed(history) if isinstance(history, int) else history


def number_of(value: object) -> int:
    """An integer of 64 bits for a value of the host, by its ``repr``; 0 for None."""
    if value is None:
        return 0
    digest = hashlib.blake2b(repr(value).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def bits_checksum(x: torch.Tensor) -> torch.Tensor:
    """:func:`checksum` of the bits of a tensor of any dtype: NaNs of equal bits are equal."""
    flat = x.detach().contiguous().view(-1)
    if flat.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=x.device)
    flat = flat.view(torch.uint8)
    words = flat.view(torch.int64) if _is_aligned(flat) else flat
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for first in range(0, words.numel(), _CHUNK):
        total = total + _mixed(words[first : first + _CHUNK].to(torch.int64), first)
    return total


def _is_aligned(flat: torch.Tensor) -> bool:
    return bool(flat.numel() % 8 == 0 and flat.storage_offset() % 8 == 0)


def _mixed(words: torch.Tensor, first: int) -> torch.Tensor:
    """The sum of hashes of (place, word). Integers wrap."""
    places = torch.arange(first, first + words.numel(), device=words.device)
    x = places.mul_(_STEP).add_(words)
    x = x.bitwise_xor_(x >> 30).mul_(_FIRST)
    x = x.bitwise_xor_(x >> 27).mul_(_SECOND)
    return x.bitwise_xor_(x >> 31).sum()


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63
