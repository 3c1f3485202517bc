# SPDX-License-Identifier: Apache-2.0
"""A peer that dies in other collectives than the ring, and results that are never waited for."""

import os
import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import AT_ONCE_S, GROUP_TIMEOUT_S, RankPool, this
from _llama import random_ids, save, tiny_llama
from ringattn import _C, Partition, generation
from ringattn._distributed.groups import resolve_group
from ringattn.cache import ShardedKVCache
from ringattn.models import load_model

#: Of groups in which a rank never comes. What all ranks do before ends in it on a busy machine.
TIMEOUT_S = 4.0


def lose_a_rank_in(function_name: str, victim: int) -> str:
    """A warm collective that one rank dies before; the error of the others."""
    x = torch.zeros(1, 3, 2, 8)
    partition = Partition.even(3 * this().world_size, this().world_size)
    calls = {
        "decode_attention": lambda: ringattn.decode_attention(x, x, x),
        "rotate_kv": lambda: ringattn.rotate_kv(torch.stack([x, x]), partition).wait(),
    }
    calls[function_name]()
    if this().rank == victim:
        os._exit(1)
    with pytest.raises(dist.DistBackendError) as first:
        for _ in range(3):  # a message may still have been under way
            calls[function_name]()
    with pytest.raises(dist.DistBackendError):
        ringattn.synchronize()
    return str(first.value)


def check_closed(said: dict[int, str], victim: int, place: str) -> None:
    """That every rank says whose connection was closed, and nothing of a timeout."""
    for sentence in said.values():
        assert re.fullmatch(
            rf"rank {victim} closed its connection in {place}; the group cannot be used any more",
            sentence.strip(),
        ), sentence


def check_blames(said: dict[int, str], victim: int, place: str) -> None:
    """That every rank names the victim, and beside it only ranks that noticed later: until they do,
    they are as silent as the one that is gone."""
    blames = {}
    for rank, sentence in said.items():
        blame = re.match(
            rf"(rank \d(?: or rank \d)*) did not (?:take part in|come to) {place} within", sentence
        )
        assert blame, sentence
        blames[rank] = {int(named) for named in re.findall(r"\d", blame[1])}
    assert {victim} in blames.values(), blames
    for rank, named in blames.items():
        assert victim in named and rank not in named, blames
        assert all(rank not in blames[other] for other in named - {victim}), blames


@pytest.mark.parametrize(
    ("function_name", "world_size", "victim"),
    [
        *(("decode_attention", 3, 2), ("decode_attention", 4, 1)),
        *(("rotate_kv", 3, 2), ("rotate_kv", 4, 1)),
    ],
)
def test_a_rank_that_dies_is_named_by_the_other_collectives(function_name, world_size, victim):
    with RankPool(world_size) as ring:
        outcomes = ring.outcomes(lose_a_rank_in, function_name, victim)
    assert outcomes.pop(victim).died
    assert all(outcome.ok for outcome in outcomes), outcomes
    said = {outcome.rank: outcome.value for outcome in outcomes}
    check_closed(said, victim, rf"step \d of {function_name}")
    assert all(outcome.seconds < AT_ONCE_S for outcome in outcomes), outcomes


def lose_a_rank_beside_the_ring(
    name: str, folder: Path, victim: int, dies: bool
) -> tuple[list[str], list[float]]:
    """A collective of torch.distributed that one rank does not enter: the errors of the others, of
    it and of the next call, and how many seconds each took."""
    size, rank = this().world_size, this().rank
    x = torch.zeros(1, 3, 2, 8)
    cost = ringattn.ModelCost.attention_only(num_heads=2, head_dim=8)
    rebalancer = ringattn.Rebalancer([ringattn.RankProfile(1.0, 1.0)] * size, cost)
    model = load_model(folder)
    cache = ShardedKVCache(
        *([0, 3, 0], rank),  # all come from the victim
        targets=[1, 1, 1],
    )
    held = torch.zeros(1, cache.lengths[rank], 2, 8, device=this().device)
    cache.store(0, held, held)
    right = generation.choose

    def choose(*arguments: Any) -> torch.Tensor:  # the rank goes just before a token is handed out
        go_if_victim()
        return right(*arguments)

    def go_if_victim() -> None:
        if rank == victim and dies:
            os._exit(1)
        if rank == victim:
            raise KeyboardInterrupt  # as a rank that never comes

    def call() -> None:
        if name == "gather":
            Partition.even(3 * size, size).gather(x)
        elif name == "observe":
            rebalancer.observe(ringattn.Timings())
        elif name == "measure_profiles":
            ringattn.measure_profiles(num_tokens=8, seconds=0.01)
        elif name == "rebalance":
            cache.rebalance(dist.group.WORLD)
        else:
            partition = Partition.contiguous([3, 3, 3], order=[0, 2, victim])  # it draws the tokens
            ringattn.generate(model, random_ids(1, 9), max_new_tokens=2, partition=partition)

    if name == "gather":
        call()
    if name == "generate":
        generation.choose = choose
    else:
        go_if_victim()
    said, seconds = [], []
    for _ in range(2):
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as error:
            call()
        seconds.append(time.monotonic() - start)
        said.append(str(error.value))
    generation.choose = right
    return said, seconds


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("dies", [True, False], ids=["dies", "never comes"])
@pytest.mark.parametrize("name", ["gather", "observe", "measure_profiles", "rebalance", "generate"])
def test_a_rank_that_is_missing_beside_the_ring_is_named(name, dies, folder):
    victim = 1
    with RankPool(3, timeout_s=GROUP_TIMEOUT_S if dies else TIMEOUT_S) as ring:
        outcomes = ring.outcomes(lose_a_rank_beside_the_ring, name, folder, victim, dies)
    outcomes.pop(victim)
    assert all(outcome.ok for outcome in outcomes), outcomes
    for outcome in outcomes:
        (first, second), (waited, waited_again) = outcome.value
        assert second == first
        assert waited < AT_ONCE_S and waited_again < AT_ONCE_S
    said = {outcome.rank: outcome.value[0][0] for outcome in outcomes}
    place = rf"step \d of {name}"
    if dies:
        check_closed(said, victim, place)
    else:
        check_blames(said, victim, place)
        # A fifth of the timeout is left for the ranks to say which of them they miss.
        assert all(outcome.value[1][0] > 0.7 * TIMEOUT_S for outcome in outcomes)


def fail_alone(victim: int) -> tuple[str, float]:
    """The error of a warm collective whose group one rank has ended, and after how many seconds."""
    x = torch.zeros(1, 3, 2, 8)
    ringattn.decode_attention(x, x, x)
    start = time.monotonic()
    if this().rank == victim:
        _C.fail_group(resolve_group(None).name, "no memory is left")
    with pytest.raises(dist.DistBackendError) as error:
        ringattn.decode_attention(x, x, x)
    return str(error.value), time.monotonic() - start


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_fails_alone_says_why_to_all(victim):
    with RankPool(2) as ring:
        found = ring.run(fail_alone, victim)
    for sentence, seconds in found:
        assert f"rank {victim}" in sentence and "no memory is left" in sentence, sentence
        assert seconds < AT_ONCE_S


def test_rotations_without_a_wait_are_freed():
    partition = Partition.even(4000, 1)
    kv = torch.zeros(2, 1, 4000, 8, 64)  # 16 MB

    def resident_bytes() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * resource.getpagesize()

    for _ in range(3):
        ringattn.rotate_kv(kv, partition)
    before = resident_bytes()
    for _ in range(40):
        ringattn.rotate_kv(kv, partition)
    assert resident_bytes() - before < 10 * kv.nbytes
