# SPDX-License-Identifier: Apache-2.0
"""The ``forward`` of a model's layers on the ring: what a caller's arguments become for them, and
their output for the caller."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from ringattn._distributed.agreement import Agreement, Given
from ringattn._distributed.checksums import number_of
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.weights import trained_weights
from ringattn.integrations.forward import RingForward, records_gradients
from ringattn.integrations.transformers.attention import NAME
from ringattn.integrations.transformers.caches import (
    CACHES,
    PassingCache,
    check_ring_layer,
    fill,
    ring_layer,
)
from ringattn.integrations.transformers.forward import ASKED, Asked
from ringattn.integrations.transformers.packed import DOCUMENTS, packed_documents
from ringattn.integrations.transformers.support import (
    check_adapters,
    check_attention_keywords,
    check_module,
)
from ringattn.model_call import ModelCall
from ringattn.model_inputs import Inputs, Padding
from ringattn.parallel import RingSettings

_CALL = "ringattn_call"  # keyword argument of this package, on its way through a model

_ALONE = (
    "{} must attend through the ring, got a call in which it did not: its forward must call the "
    "attention function that transformers chooses; where a layer was replaced, call "
    "ringattn.parallelize(model) again; take out layers that calls skip"
)


class BodyForward(RingForward):
    """``forward`` of the layers: on this rank's rows, with their positions and the call that goes
    with them; then the rows that the caller asked for, of all ranks, and the caller's cache."""

    def __init__(
        self,
        body: nn.Module,
        settings: RingSettings,
        configs: list[tuple[nn.Module, Any]],
        *,
        has_head: bool,
    ) -> None:
        super().__init__(body, settings)
        self.configs = configs  # of Attached
        self.has_head = has_head
        self.agreement = Agreement()
        self.cache_name = next(name for name in CACHES if name in self.names)
        # The number of layers, and their modules that attended, of the call checked last.
        self.attended: tuple[int, set[nn.Module]] | None = None

    def _ask(self, given: dict[str, Any]) -> dict[str, Any]:
        self.agreement.check()
        check_adapters(self.model)
        for module, _ in self.configs:
            check_module(module, NAME)
        return _prepared(self, given)

    def _run(self, asked: dict[str, Any]) -> Any:
        output = self._own()(**asked)
        context: Context = asked[_CALL]
        self._check_attended(context)
        call, wanted = context.call, asked.get(ASKED) or Asked()
        hidden = output.last_hidden_state
        if not wanted.local:
            output.last_hidden_state = (
                call.whole(hidden)
                if wanted.columns is None
                else call.select(hidden, wanted.columns)
            )
        if getattr(output, "hidden_states", None) is not None:
            output.hidden_states = tuple(call.whole(x) for x in output.hidden_states)
        if context.cache is not None:
            if call.is_prefill:
                assert call.cache is not None
                fill(context.cache, call.cache, context.num_layers, call.padding)
            # Made anew: a field that is set later comes last.
            output = type(output)(**{**output, context.cache_name: context.cache})
        return output if context.return_dict else output.to_tuple()

    def _undo(self, asked: dict[str, Any]) -> None:
        asked[_CALL].undo()

    def _check_attended(self, context: Context) -> None:
        """ValueError where a layer computed its attention by itself, of this rank's rows alone."""
        found = (context.num_layers, context.attended)
        # A walk through all modules is too slow for each decoded token. One rank has all rows.
        if found == self.attended or self.settings.ring().world_size == 1:
            return
        attended = {module.layer_idx for module in context.attended}
        for name, module in self.model.named_modules():
            # vars(): wrappers, such as torch.compile's, show attributes of what they wrap.
            layer = vars(module).get("layer_idx")
            is_attention = layer is not None and hasattr(module, "is_causal")
            # A config with fewer layers than there are runs the first ones.
            if is_attention and layer < context.num_layers and layer not in attended:
                raise ValueError(_ALONE.format(name))
        if not context.attended:
            raise ValueError(_ALONE.format("every layer"))
        self.attended = found


class Context:
    """Keyword argument that travels through the layers. The attention function reads ``call`` and
    ``documents`` and adds to ``attended``; :class:`BodyForward` reads the rest. No dataclass: FSDP2
    copies those among keyword arguments.

    Attributes:
        cache: the caller's, or a new one for the caller.
        documents: boundaries of packed documents, of a prompt.
        attended: modules that called the attention function.
    """

    def __init__(
        self,
        call: ModelCall,
        cache: Any,
        cache_name: str,
        num_layers: int,
        *,
        return_dict: bool,
        documents: torch.Tensor | None,
    ) -> None:
        self.call = call
        self.cache = cache
        self.cache_name = cache_name
        self.num_layers = num_layers
        self.return_dict = return_dict
        self.documents = documents
        self.attended: set[nn.Module] = set()
        self._layers_before = None if cache is None else cache.layers

    def undo(self) -> None:
        """Leaves the caller's cache as it was before the call."""
        self.call.undo()
        if self.cache is not None:
            self.cache.layers = self._layers_before


