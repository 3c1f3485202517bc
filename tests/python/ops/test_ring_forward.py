# SPDX-License-Identifier: Apache-2.0
"""A ring over any number of ranks equals attention on one device."""

import math
from dataclasses import replace

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from _numerics import RMS_GROWTH, check_attention, measure
from _rings import SPLITS, Case, check_ring, ring_call, whole
from ringattn import _C, Partition, reference
from torch.utils.flop_counter import FlopCounterMode

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["zigzag", "contiguous"]


def partitions(ring: RankPool, layout: str) -> list[Partition]:
    """Of a size that the kernels of the device split into tiles."""
    grow = 1 if ring.device_type == "cpu" else 13
    return [
        Partition(layout, tuple(grow * n for n in lengths), tuple(order or ()))
        for lengths, order in SPLITS[ring.world_size]
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ring_equals_attention_on_one_device(ring, layout, causal, dtype):
    for partition in partitions(ring, layout):
        check_ring(ring, Case(partition, dtype, causal))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 72, 128, 256])
def test_every_head_dimension(ring, dtype, head_dim):
    check_ring(ring, Case(partitions(ring, "zigzag")[1], dtype, head_dim=head_dim))


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 3), (6, 2), (8, 1)])
def test_key_value_heads_are_shared_by_groups_of_query_heads(ring, num_heads, num_kv_heads):
    case = Case(partitions(ring, "zigzag")[1], num_heads=num_heads, num_kv_heads=num_kv_heads)
    check_ring(ring, case)
    check_ring(ring, replace(case, dtype=torch.bfloat16))


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize("scale", [None, 0.0, -0.2])
def test_any_batch_and_scale(ring, batch, scale):
    check_ring(ring, Case(partitions(ring, "contiguous")[1], batch=batch, scale=scale))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_long_uneven_sequences(ring, layout):
    shares = [3, 1, 0, 2][: ring.world_size]
    lengths = [129 * share + share for share in shares]
    check_ring(ring, Case(Partition(layout, tuple(lengths)), batch=1))
    check_ring(ring, Case(Partition(layout, tuple(lengths)), torch.bfloat16, batch=1))


def call_with_a_partition(rows: int) -> tuple[torch.Tensor, ...]:
    partition = Partition.even(rows * this().world_size, this().world_size)
    q, k, v = Case(partition).local_inputs()
    return (
        ringattn.ring_attention(q, k, v, partition),
        ringattn.RingAttention()(q, k, v, partition),
        ringattn.RingAttention(partition=partition)(q, k, v),
        ringattn.RingAttention(partition=Partition.zigzag([3]))(q, k, v, partition),
    )


def test_a_module_takes_its_own_partition_or_that_of_the_call(ring):
    case = Case(Partition.even(8 * ring.world_size, ring.world_size))
    results = ring.run(call_with_a_partition, 8)
    for function, *modules in results:
        assert all(torch.equal(function, module) for module in modules)
    outs = [outs[0] for outs in results]
    q, k, v = case.inputs("cpu")
    out = case.partition.unshard(outs)
    check_attention(
        *(x.to(ring.device_type) for x in (out,)),
        None,
        *(x.to(ring.device_type) for x in (q, k, v)),
        diagonal=0,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_inputs_give_the_same_bits(ring, layout, dtype):
    case = Case(partitions(ring, layout)[1], dtype)
    first = whole(case, ring.run(ring_call, case))
    for _ in range(3):
        again = whole(case, ring.run(ring_call, case))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@pytest.mark.nccl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_one_by_one_give_the_same_bits_at_any_depth(ring, layout, dtype):
    """Over a transport whose blocks are attended one by one, however many are on their way."""
    case = Case(partitions(ring, layout)[1], dtype, transport="process_group")
    first = whole(case, ring.run(ring_call, case))
    for depth in (None, 1, 2, 100):
        again = whole(case, ring.run(ring_call, replace(case, depth=depth)))
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True)), depth


def names_of_transports() -> list[str]:
    """Those that carry this rank's tensors here."""
    if this().device.type == "cpu":
        return ["process_group"]
    with_nccl = "nccl" in str(dist.get_backend_config())
    return [name for name in _C.transports() if with_nccl or name == "symmetric"]


def test_every_transport(ring):
    (names, *_) = ring.run(names_of_transports)
    assert names
    for name in names:
        for partition in partitions(ring, "zigzag"):
            check_ring(ring, Case(partition, torch.bfloat16, transport=name))
            check_ring(ring, Case(partition, torch.float32, transport=name, depth=1))


