# SPDX-License-Identifier: Apache-2.0
"""What several ranks do when one of them is wrong, different, late or gone: an error on every rank
that names the culprit, and never a hang."""

import os
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import AT_ONCE_S, Outcome, RankPool, this
from _rings import Case, check_ring, ring_call
from ringattn import Partition

#: Of groups in which a rank never comes. What all ranks do before ends in it on a busy machine.
TIMEOUT_S = 4.0


def even(world_size: int, rows: int = 6, **options) -> Case:
    return Case(Partition.even(rows * world_size, world_size), **options)


@pytest.fixture(params=[2, 3])
def shared_ring(request, own_pool) -> RankPool:
    """A group that goes on working after every test here that uses it."""
    return own_pool(request.param)


# ---- one rank's arguments are wrong: all ranks fail at once, and name it ----------------------


def wrong_on_one_rank(kind: str, culprit: int, seed: int) -> None:
    """A ring call, a hop or a decode in which rank ``culprit`` breaks a rule."""
    size, rank = this().world_size, this().rank
    case = even(size, rows=4 + seed)  # a signature that is new to the group
    q, k, v = case.local_inputs()
    partition: object = case.partition
    options: dict = {}
    if rank == culprit:
        if kind == "rows":
            q = q[:, :-1]
        elif kind == "heads":
            q = q[:, :, :3]
        elif kind == "dtype":
            k = k.double()
        elif kind == "meta":
            v = v.to("meta")
        elif kind == "mask":
            options["attn_mask"] = torch.ones(1)
        elif kind == "depth":
            options["depth"] = 0
        elif kind == "scale":
            options["scale"] = float("nan")
        elif kind == "transport":
            options["transport"] = "pigeon"
        elif kind == "partition":
            partition = list(case.partition.lengths)
        elif kind == "no partition":
            partition = None
        elif kind == "world size":
            partition = Partition.even(case.partition.seq_len, size + 1)
        else:
            raise AssertionError(f"{kind} must be a kind of mistake")
    ringattn.ring_attention(q, k, v, partition, **options)


MISTAKES = {
    "rows": "q must have the",
    "heads": "query heads must be a multiple",
    "dtype": "k must have the dtype of q",
    "meta": "v must be on a device with a kernel",
    "mask": "attn_mask must be left out",
    "depth": "depth must be",
    "scale": "scale must be finite",
    "transport": "transport must be",
    "partition": "partition must be a Partition, got list: pass ringattn.Partition.zigzag([",
    "no partition": "partition must say which tokens each of the ",
    "world size": "partition must have the ",
}


@pytest.mark.parametrize(("kind", "message"), MISTAKES.items(), ids=MISTAKES)
def test_a_mistake_on_one_rank_fails_every_rank_and_names_it(shared_ring, kind, message):
    culprit = shared_ring.world_size - 1
    seed = list(MISTAKES).index(kind)
    outcomes = shared_ring.outcomes(wrong_on_one_rank, kind, culprit, seed)
    for outcome in outcomes:
        assert outcome.error == "ValueError", outcome
        assert message in outcome.message
        assert outcome.seconds < AT_ONCE_S
        if outcome.rank != culprit:
            assert f"rank {culprit}" in outcome.message
    check_ring(shared_ring, even(shared_ring.world_size, rows=4 + seed))


def wrong_hop(culprit: int) -> None:
    partition = Partition.even(5 * this().world_size, this().world_size)
    rows = 4 if this().rank == culprit else 5
    ringattn.rotate_kv(torch.zeros(2, 1, rows, 2, 8), partition).wait()


def wrong_decode(culprit: int) -> None:
    q, k = torch.zeros(1, 1, 4, 24), torch.zeros(1, 3, 2, 24)
    v = torch.zeros(1, 2 if this().rank == culprit else 3, 2, 24)
    ringattn.decode_attention(q, k, v)


