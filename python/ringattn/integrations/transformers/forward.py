# SPDX-License-Identifier: Apache-2.0
"""A model with a head on the ring: which rows its head runs on, and the loss of the whole sequence.

Where a call records gradients, and where it has labels, a causal language model's head runs on this
rank's rows alone, so that its weights get a part of their gradient, as all others do. Otherwise it
runs on the rows that the caller asked for, on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

from ringattn.integrations.forward import RingForward, records_gradients
from ringattn.integrations.transformers.support import check_adapters, check_loss_of_adapters
from ringattn.model_call import ModelCall
from ringattn.parallel import RingSettings

ASKED = "ringattn_asked"  # keyword argument of this package, on its way through a model
_IGNORED = -100


@dataclass
class Targets:
    """What a loss is computed from.

    Args:
        tokens: the label of each token's successor, int64 ``[B, S]``.
        ignored: the label that does not count.
        num_items: what the sum over tokens is divided by; None: the number of labels that count.
        compared: what the ranks must share, by the names of the caller's arguments.
    """

    tokens: torch.Tensor
    ignored: int
    num_items: Any
    compared: dict[str, torch.Tensor | int | None]

    @classmethod
    def of(cls, given: dict[str, Any]) -> Targets:
        """From the arguments of a call, which lose those of the loss alone.

        Raises:
            ValueError: labels that are no tensor ``[B, S]``.
        """
        shifted, num_items = given.pop("shift_labels", None), given.pop("num_items_in_batch", None)
        ignored = given.pop("ignore_index", _IGNORED)
        name, chosen = "shift_labels", shifted
        if shifted is None:
            name, chosen = "labels", given["labels"]
        tokens = given.get("input_ids")
        tokens = given.get("inputs_embeds") if tokens is None else tokens
        shape = list(tokens.shape[:2]) if isinstance(tokens, torch.Tensor) else None
        if not isinstance(chosen, torch.Tensor) or list(chosen.shape) != shape:
            got = list(getattr(chosen, "shape", [])) or type(chosen).__name__
            raise ValueError(f"{name} must be [B, S], {shape} in this call, got {got}")
        if shifted is None:
            shifted = F.pad(chosen, (0, 1), value=ignored)[:, 1:]
        compared = dict.fromkeys(("labels", "shift_labels", "num_items_in_batch"))
        compared |= {name: chosen, "ignore_index": ignored}
        if num_items is not None:
            bits = torch.as_tensor(num_items).detach().double().view(torch.int64)
            compared["num_items_in_batch"] = bits
        assert isinstance(tokens, torch.Tensor)
        return cls(shifted.to(tokens.device), ignored, num_items, compared)

    def count(self) -> Any:
        """What the sum over tokens is divided by."""
        if self.num_items is not None:
            return self.num_items
        return (self.tokens != self.ignored).sum()


class Asked:
    """What the caller of a model with a head asks for. No dataclass: FSDP2 copies those among
    keyword arguments.

    Attributes:
        columns: those that the head runs on, int64 ``[n]``; None: all.
        kept: ``logits_to_keep``, or the shape of its columns, for comparisons.
        labels: of another loss, for comparisons.
        targets: of a loss that is computed from this rank's rows.
        gradients: whether the call records gradients.
        local: whether the head runs on this rank's rows.
        call: the model call, once the layers have been prepared.
        undo: leaves the caller's cache as it was before the call, likewise.
    """

    columns: torch.Tensor | None = None
    kept: int | list[int] | None = None
    targets: Targets | None = None
    local: bool = False
    call: ModelCall | None = None
    undo: Callable[[], None] | None = None

    def __init__(self, *, labels: Any = None, gradients: bool = False) -> None:
        self.labels = labels
        self.gradients = gradients


class Forward(RingForward):
    """``forward`` of a model with a head.

    One without ``**kwargs`` cannot tell its body what was asked for: the body returns the rows of
    all tokens then, and the head computes from them what it always does.
    """

    def __init__(self, model: nn.Module, settings: RingSettings) -> None:
        super().__init__(model, settings)
        kinds = [each.kind for each in self.__signature__.parameters.values()]
        self.passes_on = inspect.Parameter.VAR_KEYWORD in kinds

    def _ask(self, given: dict[str, Any]) -> tuple[Asked, dict[str, Any]]:
        model: Any = self.model
        check_adapters(model)
        labels = given.get("labels")
        asked = Asked(labels=labels, gradients=records_gradients(model, given.get("inputs_embeds")))
        if not self.passes_on:
            if asked.gradients:
                raise ValueError(
                    "forward of a parallelized model must take **kwargs and pass them to its body "
                    f"where gradients are recorded, got {type(model).__name__} without: call it "
                    "under torch.no_grad()"
                )
            return asked, given
        if "logits_to_keep" in self.names:
            self._ask_for_columns(asked, given)
        if not self._is_causal_lm():
            if asked.gradients:
                raise ValueError(
                    "a parallelized model must be a causal language model, or one without a head, "
                    f"where gradients are recorded, got {type(model).__name__}: call it under "
                    "torch.no_grad()"
                )
        elif labels is not None:
            asked.targets = self._targets(asked, given)
        asked.local = asked.targets is not None or asked.gradients
        return asked, {**given, ASKED: asked}

    def _is_causal_lm(self) -> bool:
        """transformers finds the type of loss by the name of the class: it is None for a subclass
        of another name."""
        loss_type: Any = self.model.loss_type
        if "labels" not in self.names:
            return False
        if loss_type is not None:
            return bool(loss_type == "ForCausalLM")
        names = (each.__name__ for each in type(self.model).__mro__)
        return self._foreign_part() is None and any("ForCausalLM" in name for name in names)

    def _foreign_part(self) -> Any:
        return _foreign_part(self.before or type(self.model).forward)

    def _run(self, asked: tuple[Asked, dict[str, Any]]) -> Any:
        wanted, given = asked
        if not wanted.local:
            return self._own()(**given)
        config: Any = self.model.config
        as_dict = given.get("return_dict")
        as_dict = config.return_dict if as_dict is None else as_dict
        output = self._own()(**{**given, "labels": None, "return_dict": True})
        call, targets = wanted.call, wanted.targets
        assert call is not None
        if targets is not None:
            logits = call.own(output.logits)
            loss = _loss(call, logits, targets)
            # Made anew: a field that is set later comes last, and the loss is the first.
            output = type(output)(**{**output, "loss": loss, "logits": logits})
        elif wanted.columns is None:
            output.logits = call.whole(output.logits)
        else:
            output.logits = call.select(output.logits, wanted.columns)
        return output if as_dict else output.to_tuple()

    def _undo(self, asked: tuple[Asked, dict[str, Any]]) -> None:
        undo = asked[0].undo
        if undo is not None:
            undo()

    def _ask_for_columns(self, asked: Asked, given: dict[str, Any]) -> None:
        kept = given.get("logits_to_keep")
        if kept is None:
            return
        asked.kept = kept
        if not isinstance(kept, int) or kept != 0:
            tokens = given.get("input_ids")
            tokens = given.get("inputs_embeds") if tokens is None else tokens
            length, device = 0, None
            if isinstance(tokens, torch.Tensor):
                length, device = tokens.size(1), tokens.device  # a copy to it would wait for it
            asked.columns = _columns(kept, length, device)
            if not isinstance(kept, int):
                asked.kept = list(asked.columns.shape)
        given["logits_to_keep"] = 0  # the rows that come back are those that were asked for

    def _targets(self, asked: Asked, given: dict[str, Any]) -> Targets:
        if asked.gradients and self.settings.ring().world_size > 1:
            check_loss_of_adapters(self.model)
        loss: Any = self.model.loss_function
        if loss is not ForCausalLMLoss:
            name = getattr(loss, "__name__", type(loss).__name__)
            raise ValueError(
                "loss_function must be ForCausalLMLoss of transformers where a parallelized model "
                f"gets labels, got {name}: leave labels out and compute the loss from its logits"
            )
        foreign = self._foreign_part()
        if foreign is not None:
            raise ValueError(
                "forward must be that of transformers where a parallelized model gets labels, got "
                f"{getattr(foreign, '__qualname__', type(foreign).__name__)}, whose loss may be "
                "another: leave labels out and compute the loss from its logits"
            )
        if asked.columns is not None:
            raise ValueError(
                f"logits_to_keep must be 0 where labels are given, got {asked.kept}: the loss is "
                "that of all tokens"
            )
        return Targets.of(given)


#: Packages whose forwards, and wrappers of forwards, leave the loss as it is.
_SAME_LOSS = ("transformers", "liger_kernel", "accelerate", "torch", "contextlib")


def _foreign_part(forward: Any) -> Any:
    """What of a forward, and of the functions that it wraps, may change the loss; None: nothing."""
    while forward is not None:
        function = getattr(forward, "__func__", forward)
        if isinstance(function, partial):
            forward = function.func
            continue
        # Not __module__, which functools.wraps copies.
        home = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        if home.split(".")[0] not in _SAME_LOSS:
            return function
        forward = getattr(function, "__wrapped__", None)
    return None


def _columns(kept: Any, length: int, device: torch.device | None) -> torch.Tensor:
    """The tokens that ``logits_to_keep`` asks for, as indexing understands it, int64 ``[n]``."""
    every = torch.arange(length, device=device)
    if isinstance(kept, int):
        return every[slice(-kept, None)]  # for a negative number, too
    if isinstance(kept, slice):
        return every[kept]
    columns = torch.as_tensor(kept) if isinstance(kept, (list, tuple)) else kept
    is_one = isinstance(columns, torch.Tensor) and columns.dim() == 1
    if is_one and columns.dtype == torch.bool and len(columns) == length:
        return every[columns.to(every.device)]
    if not is_one or columns.dtype.is_floating_point or columns.dtype in (torch.bool, torch.uint8):
        is_tensor = isinstance(columns, torch.Tensor)
        got = f"{columns.dtype} {list(columns.shape)}" if is_tensor else kept
        raise ValueError(
            "logits_to_keep must be a number of tokens, a slice, indices [n] or a bool mask of the "
            f"{length} tokens, got {got}"
        )
    return columns.long()


def _loss(call: ModelCall, logits: torch.Tensor, targets: Targets) -> torch.Tensor:
    """The loss of the whole sequence, from this rank's logits."""
    part = ForCausalLMLoss(
        logits,
        None,
        logits.size(-1),
        num_items_in_batch=targets.count(),
        ignore_index=targets.ignored,
        shift_labels=call.own(call.rows(targets.tokens)).contiguous(),
    )
    return call.loss(part)
