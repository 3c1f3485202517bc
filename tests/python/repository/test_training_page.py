# SPDX-License-Identifier: Apache-2.0
"""Blocks of docs/training.md run on two ranks, and train as one process does."""

from collections.abc import Callable

import ringattn
import torch
import torch.nn.functional as F
from _distributed import RankPool, this
from _documents import Names, run, shown
from ringattn.models import LLaMA

PAGE = "docs/training.md"


def names_of(section: str) -> Names:
    names: Names = {"ringattn": ringattn, "torch": torch, "F": F}
    names |= {"rank": this().rank, "world_size": this().world_size}
    run(shown(PAGE, section), names)
    return names


def by_hand() -> None:
    names = names_of("The rules")
    torch.manual_seed(0)
    alone = LLaMA(names["model"].config, group="single")
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    logits = alone(names["ids"])
    F.cross_entropy(logits.flatten(0, 1), names["targets"].flatten()).backward()
    torch.nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
    optimizer.step()
    for given, right in zip(names["model"].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(given, right, atol=2e-5, rtol=1e-4)


def hugging_face() -> None:
    names = names_of("Hugging Face models")
    given = {name: x.grad for name, x in names["model"].named_parameters()}
    alone = ringattn.unparallelize(names["model"])
    alone.zero_grad()
    loss = alone(names["ids"], labels=names["ids"]).loss
    loss.backward()
    torch.testing.assert_close(names["loss"], loss)
    for name, x in alone.named_parameters():
        torch.testing.assert_close(given[name], x.grad, atol=1e-5, rtol=1e-4)


def test_a_step_by_hand_is_that_of_one_process(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(by_hand)


def test_a_model_of_transformers_trains_as_shown(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(hugging_face)
