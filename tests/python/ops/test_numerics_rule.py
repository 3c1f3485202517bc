# SPDX-License-Identifier: Apache-2.0
"""The error rule itself: it lets good results pass and finds bad ones."""

import math

import pytest
import torch
from _numerics import Error, allowed_error, check_attention, measure
from ringattn import reference

HALVES = [torch.float16, torch.bfloat16]


def inputs(dtype: torch.dtype, num_queries: int = 12, num_keys: int = 20):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, num_queries, 4, 16, generator=generator, dtype=torch.float64)
    k = torch.randn(2, num_keys, 2, 16, generator=generator, dtype=torch.float64)
    v = torch.randn(2, num_keys, 2, 16, generator=generator, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def exact(q, k, v, diagonal=None):
    out, lse = reference.attention(q.double(), k.double(), v.double(), diagonal)
    return out.to(q.dtype), lse.to(torch.float64 if q.dtype == torch.float64 else torch.float32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES])
@pytest.mark.parametrize("diagonal", [None, 0, 3, -4])
def test_correctly_rounded_results_pass(dtype, diagonal):
    q, k, v = inputs(dtype)
    check_attention(*exact(q, k, v, diagonal), q, k, v, diagonal=diagonal)


@pytest.mark.parametrize(
    ("dtype", "shift"),
    [(torch.float64, 2e-10), (torch.float32, 1e-5), (torch.float16, 5e-3), (torch.bfloat16, 3e-2)],
)
def test_a_single_wrong_value_is_found_and_located(dtype, shift):
    q, k, v = inputs(dtype)
    out, lse = exact(q, k, v)
    out[1, 7, 3, 5] += shift
    with pytest.raises(AssertionError, match=r"got .* worst at \(1, 7, 3, 5\)"):
        check_attention(out, lse, q, k, v)


@pytest.mark.parametrize("dtype", HALVES)
def test_errors_spread_over_all_values_are_found_by_their_rms(dtype):
    q, k, v = inputs(dtype)
    out, lse = exact(q, k, v)
    once_more = (out.double() * (1 + 1.5 * torch.finfo(dtype).eps)).to(dtype)
    with pytest.raises(AssertionError, match="rms"):
        check_attention(once_more, lse, q, k, v)


def test_rounding_partial_results_between_blocks_is_found():
    q, k, v = inputs(torch.bfloat16, 64, 256)
    out, lse = None, None
    for keys, values in zip(k.split(16, dim=1), v.split(16, dim=1), strict=True):
        block, block_lse = reference.attention(q.double(), keys.double(), values.double())
        if out is None:
            out, lse = block, block_lse
        else:
            out, lse = reference.merge_states(out, lse, block, block_lse)
        out = out.bfloat16().double()
    with pytest.raises(AssertionError, match="error must be at most"):
        check_attention(out.bfloat16(), lse.float(), q, k, v)


def test_a_wrong_lse_is_found():
    q, k, v = inputs(torch.float32)
    out, lse = exact(q, k, v)
    lse[0, 1, 2] += 1e-4
    with pytest.raises(AssertionError, match=r"lse of .* worst at \(0, 1, 2\)"):
        check_attention(out, lse, q, k, v)


def test_wrong_dtypes_are_found():
    q, k, v = inputs(torch.bfloat16)
    out, lse = exact(q, k, v)
    with pytest.raises(AssertionError, match="out must be"):
        check_attention(out.float(), lse, q, k, v)
    with pytest.raises(AssertionError, match="lse must be"):
        check_attention(out, lse.bfloat16(), q, k, v)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_nan_and_infinities_must_lie_in_the_same_places(value):
    expected = torch.zeros(2, 3, dtype=torch.float64)
    actual = expected.clone()
    actual[1, 2] = value
    with pytest.raises(AssertionError, match=r"first at \(1, 2\)"):
        measure(actual, expected)
    with pytest.raises(AssertionError, match=r"first at \(1, 2\)"):
        measure(expected, actual)
    assert measure(actual, actual.clone()) == Error(0.0, 0.0, (0, 0))


def test_the_bounds_are_those_of_the_rule():
    expected = torch.tensor([1.0, 1 / 3], dtype=torch.float64)
    assert allowed_error(torch.float64, Error(1.0, 1.0), expected) == Error(1e-10, 1e-10)
    assert allowed_error(torch.float32, Error(3e-7, 1e-7), expected).max == 2e-6
    assert allowed_error(torch.float32, Error(3e-6, 1e-7), expected).max == 6e-6
    assert allowed_error(torch.float16, Error(1e-3, 1e-4), expected) == Error(2e-3, 2e-4)
    # PyTorch may be exact by chance; a correctly rounded result must pass all the same.
    rounded = measure(expected.half(), expected)
    assert allowed_error(torch.float16, Error(0.0, 0.0), expected).max == 1.001 * rounded.max > 0
