# SPDX-License-Identifier: Apache-2.0
"""Checks of arguments before an operator sees them; ``csrc/ops/checks.h`` has the rest.

A refusal reads "subject must rule, got value". Each rule has one sentence: here, in the C++ checks,
or in both with the same words where a call may reach either.
"""

import json
import math
import numbers
import operator
import sys
from collections.abc import Iterable, Mapping, Set, Sized
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.autograd import forward_ad

from ringattn import _C, _library
from ringattn._distributed.errors import ErrorsToPeers
from ringattn._distributed.groups import GroupInfo

# Keywords of torch's scaled_dot_product_attention, of flash-attention and of packages built on
# them: what to write instead, and the values that change nothing, which are accepted.
_CAUSALITY = "causality is causal= (ring_attention, RingAttention) or diagonal=0 (block_attention)"
_MASKS = (
    "the masks are causal=, window_size= and cu_seqlens= (ring_attention), diagonal= and "
    "key_ranges= (block_attention)"
)
_PACKED = (
    "the boundaries of packed documents are cu_seqlens= (ring_attention), of queries and keys alike"
)
_PAGED = "a cache is given as tensors of its filled rows, k_shard[:, :n]"
_ROTARY = "queries and keys are rotated before the call"
_PADDED = "padding before the keys is key_begins= (decode_attention)"
_SCALED = "inputs are float16, bfloat16, float32 or float64, without scales of their own"
_HINT = "how work is divided is chosen by the kernels"
_LSE = "the log-sum-exp comes with return_lse=True (ring_attention), and always (block_attention)"
_SINKS = "a logit per head in the denominator is sinks="
_SOFTCAP = "the cap of the scores is softcap= (the functions), the layer's own in RingAttention"
_WINDOW = (
    "a window is window_size= (ring_attention), the layer's own in RingAttention, and key_ranges= "
    "(block_attention)"
)
_Rules = Mapping[str, tuple[str, tuple[Any, ...]]]
_REFUSED_KEYWORDS: _Rules = {
    "attn_mask": (_MASKS, (None,)),
    "attention_mask": (_MASKS, (None,)),
    "attn_bias": ("scores have no bias here", (None,)),
    "alibi_slopes": ("scores have no bias here", (None,)),
    "position_bias": ("scores have no bias here", (None,)),
    "head_mask": ("all heads count alike here", (None,)),
    "block_mask": (_MASKS, (None,)),
    "mask_mod": (_MASKS, (None,)),
    "score_mod": ("scores are multiplied by scale= alone", (None,)),
    "softcap": (_SOFTCAP, (None, 0)),
    "logits_soft_cap": (_SOFTCAP, (None, 0)),
    "dropout_p": ("attention has no dropout here", (None, 0)),
    "is_causal": (_CAUSALITY, ()),
    "causal": (_CAUSALITY, ()),
    "enable_gqa": ("fewer key/value heads than query heads are always allowed", (False,)),
    "softmax_scale": ("the factor of the scores is scale=", (None,)),
    "process_group": ("the ranks are group= (ring_attention, decode_attention)", ()),
    "window_size": (_WINDOW, (None, (-1, -1), (None, None))),
    "sliding_window": (_WINDOW, (None,)),
    "sinks": (_SINKS, (None,)),
    "s_aux": (_SINKS, (None,)),
    "learnable_sink": (_SINKS, (None,)),
    "cu_seqlens": (_PACKED, (None,)),
    "cu_seq_lens_q": (_PACKED, (None,)),
    "cu_seqlens_q": (_PACKED, (None,)),
    "cu_seqlens_k": (_PACKED, (None,)),
    "cu_seqlens_k_new": (_PACKED, (None,)),
    "max_seqlen": (_PACKED, (None,)),
    "max_seqlen_q": (_PACKED, (None,)),
    "max_seqlen_k": (_PACKED, (None,)),
    "seqused_q": (_PACKED, (None,)),
    "seqused_k": (_PACKED, (None,)),
    "attention_chunk": ("chunks are documents, whose boundaries are cu_seqlens=", (None, 0)),
    "k_cache": (_PAGED, (None,)),
    "v_cache": (_PAGED, (None,)),
    "cache_seqlens": (_PAGED, (None,)),
    "cache_batch_idx": (_PAGED, (None,)),
    "block_table": (_PAGED, (None,)),
    "page_table": (_PAGED, (None,)),
    "cache_leftpad": (_PADDED, (None,)),
    "leftpad_k": (_PADDED, (None,)),
    "rotary_cos": (_ROTARY, (None,)),
    "rotary_sin": (_ROTARY, (None,)),
    "rotary_seqlens": (_ROTARY, (None,)),
    "rotary_interleaved": (_ROTARY, (None, False, True)),
    "qv": ("q and k alone make the scores", (None,)),
    "q_descale": (_SCALED, (None,)),
    "k_descale": (_SCALED, (None,)),
    "v_descale": (_SCALED, (None,)),
    "num_splits": (_HINT, (None, 0, 1)),
    "pack_gqa": (_HINT, (None, False, True)),
    "sm_margin": (_HINT, (None, 0)),
    "scheduler_metadata": (_HINT, (None,)),
    "deterministic": (
        "a forward always gives the same bits, a backward does under "
        "torch.use_deterministic_algorithms(True)",
        (None, False),
    ),
    "return_attn_probs": (_LSE, (None, False)),
    "return_softmax_lse": (_LSE, (None, False)),
}


