# SPDX-License-Identifier: Apache-2.0
"""A parallelized model of transformers gives what the unmodified one gives on one process."""

import copy
import string
from typing import Any

import pytest
import ringattn
import torch
import transformers
from _distributed import RankPool, this
from _transformers import (
    CACHE,
    FAMILIES,
    MASKS,
    VOCAB,
    WEIGHTS,
    assert_near,
    model_of,
    token_ids,
)
from ringattn import Partition
from ringattn.parallel import Split
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DynamicCache,
    GenerationConfig,
    LlamaModel,
    LlamaPreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)


def both(partition: Any = None, **changes: Any) -> tuple[Any, Any]:
    """(unmodified, parallelized)."""
    plain = model_of(**changes)
    return plain, ringattn.parallelize(copy.deepcopy(plain), partition=partition)


def calls_agree(family: str) -> None:
    for partition in (None, WEIGHTS[this().world_size]):
        plain, model = both(partition, family=family)
        for num_tokens in (13, 2):
            ids = token_ids(num_tokens)
            for options in (
                {"use_cache": False},
                {"logits_to_keep": 1},
                {"logits_to_keep": 2, "use_cache": False},
                {"logits_to_keep": torch.tensor([1, -2], device=ids.device)},
                {"logits_to_keep": torch.arange(num_tokens, device=ids.device) % 2 == 1},
                {"logits_to_keep": slice(1, 9)},
                {"logits_to_keep": [0, 1]},
            ):
                assert_near(model(ids, **options).logits, plain(ids, **options).logits)
        ids, positions = token_ids(9), torch.arange(5, 14, device=this().device)[None]
        expected = plain(ids, position_ids=positions, output_hidden_states=True)
        given = model(ids, position_ids=positions, output_hidden_states=True)
        assert_near(given.logits, expected.logits)
        assert len(given.hidden_states) == len(expected.hidden_states) == 3
        for actual, right in zip(given.hidden_states, expected.hidden_states, strict=True):
            assert_near(actual, right)
        for one in (plain, model), (plain.base_model, model.base_model):
            keys = [list(x(ids, use_cache=True, output_hidden_states=True)) for x in one]
            assert keys[0] == keys[1]
        in_a_tuple = model(ids, use_cache=False, return_dict=False)
        assert isinstance(in_a_tuple, tuple) and len(in_a_tuple) == 1
        assert_near(in_a_tuple[0], plain(ids, use_cache=False, return_dict=False)[0])


@pytest.mark.nccl
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_unmodified_model(ring: RankPool, family: str) -> None:
    ring.run(calls_agree, family)


def errors_in_halves(family: str) -> tuple[float, float]:
    exact, ids = model_of(family).double(), token_ids(40)
    right = exact(ids).logits
    plain = copy.deepcopy(exact).bfloat16()
    model = ringattn.parallelize(copy.deepcopy(plain), partition=WEIGHTS[this().world_size])
    return tuple((x(ids).logits - right).square().mean().sqrt().item() for x in (model, plain))


@pytest.mark.nccl
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_logits_in_bfloat16_are_as_exact_as_those_of_the_unmodified_model(
    ring: RankPool, family: str
) -> None:
    for actual, of_transformers in ring.run(errors_in_halves, family):
        assert 0 < actual <= 1.1 * of_transformers


def padded_calls_agree(name: str) -> None:
    ids, mask = token_ids(13), torch.tensor(MASKS[name], device=this().device)
    real = mask != 0
    for partition in (None, WEIGHTS[this().world_size]):
        plain, model = both(partition)
        for positions in (None, (mask.cumsum(1) - 1).clamp_(min=0)):
            options = {"attention_mask": mask, "position_ids": positions}
            for use_cache in (True, False):
                options |= {"use_cache": use_cache, "output_hidden_states": True}
                expected, given = plain(ids, **options), model(ids, **options)
                assert_near(given.logits, expected.logits)  # of padding, too
                for actual, right in zip(given.hidden_states, expected.hidden_states, strict=True):
                    assert_near(actual, right)
            labels = ids.masked_fill(~real, -100)
            for targets in (labels, ids):
                loss = model(ids, labels=targets, **options).loss
                assert_near(loss, plain(ids, labels=targets, **options).loss)
        if name == "before":
            for use_cache in (True, False):
                options = {"max_new_tokens": 5, "use_cache": use_cache, "attention_mask": mask}
                assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.nccl
