# SPDX-License-Identifier: Apache-2.0
"""Partition.gather: every rank has the whole tensor, or an error."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from _distributed import this
from _rings import SPLITS
from ringattn import Partition
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


def test_gather_on_a_single_rank_is_the_tensor():
    x = torch.randn(2, 4, 3)
    assert torch.equal(Partition.even(4, 1).gather(x), x)
    x.requires_grad_()
    (2 * Partition.even(4, 1).gather(x)).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))


def gradients_of_a_gather(partition: Partition, dim: int) -> None:
    rank, size = this().rank, partition.seq_len
    whole = torch.randn(2, size, 3, generator=torch.Generator().manual_seed(1)).to(this().device)
    weights = torch.arange(whole.numel(), dtype=torch.float32, device=this().device).view(
        2, size, 3
    )
    whole, weights = whole.movedim(1, dim), weights.movedim(1, dim)
    x = partition.shard(whole, rank, dim).clone().requires_grad_()
    gathered = partition.gather(x, dim=dim)
    assert torch.equal(gathered, whole)
    (gathered * weights).square().sum().backward()
    expected = 2 * partition.shard(whole * weights.square(), rank, dim)
    torch.testing.assert_close(x.grad, expected)
    # A second derivative would be that of this rank's rows alone.
    (first,) = torch.autograd.grad(partition.gather(x, dim=dim).sum() ** 2, x, create_graph=True)
    if this().world_size > 1:
        with pytest.raises(RuntimeError, match="differentiate twice"):
            first.sum().backward()
    with torch.no_grad():
        assert not partition.gather(x, dim=dim).requires_grad
    # Of rows that a rank takes out of a whole tensor: 0 elsewhere.
    whole = whole.clone().requires_grad_()
    partition.shard(whole, rank, dim).sum().backward()
    assert whole.grad.sum() == partition.shard(whole, rank, dim).numel()


def test_ranks_that_compute_the_same_from_a_gathered_tensor_get_their_rows_gradient(ring):
    for lengths, order in SPLITS[ring.world_size]:
        ring.run(gradients_of_a_gather, Partition.zigzag(lengths, order), 1)
    ring.run(gradients_of_a_gather, Partition.even(11, ring.world_size), -1)


def gather_every_kind(partition: Partition) -> None:
    rank = this().rank
    x = torch.arange(2 * partition.seq_len * 3, device=this().device).view(2, partition.seq_len, 3)
    for whole in (x, x.float(), x.bfloat16(), x % 2 == 0, x.to(torch.uint8), x.cfloat()):
        assert torch.equal(partition.gather(partition.shard(whole, rank)), whole)
    for dim, whole in ((0, x.transpose(0, 1)), (2, x.transpose(1, 2)), (-1, x.transpose(1, 2))):
        gathered = partition.gather(partition.shard(whole, rank, dim), dim=dim)
        assert torch.equal(gathered, whole)
    flat = torch.arange(partition.seq_len, device=this().device)
    assert torch.equal(partition.gather(partition.shard(flat, rank, 0), dim=0), flat)
    with pytest.raises(ValueError, match="partition must have the"):
        Partition.even(8, this().world_size + 1).gather(flat, dim=0)
    with pytest.raises(ValueError, match="x must have"):
        partition.gather(torch.zeros(1, partition.lengths[rank] + 1, device=this().device))


def test_gather_gives_every_rank_the_whole(ring):
    for lengths, order in SPLITS[ring.world_size]:
        ring.run(gather_every_kind, Partition.zigzag(lengths, order))
        ring.run(gather_every_kind, Partition.contiguous(lengths, order))
    ring.run(gather_every_kind, Partition.even(0, ring.world_size))


def gather_unlike_the_others(what: str) -> str:
    rank, world_size = this().rank, this().world_size
    partition = Partition.even(8 + world_size, world_size)
    x = torch.zeros(2, partition.lengths[rank], 3, device=this().device)
    right = partition.gather(x)
    if rank == world_size - 1:
        if what == "dtype":
            x = x.half()
        elif what == "sizes":
            x = x[..., :2]
        elif what == "partition.order":
            reverse = list(range(world_size))[::-1]
            partition = Partition.contiguous(partition.lengths, reverse)
        else:
            x = x[:, 1:]
    else:
        x = x.double() if what == "rows" else x
    # A kind of its own each time: what is known already is not compared again.
    x = x.unsqueeze(-1).expand(*x.shape, 5 + len(what))
    with pytest.raises(ValueError) as error:
        partition.gather(x)
    again = Partition.even(8 + world_size, world_size)
    assert torch.equal(again.gather(torch.zeros(2, again.lengths[rank], 3).to(right)), right)
    return str(error.value)


@pytest.mark.parametrize("what", ["dtype", "sizes", "partition.order", "rows"])
def test_ranks_that_gather_different_things_all_get_an_error(rank_pool, what):
    for message in rank_pool(2, "cpu").run(gather_unlike_the_others, what):
        said = {
            "dtype": "agree on dtype, got torch.float32 on rank 0 and torch.float16 on rank 1",
            "rows": "x must have",
        }
        assert said.get(what, f"agree on {what}") in message


def gather_wrongly(what: str, culprit: int, width: int) -> str:
    """A gather in which rank ``culprit`` gives what cannot be gathered."""
    size, rank = this().world_size, this().rank
    partition = Partition.even(5 * size, size)
    gather: Callable[[Any], Any] = partition.gather
    x: Any = torch.zeros(2, 5, width)
    mesh = init_device_mesh("cpu", (size,))
    if rank == culprit:
        if what == "meta":
            x = x.to("meta")
        elif what == "sparse":
            x = x.to_sparse()
        elif what == "list":
            x = x.tolist()
        elif what == "DTensor":
            x = DTensor.from_local(x, mesh, run_check=False)
        elif what == "dim":
            gather = partial(partition.gather, dim="1")
        elif what == "vmap":
            gather, x = torch.vmap(gather), x.expand(4, *x.shape)
        elif what == "tangent":
            gather, x = partial(torch.func.jvp, partition.gather, (x,)), (x,)
    with pytest.raises(ValueError) as error:
        gather(x)
    whole = torch.arange(10.0 * size).view(2, 5 * size)
    assert torch.equal(partition.gather(partition.shard(whole, rank)), whole)
    return str(error.value)


def shard_a_dtensor() -> None:
    rank, size = this().rank, this().world_size
    partition = Partition.zigzag([1, 15])
    x = DTensor.from_local(torch.zeros(1, 16, 1), init_device_mesh("cpu", (size,)), run_check=False)
    for call in (lambda: partition.shard(x, rank), lambda: partition.unshard([x, x])):
        with pytest.raises(ValueError, match="must be a plain tensor, got a DTensor"):
            call()


def test_dtensors_are_not_cut(rank_pool):
    rank_pool(2, "cpu").run(shard_a_dtensor)


WRONG_GATHERS = {
    "meta": "x must be on a device with a kernel",
    "sparse": "x must be strided",
    "list": "x must be a tensor, got list",
    "DTensor": "x must be a plain tensor that holds this rank's rows, got a DTensor",
    "dim": "dim must be an integer, got '1'",
    "vmap": "x must not be batched by torch.vmap",
    "tangent": "x must have no tangent",
}


@pytest.mark.parametrize(("what", "message"), WRONG_GATHERS.items(), ids=WRONG_GATHERS)
def test_what_cannot_be_gathered_fails_every_rank_and_names_the_one(rank_pool, what, message):
    # A kind of its own each time: what is known already is not compared again.
    width = 20 + list(WRONG_GATHERS).index(what)
    for rank, got in enumerate(rank_pool(2, "cpu").run(gather_wrongly, what, 1, width)):
        assert got.startswith(message if rank == 1 else f"rank 1: {message}")
