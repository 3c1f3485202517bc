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


def unequal() -> ringattn.Partition:
    names: Names = {"ringattn": ringattn, "torch": torch, "F": F}
    names |= {"rank": this().rank, "world_size": this().world_size}
    by_hand, measured = (shown(PAGE, section) for section in ("The rules", "Unequal ranks"))
    run(by_hand, names)
    # The steps of the page, by one process from where the first one ended.
    alone = LLaMA(names["model"].config, group="single")
    alone.load_state_dict(names["model"].state_dict())
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    names["optimizer"] = torch.optim.AdamW(names["model"].parameters(), lr=1e-3)
    run(measured, names)
    for _ in range(3):
        logits = alone(names["ids"])
        F.cross_entropy(logits.flatten(0, 1), names["targets"].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    for given, right in zip(names["model"].parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(given, right, atol=2e-5, rtol=1e-4)
    assert names["timings"].steps[-1].backward
    return names["p"]


def test_steps_of_unequal_ranks_are_those_of_one_process(
    rank_pool: Callable[[int], RankPool],
) -> None:
    first, second = rank_pool(2).run(unequal)
    assert first == second and first.seq_len == 120


def test_a_step_by_hand_is_that_of_one_process(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(by_hand)


def test_a_model_of_transformers_trains_as_shown(rank_pool: Callable[[int], RankPool]) -> None:
    rank_pool(2).run(hugging_face)
