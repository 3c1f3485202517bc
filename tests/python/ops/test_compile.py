# SPDX-License-Identifier: Apache-2.0
"""The operators under torch.compile, FakeTensorMode, autocast and opcheck."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import this
from _numerics import check_attention
from _rings import SPLITS, Case, whole
from ringattn import Partition
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.optests import aot_autograd_check

OPERATORS = torch.ops.ringattn


def compiled_calls(cases: list[Case], backend: str) -> tuple[list[torch.Tensor], int]:
    """Eager and compiled results of each case, and how often something was compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)

    def attend(q, k, v, partition):
        out, lse = ringattn.ring_attention(q * 2, k, v, partition, return_lse=True)
        return out * 3, lse

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    results = []
    for case in cases:
        q, k, v = case.local_inputs()
        results.append((attend(q, k, v, case.partition), compiled(q, k, v, case.partition)))
    return results, counter.frame_count


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_compiled_ring_has_the_same_bits_and_new_lengths_do_not_recompile(ring, layout):
    size = ring.world_size
    splits = [[10 + 3 * n + rank for rank in range(size)] for n in range(6)]
    cases = [Case(Partition(layout, tuple(lengths))) for lengths in splits]
    for results, num_compiled in ring.run(compiled_calls, cases, "aot_eager"):
        for eager, compiled in results:
            assert all(torch.equal(x, y) for x, y in zip(eager, compiled, strict=True))
        # Once for the first lengths, once for any, and once more where a symbol met a number.
        assert num_compiled <= 3


def compiled_even_shares(rows: list[int]) -> int:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    attention, size = ringattn.RingAttention(), this().world_size

    def attend(q, k, v):
        return attention(q, k, v, Partition.even(q.size(1) * size, size))

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for number in rows:
        partition = Partition.even(number * this().world_size, this().world_size)
        q, k, v = Case(partition).local_inputs()
        assert torch.equal(compiled(q, k, v), ringattn.ring_attention(q, k, v, partition))
    return counter.frame_count


def test_an_even_partition_made_inside_is_compiled_for_any_length(ring):
    assert max(ring.run(compiled_even_shares, [5, 6, 9, 20, 31])) <= 2


def compiled_on_a_mesh() -> None:
    torch._dynamo.reset()
    mesh = dist.device_mesh.init_device_mesh(this().device.type, (this().world_size,))
    group = dist.new_group(list(range(this().world_size)))
    partition = Partition.even(8 * this().world_size, this().world_size)
    q, k, v = Case(partition).local_inputs()
    expected = ringattn.ring_attention(q, k, v, partition)
    for given in (mesh, group):
        compiled = torch.compile(
            lambda q, k, v, given=given: ringattn.ring_attention(q, k, v, partition, group=given),
            fullgraph=True,
            backend="aot_eager",
        )
        assert torch.equal(compiled(q, k, v), expected)
    dist.destroy_process_group(group)


def test_groups_and_meshes_are_traced(ring):
    ring.run(compiled_on_a_mesh)


def compiled_in_two_graphs() -> None:
    """What a frame knows of a module's group is there after a graph break, too."""
    torch._dynamo.reset()
    group = dist.new_group(list(range(this().world_size)))
    partition = Partition.even(8 * this().world_size, this().world_size)
    module = ringattn.RingAttention(group, partition=partition)
    q, k, v = Case(partition).local_inputs()

    def call(q: torch.Tensor) -> torch.Tensor:
        ring = module.ring
        torch._dynamo.graph_break()
        return module(q, k, v) + ring.rank + module.ring.world_size

    assert torch.equal(torch.compile(call, backend="eager")(q), call(q))
    dist.destroy_process_group(group)


def test_a_group_that_a_module_keeps_outlasts_a_graph_break(ring):
    ring.run(compiled_in_two_graphs)


def compiled_gather(partition: Partition) -> None:
    torch._dynamo.reset()
    x = partition.shard(torch.randn(1, partition.seq_len, 3), this().rank).to(this().device)
    compiled = torch.compile(partition.gather, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), partition.gather(x))


def test_a_gather_is_compiled(ring):
    for lengths, order in SPLITS[ring.world_size]:
        ring.run(compiled_gather, Partition.zigzag(lengths, order))


