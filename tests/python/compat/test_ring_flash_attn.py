# SPDX-License-Identifier: Apache-2.0
"""ringattn.compat.ring_flash_attn: rows as that package lays them out, attention as on one
device."""

import inspect
import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from _distributed import this
from ringattn import reference
from ringattn.compat import ring_flash_attn

DENSE = ("ring", "zigzag_ring", "stripe")
VARLEN = ("ring", "zigzag_ring", "llama3")
FORMS = ("func", "kvpacked_func", "qkvpacked_func")
DOCUMENTS = (0, 24, 24, 120, 168, 192)  # each a multiple of 2W, one of them empty


def rows_of(layout: str, seq_len: int, size: int) -> list[torch.Tensor]:
    """Positions that each rank has, as the package's own tests cut them."""
    positions = torch.arange(seq_len)
    if layout == "ring" or layout == "llama3":
        return list(positions.chunk(size))
    if layout == "stripe":
        return [positions[rank::size] for rank in range(size)]
    chunks = positions.chunk(2 * size)
    return [torch.cat((chunks[rank], chunks[2 * size - 1 - rank])) for rank in range(size)]


def rows_of_documents(layout: str, cu_seqlens: tuple[int, ...], size: int) -> list[torch.Tensor]:
    """Likewise, each document cut by itself."""
    if layout == "llama3":
        return rows_of(layout, cu_seqlens[-1], size)
    owned: list[list[torch.Tensor]] = [[] for _ in range(size)]
    for start, stop in pairwise(cu_seqlens):
        if start == stop:
            continue
        for rank, rows in enumerate(rows_of(layout, stop - start, size)):
            owned[rank].append(start + rows)
    return [torch.cat(rows) for rows in owned]


def tensors(seq_len: int, num_kv_heads: int) -> list[torch.Tensor]:
    """q, k, v of the whole sequence, [B, S, H, D], float64, and the gradient of out."""
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(2, seq_len, heads, 16, generator=generator, dtype=torch.float64)
        for heads in (4, num_kv_heads, num_kv_heads, 4)
    ]


def on_one_device(whole: list[torch.Tensor], scale: float, *mask: Any) -> list[torch.Tensor]:
    """out, lse and the gradients of q, k and v, by a mask of all pairs."""
    *inputs, gradient = whole
    inputs = [x.clone().requires_grad_() for x in inputs]
    positions = torch.arange(gradient.size(1))
    visible = reference.visible_keys(positions, positions, *mask)
    out, lse = reference.masked_attention(*inputs, visible, scale)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, gradient)]


def compare(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-9)


def call(
    name: str,
    form: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *args: Any,
    **named: Any,
) -> Any:
    function = getattr(ring_flash_attn, f"{name}_{form}")
    if form == "func":
        return function(q, k, v, *args, **named)
    if form == "kvpacked_func":
        return function(q, torch.stack((k, v), -3), *args, **named)
    return function(torch.stack((q, k, v), -3), *args, **named)


def dense(layout: str, form: str, causal: bool, window: tuple[int, int]) -> None:
    rank, size = this().rank, this().world_size
    num_kv_heads = 4 if form == "qkvpacked_func" else 2
    whole = tensors(24 * size, num_kv_heads)
    expected, expected_lse, *gradients = on_one_device(whole, 0.3, causal, window)
    rows = rows_of(layout, 24 * size, size)[rank]
    name = f"{layout}_flash_attn"
    own = [x[:, rows].requires_grad_() for x in whole[:3]]
    out, lse, none = call(name, form, *own, 0.0, 0.3, causal, window, None, False, True, group=None)
    assert none is None and lse.shape == (2, 4, 24)
    compare(out, expected[:, rows])
    compare(lse, expected_lse[:, :, rows])
    for mine, right in zip(
        torch.autograd.grad(out, own, whole[3][:, rows]), gradients, strict=True
    ):
        compare(mine, right[:, rows])
    alone = call(name, form, *own, softmax_scale=0.3, causal=causal, window_size=window)
    assert torch.equal(alone, out)


def every_dense_call(layout: str) -> None:
    for form in FORMS:
        for causal in (True, False):
            for window in ((-1, -1), (30, 4)):
                dense(layout, form, causal, window)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", DENSE)
def test_a_sequence_is_attended_as_on_one_device(rank_pool, layout, size):
    rank_pool(size).run(every_dense_call, layout)