def check_keywords(
    function: str, refused: dict[str, Any], rules: _Rules = _REFUSED_KEYWORDS
) -> None:
    """Refuses keywords of other packages by name, but for the values that change nothing.
    ``rules``: what to write instead, and these values."""
    for name, value in refused.items():
        if name not in rules:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        instead, neutral = rules[name]
        plain = tuple(value) if isinstance(value, list) else value
        comparable = plain is None or isinstance(plain, (bool, int, float, tuple))
        if comparable and plain in neutral:
            continue
        got = type(value).__name__ if isinstance(value, torch.Tensor) else repr(value)
        raise ValueError(f"{name} must be left out ({instead}), got {got}")


def refuse_keywords(function: str, ring: GroupInfo, refused: dict[str, Any]) -> None:
    """:func:`check_keywords`, with a refusal reported to the peers."""
    with ErrorsToPeers(ring):
        check_keywords(function, refused)


def are_plain(*tensors: torch.Tensor) -> bool:
    """Whether these are torch's own dense tensors on a device with a kernel: the usual case, in
    which :func:`check_tensors` has nothing to refuse."""
    for tensor in tensors:
        if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_quantized or tensor.is_nested or not _has_kernel(tensor):
            return False
    return True


def _has_kernel(tensor: torch.Tensor) -> bool:
    return tensor.is_cpu or (tensor.is_cuda and "cuda" in _library.DEVICES)


def check_tensors(**tensors: torch.Tensor) -> None:
    """Checks that an operator cannot make: the dispatcher would refuse or unwrap these tensors."""
    for name, tensor in tensors.items():
        if are_plain(tensor):
            continue
        check_is_tensor(name, tensor)
        if is_dtensor(tensor):
            raise ValueError(
                f"{name} must be a plain tensor that holds this rank's rows, got a DTensor "
                "(use its to_local())"
            )
        _check_memory(name, tensor)
        if not _has_kernel(tensor):
            raise ValueError(
                f"{name} must be on a device with a kernel ({', '.join(_library.DEVICES)}), "
                f"got {tensor.device}"
            )


def check_is_tensor(name: str, x: Any) -> None:
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")


def is_dtensor(tensor: torch.Tensor) -> bool:
    # Note: importing the module would double the time that importing ringattn takes. A process that
    # has a DTensor has imported it.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _check_memory(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise ValueError(f"{name} must be a plain tensor, got a nested one")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{name} must be strided, got {tensor.layout}")
    if tensor.is_quantized:
        raise ValueError(f"{name} must not be quantized, got {tensor.dtype}")


# ---- numbers and flags -------------------------------------------------------------------------

_MOST_SHOWN = 80  # characters of a value in an error


def shown(value: Any) -> str:
    """``value`` as an error shows it: its repr, or, where that is long, what it is."""
    text = repr(value)
    if (len(text) <= _MOST_SHOWN and "\n" not in text) or isinstance(value, numbers.Number):
        return text
    size = f" of {len(value)}" if isinstance(value, Sized) else ""
    return f"a {type(value).__name__}{size}"


def as_integer(value: Any) -> int | None:
    """A plain int of any kind of integer, NumPy's and tensors' among them; None for what is none.
    True is none: it is a flag that has come to the wrong place."""
    # Note: what is an int already stays as it is: operator.index would make a traced length a
    # constant, and recompile for the next one.
    if type(value) is int or isinstance(value, torch.SymInt):
        return value  # type: ignore[return-value]
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def check_integer(name: str, value: Any, *, least: Literal[0, 1] | None = None) -> int:
    number = as_integer(value)
    if number is None:
        raise ValueError(f"{name} must be an integer, got {shown(value)}")
    if least is not None and number < least:
        raise ValueError(f"{name} must {_AT_LEAST[least]}, got {number}")
    return number