def compiled_hop(partition: Partition) -> None:
    torch._dynamo.reset()

    def hop(kv):
        handle = ringattn.rotate_kv(kv * 2, partition)
        return handle.wait() + 1

    kv = torch.randn(2, 1, partition.lengths[this().rank], 2, 8, device=this().device)
    compiled = torch.compile(hop, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.equal(compiled(kv), hop(kv))


def test_a_hop_is_compiled(ring):
    for lengths, order in SPLITS[ring.world_size]:
        ring.run(compiled_hop, Partition.zigzag(lengths, order))


def hop_with_inductor() -> None:
    """A program that leaves inductor memory to use again: while it has plenty, from a sort, it
    takes what it believes is dead."""
    size, rank = this().world_size, this().rank
    partition = Partition.even(256 * size, size)
    blocks = [
        torch.randn(2, 1, 256, 2, 64, generator=torch.Generator().manual_seed(r)).to(this().device)
        for r in (rank, (rank - 1) % size)
    ]

    def program(kv: torch.Tensor) -> tuple[torch.Tensor, ...]:
        two = torch.cat([kv] * 8).sort(0).values.amax().clamp(2.0, 2.0)
        received = ringattn.rotate_kv(kv * two, partition).wait()
        total = received.sum()
        return received, (received * total).cumsum(-1), received + total

    torch._dynamo.reset()
    received, *_ = torch.compile(program, fullgraph=True)(blocks[0])
    assert torch.equal(received, blocks[1] * 2)


def test_inductor_overwrites_no_block_that_has_been_received(rank_pool):
    rank_pool(2).run(hop_with_inductor)


def compiled_decode() -> None:
    torch._dynamo.reset()
    q, k, v = Case(Partition.even(8 * this().world_size, this().world_size)).local_inputs()
    q = q[:, :1].contiguous()
    compiled = torch.compile(ringattn.decode_attention, fullgraph=True, backend="aot_eager")
    for rows in (5, 6, 8):
        out = compiled(q, k[:, :rows], v[:, :rows])
        assert torch.equal(out, ringattn.decode_attention(q, k[:, :rows], v[:, :rows]))


@pytest.mark.nccl
def test_decoding_is_compiled(ring):
    ring.run(compiled_decode)


def test_inductor_compiles_blocks_and_merges(device):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 24, 4, 16, generator=generator).to(device)

    def attend(q, k, v):
        first = ringattn.block_attention(q, k[:, :10], v[:, :10], diagonal=0)
        second = ringattn.block_attention(q, k[:, 10:], v[:, 10:], diagonal=-10)
        return ringattn.merge_states(*first, *second)

    torch._dynamo.reset()
    out, lse = torch.compile(attend, fullgraph=True)(q, k, v)
    check_attention(out, lse, q, k, v, diagonal=0)


def test_compiled_code_may_shard_and_place():
    """Partition arithmetic is traced too: a whole model compiles."""

    def place(x, seq_len):
        partition = Partition.even(seq_len, 3)
        return partition.shard(x, 1, dim=0) * partition.position_ids(1)

    torch._dynamo.reset()
    compiled = torch.compile(place, fullgraph=True, backend="aot_eager")
    for seq_len in (8, 9, 10, 23):
        x = torch.randn(seq_len)
        assert torch.equal(compiled(x, seq_len), place(x, seq_len))


@pytest.mark.parametrize("kind", [list, torch.tensor])
def test_compiled_code_may_count_positions_within_documents(kind):
    partition = Partition.zigzag([4, 7, 1])

    def place(x, ends):
        return x * partition.position_ids(1, cu_seqlens=ends)

    torch._dynamo.reset()
    compiled = torch.compile(place, fullgraph=True, backend="aot_eager")
    x = torch.randn(7)
    for ends in ([0, 3, 12], [0, 5, 12], [0, 0, 8, 12, 12]):
        assert torch.equal(compiled(x, kind(ends)), place(x, kind(ends)))


def well_behaved(case: Case) -> None:
    q, k, v = case.local_inputs()
    name = dist.group.WORLD.group_name
    partition = case.partition
    lengths, order = list(partition.lengths), list(partition.order)
    torch.library.opcheck(
        OPERATORS.ring_forward,
        (q, k, v, lengths, order, partition.layout, case.causal, 0.1, name, "auto", None),
    )
    # What rotate_kv returns is not filled yet: nothing to compare. The pair is, below.
    shapes_only = ("test_schema", "test_autograd_registration", "test_faketensor")
    arguments = (torch.stack([k, v]), lengths, order, name, "auto")
    torch.library.opcheck(OPERATORS.rotate_kv, arguments, test_utils=shapes_only)


