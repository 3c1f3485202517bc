# SPDX-License-Identifier: Apache-2.0
"""A model on the ring: a ``forward`` of its body, ``base_model``, and one of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from fms.modules.attention import MultiHeadAttention
from fms.modules.feedforward import ConditionalFeedForward as Experts
from torch import nn

from ringattn._distributed.agreement import Agreement, Given
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.weights import trained_weights
from ringattn.cache import ShardedKVCache
from ringattn.integrations.fms.attention import NAME, LayerCall
from ringattn.integrations.fms.caches import Sequences, handles_of, sequences_of
from ringattn.integrations.fms.masks import (
    check_ends,
    check_values,
    differs,
    padding_of,
    seen_by_padding,
    visible,
)
from ringattn.integrations.fms.support import body_of, check_keywords, check_positions, family
from ringattn.integrations.forward import RingForward, records_gradients
from ringattn.model_call import ModelCall
from ringattn.model_inputs import Inputs
from ringattn.parallel import ATTACHED, RingSettings
from ringattn.planning import ModelCost

_CALL = "ringattn_call"  # keyword arguments of this package, on their way through a model
LAST = "ringattn_last"  # of ``generate``: models without last_n_tokens
_ASKED = "ringattn_asked"


@dataclass
class Attached:
    """What :func:`attach` did to a model."""

    settings: RingSettings
    forwards: list[RingForward]  # of the body, and of a model with a head
    handles: list[Any]


def handles(model: object) -> bool:
    """Whether this is a model of FMS."""
    return family(model) is not None


def cost(model: Any) -> ModelCost:
    """What one layer costs."""
    layer = body_of(model).layers[0]
    attention: Any = next(x for x in layer.modules() if isinstance(x, MultiHeadAttention))
    weight = next(layer.parameters())
    core = ModelCost.attention_only(
        attention.nheads,
        attention.emb_kq_per_head,
        num_kv_heads=attention.kvheads,
        dtype=weight.dtype,
    )
    weights = sum(parameter.numel() for parameter in layer.parameters())
    return ModelCost(core.attention_flops, 2.0 * weights, core.kv_bytes)


def attach(model: Any, settings: RingSettings) -> None:
    """See :func:`ringattn.parallelize`; ``model`` has been checked."""
    body = body_of(model)
    forwards: list[RingForward] = [BodyForward(body, settings, has_head=body is not model)]
    if body is not model:
        forwards.append(Forward(model, settings))
    for forward in forwards:
        forward.put_on()
    setattr(body, ATTACHED, Attached(settings, forwards, []))


def detach(model: Any) -> None:
    """Undoes :func:`attach`."""
    attached = vars(body_of(model)).pop(ATTACHED, None)
    if attached is not None:
        for handle in attached.handles:
            handle.remove()
        for forward in attached.forwards:
            forward.take_off()


def add_handle(model: Any, handle: Any) -> None:
    """Adds a hook's handle to what :func:`detach` removes."""
    getattr(body_of(model), ATTACHED).handles.append(handle)


def settings_of(model: object) -> RingSettings | None:
    """How calls of a model go through the ring; None of one that is on none."""
    attached = getattr(body_of(model), ATTACHED, None)
    return None if attached is None else attached.settings


class Asked:
    """What the caller of a model with a head asks for. No dataclass: FSDP2 copies those among
    keyword arguments.

    Attributes:
        last: how many last tokens the head runs on; 0: all.
        generates: whether the call is one of ``generate``, which leaves grad mode on.
        gradients: whether the call records gradients. The head then runs on this rank's rows alone,
            so that its weights get a part of their gradient, as all others do.
        call: the model call, once the layers have been prepared.
    """

    gradients: bool = False
    call: ModelCall | None = None

    def __init__(self, last: int = 0, *, generates: bool = False) -> None:
        self.last = last
        self.generates = generates