@pytest.mark.parametrize("function", [wrong_hop, wrong_decode])
def test_a_mistake_in_the_other_collectives_fails_every_rank_too(shared_ring, function):
    for outcome in shared_ring.outcomes(function, 0):
        assert outcome.error == "ValueError" and "must have" in outcome.message
        assert outcome.rank == 0 or "rank 0" in outcome.message
    check_ring(shared_ring, even(shared_ring.world_size))


def test_the_same_mistake_on_all_ranks_fails_all_of_them(shared_ring):
    for outcome in shared_ring.outcomes(wrong_on_all_ranks):
        assert outcome.error == "ValueError" and "scale must be finite" in outcome.message
    check_ring(shared_ring, even(shared_ring.world_size))


def wrong_on_all_ranks() -> None:
    partition = even(this().world_size).partition
    q, k, v = even(this().world_size).local_inputs()
    ringattn.ring_attention(q, k, v, partition, scale=float("inf"))


# ---- the ranks disagree: all of them get an error, and the group works on ---------------------


def disagree(about: str, rows: int = 8) -> None:
    size, rank = this().world_size, this().rank
    case = even(size, rows)
    if rank == 1:
        longer, order = [rows] * (size - 1) + [rows + 1], [1, 0, 2, 3][:size]
        case = {
            "partition.lengths": replace(case, partition=Partition.zigzag(longer)),
            "partition.order": replace(case, partition=Partition.zigzag([rows] * size, order)),
            "partition.layout": replace(case, partition=Partition.contiguous([rows] * size)),
            "dtype": replace(case, dtype=torch.bfloat16),
            "query heads": replace(case, num_heads=8),
            "key heads": replace(case, num_kv_heads=4),
            "head dimension": replace(case, head_dim=32),
            "batch size": replace(case, batch=1),
            "causal": replace(case, causal=False),
            "scale": replace(case, scale=0.5),
        }.get(about, case)
    q, k, v = case.local_inputs()
    if about == "operator" and rank == 1:
        ringattn.decode_attention(q, k, v)
        return
    ringattn.ring_attention(
        q, k, v, case.partition, causal=case.causal, scale=case.scale, depth=1 + rank
    )


SUBJECTS = [
    *("partition.lengths", "partition.order", "partition.layout", "dtype", "batch size"),
    *("query heads", "key heads", "head dimension", "causal", "scale", "operator"),
]


@pytest.mark.parametrize("about", SUBJECTS)
def test_ranks_that_disagree_all_get_an_error(shared_ring, about):
    rows = 30 + SUBJECTS.index(about)  # signatures that are new to the group
    outcomes = shared_ring.outcomes(disagree, about, rows)
    for outcome in outcomes:
        assert outcome.error == "ValueError", outcome
        assert f"ranks must agree on {about}" in outcome.message
        assert outcome.seconds < AT_ONCE_S
    assert len({outcome.message for outcome in outcomes}) == 1
    check_ring(shared_ring, even(shared_ring.world_size, rows=9))


def test_depth_is_each_ranks_own_affair(shared_ring):
    shared_ring.run(disagree, "nothing")


# ---- a rank is late or gone: an error that names it within the group's timeout ----------------


def survivors(outcomes: list[Outcome], gone: int) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.rank != gone]


def assert_named(outcomes: list[Outcome], gone: int) -> None:
    for outcome in survivors(outcomes, gone):
        assert outcome.error == "DistBackendError", outcome
        assert re.search(rf"\brank {gone}\b", outcome.message), outcome.message
        assert re.search(r"\bstep \d", outcome.message), outcome.message
        assert outcome.seconds < AT_ONCE_S, outcome


def all_but_one_call(absent: int, warm: bool) -> None:
    case = even(this().world_size)
    if warm:
        ring_call(case)
    if this().rank != absent:
        ring_call(case)


@pytest.mark.parametrize("warm", [False, True], ids=["new signature", "repeated signature"])
@pytest.mark.parametrize(("world_size", "absent"), [(2, 0), (3, 1)])
def test_a_rank_that_never_calls_is_named(world_size, absent, warm):
    with RankPool(world_size, timeout_s=TIMEOUT_S) as ring:
        outcomes = ring.outcomes(all_but_one_call, absent, warm)
        assert_named(outcomes, absent)


