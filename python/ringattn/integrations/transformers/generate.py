# SPDX-License-Identifier: Apache-2.0
"""``model.generate`` of a parallelized model: transformers' own loop, in which every rank goes on
with the tokens of the group's first rank."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import torch
from transformers import (
    GenerationMixin,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from ringattn._distributed.checksums import checksum
from ringattn._distributed.collectives import Content, agree
from ringattn._distributed.errors import ErrorsToPeers
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.one_rank import OnOneRank
from ringattn.integrations.shared import by_name, names_of
from ringattn.integrations.transformers.caches import CACHES, ring_layer

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
# Tokens of a prompt that are in no chunk: the last one in transformers 4.57.
_BEHIND_CHUNKS = 1 if hasattr(GenerationMixin, "_prefill_chunking") else 0


class Generate:
    """``generate`` of one model, with the arguments of transformers. Collective.

    Greedy decoding and sampling; the group's first rank draws. Beams, assisted and contrastive
    decoding are refused by name, on every rank.
    """

    def __init__(self, model: Any, ring: Callable[[], GroupInfo]) -> None:
        self.model = model
        self.ring = ring

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        generate, ring = type(self.model).generate, self.ring()
        decode: Decode | None = None
        try:
            given = by_name(names_of(inspect.signature(generate))[1:], args, kwargs)
            self._stop_at_strings(given)
            if self._setting(given, "token_healing"):
                raise ValueError(
                    "token_healing must be False for a parallelized model, got True: give it the "
                    "ids that model.heal_tokens(ids, tokenizer) returns"
                )
            # Note: transformers drops a streamer on its way to a custom function, after the prompt.
            decode = Decode(ring, given.get("streamer"), given.get("assistant_model"))
            if given.get("custom_generate") is not None:
                raise ValueError(
                    "custom_generate must be None for a parallelized model, "
                    f"got {given['custom_generate']!r}"
                )
            return generate(self.model, **{**given, "custom_generate": decode})
        except Exception as error:  # of any type: the peers wait for this rank
            if decode is None or not decode.has_begun:
                with suppress(ValueError):  # as the peers raise it
                    agree(ring, "generate", str(error) or type(error).__name__, {})
            raise

    def _stop_at_strings(self, given: dict[str, Any]) -> None:
        """Makes ``stop_strings`` a stopping criterion: on its way to a custom function transformers
        drops the tokenizer before it makes that criterion."""
        strings, tokenizer = self._setting(given, "stop_strings"), given.pop("tokenizer", None)
        if strings is None or tokenizer is None:  # transformers says what is missing
            return
        given["stop_strings"] = None
        given["stopping_criteria"] = StoppingCriteriaList(
            [*(given.get("stopping_criteria") or ()), StopStringCriteria(tokenizer, strings)]
        )

    def _setting(self, given: dict[str, Any], name: str) -> Any:
        """What the arguments say, or else their generation config, or else the model's."""
        if name in given:
            return given[name]
        configs = (given.get("generation_config"), self.model.generation_config)
        return next((value for each in configs if (value := getattr(each, name, None))), None)


def refuse_batching(*args: Any, **kwargs: Any) -> Any:
    """What ``generate_batch``, and ``generate`` with a paged cache, call to begin."""
    raise ValueError(
        "generation must be model.generate() with the ring's own cache for a parallelized model, "
        'got continuous batching (generate_batch, cache_implementation="paged")'
    )


