# SPDX-License-Identifier: Apache-2.0
"""The blocks of docs/programs.md run in their order, on several ranks."""

import os
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy
import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from _documents import run, shown
from _llama import save, tiny_llama
from ringattn.models import load_model
from test_document_code import NUM_TOKENS, assumed, close, one_device, tensors

PAGE = "docs/programs.md"
Pools = Callable[[int], RankPool]


def started(texts: list[str]) -> tuple[int, int]:
    with mock.patch.object(dist, "init_process_group") as begun:
        names = {}
        with mock.patch.dict(os.environ, LOCAL_RANK=str(this().rank)):
            run(texts, names)
    begun.assert_called_once_with("gloo")
    return names["rank"], names["world_size"]


def split(texts: list[str]) -> list[tuple[int, ...]]:
    names = assumed() | {"seq_len": NUM_TOKENS}
    names["profiles"] = [ringattn.RankProfile(1.0, 1.0), ringattn.RankProfile(2.0, 2.0)]
    names["cost"] = ringattn.ModelCost.attention_only(8, 64)
    partitions = []
    for line in "".join(texts).splitlines():
        run([line], names)
        if line.startswith("p = "):
            partitions.append(names["p"])
    assert all(p.seq_len == NUM_TOKENS for p in partitions)
    return [p.lengths for p in partitions]


def loaded(texts: list[str], file: Path, folder: Path, lengths: list[int]) -> None:
    p = ringattn.Partition.zigzag(lengths)
    llama, seen = load_model(folder), []

    def model(ids: torch.Tensor, p: ringattn.Partition, sharded: bool) -> torch.Tensor:
        seen.append(p.gather(ids))
        return llama(ids, p, sharded=sharded)

    names = assumed() | {"p": p, "file": file, "model": model}
    run(texts, names)
    assert [len(ids) for ids in seen] == [2, 1]
    ids = numpy.fromfile(file, "uint16")[: 3 * NUM_TOKENS].reshape(3, NUM_TOKENS)
    assert sorted(torch.cat(seen).tolist()) == sorted(ids.tolist())
    close(names["logits"], p.shard(llama.alone()(seen[-1]), this().rank))


def called(texts: list[str], result: str) -> None:
    whole = tensors(4, 2, 2)
    p = ringattn.Partition.even(NUM_TOKENS, this().world_size)
    q, k, v = (p.shard(x, this().rank) for x in whole)
    names = assumed() | {"p": p, "q": q, "k": k, "v": v}
    run(texts, names)
    if result == "outs":
        for out in names["outs"]:
            close(out, p.shard(one_device(*whole), this().rank))
    else:
        assert 0 < names["ms"] < 60_000 and names["timings"].summary()["calls"] == 1


def page(section: str) -> list[str]:
    return shown(PAGE, section)


@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without GPUs does")
def test_a_rank_finds_its_place(rank_pool: Pools) -> None:
    assert rank_pool(2).run(started, page("First, under torchrun")) == [(0, 2), (1, 2)]


def test_partitions_are_made_in_three_ways(rank_pool: Pools) -> None:
    even, listed, planned = rank_pool(2).run(
        split, page('Even, a list of lengths, "auto", `plan`')
    )[0]
    assert (even, listed) == ((11, 10), (14, 7)) and planned[1] > planned[0]


@pytest.mark.parametrize("lengths", [[14, 7], [21, 0]])
def test_each_rank_reads_its_shard(rank_pool: Pools, tmp_path: Path, lengths: list[int]) -> None:
    ids = numpy.random.default_rng(0).integers(0, 99, 3 * NUM_TOKENS + 5)
    ids.astype("uint16").tofile(tmp_path / "train.bin")
    folder = save(tiny_llama(), tmp_path / "llama")
    rank_pool(2).run(loaded, page("A data loader"), tmp_path / "train.bin", folder, lengths)


def test_threads_take_a_group_each(rank_pool: Pools) -> None:
    rank_pool(2).run(called, page("Threads"), "outs")


def test_a_call_is_timed(rank_pool: Pools) -> None:
    rank_pool(2).run(called, page("Time a call"), "ms")