def one_dies(victim: int, warm: bool) -> None:
    case = even(this().world_size)
    if warm:
        ring_call(case)
    if this().rank == victim:
        os._exit(1)
    ring_call(case)


@pytest.mark.parametrize("warm", [False, True], ids=["new signature", "repeated signature"])
@pytest.mark.parametrize(("world_size", "victim"), [(2, 1), (3, 0)])
def test_a_rank_that_dies_before_a_call_is_named(world_size, victim, warm):
    with RankPool(world_size) as ring:
        outcomes = ring.outcomes(one_dies, victim, warm)
        assert outcomes[victim].died
        assert_named(outcomes, victim)


def one_dies_on_the_way(victim: int) -> None:
    case = even(this().world_size, rows=300)
    q, k, v = case.local_inputs()
    if this().rank == victim:
        threading.Timer(0.5, os._exit, [1]).start()
    for _ in range(100_000):
        ringattn.ring_attention(q, k, v, case.partition)


@pytest.mark.parametrize(("world_size", "victim"), [(2, 0), (4, 2)])
def test_a_rank_that_dies_in_the_middle_ends_every_rank_with_an_error(world_size, victim):
    with RankPool(world_size) as ring:
        outcomes = ring.outcomes(one_dies_on_the_way, victim)
        assert outcomes[victim].died
        assert_named(outcomes, victim)


def disagree_later() -> None:
    case = even(this().world_size)
    ring_call(case)
    ring_call(replace(case, causal=False) if this().rank == 1 else case)


def test_ranks_that_disagree_where_one_repeats_itself_all_get_an_error(own_pool):
    """One rank repeats a signature, which exchanges nothing; the other one compares a new one."""
    ring = own_pool(2)
    for outcome in ring.outcomes(disagree_later):
        assert outcome.error == "ValueError", outcome
        assert outcome.message == (
            "ranks must agree on causal, got True on rank 0 and False on rank 1"
        )
        assert outcome.seconds < AT_ONCE_S
    check_ring(ring, even(2, rows=9))


def fail_and_go_on(absent: int) -> str:
    """After a timeout a new group works; the old one refuses. The ranks have computed and met
    before: all of them are in time, on a busy machine too."""
    case, everyone = even(this().world_size), list(range(this().world_size))
    ring_call(case)
    old = dist.new_group(everyone, timeout=timedelta(seconds=2 * TIMEOUT_S))

    def attend(group: dist.ProcessGroup) -> None:
        ringattn.ring_attention(*case.local_inputs(), case.partition, group=group)

    attend(old)
    if this().rank == absent:
        this().store.wait(["given up"])
    else:
        for call in (attend, attend, ringattn.synchronize):
            with pytest.raises(dist.DistBackendError, match="rank"):
                call(old)
        this().store.set("given up", "")
    attend(dist.new_group(everyone))
    return "works"


def test_after_a_timeout_a_new_group_works():
    with RankPool(2) as ring:
        assert ring.run(fail_and_go_on, 1) == ["works", "works"]


def absent_from(function_name: str, absent: int) -> None:
    size = this().world_size
    if this().rank == absent:
        return
    if function_name == "rotate_kv":
        partition = Partition.even(3 * size, size)
        ringattn.rotate_kv(torch.zeros(2, 1, 3, 2, 8), partition).wait()
    else:
        x = torch.zeros(1, 3, 2, 8)
        ringattn.decode_attention(x, x, x)


@pytest.mark.parametrize("function_name", ["rotate_kv", "decode_attention"])
def test_a_rank_missing_from_the_other_collectives_is_named(function_name):
    with RankPool(3, timeout_s=TIMEOUT_S) as ring:
        outcomes = ring.outcomes(absent_from, function_name, 2)
        assert_named(outcomes, 2)


# ---- a repeated call that one rank refuses while the others are already in it ------------------


