# SPDX-License-Identifier: Apache-2.0
"""Mistakes that look right, over two ranks: each is an error that says what to write instead, or is
shown to be wrong where no shape can tell."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import ringattn
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _distributed import RankPool, fake_default_group, this
from _llama import random_ids
from ringattn import Partition
from ringattn.models import LLaMA, LLaMAConfig
from ringattn.models.rope import RotaryEmbedding, rotate

SEQ_LEN = 24
TINY = LLaMAConfig(src_vocab_size=16, emb_dim=16, nlayers=1, nheads=2, hidden_dim=8)


def whole_tensors(heads: int = 4) -> list[torch.Tensor]:
    """q, k and v ``[1, S, H, D]`` of the whole sequence, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(1, SEQ_LEN, heads, 16, generator=generator) for _ in range(3)]


def errors(calls: dict[str, Callable[[], object]]) -> dict[str, str]:
    """What each call says as it is refused."""
    said = {}
    for name, call in calls.items():
        with pytest.raises(ValueError) as error:
            call()
        said[name] = str(error.value)
    return said


# ---- no process group under torchrun, and none any more ----------------------------------------

PROGRAM = """if True:
    import torch, torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    if {destroyed}:
        dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
        dist.destroy_process_group()
    import ringattn
    x = torch.randn(1, 6, 2, 8)
    try:
        ringattn.ring_attention(x, x, x, ringattn.Partition.even(12, 2))
    except ValueError as error:
        print(error)
    ringattn.ring_attention(x, x, x, group="single")
"""
MISSING = (
    "a process group must be initialised under torchrun, WORLD_SIZE is 2, got none; "
    "group='single' is for one process alone"
)
DESTROYED = (
    "group must be a process group that exists, got None after the default group was destroyed: "
    "call init_process_group() again; group='single' is for one process alone"
)


@pytest.mark.parametrize(("destroyed", "message"), [(False, MISSING), (True, DESTROYED)])
def test_a_process_of_torchrun_without_a_group_is_refused(destroyed: bool, message: str) -> None:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(destroyed=destroyed)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        said, _ = rank.communicate(timeout=600)
        assert rank.returncode == 0 and said == f"{message}\n"


def calls_of_the_default_group(**group: object) -> dict[str, Callable[[], object]]:
    """One of each function that takes a group, on this rank alone."""
    x, kv = torch.randn(1, 6, 2, 16), torch.randn(2, 1, 6, 2, 16)
    partition, cost = Partition.even(6, 1), ringattn.ModelCost.attention_only(2, 16)
    rebalancer = ringattn.Rebalancer([ringattn.RankProfile(1, 1)], cost)
    heads = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 16}
    sizes = heads | {"num_tokens": 16, "seconds": 0.001, "device": "cpu"}

    def generate() -> torch.Tensor:
        model = LLaMA(TINY, **group).requires_grad_(False)
        return ringattn.generate(model, random_ids(1, 5) % 16, max_new_tokens=2)

    return {
        "ring_attention": lambda: ringattn.ring_attention(x, x, x, **group),
        "RingAttention": lambda: ringattn.RingAttention(**group)(x, x, x),
        "decode_attention": lambda: ringattn.decode_attention(x, x, x, **group),
        "rotate_kv": lambda: ringattn.rotate_kv(kv, partition, **group).wait(),
        "gather": lambda: partition.gather(x, **group),
        "synchronize": lambda: ringattn.synchronize(**group),
        "measure_profiles": lambda: ringattn.measure_profiles(**sizes, **group),
        "observe": lambda: rebalancer.observe(ringattn.Timings(), **group),
        "LLaMA": generate,
    }


def after_destruction() -> dict[str, str]:
    dist.destroy_process_group()
    for call in calls_of_the_default_group(group="single").values():
        call()
    return errors(calls_of_the_default_group())


def test_a_default_group_that_is_gone_is_no_single_rank() -> None:
    with RankPool(2) as ring:
        for said in ring.run(after_destruction):
            assert said == dict.fromkeys(said, DESTROYED)


def alone_among_others() -> None:
    """The ranks make different calls, or none: each is alone."""
    for name, call in calls_of_the_default_group(group="single").items():
        if name != ("gather", "observe")[this().rank]:
            call()
    dist.barrier()


