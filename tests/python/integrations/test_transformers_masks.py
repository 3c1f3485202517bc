# SPDX-License-Identifier: Apache-2.0
"""Windows, softcap and sinks of parallelized models are those of the unmodified
ones, which compute them in eager attention."""

import copy
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _transformers import CACHE, MASKED, MASKS, WEIGHTS, assert_near, model_of, token_ids
from transformers import DynamicCache

#: (family, changes of its config, the mask's name)
CASES = [pytest.param(*MASKED[name], id=name) for name in MASKED]


def both(family: str, changes: dict[str, Any], partition: Any = None) -> tuple[Any, Any]:
    """(unmodified, parallelized)."""
    plain = model_of(family, **changes)
    plain.set_attn_implementation("eager")
    return plain, ringattn.parallelize(copy.deepcopy(plain), partition=partition)


def forwards_agree(family: str, changes: dict[str, Any]) -> None:
    for partition in (None, WEIGHTS[this().world_size]):
        plain, model = both(family, changes, partition)
        for num_tokens in (23, 2):
            ids = token_ids(num_tokens)
            assert_near(model(ids).logits, plain(ids).logits)
        ids, mask = token_ids(13), torch.tensor(MASKS["before"], device=this().device)
        given, expected = (x(ids, attention_mask=mask).logits for x in (model, plain))
        assert_near(given[mask != 0], expected[mask != 0])


@pytest.mark.nccl
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_forwards_are_those_of_the_unmodified_model(
    ring: RankPool, family: str, changes: dict[str, Any]
) -> None:
    ring.run(forwards_agree, family, changes)


def generations_agree(family: str, changes: dict[str, Any]) -> None:
    plain, model = both(family, changes, WEIGHTS[this().world_size])
    ids, mask = token_ids(13), torch.tensor(MASKS["before"], device=this().device)
    for padding in (None, mask):
        options = {"max_new_tokens": 8, "attention_mask": padding, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    ours, theirs = DynamicCache(), DynamicCache()
    for turn, num_tokens in enumerate((13, 1, 6, 1, 1, 3)):
        ids = token_ids(num_tokens, seed=turn)
        given, expected = model(ids, **{CACHE: ours}), plain(ids, **{CACHE: theirs})
        assert_near(given.logits, expected.logits)


@pytest.mark.nccl
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_generations_and_chats_are_those_of_the_unmodified_model(
    ring: RankPool, family: str, changes: dict[str, Any]
) -> None:
    ring.run(generations_agree, family, changes)
