# SPDX-License-Identifier: Apache-2.0
"""The error rule every numerical test goes by.

Positions of -inf and NaN are compared first, values after, against a float64 reference:

float64   at most 1e-10
float32   at most the larger of 2e-6 and twice the error of PyTorch's best float32 backend
halves    max and rms at most twice those of PyTorch's own attention in that dtype, on one device

PyTorch is given the same inputs. Rounding the float64 reference to the result's dtype is never an
error. On CPUs halves are computed in float32, as by PyTorch's plain backend: where scores are in
the thousands, the order of sums, and with it the processor, decides which of its backends errs
more, so the larger error counts.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from ringattn import reference
from torch.nn.attention import SDPBackend, sdpa_kernel

FLOAT64_TOLERANCE = 1e-10
FLOAT32_TOLERANCE = 2e-6
TIMES_PYTORCH = 2.0
RMS_GROWTH = 1.05  # the rms error with any number of ranks, over that with one

_BACKENDS = [
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
]


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """New tensors hold NaN until they are written to, so that reads of unwritten memory show."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@dataclass(frozen=True)
class Error:
    """How far a result is from its reference."""

    max: float
    rms: float
    worst: tuple[int, ...] = ()  # where it is farthest


def measure(actual: torch.Tensor, expected: torch.Tensor) -> Error:
    """Error of ``actual``, of any dtype, against a float64 reference of the same shape.

    AssertionError where shapes differ or -inf, +inf and NaN do not lie in the same places.
    """
    assert actual.shape == expected.shape, (
        f"shape must be {list(expected.shape)}, got {list(actual.shape)}"
    )
    actual, expected = actual.detach().double().cpu(), expected.detach().double().cpu()
    for name, where in (("NaN", torch.isnan), ("-inf", torch.isneginf), ("+inf", torch.isposinf)):
        differs = where(actual) != where(expected)
        assert not differs.any(), (
            f"{name} must lie where the reference has it, got {int(differs.sum())} differences, "
            f"first at {tuple(differs.nonzero()[0].tolist())}"
        )
    finite = torch.isfinite(expected)
    distance = torch.where(finite, actual - expected, 0.0).abs()
    if distance.numel() == 0:
        return Error(0.0, 0.0)
    worst = torch.unravel_index(distance.argmax(), distance.shape)
    return Error(
        distance.max().item(),
        distance.square().mean().sqrt().item(),
        tuple(int(index) for index in worst),
    )


def sdpa(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    if scale <= 0:  # PyTorch scales what it has masked with -inf: the sign goes into q
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    # In memory of its own: PyTorch's CUDA attention returns NaN for rows that are not aligned.
    q, k, v = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (q, k, v))
    everything = bool(visible.all())
    causal = visible.size(0) == visible.size(1) and torch.equal(visible, visible.tril())
    causal = causal and bool(visible[torch.tril(torch.ones_like(visible))].all())
    mask = None if everything or causal else visible
    is_causal = causal and not everything
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2)


def pytorch_error(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    expected: torch.Tensor,
) -> Error:
    """Error of PyTorch's attention on the same inputs, over the rows that see a key: of its default
    backend in a half type (on CPUs or of its plain one), of its best one in float32."""
    sees = visible.any(dim=1)
    if not sees.any():
        return Error(0.0, 0.0)
    q, visible, expected = q[:, sees], visible[sees], expected[:, sees]
    if q.dtype != torch.float32:
        default = measure(sdpa(q, k, v, visible, scale), expected)
        if q.is_cuda:
            return default
        with sdpa_kernel(SDPBackend.MATH):
            plain = measure(sdpa(q, k, v, visible, scale), expected)
        return Error(max(default.max, plain.max), max(default.rms, plain.rms))
    errors = []
    for backend in _BACKENDS:
        try:
            with sdpa_kernel(backend):
                errors.append(measure(sdpa(q, k, v, visible, scale), expected))
        except RuntimeError:  # not a backend for these inputs
            continue
    return min(errors, key=lambda error: error.max)


def allowed_error(dtype: torch.dtype, pytorch: Error, expected: torch.Tensor) -> Error:
    """The largest error that passes, by the rule at the top."""
    if dtype == torch.float64:
        return Error(FLOAT64_TOLERANCE, FLOAT64_TOLERANCE)
    if dtype == torch.float32:
        largest = max(FLOAT32_TOLERANCE, TIMES_PYTORCH * pytorch.max)
        return Error(largest, largest)
    rounding = measure(expected.to(dtype), expected)
    # A float32 result that lies between two halves may be rounded the other way.
    return Error(
        max(TIMES_PYTORCH * pytorch.max, 1.001 * rounding.max),
        max(TIMES_PYTORCH * pytorch.rms, 1.001 * rounding.rms),
    )


def assert_within(what: str, error: Error, allowed: Error) -> None:
    assert error.max <= allowed.max and error.rms <= allowed.rms, (
        f"{what}: error must be at most {allowed.max:.3g} (rms {allowed.rms:.3g}), "
        f"got {error.max:.3g} (rms {error.rms:.3g}), worst at {error.worst}"
    )


def check_attention(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    visible: torch.Tensor | None = None,
    diagonal: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    what: str = "",
) -> Error:
    """Holds a result of attention on q, k and v against the rule.

    Args:
        out: ``[B, S_q, H, D]`` in the dtype of ``q``.
        lse: ``[B, H, S_q]`` in float32, float64 for float64; None: not checked.
        q: ``[B, S_q, H, D]``; k and v are ``[B, S_k, H_kv, D]``.
        visible: bool ``[S_q, S_k]``; or else
        diagonal: as in ``torch.tril``.
        scale: of the scores.
        softcap: of the scores, which PyTorch's attention does not have: the yardstick is its error
            without, and so it is for sinks.
        sinks: ``[H]``.
        what: said in the failure: ranks, layout and the like; shapes are added.

    Returns:
        The error of ``out``.
    """
    scale = 1 / math.sqrt(q.size(-1)) if scale is None else scale
    if visible is None:
        visible = torch.ones(q.size(1), k.size(1), dtype=torch.bool, device=q.device)
        visible = visible if diagonal is None else visible.tril(diagonal)
    what = f"{what} {q.dtype} q {list(q.shape)} k {list(k.shape)}".strip()
    assert out.dtype == q.dtype, f"{what}: out must be {q.dtype}, got {out.dtype}"
    state_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    doubles = (q.double(), k.double(), v.double(), visible, scale)
    expected, expected_lse = reference.masked_attention(*doubles, softcap, sinks)
    error = measure(out, expected)
    plain = softcap == 0.0 and sinks is None
    yardstick = expected if plain else reference.masked_attention(*doubles)[0]
    pytorch = pytorch_error(q, k, v, visible, scale, yardstick)
    assert_within(f"out of {what}", error, allowed_error(q.dtype, pytorch, expected))
    if lse is not None:
        assert lse.dtype == state_dtype, f"{what}: lse must be {state_dtype}, got {lse.dtype}"
        tolerance = FLOAT64_TOLERANCE if q.dtype == torch.float64 else FLOAT32_TOLERANCE
        finite = expected_lse[torch.isfinite(expected_lse)]
        if finite.numel() > 0:  # an ulp of a large lse is more than the tolerance
            tolerance *= max(1.0, finite.abs().max().item())
        assert_within(f"lse of {what}", measure(lse, expected_lse), Error(tolerance, tolerance))
    return error
