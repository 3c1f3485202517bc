# SPDX-License-Identifier: Apache-2.0
"""Generation: the tokens of transformers, of one rank, and of every rank are the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _distributed import RankPool, this
from _llama import LLAMA3_ROPE, VOCABULARY, random_ids, save, tiny_llama
from ringattn import Partition
from ringattn.cache import ShardedKVCache
from ringattn.generation import generate
from ringattn.models import LLaMA, load_model

PROMPT_LEN, NEW_TOKENS = 23, 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE)
    return save(theirs, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def model(folder: Path) -> LLaMA:
    return load_model(folder)


def reference(**options: Any) -> torch.Tensor:
    """What transformers generates after the prompt."""
    settings = {"do_sample": False, "max_new_tokens": NEW_TOKENS, **options}
    ids = random_ids(2, PROMPT_LEN)
    mask = torch.ones_like(ids)
    return tiny_llama(rope_parameters=LLAMA3_ROPE).generate(ids, attention_mask=mask, **settings)


def test_greedy_tokens_are_those_of_transformers(model: LLaMA) -> None:
    ids = generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=NEW_TOKENS)
    assert torch.equal(ids, reference())


def test_rows_end_and_are_padded_as_in_transformers(model: LLaMA) -> None:
    plain = reference()
    first = int(plain[0, PROMPT_LEN + 3])  # ends row 0 early; row 1 goes on
    for ends in (first, [first], [first, int(plain[1, PROMPT_LEN + 9])]):
        for pad in (None, -1, 55):  # -1: none, as some configurations write it
            expected = reference(eos_token_id=ends, pad_token_id=pad if pad == 55 else first)
            ids = generate(
                model,
                random_ids(2, PROMPT_LEN),
                max_new_tokens=NEW_TOKENS,
                eos_token_id=ends,
                pad_token_id=pad,
            )
            assert torch.equal(ids, expected)
    assert ids.size(1) < PROMPT_LEN + NEW_TOKENS  # both ended: no more tokens were computed


def test_the_end_token_of_the_config_holds_unless_another_is_given(tmp_path: Path) -> None:
    plain = reference()
    end = int(plain[0, PROMPT_LEN + 3])
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE, eos_token_id=end, pad_token_id=98)
    model = load_model(save(theirs, tmp_path))
    prompt = random_ids(2, PROMPT_LEN)
    ids = generate(model, prompt, max_new_tokens=NEW_TOKENS)
    assert torch.equal(ids, reference(eos_token_id=end, pad_token_id=98))
    assert ids[0, -1] == 98
    ids = generate(model, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=None)
    assert torch.equal(ids, plain)
    once: Any = iter([end])
    pad = np.int64(98)
    ids = generate(model, prompt, max_new_tokens=NEW_TOKENS, eos_token_id=once, pad_token_id=pad)
    assert torch.equal(ids, reference(eos_token_id=end, pad_token_id=98))


def generate_on_ring(
    folder: Path, options: dict[str, Any], new_tokens: int = NEW_TOKENS
) -> torch.Tensor:
    model = load_model(folder, device=this().device)
    return generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=new_tokens, **options)


@pytest.mark.parametrize(
    ("world_size", "partition"),
    [
        (2, None),
        (2, Partition.zigzag([0, 23])),
        (2, Partition.contiguous([20, 3])),
        (3, None),
        (3, Partition.zigzag([1, 22, 0], order=[2, 1, 0])),
        (3, Partition.contiguous([0, 0, 23])),
    ],
)
@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}],
    ids=["greedy", "drawn"],
)
def test_every_rank_gets_the_tokens_of_one_rank(
    world_size: int,
    partition: Partition | None,
    options: dict[str, Any],
    folder: Path,
    model: LLaMA,
    rank_pool: Callable[..., RankPool],
) -> None:
    expected = generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=NEW_TOKENS, **options)
    pool = rank_pool(world_size)
    for ids in pool.run(generate_on_ring, folder, {**options, "partition": partition}):
        assert torch.equal(ids, expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_prompt_in_chunks_gives_the_tokens_of_the_whole(
    world_size: int, folder: Path, model: LLaMA, rank_pool: Callable[..., RankPool]
) -> None:
    expected = generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=NEW_TOKENS)
    lengths = [0, 9, 14][-world_size:] if world_size > 1 else [PROMPT_LEN]
    for size, partition in (
        (1, None),
        (5, None),
        (12, Partition.zigzag(lengths)),
        (22, Partition.contiguous(lengths)),
        (23, Partition.zigzag(lengths)),
    ):
        options = {"prefill_chunk_size": size, "partition": partition}
        for ids in rank_pool(world_size).run(generate_on_ring, folder, options):
            assert torch.equal(ids, expected)


def turns_of_a_chat(folder: Path, lengths: tuple[int, ...]) -> list[torch.Tensor]:
    """Logits of each turn's last token, on every rank."""
    model, device = load_model(folder, device=this().device), this().device
    world_size = model.ring.world_size
    cache, logits = None, []
    for turn, num_tokens in enumerate(lengths):
        ids, partition = random_ids(2, num_tokens, seed=turn).to(device), None
        partition = Partition.even(num_tokens, world_size)
        if cache is None:
            cache = model.new_cache(partition, new_tokens=sum(lengths[1:]))
            call = model.prefill_call(partition, cache)
        else:
            call = model.call_after(cache, partition)
        with torch.inference_mode():
            places = call.position_ids(device).flatten()
            hidden = call.last(model.base_model(call.rows(ids), places, call), 1)
            logits.append(model.project(hidden))
    return logits


