# SPDX-License-Identifier: Apache-2.0
"""The caller's cache: its layers become handles of this rank's share of the keys."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from ringattn._distributed.groups import GroupInfo
from ringattn.cache import ShardedKVCache

CACHES = ("cache", "past_key_values")  # what transformers 5 and 4 call a cache

_CROPS_BY_DROPPED = hasattr(CacheLayerMixin, "is_croppable")  # transformers 5

_Tensors = tuple[torch.Tensor, torch.Tensor]


class RingLayer(CacheLayerMixin):
    """One layer of a ``DynamicCache`` whose keys lie on all ranks. It reports the length of the
    whole sequence. Only a parallelized model reads and writes it."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, store: ShardedKVCache, index: int, padding: Any) -> None:
        super().__init__()
        self.store = store
        self.index = index
        self.padding = padding  # of the prompt: ringattn.model_inputs.Padding or None
        self.is_initialized = True

    @property
    def keys(self) -> torch.Tensor:
        """Refused: no rank has them all."""
        raise ValueError(
            "keys and values must be those of this process, got a layer whose tokens lie on the "
            f"ranks of a ring: get_seq_length() is {self.store.seq_len}"
        )

    @keys.setter
    def keys(self, none: torch.Tensor | None) -> None:
        """Nothing: the base class has none yet."""

    values = keys

    def get_seq_length(self, *args: Any) -> int:
        """Tokens that all ranks hold together."""
        return self.store.seq_len

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """(keys, offset) for a mask of the next queries."""
        queries = query if isinstance(query, int) else query.numel()
        return self.store.seq_len + queries, 0

    def get_max_length(self) -> int:
        """-1: no maximum."""
        return -1

    get_max_cache_shape = get_max_length  # its name in transformers 4

    def lazy_initialization(self, *args: Any) -> None:
        """Nothing: storage was made by the prompt."""

    def update(self, *args: Any, **kwargs: Any) -> _Tensors:
        """Refused: the model that asks is not on the ring."""
        raise ValueError(
            "cache must be one of this process, got one whose keys lie on the ranks of a ring: "
            "pass it to the parallelized model that filled it"
        )

    def batch_select_indices(self, indices: Any) -> None:
        """Keeps these batch rows, numbers or a bool mask. The first layer does it for all, which
        share their storage."""
        if self.padding is not None:
            raise ValueError("cache must have no padding to select batch rows, got a padded one")
        if self.index == 0:
            self.store.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every batch row."""
        keys, _ = self.store.view(self.index)
        rows = torch.arange(keys.size(0), device=keys.device)
        self.batch_select_indices(rows.repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Selects batch rows."""
        self.batch_select_indices(beam_idx)

    def crop(self, tokens: int) -> None:
        """Drops the last ``-tokens``; transformers 4 takes the number that is kept, too. The first
        layer does it for all, which share their storage.

        Raises:
            ValueError: a cache of padded prompts, a number to keep in transformers 5.
        """
        if _CROPS_BY_DROPPED and tokens > 0:
            raise ValueError(
                f"crop() must be given the tokens to drop, as a negative number, got {tokens}"
            )
        if self.index == 0:
            drops = tokens < 0 or _CROPS_BY_DROPPED
            self.store.crop(max(0, self.store.seq_len + tokens) if drops else tokens)

    def reset(self) -> None:
        """Refused."""
        raise ValueError("cache must keep its tokens, got reset() of one that lies on a ring")

    def offload(self) -> None:
        """Refused."""
        raise ValueError("cache must stay on its device, got offload() of one that lies on a ring")

    prefetch = offload


class PassingCache(Cache):
    """What layers of a parallelized model see as their cache during one call: new keys and values
    pass through it to the attention function, which keeps them."""

    def __init__(self, past: int) -> None:
        super().__init__(layers=[])
        self._past = past

    def get_seq_length(self, *args: Any) -> int:
        """Tokens before this call."""
        return self._past

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> _Tensors:
        """The new ones, as they are."""
        return key_states, value_states


def ring_layer(cache: object) -> RingLayer | None:
    """A layer of a cache that lies on a ring, None of one without tokens.

    Raises:
        ValueError: a cache of another kind, one with tokens of this process alone.
    """
    if not isinstance(cache, DynamicCache) or getattr(cache, "offloading", False):
        kind = type(cache).__name__
        if isinstance(cache, DynamicCache):
            kind = f"an offloading {kind}"
        raise ValueError(
            f"cache must be a DynamicCache without offloading, got {kind}: a ring keeps its own "
            "(leave cache and cache_implementation out)"
        )
    layers = list(cache.layers)
    if layers and isinstance(layers[0], RingLayer):
        return layers[0] if layers[0].store.seq_len > 0 else None
    if type(cache) is not DynamicCache:
        raise ValueError(f"cache must be a DynamicCache, got {type(cache).__name__}")
    held = cache.get_seq_length()
    if held:
        raise ValueError(
            f"cache must be empty or filled by this parallelized model, got one of {held} tokens "
            "that another model filled"
        )
    return None


def check_ring_layer(layer: RingLayer, ring: GroupInfo, num_layers: int, cache: Any) -> None:
    """ValueError where a cache is of another ring, or of a model with other layers."""
    world_size, rank = len(layer.store.lengths), layer.store.rank
    if (world_size, rank) != (ring.world_size, ring.rank):
        raise ValueError(
            f"cache must be that of rank {ring.rank} of {ring.world_size}, "
            f"got rank {rank} of {world_size}"
        )
    if len(cache.layers) != num_layers:
        raise ValueError(f"cache must have {num_layers} layers, got {len(cache.layers)}")


def fill(cache: Any, store: ShardedKVCache, num_layers: int, padding: Any) -> None:
    """Makes the layers of the caller's ``cache`` handles of ``store``."""
    cache.layers = [RingLayer(store, index, padding) for index in range(num_layers)]
