# SPDX-License-Identifier: Apache-2.0
"""Whether all ranks have the same weights."""

from __future__ import annotations

import sys
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._guards import detect_fake_mode

from ringattn._checks import is_dtensor
from ringattn._distributed.checksums import bits_checksum
from ringattn._distributed.collectives import gather_objects
from ringattn._distributed.groups import GroupInfo, share_ranks


class Summary(NamedTuple):
    """Of a parameter or a buffer."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int | None  # of its bits; None where it has none: sparse, a part of a DTensor, ...
    flaw: str | None  # the rule that it breaks


def check_same_weights(ring: GroupInfo, model: nn.Module) -> None:
    """Compares all parameters and buffers, bit by bit. Collective; reads the weights once.

    Raises:
        ValueError: on every rank, with the first one that differs, and where; with one that cannot
            be compared: offloaded, or split over ranks of the ring by tensor parallelism.
    """
    if ring.world_size == 1:
        return
    gathered = gather_objects(ring, "parallelize", _summaries(ring, model))
    first = gathered[0]
    for rank, theirs in enumerate(gathered):
        for name, each in theirs.items():
            if each.flaw is not None:
                raise ValueError(f"{name} must be {each.flaw} (on rank {rank})")
        if only := [*(first.keys() - theirs.keys()), *(theirs.keys() - first.keys())]:
            one, other = (0, rank) if only[0] in first else (rank, 0)
            raise ValueError(
                "model must have the same parameters and buffers on all ranks, "
                f"got {only[0]} on rank {one} and none on rank {other}"
            )
        for name, own in first.items():
            if own[:2] != theirs[name][:2]:
                raise ValueError(
                    f"{name} must be the same on all ranks, got {_kind(own)} on rank 0 and "
                    f"{_kind(theirs[name])} on rank {rank}"
                )
        different = [name for name, own in first.items() if theirs[name] != own]
        if different:
            more = f" (and {len(different) - 1} more)" if different[1:] else ""
            raise ValueError(
                f"{different[0]}{more} must be the same on all ranks, got other values on rank "
                f"{rank} than on rank 0: load the same weights on every rank, or call "
                "torch.manual_seed() with one seed before the model is made"
            )


_COMPARED = 4096  # numbers of a parameter


@torch.no_grad()
def trained_weights(ring: GroupInfo, module: nn.Module) -> torch.Tensor | None:
    """A number for some weights that a call records gradients of: the first numbers of the last
    vector and of the last two matrices that require grad (two, because an adapter's second one
    begins with zeros); None where none can be compared. Computed at once: FSDP2 frees the weights
    of a part when its forward ends.
    """
    if ring.world_size == 1 or torch.compiler.is_compiling() or detect_fake_mode() is not None:
        return None
    vectors: list[torch.Tensor] = []
    matrices: list[torch.Tensor] = []
    for x in module.parameters():
        if x.requires_grad and _has_bits(x) and x.is_contiguous():
            (matrices if x.dim() > 1 else vectors).append(x)
    chosen = [*vectors[-1:], *matrices[-2:]]
    parts = [x.view(-1)[:_COMPARED].float() for x in chosen if x.device == chosen[0].device]
    return bits_checksum(torch.cat(parts)) if parts else None


def _kind(summary: Summary) -> str:
    return f"{summary.dtype} {list(summary.shape)}"


def _summaries(ring: GroupInfo, model: nn.Module) -> dict[str, Summary]:
    tensors = dict(chain(model.named_parameters(), model.named_buffers()))
    sums = {name: bits_checksum(x) for name, x in tensors.items() if _has_bits(x)}
    # All are queued before the first is waited for.
    numbers = {name: int(total) for name, total in sums.items()}
    is_offloaded = any(hasattr(x, "_hf_hook") for x in model.modules())
    fsdp = sys.modules.get("torch.distributed.fsdp")  # a model that it has wrapped has imported it
    is_fsdp = fsdp is not None and any(isinstance(x, fsdp.FSDPModule) for x in model.modules())
    return {
        name: Summary(
            *(tuple(x.shape), str(x.dtype), numbers.get(name)),
            None if is_fsdp else _flaw(ring, x, is_offloaded),
        )
        for name, x in tensors.items()
    }


def _flaw(ring: GroupInfo, x: Any, is_offloaded: bool) -> str | None:
    """Of a tensor of a model without FSDP, which makes parameters whole in each call."""
    if x.is_meta and is_offloaded:
        return "on a device to be compared between ranks, got one on meta, as offloaded weights are"
    if is_dtensor(x):
        for axis, placement in enumerate(x.placements):
            group = x.device_mesh.get_group(axis)
            if not placement.is_replicate() and share_ranks(group, ring.process_group):
                return (
                    "whole on each rank of the ring, got one that tensor parallelism splits over "
                    "them: load the model without tp_plan, or give its layers to fully_shard"
                )
    return None


def _has_bits(x: torch.Tensor) -> bool:
    is_plain = type(x) in (torch.Tensor, nn.Parameter)
    return is_plain and not x.is_meta and x.layout == torch.strided and not x.is_quantized
