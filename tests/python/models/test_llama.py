# SPDX-License-Identifier: Apache-2.0
"""A LLaMA over a ring computes what it computes on one rank, however its tokens are spread."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from _distributed import RankPool, fake_default_group, this
from _llama import LLAMA3_ROPE, random_ids, save, tiny_llama
from ringattn import Partition
from ringattn.models import LLaMA, LLaMAConfig, load_model
from ringattn.models.rope import RotaryEmbedding, inverse_frequencies, rotate
from torch._subclasses import FakeTensorMode
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

SEQ_LEN = 37


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    theirs = tiny_llama(rope_parameters=LLAMA3_ROPE)
    return save(theirs, tmp_path_factory.mktemp("llama"))


def logits_on_ring(
    folder: Path, partition: Partition | None, sharded: bool, dtype: torch.dtype
) -> torch.Tensor:
    """Gathered logits [2, S, V]."""
    model = load_model(folder, device=this().device, dtype=dtype)
    ids = random_ids(2, SEQ_LEN).to(this().device)
    whole = partition or Partition.even(SEQ_LEN, this().world_size)
    if sharded:
        logits = model(whole.shard(ids, this().rank), partition, sharded=True)
    else:
        logits = model(ids, partition)
    return whole.gather(logits)


PARTITIONS = [
    (1, None),
    (2, None),
    (2, Partition.zigzag([37, 0])),
    (2, Partition.contiguous([5, 32], order=[1, 0])),
    (3, None),
    (3, Partition.zigzag([0, 30, 7], order=[2, 0, 1])),
]


@pytest.mark.parametrize(("world_size", "partition"), PARTITIONS)
@pytest.mark.parametrize("sharded", [False, True])
def test_ranks_together_equal_one_rank(
    world_size: int,
    partition: Partition | None,
    sharded: bool,
    folder: Path,
    rank_pool: Callable[..., RankPool],
) -> None:
    if partition is None and world_size > 1:
        partition = Partition.even(SEQ_LEN, world_size)  # None is refused
    alone = load_model(folder)(random_ids(2, SEQ_LEN))
    pool = rank_pool(world_size)
    for logits in pool.run(logits_on_ring, folder, partition, sharded, torch.float32):
        torch.testing.assert_close(logits, alone, atol=1e-4, rtol=0)


@pytest.mark.cuda
def test_cuda_equals_the_cpu(folder: Path) -> None:
    ids = random_ids(2, SEQ_LEN)
    expected = load_model(folder)(ids)
    logits = load_model(folder, device="cuda")(ids.cuda()).cpu()
    torch.testing.assert_close(logits, expected, atol=5e-3, rtol=0)


def logits_of_a_single_rank(folder: Path) -> torch.Tensor:
    ids = random_ids(2, SEQ_LEN)[:, : 10 + this().rank]  # no two ranks alike
    shared = load_model(folder).alone()
    logits = load_model(folder, group="single")(ids)
    assert torch.equal(shared(ids), logits)
    return logits


def test_a_single_rank_needs_no_other_one_of_the_default_group(
    folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    alone = load_model(folder)(random_ids(2, SEQ_LEN))
    for rank, logits in enumerate(rank_pool(2).run(logits_of_a_single_rank, folder)):
        torch.testing.assert_close(logits, alone[:, : 10 + rank], atol=1e-4, rtol=0)


def test_a_single_rank_stays_one_when_a_group_comes_later(folder: Path) -> None:
    model = load_model(folder)
    ids = random_ids(2, SEQ_LEN)
    logits = model(ids)
    with fake_default_group():
        assert torch.equal(model(ids), logits)


def test_alone_shares_the_weights(folder: Path) -> None:
    model = load_model(folder)
    for ours, theirs in zip(model.parameters(), model.alone().parameters(), strict=True):
        assert ours.data_ptr() == theirs.data_ptr()
        assert not theirs.requires_grad


def test_alone_is_in_the_mode_of_the_model(folder: Path) -> None:
    model = load_model(folder)
    for training in (True, False):
        alone = model.train(training).alone()
        assert {module.training for module in alone.modules()} == {training}
        assert {module.training for module in model.modules()} == {training}


def test_fake_tokens_have_fake_logits(folder: Path) -> None:
    model = load_model(folder)
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 99)


def ways_to_travel(folder: Path, options: dict[str, Any]) -> list[tuple[str, int | None]]:
    """Of a call of every model, with and without a group."""
    models = [load_model(folder, **options), load_model(folder, group="single", **options)]
    models += [models[0].alone(), LLaMA(models[0].config, **options)]
    calls = [each.prefill_call(Partition.even(8, each.ring.world_size)) for each in models]
    return [(call.transport, call.depth) for call in calls]


def test_every_call_takes_the_transport_of_the_model(
    folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    for calls in rank_pool(2).run(ways_to_travel, folder, {"transport": "nccl", "depth": 3}):
        assert calls == [("nccl", 3)] * 4
    for calls in rank_pool(2).run(ways_to_travel, folder, {}):
        assert calls == [("auto", None)] * 4


def wrong_transport(folder: Path) -> None:
    way = "pigeon" if this().rank == 1 else "auto"
    partition = Partition.even(SEQ_LEN, 2)
    load_model(folder, transport=way)(random_ids(1, SEQ_LEN), partition)


def test_a_wrong_transport_on_one_rank_is_an_error_on_all(
    folder: Path, rank_pool: Callable[..., RankPool]
) -> None:
    first, second = rank_pool(2).outcomes(wrong_transport, folder)
    assert [first.error, second.error] == ["ValueError"] * 2
    assert second.message.startswith("transport must be ") and 'got "pigeon"' in second.message
    assert first.message == f"rank 1: {second.message}"


def wrong_call(folder: Path, rank_that_errs: int, batched: bool) -> None:
    model, partition = load_model(folder), Partition.even(SEQ_LEN, this().world_size)
    if this().rank != rank_that_errs:
        model(random_ids(1, SEQ_LEN), partition)
    elif batched:
        torch.vmap(lambda ids: model(ids, partition))(random_ids(3, 1, SEQ_LEN))
    else:
        model(random_ids(1, SEQ_LEN), Partition.even(SEQ_LEN + 1, this().world_size))


@pytest.mark.parametrize(
    ("batched", "message"),
    [
        (False, "token_ids must have the 38 tokens of the partition, got 37"),
        (
            True,
            "token_ids must not be batched by torch.vmap, got a batched tensor (B is the batch)",
        ),
    ],
)
def test_a_wrong_call_on_one_rank_fails_on_all_and_names_it(
    folder: Path, rank_pool: Callable[..., RankPool], batched: bool, message: str
) -> None:
    first, second = rank_pool(2).outcomes(wrong_call, folder, 1, batched)
    assert [first.error, second.error] == ["ValueError"] * 2
    assert second.message == message
    assert "rank 1" in first.message and message in first.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((random_ids(5),), r"token_ids must be a tensor \[B, S\]"),
        (([[1, 2]],), r"token_ids must be a tensor \[B, S\], got list"),
        ((random_ids(1, 5).float(),), "token_ids must be int64 or int32, got torch.float32"),
        ((random_ids(1, 5), [5]), "partition must be a Partition, got list"),
        (
            (random_ids(1, 5), Partition.even(5, 2)),
            "partition must have the 1 ranks of the group, got 2",
        ),
        ((random_ids(1, 5), Partition.even(6, 1)), "the 6 tokens of the partition, got 5"),
        ((torch.tensor([[1, 99]]),), r"token_ids must lie in \[0, 99\), got 99"),
        ((torch.tensor([[-1, 2]]),), r"token_ids must lie in \[0, 99\), got -1"),
        ((random_ids(1, 5).to("meta"),), "token_ids must be on cpu, got meta"),
        ((random_ids(1, 129),), "at most the 128 tokens the model was trained for, got 129"),
    ],
)
def test_wrong_arguments_are_refused(
    arguments: tuple[Any, ...], message: str, folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model(folder)(*arguments)


def test_the_whole_trained_length_is_allowed(folder: Path) -> None:
    assert load_model(folder)(random_ids(1, 128)).shape == (1, 128, 99)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
        LLAMA3_ROPE,
        {**LLAMA3_ROPE, "original_max_position_embeddings": 8192, "factor": 32.0},
    ],
)
def test_rotation_is_that_of_transformers_at_any_positions(rope: dict[str, Any]) -> None:
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=256,
            num_attention_heads=2,
            max_position_embeddings=131072,
            rope_parameters=dict(rope),
        )
    )
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    torch.testing.assert_close(
        inverse_frequencies(128, rope["rope_theta"], scaling), theirs.inv_freq, rtol=1e-6, atol=0
    )
    positions = torch.tensor([0, 1, 77, 4096, 131071])
    x = torch.randn(1, 5, 2, 128)
    expected, _ = apply_rotary_pos_emb(x, x, *theirs(x, positions[None]), unsqueeze_dim=2)
    ours = rotate(x, RotaryEmbedding(128, rope["rope_theta"], scaling)(positions))
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"emb_dim": 0}, "emb_dim must be positive, got 0"),
        ({"nheads": "8"}, "nheads must be an integer, got '8'"),
        ({"nlayers": True}, "nlayers must be an integer, got True"),
        ({"head_dim": 16.0}, "head_dim must be an integer or None, got 16.0"),
        ({"kvheads": -1}, "kvheads must not be negative, got -1"),
        ({"max_expected_seq_len": None}, "max_expected_seq_len must be an integer, got None"),
        (
            {"src_vocab_size": 2**63},
            "src_vocab_size must fit into 64 bits, got 9223",
        ),
        ({"norm_eps": "small"}, "norm_eps must be finite and not negative, got 'small'"),
        ({"rope_theta": 0}, "rope_theta must be finite and positive, got 0"),
        ({"tie_heads": 1}, "tie_heads must be True or False, got 1"),
        ({"eos_ids": 2}, "eos_ids must be integers, got 2"),
        ({"eos_ids": (2, None)}, r"eos_ids must be integers, got \(2, None\)"),
        ({"pad_id": "0"}, "pad_id must be an integer, got '0'"),
        ({"rope_scaling": ["linear"]}, r"rope_scaling must be a mapping, got \['linear'\]"),
        ({"nheads": 5, "kvheads": 2}, "nheads must be a multiple of kvheads 2, got 5"),
        ({"kvheads": -2}, "kvheads must not be negative, got -2"),
        ({"head_dim": 264}, "head_dim must be a multiple of 8 from 8 to 256, got 264"),
        ({"rope_scaling": {"type": "dynamic"}}, "rope_type must be one of .*, got 'dynamic'"),
    ],
)
def test_wrong_configs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLaMAConfig(**changes)


def test_what_follows_from_other_sizes_may_be_none() -> None:
    given: dict[str, Any] = {"kvheads": None, "head_dim": None, "eos_ids": None}
    config = LLaMAConfig(nheads=4, emb_dim=64, **given)
    assert config == LLaMAConfig(nheads=4, emb_dim=64)
    assert (config.kvheads, config.head_dim, config.eos_ids) == (4, 16, ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "zz"}, r"device must be one with a kernel \(cpu.*\), got 'zz'"),
        ({"device": "mps"}, r"device must be one with a kernel \(cpu.*\), got mps"),
        ({"dtype": "float32"}, r"dtype must be a floating torch\.dtype, got 'float32'"),
        ({"dtype": torch.int8}, r"dtype must be a floating torch\.dtype, got torch\.int8"),
    ],
)
def test_weights_of_no_dtype_or_nowhere_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LLaMA(LLaMAConfig(nlayers=1, emb_dim=16, nheads=1), **options)


def test_an_unknown_group_is_refused() -> None:
    with pytest.raises(ValueError, match=r"group must be .*, None or \"single\", got 'world'"):
        LLaMA(LLaMAConfig(nlayers=1, emb_dim=16, nheads=1), group="world", device="meta")
