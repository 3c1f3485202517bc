# SPDX-License-Identifier: Apache-2.0
"""Tensors of more than 2**31 elements: an offset in 32 bits would wrap, and a kernel would read and
write other rows."""

import pytest
import ringattn
import torch
from _numerics import TIMES_PYTORCH, check_attention, measure, sdpa
from ringattn import reference

TOKENS = 2**20 + 192
WINDOW = 256  # keys that a row sees, its own the last
SLICE = 3 * WINDOW
LAYOUTS = ("rows", "heads")  # the dimension after the batch in memory

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def memory() -> None:
    if torch.cuda.mem_get_info()[1] < 70e9:
        pytest.skip("needs a GPU with 70 GB of memory")


def normal(num_heads: int, head_dim: int, layout: str, seed: int) -> torch.Tensor:
    """``[1, TOKENS, num_heads, head_dim]`` in bfloat16."""
    torch.manual_seed(seed)
    outer = (TOKENS, num_heads) if layout == "rows" else (num_heads, TOKENS)
    x = torch.empty(1, *outer, head_dim, dtype=torch.bfloat16, device="cuda").normal_()
    assert x.numel() > 2**31
    return x if layout == "rows" else x.transpose(1, 2)


def window_table() -> torch.Tensor:
    rows = torch.arange(TOKENS, dtype=torch.int32, device="cuda")
    return torch.stack([(rows - WINDOW + 1).clamp_min_(0), rows + 1], dim=1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim", [128, 96])  # on Hopper: its own kernel, the portable one
def test_a_block_of_more_than_two_to_the_31_elements(head_dim: int, layout: str) -> None:
    heads = 2**31 // (2**20 * head_dim) + 1
    q, k, v, of_out = (normal(heads, head_dim, layout, seed) for seed in range(4))
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ringattn.block_attention(q, k, v, key_ranges=window_table())
    grads = torch.autograd.grad(out, (q, k, v), of_out)

    visible = torch.ones(SLICE, SLICE, dtype=torch.bool, device="cuda").tril().triu(1 - WINDOW)
    wraps = 2**31 // (heads * head_dim) - SLICE // 2
    for start in (0, wraps, TOKENS - SLICE):
        part = slice(start, start + SLICE)
        rows = slice(WINDOW if start > 0 else 0, None)  # whose keys are all in the part
        inputs = [x.detach()[:, part] for x in (q, k, v)]
        check_attention(
            out.detach()[:, part][:, rows],
            lse.detach()[:, :, part][:, :, rows],
            inputs[0][:, rows],
            *inputs[1:],
            visible=visible[rows],
            what=f"rows from {start}",
        )
        ended = start + SLICE == TOKENS
        keys = slice(rows.start, None if ended else 2 * WINDOW)  # whose rows are all in the part
        exact = [x.double().requires_grad_() for x in inputs]
        pytorch = [x.clone().requires_grad_() for x in inputs]
        expected = torch.autograd.grad(
            reference.masked_attention(*exact, visible, head_dim**-0.5)[0],
            exact,
            of_out[:, part].double(),
        )
        others = torch.autograd.grad(
            sdpa(*pytorch, visible, head_dim**-0.5), pytorch, of_out[:, part]
        )
        for name, mine, right, other in zip("qkv", grads, expected, others, strict=True):
            of = rows if name == "q" else keys
            error = measure(mine[:, part][:, of], right[:, of])
            allowed = TIMES_PYTORCH * measure(other[:, of], right[:, of]).max
            assert error.max <= allowed, f"d{name} from {start}: at most {allowed}, got {error}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_decode_over_more_than_two_to_the_31_elements(layout: str) -> None:
    heads, head_dim = 17, 128
    k, v = (normal(heads, head_dim, layout, seed) for seed in range(2))
    q = torch.randn(1, 1, 2 * heads, head_dim, device="cuda").bfloat16()
    begins = torch.tensor([TOKENS - WINDOW], device="cuda")
    out, lse = ringattn.decode_attention(q, k, v, key_begins=begins, return_lse=True)
    check_attention(out, lse, q, k[:, -WINDOW:], v[:, -WINDOW:], what="the last keys")
    before = ringattn.decode_attention(q, k, v)
    k[:, -1, -1] = 100 * q[:, -1, -1]  # the last key has all of the last query head's weight
    after = ringattn.decode_attention(q, k, v)
    assert torch.equal(after[:, 0, -1], v[:, -1, -1])
    assert torch.equal(after[:, :, :-2], before[:, :, :-2])


def test_states_of_more_than_two_to_the_31_elements() -> None:
    torch.manual_seed(0)
    states = [torch.empty(1, TOKENS, 17, 128, device="cuda").normal_() for _ in range(2)]
    lses = [torch.zeros(1, 17, TOKENS, device="cuda") for _ in range(2)]
    out, lse = ringattn.merge_states(states[0], lses[0], states[1], lses[1])
    for part in (slice(0, SLICE), slice(-SLICE, None)):
        expected = sum(state[:, part].double() for state in states) / 2
        assert measure(out[:, part], expected).max < 1e-6
    assert torch.allclose(lse, torch.full_like(lse, 2.0).log())
