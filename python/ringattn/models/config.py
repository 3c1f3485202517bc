# SPDX-License-Identifier: Apache-2.0
"""The shape of a LLaMA."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ringattn._checks import (
    HEAD_DIM_RULE,
    check_flag,
    check_int64,
    check_int64_or_none,
    check_integer,
    check_integers,
    check_not_negative,
    check_positive,
    is_head_dim,
)
from ringattn.models.rope import rope_type

_LEAST: dict[str, Literal[0, 1]] = {  # of the sizes
    **dict.fromkeys(("src_vocab_size", "emb_dim", "nlayers", "nheads", "hidden_dim"), 1),
    "max_expected_seq_len": 0,
}
_FOLLOWING = ("kvheads", "head_dim")  # from other sizes, where they are 0 or None


@dataclass(frozen=True)
class LLaMAConfig:
    """Shape of a LLaMA. Names are those of FMS; sizes count elements, lengths count tokens.

    Raises:
        ValueError: sizes that are not positive integers, heads that do not divide, a head dimension
            that the attention kernels do not have, an unknown kind of RoPE scaling, other values of
            another type than here.
    """

    src_vocab_size: int = 32000
    emb_dim: int = 4096
    nlayers: int = 32
    nheads: int = 32
    kvheads: int = 0  #: 0 means as many as nheads
    head_dim: int = 0  #: 0 means emb_dim / nheads
    hidden_dim: int = 11008  #: of the feed-forward layers
    norm_eps: float = 1e-5
    max_expected_seq_len: int = 4096  #: positions the model was trained for; more are refused
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, float | str] = field(default_factory=dict)  #: as in Hugging Face
    attn_bias: bool = False
    mlp_bias: bool = False
    tie_heads: bool = False  #: the head's weight is the embedding's
    window_size: int | None = None  #: keys before a query and its own that it sees
    eos_ids: tuple[int, ...] = ()  #: any of them ends a sequence
    pad_id: int | None = None

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {
            name: check_int64(name, getattr(self, name), least=least)
            for name, least in _LEAST.items()
        }
        for name in _FOLLOWING:
            checked[name] = check_int64_or_none(name, getattr(self, name), least=0) or 0
        checked["window_size"] = check_int64_or_none("window_size", self.window_size, least=1)
        checked["norm_eps"] = check_not_negative("norm_eps", self.norm_eps)
        checked["rope_theta"] = check_positive("rope_theta", self.rope_theta)
        for name in ("attn_bias", "mlp_bias", "tie_heads"):
            checked[name] = check_flag(name, getattr(self, name))
        checked["eos_ids"] = check_integers("eos_ids", self.eos_ids or ())
        if self.pad_id is not None:
            checked["pad_id"] = check_integer("pad_id", self.pad_id)
        checked["kvheads"] = checked["kvheads"] or checked["nheads"]
        checked["head_dim"] = checked["head_dim"] or checked["emb_dim"] // checked["nheads"]
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        if self.nheads % self.kvheads != 0:
            raise ValueError(
                f"nheads must be a multiple of kvheads {self.kvheads}, got {self.nheads}"
            )
        if not is_head_dim(self.head_dim):
            raise ValueError(f"head_dim must be {HEAD_DIM_RULE}, got {self.head_dim}")
        if not isinstance(self.rope_scaling, Mapping):
            raise ValueError(f"rope_scaling must be a mapping, got {self.rope_scaling!r}")
        rope_type(self.rope_scaling)

    def updated(self, **changes: Any) -> LLaMAConfig:
        """A copy with some fields changed."""
        return replace(self, **changes)

    def check_seq_len(self, seq_len: int) -> None:
        """ValueError where a sequence has more tokens than the model was trained for."""
        if seq_len > self.max_expected_seq_len:
            raise ValueError(
                f"sequence must have at most the {self.max_expected_seq_len} tokens the model was "
                f"trained for, got {seq_len}"
            )