def varlen_arguments(layout: str, causal: bool, rank: int, size: int) -> tuple[Any, ...]:
    """What comes behind q, k and v."""
    whole = torch.tensor(DOCUMENTS, dtype=torch.int32)
    if layout != "llama3":
        share = whole // size
        return share, int((share[1:] - share[:-1]).max())
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    *prepared, local_k_slice = prepare(whole, causal, rank, size)
    return *prepared, 1, local_k_slice


def varlen(layout: str, form: str, causal: bool, window: tuple[int, int]) -> None:
    rank, size = this().rank, this().world_size
    whole = tensors(DOCUMENTS[-1], 4 if form == "qkvpacked_func" else 2)
    whole = [x[:1] for x in whole]
    expected, expected_lse, *gradients = on_one_device(whole, 0.25, causal, window, DOCUMENTS)
    rows = rows_of_documents(layout, DOCUMENTS, size)[rank]
    arguments = varlen_arguments(layout, causal, rank, size)
    name = f"{layout}_flash_attn_varlen"
    options = {"causal": causal, "window_size": window, "return_attn_probs": True}
    for _ in range(2):  # the second call knows what the first one exchanged
        own = [x[0, rows].requires_grad_() for x in whole[:3]]
        out, lse, none = call(name, form, *own, *arguments, **options)
        assert none is None and lse.shape == (4, len(rows))
        compare(out, expected[0, rows])
        compare(lse, expected_lse[0, :, rows])
        for mine, right in zip(
            torch.autograd.grad(out, own, whole[3][0, rows]), gradients, strict=True
        ):
            compare(mine, right[0, rows])


def every_varlen_call(layout: str) -> None:
    for form in FORMS:
        for causal in (True, False):
            for window in ((-1, -1), (9, 2)):
                varlen(layout, form, causal, window)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", VARLEN)
def test_packed_documents_are_attended_as_on_one_device(rank_pool, layout, size):
    rank_pool(size).run(every_varlen_call, layout)


def test_documents_are_prepared_for_each_rank():
    prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
    whole = torch.tensor([0, 3, 10, 12], dtype=torch.int32)

    def values(causal: bool, rank: int) -> list[Any]:
        q, k, *rest = prepare(whole, causal, rank, 3)
        assert q.dtype == k.dtype == torch.int32
        return [q.tolist(), k.tolist(), *rest]

    assert values(True, 0) == [[0, 3, 4], [0, 3, 4], 3, 3, slice(0, 4)]
    assert values(True, 1) == [[0, 4], [0, 5], 4, 5, slice(3, 8)]
    assert values(True, 2) == [[0, 2, 4], [0, 7, 9], 2, 7, slice(3, 12)]
    assert values(False, 0) == [[0, 3, 4], [0, 3, 10], 3, 7, slice(0, 10)]
    assert values(False, 1) == [[0, 4], [0, 7], 4, 7, slice(3, 10)]
    with pytest.raises(ValueError, match="must end with a multiple of the 5 ranks, got 12"):
        prepare(whole, True, 0, 5)
    with pytest.raises(ValueError, match=r"rank must lie in \[0, 3\), got 3"):
        prepare(whole, True, 3, 3)


def test_every_name_has_the_arguments_of_the_package():
    options = "dropout_p softmax_scale causal window_size alibi_slopes deterministic"
    tail = [*options.split(), "return_attn_probs", "group"]
    defaults = [0.0, None, False, (-1, -1), None, False, False, None]
    llama3 = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k heads_k_stride local_k_slice"
    own = {"": [], "_varlen": ["cu_seqlens", "max_seqlen"]}
    families = [(f"{layout}_flash_attn", own[""]) for layout in DENSE]
    families += [(f"{layout}_flash_attn_varlen", own["_varlen"]) for layout in VARLEN[:2]]
    families += [("llama3_flash_attn_varlen", llama3.split())]
    operands = {"func": ["q", "k", "v"], "kvpacked_func": ["q", "kv"], "qkvpacked_func": ["qkv"]}
    for family, behind in families:
        for form, first in operands.items():
            name = f"{family}_{form}"
            function = getattr(ring_flash_attn, name)
            parameters = inspect.signature(function).parameters
            assert list(parameters) == [*first, *behind, *tail], name
            assert [parameters[x].default for x in tail] == defaults
            assert (
                function.__name__ == name and name in ring_flash_attn.__all__ and function.__doc__
            )
    from ringattn.compat.ring_flash_attn.adapters import hf_adapter

    assert ring_flash_attn.substitute_hf_flash_attn is hf_adapter.substitute_hf_flash_attn
    assert list(inspect.signature(hf_adapter.substitute_hf_flash_attn).parameters) == [
        "process_group",
        "heads_k_stride",
    ]
    assert list(inspect.signature(hf_adapter.update_ring_flash_attn_params).parameters) == [
        "cu_seqlens",
        "process_group",
    ]


