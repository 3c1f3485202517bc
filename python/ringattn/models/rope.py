# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding as Hugging Face's LLaMA has it: the halves of a head rotate."""

import math
from collections.abc import Mapping

import torch

from ringattn._checks import check_positive

#: What ``rope_scaling["rope_type"]`` may be.
ROPE_TYPES = ("default", "linear", "llama3")

#: cos and signed sin of some positions, both float32 ``[T, 1, D]``.
Rotation = tuple[torch.Tensor, torch.Tensor]


def rope_type(scaling: Mapping[str, float | str]) -> str:
    """The kind of frequency scaling, from ``rope_type`` or its older name ``type``.

    Raises:
        ValueError: a kind that is not in :data:`ROPE_TYPES`.
    """
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, got {kind!r}")
    return str(kind)


def inverse_frequencies(
    head_dim: int, theta: float, scaling: Mapping[str, float | str]
) -> torch.Tensor:
    """Radians per position of each rotating pair, float32 ``[D / 2]`` on the CPU.

    Args:
        head_dim: D, even.
        theta: base of the geometric series.
        scaling: empty, or Hugging Face's ``rope_scaling`` of type "linear" or "llama3".

    Raises:
        ValueError: an unknown type of scaling, or one of its numbers is missing.

    RoPE: Su et al., https://arxiv.org/abs/2104.09864. llama3 scaling: the published LLaMA 3.1 code.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / theta**exponents
    kind = rope_type(scaling)
    if kind == "default":
        return inv_freq
    factor = _number(scaling, "factor")
    if kind == "linear":
        return inv_freq / factor

    # Low frequencies are divided by the factor, high ones kept, those between interpolated.
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    trained = _number(scaling, "original_max_position_embeddings")
    wavelength = 2 * math.pi / inv_freq
    smooth = (trained / wavelength - low) / (high - low)
    between = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = torch.where(wavelength > trained / low, inv_freq / factor, between)
    return torch.where(wavelength < trained / high, inv_freq, scaled)


def _number(scaling: Mapping[str, float | str], name: str) -> float:
    if name not in scaling:
        raise ValueError(f"rope_scaling must have {name!r}, got {dict(scaling)}")
    return check_positive(name, scaling[name])


class RotaryEmbedding:
    """cos and sin of any positions, so any shard of a sequence.

    Not a module: its float32 frequencies must survive ``model.to(torch.bfloat16)`` and a model that
    was built on the meta device.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Mapping[str, float | str]) -> None:
        self._inv_freq = inverse_frequencies(head_dim, theta, scaling)  # [D / 2]
        self._on_device: dict[torch.device, torch.Tensor] = {}

    def __call__(self, position_ids: torch.Tensor) -> Rotation:
        """cos and signed sin, float32 ``[T, 1, D]``, of ``position_ids``, int64 ``[T]``."""
        device = position_ids.device
        if device not in self._on_device:
            self._on_device[device] = self._inv_freq.to(device)
        angles = position_ids[:, None, None].float() * self._on_device[device]  # [T, 1, D / 2]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotates each head of ``x``, ``[B, T, H, D]``, to its position: computed in float32 (float64
    for float64) and rounded once."""
    cos, sin = rotation
    swapped = x.roll(x.size(-1) // 2, -1)  # the halves of D change places
    return torch.addcmul(x * cos, swapped, sin).to(x.dtype)
