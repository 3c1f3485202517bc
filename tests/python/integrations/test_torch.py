# SPDX-License-Identifier: Apache-2.0
"""context_parallel under torch's signature: rows, rerouted attention, restored buffers."""

import re
import warnings
from functools import partial
from typing import Any

import pytest
import ringattn
import torch
import torch.nn.functional as F
from _distributed import this
from ringattn.integrations import torch as adapter
from ringattn.integrations.torch import context_parallel
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.experimental._attention import context_parallel_unshard
from torch.utils.checkpoint import checkpoint

kept_reference = F.scaled_dot_product_attention


def mesh_of_all() -> DeviceMesh:
    return init_device_mesh(this().device.type, (this().world_size,))


def heads_first(seq_len: int, num_kv_heads: int = 2) -> list[torch.Tensor]:
    """q, k, v [B, H, S, D] of the whole sequence."""
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(2, heads, seq_len, 16, generator=generator, dtype=torch.float64)
        for heads in (4, num_kv_heads, num_kv_heads)
    ]


def attend_on_torchs_rows() -> None:
    """The rows are torch's own: its unshard puts out together."""
    size = this().world_size
    mesh = mesh_of_all()
    for causal in (True, False):
        q, k, v = heads_first(8 * size)
        options = {"is_causal": causal, "scale": 0.3, "enable_gqa": True}
        expected = F.scaled_dot_product_attention(q, k, v, **options)
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            assert q.shape == (2, 4, 8, 16)
            out = F.scaled_dot_product_attention(q, k, v, **options)
            operator = torch.ops.aten.scaled_dot_product_attention
            for other in (kept_reference, operator, operator.default):
                same = other(q, k, v, None, 0.0, causal, scale=0.3, enable_gqa=True)
                assert torch.equal(out, same)
        (whole,) = context_parallel_unshard(mesh, [out], [2])
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_attention_is_rerouted_on_torchs_own_rows(rank_pool, size):
    rank_pool(size).run(attend_on_torchs_rows)


def attend_on_other_rows(seq_len: int) -> list[torch.Tensor]:
    q, k, v = heads_first(seq_len)
    positions = torch.arange(seq_len)
    buffers, dims = [q, k, v, positions], [2, -2, 2, 0]
    with context_parallel(mesh_of_all(), buffers=buffers, buffer_seq_dims=dims):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return [out, positions.clone()]


@pytest.mark.parametrize(("size", "seq_len"), [(2, 7), (3, 13), (3, 2), (2, 6)])
def test_any_number_of_tokens_is_served(rank_pool, size, seq_len):
    results = rank_pool(size).run(attend_on_other_rows, seq_len)
    positions = torch.cat([rows for _, rows in results])
    assert sorted(positions.tolist()) == list(range(seq_len))
    assert all(abs(len(rows) - seq_len / size) < 1 for _, rows in results)
    whole = torch.empty(2, 4, seq_len, 16, dtype=torch.float64)
    for out, rows in results:
        whole[:, :, rows] = out
    expected = F.scaled_dot_product_attention(
        *heads_first(seq_len), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-10)


class Unexpected(BaseException):
    """Of the caller."""


def restore(error: BaseException | None) -> None:
    rank, size = this().rank, this().world_size
    batch = torch.arange(2 * (4 * size + 1)).view(2, -1)
    ids, labels = batch[:, :-1], batch[:, 1:]  # views of one memory
    kept = torch.arange(4 * size)
    before = [ids.clone(), labels.clone()]
    memory = ids.data_ptr(), labels.data_ptr()
    context = partial(context_parallel, mesh_of_all())  # as accelerate keeps it
    raised = None
    try:
        with context(
            buffers=[ids, labels, kept],
            buffer_seq_dims=[1, 1, 0],
            no_restore_buffers={kept},
        ):
            rows = [rank * 2, rank * 2 + 1, 4 * size - 2 * rank - 2, 4 * size - 2 * rank - 1]
            assert torch.equal(ids, before[0][:, rows]) and torch.equal(labels, ids + 1)
            ids += 100  # the caller's own affair, as the rows are
            if error is not None:
                raise error
    except BaseException as caught:
        raised = caught
    assert raised is error, "an exception must come out unchanged"
    assert torch.equal(ids, before[0]) and torch.equal(labels, before[1])
    assert (ids.data_ptr(), labels.data_ptr()) == memory
    assert torch.equal(kept, torch.tensor(rows)), "stays this rank's rows"
    x = torch.ones(1, 2, 3, 8)
    assert torch.equal(F.scaled_dot_product_attention(x, x, x), x), "attention is torch's again"