def refuse(what: str) -> str:
    """One rank gives what is refused; all get an error, and the group works on."""
    rank, size = this().rank, this().world_size
    rows, options, q = 8, {}, torch.zeros(1, 8, 2, 16)
    culprit = rank == size - 1
    if what == "dropout_p":
        options = {"dropout_p": 0.1}
    elif what == "alibi_slopes":
        options = {"alibi_slopes": torch.ones(2)}
    elif what == "deterministic":
        q = q.requires_grad_()
        options = {"deterministic": True}
    elif what == "odd":
        rows = 7
    q, k, v = (x[:, :rows] for x in (q, torch.zeros(1, 8, 2, 16), torch.zeros(1, 8, 2, 16)))
    with pytest.raises(ValueError) as error:
        if what == "kv":
            packed = torch.zeros(1, 8, 3 if culprit else 2, 2, 16)
            ring_flash_attn.zigzag_ring_flash_attn_kvpacked_func(q, packed, causal=True)
        elif what == "boundaries":
            share = torch.tensor([0, 4, 7 if culprit else 8])
            ring_flash_attn.ring_flash_attn_varlen_func(q[0], k[0], v[0], share, 4, causal=True)
        elif what == "odd document":
            share = torch.tensor([0, 3, 8] if culprit else [0, 4, 8])
            ring_flash_attn.zigzag_ring_flash_attn_varlen_func(q[0], k[0], v[0], share, 5)
        elif what == "another rank's":
            prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
            whole = torch.tensor([0, 5, 8 * size])
            *prepared, local = prepare(whole, True, 0 if culprit else rank, size)
            ring_flash_attn.llama3_flash_attn_varlen_func(
                q[0], k[0], v[0], *prepared, 1, local, causal=True
            )
        else:
            given = options if culprit or what == "odd" else {}
            with torch.set_grad_enabled(culprit):
                ring_flash_attn.zigzag_ring_flash_attn_func(q, k, v, causal=True, **given)
    with torch.no_grad():
        x = torch.ones(1, 4, 2, 16)
        assert torch.equal(ring_flash_attn.ring_flash_attn_func(x, x, x), x)
    return str(error.value)


REFUSED = {
    "dropout_p": r"dropout_p must be left out \(attention has no dropout here\), got 0.1",
    "alibi_slopes": "alibi_slopes must be left out .*, got Tensor",
    "deterministic": "deterministic must be False unless torch.use_deterministic_algorithms",
    "odd": "q must have an even number of rows, a chunk of the head and one of the tail, got 7",
    "kv": r"kv must be \[\.\.\., 2, H, D\], got shape \[1, 8, 3, 2, 16\]",
    "boundaries": r"cu_seqlens must be \[0, \.\.\., 8\], the boundaries .*, got \[0, 4, 7\]",
    "odd document": "cu_seqlens must give each document an even number of rows, .* got 3 from 0",
    "another rank's": "those that llama3_flash_attn_prepare_cu_seqlens returns for rank 1",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_on_all_ranks(rank_pool, what):
    for message in rank_pool(2).run(refuse, what):
        assert re.search(REFUSED[what], message), message


@pytest.mark.parametrize("layout", DENSE)
def test_calls_compile_without_graph_breaks(layout):
    torch.compiler.reset()  # one function is compiled for each form: the number is limited
    x = torch.randn(1, 8, 2, 16, requires_grad=True)
    for form in FORMS:
        name = f"{layout}_flash_attn"

        def attend(x, name=name, form=form):
            return call(name, form, x, x, x, causal=True, group="single")

        compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
        (expected,) = torch.autograd.grad(attend(x).square().sum(), x)
        (actual,) = torch.autograd.grad(compiled(x).square().sum(), x)
        assert torch.equal(actual, expected)


def test_deterministic_calls_are_served_where_they_are():
    q = torch.ones(1, 4, 2, 16)
    options = {"deterministic": True, "group": "single"}
    expected = ring_flash_attn.ring_flash_attn_func(q, q, q, group="single")
    assert torch.equal(ring_flash_attn.ring_flash_attn_func(q, q, q, **options), expected)
    q.requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        ring_flash_attn.ring_flash_attn_func(q, q, q, **options).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert q.grad.isfinite().all()