def test_single_is_this_process_alone_whatever_groups_there_are(
    rank_pool: Callable[..., RankPool],
) -> None:
    rank_pool(2).run(alone_among_others)


def test_a_group_may_come_again_after_one_that_is_gone() -> None:
    with fake_default_group():
        pass
    with fake_default_group():
        assert LLaMA(TINY).ring.world_size == 2


@pytest.mark.parametrize("world_size", [None, "", "0", "1", "two"])
def test_one_process_needs_no_group(world_size: str | None, monkeypatch) -> None:
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE", raising=False)
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    for call in calls_of_the_default_group().values():
        call()


def test_a_missing_group_is_refused_while_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 6, 2, 16)

    def attend(x: torch.Tensor, group: str | None) -> torch.Tensor:
        return ringattn.ring_attention(x, x, x, group=group)

    def compiled() -> Callable[..., torch.Tensor]:
        torch._dynamo.reset()
        return torch.compile(attend, fullgraph=True, backend="aot_eager")

    lone = compiled()
    expected = attend(x, "single")
    assert torch.equal(lone(x, None), expected)
    monkeypatch.setattr(dist.distributed_c10d, "_backend", "gloo")  # as after one that is gone
    for function in (lone, compiled()):
        with pytest.raises(Exception, match="got None after the default group was destroyed"):
            function(x, None)
    monkeypatch.undo()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Exception, match="WORLD_SIZE is 2, got none"):
        compiled()(x, None)
    assert torch.equal(compiled()(x, "single"), expected)


# ---- the wrong rows ----------------------------------------------------------------------------


def without_a_partition() -> dict[str, str]:
    """Whole tensors and chunks, which used to be taken for shards of twice as long a sequence."""
    rank = this().rank
    tensors = whole_tensors()
    chunks = [x.chunk(2, 1)[rank] for x in tensors]
    model = LLaMA(TINY).requires_grad_(False)
    return errors(
        {
            "whole": lambda: ringattn.ring_attention(*tensors),
            "chunks": lambda: ringattn.ring_attention(*chunks),
            "module": lambda: ringattn.RingAttention()(*chunks),
            "rotate": lambda: ringattn.rotate_kv(torch.stack(chunks[:2]), None),  # type: ignore[arg-type]
            "model": lambda: model(torch.zeros(1, 6, dtype=torch.int64)),
            "model of shards": lambda: model(torch.zeros(1, 6, dtype=torch.int64), sharded=True),
        }
    )


def test_a_ring_of_several_ranks_needs_a_partition(rank_pool: Callable[..., RankPool]) -> None:
    for rank, said in enumerate(rank_pool(2).run(without_a_partition)):
        assert said == dict.fromkeys(
            said,
            "partition must say which tokens each of the 2 ranks owns, got None: pass "
            "ringattn.Partition.even(S, 2), S the tokens of the whole sequence; its "
            f"shard(x, {rank}) gives the rows of rank {rank}, x.chunk(2, 1)[{rank}] does not",
        )


def with_wrong_rows(heads_first_in_memory: bool) -> dict[str, str]:
    """Every call gets a partition, and not the rows that go with it."""
    rank, partition = this().rank, Partition.even(SEQ_LEN, 2)
    tensors = whole_tensors()
    shards = [partition.shard(x, rank) for x in tensors]
    if heads_first_in_memory:
        swapped = [x.transpose(1, 2).contiguous() for x in shards]
    else:
        swapped = [x.transpose(1, 2) for x in shards]
    longer = Partition.even(SEQ_LEN + 4, 2)  # neither dimension fits: only strides differ
    return errors(
        {
            "[B, H, S, D]": lambda: ringattn.ring_attention(*swapped, partition),
            "[B, H, S, D] of others": lambda: ringattn.ring_attention(*swapped, longer),
            "whole": lambda: ringattn.ring_attention(*tensors, partition),
            "whole [B, H, S, D]": lambda: ringattn.ring_attention(
                *(x.transpose(1, 2) for x in tensors), partition
            ),
            "rotated": lambda: ringattn.rotate_kv(torch.stack(swapped[1:]), partition),
        }
    )