@pytest.mark.parametrize("name", MASKS)
def test_padded_prompts_give_what_the_unmodified_model_gives(ring: RankPool, name: str) -> None:
    ring.run(padded_calls_agree, name)


def a_chat(family: str) -> None:
    plain, model = both(WEIGHTS[this().world_size], family=family)
    ours, theirs = DynamicCache(), DynamicCache()
    seen = 0
    for turn, num_tokens in enumerate((13, 4, 1, 3, 21, 1, 18)):  # long turns are spread
        ids = token_ids(num_tokens, seed=turn)
        output = model(ids, **{CACHE: ours}, output_hidden_states=True)
        expected = plain(ids, **{CACHE: theirs}, output_hidden_states=True)
        assert_near(output.logits, expected.logits)
        for actual, right in zip(output.hidden_states, expected.hidden_states, strict=True):
            assert_near(actual, right)
        seen += num_tokens
        assert output[CACHE] is ours and ours.get_seq_length() == theirs.get_seq_length() == seen
    made = model(token_ids(13)).get(CACHE)
    assert isinstance(made, DynamicCache) and made.get_seq_length() == 13
    ids = token_ids(1, seed=7)
    expected = plain(torch.cat((token_ids(13), ids), 1)).logits[:, -1:]
    assert_near(model(ids, **{CACHE: made}, logits_to_keep=1).logits, expected)


@pytest.mark.nccl
@pytest.mark.parametrize("family", ["llama", "granite"])
def test_a_cache_is_filled_in_place_and_takes_the_next_turns_of_a_chat(
    ring: RankPool, family: str
) -> None:
    ring.run(a_chat, family)


def after_a_crop_to_nothing() -> None:
    plain, model = both(WEIGHTS[this().world_size])
    ids, cache = token_ids(13), DynamicCache()
    mask = torch.tensor(MASKS["before"], device=ids.device)
    for given in (None, mask):
        model(token_ids(9, seed=3), **{CACHE: cache})
        cache.crop(-cache.get_seq_length())
        logits = model(ids, attention_mask=given, **{CACHE: cache}).logits
        assert_near(logits, plain(ids, attention_mask=given).logits)
        assert cache.get_seq_length() == 13


def test_a_cache_cropped_to_nothing_takes_any_prompt(rank_pool: Any) -> None:
    rank_pool(2).run(after_a_crop_to_nothing)


