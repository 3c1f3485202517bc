# SPDX-License-Identifier: Apache-2.0
"""The caller's cache: one handle per layer of this rank's share of the keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from ringattn._distributed.groups import GroupInfo
from ringattn.cache import ShardedKVCache
from ringattn.model_inputs import Padding


@dataclass
class Sequences:
    """What all layers of a cache share."""

    store: ShardedKVCache
    padding: Padding | None  # of the prompt
    ahead: int  # how far the largest position id is ahead of the last column; below 0: behind it


class RingLayer:
    """One layer of a cache whose keys lie on all ranks. Only a parallelized model reads and writes
    it. It is not iterable, so that ``generate`` of FMS hands it through as it is."""

    def __init__(self, sequences: Sequences, index: int) -> None:
        self.sequences = sequences
        self.index = index
        self.length = sequences.store.seq_len  # tokens that all ranks hold together

    def __getitem__(self, index: object) -> NoReturn:
        raise ValueError(
            "past_key_value_states must be those of this process, got some whose keys lie on the "
            "ranks of a ring: pass them to the parallelized model that returned them"
        )


def handles_of(sequences: Sequences, num_layers: int) -> list[RingLayer]:
    """A cache as a parallelized model returns it."""
    return [RingLayer(sequences, index) for index in range(num_layers)]


def sequences_of(cache: object, ring: GroupInfo, num_layers: int) -> Sequences | None:
    """What is behind ``past_key_value_states``; None where they hold no tokens.

    Raises:
        ValueError: a cache of this process alone, of another ring, of a model with other layers, or
            one that tokens have been added to since it was returned.
    """
    if cache is None:
        return None
    layers = list(cache) if isinstance(cache, Sequence) else [cache]
    if all(layer is None for layer in layers):
        return None
    handles = [layer for layer in layers if isinstance(layer, RingLayer)]
    if len(handles) != len(layers):
        kind = next(type(layer).__name__ for layer in layers if not isinstance(layer, RingLayer))
        raise ValueError(
            "past_key_value_states must be what this parallelized model returned, or None, "
            f"got a {kind} for a layer"
        )
    sequences = handles[0].sequences
    own = [handle.index if handle.sequences is sequences else None for handle in handles]
    if own != list(range(num_layers)):
        raise ValueError(
            f"past_key_value_states must have the {num_layers} layers of one call in order, "
            f"got layers {[handle.index for handle in handles]}"
        )
    store = sequences.store
    if (len(store.lengths), store.rank) != (ring.world_size, ring.rank):
        raise ValueError(
            f"past_key_value_states must be those of rank {ring.rank} of {ring.world_size}, "
            f"got rank {store.rank} of {len(store.lengths)}"
        )
    if handles[0].length != store.seq_len:
        raise ValueError(
            "past_key_value_states must be the newest of their sequence, got those of "
            f"{handles[0].length} tokens where {store.seq_len} have been stored: copy.deepcopy() "
            "them before they go different ways"
        )
    return sequences
