# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="ringattn" on one process: the unmodified model's results, or a refusal."""

import itertools
from typing import Any

import pytest
import ringattn.integrations.transformers  # noqa: F401  registers "ringattn"
import torch
from _distributed import this
from _transformers import CACHE, MASKED, assert_near, model_of, token_ids
from ringattn.integrations.transformers.one_process import mask
from transformers.cache_utils import DynamicCache, StaticCache


def alone(**changes: Any) -> Any:
    """A model of one process, as from_pretrained(attn_implementation="ringattn") gives it."""
    model = model_of(device="cpu", **changes)
    model.set_attn_implementation("ringattn")
    return model


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_one_process_runs_it_as_an_attention_implementation(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, 61, (2, 13), generator=generator)
    model, plain = alone(family=family), model_of(family, device="cpu")
    assert_near(model(ids).logits, plain(ids).logits)
    ones = torch.ones_like(ids)
    assert_near(model(ids, attention_mask=ones).logits, plain(ids).logits)
    for use_cache in (True, False):
        options = {"max_new_tokens": 5, "use_cache": use_cache}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    cache = model(ids[:, :9])[CACHE]
    for start, stop in ((9, 12), (12, 13)):
        logits = model(ids[:, start:stop], **{CACHE: cache}).logits
        assert_near(logits, plain(ids).logits[:, start:stop])
    model.set_attn_implementation("sdpa")
    assert torch.equal(model(ids).logits, plain(ids).logits)


PADDED = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])


