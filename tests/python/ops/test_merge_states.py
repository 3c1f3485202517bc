# SPDX-License-Identifier: Apache-2.0
"""Merging two states equals attention over the keys of both."""

import itertools
import math

import pytest
import ringattn
import torch
from _numerics import measure, poisoned_memory
from ringattn import reference

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def states(device: torch.device, dtype: torch.dtype = torch.float32, rows: int = 21):
    generator = torch.Generator().manual_seed(5)
    outs = torch.randn(2, 2, rows, 3, 16, generator=generator, dtype=torch.float64)
    lses = torch.randn(2, 2, 3, rows, generator=generator, dtype=torch.float64) * 3
    return tuple(x.to(device, dtype) for x in (outs[0], lses[0], outs[1], lses[1]))


@pytest.mark.parametrize(("out_dtype", "lse_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_any_floating_dtypes_give_a_wide_state(device, out_dtype, lse_dtype):
    out_a, _, out_b, _ = states(device, out_dtype)
    _, lse_a, _, lse_b = states(device, lse_dtype)
    with poisoned_memory():
        out, lse = ringattn.merge_states(out_a, lse_a, out_b, lse_b)
    wide = torch.float64 if torch.float64 in (out_dtype, lse_dtype) else torch.float32
    assert out.dtype == lse.dtype == wide
    expected = reference.merge_states(*(x.double() for x in (out_a, lse_a, out_b, lse_b)))
    tolerance = 1e-14 if wide == torch.float64 else 2e-6
    assert measure(out, expected[0]).max < tolerance
    assert measure(lse, expected[1]).max < tolerance


def test_inputs_are_left_as_they_are(device):
    given = states(device)
    before = [x.clone() for x in given]
    ringattn.merge_states(*given)
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_the_empty_state_is_neutral_to_the_bit(device):
    out, lse, _, _ = states(device)
    nothing = torch.zeros_like(out), torch.full_like(lse, -math.inf)
    for merged in (
        ringattn.merge_states(out, lse, *nothing),
        ringattn.merge_states(*nothing, out, lse),
    ):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    out, lse = ringattn.merge_states(*nothing, *nothing)
    assert (out == 0).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("held", [math.nan, math.inf])
@pytest.mark.parametrize("head_dim", [16, 13])  # vectors of four, single elements
def test_an_empty_state_is_neutral_whatever_its_out_holds(device, held, head_dim):
    out_a, lse_a, out_b, lse_b = (x[..., :head_dim] if x.dim() == 4 else x for x in states(device))
    rows = torch.zeros_like(lse_a, dtype=torch.bool)
    rows[:, :, ::3] = True
    empty = lse_b.masked_fill(rows, -math.inf)
    junk = out_b.masked_fill(rows.transpose(1, 2).unsqueeze(-1), held)
    zero = out_b.masked_fill(rows.transpose(1, 2).unsqueeze(-1), 0.0)
    for one, other in (
        (ringattn.merge_states(out_a, lse_a, junk, empty), (out_a, lse_a, zero, empty)),
        (ringattn.merge_states(junk, empty, out_a, lse_a), (zero, empty, out_a, lse_a)),
        (ringattn.merge_states(junk, empty, junk, empty), (zero, empty, zero, empty)),
    ):
        expected = ringattn.merge_states(*other)
        assert torch.equal(one[0], expected[0]) and torch.equal(one[1], expected[1])
        assert torch.isfinite(one[0]).all()


def test_merging_does_not_overflow(device):
    out_a, lse_a, out_b, lse_b = states(device)
    out, lse = ringattn.merge_states(out_a, lse_a + 5000, out_b, lse_b + 5000)
    assert torch.isfinite(out).all()
    expected, _ = ringattn.merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-3)  # an ulp of 5000 is 5e-4
    out, lse = ringattn.merge_states(out_a, lse_a, out_b, lse_b - 5000)
    assert torch.equal(out, out_a) and torch.equal(lse, lse_a)


def test_nan_stays_in_its_row(device):
    out_a, lse_a, out_b, lse_b = states(device)
    lse_b[1, 2, 4] = math.nan
    out, lse = ringattn.merge_states(out_a, lse_a, out_b, lse_b)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[1, 2, 4] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected.transpose(1, 2).unsqueeze(-1).expand(out.shape))


def test_any_memory_layout(device):
    given = states(device)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in given]
    for one, other in zip(
        ringattn.merge_states(*strided), ringattn.merge_states(*given), strict=True
    ):
        assert torch.equal(one, other)


def test_no_rows(device):
    out, lse = ringattn.merge_states(*states(device, rows=0))
    assert out.shape == (2, 0, 3, 16) and lse.shape == (2, 3, 0)


def test_the_operator_is_well_behaved(device):
    torch.library.opcheck(torch.ops.ringattn.merge_states_, states(device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: (s[0].long(), *s[1:]), "out_a must have a floating dtype, got torch.int64"),
        (lambda s: (s[0].to("meta"), *s[1:]), "out_a must be on a device with a kernel"),
        (lambda s: (s[0][0], *s[1:]), r"out_a must be \[B, S, H, D\], got shape \["),
        (lambda s: (s[0][:, 1:], *s[1:]), r"lse_a must have shape \[B, H, S\], \[2, 3, 20\]"),
        (lambda s: (*s[:2], s[2][:, 1:], s[3]), "out_b must have the shape of out_a"),
        (lambda s: (*s[:3], s[3][:, :2]), "lse_b must have the shape of lse_a"),
        (lambda s: (s[0], s[1].transpose(1, 2), *s[2:]), "lse_a must have shape"),
        (lambda s: (s[0].requires_grad_(), *s[1:]), "out_a must not require grad"),
        (lambda s: ("out", *s[1:]), "out_a must be a tensor, got str"),
    ],
)
def test_wrong_arguments_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        ringattn.merge_states(*change(states(torch.device("cpu"))))