def test_operators_are_well_behaved(ring):
    for lengths, order in SPLITS[ring.world_size][:2]:
        ring.run(well_behaved, Case(Partition.zigzag(lengths, order)))


def rotate_and_wait(kv: torch.Tensor, lengths: list[int], order: list[int], name: str):
    return OPERATORS.wait_kv(OPERATORS.rotate_kv(kv, lengths, order, name, "auto"), kv)


def pair_is_well_behaved(partition: Partition) -> None:
    """Rotate and wait as a pair: alone, wait_kv has nothing to wait for."""
    name = dist.group.WORLD.group_name
    lengths, order = list(partition.lengths), list(partition.order)
    kv = torch.randn(2, 1, partition.lengths[this().rank], 2, 8, device=this().device)
    real = rotate_and_wait(kv, lengths, order, name)
    with FakeTensorMode() as mode:
        fake = rotate_and_wait(mode.from_tensor(kv), lengths, order, name)
    assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
    assert fake.stride() == real.stride()
    for dynamic in (False, True):
        arguments = (kv, lengths, order, name)
        aot_autograd_check(rotate_and_wait, arguments, {}, dynamic, check_gradients=False)


def test_rotate_and_wait_are_well_behaved_as_a_pair(ring):
    for lengths, order in SPLITS[ring.world_size]:
        ring.run(pair_is_well_behaved, Partition.zigzag(lengths, order))


def fake_shapes(case: Case) -> None:
    q, k, v = case.local_inputs()
    real = ringattn.ring_attention(q, k, v, case.partition, return_lse=True)
    with FakeTensorMode() as mode:
        operands = [mode.from_tensor(x) for x in (q, k, v)]
        fake = ringattn.ring_attention(*operands, case.partition, return_lse=True)
    for x, y in zip(real, fake, strict=True):
        assert (x.shape, x.dtype, x.device, x.stride()) == (y.shape, y.dtype, y.device, y.stride())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_fake_results_look_like_real_ones(ring, dtype):
    for lengths, order in SPLITS[ring.world_size]:
        ring.run(fake_shapes, Case(Partition.zigzag(lengths, order), dtype))


WRONG_SHAPES = [
    ({"k": (2, 6, 16)}, "k must be [B, S, H_kv, D], got shape [2, 6, 16]"),
    ({"q": (2, 6, 5, 16)}, "multiple of the number of key heads, 2, got 5"),
    ({"q": (2, 6, 0, 16)}, "q and k must have at least one head, got 0 and 2"),
    ({"k": (2, 6, 2, 24)}, "k must have the head dimension of q, 16, got 24"),
    ({"v": (2, 5, 2, 16)}, "v must have as many rows as k, 6, got 5"),
    ({"v": (2, 6, 4, 16)}, "v must have as many heads as k, 2, got 4"),
    ({"k": (1, 6, 2, 16)}, "k must have the batch size of q, 2, got 1"),
    (dict.fromkeys("qkv", (2, 6, 2, 12)), "the head dimension must be a multiple of 8 from 8 to"),
    (
        {"q": (2, 4, 1, 16), "k": (2, 2, 6, 16), "v": (2, 2, 6, 16)},
        "key heads, 6, got 1; these look like [B, H, S, D]: pass transpose(1, 2) of q, k and v",
    ),
    (dict.fromkeys("qkv", (2, 6, 2, 264)), "from 8 to 256, got 264"),
    ({"v": torch.half}, "v must have the dtype of q, torch.float32, got torch.float16"),
    ({"k": torch.bfloat16}, "k must have the dtype of q, torch.float32, got torch.bfloat16"),
    ({"q": torch.float64}, "k must have the dtype of q, torch.float64, got torch.float32"),
]


