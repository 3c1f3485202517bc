# SPDX-License-Identifier: Apache-2.0
"""What all functions share: their keywords, their results, and the forms for packed tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ringattn._checks import check_flag, check_keywords, check_tensors
from ringattn._distributed.errors import ErrorsToPeers, refuse
from ringattn._distributed.groups import Group, GroupInfo, resolve_group
from ringattn._masks import CuSeqlens, Mask
from ringattn.functional import attend
from ringattn.partition import Partition

Function = Callable[..., Any]

# Of a ring: the partition, and the boundaries of documents in the whole sequence.
Layout = Callable[[GroupInfo], tuple[Partition, CuSeqlens | None]]


class Options(NamedTuple):
    """The keywords that all functions have, in their order."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int]
    alibi_slopes: torch.Tensor | None
    deterministic: bool
    return_attn_probs: bool
    group: Group


def attention(
    function: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layout: Layout,
    options: Options,
    *,
    varlen: bool,
) -> Any:
    """out, or (out, lse, None). ``layout`` is called after the other checks; its errors, too, reach
    all ranks."""
    ring = resolve_group(options.group)
    with ErrorsToPeers(ring):
        refused = {"dropout_p": options.dropout_p, "alibi_slopes": options.alibi_slopes}
        check_keywords(function, refused)
        with_lse = check_flag("return_attn_probs", options.return_attn_probs)
        check_tensors(q=q, k=k, v=v)
        _check_deterministic(options.deterministic, q, k, v)
        dims = "[T, H, D]" if varlen else "[B, S, H, D]"
        for name, x in (("q", q), ("k", k), ("v", v)):
            if x.dim() != (3 if varlen else 4):
                raise ValueError(f"{name} must be {dims}, got shape {list(x.shape)}")
        partition, documents = layout(ring)
    mask = Mask(options.causal, options.window_size, 0.0, documents)
    if varlen:
        q, k, v = (x.unsqueeze(0) for x in (q, k, v))
    out, lse = attend(ring, q, k, v, partition, mask, options.softmax_scale)
    if varlen:
        out, lse = out.squeeze(0), lse.squeeze(0)
    return (out, lse, None) if with_lse else out


def _check_deterministic(deterministic: bool, *tensors: torch.Tensor) -> None:
    if not check_flag("deterministic", deterministic):
        return
    with_gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if with_gradients and not torch.are_deterministic_algorithms_enabled():
        raise ValueError(
            "deterministic must be False unless torch.use_deterministic_algorithms(True) is in "
            "force, which makes every backward deterministic, got True"
        )


def packed_forms(function: Function) -> tuple[Function, Function]:
    """The functions that take (q, kv) and (qkv) in place of (q, k, v), with the same options behind
    them: ``kv`` is ``[..., 2, H_kv, D]`` and ``qkv`` is ``[..., 3, H, D]``."""
    own = inspect.signature(function)
    options = list(own.parameters.values())[3:]

    def parts(name: str, packed: torch.Tensor, count: int, args: Any, named: Any) -> Any:
        if isinstance(packed, torch.Tensor) and packed.dim() > 2 and packed.size(-3) == count:
            return packed.unbind(-3)
        group = args[-1] if len(args) == len(options) else named.get("group")
        got = getattr(packed, "shape", type(packed).__name__)
        refuse(
            resolve_group(group),
            f"{name} must be [..., {count}, H, D], "
            f"got {f'shape {list(got)}' if isinstance(got, torch.Size) else got}",
        )

    def kvpacked(q: torch.Tensor, kv: torch.Tensor, *args: Any, **named: Any) -> Any:
        return function(q, *parts("kv", kv, 2, args, named), *args, **named)

    def qkvpacked(qkv: torch.Tensor, *args: Any, **named: Any) -> Any:
        return function(*parts("qkv", qkv, 3, args, named), *args, **named)

    for form, operands in ((kvpacked, ("q", "kv")), (qkvpacked, ("qkv",))):
        first = [
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in operands
        ]
        vars(form)["__signature__"] = own.replace(parameters=[*first, *options])
        form.__name__ = form.__qualname__ = function.__name__.replace(
            "func", f"{form.__name__}_func"
        )
        form.__module__ = function.__module__
        form.__doc__ = f"{function.__name__} of {' and '.join(operands)}."
    return kvpacked, qkvpacked
