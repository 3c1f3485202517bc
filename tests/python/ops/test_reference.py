# SPDX-License-Identifier: Apache-2.0
"""The reference ring equals attention on one device, and attention equals PyTorch's."""

import math

import pytest
import torch
import torch.nn.functional as F
from ringattn import Partition, reference


def inputs(num_queries: int, num_keys: int, num_kv_heads: int = 2):
    generator = torch.Generator().manual_seed(7)
    shape = (2, num_queries, 4, 8)
    q = torch.randn(shape, generator=generator, dtype=torch.float64)
    k, v = torch.randn(
        2, 2, num_keys, num_kv_heads, 8, generator=generator, dtype=torch.float64
    ).unbind()
    return q, k, v


@pytest.mark.parametrize("num_kv_heads", [4, 2, 1])
@pytest.mark.parametrize("diagonal", [None, 0, 2, -1])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_attention_equals_scaled_dot_product_attention(num_kv_heads, diagonal, scale):
    q, k, v = inputs(6, 9, num_kv_heads)
    out, lse = reference.attention(q, k, v, diagonal, scale)
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask = mask if diagonal is None else mask.tril(diagonal)
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), attn_mask=mask, scale=scale, enable_gqa=True
    ).transpose(1, 2)
    sees = mask.any(dim=1)
    torch.testing.assert_close(out[:, sees], expected[:, sees], rtol=0, atol=1e-13)
    assert (out[:, ~sees] == 0).all() and (lse[:, :, ~sees] == -math.inf).all()


def test_lse_is_the_logarithm_of_the_sum_of_exponentials():
    q, k, v = inputs(3, 5, 4)
    _, lse = reference.attention(q, k, v, diagonal=0, scale=0.5)
    for row in range(3):
        scores = [0.5 * torch.dot(q[1, row, 2], k[1, key, 2]) for key in range(row + 1)]
        expected = math.log(sum(math.exp(score) for score in scores))
        assert lse[1, 2, row].item() == pytest.approx(expected, abs=1e-14)


def test_no_keys_and_no_queries_are_states_too():
    q, k, v = inputs(3, 5)
    out, lse = reference.attention(q, k[:, :0], v[:, :0])
    assert (out == 0).all() and (lse == -math.inf).all()
    out, lse = reference.attention(q[:, :0], k, v)
    assert out.shape == (2, 0, 4, 8) and lse.shape == (2, 4, 0)


@pytest.mark.parametrize("split", [0, 1, 4, 9])
def test_merged_states_equal_attention_over_all_keys(split):
    q, k, v = inputs(6, 9)
    first = reference.attention(q, k[:, :split], v[:, :split], diagonal=-1)
    second = reference.attention(q, k[:, split:], v[:, split:], diagonal=-1 - split)
    out, lse = reference.merge_states(*first, *second)
    expected, expected_lse = reference.attention(q, k, v, diagonal=-1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("lengths", "order"),
    [
        ([17], None),
        ([8, 9], [1, 0]),
        ([0, 17], None),
        ([5, 3, 9], [2, 0, 1]),
        ([1, 0, 13, 3], None),
    ],
)
def test_ring_equals_attention_on_one_device(layout, causal, lengths, order):
    q, k, v = inputs(17, 17)
    partition = getattr(Partition, layout)(lengths, order)
    out, lse = reference.ring_attention(q, k, v, partition, causal)
    expected, expected_lse = reference.attention(q, k, v, 0 if causal else None)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=1e-13)