class StopsEarlier(StoppingCriteria):
    """Each rank wants to stop at another length: the first rank's holds."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        done = input_ids.size(1) >= 17 - this().rank
        return torch.full((input_ids.size(0),), done, device=input_ids.device)


def generations() -> list[torch.Tensor]:
    plain, model = both(WEIGHTS[this().world_size])
    ids, sampled = token_ids(13), []
    for options in (
        {},
        {"use_cache": False},
        {"eos_token_id": [3, 4, 5, 6, 7, 8], "pad_token_id": 0},
    ):
        options = {"max_new_tokens": 8, **options}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    for options in ({"top_k": 5}, {"temperature": 3.0, "use_cache": False}):
        options |= {"do_sample": True, "max_new_tokens": 8}
        torch.manual_seed(11)
        expected = plain.generate(ids, **options)
        torch.manual_seed(11 + this().rank)  # what other ranks would draw is nothing
        given = model.generate(ids, **options)
        assert torch.equal(given, expected)
        sampled.append(given)
    options = {"max_new_tokens": 4, "return_dict_in_generate": True, "output_scores": True}
    given, expected = (x.generate(ids, **options, output_logits=True) for x in (model, plain))
    assert torch.equal(given.sequences, expected.sequences)
    for actual, right in zip(given.scores, expected.scores, strict=True):
        assert_near(actual, right)
    criteria = StoppingCriteriaList([StopsEarlier()])
    stopped = model.generate(ids, max_new_tokens=8, stopping_criteria=criteria)
    assert torch.equal(stopped, given.sequences)
    # A chat: the whole conversation's ids, and a cache of all but the last turn.
    chat = torch.cat((given.sequences, token_ids(3, seed=5)), 1)
    options = {"max_new_tokens": 4}
    continued = model.generate(chat, **{CACHE: given[CACHE]}, **options)
    assert torch.equal(continued, plain.generate(chat, **options))
    # The same conversation without its end, and a long turn instead.
    cache = given[CACHE]
    keep = cache.get_seq_length() - 6
    cache.crop(-6)
    assert cache.get_seq_length() == keep
    other = torch.cat((given.sequences[:, :keep], token_ids(19, seed=6)), 1)
    continued = model.generate(other, **{CACHE: cache}, **options)
    assert torch.equal(continued, plain.generate(other, **options))
    return sampled


def generations_up_to_strings() -> None:
    plain, model = both(WEIGHTS[this().world_size])
    letters = dict(zip(string.printable[:VOCAB], range(VOCAB), strict=True))
    backend = Tokenizer(BPE(letters, []))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    ids = token_ids(13, batch=1)
    whole = plain.generate(ids, max_new_tokens=8)
    stop = tokenizer.convert_ids_to_tokens(whole[0].tolist())[-2]
    options: dict[str, Any] = {"stop_strings": [stop], "max_new_tokens": 8}
    expected = plain.generate(ids, tokenizer=tokenizer, **options)
    assert expected.size(1) < whole.size(1)
    of_config = {"generation_config": GenerationConfig(**options)}
    for given in (options, of_config):
        assert torch.equal(model.generate(ids, tokenizer=tokenizer, **given), expected)
    model.generation_config.stop_strings = stop
    assert torch.equal(model.generate(ids, tokenizer=tokenizer, max_new_tokens=8), expected)
    with pytest.raises(ValueError, match="you must pass the model's tokenizer"):
        model.generate(ids, max_new_tokens=8)
    assert torch.equal(model.generate(ids, max_new_tokens=8, stop_strings=None), whole)


def test_generate_stops_at_the_strings_of_the_call_and_of_configs(rank_pool: Any) -> None:
    rank_pool(2).run(generations_up_to_strings)


def chunked_prompts() -> None:
    plain, model = both(WEIGHTS[this().world_size])
    ids, options = token_ids(45), {"max_new_tokens": 5}
    expected = plain.generate(ids, **options)
    for size in (1, 7, 16, 44, 45, 100):
        given = model.generate(ids, prefill_chunk_size=size, **{CACHE: DynamicCache()}, **options)
        assert torch.equal(given, expected), size
    ids, mask = ids.expand(2, -1), torch.ones(2, 45, dtype=torch.int64, device=ids.device)
    mask[1, :8] = 0
    options |= {"attention_mask": mask, "prefill_chunk_size": 9}
    given = model.generate(ids, **{CACHE: DynamicCache()}, **options)
    assert torch.equal(given, plain.generate(ids, **options))
    options["prefill_chunk_size"] = 8
    with pytest.raises(ValueError, match="must give the first chunk a token of each row, got 8"):
        model.generate(ids, **options)
    if tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 21):
        return  # chunks there are those of a new cache
    # The next turn of a chat: the padding lies in the cache.
    options |= {"attention_mask": mask[:, :30], "prefill_chunk_size": None}
    caches = []
    for one in (plain, model):
        caches.append(DynamicCache())
        one(ids[:, :30], attention_mask=mask[:, :30], **{CACHE: caches[-1]})
    options |= {"attention_mask": mask, "prefill_chunk_size": 4}
    tokens = [
        one.generate(ids, **{CACHE: cache}, **options)
        for one, cache in zip((plain, model), caches, strict=True)
    ]
    assert torch.equal(*tokens)


@pytest.mark.nccl
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole(ring: RankPool) -> None:
    ring.run(chunked_prompts)


@pytest.mark.nccl
def test_generate_gives_the_tokens_of_the_unmodified_model_on_every_rank(ring: RankPool) -> None:
    ring.run(generations)


def other_models_agree() -> None:
    weights, ids = WEIGHTS[this().world_size], token_ids(13)
    plain, model = both(weights, kind=AutoModel)
    assert_near(model(ids).last_hidden_state, plain(ids).last_hidden_state)
    for kind in (AutoModelForSequenceClassification, AutoModelForTokenClassification):
        plain, model = both(weights, kind=kind, num_labels=3)
        ended = ids.clone()
        ended[0, 9:] = 0  # the padding that a classifier pools before
        assert_near(model(ended).logits, plain(ended).logits)
    plain, model = both(weights)
    embeds = plain.get_input_embeddings()(ids)
    assert_near(model(inputs_embeds=embeds).logits, plain(inputs_embeds=embeds).logits)
    assert_near(model(ids, labels=ids).loss, plain(ids, labels=ids).loss)


@pytest.mark.nccl
def test_embeddings_losses_and_other_heads_are_those_of_the_unmodified_model(
    ring: RankPool,
) -> None:
    ring.run(other_models_agree)


class Reward(LlamaPreTrainedModel):
    """A head of one's own, whose ``forward`` takes what it needs and no more."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = LlamaModel(config)
        self.head = nn.Linear(config.hidden_size, 1)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: Any = None, logits_to_keep: int = 1
    ) -> torch.Tensor:
        hidden = self.model(input_ids, attention_mask=attention_mask).last_hidden_state
        return self.head(hidden[:, -logits_to_keep:])