class Forward(RingForward):
    """``forward`` of a model with a head."""

    def _ask(self, given: dict[str, Any]) -> tuple[Asked, dict[str, Any]]:
        last = given.pop(LAST, 0) or (1 if given.get("only_last_token") else 0)
        if "last_n_tokens" in self.names:  # others ignore it
            last = given.get("last_n_tokens") or last
        # ``generate`` of FMS names its cache in each call.
        asked = Asked(max(0, last), generates="past_key_value_states" in given)
        asked.gradients = _records_gradients(self.model, given.get(self.names[0]), given, asked)
        return asked, {**given, _ASKED: asked}

    def _undo(self, asked: tuple[Asked, dict[str, Any]]) -> None:
        call = asked[0].call
        if call is not None:
            call.undo()

    def _run(self, asked: tuple[Asked, dict[str, Any]]) -> Any:
        wanted, given = asked
        if not wanted.gradients:
            # FMS takes the last rows of those that come back: all of them.
            return self._own()(**given)
        only_last = bool(given.pop("only_last_token", False)) and not given.get("last_n_tokens")
        if "last_n_tokens" in self.names:
            given = {**given, "last_n_tokens": 0}
        logits = self._own()(**given)
        call = wanted.call
        assert call is not None
        logits = call.last(logits, wanted.last) if wanted.last else call.whole(logits)
        return logits[:, -1] if only_last else logits


def _records_gradients(module: nn.Module, tokens: Any, given: dict[str, Any], asked: Asked) -> bool:
    if given.get("use_cache") or asked.generates:
        return False
    return records_gradients(module, tokens)


class BodyForward(RingForward):
    """``forward`` of the layers: on this rank's rows, with their positions and the call that goes
    with them; then the rows that the caller asked for, of all ranks, and the caller's cache."""

    def __init__(self, body: nn.Module, settings: RingSettings, *, has_head: bool) -> None:
        super().__init__(body, settings)
        self.has_head = has_head
        self.has_experts = any(isinstance(x, Experts) for x in body.modules())
        self.agreement = Agreement()

    def _ask(self, given: dict[str, Any]) -> dict[str, Any]:
        self.agreement.check()
        ids = self.names[0]  # x_in, or x as in Mixtral
        rows, rest = _prepared(self, given.get(ids), given)
        return {ids: rows, **rest}

    def _run(self, asked: dict[str, Any]) -> tuple[torch.Tensor, list[Any]]:
        hidden, _ = self._own()(**asked)
        context: Context = asked[_CALL]
        call, wanted = context.call, context.asked
        if wanted.gradients:
            return call.whole(hidden) if asked.get(_ASKED) is None else hidden, []
        with torch.no_grad():
            whole = call.last(hidden, wanted.last) if wanted.last else call.whole(hidden)
        if hidden.requires_grad:
            whole = NoBackward.apply(whole, hidden)
        if context.sequences is None:
            return whole, []
        body: Any = self.model
        return whole, handles_of(context.sequences, len(body.layers))

    def _undo(self, asked: dict[str, Any]) -> None:
        asked[_CALL].call.undo()


class NoBackward(torch.autograd.Function):
    """Hidden states of a generation under grad mode: they have no gradient, and say so."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """``whole``, which depends on ``hidden``."""
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refused."""
        raise ValueError(_NO_BACKWARD)


class Context(LayerCall):
    """Keyword argument that travels through the layers. The attention op reads the call;
    :class:`BodyForward` reads the rest."""

    def __init__(self, call: ModelCall, asked: Asked, sequences: Sequences | None) -> None:
        super().__init__(call, with_gradients=asked.gradients)
        self.asked = asked
        self.sequences = sequences  # behind the cache that the caller gets


OTHER_MASK = "mask must be the prompt's mask and 0 for the tokens after it, got another one"
_OTHER_TOKENS = (
    "generate with ringattn.integrations.fms.generate(), where ranks draw the same tokens, or with "
    "do_sample=False"
)
_NO_BACKWARD = (
    "a call of a parallelized model must have neither use_cache nor past_key_value_states where "
    "gradients flow back through it, got one of them"
)


