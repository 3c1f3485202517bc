# SPDX-License-Identifier: Apache-2.0
"""Attention of new tokens of one layer on the keys of a cache that is spread over the ranks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ringattn._decode_attention import attend_cached
from ringattn._distributed.collectives import all_gather
from ringattn._distributed.errors import call
from ringattn._distributed.groups import GroupInfo
from ringattn._masks import Mask, check_window
from ringattn.cache import ShardedKVCache
from ringattn.functional import block_attention, merge_states

_ops = torch.ops.ringattn

_State = tuple[torch.Tensor, torch.Tensor]  # out, lse


class LayerInputs(NamedTuple):
    """What one layer attends in a call of a model."""

    layer: int  # its number, by which the cache knows it
    q: torch.Tensor  # [B, rows, H, D]
    k: torch.Tensor  # [B, rows, H_kv, D]
    v: torch.Tensor
    scale: float
    mask: Mask
    sinks: torch.Tensor | None


def attend_newest(ring: GroupInfo, cache: ShardedKVCache, given: LayerInputs) -> torch.Tensor:
    """One token, for which the cache has been advanced. Collective."""
    layer, q, k, v, scale, mask, sinks = given
    keys, values = cache.append(layer, k, v)
    begins = None
    left, _ = check_window(mask.window_size)
    if 0 <= left < cache.seq_len - 1:
        begins = cache.begins(left, 1, q.device)[:, 0].expand(q.size(0)).contiguous()
    out, _ = attend_cached(
        *(ring, q, keys, values, scale, cache.key_lengths, begins, mask.softcap, sinks)
    )
    return out


def attend_next(ring: GroupInfo, cache: ShardedKVCache, given: LayerInputs) -> torch.Tensor:
    """Several tokens, for which the cache has been advanced. Collective."""
    layer, q, k, v, scale, mask, sinks = given
    cache.append(layer, k, v)  # first: it refuses a cache of other keys
    left, _ = check_window(mask.window_size)
    num_before, cap = cache.seq_len - q.size(1), mask.softcap
    # Sinks join once. Results are rounded once, at the end.
    if not 0 <= left < cache.seq_len - 1:
        if num_before == 0:
            out, _ = block_attention(q, k, v, scale=scale, diagonal=0, softcap=cap, sinks=sinks)
        else:
            keys, values = cache.view(layer, newest=False)
            lengths = cache.older_key_lengths
            out, lse = attend_cached(
                *(ring, q, keys, values, scale, lengths, None, cap, sinks), wide=True
            )
            call(_ops.block_attention_, out, lse, q, k, v, scale, 0, cap)
    else:
        rows = torch.arange(q.size(1), dtype=torch.int32, device=q.device)
        ranges = torch.stack(((rows - left).clamp_(min=0), rows + 1), 1)
        wide_q, wide_k, wide_v = (_wide(x) for x in (q, k, v))
        options = {"scale": scale, "softcap": cap}
        newer = block_attention(wide_q, wide_k, wide_v, key_ranges=ranges, sinks=sinks, **options)
        states = [newer]
        if num_before > 0:
            keys, values = cache.view(layer, newest=False)
            own = _in_windows(cache, wide_q, keys, values, left, options)
            outs, lses = (all_gather(ring, "decode_window", x) for x in own)
            states = [*zip(outs.unbind(0), lses.unbind(0), strict=True), newer]
        out, lse = states[0]
        for state in states[1:]:
            out, lse = merge_states(out, lse, *state)
    return out.to(q.dtype)


def _in_windows(
    cache: ShardedKVCache,
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    left: int,
    options: dict[str, Any],
) -> _State:
    """What this rank's older keys add to new tokens that see a window of them."""
    # Rows of a padded batch see different keys.
    begins = cache.begins(left, q.size(1), q.device)
    firsts = cache.first_keys(left, q.size(1))
    lengths = cache.older_key_lengths
    outs, lses = [], []
    for row, first in enumerate(firsts):
        rows = slice(None) if len(firsts) == 1 else slice(row, row + 1)
        begin = begins[row] - first
        end = torch.full_like(begin, keys.size(1) - first)
        if lengths is not None:
            end = (lengths[row] - first).expand_as(begin)
        seen = [_wide(x[rows, first:]) for x in (keys, values)]
        state = block_attention(q[rows], *seen, key_ranges=torch.stack((begin, end), 1), **options)
        outs.append(state[0])
        lses.append(state[1])
    return torch.cat(outs), torch.cat(lses)


def _wide(x: torch.Tensor) -> torch.Tensor:
    """In float32, so that results are rounded once, at the end; float64 stays."""
    return x if x.dtype == torch.float64 else x.float()
