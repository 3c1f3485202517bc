# SPDX-License-Identifier: Apache-2.0
"""One call that puts a model of another library on the ring, and one that takes it off again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from ringattn._checks import check_integers, check_transport
from ringattn._distributed.collectives import agree
from ringattn._distributed.groups import Group, GroupByName, GroupInfo, keep, resolve_group
from ringattn._distributed.weights import check_same_weights
from ringattn.partition import Partition, check_num_ranks, shown_partition
from ringattn.planning import ModelCost, plan
from ringattn.profiles import RankProfile
from ringattn.profiling import measure_profiles

_Model = TypeVar("_Model", bound=nn.Module)

# The library that a model comes from, and the module here that knows it.
_ADAPTERS = {
    "transformers": "ringattn.integrations.transformers",
    "fms": "ringattn.integrations.fms",
}


class Adapter(Protocol):
    """Interface of the modules of :mod:`ringattn.integrations`: models of one library."""

    def handles(self, model: object) -> bool:
        """Whether ``model`` is one of this library's."""

    def refusal(self, model: Any) -> str | None:
        """Why ``model`` cannot run over a ring, with every reason; None where it can."""

    def cost(self, model: Any) -> ModelCost:
        """The cost of one layer."""

    def attach(self, model: Any, settings: RingSettings) -> None:
        """Puts ``model``, which has been checked, on the ring."""

    def detach(self, model: Any) -> None:
        """Undoes :meth:`attach`; nothing where it has not been called."""


