# SPDX-License-Identifier: Apache-2.0
"""The attention implementation "ringattn" on one process, without a ring: which keys each query
sees, from the mask functions of transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers.masking_utils import causal_mask_function

from ringattn._decode_attention import decode_attention
from ringattn._distributed.groups import resolve_group
from ringattn.functional import block_attention
from ringattn.integrations.transformers.packed import DOCUMENTS, packed_documents
from ringattn.integrations.transformers.support import check_attention_keywords

# What a layer may pass to its attention function here, and what is looked at apart.
_SERVED = ("sliding_window", "softcap", "s_aux", *DOCUMENTS)

# Families whose masks do not depend on position ids.
_WITHOUT_DOCUMENTS = ("gpt_oss",)


def mask(
    *,
    batch_size: int,
    kv_length: int,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """The keys that each query sees: int32 ``[1, T, 2]``, or ``[B, T, 2]`` where batch rows differ,
    as ``key_ranges`` of :func:`ringattn.block_attention`. None where it sees all before its own.

    transformers asks for it once per forward and kind of layer, of one process without
    :func:`ringattn.parallelize`.

    Raises:
        ValueError: a query that sees later keys, padding, a cache with room for later tokens.
    """
    _check_one_rank()
    if attention_mask is not None and attention_mask.dim() == 3:  # made here, before the call
        raise ValueError(
            "attention_mask must be [B, S], got one that generate has made for a static cache: a "
            'static cache is not supported by "ringattn"'
        )
    if attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError(
            "attention_mask must be all ones, got padding: pass the model to "
            "ringattn.parallelize(), which serves padding on one process too"
        )
    if "cache_position" in kwargs:  # transformers 4
        places = kwargs["cache_position"]
        first, num_queries, device = int(places[0]), places.numel(), places.device
    else:
        first, num_queries = int(kwargs["q_offset"]), kwargs["q_length"]
        device = kwargs["device"]
    if kv_offset + kv_length != first + num_queries:
        raise ValueError(
            f"cache must hold the keys seen so far, {first + num_queries} with the new ones, got "
            f'room for {kv_offset + kv_length}: a static cache is not supported by "ringattn"'
        )
    if mask_function is causal_mask_function and kv_offset == 0:
        return None
    if kwargs.get("use_vmap"):
        raise ValueError(_OTHER_MASK)
    queries = range(first, first + num_queries)
    return _ranges(mask_function, batch_size, queries, kv_offset, device)


_OTHER_MASK = (
    "attention must be causal, on one run of keys for each query, got another mask "
    '(is_causal=False, or one of the model\'s own): "ringattn" has none'
)


def _ranges(
    visible: Callable[..., Any], batch_size: int, places: range, first_key: int, device: Any
) -> torch.Tensor | None:
    """:func:`mask` of a mask function, which is composed of windows, chunks, boundaries between
    packed sequences, and blocks without an order. All but the last show a query the keys from some
    key on to its own, and the later the query, the later that key: it is searched for. A block
    shows a query the key after it."""
    rows = torch.arange(batch_size, device=device)[:, None]
    head = torch.zeros((), dtype=torch.int64, device=device)
    queries = torch.arange(places.start, places.stop, device=device)

    def seen(at: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        found = torch.as_tensor(visible(rows, head, at, keys))
        return found.expand(batch_size, torch.broadcast_shapes(at.shape, keys.shape)[-1])

    if len(places) == 1:  # a step: one look at all keys takes less time than a search
        keys = torch.arange(first_key, places.stop, device=device)
        begins = first_key + seen(queries.expand_as(keys), keys).int().argmax(1, keepdim=True)
    else:
        begins = queries.new_full((batch_size, len(places)), first_key)
        ends = queries.expand_as(begins)  # of keys among which the first visible one is
        for _ in range((places[-1] - first_key).bit_length()):
            middle = (begins + ends) // 2
            is_seen = seen(queries, middle)
            begins, ends = (
                torch.where(is_seen, begins, torch.minimum(middle + 1, ends)),
                torch.where(is_seen, middle, ends),
            )
    own = seen(queries, queries).all()
    later = seen(queries[:-1], queries[1:]).any()
    # Keys that all queries see, before those of a window, say.
    apart = (seen(queries, torch.full_like(queries, first_key)) & (begins > first_key)).any()
    everything = (begins == first_key).all()
    alike = (begins == begins[:1]).all()
    flags = torch.stack((own & ~later & ~apart, everything, alike)).tolist()
    if not flags[0]:
        raise ValueError(_OTHER_MASK)
    if flags[1]:
        return None
    begins = begins[:1] if flags[2] else begins
    ends = (queries + 1).expand_as(begins)
    return (torch.stack((begins, ends), 2) - first_key).to(torch.int32)


def attend_alone(
    module: Any,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_ranges: Any,
    scale: float | None,
    given: Mapping[str, Any],
) -> torch.Tensor:
    """Attention of one layer of a model that is on no ring.

    Args:
        module: the layer's attention module.
        q: ``[B, T, H, D]``.
        k: ``[B, S, H_kv, D]``, cached ones first.
        v: like ``k``.
        key_ranges: what :func:`mask` returned.
        scale: of the scores; None means ``1 / sqrt(D)``.
        given: what else the layer passes to its attention function.

    Returns:
        ``[B, T, H, D]``.
    """
    key_ranges = _checked(module, q, k, key_ranges, given)
    scores: dict[str, Any] = {
        "scale": scale,
        "softcap": given.get("softcap") or 0.0,
        "sinks": given.get("s_aux"),
    }
    # Decoding has no backward.
    if q.size(1) == 1 and not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad)):
        begins = None
        if key_ranges is not None:
            begins = key_ranges[:, 0, 0].expand(q.size(0)).contiguous()
        return decode_attention(q, k, v, group="single", key_begins=begins, **scores)
    if key_ranges is None:
        out, _ = block_attention(q, k, v, diagonal=k.size(1) - q.size(1), **scores)
        return out
    if key_ranges.size(0) == 1:
        out, _ = block_attention(q, k, v, key_ranges=key_ranges[0], **scores)
        return out
    outs = [
        block_attention(q[row, None], k[row, None], v[row, None], key_ranges=ranges, **scores)[0]
        for row, ranges in enumerate(key_ranges.unbind(0))
    ]
    return torch.cat(outs)


def _checked(
    module: Any, q: torch.Tensor, k: torch.Tensor, key_ranges: Any, given: Mapping[str, Any]
) -> torch.Tensor | None:
    """The key ranges of a call, which documents of the call decide where it has some."""
    _check_one_rank()
    is_ranges = isinstance(key_ranges, torch.Tensor) and key_ranges.dtype == torch.int32
    if key_ranges is not None and not is_ranges:
        raise ValueError(
            'attention_mask must be [B, S] or None for "ringattn", '
            f"got {list(getattr(key_ranges, 'shape', [])) or type(key_ranges).__name__}"
        )
    config = getattr(module, "config", None)
    if not (getattr(module, "is_causal", True) and getattr(config, "is_causal", True)):
        raise ValueError("is_causal must be True, got a layer with False: attention here is causal")
    num_queries, num_keys = q.size(1), k.size(1)
    others = {name: value for name, value in given.items() if name not in _SERVED}
    check_attention_keywords(others, num_keys)
    window = given.get("sliding_window") or num_keys
    boundaries = {name: given.get(name) for name in DOCUMENTS}
    documents = packed_documents(boundaries, num_keys, use_cache=num_queries != num_keys)
    if documents is None:
        if num_queries > 1:
            _check_documents(getattr(config, "model_type", None), given.get("position_ids"))
        if key_ranges is None and window < num_keys:
            raise ValueError(
                f"sliding_window must be that of the layer's mask, got {window} and a mask without"
            )
        return key_ranges
    if getattr(config, "attention_chunk_size", None):
        raise ValueError("cu_seq_lens_q must be None for a model with chunked attention, got some")
    # As in FlashAttention: the layer's window counts in documents, position ids are RoPE's alone.
    rows = torch.arange(num_keys, device=documents.device)
    starts = documents[torch.searchsorted(documents, rows, right=True) - 1]
    ranges = torch.stack((torch.maximum(starts, rows - window + 1), rows + 1), 1)
    return ranges.to(torch.int32).to(q.device)[None]


def _check_documents(family: str | None, position_ids: Any) -> None:
    """ValueError for packed sequences that the masks of a family do not know."""
    if family not in _WITHOUT_DOCUMENTS:
        return
    if isinstance(position_ids, torch.Tensor) and bool((position_ids.diff(dim=-1) != 1).any()):
        raise ValueError(
            f"position_ids must go on by 1 for {family}, whose masks in transformers have no "
            "documents, got others: give cu_seq_lens_q and cu_seq_lens_k"
        )


def _check_one_rank() -> None:
    world_size = resolve_group(None).world_size
    if world_size > 1:
        raise ValueError(
            f'attn_implementation="ringattn" must be on one process, got a group of {world_size}: '
            'pass the model to ringattn.parallelize(), with group="single" to stay on one process'
        )
