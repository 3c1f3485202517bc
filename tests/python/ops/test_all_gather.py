# SPDX-License-Identifier: Apache-2.0
"""The operator that gathers small tensors, and the facts that ranks agree on with it."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from ringattn import Partition
from ringattn._distributed.collectives import all_gather, gather_objects
from ringattn._distributed.errors import call, report_to_peers
from ringattn._distributed.groups import resolve_group

Pools = Callable[..., RankPool]


def gathers() -> None:
    ring, device = resolve_group(None), this().device
    for dtype in (torch.int64, torch.bool, torch.bfloat16, torch.float32):
        for shape in ((), (3,), (2, 0), (2, 3)):
            given = [torch.full(shape, rank + 1, device=device) for rank in range(ring.world_size)]
            whole = torch.stack(given).to(dtype)
            assert torch.equal(all_gather(ring, "test", whole[ring.rank]), whole)
    columns = torch.arange(6, device=device).view(2, 3).t()
    assert torch.equal(all_gather(ring, "test", columns)[-1], columns)


@pytest.mark.nccl
def test_every_rank_has_the_tensors_of_all(ring: RankPool) -> None:
    ring.run(gathers)


def differ(what: str) -> list[str]:
    ring, x = resolve_group(None), torch.zeros(2, dtype=torch.int64)
    first = this().rank == 0
    calls = {
        "facts": lambda mine: all_gather(ring, "test", x, f"one=1\ntwo={2 if mine else 3}\n"),
        "operations": lambda mine: all_gather(ring, "test" if mine else "another", x),
        "shapes": lambda mine: all_gather(ring, "test", x if mine else x[:1]),
        "a ring": lambda mine: all_gather(ring, "test", x) if mine else ringing(),
        "objects": lambda mine: all_gather(ring, "test", x) if mine else _objects(ring),
        "a ring beside objects": lambda mine: ringing() if mine else _objects(ring),
        "a refusal": lambda mine: all_gather(ring, "test", x) if mine else _refuse(ring),
        "a refusal beside objects": lambda mine: _objects(ring) if mine else _refuse(ring),
    }
    errors = []
    for known in (False, True):
        if known and "refusal" not in what:
            for mine in (True, False):
                calls[what](mine)
        with pytest.raises(ValueError, match=r".") as error:
            calls[what](first)
        errors.append(str(error.value))
        assert all_gather(ring, "test", x).shape == (2, 2)
        assert gather_objects(ring, "objects", this().rank) == [0, 1]
    return errors


def ringing() -> Any:
    q = torch.zeros(1, 2, 2, 8)
    return ringattn.ring_attention(q, q, q, Partition.even(4, 2))


def _objects(ring: Any) -> Any:
    return gather_objects(ring, "objects", 1)


def _refuse(ring: Any) -> None:
    error = ValueError("x must be y, got z")
    report_to_peers(ring, error)
    raise error


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("facts", "ranks must agree on two, got 2 on rank 0 and 3 on rank 1"),
        ("operations", "ranks must agree on operator, got test on rank 0 and another on rank 1"),
        ("shapes", "ranks must agree on shape, got [2] on rank 0 and [1] on rank 1"),
        ("a ring", "ranks must agree on operator, got test on rank 0 and ring_forward on rank 1"),
        ("objects", "ranks must agree on operator, got test on rank 0 and objects on rank 1"),
        (
            "a ring beside objects",
            "ranks must agree on operator, got ring_forward on rank 0 and objects on rank 1",
        ),
        ("a refusal", "rank 1: x must be y, got z"),
        ("a refusal beside objects", "rank 1: x must be y, got z"),
    ],
)
def test_ranks_that_differ_all_get_an_error_and_the_group_works_on(
    rank_pool: Pools, what: str, message: str
) -> None:
    first, second = rank_pool(2).outcomes(differ, what)
    assert first.ok and second.ok, (first.traceback, second.traceback)
    assert set(first.value) == {message}
    assert set(second.value) == {message.removeprefix("rank 1: ")}


def checks() -> None:
    name = dist.group.WORLD.group_name
    torch.library.opcheck(torch.ops.ringattn.all_gather, (torch.arange(3), "test", "one=1\n", name))
    with pytest.raises(ValueError, match="facts must end with a newline, got one=1"):
        all_gather(resolve_group(None), "test", torch.arange(3), "one=1")


def test_opcheck(rank_pool: Pools) -> None:
    rank_pool(2).run(checks)


def fail_in_an_operator() -> None:
    ring = resolve_group(None)

    def operator() -> None:
        raise RuntimeError("out of memory")  # C++ has told the peers why

    with pytest.raises(RuntimeError, match="out of memory") as error:
        call(operator)
    with mock.patch("ringattn._C.refuse_call") as refuse:
        report_to_peers(ring, error.value)
        assert not refuse.called
        report_to_peers(ring, RuntimeError("of this rank alone"))
        assert refuse.called


def test_an_error_that_an_operator_has_reported_is_not_reported_again(rank_pool: Pools) -> None:
    rank_pool(2).run(fail_in_an_operator)