def _prepared(
    forward: BodyForward, tokens: Any, given: dict[str, Any]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """This rank's rows and the keyword arguments of the layers, from those of the caller."""
    body: Any = forward.model
    settings, ring = forward.settings, forward.settings.ring()
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 + tokens.is_floating_point():
        shape = list(getattr(tokens, "shape", [])) or type(tokens).__name__
        raise ValueError(f"x must be ids [B, S] or embeddings [B, S, E], got {shape}")
    if tokens.size(0) == 0 or tokens.size(1) == 0:
        raise ValueError(f"x must hold tokens, got shape {list(tokens.shape)}")
    check_keywords(given)
    past = sequences_of(given.get("past_key_value_states"), ring, len(body.layers))
    use_cache = bool(given.get("use_cache"))
    if past is not None and not use_cache:
        raise ValueError("use_cache must be True with past_key_value_states, got False")
    asked: Asked | None = given.get(_ASKED)
    if asked is None:
        asked = Asked()
        asked.gradients = _records_gradients(body, tokens, given, asked)
        if asked.gradients and forward.has_head:
            raise ValueError(
                "a parallelized model must be called as a whole where gradients are recorded, got "
                "a call of its base_model: call the model, or parallelize base_model"
            )
    if asked.gradients and forward.has_experts:
        raise ValueError(
            "a model with experts must be called under torch.no_grad(), got one whose gradients "
            "are recorded: FMS has no backward of its experts"
        )
    position_ids = given.get("position_ids")
    if position_ids is not None and (
        position_ids.dim() != 2
        or position_ids.size(0) not in (1, tokens.size(0))
        or position_ids.size(1) != tokens.size(1)
    ):
        raise ValueError(
            f"position_ids must be [B, S] or [1, S] with the {tokens.size(1)} tokens of x, "
            f"got {list(position_ids.shape)}"
        )
    mask, last = given.get("mask"), asked.last
    facts = {
        "last_n_tokens": last,
        "use_cache": use_cache,
        "a cache": past is not None,
        "gradients": asked.gradients,
    }
    trained = trained_weights(ring, body) if asked.gradients else None
    more = Given(facts, hints={"x": _OTHER_TOKENS}, trained=trained)
    inputs = Inputs(forward.agreement, tokens, "x", "mask", position_ids, more)
    if past is None:
        call, past = _prompt(body, ring, settings, inputs, mask, use_cache, last)
        # Its next call would have the padding between real tokens.
        if asked.generates and not use_cache and call.padding is not None:
            check_ends(call.padding)
    else:
        wrong = _check_step(body, past, tokens, position_ids, mask)
        more.flaws = {OTHER_MASK: wrong}
        call = ModelCall.after(
            *(ring, past.store, tokens.size(1), settings.split.partition),
            device=tokens.device,
            transport=settings.transport,
            inputs=inputs,
        )
    asked.call = call
    return call.rows(tokens), {
        "position_ids": (
            call.position_ids(tokens.device) if position_ids is None else call.rows(position_ids)
        ),
        "use_cache": False,  # of the layers: the call keeps keys and values
        "attn_name": NAME,
        _CALL: Context(call, asked, past),
        _ASKED: given.get(_ASKED),
    }


def _prompt(
    body: Any,
    ring: GroupInfo,
    settings: RingSettings,
    inputs: Inputs,
    mask: Any,
    use_cache: bool,
    last: int,
) -> tuple[ModelCall, Sequences | None]:
    tokens, position_ids = inputs.tokens, inputs.position_ids
    batch, num_tokens = tokens.shape[:2]
    padding = None
    if mask is not None:
        seen = visible(mask, batch, num_tokens, num_tokens)
        check_values(mask)
        padding = padding_of(seen, position_ids)
        if padding is not None:
            padding = replace(padding, sees=seen_by_padding(seen, padding, last))
    highest = num_tokens - 1 if position_ids is None else int(position_ids.max())
    check_positions(body, tokens.device, highest)
    partition = settings.split.partition(num_tokens)
    store: ShardedKVCache | None = None
    if use_cache:
        store = ModelCall.new_cache(ring, partition, padding=padding, device=tokens.device)
    call = ModelCall.prefill(
        *(ring, partition),
        cache=store,
        padding=padding,
        transport=settings.transport,
        inputs=inputs,
    )
    if store is None:
        return call, None
    return call, Sequences(store, padding, highest - (num_tokens - 1))


def _check_step(
    body: Any,
    past: Sequences,
    tokens: torch.Tensor,
    position_ids: torch.Tensor | None,
    mask: Any,
) -> torch.Tensor | None:
    """ValueError where new tokens do not follow those of the cache. Whether their mask does, where
    the host would have to wait to know."""
    batch, num_tokens = tokens.shape[:2]
    before, padding = past.store.seq_len, past.padding
    if padding is not None:
        check_ends(padding)
    past.store.check_rows("x", tokens)
    if padding is not None and position_ids is None:
        raise ValueError("position_ids must be given after a padded prompt, got None")
    highest = before + num_tokens - 1 + (0 if position_ids is None else past.ahead)
    if position_ids is not None and position_ids.device.type == "cpu":
        highest = max(highest, int(position_ids.max()))
    check_positions(body, tokens.device, highest)
    if mask is None:
        return None
    seen = visible(mask, batch, num_tokens, before + num_tokens)
    wrong = differs(seen, padding, before)
    if wrong.device.type == "cpu" and bool(wrong):
        raise ValueError(OTHER_MASK)
    return wrong if wrong.device.type != "cpu" else None