def refused_by_one(operation: str, wrong: str) -> list[str]:
    """Two warm calls, one that rank 1 alone refuses and catches, two more: what became of each."""
    case = even(this().world_size)
    q, k, v = case.local_inputs()
    step = {
        "ring": lambda x: ringattn.ring_attention(x, k, v, case.partition),
        "decode": lambda x: ringattn.decode_attention(x if x.is_sparse else x[:, :1], k, v),
        "rotate": lambda x: ringattn.rotate_kv(torch.stack((x, x)), case.partition).wait(),
        "gather": case.partition.gather,
    }[operation]
    refused = {"operator": q[:, :1, :, :7], "python": q[0], "type": q.to_sparse()}[wrong]
    right = step(q).clone()
    ends = []
    for request in range(4):
        try:
            out = step(refused if request == 1 and this().rank == 1 else q)
            ends.append("right" if torch.equal(out, right) else "WRONG")
        except (ValueError, dist.DistBackendError) as error:
            ends.append(type(error).__name__)
    return ends


@pytest.mark.parametrize("wrong", ["operator", "python", "type"])
@pytest.mark.parametrize("operation", ["ring", "decode", "rotate", "gather"])
def test_a_repeated_call_that_one_rank_refuses_fails_on_all_at_once(operation, wrong, own_pool):
    for outcome in own_pool(2).outcomes(refused_by_one, operation, wrong):
        # The group works on: its messages carry the number of their call.
        assert outcome.value == ["right", "ValueError", "right", "right"], outcome
        assert outcome.seconds < AT_ONCE_S


def ends_of(*calls: Callable[[], object]) -> list[str]:
    ends = []
    for attempt in calls:
        try:
            attempt()
            ends.append("right")
        except (ValueError, dist.DistBackendError) as error:
            ends.append(type(error).__name__)
    return ends


def refuse_after_another_call() -> list[str]:
    """Known calls, of which rank 2 makes another one; then each rank refuses one."""
    partition = Partition.contiguous([1, 1, 1, 0], [0, 1, 3, 2])
    case = Case(partition)
    q, k, v = case.local_inputs()
    token = torch.ones(2, 1, 4, 64)
    rotate = partial(lambda x: ringattn.rotate_kv(x, partition).wait(), torch.stack((k, v)))
    decode, ring = partial(ringattn.decode_attention, token, k, v), partial(ring_call, case)
    wrong = partial(ringattn.ring_attention, q, k, v, partition, softcap=-1.0)
    for warm in (rotate, rotate, decode, decode, ring, ring):
        warm()
    return ends_of(decode if this().rank == 2 else rotate, wrong, rotate, rotate, ring)


def test_a_refusal_does_not_hide_which_call_came_before(own_pool):
    for rank, outcome in enumerate(own_pool(4).outcomes(refuse_after_another_call)):
        # Rank 1 and those that it rotates with are in one call.
        first = "right" if rank == 1 else "ValueError"
        assert outcome.value == [first, "ValueError", "right", "right", "right"], outcome
        assert outcome.seconds < AT_ONCE_S


def gather_nothing_or_attend() -> list[str]:
    empty = partial(Partition.even(0, 2).gather, torch.zeros(1, 0, 4, 16))
    ring = partial(ring_call, even(2))
    for warm in (empty, empty, ring, ring):
        warm()
    return ends_of(ring if this().rank == 0 else empty, ring, empty)


def test_a_gather_of_nothing_is_noticed_beside_another_call(own_pool):
    for outcome in own_pool(2).outcomes(gather_nothing_or_attend):
        assert outcome.value == ["ValueError", "right", "right"], outcome
        assert outcome.seconds < AT_ONCE_S


def all_refuse_and_go_on() -> None:
    case = even(this().world_size)
    q, k, v = case.local_inputs()
    for _ in range(2):
        ring_call(case)
        with pytest.raises(ValueError, match="q must"):
            ringattn.ring_attention(q[0], k, v, case.partition)
    ring_call(case)


def test_a_call_that_all_ranks_refuse_costs_nothing(shared_ring):
    shared_ring.run(all_refuse_and_go_on)