@pytest.mark.parametrize("error", [None, KeyError("x"), StopIteration(3), Unexpected()], ids=repr)
def test_buffers_are_restored_whatever_happens_inside(rank_pool, error):
    rank_pool(2).run(restore, error)


class Layer(nn.Module):
    """Attention as models of torch have it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv = nn.Linear(32, 96, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(
            2
        )


def train(seq_len: int, how: str) -> None:
    """Gradients summed over the ranks are those of one device."""
    mesh, model, plain = mesh_of_all(), Layer(), Layer()
    generator = torch.Generator().manual_seed(5)
    x, target = (
        torch.randn(2, seq_len, 32, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    F.mse_loss(plain(plain(x)), target).backward()
    local, wanted = x.clone(), target.clone()
    with context_parallel(
        mesh,
        buffers=[local, wanted],
        buffer_seq_dims=[1, 1],
        no_restore_buffers={local, wanted},
    ):
        hidden = model(local)
        if how == "checkpointed":
            out = checkpoint(model, hidden, use_reentrant=False)
        elif how == "reentrant":
            out = checkpoint(model, hidden, use_reentrant=True)
        else:
            out = model(hidden)
        loss = F.mse_loss(out, wanted, reduction="sum") / target.numel()
        if how != "after":
            loss.backward()
    if how == "after":
        loss.backward()
    ringattn.all_reduce_gradients(model, mesh)
    for mine, right in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, right.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("how", ["inside", "after", "checkpointed", "reentrant"])
def test_gradients_are_those_of_one_device(rank_pool, how):
    rank_pool(1).run(train, 8, how)
    rank_pool(2).run(train, 12, how)
    rank_pool(3).run(train, 11, how)


class Attention(nn.Module):
    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).relu()


def attend_compiled() -> None:
    """Compiled outside first, so that a graph of torch's own attention is there."""
    rank, size = this().rank, this().world_size
    module = torch.compile(Attention(), fullgraph=True, backend="aot_eager")
    q, k, v = heads_first(8 * size)
    whole = module(q, k, v)
    with context_parallel(mesh_of_all(), buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        out = module(q, k, v)
    rows = [*range(4 * rank, 4 * rank + 4), *range(8 * size - 4 * rank - 4, 8 * size - 4 * rank)]
    torch.testing.assert_close(out, whole[:, :, rows], rtol=0, atol=1e-10)
    torch.testing.assert_close(module(q, k, v), whole)


def test_compiled_code_is_rerouted_inside_alone(rank_pool):
    rank_pool(2).run(attend_compiled)


def first_compilation_inside() -> None:
    """What it asks for, which torch.compile asks for once in a process."""
    torch.overrides.get_testing_overrides.cache_clear()
    x = torch.zeros(2, 8)
    with context_parallel(mesh_of_all(), buffers=[x], buffer_seq_dims=[1]):
        functions = torch.overrides.get_testing_overrides()
        assert F.scaled_dot_product_attention not in functions
    assert F.scaled_dot_product_attention in functions


@pytest.mark.filterwarnings("ignore:context_parallel must")
def test_the_first_compilation_of_a_process_may_lie_inside(rank_pool):
    rank_pool(1).run(first_compilation_inside)


def contexts_without_attention() -> None:
    adapter._attention_seen = False
    mesh, x = mesh_of_all(), torch.zeros(2, 8)
    with (
        pytest.warns(UserWarning, match=r"got no call of it: other attention, .* rows alone"),
        context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]),
    ):
        x.softmax(1)
    q, k, v = heads_first(8, num_kv_heads=4)
    compiled = torch.compile(F.scaled_dot_product_attention, backend="eager", fullgraph=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            compiled(q, k, v)
        with context_parallel(mesh, buffers=[x], buffer_seq_dims=[1]):
            x.softmax(1)


def test_a_context_that_has_seen_no_attention_warns(rank_pool):
    rank_pool(2).run(contexts_without_attention)


def refuse(what: str) -> str:
    """The last rank gives what is refused; all get an error, and the group works on."""
    rank, size = this().rank, this().world_size
    culprit, mesh = rank == size - 1, mesh_of_all()
    q, k, v = heads_first(size if what == "short" else 4 * size, num_kv_heads=4)
    buffers: list[Any] = [q, k, v]
    num_rows = q.size(2)
    dims: list[Any] = [2, 2, 2]
    options: dict[str, Any] = {}
    attention: Any = F.scaled_dot_product_attention
    if culprit:
        if what == "attn_mask":
            options = {"attn_mask": torch.ones(4, 4, dtype=torch.bool)}
        elif what == "dropout_p":
            options = {"dropout_p": 0.1}
        elif what == "grouped":
            k, v = (x[:, :2] for x in (k, v))
            buffers = [q, k, v]
        elif what == "cross":
            attention = lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :, 1:], v)  # noqa: E731
        elif what == "three":
            attention = lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0])  # noqa: E731
        elif what == "dims":
            dims = [2, 2]
        elif what == "rows":
            buffers = [q, k, v[:, :, 1:]]
        elif what == "grad":
            q.requires_grad_()
        elif what == "none":
            buffers, dims = [], []
        elif what == "nested":
            attention = nested
        elif what == "multihead":
            attention = multihead
    with torch.no_grad(), pytest.raises(ValueError) as error:
        keeps = [torch.ones(1)] if what == "foreign" and culprit else []
        with context_parallel(
            mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=keeps
        ):
            attention(q, k, v, **options)
    assert q.size(2) == num_rows
    with torch.no_grad():
        attend_on_torchs_rows()
    return str(error.value)