@dataclass(frozen=True)
class Split:
    """Which rank owns which tokens, for sequences of any length.

    Args:
        world_size: W.
        weights: shares of the ranks, ``[W]``; None: even, or planned from ``profiles``. A sequence
            of as many tokens as they add up to gets exactly these lengths.
        layout: "zigzag" or "contiguous".
        order: as in :class:`ringattn.Partition`.
        profiles: of the ranks, for plans.
        cost: of a layer, for plans. Without ``profiles`` the ranks count as equal, with one speed
            for attention and matrix products, and packed documents alone are planned.
    """

    world_size: int
    weights: tuple[int, ...] | None = None
    layout: str = "zigzag"
    order: tuple[int, ...] | None = None
    profiles: tuple[RankProfile, ...] | None = None
    cost: ModelCost | None = None
    _known: dict[int, Partition] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, partition: object, world_size: int) -> Split:
        """The split that ``partition`` of :func:`parallelize` means, "auto" excepted.

        Raises:
            ValueError: another number of ranks, negative lengths or none above 0, pieces, another
                type.
        """
        if partition is None or (isinstance(partition, str) and partition == "even"):
            return cls(world_size)
        if isinstance(partition, Partition):
            if partition.layout == "pieces":
                raise ValueError(
                    "partition must be zigzag or contiguous, got pieces: those are of one sequence "
                    "(packed documents are balanced without a partition)"
                )
            weights, layout, order = partition.lengths, partition.layout, partition.order
        elif isinstance(partition, str) or not isinstance(partition, Sequence):
            raise ValueError(
                'partition must be a Partition, a list of lengths, "even" or "auto", '
                f"got {shown_partition(partition)}"
            )
        else:
            weights = check_integers("partition", partition, least=0)
            layout, order = "zigzag", tuple(range(len(weights)))
        check_num_ranks(len(weights), world_size)
        if sum(weights) == 0:
            raise ValueError("partition must have a token, got lengths of 0 only")
        return cls(world_size, weights, layout, order)

    def partition(self, seq_len: int, documents: torch.Tensor | None = None) -> Partition:
        """The partition of a sequence of ``seq_len`` tokens, at least 1. Packed ``documents``, by
        their boundaries, are cut where layers take equally long; without a cost, into equal numbers
        of tokens and pairs. Weights do not look at them."""
        if documents is not None and self.weights is None:
            if self.cost is None:
                return Partition.packed(documents, self.world_size)
            profiles = self.profiles or [RankProfile(1.0, 1.0)] * self.world_size
            return plan(seq_len, profiles, self.cost, cu_seqlens=documents).partition
        if seq_len not in self._known:
            if len(self._known) > 256:  # calls without a cache are one token longer each time
                self._known.clear()
            self._known[seq_len] = self._partition(seq_len)
        return self._known[seq_len]

    def _partition(self, seq_len: int) -> Partition:
        if self.profiles is not None and self.cost is not None:
            return plan(seq_len, list(self.profiles), self.cost).partition
        weights = self.weights
        if weights is None:
            return Partition.even(seq_len, self.world_size)
        total = sum(weights)
        lengths = [seq_len * weight // total for weight in weights]
        # Largest remainders first, of equal ones the lower ranks.
        by_remainder = sorted(
            range(len(lengths)), key=lambda rank: (-(seq_len * weights[rank] % total), rank)
        )
        for rank in by_remainder[: seq_len - sum(lengths)]:
            lengths[rank] += 1
        assert self.order is not None
        return Partition(self.layout, tuple(lengths), self.order)


@dataclass(frozen=True)
class RingSettings:
    """Group, split and transport of a parallelized model's calls, whose ``forward`` keeps it."""

    group: Group | GroupByName
    split: Split
    transport: str

    def ring(self) -> GroupInfo:
        """This process among the ranks, as it is now."""
        return resolve_group(self.group)


#: The attribute of a model, or of its body, that :meth:`Adapter.attach` put on a ring: an object
#: whose ``settings`` are the RingSettings.
ATTACHED = "_ringattn"


def settings_of(module: nn.Module) -> RingSettings | None:
    """How calls of a module that an adapter holds on to go through the ring; None of any other."""
    attached = vars(module).get(ATTACHED)
    return None if attached is None else attached.settings


def models_of(module: nn.Module) -> list[nn.Module]:
    """The models whose calls go through the ring because an adapter holds on to a module: it, and
    the one whose body it is."""
    attached = vars(module).get(ATTACHED)
    return [] if attached is None else [x.model for x in attached.forwards]


def parallelize(
    model: _Model,
    *,
    partition: Partition | Sequence[int] | str | None = None,
    group: Group = None,
    transport: str = "auto",
) -> _Model:
    """Runs a model of Hugging Face transformers or of FMS over the ring. Collective.

    Parameters and buffers are compared between ranks, bit by bit, which reads them once.

    From then on every rank calls the model as before, with the whole sequence's ids. Each rank
    computes its own tokens; attention goes through the ring; outputs come back as the unmodified
    model returns them. The cache of a generation stays spread over the ranks. What ranks give to a
    call must be the same: where it is not, every rank gets a ValueError, on CUDA at the latest from
    the next call.

    Args:
        model: with the same weights on every rank, on one device. Its parameters and its state dict
            stay as they are; it gets a copy of its config.
        partition: which rank owns which tokens: a zigzag or contiguous :class:`ringattn.Partition`,
            a list of lengths, "even", or "auto", planned from profiles that are measured now. None
            is even, but packed documents are cut where attention and matrix products together take
            equally long (see :func:`ringattn.plan`), which gives the ranks unequal numbers of
            tokens; "even" gives them equal ones, in more pieces
            (:meth:`ringattn.Partition.packed`). A list, or a Partition of another length than the
            call's, serves as weights; the layout and the order are kept.
        group: as in :func:`ringattn.ring_attention`.
        transport: as in :func:`ringattn.ring_attention`.

    Returns:
        ``model`` itself. A model that is on a ring already changes to this one.

    Raises:
        ValueError: on every rank, with ``model`` untouched: what is no model of these libraries, a
            model that does what the ring does not (chunked or cross attention, ...;
            the error names every reason), a partition for another number of ranks, an unknown
            transport, ranks that disagree, weights that differ between ranks (the error names one).

    Where gradients are recorded, each rank's are the parts of its own tokens, which
    :func:`ringattn.all_reduce_gradients` sums; a loss that the model computes is that of the whole
    sequence. Heads for classification are called under ``torch.no_grad()``.
    """
    return put_on_ring(model, partition, group, transport)


def put_on_ring(
    model: _Model,
    partition: Partition | Sequence[int] | str | None,
    group: Group,
    transport: str,
    *,
    weights_are_set: bool = True,
) -> _Model:
    """:func:`parallelize`, which without ``weights_are_set`` does not compare them."""
    ring = resolve_group(group)
    adapter: Adapter | None = None
    split, mistake = None, None
    try:
        adapter = _adapter(model)
        check_transport(transport, in_build=True)
        mistake = adapter.refusal(model)
        if not (isinstance(partition, str) and partition == "auto"):
            split = Split.of(partition, ring.world_size)
    except ValueError as error:
        mistake = str(error)
    facts = {"transport": transport, "partition": "auto" if split is None else split}
    agree(ring, "parallelize", mistake, facts)
    assert adapter is not None
    if weights_are_set:
        check_same_weights(ring, model)
    if split is None:
        split = _measured(ring, adapter.cost(model), model, transport)
    elif partition is None:  # for packed documents
        split = replace(split, cost=adapter.cost(model))
    adapter.detach(model)
    adapter.attach(model, RingSettings(keep(group), split, transport))
    return model


def unparallelize(model: _Model) -> _Model:
    """Undoes :func:`parallelize`: the model computes on this process alone again, with the config,
    the methods and the bits that it had before. What has been set in its config since stays. Not
    collective.

    Args:
        model: a model that :func:`parallelize` takes; one that is on no ring stays as it is.

    Returns:
        ``model`` itself.

    Raises:
        ValueError: what is no model of these libraries.
    """
    _adapter(model).detach(model)
    return model


def _adapter(model: object) -> Adapter:
    for library, name in _ADAPTERS.items():
        if library in sys.modules:  # else no model is one of its
            adapter: Any = import_module(name)
            if adapter.handles(model):
                return adapter
    hint = ""
    if hasattr(model, "get_base_model"):  # of PEFT
        hint = ": pass model.get_base_model()"
    elif hasattr(model, "_orig_mod"):  # of torch.compile
        hint = ": pass model._orig_mod"
    raise ValueError(
        "model must be a model of Hugging Face transformers or of FMS, got "
        f"{type(model).__name__}{hint}"
    )


def _measured(ring: GroupInfo, cost: ModelCost, model: nn.Module, transport: str) -> Split:
    weight = next(model.parameters())
    profiles = measure_profiles(
        ring.group, device=weight.device, dtype=weight.dtype, transport=transport
    )
    return Split(ring.world_size, profiles=tuple(profiles), cost=cost)