def _prepared(forward: BodyForward, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keyword arguments of the layers, from those of the caller."""
    body, ring = forward.model, forward.settings.ring()
    config: Any = body.config
    cache_name = forward.cache_name
    ids, embeds = kwargs.get("input_ids"), kwargs.get("inputs_embeds")
    if (ids is None) == (embeds is None):
        raise ValueError(
            "exactly one of input_ids and inputs_embeds must be given, "
            f"got {'neither' if ids is None else 'both'}"
        )
    tokens = ids if embeds is None else embeds
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != (2 if embeds is None else 3):
        shape = getattr(tokens, "shape", type(tokens).__name__)
        name = "input_ids must be [B, S]" if embeds is None else "inputs_embeds must be [B, S, E]"
        raise ValueError(f"{name}, got {shape}")
    if tokens.size(0) == 0 or tokens.size(1) == 0:
        raise ValueError(f"input_ids must hold tokens, got shape {list(tokens.shape)}")
    asked: Asked | None = kwargs.get(ASKED)
    if asked is None:
        asked = Asked(gradients=records_gradients(body, tokens))
        if asked.gradients and forward.has_head:
            raise ValueError(
                "a parallelized model must be called as a whole where gradients are recorded, got "
                "a call of the part before its head: call the model, or parallelize that part"
            )
    if _option(config, kwargs, "output_attentions"):
        raise ValueError(
            "output_attentions must be False, got True: no rank has all of the weights"
        )
    if _option(config, kwargs, "output_router_logits"):
        raise ValueError(
            "output_router_logits must be False, got True: no rank has those of all tokens"
        )
    given = next((kwargs.pop(name) for name in CACHES if kwargs.get(name) is not None), None)
    use_cache = bool(_option(config, kwargs, "use_cache")) and not _computes_again(body)
    # No gradient flows through a cache, so that training keeps none unless it is told to. In eval
    # mode a loop may hand it to its next call, which is refused below: with None it would begin a
    # new sequence. Calls for a loss are no such loop, and documents have no cache.
    for_a_loss = body.training or asked.targets is not None
    needs_none = for_a_loss or kwargs.get("cu_seq_lens_q") is not None
    keeps_cache = use_cache and not (
        asked.gradients and needs_none and kwargs.get("use_cache") is None
    )
    layer = None
    if given is not None:
        if asked.gradients and _computes_again(body):
            raise ValueError(
                f"{cache_name} must be left out where layers are computed again in the backward, "
                "got one: transformers fills none then; fill it under torch.no_grad()"
            )
        layer = ring_layer(given)
        use_cache = keeps_cache = True
    if layer is not None:
        if asked.gradients:
            raise ValueError(
                f"{cache_name} must be empty where gradients are recorded, got tokens before this "
                "call: go on after a cache under torch.no_grad()"
            )
        check_ring_layer(layer, ring, config.num_hidden_layers, given)
    hidden_states = bool(_option(config, kwargs, "output_hidden_states"))
    facts = {
        "logits_to_keep": asked.kept,
        "labels": asked.targets is not None,
        "gradients": asked.gradients,
        "output_hidden_states": hidden_states,
        "use_cache": use_cache,
        "tokens in a cache": layer is not None,
    }
    columns = None if isinstance(asked.kept, int) else asked.columns
    compared: dict[str, torch.Tensor | int | None] = {"logits_to_keep": columns}
    if asked.targets is not None:
        compared |= asked.targets.compared
    elif isinstance(asked.labels, torch.Tensor):
        compared["labels"] = asked.labels
    flaws = {}
    if columns is not None:
        length = tokens.size(1)
        beyond = ((columns < -length) | (columns >= length)).any()
        flaws = {f"logits_to_keep must be indices of the {length} tokens, got one beyond": beyond}
        asked.columns = columns.clamp(-length, length - 1)  # no index may end the process
    trained = trained_weights(ring, body) if asked.gradients else None
    more = Given(facts, compared, flaws, trained=trained)
    inputs = Inputs(
        forward.agreement, tokens, "input_ids" if embeds is None else "inputs_embeds", more=more
    )
    call, positions, documents = _call(
        *(ring, forward.settings, inputs, layer, kwargs),
        use_cache=use_cache,
        keeps_cache=keeps_cache,
    )
    asked.call = call
    if keeps_cache and given is None:
        given = DynamicCache()
    context = Context(
        call,
        given,
        cache_name,
        config.num_hidden_layers,
        return_dict=bool(_option(config, kwargs, "return_dict", default=True)),
        documents=documents,
    )
    asked.undo = context.undo
    prepared = {
        **kwargs,
        "input_ids" if embeds is None else "inputs_embeds": call.rows(tokens),
        "position_ids": positions,
        # Four dimensions: transformers takes it as it is. The attention function does not look.
        "attention_mask": tokens.new_ones((1, 1, 1, 1), dtype=torch.bool),
        "use_cache": keeps_cache,
        cache_name: PassingCache(call.num_before) if keeps_cache else None,
        _CALL: context,
        "return_dict": True,
    }
    for name in (*CACHES, "cache_position"):
        if name != cache_name:
            prepared.pop(name, None)
    return prepared


def _call(
    ring: GroupInfo,
    settings: RingSettings,
    inputs: Inputs,
    layer: Any,
    kwargs: dict[str, Any],
    *,
    use_cache: bool,
    keeps_cache: bool,
) -> tuple[ModelCall, torch.Tensor, torch.Tensor | None]:
    """The call, the position ids of this rank's rows, and the documents. Checks come first: the
    cache is advanced last of all."""
    tokens = inputs.tokens
    batch, num_tokens = tokens.shape[:2]
    past = 0 if layer is None else layer.store.seq_len
    mask, position_ids = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
        got = list(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be [B, S], got {got}")
    if mask is not None and mask.shape != (batch, past + num_tokens):
        raise ValueError(
            f"attention_mask must be [B, S], [{batch}, {past + num_tokens}] with the tokens before "
            f"this call, got {list(mask.shape)}"
        )
    others = {name: value for name, value in kwargs.items() if name not in DOCUMENTS}
    check_attention_keywords(others, past + num_tokens)
    if position_ids is not None:
        if position_ids.dim() != 2 or position_ids.size(0) not in (1, batch):
            raise ValueError(
                f"position_ids must be [B, S] or [1, S], got {list(position_ids.shape)}"
            )
        if position_ids.size(1) != num_tokens:
            raise ValueError(
                f"position_ids must have the {num_tokens} tokens of input_ids, "
                f"got {position_ids.size(1)}"
            )
    documents = packed_documents(
        *(kwargs, num_tokens), use_cache=use_cache, keeps_cache=keeps_cache
    )
    boundaries = None if documents is None else number_of(tuple(documents.tolist()))
    inputs.more.values = {**inputs.more.values, "cu_seq_lens_q": boundaries}
    inputs.position_ids = position_ids
    if layer is None:
        padding = None if mask is None else Padding.of(mask)
        partition = settings.split.partition(num_tokens, documents)
        cache = None
        if keeps_cache:
            cache = ModelCall.new_cache(ring, partition, padding=padding, device=tokens.device)
        call = ModelCall.prefill(
            *(ring, partition),
            cache=cache,
            padding=padding,
            transport=settings.transport,
            inputs=inputs,
        )
    else:
        wrong = _check_step(layer.padding, mask, past, num_tokens)
        inputs.more.flaws = {**inputs.more.flaws, _OTHER_MASK: wrong}
        call = ModelCall.after(
            *(ring, layer.store, num_tokens, settings.split.partition),
            device=tokens.device,
            transport=settings.transport,
            inputs=inputs,
        )
    if position_ids is None:
        return call, call.position_ids(tokens.device), documents
    return call, call.rows(position_ids), documents


_OTHER_MASK = (
    "attention_mask must be the prompt's mask and ones for the tokens after it, got another one"
)


def _check_step(
    padding: Padding | None, mask: Any, past: int, num_tokens: int
) -> torch.Tensor | None:
    """ValueError where new tokens come with another mask than the prompt's and ones. Whether they
    do, where the host would have to wait to know."""
    if padding is not None and any(padding.ends):
        raise ValueError(
            "attention_mask must have its padding before the prompt to go on after it, "
            "got a cache of a prompt with padding after it"
        )
    if mask is None:
        return None
    if padding is None:
        wrong = (mask == 0).any()
    else:
        expected = padding.mask(mask.device, past - padding.seq_len + num_tokens)
        if mask.shape != expected.shape:
            raise ValueError(_OTHER_MASK)
        wrong = ((mask != 0) != expected).any()
    if wrong.device.type == "cpu" and bool(wrong):
        raise ValueError(_OTHER_MASK)
    return wrong if wrong.device.type != "cpu" else None


def _computes_again(body: nn.Module) -> bool:
    """Whether layers are computed again in the backward, where transformers keeps no cache."""
    again = getattr(body, "gradient_checkpointing", False)
    return bool(again) and body.training and torch.is_grad_enabled()


def _option(config: Any, kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
    """What the call says, or else the config."""
    given = kwargs.get(name)
    return getattr(config, name, default) if given is None else given