def test_turns_of_a_chat_have_the_logits_of_one_process(ring: RankPool, folder: Path) -> None:
    lengths = (23, 17, 1, 3, 29, 1)
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE)
    ids = torch.cat([random_ids(2, n, seed=turn) for turn, n in enumerate(lengths)], 1)
    ends = torch.tensor(lengths).cumsum(0) - 1
    with torch.no_grad():
        expected = theirs(ids).logits[:, ends]
    scale = expected.abs().max().item()
    for logits in ring.run(turns_of_a_chat, folder, lengths):
        found = torch.cat(logits, 1)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk_size": 0}, "prefill_chunk_size must be positive, got 0"),
        ({"prefill_chunk_size": 2.5}, "prefill_chunk_size must be an integer, got 2.5"),
        (
            {"prefill_chunk_size": 4, "partition": Partition.pieces([[(0, PROMPT_LEN)]])},
            "partition must be zigzag or contiguous with prefill_chunk_size, got pieces",
        ),
    ],
)
def test_chunks_that_break_a_rule_are_refused(
    model: LLaMA, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=2, **options)


def generate_and_look(folder: Path, options: dict[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """The tokens, and how many of them lie in whose cache in the end."""
    caches = []
    with pytest.MonkeyPatch.context() as patch:
        new_cache = LLaMA.new_cache

        def remembered(*args: Any, **kwargs: Any) -> Any:
            caches.append(new_cache(*args, **kwargs))
            return caches[-1]

        patch.setattr(LLaMA, "new_cache", remembered)
        ids = generate_on_ring(folder, options)
    return ids, caches[0].lengths


@pytest.mark.parametrize(
    ("lengths", "cache_lengths"),
    [([12, 11], [5, 37]), ([23, 0], [0, 42]), ([1, 22], [30, 12])],
)
def test_tokens_do_not_depend_on_where_the_cache_lies(
    lengths: list[int],
    cache_lengths: list[int],
    folder: Path,
    model: LLaMA,
    rank_pool: Callable[..., RankPool],
) -> None:
    expected = generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=NEW_TOKENS)
    options = {"partition": Partition.zigzag(lengths), "cache_lengths": cache_lengths}
    for ids, held in rank_pool(2).run(generate_and_look, folder, options):
        assert torch.equal(ids, expected)
        assert held == cache_lengths


@pytest.mark.multi_gpu
@pytest.mark.nccl
@pytest.mark.parametrize("cuda_graphs", [False, None, True])
def test_every_gpu_gets_the_tokens_of_one(
    cuda_graphs: bool | None, folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    model = load_model(folder, device="cuda")
    expected = generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=40, cuda_graphs=False)
    options = {"cuda_graphs": cuda_graphs, "partition": Partition.zigzag([9, 14])}
    for ids in rank_pool(2, "cuda").run(generate_on_ring, folder, options, 40):
        assert torch.equal(ids, expected)


def test_rows_end_together_on_every_rank(
    folder: Path, model: LLaMA, rank_pool: Callable[..., RankPool]
) -> None:
    prompt = random_ids(2, PROMPT_LEN)
    plain = generate(model, prompt, max_new_tokens=NEW_TOKENS)
    ends = [int(plain[0, PROMPT_LEN + 3]), int(plain[1, PROMPT_LEN + 9])]
    options = {"eos_token_id": ends, "pad_token_id": 5}
    expected = generate(model, prompt, max_new_tokens=NEW_TOKENS, **options)
    assert expected.size(1) < PROMPT_LEN + NEW_TOKENS
    for ids in rank_pool(2).run(generate_on_ring, folder, options):
        assert torch.equal(ids, expected)


def test_a_seed_repeats_draws_and_another_one_does_not(model: LLaMA) -> None:
    def draw(**options: Any) -> torch.Tensor:
        return generate(
            model, random_ids(2, PROMPT_LEN), max_new_tokens=NEW_TOKENS, do_sample=True, **options
        )

    assert torch.equal(draw(seed=1), draw(seed=1))
    assert not torch.equal(draw(seed=1), draw(seed=2))
    torch.manual_seed(4)
    first = draw()
    assert not torch.equal(draw(), first)
    torch.manual_seed(4)
    assert torch.equal(draw(), first)


@pytest.mark.parametrize("option", [{"temperature": 1.0}, {"top_k": 90}, {"top_p": 0.999}])
def test_any_option_of_sampling_draws(option: dict[str, Any], model: LLaMA) -> None:
    prompt, settings = random_ids(2, PROMPT_LEN), {"max_new_tokens": NEW_TOKENS, "seed": 1}
    drawn = generate(model, prompt, **option, **settings)
    assert torch.equal(drawn, generate(model, prompt, do_sample=True, **option, **settings))
    assert not torch.equal(drawn, generate(model, prompt, **settings))


def test_the_cache_has_room_for_all_tokens_from_the_beginning(
    model: LLaMA, monkeypatch: pytest.MonkeyPatch
) -> None:
    grown: list[int] = []
    monkeypatch.setattr(ShardedKVCache, "_grow", lambda self, capacity: grown.append(capacity))
    generate(model, random_ids(2, PROMPT_LEN), max_new_tokens=NEW_TOKENS)
    assert grown == []


def test_options_that_leave_one_token_are_greedy(model: LLaMA) -> None:
    prompt = random_ids(2, PROMPT_LEN)
    greedy = generate(model, prompt, max_new_tokens=NEW_TOKENS)
    for options in (
        {"temperature": 0},
        {"temperature": 2**70, "top_k": 1},
        {"temperature": 0, "top_k": 5, "do_sample": True},
        {"top_k": 1},
        {"top_p": 1e-6},
        {"do_sample": False, "temperature": 2.0},
    ):
        ids = generate(model, prompt, max_new_tokens=NEW_TOKENS, **options)
        assert torch.equal(ids, greedy), options


def test_the_trained_length_may_be_filled_and_not_passed(model: LLaMA) -> None:
    prompt = random_ids(1, 120)
    assert generate(model, prompt, max_new_tokens=8).shape == (1, 128)
    with pytest.raises(
        ValueError, match="at most the 128 tokens the model was trained for, got 129"
    ):
        generate(model, prompt, max_new_tokens=9)


def test_tokens_are_handed_out_as_they_come(model: LLaMA) -> None:
    seen: list[torch.Tensor] = []
    prompt = random_ids(2, PROMPT_LEN)
    ids = generate(model, prompt, max_new_tokens=NEW_TOKENS, on_tokens=seen.append)
    assert torch.equal(torch.stack(seen, 1), ids[:, PROMPT_LEN:])
    assert torch.equal(ids[:, :PROMPT_LEN], prompt)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be positive, got 0"),
        ({"temperature": -1.0}, "temperature must be 0 or more and finite, got -1.0"),
        ({"temperature": 1e-39}, "temperature must be 0 or 1.18e-38 or more, got 1e-39"),
        ({"top_k": 0}, "top_k must be positive, got 0"),
        ({"top_k": True}, "top_k must be an integer, got True"),
        ({"do_sample": "no"}, "do_sample must be True or False, got 'no'"),
        ({"max_new_tokens": True}, "max_new_tokens must be an integer, got True"),
        ({"seed": 2**64}, "seed must fit into 64 bits, got 18446744073709551616"),
        ({"seed": -(2**63) - 1}, "seed must fit into 64 bits"),
        ({"pad_token_id": 1.5}, "pad_token_id must be an integer or None, got 1.5"),
        ({"cuda_graphs": "no"}, "cuda_graphs must be True or False, got 'no'"),
        ({"eos_token_id": True}, "eos_token_id must be integers, .* got True"),
        ({"temperature": 10**400}, "temperature must be 0 or more and finite, got 1000"),
        ({"eos_token_id": 2**64}, "eos_token_id must fit into 64 bits, got 18446744073709551616"),
        ({"top_p": 0.0}, r"top_p must lie in \(0, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must lie in \(0, 1\], got 1.5"),
        ({"seed": "x"}, "seed must be an integer or None, got 'x'"),
        ({"eos_token_id": "last"}, "eos_token_id must be integers"),
        ({"prompt_ids": random_ids(5)}, r"prompt_ids must be a tensor \[B, S\]"),
        ({"prompt_ids": random_ids(1, 0)}, r"prompt_ids must hold tokens, got shape \[1, 0\]"),
        ({"prompt_ids": torch.tensor([[1, 99]])}, r"prompt_ids must lie in \[0, 99\), got 99"),
        ({"prompt_ids": torch.tensor([[1, -2]])}, r"prompt_ids must lie in \[0, 99\), got -2"),
        ({"pad_token_id": 99}, r"pad_token_id must lie in \[0, 99\), got 99"),
        ({"temperature": "1"}, "temperature must be 0 or more and finite, got '1'"),
        ({"top_p": "1"}, r"top_p must lie in \(0, 1\], got '1'"),
        ({"eos_token_id": 1.5}, "eos_token_id must be integers, .* got 1.5"),
        ({"max_new_tokens": None}, "max_new_tokens must be an integer, got None"),
        ({"cuda_graphs": True}, "cuda_graphs must have a model on CUDA, got cpu"),
        ({"partition": Partition.even(4, 1)}, "the 4 tokens of the partition, got 5"),
        (
            {"partition": Partition.even(5, 2)},
            "partition must have the 1 ranks of the group, got 2",
        ),
        ({"cache_lengths": [3, 4]}, "cache_lengths must be 1 lengths, got 2"),
        ({"cache_lengths": [3]}, "cache_lengths must add up to 6 tokens, got 3"),
        ({"cache_lengths": [-6]}, r"cache_lengths must not be negative, got -6"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str, model: LLaMA) -> None:
    assert VOCABULARY == 99
    arguments = {"prompt_ids": random_ids(1, 5), "max_new_tokens": 2, **options}
    with pytest.raises(ValueError, match=message):
        generate(model, **arguments)


@pytest.mark.parametrize("model", [None, torch.nn.Linear(1, 1)])
def test_what_is_no_model_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=f"model must be a LLaMA, got {type(model).__name__}"):
        generate(model, random_ids(1, 5), max_new_tokens=2)


