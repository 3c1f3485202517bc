# SPDX-License-Identifier: Apache-2.0
"""The ring as a distributed strategy of FMS, and FMS's ``get_model`` with it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, TypeVar

import fms.models
import torch
from fms.distributed.strategy import DistributedStrategy
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from ringattn._checks import check_transport
from ringattn._distributed.collectives import agree
from ringattn._distributed.groups import Group, keep, kept, resolve_group
from ringattn._distributed.weights import check_same_weights
from ringattn.integrations.fms.attach import add_handle, settings_of
from ringattn.integrations.fms.attention import NAME
from ringattn.integrations.fms.rope import rope_arguments
from ringattn.parallel import Split, parallelize, put_on_ring
from ringattn.partition import Partition

_Model = TypeVar("_Model", bound=nn.Module)

# What get_model() of FMS knows; it drops others without a word.
_OF_FMS = (None, "", "tp", "mp", "fsdp", "hsdp", "ddp")


class RingAttentionStrategy(DistributedStrategy):
    """Puts a model on the ring: where FMS takes a strategy while a model is built
    (``LLaMA(config, distributed_strategy=strategy)``), in :func:`get_model` here, or with
    :meth:`attach` afterwards. Weights stay whole on every rank.

    ``get_model`` of FMS itself drops strategies that it does not know: use :func:`get_model` of
    this module.

    Args:
        partition: which rank owns which tokens, as in :func:`ringattn.parallelize`.
        block_lens: another name of ``partition``.
        group: as in :func:`ringattn.ring_attention`.
        transport: likewise.

    Raises:
        ValueError: ``partition`` and ``block_lens``, a partition for another number of ranks, an
            unknown transport.
    """

    def __init__(
        self,
        partition: Partition | Sequence[int] | str | None = None,
        *,
        block_lens: Partition | Sequence[int] | str | None = None,
        group: Group = None,
        transport: str = "auto",
    ) -> None:
        super().__init__()
        if partition is not None and block_lens is not None:
            raise ValueError(
                "partition and block_lens must not be given both, got "
                f"{partition!r} and {block_lens!r}: they are names of one thing"
            )
        self.partition = block_lens if partition is None else partition
        self.transport = transport
        self._group = keep(group)
        check_transport(transport, in_build=True)
        if not (isinstance(self.partition, str) and self.partition == "auto"):
            Split.of(self.partition, resolve_group(group).world_size)

    @property
    def group(self) -> Group:
        """The group that it was given, or the one that has its name now."""
        return kept(self._group)

    def attach(self, model: _Model) -> _Model:
        """:func:`ringattn.parallelize` with what this strategy was given; for a model that FMS has
        built, with tensor parallelism in another group, too."""
        return parallelize(
            model, partition=self.partition, group=self.group, transport=self.transport
        )

    def _distribute_module(self, module: nn.Module, final_layers: bool = False) -> nn.Module:
        return module

    def _distribute_layer(self, block: nn.Module, layer: int) -> nn.Module:
        if layer == 0:
            _AttachWhenBuilt(self, block)
        return block


class _AttachWhenBuilt:
    """Attaches a strategy to a model that is being built. FMS shows a strategy single layers, never
    the model; PyTorch tells when the layers' owner becomes the ``base_model`` of one."""

    def __init__(self, strategy: RingAttentionStrategy, block: nn.Module) -> None:
        self.strategy = strategy
        self.block = weakref.ref(block)
        self.handle = register_module_module_registration_hook(self)

    def __call__(self, module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        block = self.block()
        if block is None:  # the model's constructor failed
            self.handle.remove()
        elif name == "base_model" and block in getattr(submodule, "layers", ()):
            self.handle.remove()
            # As the assignment under way is about to do.
            module._modules[name] = submodule
            strategy = self.strategy
            put_on_ring(
                *(module, strategy.partition, strategy.group, strategy.transport),
                weights_are_set=False,
            )
            add_handle(module, module.register_forward_pre_hook(CompareWeights()))


class CompareWeights:
    """Before the first call of a model that was put on the ring while it was built, and before its
    weights were set."""

    def __init__(self) -> None:
        self.done = False

    def __call__(self, model: nn.Module, args: Any) -> None:
        settings = settings_of(model)
        if not self.done and settings is not None:
            check_same_weights(settings.ring(), model)
        self.done = True


def get_model(
    architecture: str,
    variant: str | None = None,
    model_path: str | None = None,
    source: str | None = None,
    device_type: str = "cpu",
    data_type: str | torch.dtype | None = None,
    distributed_strategy: str | RingAttentionStrategy | None = None,
    checkpoint_sharding: str | None = None,
    group: Any = None,
    *,
    block_lens: Partition | Sequence[int] | str | None = None,
    **kwargs: Any,
) -> nn.Module:
    """``fms.models.get_model``, which knows the ring, too. Collective for models on the ring.

    Args:
        architecture: this and the others as for ``fms.models.get_model``.
        variant: likewise.
        model_path: likewise.
        source: likewise.
        device_type: likewise.
        data_type: likewise.
        distributed_strategy: "ring", a :class:`RingAttentionStrategy`, or what FMS takes, None and
            "tp" among it, which this function passes on.
        checkpoint_sharding: as for ``fms.models.get_model``.
        group: of the ring; of a strategy its own.
        block_lens: which rank owns which tokens, for "ring": as ``partition`` of
            :func:`ringattn.parallelize`.
        kwargs: as for ``fms.models.get_model``.

    Returns:
        The model, with all weights on every rank. Without ``model_path`` they are random: seed them
        alike.

    Raises:
        ValueError: a strategy that neither knows; ``block_lens`` without "ring"; a model that the
            ring does not compute, or whose rotary embedding FMS would build otherwise than Hugging
            Face does; whatever keeps one of the ranks from loading it, on the others.
    """
    build: Any = fms.models.get_model
    rest = (architecture, variant, model_path, source, device_type, data_type)
    if not isinstance(distributed_strategy, RingAttentionStrategy):
        if distributed_strategy != NAME:
            if distributed_strategy not in _OF_FMS:
                raise ValueError(
                    f'distributed_strategy must be "{NAME}", a RingAttentionStrategy or one of '
                    f"{_OF_FMS}, got {distributed_strategy!r}, which FMS would drop"
                )
            if block_lens is not None:
                raise ValueError(
                    f'block_lens must be given with distributed_strategy="{NAME}", '
                    f"got {distributed_strategy!r}"
                )
            return build(*rest, distributed_strategy, checkpoint_sharding, group, **kwargs)
        distributed_strategy = RingAttentionStrategy(block_lens, group=group)
    elif block_lens is not None or group is not None:
        raise ValueError(
            "block_lens and group must be given to the RingAttentionStrategy, got them beside it"
        )
    ring = resolve_group(distributed_strategy.group)
    problem: Exception | None = None
    try:
        kwargs = rope_arguments(architecture, variant, model_path, kwargs)
        # A name that FMS does not know: the weights are whole.
        model: nn.Module = build(*rest, NAME, checkpoint_sharding, **kwargs)
    except Exception as error:  # whatever it is: the peers wait
        problem = error
    try:
        agree(ring, "get_model", None if problem is None else str(problem), {})
    except ValueError:
        if problem is not None:
            raise problem from None
        raise
    return distributed_strategy.attach(model)