@pytest.mark.parametrize("heads_first_in_memory", [False, True])
def test_rows_that_do_not_fit_say_what_to_pass(
    heads_first_in_memory: bool, rank_pool: Callable[..., RankPool]
) -> None:
    for rank, said in enumerate(rank_pool(2).run(with_wrong_rows, heads_first_in_memory)):
        q = f"q must have the 12 rows that the partition gives rank {rank}, got "
        heads_first = "; this looks like [B, H, S, D]"
        others = q.replace("12", "14") + "4"
        assert said == {
            "[B, H, S, D]": f"{q}4{heads_first}: pass q.transpose(1, 2)",
            "[B, H, S, D] of others": others
            + ("" if heads_first_in_memory else f"{heads_first}: pass q.transpose(1, 2)"),
            "whole": f"{q}24; this is the whole sequence: pass partition.shard(q, {rank})",
            "whole [B, H, S, D]": f"{q}4{heads_first} of the whole sequence: "
            f"pass partition.shard(q.transpose(1, 2), {rank})",
            "rotated": f"kv{q[1:]}4; this looks like [2, B, H_kv, S_r, D]: pass kv.transpose(2, 3)",
        }


def test_a_cache_with_heads_first_says_what_to_pass() -> None:
    q, cache = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 9, 16)
    with pytest.raises(ValueError, match=r"got 1; these look like \[B, H, S, D\]: pass transpose"):
        ringattn.decode_attention(q, cache, cache)


def test_as_many_heads_as_rows_are_right_with_any_strides() -> None:
    """Strides of ``[B, H, S, D]`` transposed are those of ``[B, S, H, D]`` transposed once too
    often: a refusal of the mistake would refuse what is right."""
    heads_first = torch.randn(3, 1, 4, 4, 16, generator=torch.Generator().manual_seed(0))
    right = F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)
    views = heads_first.transpose(2, 3)
    for tensors in (views, views.contiguous()):
        torch.testing.assert_close(ringattn.ring_attention(*tensors), right)
        torch.testing.assert_close(ringattn.block_attention(*tensors, diagonal=0)[0], right)


def attend_to_chunks(layout: str) -> torch.Tensor:
    chunks = [x.chunk(2, 1)[this().rank] for x in whole_tensors()]
    return ringattn.ring_attention(*chunks, Partition.even(SEQ_LEN, 2, layout=layout))


def test_chunks_are_the_shards_of_the_contiguous_layout_alone(
    rank_pool: Callable[..., RankPool],
) -> None:
    expected, _ = ringattn.block_attention(*whole_tensors(), diagonal=0)
    out = torch.cat(rank_pool(2).run(attend_to_chunks, "contiguous"), 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=4e-6)
    wrong = torch.cat(rank_pool(2).run(attend_to_chunks, "zigzag"), 1)
    assert wrong.shape == out.shape and (wrong - expected).abs().max() > 0.1
    assert "``x.chunk(W, 1)[rank]`` has other rows" in ringattn.ring_attention.__doc__


# ---- positions ---------------------------------------------------------------------------------


def rotated_attention(positions: str) -> torch.Tensor:
    """Rotary embedding of this rank's rows, then the ring."""
    rank, partition = this().rank, Partition.even(SEQ_LEN, 2)
    q, k, v = (partition.shard(x, rank) for x in whole_tensors())
    ids = partition.position_ids(rank) if positions == "global" else torch.arange(q.size(1))
    rotation = RotaryEmbedding(16, 10000.0, {})(ids)
    return ringattn.ring_attention(rotate(q, rotation), rotate(k, rotation), v, partition)


def test_rotary_embedding_takes_the_positions_of_the_partition(
    rank_pool: Callable[..., RankPool],
) -> None:
    """Positions 0 .. S_r - 1 on every rank give results that no shape tells from right ones."""
    partition = Partition.even(SEQ_LEN, 2)
    q, k, v = whole_tensors()
    rotation = RotaryEmbedding(16, 10000.0, {})(torch.arange(SEQ_LEN))
    expected, _ = ringattn.block_attention(rotate(q, rotation), rotate(k, rotation), v, diagonal=0)
    right = partition.unshard(rank_pool(2).run(rotated_attention, "global"))
    torch.testing.assert_close(right, expected, rtol=0, atol=4e-6)
    wrong = partition.unshard(rank_pool(2).run(rotated_attention, "local"))
    for rank in range(2):  # on the first rank, too: its tail lies at the end of the sequence
        difference = partition.shard(wrong - expected, rank).abs().max()
        assert 0.01 < difference < float("inf")
    assert "partition.position_ids(rank)" in ringattn.ring_attention.__doc__
