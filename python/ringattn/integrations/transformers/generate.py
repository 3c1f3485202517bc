# SPDX-License-Identifier: Apache-2.0
"""``model.generate`` of a parallelized model: transformers' own loop, in which every rank goes on
with the tokens of the group's first rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerationMode, MaxLengthCriteria

from ringattn._distributed.collectives import agree, checksum, complete, draw_on_rank
from ringattn._distributed.groups import GroupInfo
from ringattn.integrations.transformers.caches import CACHES, ring_layer

_MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)


class Generate:
    """``generate`` of one model, with the arguments of transformers. Collective.

    Greedy decoding and sampling; the group's first rank draws. Beams, assisted and contrastive
    decoding are refused by name, on every rank.
    """

    def __init__(self, model: Any, ring: Callable[[], GroupInfo]) -> None:
        self.model = model
        self.ring = ring

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("custom_generate") is not None:
            raise ValueError(
                "custom_generate must be None for a parallelized model, "
                f"got {kwargs['custom_generate']!r}"
            )
        # Note: transformers drops a streamer on its way to a custom function, after the prompt.
        decode = Decode(self.ring(), kwargs.get("streamer"), kwargs.get("assistant_model"))
        return type(self.model).generate(self.model, *args, custom_generate=decode, **kwargs)


class Decode:
    """What transformers calls once it has prepared a generation."""

    def __init__(self, ring: GroupInfo, streamer: Any, assistant: Any) -> None:
        self.ring = ring
        self.streamer = streamer
        self.assistant = assistant

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
        agree(ring, "generate", mistake, _facts(input_ids, config, model_kwargs))
        first = FirstRankDraws(ring, config.do_sample, keep_scores=bool(config.output_scores))
        # The choice is made: transformers takes the one token that is left.
        config.do_sample = False
        output = model._sample(
            input_ids,
            logits_processor=LogitsProcessorList([*logits_processor, first]),
            stopping_criteria=FirstRankStops.where_needed(ring, stopping_criteria),
            generation_config=config,
            streamer=self.streamer,
            **model_kwargs,
        )
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
        if isinstance(mask, torch.Tensor) and mask.dim() == 2 and not bool(mask[:, -1].all()):
            raise ValueError(
                "attention_mask must have its padding before the prompts to generate, got padding "
                'after one: tokenize with padding_side="left"'
            )


class FirstRankDraws(LogitsProcessor):
    """The last processor of the logits: leaves one token, which the group's first rank has drawn as
    transformers does."""

    def __init__(self, ring: GroupInfo, do_sample: bool, *, keep_scores: bool) -> None:
        self.ring = ring
        self.do_sample = do_sample
        self.keep_scores = keep_scores
        self.scores: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self.keep_scores:
            self.scores.append(scores)

        def draw() -> torch.Tensor:
            if not self.do_sample:
                return scores.argmax(-1)
            return torch.multinomial(scores.softmax(-1), num_samples=1).squeeze(1)

        tokens = draw_on_rank(self.ring, 0, scores.size(0), scores.device, draw)
        chosen = torch.full_like(scores, -torch.inf)
        return chosen.scatter_(1, tokens.unsqueeze(1), 0)


class FirstRankStops(StoppingCriteriaList):
    """Stopping criteria as the group's first rank sees them: clocks and callers' own criteria may
    differ between ranks."""

    ring: GroupInfo

    @classmethod
    def where_needed(cls, ring: GroupInfo, criteria: StoppingCriteriaList) -> StoppingCriteriaList:
        """``criteria`` itself where they depend on nothing but tokens."""
        by_tokens = (EosTokenCriteria, MaxLengthCriteria)
        if ring.world_size == 1 or all(type(each) in by_tokens for each in criteria):
            return criteria
        agreed = cls(criteria)
        agreed.ring = ring
        return agreed

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        done: torch.Tensor = super().__call__(input_ids, scores, **kwargs)
        flags, group = done.to(torch.uint8), self.ring.process_group
        complete(
            *(self.ring, "generate", flags.device),
            lambda: [dist.broadcast(flags, group=group, group_src=0, async_op=True)],
        )
        return flags.bool()


def _facts(input_ids: torch.Tensor, config: Any, model_kwargs: dict[str, Any]) -> dict[str, Any]:
    """What must be equal on all ranks, by the name an error calls it."""
    mask = model_kwargs.get("attention_mask")
    return {
        "input_ids' shape": tuple(input_ids.shape),
        "input_ids' checksum": int(checksum(input_ids)),
        "attention_mask's checksum": None if mask is None else int(checksum(mask)),
        "max_length": config.max_length,
        "do_sample": bool(config.do_sample),
        "eos_token_id": str(config.eos_token_id),
        "use_cache": bool(config.use_cache),
    }
