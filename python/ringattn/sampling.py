# SPDX-License-Identifier: Apache-2.0
"""Drawing of tokens from logits."""

import math
from dataclasses import dataclass

import torch

from ringattn._checks import check_int64, is_finite, is_number


@dataclass(frozen=True)
class Sampling:
    """Options of drawing a token from its logits, applied in this order; None leaves one out.

    Args:
        temperature: logits are divided by it; 0 takes the likeliest token.
        top_k: only the k likeliest tokens stay, and those as likely as the k-th.
        top_p: only the fewest likeliest tokens whose probabilities reach ``top_p`` together stay
            (Holtzman et al., https://arxiv.org/abs/1904.09751).
        greedy: take the likeliest token, whatever the other options are.

    Raises:
        ValueError: a temperature below 0, not finite or next to 0, top_k below 1, top_p outside
            (0, 1].
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    greedy: bool = False

    def __post_init__(self) -> None:
        heat = self.temperature
        if heat is not None and (not is_finite(heat) or heat < 0):
            raise ValueError(f"temperature must be 0 or more and finite, got {heat!r}")
        least = torch.finfo(torch.float32).tiny  # devices may take what is smaller for 0
        if heat and heat < least:
            raise ValueError(f"temperature must be 0 or {least:.3g} or more, got {heat}")
        if heat is not None:
            object.__setattr__(self, "temperature", float(heat))
        if self.top_k is not None:
            object.__setattr__(self, "top_k", check_int64("top_k", self.top_k, least=1))
        if self.top_p is not None and (not is_number(self.top_p) or not 0 < self.top_p <= 1):
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p!r}")

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """float32 ``[B, V]`` from logits ``[B, V]``; tokens that do not stay have 0."""
        logits = logits.float()
        if self.temperature is not None:
            # The differences that softmax takes: a small temperature makes logits infinite.
            logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature
        if self.top_k is not None and self.top_k < logits.size(-1):
            least = logits.topk(self.top_k).values[:, -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        probabilities = logits.softmax(-1)
        if self.top_p is None or self.top_p == 1:
            return probabilities
        ordered, indices = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # what the likelier tokens have together
        beyond = before >= self.top_p
        beyond[:, 0] = False  # the likeliest always stays
        ordered = ordered.masked_fill(beyond, 0)
        ordered /= ordered.sum(-1, keepdim=True)
        return torch.zeros_like(probabilities).scatter(-1, indices, ordered)

    def draw(self, logits: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
        """Token ids, int64 ``[B]``, from logits ``[B, V]``."""
        if self.greedy or self.temperature == 0:
            return logits.argmax(-1)
        return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)
