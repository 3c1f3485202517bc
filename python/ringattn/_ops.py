# SPDX-License-Identifier: Apache-2.0
"""The Python side of the operators: fake kernels and flop formulas.

Schemas and kernels are C++ (``csrc/ops/library.cpp``). The group travels as its name.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.utils.flop_counter import register_flop_formula

from ringattn import _C, _library  # noqa: F401  the library defines the operators
from ringattn._checks import HEAD_DIM_RULE, has_heads_first, is_concrete, is_head_dim

_ops = torch.ops.ringattn


def _rank_in(group_name: str) -> int:
    return _resolve_process_group(GroupName(group_name)).rank() if group_name else 0


# Fake kernels: shapes and dtypes without data, for torch.compile, export and FakeTensorMode. They
# check shapes and dtypes as the operators do, with the sentences of csrc/ops/checks.cpp.


def _check(condition: Any, sentence: Callable[[], str]) -> None:
    torch._check(condition, lambda: f"ringattn: {sentence()}")  # what is symbolic becomes a guard


def _check_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    _check(q.dim() == 4, lambda: f"q must be [B, S, H, D], got shape {list(q.shape)}")
    head_dim = q.size(3)
    _check(
        is_head_dim(head_dim),
        lambda: f"the head dimension must be {HEAD_DIM_RULE}, got {head_dim}",
    )
    for name, x in (("k", k), ("v", v)):
        _check_like(name, x, q)
    num_heads, num_kv_heads = q.size(2), k.size(2)
    _check(
        k.size(1) == v.size(1),
        lambda: f"v must have as many rows as k, {k.size(1)}, got {v.size(1)}",
    )
    _check(
        num_kv_heads == v.size(2),
        lambda: f"v must have as many heads as k, {num_kv_heads}, got {v.size(2)}",
    )
    _check(
        num_kv_heads > 0 and num_heads > 0,
        lambda: f"q and k must have at least one head, got {num_heads} and {num_kv_heads}",
    )
    _check(
        num_heads % num_kv_heads == 0,
        lambda: (
            "the number of query heads must be a multiple of the number of key heads, "
            f"{num_kv_heads}, got {num_heads}{_heads_hint(q, k)}"
        ),
    )


def _heads_hint(q: torch.Tensor, k: torch.Tensor) -> str:
    swapped_fit = 0 < k.size(1) < k.size(2) and q.size(1) % k.size(1) == 0
    if swapped_fit or has_heads_first(q) or has_heads_first(k):
        return "; these look like [B, H, S, D]: pass transpose(1, 2) of q, k and v"
    return ""


def _check_like(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    _check(x.dim() == 4, lambda: f"{name} must be [B, S, H_kv, D], got shape {list(x.shape)}")
    _check(
        x.dtype == q.dtype,
        lambda: f"{name} must have the dtype of q, {q.dtype}, got {x.dtype}",
    )
    _check(
        x.size(0) == q.size(0),
        lambda: f"{name} must have the batch size of q, {q.size(0)}, got {x.size(0)}",
    )
    _check(
        x.size(3) == q.size(3),
        lambda: f"{name} must have the head dimension of q, {q.size(3)}, got {x.size(3)}",
    )


def _new_lse(q: torch.Tensor) -> torch.Tensor:  # [B, H, S_q]
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return q.new_empty([q.size(0), q.size(2), q.size(1)], dtype=dtype)


@torch.library.register_fake("ringattn::block_attention")
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    diagonal: int | None,
    key_ranges: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v)
    return q.new_empty(q.shape), _new_lse(q)


def _new_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    dsinks = _new_lse(q).new_empty([0]) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


@torch.library.register_fake("ringattn::block_attention_backward")
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    diagonal: int | None,
    key_ranges: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v)
    return _new_gradients(q, k, v, sinks)


@torch.library.register_fake("ringattn::block_attention_")
def _(
    out: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    diagonal: int | None,
    softcap: float = 0.0,
) -> None:
    _check_attention(q, k, v)


@torch.library.register_fake("ringattn::merge_states_")
def _(
    out: torch.Tensor, lse: torch.Tensor, other_out: torch.Tensor, other_lse: torch.Tensor
) -> None:
    return None


def _keep_when_empty(*results: torch.Tensor) -> None:
    """Makes inductor keep collective operators whose results no kernel reads, as those of a rank
    without tokens: kernels of no elements read nothing, and the other ranks wait for this one.

    Note: torch.fx.node.has_side_effect would keep them too, but AOTAutograd then runs each forward
    a second time in the backward.
    """
    ir = sys.modules.get("torch._inductor.ir")
    if ir is None:
        return
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if not any(statically_known_true(result.numel() == 0) for result in results):
        return
    before = ir.FallbackKernel.has_side_effects
    if hasattr(before, _KEPT):
        return

    def has_side_effects(kernel: Any) -> bool:
        return kernel.op_overload in _COLLECTIVES or bool(before(kernel))

    setattr(has_side_effects, _KEPT, True)
    ir.FallbackKernel.has_side_effects = has_side_effects


_KEPT = "_ringattn_keeps_collectives"
_COLLECTIVES = frozenset(
    {
        _ops.ring_forward.default,
        _ops.ring_backward.default,
        _ops.rotate_kv.default,
        _ops.wait_kv.default,
    }
)


@torch.library.register_fake("ringattn::ring_forward")
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    order: Sequence[int],
    layout: str,
    causal: bool,
    scale: float,
    group_name: str,
    transport: str,
    depth: int | None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pieces: torch.Tensor | None = None,
    key_lengths: Sequence[int] | None = None,
    key_order: Sequence[int] | None = None,
    key_layout: str | None = None,
    key_pieces: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v)
    _keep_when_empty(q)
    return q.new_empty(q.shape), _new_lse(q)


@torch.library.register_fake("ringattn::ring_backward")
def _(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    lengths: Sequence[int],
    order: Sequence[int],
    layout: str,
    causal: bool,
    scale: float,
    group_name: str,
    transport: str,
    depth: int | None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pieces: torch.Tensor | None = None,
    key_lengths: Sequence[int] | None = None,
    key_order: Sequence[int] | None = None,
    key_layout: str | None = None,
    key_pieces: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v)
    _keep_when_empty(q, k)
    return _new_gradients(q, k, v, sinks)


@torch.library.register_fake("ringattn::rotate_kv")
def _(
    kv: torch.Tensor,
    lengths: Sequence[int],
    order: Sequence[int],
    group_name: str,
    transport: str,
) -> torch.Tensor:
    place = list(order).index(_rank_in(group_name))
    rows = lengths[order[place - 1]]
    received = kv.new_empty([2, kv.size(1), rows, kv.size(3), kv.size(4)])
    _keep_when_empty(received)
    return received


@torch.library.register_fake("ringattn::wait_kv")
def _(received: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(received)


@torch.library.register_fake("ringattn::decode_attention")
def _(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    group_name: str,
    key_lengths: torch.Tensor | None = None,
    key_begins: torch.Tensor | None = None,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    wide: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_attention(q, k, v)
    lse = _new_lse(q)
    return q.new_empty(q.shape, dtype=lse.dtype if wide else q.dtype), lse


@torch.library.register_fake("ringattn::add_rms_norm")
def _(
    x: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.register_fake("ringattn::gated_silu")
def _(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty([*gate_up.shape[:-1], gate_up.size(-1) // 2])


@torch.library.register_fake("ringattn::rotate_into_cache")
def _(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slot: torch.Tensor,
) -> torch.Tensor:
    head_dim = keys.size(3)
    return qkv.new_empty([qkv.size(0), 1, qkv.size(2) // head_dim - 2 * keys.size(2), head_dim])


@torch.library.register_fake("ringattn::gather")
def _(
    rows: torch.Tensor,
    lengths: Sequence[int],
    order: Sequence[int],
    layout: str,
    dim: int,
    group_name: str,
    pieces: torch.Tensor | None = None,
) -> torch.Tensor:
    return rows.new_empty([len(lengths), max(lengths), *rows.shape[1:]])


@torch.library.register_fake("ringattn::all_gather")
def _(mine: torch.Tensor, operation: str, facts: str, group_name: str) -> torch.Tensor:
    world_size = _resolve_process_group(GroupName(group_name)).size()
    return mine.new_empty([world_size, *mine.shape])


# Flop formulas: 4 * D operations (two products of a multiplication and an addition each) for every
# head and every visible pair of a query and a key; in a backward, which has five products, 10 * D.


def _pair_flops(q_shape: Sequence[int]) -> int:
    batch, _, num_heads, head_dim = q_shape
    return 4 * head_dim * num_heads * batch


def _num_pairs(num_queries: int, num_keys: int, diagonal: int | None) -> int:
    """Pairs of a query row i and a key row j with j - i <= diagonal."""
    if diagonal is None:
        return num_queries * num_keys

    def keys_of_rows(end: int) -> int:  # of rows that see 1, 2, ..., end keys, or all
        rising = min(max(end, 0), num_keys)
        return rising * (rising + 1) // 2 + max(0, end - rising) * num_keys

    return keys_of_rows(num_queries + diagonal) - keys_of_rows(diagonal)


@register_flop_formula(_ops.block_attention, get_raw=True)
def _block_attention_flops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    diagonal: int | None,
    key_ranges: torch.Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> int:
    if key_ranges is None or not is_concrete(key_ranges):
        return _pair_flops(q.shape) * _num_pairs(q.size(1), k.size(1), diagonal)
    begin, end = key_ranges.clamp(0, k.size(1)).unbind(1)
    return _pair_flops(q.shape) * int((end - begin).clamp(min=0).sum())


@register_flop_formula(_ops.block_attention_backward, get_raw=True)
def _block_attention_backward_flops(*args: Any, **kwargs: Any) -> int:
    _, _, q, k, v, _, _, *rest = args
    return _block_attention_flops(q, k, v, *rest, **kwargs) * 5 // 2


@register_flop_formula(_ops.block_attention_)
def _block_attention_into_state_flops(
    state_shape: Sequence[int],
    lse_shape: Sequence[int],
    q_shape: Sequence[int],
    k_shape: Sequence[int],
    v_shape: Sequence[int],
    scale: float,
    diagonal: int | None,
    softcap: float = 0.0,
    **kwargs: Any,
) -> int:
    return _pair_flops(q_shape) * _num_pairs(q_shape[1], k_shape[1], diagonal)


def _listed(pieces: torch.Tensor | None) -> list[int]:
    return [] if pieces is None else pieces.flatten().tolist()


@register_flop_formula(_ops.ring_forward, get_raw=True)
def _ring_forward_flops(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
    order: Sequence[int],
    layout: str,
    causal: bool,
    scale: float,
    group_name: str,
    transport: str,
    depth: int | None,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    pieces: torch.Tensor | None = None,
    key_lengths: Sequence[int] | None = None,
    key_order: Sequence[int] | None = None,
    key_layout: str | None = None,
    key_pieces: torch.Tensor | None = None,
    **kwargs: Any,
) -> int:
    """This rank's share: its queries against all keys they see."""
    known = None if cu_seqlens is None or not is_concrete(cu_seqlens) else cu_seqlens.tolist()
    who = (layout, list(lengths), list(order), _rank_in(group_name), causal)
    keys: tuple[Any, ...] = (None, [], [], [])
    if key_lengths is not None and key_order is not None and key_layout is not None:
        keys = (key_layout, list(key_lengths), list(key_order), _listed(key_pieces))
    visits = _C.schedule(*who, _listed(pieces), (window_left, window_right), known, *keys)
    return _pair_flops(q.shape) * sum(visit.num_pairs for visit in visits)


@register_flop_formula(_ops.ring_backward, get_raw=True)
def _ring_backward_flops(*args: Any, **kwargs: Any) -> int:
    _, _, q, k, v, _, _, *rest = args
    return _ring_forward_flops(q, k, v, *rest, **kwargs) * 5 // 2


@register_flop_formula(_ops.decode_attention)
def _decode_attention_flops(
    q_shape: Sequence[int], k_shape: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    """This rank's share: all queries against its own keys, hidden ones included."""
    return _pair_flops(q_shape) * q_shape[1] * k_shape[1]
