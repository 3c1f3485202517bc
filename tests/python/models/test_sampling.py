# SPDX-License-Identifier: Apache-2.0
"""The probabilities that tokens are drawn with are those of plain Python."""

import math

import pytest
import torch
from ringattn.sampling import Sampling


def slow_probabilities(logits: list[float], sampling: Sampling) -> list[float]:
    """One row in plain Python, doubles."""
    temperature = sampling.temperature or 1.0
    kept = {token: logit / temperature for token, logit in enumerate(logits)}
    if sampling.top_k is not None:
        least = sorted(kept.values(), reverse=True)[: sampling.top_k][-1]
        kept = {token: logit for token, logit in kept.items() if logit >= least}
    weights = {token: torch.tensor(logit).double().exp().item() for token, logit in kept.items()}
    total = sum(weights.values())
    if sampling.top_p is not None:
        mass, nucleus = 0.0, {}
        for token in sorted(weights, key=lambda token: -weights[token]):
            if mass < sampling.top_p:
                nucleus[token] = weights[token]
            mass += weights[token] / total
        weights, total = nucleus, sum(nucleus.values())
    return [weights.get(token, 0.0) / total for token in range(len(logits))]


@pytest.mark.parametrize("temperature", [None, 0.3, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 1000])
@pytest.mark.parametrize("top_p", [None, 0.1, 0.63, 1.0])
def test_probabilities_are_those_of_a_slow_reference(
    temperature: float | None, top_k: int | None, top_p: float | None
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 2
    expected = torch.tensor([slow_probabilities(row.tolist(), sampling) for row in logits])
    torch.testing.assert_close(sampling.probabilities(logits), expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [
        (1e-46, 1),
        (1e-30, 1),
        (0.124, 1),
        (0.125, 1),
        (0.126, 2),
        (0.5, 4),
        (0.501, 5),
        (0.875, 7),
        (0.876, 8),
    ],
)
def test_the_fewest_tokens_that_reach_the_mass_stay(top_p: float, kept: int) -> None:
    # Eight tokens of 1/8, exactly, and one of nothing; of equal ones the first stay.
    none = -math.inf
    logits = torch.tensor([[0.0] * 8 + [none], [none] + [0.0] * 8])
    expected = torch.zeros(2, 9)
    expected[0, :kept] = expected[1, 1 : 1 + kept] = 1 / kept
    torch.testing.assert_close(Sampling(top_p=top_p).probabilities(logits), expected)


@pytest.mark.parametrize("temperature", [1e-36, torch.finfo(torch.float32).tiny])
def test_next_to_a_temperature_of_zero_the_likeliest_are_drawn(temperature: float) -> None:
    logits = torch.tensor([[400.0, -400.0, 400.0, -math.inf], [-700.0, -699.0, -701.0, -700.0]])
    expected = torch.tensor([[0.5, 0, 0.5, 0], [0, 1, 0, 0]])
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}):
        found = Sampling(temperature, **options).probabilities(logits)
        assert torch.equal(found, expected)


def test_draws_follow_the_probabilities() -> None:
    sampling = Sampling(temperature=0.8, top_k=5, top_p=0.9)
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(0)).expand(20_000, 10)
    drawn = sampling.draw(logits, torch.Generator().manual_seed(0))
    shares = torch.bincount(drawn, minlength=10) / 20_000
    torch.testing.assert_close(shares, sampling.probabilities(logits)[0], atol=0.02, rtol=0)