class Decode:
    """What transformers calls once it has prepared a generation."""

    def __init__(self, ring: GroupInfo, streamer: Any, assistant: Any) -> None:
        self.ring = ring
        self.streamer = None if streamer is None else Streamer(ring, streamer)
        self.assistant = assistant
        self.has_begun = False  # whether the peers know of this rank's part

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        ring, config = self.ring, copy.deepcopy(generation_config)
        mistake = None
        try:
            self._check(config, model_kwargs)
        except ValueError as error:
            mistake = str(error)
        self.has_begun = True
        facts = _facts(input_ids, config, model_kwargs)
        facts["logits_processor"] = _kinds(logits_processor)
        facts["stopping_criteria"] = _kinds(stopping_criteria)
        agree(ring, "generate", mistake, facts)
        first = FirstRankDraws(
            *(ring, logits_processor, config.do_sample), keep_scores=bool(config.output_scores)
        )
        stops = FirstRankStops.where_needed(ring, stopping_criteria)
        # The choice is made: transformers takes the one token that is left.
        config.do_sample = False
        output = model._sample(
            input_ids,
            logits_processor=LogitsProcessorList([first]),
            stopping_criteria=stops,
            generation_config=config,
            streamer=self.streamer,
            **model_kwargs,
        )
        first.on_first.check()
        if isinstance(stops, FirstRankStops):
            stops.on_first.check()
        if getattr(output, "scores", None) is not None:
            output.scores = tuple(first.scores)
        return output

    def _check(self, config: Any, model_kwargs: dict[str, Any]) -> None:
        mode = config.get_generation_mode(self.assistant)
        if mode not in _MODES:
            raise ValueError(
                "generation must be greedy or sampling for a parallelized model, got "
                f"{mode.value.replace('_', ' ')}"
            )
        if config.output_attentions:
            raise ValueError("output_attentions must be False, got True")
        cache = next((model_kwargs[name] for name in CACHES if model_kwargs.get(name)), None)
        if cache is not None:
            ring_layer(cache)
        mask = model_kwargs.get("attention_mask")
        if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
            return
        if not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask must have its padding before the prompts to generate, got padding "
                'after one: tokenize with padding_side="left"'
            )
        chunk = getattr(config, "prefill_chunk_size", None)
        begins = cache is None or cache.get_seq_length() == 0
        if chunk is not None and begins:
            padding = int((mask != 0).int().argmax(1).max())
            if padding > 0 and padding >= min(chunk, mask.size(1) - _BEHIND_CHUNKS):
                raise ValueError(
                    "prefill_chunk_size must give the first chunk a token of each row, got "
                    f"{chunk} where a row begins with {padding} tokens of padding"
                )


class FirstRankDraws(LogitsProcessor):
    """The caller's processors of the logits, and one that leaves one token, which the group's first
    rank has drawn as transformers does."""

    def __init__(
        self,
        ring: GroupInfo,
        processors: LogitsProcessorList,
        do_sample: bool,
        *,
        keep_scores: bool,
    ) -> None:
        self.on_first = OnOneRank(ring, 0, "draw a token", callers=True)
        self.processors: Callable[..., torch.Tensor] = processors
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        def draw() -> torch.Tensor | None:
            processed = self.processors(input_ids, scores)
            if self.keep_scores:
                self.scores.append(processed)
            if self.on_first.ring.rank != 0:
                return None
            if not self.do_sample:
                return processed.argmax(-1)
            return torch.multinomial(processed.softmax(-1), num_samples=1).squeeze(1)

        tokens = self.on_first(scores.size(0), scores.device, draw)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens.unsqueeze(1), 0)


class FirstRankStops(StoppingCriteriaList):
    """Stopping criteria as the group's first rank sees them: clocks and callers' own criteria may
    differ between ranks."""

    on_first: OnOneRank

    @classmethod
    def where_needed(cls, ring: GroupInfo, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """``criteria`` itself where they depend on nothing but tokens."""
        by_tokens = (EosTokenCriteria, MaxLengthCriteria)
        if ring.world_size == 1 or all(type(each) in by_tokens for each in criteria):
            return criteria
        agreed = cls(criteria)
        agreed.on_first = OnOneRank(ring, 0, "test whether to stop", callers=True)
        return agreed

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        ask = super().__call__
        flags = self.on_first(
            *(input_ids.size(0), input_ids.device), lambda: ask(input_ids, scores, **kwargs)
        )
        return flags.bool()


class Streamer:
    """The caller's streamer, whose failure the other ranks learn of."""

    def __init__(self, ring: GroupInfo, streamer: Any) -> None:
        self.ring = ring
        self.streamer = streamer

    def put(self, value: torch.Tensor) -> None:
        """Passes tokens on."""
        self._pass_on(lambda: self.streamer.put(value))

    def end(self) -> None:
        """Passes the end on."""
        self._pass_on(self.streamer.end)

    def _pass_on(self, send: Callable[[], None]) -> None:
        with ErrorsToPeers(self.ring):
            send()


def _kinds(parts: Iterable[Any]) -> list[str]:
    return [type(part).__name__ for part in parts]


def _facts(input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks, by the name an error calls it."""
    mask = model_kwargs.get("attention_mask")
    return {
        "input_ids' shape": tuple(input_ids.shape),
        "input_ids": Content(int(checksum(input_ids))),
        "attention_mask": None if mask is None else Content(int(checksum(mask))),
        "max_length": config.max_length,
        "do_sample": bool(config.do_sample),
        "eos_token_id": str(config.eos_token_id),
        "use_cache": bool(config.use_cache),
    }
