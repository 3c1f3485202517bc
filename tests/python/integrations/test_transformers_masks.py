# SPDX-License-Identifier: Apache-2.0
"""Windows, softcap, sinks and packed documents of parallelized models are those of the unmodified
ones, which compute them in eager attention."""

import copy
import itertools
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _transformers import CACHE, MASKED, MASKS, WEIGHTS, assert_near, model_of, token_ids
from ringattn.integrations.transformers.attention import layer_mask
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
    for turn, num_tokens in enumerate((13, 1, 6, 1, 1, 3, 20, 1)):  # a long turn is spread
        ids = token_ids(num_tokens, seed=turn)
        given, expected = model(ids, **{CACHE: ours}), plain(ids, **{CACHE: theirs})
        assert_near(given.logits, expected.logits)


@pytest.mark.nccl
@pytest.mark.parametrize(("family", "changes"), CASES)
def test_generations_and_chats_are_those_of_the_unmodified_model(
    ring: RankPool, family: str, changes: dict[str, Any]
) -> None:
    ring.run(generations_agree, family, changes)


def test_layers_with_one_window_are_known_as_one_repeated_call() -> None:
    first, second = (layer_mask({"sliding_window": 5, "softcap": None}) for _ in range(2))
    assert first.window_size == (4, -1)
    assert all(a is b for a, b in zip(first, second, strict=True))  # what ring calls compare


#: Of 23 tokens, as [0, ..., S]; a document of one token among them.
DOCUMENTS = [0, 9, 10, 17, 23]


def packed_inputs_agree(family: str, changes: dict[str, Any]) -> None:
    ids, device = token_ids(23), this().device
    pairs = list(itertools.pairwise(DOCUMENTS))
    restarting = torch.cat([torch.arange(stop - start) for start, stop in pairs])[None].to(device)
    cu_seq_lens = torch.tensor(DOCUMENTS, dtype=torch.int32, device=device)
    boundaries = {"cu_seq_lens_q": cu_seq_lens, "cu_seq_lens_k": cu_seq_lens, "use_cache": False}
    for partition in (None, WEIGHTS[this().world_size]):
        plain, model = both(family, changes, partition)
        alone = [plain(ids[:, start:stop]).logits for start, stop in pairs]
        for options in (
            {"position_ids": restarting, "use_cache": False},
            {"position_ids": restarting.expand(2, -1), "use_cache": False, "logits_to_keep": 0},
            {"position_ids": restarting, **boundaries},
        ):
            assert_near(model(ids, **options).logits, torch.cat(alone, 1))
        # RoPE follows position_ids alone.
        places = torch.arange(23, device=device)[None]
        alone = [
            plain(ids[:, start:stop], position_ids=places[:, start:stop]).logits
            for start, stop in pairs
        ]
        for options in ({}, {"position_ids": places}):
            assert_near(model(ids, **boundaries, **options).logits, torch.cat(alone, 1))


@pytest.mark.nccl
@pytest.mark.parametrize(
    ("family", "changes"),
    [pytest.param("llama", {}, id="llama")]
    + [pytest.param(*MASKED[name], id=name) for name in ("qwen2", "gemma2", "gpt_oss")],
)
def test_packed_documents_are_those_of_one_call_each(
    ring: RankPool, family: str, changes: dict[str, Any]
) -> None:
    ring.run(packed_inputs_agree, family, changes)


def packed_inputs_are_checked() -> None:
    model, ids, device = ringattn.parallelize(model_of()), token_ids(6), this().device
    right = model(ids).logits
    ends, rank = torch.tensor([0, 3, 6], device=device), this().rank
    other = torch.tensor([0, 2 + rank, 6], device=device)
    rows = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]], device=device)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"position_ids": rows}, "restart at the same tokens in all rows .* in row 1 than in row"),
        ({"cu_seq_lens_q": ends}, "must both be given, got no cu_seq_lens_k"),
        ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends[:2]}, "must end with the 6 tokens"),
        ({"cu_seq_lens_q": ends, "cu_seq_lens_k": ends[[0, 2]]}, "cu_seq_lens_k must be equal to"),
        (
            {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "attention_mask": torch.ones_like(ids)},
            "attention_mask must be None with cu_seq_lens_q",
        ),
        (
            {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "use_cache": True},
            "use_cache must be False with cu_seq_lens_q",
        ),
        ({"cu_seq_lens_q": other, "cu_seq_lens_k": other}, "same on all ranks"),
    ]
    for options, message in calls:
        with pytest.raises(ValueError, match=message):
            model(ids, **{"use_cache": False, **options})
        assert_near(model(ids).logits, right)


def test_packed_documents_that_are_none_are_refused_on_every_rank(rank_pool: Any) -> None:
    rank_pool(2).run(packed_inputs_are_checked)
