# SPDX-License-Identifier: Apache-2.0
"""What a call of a model is given: where a batch of prompts has padding, and what must be the same
on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F

from ringattn._checks import MAX_HEAD_DIM, is_head_dim
from ringattn._distributed.agreement import Agreement, Given

# What hides keys in scores: a further head dimension of queries and keys. A kernel takes multiples
# of 8 dimensions. The largest number of float16 is 65504; scores are float32.
_HIDING_DIMS = 8
_HIDING = 6e4


@dataclass(frozen=True)
class Padding:
    """Which tokens of a batch of prompts are real: in row b those in
    ``[starts[b], starts[b] + lengths[b])``.

    Each row is rolled so that its real tokens come first. Causal attention over rolled rows needs
    no mask: no real token sees a later one, and padding comes after all real tokens. What
    rows of padding see is that of the unmodified model (``sees``):

    * "text": tokens before them, as under a causal mask that hides padding. Before the tokens they
      see nothing, and get 0.
    * "padding": themselves and padding before them; each row has its padding on one side.
    * None: their results are not used.
    """

    starts: tuple[int, ...]  # [B]
    lengths: tuple[int, ...]  # [B]
    seq_len: int  # S
    sees: Literal["text", "padding"] | None = "text"

    @classmethod
    def of(cls, mask: torch.Tensor) -> Padding | None:
        """The padding of a mask ``[B, S]``, not 0 where a token is real; None where all tokens are
        real. Reads the mask: on CUDA the host waits for it.

        Raises:
            ValueError: a row whose real tokens are not one run, or without any.
        """
        real = mask.detach().to("cpu") != 0
        if bool(real.all()):
            return None
        batch, seq_len = real.shape
        starts = real.int().argmax(1)
        lengths = real.sum(1)
        columns = torch.arange(seq_len, device=real.device)
        one_run = (columns >= starts[:, None]) & (columns < (starts + lengths)[:, None])
        for row in range(batch):
            if int(lengths[row]) == 0:
                raise ValueError(f"attention_mask must have a token in each row, got none in {row}")
            if not torch.equal(one_run[row], real[row]):
                raise ValueError(
                    "attention_mask must have the tokens of each row in one run, padding before "
                    f"or after it, got a hole in row {row}"
                )
        return cls(tuple(starts.tolist()), tuple(lengths.tolist()), seq_len)

    @property
    def hides_keys(self) -> bool:
        """Whether rows of padding see less than causal attention over rolled rows gives them."""
        return self.sees == "padding" or (self.sees == "text" and any(self.ends))

    @property
    def ends(self) -> tuple[int, ...]:
        """Columns of padding after the tokens of each row, ``[B]``."""
        return tuple(
            self.seq_len - start - length
            for start, length in zip(self.starts, self.lengths, strict=True)
        )

    def rolled(self, columns: torch.Tensor) -> torch.Tensor:
        """Places of the caller's ``columns``, ``[1, n]``, after rows have been rolled,
        ``[B, n]``."""
        starts = torch.tensor(self.starts, device=columns.device)[:, None]
        return (columns - starts) % self.seq_len

    def columns(self, places: torch.Tensor) -> torch.Tensor:
        """The caller's columns, ``[B, n]``, that are rolled to ``places``, ``[n]``."""
        starts = torch.tensor(self.starts, device=places.device)[:, None]
        return (places + starts) % self.seq_len

    def around(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Which ``places``, ``[n]``, of rolled rows are padding before the tokens, and after them,
        bool ``[B, n]`` each."""
        starts, lengths = torch.tensor((self.starts, self.lengths)).to(places.device)
        before = places >= self.seq_len - starts[:, None]
        return before, (places >= lengths[:, None]) & ~before

    def hide(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        around: tuple[torch.Tensor, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same with more head dimensions, which add to the score of a row of padding and a key
        that it does not see what makes its weight 0, and 0 to all other scores. ``around`` is of
        these rows."""
        head_dim = q.size(-1)
        if not is_head_dim(head_dim + _HIDING_DIMS):
            raise ValueError(
                "attention_mask must not hide keys from rows of padding where the head dimension "
                f"is above {MAX_HEAD_DIM - _HIDING_DIMS}, got {head_dim}: put padding before the "
                "tokens"
            )
        before, after = around
        rows, hidden = after, before | after
        if self.sees == "padding":
            rows, hidden = before | after, ~(before | after)
        q, k, v = (F.pad(x, (0, _HIDING_DIMS)) for x in (q, k, v))
        q[..., head_dim].masked_fill_(rows[:, :, None], _HIDING)
        k[..., head_dim].masked_fill_(hidden[:, :, None], -_HIDING)
        return q, k, v

    def mask(self, device: torch.device, new_tokens: int = 0) -> torch.Tensor:
        """bool ``[B, S + new_tokens]``: real tokens, then ones."""
        columns = torch.arange(self.seq_len + new_tokens, device=device)
        starts = torch.tensor(self.starts, device=device)[:, None]
        stops = starts + torch.tensor(self.lengths, device=device)[:, None]
        return (columns >= starts) & (columns < stops) | (columns >= self.seq_len)


@dataclass
class Inputs:
    """What the caller of a model gave to a call, which must be the same on all ranks.

    Args:
        agreement: the model's.
        tokens: ids ``[B, T]``, or embeddings ``[B, T, E]``, whose values may differ: each rank has
            computed its own.
        name: what errors call them.
        mask_name: what errors call the mask.
        position_ids: ``[B, T]`` or ``[1, T]``; None: those of :meth:`ModelCall.position_ids`.
        more: what else is compared.
    """

    agreement: Agreement
    tokens: torch.Tensor
    name: str
    mask_name: str = "attention_mask"
    position_ids: torch.Tensor | None = None
    more: Given = field(default_factory=Given)
