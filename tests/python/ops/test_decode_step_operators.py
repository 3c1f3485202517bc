# SPDX-License-Identifier: Apache-2.0
"""The operators between the products of a decoded token compute what PyTorch's do in several."""

import pytest
import ringattn  # noqa: F401  defines the operators
import torch
import torch.nn.functional as F
from ringattn.models.rope import RotaryEmbedding, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
_ops = torch.ops.ringattn

pytestmark = pytest.mark.cuda


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 4096, 4104, 16384])
@pytest.mark.parametrize("rows", [1, 3])
def test_add_rms_norm(dtype: torch.dtype, width: int, rows: int) -> None:
    x, delta = randn(rows, 1, width, dtype=dtype), randn(1, rows, width, dtype=dtype)[0][:, None]
    weight = randn(width, dtype=dtype)
    total, normed = _ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    exact = F.rms_norm((x + delta).double(), (width,), weight.double(), 1e-5)
    rounding = torch.finfo(dtype).eps * (8 if dtype == torch.float32 else 1)
    normal = exact.abs().clamp_min(torch.finfo(dtype).tiny)
    assert ((normed.double() - exact).abs() <= rounding * normal).all()


def test_rows_that_begin_between_vectors() -> None:
    x, delta, weight = (randn(65 + i)[1:65:1] for i in range(3))
    total, normed = _ops.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    torch.testing.assert_close(normed, F.rms_norm(x + delta, (64,), weight, 1e-5))
    torch.testing.assert_close(_ops.gated_silu(x), F.silu(x[:32]) * x[32:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 64, 14336])
def test_gated_silu(dtype: torch.dtype, width: int) -> None:
    gate_up = 4 * randn(3, 1, 2 * width, dtype=dtype)
    gate, up = gate_up.chunk(2, -1)
    found = _ops.gated_silu(gate_up)
    torch.testing.assert_close(found, F.silu(gate) * up, rtol=4 * torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (32, 8, 128), (3, 1, 256)])
@pytest.mark.parametrize("slot", [-1, 0, 4])
def test_rotate_into_cache(
    dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, slot: int
) -> None:
    qkv = randn(2, 1, (heads + 2 * kv_heads) * head_dim, dtype=dtype)
    cos, sin = RotaryEmbedding(head_dim, 1e4, {})(torch.tensor([1234], device="cuda"))
    storage = randn(2, 2, 5, kv_heads, head_dim, dtype=dtype)
    keys, values = storage.clone().unbind(0)
    where = torch.tensor([slot], dtype=torch.int32, device="cuda")
    q = _ops.rotate_into_cache(qkv, cos, sin, keys, values, where)

    qk, v = qkv.view(2, 1, -1, head_dim).split((heads + kv_heads, kv_heads), 2)
    expected_q, expected_k = rotate(qk, (cos, sin)).split((heads, kv_heads), 2)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(q, expected_q, rtol=2 * eps, atol=1e-6)
    expected_keys, expected_values = storage.clone().unbind(0)
    if slot >= 0:
        expected_keys[:, slot], expected_values[:, slot] = expected_k[:, 0], v[:, 0]
    torch.testing.assert_close(keys, expected_keys, rtol=2 * eps, atol=1e-6)
    assert torch.equal(values, expected_values)


def test_what_does_not_fit_is_refused() -> None:
    x = randn(1, 1, 64)
    with pytest.raises(RuntimeError, match=r"delta must have the shape of x, \[1, 1, 64\], got"):
        _ops.add_rms_norm(x, randn(2, 1, 64), randn(64), 1e-5)
    with pytest.raises(RuntimeError, match=r"weight must have shape \[E\], E = 64, got \[32\]"):
        _ops.add_rms_norm(x, x, randn(32), 1e-5)
    with pytest.raises(RuntimeError, match="x must have rows of a multiple of 8 elements"):
        _ops.add_rms_norm(randn(1, 12), randn(1, 12), randn(12), 1e-5)
    with pytest.raises(RuntimeError, match=r"x must be torch.float16, torch.bfloat16 or torch.fl"):
        _ops.add_rms_norm(x.double(), x.double(), randn(64).double(), 1e-5)
    with pytest.raises(RuntimeError, match="gate_up must have rows of a multiple of 16 elements"):
        _ops.gated_silu(randn(1, 24))
    keys, values = randn(2, 1, 5, 2, 16).unbind(0)
    cos, slot = randn(16), torch.zeros(1, dtype=torch.int32, device="cuda")
    with pytest.raises(RuntimeError, match=r"qkv must have shape \[B, 1, \(H \+ 2 H_kv\) \* D\]"):
        _ops.rotate_into_cache(randn(1, 1, 64), cos, cos, keys, values, slot)
    with pytest.raises(RuntimeError, match=r"slot must be torch.int32 of one element, got"):
        _ops.rotate_into_cache(randn(1, 1, 96), cos, cos, keys, values, slot.long())