@pytest.mark.parametrize("end", [-1, 1000, [1000, -1]])
def test_end_tokens_outside_the_vocabulary_end_nothing(end: Any, model: LLaMA) -> None:
    prompt = random_ids(1, 5)
    ids = generate(model, prompt, max_new_tokens=3, eos_token_id=end)
    assert torch.equal(ids, generate(model, prompt, max_new_tokens=3, eos_token_id=None))


def test_prompts_may_be_of_32_bits(model: LLaMA) -> None:
    prompt = random_ids(2, 5)
    ids = generate(model, prompt.int(), max_new_tokens=3)
    assert torch.equal(ids.long(), generate(model, prompt, max_new_tokens=3))


def test_a_model_in_training_mode_stays_in_it(folder: Path) -> None:
    model = load_model(folder)
    for training in (True, False):
        model.train(training)
        generate(model, random_ids(1, 5), max_new_tokens=2)
        assert {module.training for module in model.modules()} == {training}


def test_lengths_may_be_numpys(model: LLaMA) -> None:
    prompt = random_ids(1, 5)
    lengths = {"max_new_tokens": np.int64(2), "cache_lengths": np.array([6])}
    ids = generate(model, prompt, seed=np.int64(3), **lengths)
    assert torch.equal(ids, generate(model, prompt, max_new_tokens=2))


