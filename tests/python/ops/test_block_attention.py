# SPDX-License-Identifier: Apache-2.0
"""One block of attention on one device: any shape, dtype, diagonal and memory layout."""

import math
import weakref

import pytest
import ringattn
import torch
from _numerics import check_attention, poisoned_memory
from ringattn import reference
from torch.utils.flop_counter import FlopCounterMode

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def inputs(
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    num_queries: int = 33,
    num_keys: int = 47,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(batch, num_queries, num_heads, head_dim, generator=generator)
    k = torch.randn(batch, num_keys, num_kv_heads, head_dim, generator=generator)
    v = torch.randn(batch, num_keys, num_kv_heads, head_dim, generator=generator)
    return tuple(x.to(device, dtype) for x in (q, k, v))


def check(q, k, v, diagonal=None, scale=None, what=""):
    with poisoned_memory():
        out, lse = ringattn.block_attention(q, k, v, scale=scale, diagonal=diagonal)
    return check_attention(out, lse, q, k, v, diagonal=diagonal, scale=scale, what=what)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 72, 128, 256])
@pytest.mark.parametrize("diagonal", [None, 0])
def test_every_dtype_and_head_dimension(device, dtype, head_dim, diagonal):
    check(*inputs(device, dtype, head_dim=head_dim), diagonal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (4, 4), (6, 3), (8, 1), (12, 4)])
def test_key_value_heads_are_shared_by_groups_of_query_heads(
    device, dtype, num_heads, num_kv_heads
):
    check(*inputs(device, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads), 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("diagonal", [-100, -33, -32, -5, -1, 0, 1, 13, 14, 45, 46, 47, 100, None])
def test_every_diagonal_of_a_rectangle(device, dtype, diagonal):
    check(*inputs(device, dtype), diagonal)


@pytest.mark.parametrize("num_queries", [0, 1, 63, 64, 65, 130, 257])
@pytest.mark.parametrize("num_keys", [0, 1, 64, 127, 129, 300])
def test_every_number_of_rows(device, num_queries, num_keys):
    q, k, v = inputs(device, num_queries=num_queries, num_keys=num_keys)
    check(q, k, v)
    check(q, k, v, diagonal=num_keys - num_queries)
    if device.type == "cuda":
        check(q.bfloat16(), k.bfloat16(), v.bfloat16(), diagonal=0)


def test_no_batch_is_no_rows(device):
    check(*inputs(device, batch=0))


def test_a_query_that_sees_no_key_has_out_0_and_lse_minus_infinity(device):
    q, k, v = inputs(device)
    out, lse = ringattn.block_attention(q, k, v, diagonal=-10)
    assert (out[:, :10] == 0).all() and (lse[:, :, :10] == -math.inf).all()
    assert torch.isfinite(lse[:, :, 10:]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.0, 1.0, -0.125, 0.3])
