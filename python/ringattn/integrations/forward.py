# SPDX-License-Identifier: Apache-2.0
"""The ``forward`` that a model, and its body, get on the ring in place of their own; it knows no
library."""

from __future__ import annotations

import inspect
import itertools
import warnings
import weakref
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import _StopRecomputationError

from ringattn._distributed.errors import report_to_peers
from ringattn._distributed.groups import share_ranks
from ringattn.integrations.shared import by_name, names_of
from ringattn.parallel import RingSettings

#: Wrappers that have been looked at.
_LOOKED_AT: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


def records_gradients(module: nn.Module, *tensors: Any) -> bool:
    """Whether a call of ``module`` with these inputs records what a backward needs."""
    return torch.is_grad_enabled() and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in (*tensors, *module.parameters())
    )


class RingForward:
    """``forward`` of one model with a head, or of one body. It is an attribute of the model, not a
    hook: PEFT and others call ``forward`` itself, and what fails in it is reported to the peers.

    Args:
        model: whose ``forward`` it replaces.
        settings: the ring.
    """

    def __init__(self, model: nn.Module, settings: RingSettings) -> None:
        self.model = model
        self.settings = settings
        self.before = vars(model).get("forward")  # another package's
        self.names = names_of(self.__signature__)
        self.is_attached = True  # others may keep it after it has been taken off

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self._own())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args and args[0] is self.model:  # accelerate binds it as if it were a function
            args = args[1:]
        if not self.is_attached:
            return self._own()(*args, **kwargs)
        asked = None
        try:
            given = by_name(self.names, args, kwargs)
            if not torch.compiler.is_compiling():
                self._warn_of_averages()
                self._warn_of_results(given.get("inputs_embeds"))
            asked = self._ask(given)
            return self._run(asked)
        except _StopRecomputationError:  # no failure: a checkpoint has all tensors that it needs
            raise
        except Exception as error:  # of any type, of the model too: the peers wait for this rank
            report_to_peers(self.settings.ring(), error)
            if asked is not None:
                self._undo(asked)
            raise

    def put_on(self) -> None:
        """Makes it the model's ``forward``."""
        vars(self.model)["forward"] = self

    def take_off(self) -> None:
        """Undoes :meth:`put_on`. A package that has wrapped it since keeps its wrapper."""
        self.is_attached = False
        there = vars(self.model).get("forward")
        if getattr(there, "__func__", there) is self:
            del vars(self.model)["forward"]
            if self.before is not None:
                vars(self.model)["forward"] = self.before

    def _warn_of_averages(self) -> None:
        """Warns, once, where DDP around the model averages over ranks of the ring, whose gradients
        are parts of a sum."""
        wrapper = getattr(DistributedDataParallel, "_active_ddp_module", None)
        if wrapper is None or wrapper in _LOOKED_AT or getattr(wrapper, "_comm_hooks", True):
            return
        ring = self.settings.ring().process_group
        if ring is None or not records_gradients(self.model):
            return
        _LOOKED_AT.add(wrapper)
        if share_ranks(wrapper.process_group, ring):
            warnings.warn(
                "DistributedDataParallel must sum gradients over the ring of a parallelized model, "
                "got one that averages them: give it a hook by register_comm_hook, as "
                "docs/training.md shows",
                stacklevel=2,
            )

    def _warn_of_results(self, embeds: Any) -> None:
        """Warns where embeddings are made of what all ranks have."""
        if not torch.is_grad_enabled() or getattr(embeds, "grad_fn", None) is None:
            return
        if self.settings.ring().world_size > 1 and _comes_from_all_ranks(embeds):
            warnings.warn(
                "inputs_embeds must not depend on what ranks have gathered, such as results of "
                "another call, got some that do: their gradient on this rank is that of its own "
                "rows alone. Rule 6 of docs/training.md has a sum over the ranks",
                stacklevel=2,
            )

    def _ask(self, given: dict[str, Any]) -> Any:
        """What the call is to do, from all its arguments by name, before ranks exchange anything.

        Raises:
            ValueError: the ring does not compute it.
        """
        raise NotImplementedError

    def _run(self, asked: Any) -> Any:
        """The call."""
        raise NotImplementedError

    def _undo(self, asked: Any) -> None:
        """Leaves the caller's cache as it was before a call that failed."""
        raise NotImplementedError

    def _own(self) -> Any:
        """The model's own method."""
        if self.before is not None:
            return self.before
        # Note: no types.MethodType, which torch.compile does not trace.
        return partial(type(self.model).forward, self.model)


#: Nodes of autograd whose gradient must be the same on all ranks.
_OF_ALL_RANKS = ("_GatheredBackward", "_SumBackward")


def _comes_from_all_ranks(x: torch.Tensor) -> bool:
    """Looks at the nearest nodes of its graph alone."""
    nodes, seen = [x.grad_fn], {x.grad_fn}
    for node in itertools.islice(nodes, 256):  # grows on the way
        assert node is not None
        if node.name() in _OF_ALL_RANKS:
            return True
        for next_node, _ in node.next_functions:
            if next_node is not None and next_node not in seen:
                seen.add(next_node)
                nodes.append(next_node)
    return False
