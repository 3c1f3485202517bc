# SPDX-License-Identifier: Apache-2.0
"""One hop of a ring: every rank ends up with the block of the rank before it, to the bit."""

import time

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _numerics import poisoned_memory
from _rings import SPLITS
from ringattn import Partition

ANY_DTYPE = [torch.float32, torch.bfloat16, torch.float16]


def partitions(ring: RankPool) -> list[Partition]:
    return [Partition.zigzag(lengths, order) for lengths, order in SPLITS[ring.world_size]]


def block_of(partition: Partition, rank: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """The block of any rank, known to all of them: [2, B, S_r, H_kv, D]."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    block = torch.randn(2, 3, partition.lengths[rank], 2, 8, generator=generator)
    return block.to(this().device, dtype)


def before(partition: Partition, rank: int, hops: int = 1) -> int:
    return partition.order[(partition.order.index(rank) - hops) % partition.world_size]


def rotate_once(partition: Partition, dtype: torch.dtype) -> None:
    rank = this().rank
    kv = block_of(partition, rank, dtype)
    with poisoned_memory():
        handle = ringattn.rotate_kv(kv, partition)
        received = handle.wait()
    assert torch.equal(received, block_of(partition, before(partition, rank), dtype))
    assert torch.equal(kv, block_of(partition, rank, dtype))  # what was sent is untouched
    assert handle.wait() is received


@pytest.mark.parametrize("dtype", ANY_DTYPE)
def test_every_rank_receives_the_block_before_it(ring, dtype):
    for partition in partitions(ring):
        ring.run(rotate_once, partition, dtype)


def test_a_block_of_many_megabytes(ring):
    lengths = [1, *[3] * (ring.world_size - 2), 50_000][: ring.world_size]
    ring.run(rotate_once, Partition.zigzag(lengths), torch.float32)


def overwrite_what_is_sent(partition: Partition, late: int) -> None:
    """Rank ``late`` receives when the others have long gone on."""
    rank = this().rank
    kv = block_of(partition, rank, torch.float32)
    if rank == late:
        time.sleep(0.3)
    handle = ringattn.rotate_kv(kv, partition)
    kv.fill_(float("nan"))
    received = handle.wait()
    assert torch.equal(received, block_of(partition, before(partition, rank), torch.float32))


@pytest.mark.parametrize("late", [0, 1])
def test_a_block_may_be_overwritten_while_it_is_sent(ring, late):
    rows = 2048  # too much for the buffers of a socket
    partition = Partition.even(rows * ring.world_size, ring.world_size)
    ring.run(overwrite_what_is_sent, partition, late)


def rotate_all_the_way(partition: Partition) -> None:
    rank = this().rank
    kv = block_of(partition, rank, torch.float32)
    for hops in range(1, partition.world_size + 1):
        # Lengths travel with the blocks: what a rank holds now is another rank's.
        lengths = [
            partition.lengths[before(partition, r, hops - 1)] for r in range(len(partition.lengths))
        ]
        held = Partition.zigzag(lengths, partition.order)
        kv = ringattn.rotate_kv(kv, held).wait()
        assert torch.equal(kv, block_of(partition, before(partition, rank, hops), torch.float32))


def test_a_block_comes_home_after_as_many_hops_as_ranks(ring):
    for partition in partitions(ring):
        ring.run(rotate_all_the_way, partition)


def several_in_flight(partition: Partition) -> None:
    rank = this().rank
    handles = []
    for seed in range(4):
        kv = block_of(partition, rank, torch.float32, seed)
        handles.append(ringattn.rotate_kv(kv, partition))
        del kv  # the handle keeps it
        torch.empty(10_000, device=this().device).fill_(float("nan"))
    for seed, handle in reversed(list(enumerate(handles))):
        expected = block_of(partition, before(partition, rank), torch.float32, seed)
        assert torch.equal(handle.wait(), expected)


def test_several_hops_may_be_in_flight_and_awaited_in_any_order(ring):
    for partition in partitions(ring):
        ring.run(several_in_flight, partition)


def drop_a_handle(partition: Partition) -> None:
    ringattn.rotate_kv(block_of(partition, this().rank, torch.float32), partition)
    rotate_once(partition, torch.float32)


def test_a_handle_may_be_dropped(ring):
    ring.run(drop_a_handle, partitions(ring)[0])


def strided(partition: Partition) -> None:
    kv = (
        block_of(partition, this().rank, torch.float32).transpose(1, 3).contiguous().transpose(1, 3)
    )
    received = ringattn.rotate_kv(kv, partition).wait()
    assert torch.equal(received, block_of(partition, before(partition, this().rank), torch.float32))


def test_any_memory_layout(ring):
    ring.run(strided, partitions(ring)[-1])


def wait_for_nothing() -> str:
    nothing = torch.zeros(2, 1, 3, 2, 8, device=this().device)
    with pytest.raises(RuntimeError, match="must"):
        torch.ops.ringattn.wait_kv(nothing, nothing)
    return "refused"


def test_waiting_for_a_tensor_that_nothing_fills_is_an_error(ring):
    ring.run(wait_for_nothing)


@pytest.mark.parametrize(
    ("kv", "partition", "message"),
    [
        (torch.zeros(2, 1, 4, 2, 8), [4], "partition must be a Partition, got list"),
        (torch.zeros(2, 1, 3, 2, 8), Partition.even(4, 1), "kv must have the 4 rows"),
        (torch.zeros(3, 1, 4, 2, 8), Partition.even(4, 1), "kv must"),
        (torch.zeros(1, 4, 2, 8), Partition.even(4, 1), "kv must be"),
        (torch.zeros(2, 1, 4, 2, 8, device="meta"), Partition.even(4, 1), "kv must be on a device"),
        (torch.zeros(2, 1, 4, 2, 8).requires_grad_(), Partition.even(4, 1), "grad"),
        (torch.zeros(2, 1, 4, 2, 8), Partition.even(8, 2), "partition must have the 1 ranks"),
    ],
)
def test_wrong_arguments_are_refused(kv, partition, message):
    with pytest.raises(ValueError, match=message):
        ringattn.rotate_kv(kv, partition)


def wait_for_a_rank_that_refused() -> str:
    """A rotation that rank 0 refuses and rank 1 waits for after calls that ranks compare."""
    partition, x = Partition.even(12, 2), torch.zeros(1, 6, 2, 8)
    kv = torch.stack([x, x])
    ringattn.rotate_kv(kv, partition).wait()  # known from here on: it starts without a comparison
    said = ""
    try:
        handle = ringattn.rotate_kv(kv if this().rank == 1 else x, partition)
    except ValueError as error:
        said = str(error)
    for head_dim in (16, 24):
        wider = torch.zeros(1, 6, 2, head_dim)
        ringattn.ring_attention(wider, wider, wider, partition)
    if not said:
        with pytest.raises(ValueError) as error:
            handle.wait()
        said = str(error.value)
    assert ringattn.rotate_kv(kv, partition).wait().shape == kv.shape  # the group works on
    return said


def test_a_refusal_is_told_to_a_rank_that_waits_later():
    with RankPool(2) as ring:
        first, second = ring.run(wait_for_a_rank_that_refused)
    assert first.startswith("kv must be [2, B, S_r, H_kv, D]") and second == f"rank 0: {first}"


def rotate_differently(partition: Partition) -> str:
    """What a rotation says that is of another dtype on rank 1, after one of each."""

    def rotate(dtype: torch.dtype) -> None:
        rows = partition.lengths[this().rank]
        ringattn.rotate_kv(torch.zeros(2, 1, rows, 2, 8, dtype=dtype), partition).wait()

    for dtype in (torch.float32, torch.float64):
        rotate(dtype)
    with pytest.raises(ValueError) as error:
        rotate(torch.float64 if this().rank == 1 else torch.float32)
    rotate(torch.float32)  # the group works on
    return str(error.value)


@pytest.mark.parametrize("lengths", [[0, 5], [0, 0, 5]])
def test_a_difference_is_told_to_a_rank_without_rows(own_pool, lengths: list[int]) -> None:
    for said in own_pool(len(lengths)).run(rotate_differently, Partition.zigzag(lengths)):
        assert said == (
            "ranks must agree on dtype, got torch.float32 on rank 0 and torch.float64 on rank 1"
        )