_AT_LEAST = {0: "not be negative", 1: "be positive"}


def check_int64(name: str, value: Any, *, least: Literal[0, 1] | None = None) -> int:
    """:func:`check_integer`, and that C++ can hold it."""
    number = check_integer(name, value, least=least)
    # While compiling, what is traced is a size, which fits.
    if not torch.compiler.is_compiling() and not -(2**63) <= number < 2**63:
        raise ValueError(f"{name} must fit into 64 bits, got {number}")
    return number


def check_int64_or_none(name: str, value: Any, *, least: Literal[0, 1] | None = None) -> int | None:
    """:func:`check_int64` of what may be left out."""
    if value is None:
        return None
    if as_integer(value) is None:
        raise ValueError(f"{name} must be an integer or None, got {shown(value)}")
    return check_int64(name, value, least=least)


def check_integers(
    name: str, values: Iterable[Any], *, least: Literal[0, 1] | None = None
) -> tuple[int, ...]:
    # Keys of a mapping, members of a set and bytes are integers in no order that was meant.
    if isinstance(values, (Mapping, Set, bytes, bytearray)):
        raise ValueError(f"{name} must be a list of integers, got {shown(values)}")
    try:
        found = tuple(as_integer(value) for value in values)
    except TypeError:
        found = (None,)
    if None in found:
        raise ValueError(f"{name} must be integers, got {shown(values)}")
    integers = cast(tuple[int, ...], found)
    if least is not None:
        for number in integers:
            check_integer(name, number, least=least)
    return integers


def is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """A number, finite as a float."""
    try:
        return is_number(value) and math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def check_positive(name: str, value: Any) -> float:
    if not is_finite(value) or value <= 0:
        raise ValueError(f"{name} must be finite and positive, got {shown(value)}")
    return float(value)


def check_not_negative(name: str, value: Any) -> float:
    if not is_finite(value) or value < 0:
        raise ValueError(f"{name} must be finite and not negative, got {shown(value)}")
    return float(value)


def check_percentage(name: str, value: Any) -> float:
    if not is_number(value) or not 0 < value <= 100:
        raise ValueError(f"{name} must lie in (0, 100], got {shown(value)}")
    return float(value)


def check_flag(name: str, value: Any) -> bool:
    """True or False, NumPy's too; not what equals them."""
    if not isinstance(value, (bool, np.bool_)):
        got = type(value).__name__ if isinstance(value, torch.Tensor) else shown(value)
        raise ValueError(f"{name} must be True or False, got {got}")
    return bool(value)


# ---- dtypes and devices ------------------------------------------------------------------------


def check_floating(dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating torch.dtype, got {dtype!r}")
    return dtype


def check_device(device: Any, *, or_meta: bool = False) -> torch.device:
    """One that is there and has a kernel, with its index where there are several."""
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError):
        place = None
    if place is not None and or_meta and place.type == "meta":
        return place
    if place is None or place.type not in _library.DEVICES:
        got = repr(device) if place is None else place
        raise ValueError(
            f"device must be one with a kernel ({', '.join(_library.DEVICES)}), got {got}"
        )
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise ValueError(f"device must be there, got {place} where there are {count} CUDA devices")
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    return place


# ---- attention ---------------------------------------------------------------------------------


def check_dims(name: str, tensor: torch.Tensor, shape: str) -> None:
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name} must be {shape}, got shape {list(tensor.shape)}")


MAX_HEAD_DIM = 256
HEAD_DIM_RULE = f"a multiple of 8 from 8 to {MAX_HEAD_DIM}"


def is_head_dim(head_dim: int) -> bool:
    """Whether kernels take this head dimension, see HEAD_DIM_RULE."""
    return head_dim % 8 == 0 and 0 < head_dim <= MAX_HEAD_DIM


def has_heads_first(x: torch.Tensor) -> bool:
    """Whether ``x``, meant to be ``[B, S, H, D]``, has the strides of a transposed
    ``[B, H, S, D]``."""
    return x.dim() == 4 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()


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