def of_shapes(changes: dict[str, Any]) -> list[torch.Tensor]:
    shapes = {"q": (2, 6, 4, 16), "k": (2, 6, 2, 16), "v": (2, 6, 2, 16)}
    return [
        torch.zeros(shape, dtype=changes[name])
        if isinstance(changes.get(name), torch.dtype)
        else torch.zeros(changes.get(name, shape))
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize(("changes", "message"), WRONG_SHAPES, ids=[m for _, m in WRONG_SHAPES])
@pytest.mark.parametrize(
    "function", [ringattn.block_attention, ringattn.ring_attention, ringattn.decode_attention]
)
def test_fake_tensors_are_refused_in_the_words_of_real_ones(function, changes, message):
    with pytest.raises(ValueError) as real:
        function(*of_shapes(changes))
    assert message in str(real.value).replace("_shard", "")
    with FakeTensorMode() as mode, pytest.raises(ValueError) as fake:
        function(*(mode.from_tensor(x) for x in of_shapes(changes)))
    assert str(fake.value) == str(real.value)


def test_states_are_folded_into_by_fake_tensors_of_the_right_shapes_only():
    q, k, v = of_shapes({"k": torch.half})
    out, lse = torch.zeros_like(q), torch.zeros(2, 4, 6)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="k must have the dtype of q"):
        fakes = [mode.from_tensor(x) for x in (out, lse, q, k, v)]
        OPERATORS.block_attention_(*fakes, 1.0, None)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match=r"q must be \[B, S, H, D\]"):
        out, lse, q = (mode.from_tensor(x) for x in (out, lse, q))
        OPERATORS.block_attention_(out, lse, q[0], q, q, 1.0, None)


def under_autocast(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = case.local_inputs()
    with torch.autocast(this().device.type, dtype=dtype):
        kv = ringattn.rotate_kv(torch.stack([k, v]), case.partition).wait()
        assert kv.dtype == dtype
        return ringattn.ring_attention(q, k, v, case.partition, return_lse=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_runs_in_its_dtype(ring, dtype):
    case = Case(Partition.even(9 * ring.world_size, ring.world_size))
    out, lse = whole(case, ring.run(under_autocast, case, dtype))
    assert out.dtype == dtype and lse.dtype == torch.float32
    halves = [x.to(dtype).to(ring.device_type) for x in case.inputs("cpu")]
    check_attention(out.to(ring.device_type), lse.to(ring.device_type), *halves, diagonal=0)


def decoded_under_autocast(case: Case, dtype: torch.dtype) -> torch.dtype:
    q, k, v = case.local_inputs()
    with torch.autocast(this().device.type, dtype=dtype):
        return ringattn.decode_attention(q[:, :1], k, v).dtype


@pytest.mark.nccl
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_decodes_in_its_dtype(ring, dtype):
    case = Case(Partition.even(9 * ring.world_size, ring.world_size))
    assert set(ring.run(decoded_under_autocast, case, dtype)) == {dtype}


def num_compiled(function: Callable[..., Any], calls: Iterable[tuple[Any, ...]]) -> int:
    """How often ``function`` is compiled over these calls, none of which may break the graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, backend=counter)
    for arguments in calls:
        got, expected = compiled(*arguments), function(*arguments)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    return counter.frame_count


def rows(*numbers: int) -> list[torch.Tensor]:
    return [torch.randn(1, number, 2, 8) for number in numbers]


def test_a_scale_that_changes_is_traced():
    def attend(x, scale):
        out, _ = ringattn.block_attention(x, x, x, scale=scale)
        return ringattn.ring_attention(x, x, x, scale=scale) + out

    # A float that reaches an operator is a constant to torch.compile: one program for each.
    assert num_compiled(attend, [(*rows(6), 0.5 + n) for n in range(3)]) <= 4


def test_a_diagonal_made_of_lengths_is_compiled_for_any_length():
    def attend(q, k):
        return ringattn.block_attention(q, k, k, diagonal=k.size(1) - q.size(1))[0]

    assert num_compiled(attend, [rows(n, 2 * n + 3) for n in (16, 24, 33, 50, 77)]) <= 2


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@pytest.mark.parametrize("order", [(), (2, 0, 1)])
def test_unsharding_is_compiled_for_any_length(layout, order):
    def join(a, b, c):
        shards = [a, b, c]
        return Partition(layout, tuple(x.size(1) for x in shards), order).unshard(shards)

    lengths = [(5, 4, 6), (8, 7, 9), (20, 31, 6), (12, 50, 70)]
    assert num_compiled(join, [rows(*each) for each in lengths]) <= 2
    assert num_compiled(join, [rows(0, 3, 4)]) == 1


def test_a_parameter_is_an_operand_like_any_other():
    x = torch.randn(1, 8, 2, 16)
    q = torch.nn.Parameter(torch.randn(1, 8, 2, 16), requires_grad=False)
    torch._dynamo.reset()
    compiled = torch.compile(ringattn.ring_attention, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, x, x), ringattn.ring_attention(q, x, x))