def ids_of(num_tokens: int, batch: int = 2, seed: int = 0) -> torch.Tensor:
    """On the CPU, outside of the processes of a pool."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 61, (batch, num_tokens), generator=generator)


def both(name: str) -> tuple[Any, Any]:
    """(on this implementation, unmodified in eager attention)."""
    family, changes = MASKED[name]
    plain = model_of(family, device="cpu", **changes)
    plain.set_attn_implementation("eager")
    return alone(family=family, **changes), plain


@pytest.mark.parametrize("name", MASKED)
def test_windows_softcap_and_sinks_are_those_of_the_unmodified_model(name: str) -> None:
    model, plain = both(name)
    for num_tokens in (1, 2, 23):
        ids = ids_of(num_tokens)
        for use_cache in (False, True):
            given, expected = (x(ids, use_cache=use_cache).logits for x in (model, plain))
            assert_near(given, expected)
    ids = ids_of(13)
    for use_cache in (True, False):
        options = {"max_new_tokens": 8, "use_cache": use_cache, "eos_token_id": None}
        assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))


@pytest.mark.parametrize("name", MASKED)
@pytest.mark.parametrize("trims", [False, True])  # whether the cache drops what no window sees
def test_calls_after_a_cache_see_the_window(name: str, trims: bool) -> None:
    model, plain = both(name)
    caches = [DynamicCache(**({"config": x.config} if trims else {})) for x in (model, plain)]
    for turn, num_tokens in enumerate((13, 1, 6, 1, 1, 3)):
        ids = ids_of(num_tokens, seed=turn)
        given = model(ids, **{CACHE: caches[0]}).logits
        assert_near(given, plain(ids, **{CACHE: caches[1]}).logits)


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("num_tokens", [1, 23])
def test_gradients_are_those_of_the_unmodified_model(name: str, num_tokens: int) -> None:
    model, plain = both(name)
    ids = ids_of(num_tokens)
    for each in (model, plain):
        each.requires_grad_(True)
        each(ids, use_cache=False).logits.square().sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None and theirs.grad.any():
            assert_near(ours.grad, theirs.grad, 1e-4)


@pytest.mark.cuda
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_a_gpu_gives_the_results_of_a_cpu(name: str) -> None:
    model, plain = both(name)
    ids, places = ids_of(23), restarting(DOCUMENTS[0])
    calls: list[dict[str, Any]] = [{}, boundaries(DOCUMENTS[0])]
    if name != "gpt_oss":
        calls.append({"position_ids": places, "use_cache": False})
    expected = [model(ids, **options).logits for options in calls]
    tokens = plain.generate(ids, max_new_tokens=8)
    model.to("cuda")
    for options, logits in zip(calls, expected, strict=True):
        moved = {k: v.cuda() if torch.is_tensor(v) else v for k, v in options.items()}
        assert_near(model(ids.cuda(), **moved).logits.cpu(), logits)
    assert torch.equal(model.generate(ids.cuda(), max_new_tokens=8).cpu(), tokens)


#: Of 23 tokens; a document of one token among them. The second row has others.
DOCUMENTS = ([0, 9, 10, 17, 23], [0, 3, 20, 23])


def restarting(ends: list[int]) -> torch.Tensor:
    pairs = itertools.pairwise(ends)
    return torch.cat([torch.arange(stop - start) for start, stop in pairs])[None]


def one_by_one(plain: Any, ids: torch.Tensor, ends: list[int]) -> torch.Tensor:
    pairs = itertools.pairwise(ends)
    return torch.cat([plain(ids[:, start:stop]).logits for start, stop in pairs], 1)


def boundaries(ends: list[int], dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    given = torch.tensor(ends, dtype=dtype)
    longest = max(stop - start for start, stop in itertools.pairwise(ends))
    lengths = {"max_length_q": longest, "max_length_k": longest}
    return {"cu_seq_lens_q": given, "cu_seq_lens_k": given, **lengths}


@pytest.mark.parametrize("name", [None, *MASKED])
def test_packed_documents_are_those_of_one_call_each(name: str | None) -> None:
    model, plain = both(name) if name else (alone(), model_of(device="cpu"))
    ids, ends = ids_of(23), DOCUMENTS[0]
    expected = one_by_one(plain, ids, ends)
    places = restarting(ends)
    # What a collator of transformers returns for flash attention.
    assert_near(model(ids, position_ids=places, **boundaries(ends)).logits, expected)
    if name == "gpt_oss":
        with pytest.raises(ValueError, match="position_ids must go on by 1 for gpt_oss, whose"):
            model(ids, position_ids=places, use_cache=False)
        return
    for given in (places, places.expand(2, -1)):
        assert_near(model(ids, position_ids=given, use_cache=False).logits, expected)
    differing = torch.cat([restarting(ends) for ends in DOCUMENTS])
    logits = model(ids, position_ids=differing, use_cache=False).logits
    for row, ends in enumerate(DOCUMENTS):
        row_ids = ids[row, None]
        assert_near(logits[row, None], one_by_one(plain, row_ids, ends))


def test_rope_follows_position_ids_and_attention_the_boundaries() -> None:
    model, plain = alone(), model_of(device="cpu")
    ids, ends, places = ids_of(23), DOCUMENTS[0], torch.arange(23)[None]
    expected = torch.cat(
        [
            plain(ids[:, start:stop], position_ids=places[:, start:stop]).logits
            for start, stop in itertools.pairwise(ends)
        ],
        1,
    )
    assert_near(model(ids, **boundaries(ends, torch.int64)).logits, expected)
    whole = plain(ids, position_ids=restarting(ends), use_cache=True).logits
    # With a cache, ids that restart are RoPE's alone, as in the unmodified model.
    assert_near(model(ids, position_ids=restarting(ends), use_cache=True).logits, whole)
    given = model(ids, position_ids=restarting(ends), use_cache=False, **boundaries([0, 23]))
    assert_near(given.logits, whole)


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({}, {"attention_mask": PADDED}, "attention_mask must be all ones, got padding"),
        (
            {},
            {"attention_mask": torch.ones(1, 1, 4, 4)},
            r"attention_mask must be \[B, S\] or None",
        ),
        ({}, boundaries([0, 3]), "cu_seq_lens_k must end with the 4 tokens"),
        ({}, {"cu_seq_lens_q": torch.tensor([0, 4])}, "must both be given, got no cu_seq_lens_k"),
        ({}, {"cu_seqlens": [0, 4]}, "cu_seqlens must be left out"),
        ({}, {"scale": 0.5}, "scale must be left out .each layer has its own., got 0.5"),
        ({}, {"sliding_window": 2}, "sliding_window must be that of the layer's mask, got 2"),
        # transformers 5 makes another mask of it, transformers 4 hands it to the layers.
        ({}, {"is_causal": False}, "is_causal"),
        ({"is_causal": False}, {}, "is_causal"),
        ({"attention_dropout": 0.5, "train": True}, {}, "dropout must be 0, got 0.5"),
    ],
)
def test_one_process_refuses_what_is_not_causal_attention(
    changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    changes = dict(changes)
    model = alone(**{k: v for k, v in changes.items() if k != "train"})
    model.train(changes.get("train", False))
    with pytest.raises(ValueError, match=message):
        model(torch.ones(2, 4, dtype=torch.int64), **options)


def test_documents_after_a_cache_are_refused() -> None:
    model, ids = alone(), ids_of(4)
    cache = model(ids)[CACHE]
    with pytest.raises(ValueError, match="use_cache must be False with cu_seq_lens_q"):
        model(ids, **{CACHE: cache}, **boundaries([0, 8]))


@pytest.mark.parametrize("chunked", [4, 8])
def test_chunks_are_those_of_the_unmodified_model(chunked: int) -> None:
    model, plain = (
        model_of("llama4_text", device="cpu", attention_chunk_size=chunked) for _ in range(2)
    )
    model.set_attn_implementation("ringattn")
    plain.set_attn_implementation("eager")
    ids = ids_of(23)
    assert_near(model(ids).logits, plain(ids).logits)
    options = {"max_new_tokens": 8, "eos_token_id": None}
    assert torch.equal(model.generate(ids, **options), plain.generate(ids, **options))
    places = restarting(DOCUMENTS[0])
    given, expected = (x(ids, position_ids=places, use_cache=False).logits for x in (model, plain))
    assert_near(given, expected)
    with pytest.raises(ValueError, match="must be None for a model with chunked attention"):
        model(ids, **boundaries(DOCUMENTS[0]))


def within_blocks(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Causal, but for a block of the keys 1 and 2, which see each other."""
    return (key <= query) | ((query - 1) // 2 == (key - 1) // 2) & (query < 3)


def first_keys_and_window(row: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> Any:
    """Key 0 and the two newest ones."""
    return (key <= query) & ((key > query - 2) | (key < 1))


def test_one_process_refuses_masks_of_several_runs() -> None:
    device = torch.device("cpu")
    for places in (
        {"q_offset": 0, "q_length": 6, "device": device},  # transformers 5
        {"cache_position": torch.arange(6)},  # and 4
    ):
        mask(batch_size=2, kv_length=6, mask_function=lambda *at: at[3] <= at[2], **places)
        for other in (within_blocks, first_keys_and_window):
            with pytest.raises(ValueError, match="got another mask"):
                mask(batch_size=2, kv_length=6, mask_function=other, **places)


def test_one_process_refuses_a_static_cache() -> None:
    model = alone()
    cache = StaticCache(config=model.config, max_cache_len=16)
    with pytest.raises(ValueError, match="a static cache is not supported"):
        model(torch.ones(1, 4, dtype=torch.int64), **{CACHE: cache})
    for num_tokens in (3, 13):  # of a longer prompt, a static cache has no room for later tokens
        windowed = alone(family="mistral", sliding_window=5)
        with pytest.raises(ValueError, match="a static cache is not supported"):
            windowed.generate(ids_of(num_tokens), max_new_tokens=2, cache_implementation="static")


def unparallelized() -> None:
    model = alone().to(this().device)
    with pytest.raises(ValueError, match=r"group of 2: pass the model to ringattn.parallelize"):
        model(token_ids(4))


def test_the_error_on_several_ranks_names_parallelize(rank_pool: Any) -> None:
    rank_pool(2).run(unparallelized)