def generate_differently(folder: Path, options: dict[str, Any]) -> str:
    """The error of a call that has other arguments on the last rank."""
    model = load_model(folder)
    arguments = {"prompt_ids": random_ids(1, 9), "max_new_tokens": 2}
    if this().rank == this().world_size - 1:
        arguments |= options
    try:
        generate(model, **arguments)
    except ValueError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prompt_ids": random_ids(1, 9, seed=1)}, "prompt_ids must be the same on all"),
        ({"prompt_ids": random_ids(1, 9).flip(1)}, "prompt_ids must be the same on all"),
        (
            {"max_new_tokens": 3},
            "max_new_tokens must be the same on all ranks, got 2 on rank 0 and 3",
        ),
        ({"seed": 3}, "seed must be the same on all ranks, got None on rank 0 and 3 on rank 1"),
        (
            {"cache_lengths": [9, 1]},
            "cache_lengths must be the same on all ranks, got None on rank 0 and (9, 1) on rank 1",
        ),
        ({"top_p": 2.0}, "top_p must lie in (0, 1], got 2.0"),
        ({"temperature": 1e-39}, "temperature must be 0 or 1.18e-38 or more, got 1e-39"),
        ({"prompt_ids": random_ids(1, 9).to("meta")}, "arguments must be such that generation can"),
        ({"prompt_ids": [1, 2, 3]}, "prompt_ids must be a tensor"),
    ],
)
def test_ranks_that_disagree_all_fail(
    options: dict[str, Any], message: str, folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    for got in rank_pool(2).run(generate_differently, folder, options):
        assert message in got


def draw_from_nan(folder: Path, partition: Partition) -> tuple[str, str]:
    """The errors of generations in which a weight that only the sampler uses is NaN."""
    model = load_model(folder)
    prompt = random_ids(1, 9)
    errors = []
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        right = model.project
        for wrong in (lambda x: right(x) * torch.nan, lambda x: 1 / 0):
            patch.setattr(model, "project", wrong)
            with pytest.raises(RuntimeError) as error:
                generate(model, prompt, max_new_tokens=3, do_sample=True, partition=partition)
            errors.append(str(error.value))
        patch.undo()
    generate(model, prompt, max_new_tokens=3, partition=partition)
    return errors[0], errors[1]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_say_why_the_sampler_could_not_draw(
    world_size: int, folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    partition = Partition.contiguous([9] + [0] * (world_size - 1))
    answers = rank_pool(world_size).run(draw_from_nan, folder, partition)
    assert len(set(answers)) == 1
    from_nan, from_zero = answers[0]
    assert from_nan.startswith("rank 0 could not draw a token: probability tensor contains")
    assert from_zero == "rank 0 could not draw a token: division by zero"
