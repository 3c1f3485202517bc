# SPDX-License-Identifier: Apache-2.0
"""The shape of a LLaMA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ringattn.models.rope import rope_type


@dataclass(frozen=True)
class LLaMAConfig:
    """Shape of a LLaMA. Names are those of FMS; sizes count elements, lengths count tokens.

    Raises:
        ValueError: sizes that are not positive, heads that do not divide, a head dimension that the
            attention kernels do not have, an unknown kind of RoPE scaling.
    """

    src_vocab_size: int = 32000
    emb_dim: int = 4096
    nlayers: int = 32
    nheads: int = 32
    kvheads: int = 0  # 0: as many as nheads
    head_dim: int = 0  # 0: emb_dim / nheads
    hidden_dim: int = 11008  # of the feed-forward layers
    norm_eps: float = 1e-5
    max_expected_seq_len: int = 4096  # positions the model was trained for; more are refused
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, float | str] = field(default_factory=dict)  # as in Hugging Face
    attn_bias: bool = False
    mlp_bias: bool = False
    tie_heads: bool = False  # the head's weight is the embedding's
    eos_ids: tuple[int, ...] = ()  # any of them ends a sequence
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("src_vocab_size", "emb_dim", "nlayers", "nheads", "hidden_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        object.__setattr__(self, "kvheads", self.kvheads or self.nheads)
        if self.kvheads < 1 or self.nheads % self.kvheads != 0:
            raise ValueError(
                f"nheads must be a multiple of kvheads {self.kvheads}, got {self.nheads}"
            )
        object.__setattr__(self, "head_dim", self.head_dim or self.emb_dim // self.nheads)
        if self.head_dim % 8 != 0 or not 0 < self.head_dim <= 256:
            raise ValueError(f"head_dim must be a multiple of 8, at most 256, got {self.head_dim}")
        rope_type(self.rope_scaling)

    def updated(self, **changes: Any) -> LLaMAConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)
