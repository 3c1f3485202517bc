# SPDX-License-Identifier: Apache-2.0
"""all_reduce_gradients: parts of gradients are summed over the ranks of a ring, or an error."""

import copy
import re
from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import this
from ringattn import gradients
from ringattn.models import LLaMA, LLaMAConfig
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

TINY = LLaMAConfig(src_vocab_size=11, emb_dim=16, nheads=2, nlayers=1)


def part(index: int, rank: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The part of a gradient that a rank computed."""
    generator = torch.Generator().manual_seed(100 * index + rank)
    return torch.randn(shape, generator=generator).to(dtype)


def model_of_all_kinds() -> nn.Module:
    """Parameters of several dtypes and strides, one of them shared, one without elements."""
    model = nn.Module()
    model.first = nn.Linear(5, 3)
    model.short = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model.tied = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    model.tied.weight = model.short.weight
    model.wide = nn.Parameter(torch.zeros(7, dtype=torch.float64))
    model.scalar = nn.Parameter(torch.zeros(()))
    model.empty = nn.Parameter(torch.zeros(0, 3))
    model.channels_last = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)
    return model.to(this().device)


def sum_all_kinds(bucket_size: int) -> None:
    gradients._BUCKET_SIZE = bucket_size
    rank, size = this().rank, this().world_size
    model = model_of_all_kinds()
    for index, x in enumerate(model.parameters()):
        x.grad = torch.empty_like(x).copy_(part(index, rank, x.shape, x.dtype))
    before = [x.grad for x in model.parameters()]
    ringattn.all_reduce_gradients(model)
    for index, x in enumerate(model.parameters()):
        assert x.grad is before[index], "the sum must be in place"
        parts = [part(index, r, x.shape, x.dtype).double() for r in range(size)]
        # Added in float32 and rounded once: no further from the exact sum than one rounding.
        expected = sum(parts).to(x.dtype)
        rounding = 2**-8 if x.dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(x.grad.cpu(), expected, rtol=rounding, atol=1e-6)
        everywhere = [torch.empty_like(x.grad.cpu()).contiguous() for _ in range(size)]
        dist.all_gather(everywhere, x.grad.cpu().contiguous())
        assert all(torch.equal(other, everywhere[0]) for other in everywhere)


@pytest.mark.parametrize("bucket_size", [1 << 24, 4])
def test_the_sum_of_all_parts_is_on_every_rank(ring, bucket_size):
    ring.run(sum_all_kinds, bucket_size)


def sum_with_missing_ones() -> None:
    rank, size = this().rank, this().world_size
    model = nn.ModuleList(nn.Linear(3, 2, bias=False) for _ in range(4))
    nowhere, last, everywhere, frozen = (layer.weight for layer in model)
    frozen.requires_grad_(False)
    if rank == size - 1:
        last.grad = torch.full((2, 3), 5.0)
    everywhere.grad = torch.full((2, 3), 1.0 + rank)
    ringattn.all_reduce_gradients(model)
    assert nowhere.grad is None and frozen.grad is None
    assert torch.equal(last.grad, torch.full((2, 3), 5.0))
    assert torch.equal(everywhere.grad, torch.full((2, 3), size * (size + 1) / 2))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_missing_gradient_is_zero_and_stays_none_where_all_ranks_miss_it(rank_pool, size):
    rank_pool(size).run(sum_with_missing_ones)


def sum_over_rings() -> None:
    rank = this().rank
    pair = dist.new_group([0, 1])
    alone = [dist.new_group([r]) for r in range(3)][rank]
    group = pair if rank < 2 else alone
    expected = 3.0  # 1 + 2 of the pair, 3 of the rank by itself

    def summed(model: nn.Module, **given: Any) -> float:
        weight = next(model.parameters())
        weight.grad = torch.full_like(weight, 1.0 + rank)
        ringattn.all_reduce_gradients(model, **given)
        value = weight.grad.flatten()[0].item()
        assert torch.equal(weight.grad, torch.full_like(weight, value))
        return value

    assert summed(nn.Linear(2, 2)) == 6.0, "a plain module is on the default group"
    assert summed(nn.Linear(2, 2), group=group) == expected
    assert summed(LLaMA(TINY, group=group)) == expected
    assert summed(nn.Sequential(LLaMA(TINY, group=group))) == expected
    assert summed(nn.Sequential(nn.Linear(2, 2), ringattn.RingAttention(group))) == expected
    assert summed(LLaMA(TINY, group=group), group=dist.group.WORLD) == 6.0
    several = nn.Sequential(
        nn.Linear(2, 2), ringattn.RingAttention(group), ringattn.RingAttention()
    )
    with pytest.raises(ValueError, match="group must be given where layers are on several rings"):
        ringattn.all_reduce_gradients(several)


def test_the_ring_is_that_of_the_model(rank_pool):
    rank_pool(3).run(sum_over_rings)


def refuse(what: str) -> str:
    rank, size = this().rank, this().world_size
    model = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
    for x in model.parameters():
        x.grad = torch.ones_like(x)
    if rank == size - 1:
        if what == "sparse":
            model[0].weight.grad = torch.ones(6, 4).to_sparse()
        elif what == "DTensor":
            mesh = init_device_mesh("cpu", (1,)) if size == 1 else _mesh_of_this_rank()
            weight = DTensor.from_local(torch.ones(4, 4), mesh, run_check=False)
            model[1].weight = nn.Parameter(weight)
        elif what == "number":
            model[1].bias.requires_grad_(False)
        elif what == "shape":
            model[1].weight = nn.Parameter(torch.ones(4, 5))
        elif what == "module":
            model = list(model.parameters())
    elif what == "DTensor":
        _mesh_of_this_rank()
    with pytest.raises(ValueError) as error:
        ringattn.all_reduce_gradients(model)
    again = nn.Linear(2, 2)
    again.weight.grad = torch.ones(2, 2)
    ringattn.all_reduce_gradients(again)
    assert torch.equal(again.weight.grad, torch.full((2, 2), float(size)))
    return str(error.value)


def _mesh_of_this_rank() -> Any:
    size = this().world_size
    return init_device_mesh("cpu", (size, 1), mesh_dim_names=("all", "one"))["one"]


REFUSED = {
    "sparse": r"the gradient of 0.weight must be strided, got torch.sparse_coo: pass sparse=False",
    "DTensor": r"the gradient of 1.weight must be a plain tensor, got a DTensor: FSDP2",
    "number": r"the number of parameters that require grad must be the same on all ranks, "
    r"got 3 on rank 0 and 2 on rank 1",
    "shape": r"the shapes and dtypes of parameters must be the same on all ranks, "
    r"got different ones",
    "module": r"model must be a module, got list",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_summed_is_refused_on_all_ranks(rank_pool, what):
    for message in rank_pool(2).run(refuse, what):
        assert re.search(REFUSED[what], message), message


def sum_of_half_parts() -> float:
    x = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    x.grad = torch.tensor([256.0 if this().rank == 0 else 1.0], dtype=torch.bfloat16)
    module = nn.Module()
    module.x = x
    ringattn.all_reduce_gradients(module)
    return x.grad.item()


def test_parts_of_a_half_type_are_added_in_float32(rank_pool):
    """256 + 1 is 256 in bfloat16, and 256 + 1 + 1 is 258."""
    assert rank_pool(3).run(sum_of_half_parts) == [258.0] * 3


def test_copies_and_one_rank_stay_as_they_are():
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    twin = copy.deepcopy(model)
    ringattn.all_reduce_gradients(model, group="single")
    assert torch.equal(model.weight.grad, torch.ones(2, 2)) and twin.bias.grad is None
