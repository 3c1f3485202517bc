# SPDX-License-Identifier: Apache-2.0
"""``generate`` of FMS, in which every rank goes on with the tokens of the group's first rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable, MutableMapping
from typing import Any

import fms.utils.generation
import torch
import torch.distributed as dist
from fms.distributed.strategy import TensorParallelStrategy
from torch import nn

from ringattn._distributed.checksums import checksum
from ringattn._distributed.collectives import Content, agree
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.one_rank import OnOneRank
from ringattn.integrations.fms.attach import LAST, settings_of
from ringattn.integrations.fms.masks import check_ends, check_values, padding_of, visible

_Hook = Callable[..., tuple[torch.Tensor, MutableMapping[str, Any]]]


@torch.no_grad()
def generate(model: nn.Module, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """``fms.utils.generation.generate`` for a model on a ring. Collective: every rank calls it,
    with the same arguments.

    The group's first rank draws, with torch's default generator; of ranks that share the weights of
    one copy of the model (tensor parallelism), their first one. Logits are computed of the last
    token alone.

    Args:
        model: on a ring, see :func:`ringattn.parallelize`.
        input_ids: int64 ``[B, S]`` or ``[S]``, the whole prompts on every rank; padded ones come
            with ``extra_kwargs``, all three from ``pad_input_ids`` of FMS.
        args: those of ``generate`` of FMS.
        kwargs: likewise.

    Returns:
        What ``generate`` of FMS returns, the same tokens on every rank.

    Raises:
        ValueError: on every rank, before anything is computed: arguments that differ between ranks,
            a model that is on no ring, padding after a prompt, more tokens than ``max_seq_len``
            (``generate`` of FMS would drop the first ones).
    """
    settings = settings_of(model)
    if settings is None:
        raise ValueError(
            "model must be on a ring, got one that is not: call ringattn.parallelize(model)"
        )
    ring = settings.ring()
    bound = inspect.signature(fms.utils.generation.generate).bind(model, input_ids, *args, **kwargs)
    bound.apply_defaults()
    given, mistake = bound.arguments, None
    try:
        _check(given)
    except ValueError as error:
        mistake = str(error)
    agree(ring, "generate", mistake, _facts(given))
    first = FirstRankChooses(ring, model, given["post_iteration_hook"])
    given["post_iteration_hook"] = first
    given["extra_kwargs"] = {LAST: 1, **(given["extra_kwargs"] or {})}
    generated = fms.utils.generation.generate(*bound.args, **bound.kwargs)
    first.on_first.check()
    return generated


class FirstRankChooses:
    """What FMS calls after each token: leaves that of the group's first rank."""

    def __init__(self, ring: GroupInfo, model: nn.Module, then: _Hook | None) -> None:
        strategy = getattr(model, "distributed_strategy", None)
        self.on_first = OnOneRank(ring, 0, "choose a token", callers=True)
        self.copy = strategy.group if isinstance(strategy, TensorParallelStrategy) else None
        self.then = then  # the caller's, whose token it is where there is one

    def __call__(
        self,
        position: int,
        logits: torch.Tensor,
        next_val: torch.Tensor,
        kwargs: MutableMapping[str, Any],
    ) -> tuple[torch.Tensor, MutableMapping[str, Any]]:
        chosen, rest = next_val, kwargs

        def choose() -> torch.Tensor:
            nonlocal chosen, rest
            if self.then is not None:
                chosen, rest = self.then(position, logits, next_val, kwargs)
            tokens = chosen.flatten().contiguous()
            if self.copy is not None:
                dist.broadcast(tokens, group=self.copy, group_src=0)
            return tokens

        tokens = self.on_first(next_val.numel(), next_val.device, choose)
        return tokens.view_as(chosen), rest


def _check(given: dict[str, Any]) -> None:
    ids, longest = given["input_ids"], given["max_seq_len"]
    if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2):
        shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise ValueError(f"input_ids must be [B, S] or [S], got {shape}")
    num_tokens = ids.size(-1) + (0 if given["use_cache"] else given["max_new_tokens"] - 1)
    if num_tokens > longest:
        raise ValueError(
            f"max_seq_len must be {num_tokens} or more, got {longest}: the first tokens would be "
            "dropped"
        )
    extra = given["extra_kwargs"] or {}
    if extra.get("mask") is not None:
        batch = ids.size(0) if ids.dim() == 2 else 1
        seen = visible(extra["mask"], batch, ids.size(-1), ids.size(-1))
        check_values(extra["mask"])
        padding = padding_of(seen, extra.get("position_ids"))
        if padding is not None:
            check_ends(padding)


def _facts(given: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks, by the name an error calls it."""
    ids = given["input_ids"]
    names = ("max_seq_len", "max_new_tokens", "do_sample", "use_cache", "eos_token_id")
    facts: dict[str, Any] = {name: given[name] for name in names}
    for name in ("post_iteration_hook", "prepare_model_inputs_hook"):
        hook = given.get(name)
        kind = getattr(hook, "__qualname__", type(hook).__qualname__)
        facts[name] = None if hook is None else kind
    if isinstance(ids, torch.Tensor):
        facts["input_ids' shape"] = tuple(ids.shape)
        facts["input_ids"] = Content(int(checksum(ids)))
    return facts
