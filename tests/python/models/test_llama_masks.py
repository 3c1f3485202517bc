# SPDX-License-Identifier: Apache-2.0
"""A LLaMA with a window, and one whose sequence is packed documents, over ranks and on one."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _llama import random_ids, save, tiny_llama
from ringattn import Partition, _cached_attention
from ringattn.models import load_model
from ringattn.models.decode_step import misfit
from ringattn.models.loading import config_from_hf
from transformers import AutoConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

SEQ_LEN = 37
WINDOW = 6
ENDS = [0, 9, 10, 10, 26, 37]
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2}


@pytest.fixture(scope="module")
def theirs() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def windowed(theirs: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    theirs.config.update(SLIDING)
    return save(theirs, tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("plain"))


def logits_on_ring(
    folder: Path, partition: Partition, cu_seqlens: list[int] | None, sharded: bool = False
) -> torch.Tensor:
    model = load_model(folder)
    ids = random_ids(2, SEQ_LEN)
    given = partition.shard(ids, this().rank) if sharded else ids
    return partition.gather(model(given, partition, sharded=sharded, cu_seqlens=cu_seqlens))


def test_a_window_is_that_of_mistral(theirs: LlamaForCausalLM, windowed: Path) -> None:
    shape = {k: v for k, v in theirs.config.to_dict().items() if k not in ("model_type", *SLIDING)}
    mistral = MistralForCausalLM(MistralConfig(**shape, sliding_window=WINDOW)).eval()
    mistral.load_state_dict(theirs.state_dict())
    ids = random_ids(2, SEQ_LEN)
    with torch.no_grad():
        expected = mistral(ids).logits
        unlimited = theirs(ids).logits
    assert (expected - unlimited).abs().max() > 0.1
    torch.testing.assert_close(load_model(windowed)(ids), expected, atol=1e-4, rtol=0)


def test_documents_get_the_logits_that_each_gets_alone(plain: Path) -> None:
    model, ids = load_model(plain), random_ids(2, SEQ_LEN)
    packed = model(ids, cu_seqlens=torch.tensor(ENDS, dtype=torch.int32))
    for begin, end in itertools.pairwise(ENDS):
        if begin < end:
            alone = model(ids[:, begin:end])
            torch.testing.assert_close(packed[:, begin:end], alone, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "partition", [Partition.even(SEQ_LEN, 2), Partition.packed(ENDS, 2), Partition.zigzag([37, 0])]
)
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_together_equal_one_rank(
    partition: Partition,
    sharded: bool,
    plain: Path,
    windowed: Path,
    rank_pool: Callable[..., RankPool],
) -> None:
    ids = random_ids(2, SEQ_LEN)
    for folder, ends in ((windowed, None), (plain, ENDS), (windowed, ENDS)):
        alone = load_model(folder)(ids, cu_seqlens=ends)
        for logits in rank_pool(2).run(logits_on_ring, folder, partition, ends, sharded):
            torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


def test_wrong_boundaries_are_refused(plain: Path) -> None:
    message = r"cu_seqlens must end with the 37 tokens of the whole sequence, got 36"
    with pytest.raises(ValueError, match=message):
        load_model(plain)(random_ids(1, SEQ_LEN), cu_seqlens=[0, 36])


PROMPT_LEN, NEW_TOKENS = 11, 9


def generate_on_ring(folder: Path, prompt_len: int, partition: Partition) -> torch.Tensor:
    model = load_model(folder, device=this().device)
    prompt = random_ids(2, prompt_len)
    return ringattn.generate(model, prompt, max_new_tokens=NEW_TOKENS, partition=partition)


def greedy_without_a_cache(folder: Path, prompt_len: int) -> torch.Tensor:
    model, ids = load_model(folder), random_ids(2, prompt_len)
    for _ in range(NEW_TOKENS):
        newest = model(ids)[:, -1].argmax(-1)
        ids = torch.cat((ids, newest[:, None]), 1)
    return ids


@pytest.mark.parametrize("prompt_len", [PROMPT_LEN, WINDOW - 2])  # one is shorter than the window
def test_tokens_after_a_windowed_prompt_are_those_of_forwards_without_a_cache(
    prompt_len: int, windowed: Path, plain: Path, rank_pool: Callable[..., RankPool]
) -> None:
    expected = greedy_without_a_cache(windowed, prompt_len)
    alone = ringattn.generate(
        load_model(windowed), random_ids(2, prompt_len), max_new_tokens=NEW_TOKENS
    )
    assert torch.equal(alone, expected)
    assert not torch.equal(expected, greedy_without_a_cache(plain, prompt_len))
    for partition in (
        Partition.even(prompt_len, 2),
        Partition.contiguous([1, prompt_len - 1]),
        Partition.zigzag([0, prompt_len], order=[1, 0]),
    ):
        for ids in rank_pool(2).run(generate_on_ring, windowed, prompt_len, partition):
            assert torch.equal(ids, expected)


def test_tokens_after_a_windowed_prompt_are_those_of_mistral(windowed: Path) -> None:
    config = AutoConfig.from_pretrained(windowed).to_dict()
    shape = {k: v for k, v in config.items() if k not in ("model_type", *SLIDING)}
    mistral = MistralForCausalLM.from_pretrained(
        windowed, config=MistralConfig(**shape, sliding_window=WINDOW)
    )
    prompt = random_ids(2, PROMPT_LEN)
    expected = mistral.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False
    )
    ids = ringattn.generate(load_model(windowed), prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(ids, expected)


def keys_read(folder: Path, partition: Partition) -> list[int]:
    """How many cached keys each call of a decoding step reads on this rank."""
    read: list[int] = []
    attend = _cached_attention.attend_cached

    def counted(*args: Any) -> Any:
        begins = args[6]
        read.append(args[2].size(1) - (0 if begins is None else int(begins.min())))
        return attend(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_cached_attention, "attend_cached", counted)
        generate_on_ring(folder, SEQ_LEN, partition)
    return read


def test_a_step_reads_the_keys_of_its_window_alone(
    windowed: Path, rank_pool: Callable[..., RankPool]
) -> None:
    pool = rank_pool(2)
    first, second = pool.run(keys_read, windowed, Partition.even(SEQ_LEN, 2))
    assert len(first) == 2 * (NEW_TOKENS - 1)  # layers
    assert [a + b for a, b in zip(first, second, strict=True)] == [WINDOW] * len(first)


def test_what_a_window_cannot_have_in_a_generation_is_refused(windowed: Path) -> None:
    model = load_model(windowed)
    message = r"cache_lengths must be left out for a model with a window, .* got \[6\]"
    with pytest.raises(ValueError, match=message):
        ringattn.generate(model, random_ids(1, 5), max_new_tokens=2, cache_lengths=[6])
    assert misfit(model.base_model) == "a window of 6 keys"


def test_a_cache_beside_packed_documents_is_refused(plain: Path) -> None:
    model, partition = load_model(plain), Partition.even(5, 1)
    call = model.prefill_call(partition, model.new_cache(partition))
    message = "cache must be left out in a model call with packed documents"
    with pytest.raises(ValueError, match=message):
        model.base_model(random_ids(1, 5), partition.position_ids(0), call, [0, 2, 5])


@pytest.mark.parametrize(
    ("fields", "window"),
    [
        ({"sliding_window": 8}, None),  # LlamaForCausalLM has none, whatever the file says
        ({"sliding_window": 8, "use_sliding_window": False}, None),
        ({"sliding_window": 8, "use_sliding_window": True}, 8),
        ({"sliding_window": 8, "layer_types": ["full_attention"] * 2}, None),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, 8),
    ],
)
def test_the_window_is_read_where_all_layers_have_it(
    fields: dict[str, object], window: int | None, theirs: LlamaForCausalLM
) -> None:
    shape = {k: v for k, v in theirs.config.to_dict().items() if k not in SLIDING}
    assert config_from_hf({**shape, **fields}).window_size == window


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types must be sliding_attention in all layers or full_attention in all in "
            "config.json, got full_attention, sliding_attention",
        ),
        ({"layer_types": ["chunked_attention"]}, "layer_types must be .*, got chunked_attention"),
        ({"use_sliding_window": True}, "config.json must have 'sliding_window', got only"),
        (
            {"sliding_window": 0, "use_sliding_window": True},
            "window_size must be positive, got 0",
        ),
    ],
)
def test_windows_of_some_layers_are_refused(
    fields: dict[str, object], message: str, theirs: LlamaForCausalLM
) -> None:
    shape = {k: v for k, v in theirs.config.to_dict().items() if k not in SLIDING}
    with pytest.raises(ValueError, match=message):
        config_from_hf({**shape, **fields})
