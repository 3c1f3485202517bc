# SPDX-License-Identifier: Apache-2.0
"""Gradients of parameters, summed over the ranks of a ring."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from ringattn._checks import is_dtensor
from ringattn._distributed.collectives import Content, agree, complete
from ringattn._distributed.groups import Group, GroupInfo, resolve_group
from ringattn.models.llama import LLaMA
from ringattn.modules import RingAttention
from ringattn.parallel import models_of, settings_of

_OPERATION = "all_reduce_gradients"

# Elements of a bucket, 64 MiB in float32: large enough for the speed of the link, small beside the
# gradients. A larger gradient goes in several buckets.
_BUCKET_SIZE = 1 << 24


def all_reduce_gradients(model: nn.Module, group: Group = None) -> None:
    """Sums the gradients of a model's parameters over the ranks of a ring, in place. Collective:
    every rank calls it once before each step of the optimizer, after all backwards whose gradients
    the step accumulates. A second call would sum the sums.

    Each rank's gradient is the part that its own tokens contribute, so parts are summed, not
    averaged. They are added in float32 (float64 for float64) and rounded once, in buckets of 64 MiB
    with one all-reduce each; afterwards all ranks hold the same bits.

    Args:
        model: any module, with the same parameters on every rank. A parameter that several modules
            share is summed once.
        group: as in :func:`ringattn.ring_attention`. None means the ring that the model is on
            (:func:`ringattn.parallelize`, :class:`ringattn.models.LLaMA`,
            :class:`ringattn.RingAttention`), also where another module wraps it, and the default
            group for a module that is on none.

    A gradient that is missing on some ranks counts as zero there; one that is missing on all ranks
    stays None.

    Raises:
        ValueError: on every rank: parameters that require grad and differ between ranks in number,
            shape or dtype; sparse gradients; DTensors, which FSDP2 sums itself over a mesh that
            contains the ring; layers on several rings without ``group``; gradients of modules
            beside a parallelized part, without ``group``.
        torch.distributed.DistBackendError: a peer died or never arrived.
    """
    is_module = isinstance(model, nn.Module)
    ring = _ring_of(model) if is_module and group is None else resolve_group(group)
    named = (
        [(name, x) for name, x in model.named_parameters() if x.requires_grad] if is_module else []
    )
    mistake = None if is_module else f"model must be a module, got {type(model).__name__}"
    if is_module and group is None:
        mistake = _whole_gradients(model)
    kinds = "\n".join(f"{list(x.shape)} {x.dtype}" for _, x in named)
    facts = {
        "the number of parameters that require grad": len(named),
        "the shapes and dtypes of parameters": Content(zlib.crc32(kinds.encode())),
    }
    own = [None if x.grad is None else x.grad.dtype for _, x in named]
    of_ranks = agree(ring, _OPERATION, mistake or _mistake(named), facts, own)
    if ring.world_size == 1:
        return
    gradients = []
    for (name, x), *on_ranks in zip(named, *of_ranks, strict=True):
        dtypes = {dtype for dtype in on_ranks if dtype is not None}
        if len(dtypes) > 1:
            raise ValueError(
                f"the gradient of {name} must have one dtype on all ranks, got "
                f"{', '.join(sorted(map(str, dtypes)))}"
            )
        if not dtypes or x.numel() == 0:
            continue
        if x.grad is None:
            x.grad = torch.zeros_like(x, dtype=dtypes.pop())
        gradients.append(x.grad)
    with torch.no_grad():
        for bucket in _buckets(gradients):
            _all_reduce(ring, bucket)


def _ring_of(model: nn.Module) -> GroupInfo:
    """The ring that a model, or one within it, is on; the default group where it is on none."""
    rings = {}
    for module in model.modules():
        if (settings := settings_of(module)) is not None:
            ring = settings.ring()
        elif isinstance(module, (LLaMA, RingAttention)):
            ring = module.ring
        else:
            continue
        rings[ring.name] = ring
    if len(rings) > 1:
        raise ValueError(
            f"group must be given where layers are on several rings, got None and a model on "
            f"{len(rings)}"
        )
    return next(iter(rings.values())) if rings else resolve_group(None)


def _whole_gradients(model: nn.Module) -> str | None:
    """Why a model's gradients are not parts, where modules may lie behind a part that returns the
    rows of all tokens."""
    for body in model.modules():
        inside = {module for part in models_of(body) for module in part.modules()}
        if not inside or model in inside:
            continue
        part_name = next(name for name, module in model.named_modules() if module in inside)
        for at, module in model.named_modules():
            beside = () if module in inside else module.named_parameters(at, recurse=False)
            for name, x in beside:
                if x.requires_grad and x.grad is not None:
                    return (
                        f"model must be its parallelized part {part_name!r}, got one with a "
                        f"gradient of {name} beside it: modules behind that part have whole "
                        "gradients on every rank; for modules before it, give group="
                    )
    return None


def _mistake(named: Iterable[tuple[str, nn.Parameter]]) -> str | None:
    """Why these gradients are not summed; None: they are."""
    for name, x in named:
        grad = x.grad
        if is_dtensor(x) or (grad is not None and is_dtensor(grad)):
            return (
                f"the gradient of {name} must be a plain tensor, got a DTensor: FSDP2 sums it over "
                "its mesh, which then must contain the ranks of the ring"
            )
        if grad is not None and grad.layout is not torch.strided:
            return (
                f"the gradient of {name} must be strided, got {grad.layout}: pass sparse=False to "
                "the embedding"
            )
    return None


def _buckets(gradients: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parts of the gradients, each list on one device and of one dtype, with as many elements as
    one bucket holds."""
    open_ones: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    sizes: dict[tuple[torch.device, torch.dtype], int] = {}
    for gradient in gradients:
        # Gradients of other strides, of channels_last weights for instance, go whole.
        flat = gradient.view(-1) if gradient.is_contiguous() else gradient
        large = gradient.is_contiguous() and gradient.numel() > _BUCKET_SIZE
        for part in flat.split(_BUCKET_SIZE) if large else (flat,):
            kind = (part.device, part.dtype)
            if sizes.get(kind, 0) + part.numel() > _BUCKET_SIZE and open_ones.get(kind):
                yield open_ones.pop(kind)
                sizes[kind] = 0
            open_ones.setdefault(kind, []).append(part)
            sizes[kind] = sizes.get(kind, 0) + part.numel()
    yield from open_ones.values()


def _all_reduce(ring: GroupInfo, parts: list[torch.Tensor]) -> None:
    dtype = torch.promote_types(parts[0].dtype, torch.float32)
    total = torch.cat([part.reshape(-1).to(dtype) for part in parts])
    complete(
        ring,
        _OPERATION,
        total.device,
        lambda: [dist.all_reduce(total, group=ring.process_group, async_op=True)],
    )
    for part, summed in zip(parts, total.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view(part.shape))
