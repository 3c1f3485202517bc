# SPDX-License-Identifier: Apache-2.0
"""A model on the ring: a ``forward`` of its body and of its head, a config of its own, its
generate."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from ringattn.integrations.forward import RingForward
from ringattn.integrations.transformers.attention import NAME
from ringattn.integrations.transformers.body import BodyForward
from ringattn.integrations.transformers.forward import Forward
from ringattn.integrations.transformers.generate import Generate, refuse_batching
from ringattn.integrations.transformers.support import body_of
from ringattn.parallel import ATTACHED, RingSettings
from ringattn.planning import ModelCost


@dataclass
class Attached:
    """What :func:`attach` did to a model."""

    settings: RingSettings
    configs: list[tuple[nn.Module, Any]]  # modules, and the config that each had
    copies: list[tuple[Any, Any, _Fields]]  # such a config, its copy, and what that had at first
    forwards: list[RingForward]  # of the body, and of a model with a head


def handles(model: object) -> bool:
    """Whether this is a model of transformers."""
    return isinstance(model, PreTrainedModel)


def cost(model: PreTrainedModel) -> ModelCost:
    """What one layer costs."""
    return ModelCost.from_config(model.config.get_text_config(), dtype=model.dtype)


def attach(model: Any, settings: RingSettings) -> None:
    """See :func:`ringattn.parallelize`; ``model`` has been checked."""
    body = body_of(model)
    attached = Attached(settings, _configs(model, body), [], [])
    attached.forwards.append(
        BodyForward(body, settings, attached.configs, has_head=body is not model)
    )
    if body is not model:
        attached.forwards.append(Forward(model, settings))
    copies: dict[int, Any] = {}  # modules that share a config share its copy
    for module, config in attached.configs:
        own = copy.deepcopy(config, copies)
        own._attn_implementation = NAME
        module.config = own
    for config in {id(config): config for _, config in attached.configs}.values():
        own = copies[id(config)]
        attached.copies.append((config, own, _fields(own)))
    for forward in attached.forwards:
        forward.put_on()
    if hasattr(model, "generate"):
        model.generate = Generate(model, settings.ring)
        model.init_continuous_batching = refuse_batching
    setattr(body, ATTACHED, attached)


def detach(model: Any) -> None:
    """Undoes :func:`attach` of this model, of its body or of the model whose body it is."""
    attached = vars(body_of(model)).pop(ATTACHED, None)
    if attached is None:
        return
    for forward in attached.forwards:
        forward.take_off()
        for name in ("generate", "init_continuous_batching"):
            vars(forward.model).pop(name, None)
    for module, config in attached.configs:
        module.config = config
    for config, own, before in attached.copies:
        _carry_over(own, before, config)


# Fields of a config: of another config in it its fields, of all else the value and, of what can
# change in place, a copy.
_Fields = dict[str, Any]


def _fields(config: Any) -> _Fields:
    return {
        name: _fields(value)
        if isinstance(value, PretrainedConfig)
        else (value, copy.deepcopy(value) if isinstance(value, (dict, list, set)) else value)
        for name, value in vars(config).items()
    }


def _carry_over(config: Any, before: _Fields, to: Any) -> None:
    """Sets in one config what has been set in its copy since."""
    for name, value in vars(config).items():
        kept, there = before.get(name), vars(to).get(name)
        if isinstance(kept, dict) and all(isinstance(x, PretrainedConfig) for x in (value, there)):
            _carry_over(value, kept, there)
        elif not isinstance(kept, tuple) or _differ(value, *kept):
            setattr(to, name, value)


def _differ(value: Any, before: Any, as_it_was: Any) -> bool:
    if not isinstance(value, (dict, list, set, tuple, str, int, float)):
        return value is not before  # arrays, for instance, are not compared
    try:
        return bool(value != as_it_was)
    except Exception:  # of what it holds
        return True


def _configs(model: nn.Module, body: nn.Module) -> list[tuple[nn.Module, Any]]:
    """The modules whose config chooses their attention, and that config. Those of the body may each
    have one of their own: layers that were copied, a body that was loaded by itself. Another model
    beside the body stays as it is."""
    inside = set(body.modules())
    found = ((module, vars(module).get("config")) for module in model.modules())
    return [
        (module, config)
        for module, config in found
        if hasattr(config, "_attn_implementation") and (module in inside or config is model.config)
    ]