def own_heads_agree() -> None:
    ids, device = token_ids(13), this().device
    torch.manual_seed(0)
    plain = Reward(model_of().config).eval().to(device)
    model = ringattn.parallelize(copy.deepcopy(plain), partition=WEIGHTS[this().world_size])
    with torch.no_grad():
        for options in ({}, {"attention_mask": torch.ones_like(ids), "logits_to_keep": 3}):
            assert_near(model(ids, **options), plain(ids, **options))
    with pytest.raises(ValueError, match=r"must take \*\*kwargs .* got Reward without"):
        model(ids)


def test_a_head_without_keyword_arguments_gets_the_rows_of_all_tokens(rank_pool: Any) -> None:
    rank_pool(2).run(own_heads_agree)


def shares(model: Any, num_tokens: int) -> list[int]:
    """Tokens that each rank holds after a call."""
    return model(token_ids(num_tokens)).get(CACHE).layers[0].store.lengths


def partitions_are_weights() -> None:
    model = model_of()
    zigzag, world_size = Partition.zigzag([4, 8]), this().world_size
    assert world_size == 2
    for partition, expected in (
        (None, [6, 6]),
        ("even", [6, 6]),
        ([1, 3], [3, 9]),
        (zigzag, [4, 8]),
        (Partition.contiguous([4, 8]), [4, 8]),
    ):
        assert ringattn.parallelize(model, partition=partition) is model
        assert shares(model, 12) == expected
        assert sum(shares(model, 5)) == 5
    assert shares(model, 6) == [2, 4]
    ringattn.parallelize(model, partition="auto")
    held = shares(model, 12)
    assert sum(held) == 12 and len(held) == 2
    assert_near(model(token_ids(12)).logits, model_of()(token_ids(12)).logits)


def test_shares_keep_the_layout_and_the_order() -> None:
    for partition in (
        Partition.contiguous([4, 8]),
        Partition("zigzag", (4, 8), (1, 0)),
        Partition("contiguous", (8, 4), (1, 0)),
    ):
        split = Split.of(partition, 2)
        assert split.partition(12) == partition
        lengths = tuple(n // 2 for n in partition.lengths)
        assert split.partition(6) == Partition(partition.layout, lengths, partition.order)
    assert Split.of([1, 1, 2], 3).partition(6).lengths == (2, 1, 3)  # equal remainders: lower ranks
    assert Split.of("even", 3).partition(7) == Partition.even(7, 3)


def test_a_partition_is_kept_as_shares_for_calls_of_any_length(rank_pool: Any) -> None:
    rank_pool(2).run(partitions_are_weights)
