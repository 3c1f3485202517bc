# SPDX-License-Identifier: Apache-2.0
"""What the functions ask of their arguments before an operator sees them: ``csrc/ops/checks.h`` has
the rest. A refusal reads "subject must rule, got value"."""

import math
import numbers
import operator
import sys
from collections.abc import Hashable
from typing import Any

import torch
from torch.autograd import forward_ad

from ringattn import _library
from ringattn._calls import tell_peers
from ringattn._group import Group, Ring, resolve_group

# Keywords of torch's scaled_dot_product_attention and of other packages, and what to write instead.
_REFUSED_KEYWORDS = {
    "attn_mask": "attention is causal, or over all keys",
    "dropout_p": "attention has no dropout here",
    "is_causal": "causality is causal= (ring_attention) or diagonal=0 (block_attention)",
    "enable_gqa": "fewer key/value heads than query heads are always allowed",
    "softmax_scale": "the factor of the scores is scale=",
    "process_group": "the ranks are group= (ring_attention, decode_attention)",
}


def check_keywords(function: str, refused: dict[str, Any]) -> None:
    for name, value in refused.items():
        if name not in _REFUSED_KEYWORDS:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name} must be left out ({_REFUSED_KEYWORDS[name]}), got {got}")


def refuse_keywords(function: str, group: Group, refused: dict[str, Any]) -> None:
    """:func:`check_keywords`, and the peers are told."""
    try:
        check_keywords(function, refused)
    except Exception as error:
        tell_peers(resolve_group(group), error)
        raise


def check_tensors(**tensors: torch.Tensor) -> None:
    """What an operator cannot say by itself: it would not be reached, or not with these tensors."""
    for name, tensor in tensors.items():
        plain = type(tensor) is torch.Tensor  # the usual case, told at once
        if not plain and not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if not plain and is_dtensor(tensor):
            raise ValueError(
                f"{name} must be a plain tensor that holds this rank's rows, got a DTensor "
                "(use its to_local())"
            )
        if (
            not plain
            or tensor.layout is not torch.strided
            or tensor.is_quantized
            or tensor.is_nested
        ):
            _check_memory(name, tensor)
        if not (tensor.is_cpu or (tensor.is_cuda and "cuda" in _library.DEVICES)):
            raise ValueError(
                f"{name} must be on a device with a kernel ({', '.join(_library.DEVICES)}), "
                f"got {tensor.device}"
            )


def is_dtensor(tensor: torch.Tensor) -> bool:
    # Note: importing the module would double the time that importing ringattn takes. Who has a
    # DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise ValueError(f"{name} must be a plain tensor, got a nested one")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be strided, got {tensor.layout}")
    if tensor.is_quantized:
        raise ValueError(f"{name} must not be quantized, got {tensor.dtype}")


def is_integer(value: object) -> bool:
    return isinstance(value, (int, numbers.Integral)) and not isinstance(value, bool)  # NumPy's too


def check_flag(name: str, value: bool) -> bool:
    # Arrays and tensors compare elementwise.
    single = isinstance(value, Hashable) and not isinstance(value, torch.Tensor)
    if not single or value not in (True, False):
        got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name} must be True or False, got {got}")
    return bool(value)


def check_diagonal(diagonal: int | None) -> int | None:
    if diagonal is None:
        return None
    # Note: what is an int already stays as it is: operator.index would make a traced length a
    # constant, and recompile for the next one.
    if type(diagonal) is not int and not isinstance(diagonal, torch.SymInt):
        try:
            if isinstance(diagonal, bool):  # True is no place of a diagonal: causal attention is 0
                raise TypeError
            diagonal = operator.index(diagonal)
        except TypeError:
            raise ValueError(f"diagonal must be a whole number or None, got {diagonal!r}") from None
    if not torch.compiler.is_compiling() and not -(2**63) <= diagonal < 2**63:
        raise ValueError(f"diagonal must fit 64 bits, got {diagonal}")
    return diagonal


def check_dims(name: str, tensor: torch.Tensor, shape: str) -> None:
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")


def has_tangent(tensor: torch.Tensor) -> bool:
    level = forward_ad._current_level  # -1: nothing is differentiated forwards
    return level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def is_concrete(tensor: torch.Tensor) -> bool:
    """Whether there are numbers to look at: the tensor is not fake, traced, or wrapped by
    ``torch.func``. Not to be asked while compiling."""
    return (
        type(tensor) in (torch.Tensor, torch.nn.Parameter)
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def check_collective(**tensors: torch.Tensor) -> None:
    """What the dispatcher would refuse before the operator could tell the peers."""
    with_grad = torch.is_grad_enabled()
    compiling = torch.compiler.is_compiling()
    for name, tensor in tensors.items():
        if with_grad and tensor.requires_grad:
            raise ValueError(
                f"{name} must not require grad because there is no backward yet, got a tensor that "
                "does (detach it, or call under torch.no_grad())"
            )
        if not compiling and has_tangent(tensor):
            raise ValueError(
                f"{name} must have no tangent because there is no forward-mode derivative, got a "
                "dual tensor"
            )
        if not compiling and torch._C._functorch.is_batchedtensor(tensor):
            raise ValueError(
                f"{name} must not be batched by torch.vmap, got a tensor that is (B is the batch)"
            )


def finite_scale(scale: float | None, q: torch.Tensor) -> float:
    if scale is None:
        # D 0 is the operator's to refuse.
        return 1 / math.sqrt(q.size(-1)) if q.size(-1) > 0 else 1.0
    if isinstance(scale, torch.Tensor):  # a learned one would silently be a constant
        raise ValueError("scale must be a number, got a tensor")
    try:
        if type(scale).__module__ == "numpy" and isinstance(scale, numbers.Real):
            scale = float(scale)  # of fewer bits it would overflow here
        # Note: torch.compile traces this, and not math.isfinite.
        finite = -sys.float_info.max <= scale <= sys.float_info.max
    except (TypeError, ValueError):
        raise ValueError(f"scale must be a number, got {scale!r}") from None
    if not finite:
        got = "a number past the range of floats" if isinstance(scale, int) else scale
        raise ValueError(f"scale must be finite, got {got}")
    return float(scale)


def clamp_depth(depth: int | None, ring: Ring) -> int | None:
    if depth is None:
        return None
    if not is_integer(depth) or depth < 1:
        raise ValueError(f"depth must be None or an integer of at least 1, got {depth!r}")
    return min(int(depth), max(1, ring.world_size - 1))


def check_transport(transport: str) -> None:
    if not isinstance(transport, str):
        raise ValueError(f"transport must be a name, got {transport!r}")