def check_no_grad(operation: str, **tensors: torch.Tensor) -> None:
    """For an operation without a backward."""
    for name, tensor in tensors.items():
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ValueError(
                f"{name} must not require grad because {operation} has no backward: call it under "
                "torch.no_grad(), got requires_grad=True"
            )


def check_collective(**tensors: torch.Tensor) -> None:
    """Refusals that the dispatcher would raise before the operator could report them to peers."""
    compiling = torch.compiler.is_compiling()
    for name, tensor in tensors.items():
        if not compiling and has_tangent(tensor):
            raise ValueError(
                f"{name} must have no tangent because there is no forward-mode derivative, got a "
                "dual tensor"
            )
        if not compiling and torch._C._functorch.is_batchedtensor(tensor):
            raise ValueError(
                f"{name} must not be batched by torch.vmap, got a batched tensor (B is the batch)"
            )
        if not compiling and torch._C._functorch.is_gradtrackingtensor(tensor):
            raise ValueError(
                f"{name} must not be differentiated by torch.func.grad or vjp, got a tensor that "
                "they track: call backward() or torch.autograd.grad()"
            )


def finite_scale(scale: float | None, q: torch.Tensor) -> float:
    if scale is None:
        # D 0 is the operator's to refuse.
        return 1 / math.sqrt(q.size(-1)) if q.size(-1) > 0 else 1.0
    if isinstance(scale, torch.Tensor):
        scale = _scale_of(scale)
    try:
        if isinstance(scale, bool):
            raise TypeError
        scale = _wide(scale)
        # Note: torch.compile traces this, and not math.isfinite.
        finite = -sys.float_info.max <= scale <= sys.float_info.max
    except (TypeError, ValueError):
        raise ValueError(f"scale must be a number, got {scale!r}") from None
    if not finite:
        got = "a number past the range of floats" if isinstance(scale, int) else scale
        raise ValueError(f"scale must be finite, got {got}")
    return float(scale)


def _wide(number: Any) -> Any:
    """A real number of NumPy as a float: one of fewer bits cannot be compared with the largest."""
    of_numpy = type(number).__module__ == "numpy" and isinstance(number, numbers.Real)
    return float(number) if of_numpy else number


def finite_softcap(softcap: float | None) -> float:
    """``softcap`` as a float; None, which other packages take for no softcap, is 0."""
    if softcap is None:
        return 0.0
    if isinstance(softcap, torch.Tensor):  # a learned one would silently be a constant
        raise ValueError("softcap must be a number, got a tensor")
    try:
        if isinstance(softcap, bool):
            raise TypeError
        softcap = _wide(softcap)
        valid = 0 <= softcap <= sys.float_info.max  # torch.compile traces this
    except (TypeError, ValueError):
        raise ValueError(f"softcap must be a number, got {softcap!r}") from None
    if not valid:
        got = "a number past the range of floats" if isinstance(softcap, int) else softcap
        got = softcap if softcap < 0 else got
        raise ValueError(f"softcap must be finite and not negative, got {got}")
    return float(softcap)


def _scale_of(scale: torch.Tensor) -> float:
    """The number in a tensor of one element, which on CUDA the host waits for."""
    if torch.compiler.is_compiling():
        raise ValueError("scale must be a number under torch.compile, got a tensor")
    if scale.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "scale must be a number, got a tensor that requires grad, which would be a constant "
            "here"
        )
    if scale.numel() != 1 or scale.is_complex() or scale.dtype == torch.bool:
        raise ValueError(f"scale must be a number, got a tensor {list(scale.shape)}, {scale.dtype}")
    if not is_concrete(scale) or scale.is_meta:
        raise ValueError("scale must be a number, got a tensor without a value")
    if scale.is_cuda and torch.cuda.is_current_stream_capturing():
        raise ValueError("scale must be a number under capture, got a tensor on CUDA")
    return float(scale.item())


def check_transport(transport: Any, *, in_build: bool = False) -> None:
    """ValueError for what is no name; with ``in_build`` also for a transport that this build does
    not have, which a ring call leaves to the operator."""
    if not isinstance(transport, str):
        raise ValueError(f"transport must be a name, got {shown(transport)}")
    if in_build and transport not in (names := ("auto", *_C.transports())):
        *others, last = (f'"{name}"' for name in names)
        raise ValueError(f'transport must be {", ".join(others)} or {last}, got "{transport}"')


# ---- files -------------------------------------------------------------------------------------


def read_json(path: Path | str) -> Any:
    """The content of a JSON file in UTF-8; ValueError where it holds anything else."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} must be JSON, got {error}") from None