def call_with_own_depth(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return ring_call(replace(case, depth=1 if this().rank % 2 == 0 else None))


def test_ranks_may_be_differently_far_ahead(ring):
    """One starts its messages one by one, its peers all at one time."""
    (names, *_) = ring.run(names_of_transports)
    for name in names:
        case = Case(partitions(ring, "zigzag")[1], torch.float32, transport=name)
        expected = whole(case, ring.run(ring_call, case))
        for _ in range(3):
            out = whole(case, ring.run(call_with_own_depth, case))
            for x, y in zip(out, expected, strict=True):
                torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


def test_the_rms_error_does_not_grow_with_the_number_of_ranks(ring):
    lengths = [400 // ring.world_size] * ring.world_size
    for dtype in (torch.bfloat16, torch.float16):
        case = Case(Partition.zigzag(lengths), dtype, head_dim=128, batch=1)
        q, k, v = (x.to(ring.device_type) for x in case.inputs("cpu"))
        expected, _ = reference.attention(q.double(), k.double(), v.double(), 0)
        alone, _ = ringattn.block_attention(q, k, v, diagonal=0)
        spread, _ = whole(case, ring.run(ring_call, case))
        growth = measure(spread, expected).rms / measure(alone, expected).rms
        assert growth <= RMS_GROWTH, f"{dtype}, {ring.world_size} ranks: rms grew by {growth}"


def call_with_nan(case: Case, which: str, position: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = dict(zip("qkv", case.inputs(this().device), strict=True))
    tensors[which][0, position, -1] = math.nan
    local = [case.partition.shard(x, this().rank) for x in tensors.values()]
    return ringattn.ring_attention(
        *local, case.partition, causal=case.causal, scale=case.scale, return_lse=True
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_nan_reaches_only_the_rows_that_attend_to_it(ring, layout, causal, which):
    partition = partitions(ring, layout)[1 if ring.world_size > 1 else 0]
    case = Case(partition, torch.bfloat16, causal)
    position = partition.seq_len // 3
    out, lse = whole(case, ring.run(call_with_nan, case, which, position))
    rows = torch.arange(partition.seq_len)
    attend = rows == position if which == "q" else (rows >= position) | (not causal)
    heads = torch.arange(4) >= (3 if which == "q" else 2)  # those of the last key/value head
    expected = torch.zeros(2, 4, len(rows), dtype=torch.bool)  # [B, H, S]
    expected[0] = heads[:, None] & attend
    reached = out.isnan().all(dim=-1).transpose(1, 2)
    if which != "v":
        assert torch.equal(lse.isnan(), expected)
        assert torch.equal(reached, expected)
        return
    assert not lse.isnan().any()
    # A value's may also reach earlier rows of its owner's diagonal tile.
    owner = partition.owner(position)
    tile = torch.isin(rows, partition.position_ids(owner)) & (rows > position - 512)
    allowed = expected.clone()
    allowed[0] |= heads[:, None] & tile
    assert (reached >= expected).all() and (reached <= allowed).all()
    assert not out.transpose(1, 2)[~allowed].isnan().any()


def call_in_subgroups(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    mine = groups[this().rank % 2]
    rank = dist.get_rank(mine)
    q, k, v = (case.partition.shard(x, rank) for x in case.inputs(this().device))
    out = ringattn.ring_attention(q, k, v, case.partition, group=mine, return_lse=True)
    with pytest.raises(ValueError, match="group must contain this process"):
        ringattn.ring_attention(q, k, v, case.partition, group=groups[1 - this().rank % 2])
    for group in groups:
        dist.destroy_process_group(group)
    return out


@pytest.mark.parametrize(
    "device_type", ["cpu", pytest.param("cuda", marks=pytest.mark.multi_gpu(size=4))]
)
def test_groups_of_some_of_the_ranks(rank_pool, device_type):
    case = Case(Partition.zigzag([20, 17], [1, 0]))
    states = rank_pool(4, device_type).run(call_in_subgroups, case)
    for pair in (states[0::2], states[1::2]):
        out, lse = whole(case, pair)
        check_attention(out, lse, *case.inputs("cpu"), diagonal=0)


def call_on_a_mesh(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    mesh = dist.device_mesh.init_device_mesh(
        this().device.type, (2, 2), mesh_dim_names=("data", "context")
    )
    rank = mesh["context"].get_local_rank()
    q, k, v = (case.partition.shard(x, rank) for x in case.inputs(this().device))
    with pytest.raises(ValueError, match="one-dimensional"):
        ringattn.ring_attention(q, k, v, case.partition, group=mesh)
    attention = ringattn.RingAttention(mesh["context"])
    return attention(q, k, v, case.partition), rank


def test_a_dimension_of_a_device_mesh_is_a_group(rank_pool):
    case = Case(Partition.contiguous([20, 17]))
    results = rank_pool(4).run(call_on_a_mesh, case)
    assert [rank for _, rank in results] == [0, 1, 0, 1]
    for pair in (results[:2], results[2:]):
        out = case.partition.unshard([out for out, _ in pair])
        check_attention(out, None, *case.inputs("cpu"), diagonal=0)


def count_flops(case: Case) -> int:
    q, k, v = case.local_inputs()
    with FlopCounterMode(display=False) as counter:
        ringattn.ring_attention(q, k, v, case.partition, causal=case.causal)
    return counter.get_total_flops()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_flops_of_all_ranks_are_those_of_the_whole(ring, layout):
    partition = partitions(ring, layout)[1 if ring.world_size > 1 else 0]
    rows = partition.seq_len
    for causal, pairs in ((True, rows * (rows + 1) // 2), (False, rows * rows)):
        case = Case(partition, causal=causal)
        assert sum(ring.run(count_flops, case)) == 4 * 64 * 4 * 2 * pairs


def call_without_a_group() -> torch.Tensor:
    q, k, v = Case(Partition.zigzag([13])).inputs("cpu")
    return ringattn.ring_attention(q, k, v, return_lse=True)


def test_a_single_rank_needs_no_process_group():
    assert not dist.is_initialized()
    out, lse = call_without_a_group()
    check_attention(out, lse, *Case(Partition.zigzag([13])).inputs("cpu"), diagonal=0)