def nested(q: torch.Tensor, *_: torch.Tensor) -> None:
    with context_parallel(mesh_of_all(), buffers=[q], buffer_seq_dims=[2]):
        pass


def multihead(q: torch.Tensor, *_: torch.Tensor) -> None:
    layer = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = q[:, 0]
    layer(x, x, x, need_weights=False)


REFUSED = {
    "attn_mask": r"attn_mask must be left out \(is_causal is the mask .*\), got Tensor",
    "cross": r"key must be \[B, H, 4, D\], this rank's rows of the sequence, .*got shape \[2, 4, 3",
    "short": "buffers must have at least 4 rows, two a rank, for attention that is not .*got 2",
    "dropout_p": r"dropout_p must be left out \(attention has no dropout here\), got 0.1",
    "grouped": "key must have the 4 heads of query unless enable_gqa=True, got 2",
    "three": r"query must be \[B, H, S, D\], got shape \[4, 4, 16\]",
    "dims": "buffer_seq_dims must have one dimension for each of the 3 buffers, got 2",
    "rows": r"buffers\[2\] must have the 8 rows of the first buffer in dim 2, got 7",
    "grad": r"buffers\[0\] must not require grad",
    "none": "buffers must name at least one tensor",
    "foreign": "no_restore_buffers must be some of buffers, got another tensor",
    "nested": r"must not be within another one, got .* by ringattn.integrations.torch._attention",
    "multihead": r"must be F.scaled_dot_product_attention within context_parallel, got nn.Multi",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_served_is_refused_on_all_ranks(rank_pool, what):
    for message in rank_pool(2).run(refuse, what):
        assert re.search(REFUSED[what], message), message