def test_any_finite_scale(device, dtype, scale):
    check(*inputs(device, dtype), 0, scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_far_above_the_range_of_the_exponential(device, dtype):
    q, k, v = inputs(device, dtype)
    q = q * 64
    out, lse = ringattn.block_attention(q, k, v, diagonal=0, scale=1.0)
    _, expected_lse = reference.attention(q.double(), k.double(), v.double(), 0, 1.0)
    assert expected_lse.max() > 1000
    assert torch.isfinite(out).all()
    tolerance = 1e-10 if dtype == torch.float64 else 2e-5 * float(expected_lse.abs().max())
    assert (lse.double() - expected_lse).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("powers", [4.0, 12.0, 17.0, 400.0])
def test_scores_that_rise_from_tile_to_tile(device, dtype, head_dim, powers):
    """By so many powers of two for every 64 keys, towards the first ones, which kernels come to
    last; for all rows, or for one whose neighbours see nothing of it."""
    num_keys = 700
    steps = (num_keys - 1 - torch.arange(num_keys)) // 64
    for rows in (slice(None), slice(37, 38)):
        q, k, v = inputs(
            device, torch.float32, num_queries=300, num_keys=num_keys, head_dim=head_dim
        )
        q[..., 0] = 0.0
        q[:, rows, :, 0] = 8.0
        k[..., 0] = (steps * powers * math.log(2) * math.sqrt(head_dim) / 8).to(device)[:, None]
        q, k, v = (x.to(dtype) for x in (q, k, v))
        check(q, k, v, what=f"rows {rows}")
        check(q, k, v, diagonal=400, what=f"rows {rows}, causal")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_bits_of_a_row_do_not_depend_on_other_rows(device, dtype, head_dim):
    q, k, v = inputs(device, dtype, num_queries=140, num_keys=700, head_dim=head_dim)
    others = torch.arange(140) % 9 != 0
    changed = q.clone()
    changed[:, others] *= 30  # scores that rise from tile to tile
    results = [ringattn.block_attention(x, k, v, diagonal=600) for x in (q, changed)]
    for one, other in zip(*results, strict=True):
        rows = (slice(None), ~others) if one.dim() == 4 else (slice(None), slice(None), ~others)
        assert torch.equal(one[rows], other[rows])
    assert not torch.equal(results[0][0], results[1][0])


def packed(x: torch.Tensor) -> torch.Tensor:
    """The middle of three tensors that lie beside each other, as a fused projection leaves them."""
    return torch.stack([torch.full_like(x, math.nan), x, torch.full_like(x, math.nan)], 3)[
        :, :, :, 1
    ]


def heads_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def dim_first(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(1, 3).contiguous().transpose(1, 3)


def misaligned(x: torch.Tensor) -> torch.Tensor:
    poison = math.nan if x.is_floating_point() else 0
    memory = torch.full((x.numel() + 1,), poison, dtype=x.dtype, device=x.device)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def expanded(x: torch.Tensor) -> torch.Tensor:
    return x[:1].expand(x.shape)


def of_one_head(x: torch.Tensor) -> torch.Tensor:
    return x[:, :, :1].expand(x.shape)


LAYOUTS = [packed, heads_first, dim_first, misaligned, expanded, of_one_head]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("arrange", LAYOUTS)
@pytest.mark.parametrize("num_keys", [47, 512])  # few keys are not for the Hopper kernels
def test_any_memory_layout(device, dtype, arrange, num_keys):
    given = inputs(device, dtype, num_keys=num_keys, num_queries=num_keys - 14)
    check(*(arrange(x) for x in given), 0, what=arrange.__name__)


def test_a_table_at_any_address(device):
    q, k, v = inputs(device, torch.bfloat16)
    ends = torch.arange(33, dtype=torch.int32, device=device)
    table = torch.stack([ends // 2, ends + 1], 1)
    for one, other in zip(
        ringattn.block_attention(q, k, v, key_ranges=misaligned(table)),
        ringattn.block_attention(q, k, v, key_ranges=table),
        strict=True,
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_inputs_give_the_same_bits(device, dtype):
    q, k, v = inputs(device, dtype, num_queries=200, num_keys=300)
    first = ringattn.block_attention(q, k, v, diagonal=50)
    second = ringattn.block_attention(q.clone(), k.clone(), v.clone(), diagonal=50)
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_an_error_keeps_no_tensor_alive(device):
    q, k, v = inputs(device, torch.float32)
    memory = weakref.ref(q)
    try:
        ringattn.block_attention(q, k, v[:, 1:])
    except ValueError:
        pass
    else:
        pytest.fail("was not refused")
    del q
    assert memory() is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [0, 9, 32])
def test_nan_in_a_query_reaches_that_row_only(device, dtype, row):
    q, k, v = inputs(device, dtype)
    q[1, row, 2, 5] = math.nan
    out, lse = ringattn.block_attention(q, k, v, diagonal=3)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[1, 2, row] = True
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected.transpose(1, 2).unsqueeze(-1).expand(out.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row", [0, 9, 31])
def test_nan_in_a_key_reaches_the_rows_that_see_it(device, dtype, row):
    q, k, v = inputs(device, dtype)
    k[0, row, 1, 7] = math.nan
    out, lse = ringattn.block_attention(q, k, v, diagonal=0)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[0, 2:, row:] = True  # the query heads of key/value head 1
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected.transpose(1, 2).unsqueeze(-1).expand(out.shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("step", [40, 200])
def test_nan_in_a_value_reaches_no_row_that_sees_keys_far_from_it_alone(device, dtype, step):
    q, k, v = inputs(device, dtype, num_queries=64, num_keys=64 * step)
    at = 60 * step
    v[:, at] = math.nan
    ends = step * torch.arange(1, 65, dtype=torch.int32, device=device)
    ranges = torch.stack([torch.zeros_like(ends), ends], 1)
    out, _ = ringattn.block_attention(q, k, v, key_ranges=ranges)
    nan = out.isnan().flatten(2).any(2)
    assert nan[:, ends > at].all()
    assert not nan[:, ends <= at - 512].any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_keys", [1, 2, 7, 17])
@pytest.mark.parametrize("diagonal", [None, 0])
def test_nan_is_not_lost_among_few_keys(device, dtype, num_keys, diagonal):
    q, k, v = inputs(device, dtype, num_queries=num_keys, num_keys=num_keys)
    row = num_keys - 1
    q[0, row, 1] = math.nan
    k[1, 0, 0] = math.nan
    out, lse = ringattn.block_attention(q, k, v, diagonal=diagonal)
    expected = torch.zeros_like(lse, dtype=torch.bool)
    expected[0, 1, row] = True
    expected[1, :2] = True  # every row sees the first key
    assert torch.equal(lse.isnan(), expected)
    assert torch.equal(out.isnan(), expected.transpose(1, 2).unsqueeze(-1).expand(out.shape))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_in_a_value_reaches_at_most_its_diagonal_tile(device, dtype):
    q, k, v = inputs(device, dtype, num_queries=1100, num_keys=1100, batch=1)
    v[0, 700, 1] = math.nan
    out, lse = ringattn.block_attention(q, k, v, diagonal=0)
    assert not lse.isnan().any()
    assert out[:, 700:, 2:].isnan().all()
    assert not out[:, : 700 - 512].isnan().any() and not out[:, :, :2].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_lost", [1, 10, 32, 600])
@pytest.mark.parametrize("scale", [0.25, -0.25])
def test_keys_whose_scores_overflow_to_minus_infinity_weigh_nothing(dtype, num_lost, scale):
    q, k, v = inputs(torch.device("cpu"), dtype, num_queries=40, num_keys=num_lost + 40)
    q = q.abs() + 1
    k[:, :num_lost] = -torch.finfo(dtype).max * math.copysign(1, scale)
    for diagonal in (None, 0, num_lost, num_lost + 3, -2):
        first = ringattn.block_attention(
            q, k[:, :num_lost], v[:, :num_lost], scale=scale, diagonal=diagonal
        )
        assert (first[1] == -math.inf).all() and (first[0] == 0).all()
        rest = None if diagonal is None else diagonal - num_lost
        expected = ringattn.block_attention(
            q, k[:, num_lost:], v[:, num_lost:], scale=scale, diagonal=rest
        )
        merged = ringattn.merge_states(*first, *expected)
        whole = ringattn.block_attention(q, k, v, scale=scale, diagonal=diagonal)
        tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}[dtype]
        for state in (merged, whole):
            for got, wanted in zip(state, expected, strict=True):
                torch.testing.assert_close(
                    got, wanted.to(got.dtype), atol=tolerance, rtol=tolerance
                )


@pytest.mark.parametrize("num_keys", [3, 40])
def test_rows_without_scores_stand_beside_rows_of_zeros_and_nan(num_keys):
    q, k, v = inputs(torch.device("cpu"), num_queries=num_keys, num_keys=num_keys)
    q = q.abs() + 1
    k[0, :2] = -math.inf
    k[1, 0] = 0  # a score of 0, the only one of its row: lse 0 as it stands
    q[1, 0, 1, 0] = math.nan
    out, lse = ringattn.block_attention(q, k, v, diagonal=0)
    assert (lse[0, :, :2] == -math.inf).all() and (out[0, :2] == 0).all()
    assert torch.isfinite(lse[0, :, 2:]).all()
    assert (lse[1, [0, 2, 3], 0] == 0).all() and lse[1, 1, 0].isnan()
    torch.testing.assert_close(out[1, 0, 2:], v[1, 0, 1].expand(2, -1))
    assert out[1, 0, 1].isnan().all()


def empty_state(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.size(0), q.size(2), q.size(1)), -math.inf, dtype=dtype, device=q.device)
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_folded_into_a_state_equal_one_block(device, dtype):
    q, k, v = inputs(device, dtype)
    scale = 1 / math.sqrt(q.size(-1))
    out, lse = empty_state(q)
    begin = 0
    for size in (5, 0, 30, 12):
        keys, values = (x[:, begin : begin + size] for x in (k, v))
        # Key column j of this block is column begin + j of all.
        torch.ops.ringattn.block_attention_(out, lse, q, keys, values, scale, 10 - begin)
        begin += size
    check_attention(out.to(dtype), lse, q, k, v, diagonal=10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("held", [math.nan, math.inf])
def test_an_empty_state_that_is_folded_into_may_hold_anything(device, dtype, head_dim, held):
    q, k, v = inputs(device, dtype, head_dim=head_dim)
    scale = 1 / math.sqrt(head_dim)
    states = []
    for what in (0.0, held):
        out, lse = empty_state(q)
        torch.ops.ringattn.block_attention_(out, lse, q, k[:, :9], v[:, :9], scale, None)
        out[:, ::2] = what  # every other row is empty again
        lse[:, :, ::2] = -math.inf
        torch.ops.ringattn.block_attention_(out, lse, q, k[:, 9:], v[:, 9:], scale, None)
        states.append((out, lse))
    for one, other in zip(*states, strict=True):
        assert torch.isfinite(one).all() and torch.equal(one, other)


def test_a_state_of_part_of_the_rows_may_be_folded_into(device):
    q, k, v = inputs(device)
    out, lse = empty_state(q)
    rows = slice(11, 33)
    torch.ops.ringattn.block_attention_(
        out[:, rows], lse[:, :, rows], q[:, rows], k, v, 0.125, None
    )
    check_attention(out[:, rows], lse[:, :, rows], q[:, rows], k, v, scale=0.125)
    assert (out[:, :11] == 0).all() and (lse[:, :, :11] == -math.inf).all()


def test_a_state_that_overlaps_itself_is_refused(device):
    q, k, v = inputs(device)
    out, lse = empty_state(q)
    wrong = {"out": (out[:, :1].expand(q.shape), lse), "lse": (out, lse[:1].expand(lse.shape))}
    for name, state in wrong.items():
        message = rf"{name} must not overlap itself, got strides \[.*0"
        with pytest.raises(RuntimeError, match=message):
            torch.ops.ringattn.block_attention_(*state, q, k, v, 0.125, None)
        with pytest.raises(RuntimeError, match=message):
            torch.ops.ringattn.merge_states_(*state, out, lse)


def test_a_state_that_was_saved_for_a_backward_is_missed_there(device):
    """Autograd knows by its version that it has been written to."""
    q, k, v = inputs(device)
    out, lse = empty_state(q)
    weight = torch.ones_like(out, requires_grad=True)
    product = weight * out
    versions = out._version, lse._version
    torch.ops.ringattn.block_attention_(out, lse, q, k, v, 0.125, None)
    assert (out._version, lse._version) == tuple(version + 1 for version in versions)
    other = torch.zeros_like(out), torch.zeros_like(lse)
    torch.ops.ringattn.merge_states_(out, lse, *other)
    assert (out._version, lse._version) == tuple(version + 2 for version in versions)
    assert [x._version for x in (q, k, v, *other)] == [0] * 5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("diagonal", [None, 0])
def test_operators_are_well_behaved(device, dtype, diagonal):
    q, k, v = inputs(device, dtype)
    torch.library.opcheck(torch.ops.ringattn.block_attention, (q, k, v, 0.1, diagonal))
    torch.library.opcheck(
        torch.ops.ringattn.block_attention_, (*empty_state(q), q, k, v, 0.1, diagonal)
    )


@pytest.mark.parametrize("diagonal", [None, 0, 7, -7, 1000, -1000])
def test_flops_are_four_per_visible_pair_and_dimension(device, diagonal):
    q, k, v = inputs(device)
    visible = torch.ones(33, 47).tril(1000 if diagonal is None else diagonal).sum().item()
    with FlopCounterMode(display=False) as counter:
        ringattn.block_attention(q, k, v, diagonal=diagonal)
    assert counter.get_total_flops() == 4 * 64 * 4 * 2 * visible
    with FlopCounterMode(display=False) as counter:
        torch.ops.ringattn.block_attention_(*empty_state(q), q, k, v, 0.1, diagonal)
    assert counter.get_total_flops() == 4 * 64 * 4 * 2 * visible


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_runs_in_its_dtype(device, dtype):
    q, k, v = inputs(device)
    with torch.autocast(device.type, dtype=dtype):
        out, lse = ringattn.block_attention(q, k, v, diagonal=0)
    assert out.dtype == dtype and lse.dtype == torch.float32
    halves = [x.to(dtype) for x in (q, k, v)]
    check_attention(out, lse, *halves, diagonal=0)
