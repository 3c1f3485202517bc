# SPDX-License-Identifier: Apache-2.0
"""Half-precision error where one key has most of a row's weight: that key's probability must not be
rounded, or its rounding error is the row's."""

import pytest
import torch
from _numerics import TIMES_PYTORCH, measure, pytorch_error
from ringattn import block_attention, reference

RMS_TIMES_PYTORCH = 1.1
HEADS, KV_HEADS = 8, 2
SEEDS = 3


def inputs(device, dtype, num_tokens, head_dim, width, seed):
    """Unit-normal but for q, which is ``width`` times as wide, and with it the scores."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(heads):
        return torch.randn(1, num_tokens, heads, head_dim, generator=generator, device=device)

    return (
        (normal(HEADS) * width).to(dtype),
        normal(KV_HEADS).to(dtype),
        normal(KV_HEADS).to(dtype),
    )


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 4, 16, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
def test_error_of_peaked_rows_is_that_of_pytorch(device, dtype, head_dim, width, causal):
    num_tokens = 1024 if device.type == "cuda" else 192
    scale = head_dim**-0.5
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=device)
    visible = visible.tril() if causal else visible
    largest, pytorch_largest, rounding_largest = 0.0, 0.0, 0.0
    for seed in range(SEEDS):
        q, k, v = inputs(device, dtype, num_tokens, head_dim, width, seed)
        expected, _ = reference.masked_attention(q.double(), k.double(), v.double(), visible, scale)
        pytorch = pytorch_error(q, k, v, visible, scale, expected)
        rounding = measure(expected.to(dtype), expected)
        out, _ = block_attention(q, k, v, diagonal=0 if causal else None)
        error = measure(out, expected)
        assert error.rms <= max(RMS_TIMES_PYTORCH * pytorch.rms, rounding.rms), (
            f"seed {seed}: the rms error must be at most {RMS_TIMES_PYTORCH} x {pytorch.rms:.3g}, "
            f"got {error.rms:.3g}"
        )
        largest = max(largest, error.max)
        pytorch_largest = max(pytorch_largest, pytorch.max)
        rounding_largest = max(rounding_largest, rounding.max)
    assert largest <= max(TIMES_PYTORCH * pytorch_largest, rounding_largest), (
        f"the largest error must be at most {TIMES_PYTORCH} x {pytorch_largest:.3g}, "
        f"got {largest:.3g}"
    )
