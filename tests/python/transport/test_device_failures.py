# SPDX-License-Identifier: Apache-2.0
"""A peer that dies or is late while the host has moved on: on CUDA a call returns before its data
has come. The waits are released, the results are NaN, and the next call or synchronize() raises."""

import itertools
import os
import re
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import AT_ONCE_S, RankPool, this
from _gpus import WORLD_SIZES
from _memory import PAGE, grows_each_time, in_use
from _rings import Case, ring_call
from ringattn import Partition

pytestmark = pytest.mark.multi_gpu

#: Of groups in which a rank is lost. Errors that do not wait for it have another text: there it is
#: AT_ONCE_S.
TIMEOUT_S = 4.0
GRACE_S = 6.0
TRANSPORTS = ["nccl", "symmetric"]  # those that are watched here; the group watches its own


def even(transport: str) -> Case:
    partition = Partition.even(64 * this().world_size, this().world_size)
    return Case(partition, dtype=torch.bfloat16, transport=transport)


def warm_up(case: Case) -> None:
    """A call in another group, with c10d's own timeout: what a process does once, such as loading
    NCCL's kernels, takes longer than TIMEOUT_S where other processes use the GPUs and the host."""
    where = {"group": dist.new_group(), "transport": case.transport}
    ringattn.ring_attention(*case.local_inputs(), case.partition, **where)
    torch.cuda.synchronize()


def assert_names(message: str, rank: int) -> None:
    assert re.search(rf"\brank {rank}\b", message), message
    assert re.search(r"\bstep \d", message), message


#: What all ranks do together, and what each gets of it.
Call = Callable[[Case], tuple[torch.Tensor, ...]]


def attend(case: Case) -> tuple[torch.Tensor, ...]:
    """A kernel of this rank's fetches, on Hopper."""
    return ring_call(case)


def attend_portably(case: Case) -> tuple[torch.Tensor, ...]:
    """Copy engines fetch, on every GPU: no kernel of its own is for float32."""
    return ring_call(replace(case, dtype=torch.float32))


def rotate(case: Case, times: int = 1) -> tuple[torch.Tensor, ...]:
    """A kernel of this rank's fetches, on every GPU."""
    _, k, v = case.local_inputs()
    kv = torch.stack([k, v]).repeat(1, 1, 1, 1, times)
    return (ringattn.rotate_kv(kv, case.partition, transport=case.transport).wait(),)


def rotate_much(case: Case) -> tuple[torch.Tensor, ...]:
    """Copy engines fetch 20 MB."""
    return rotate(case, 300)


def decode(case: Case) -> tuple[torch.Tensor, ...]:
    """Kernels of all ranks exchange what they have."""
    q, k, v = case.local_inputs()
    return ringattn.decode_attention(q[:, : q.size(1) // 32], k, v, return_lse=True)


def lose_a_rank(absent: int, die: bool, transport: str, call: Call) -> dict[str, object]:
    """A warm ring in which one rank does not come to the second call."""
    case = even(transport)
    warm_up(case)
    call(case)
    torch.cuda.synchronize()
    if this().rank == absent:
        if die:
            os._exit(1)
        time.sleep(2 * TIMEOUT_S)
        return {}
    start = time.monotonic()
    results = call(case)
    returned_s = time.monotonic() - start
    with pytest.raises(dist.DistBackendError) as at_synchronize:
        ringattn.synchronize()
    named_s = time.monotonic() - start
    torch.cuda.synchronize()  # the streams run on, and the context has survived
    with pytest.raises(dist.DistBackendError) as at_next_call:
        call(case)
    return {
        "returned_s": returned_s,
        "named_s": named_s,
        "messages": [str(at_synchronize.value), str(at_next_call.value)],
        "nan": all(bool(x.isnan().all()) for x in results),
        "context": float(torch.ones(8, device=this().device).sum()),
    }


@pytest.mark.parametrize("die", [True, False], ids=["dead", "late"])
@pytest.mark.parametrize(
    ("call", "transport"),
    [
        *itertools.product((attend, attend_portably, rotate, rotate_much), TRANSPORTS),
        (decode, "symmetric"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_lost_rank_is_named_and_its_results_are_nan(die, call, transport):
    absent = 1
    with RankPool(2, "cuda", timeout_s=TIMEOUT_S) as ring:
        outcomes = ring.outcomes(lose_a_rank, absent, die, transport, call)
        for outcome in outcomes:
            if outcome.rank == absent:
                continue
            assert outcome.ok, outcome.traceback
            value = outcome.value
            assert value["returned_s"] < TIMEOUT_S / 2  # the host is not held up
            assert value["named_s"] < TIMEOUT_S + GRACE_S
            for message in value["messages"]:
                assert_names(message, absent)
            assert value["nan"]
            assert value["context"] == 8.0


def lose_a_rank_and_launch_what_is_new(absent: int) -> dict[str, object]:
    """The survivor's own kernels wait on the device, and meanwhile its host launches kernels that
    have never been loaded: the driver may block until the running kernels have ended."""
    case = even("symmetric")
    warm_up(case)
    ring_call(case)
    torch.cuda.synchronize()
    if this().rank == absent:
        os._exit(1)
    q, k, v = (x.to(this().device) for x in case.local_inputs())
    x = torch.rand(64, device=this().device)
    start = time.monotonic()
    out = ringattn.ring_attention(q, k, v, case.partition, transport="symmetric")
    for new in (
        torch.special.bessel_y1,
        torch.special.airy_ai,
        torch.special.scaled_modified_bessel_k1,
    ):
        new(x)
    with pytest.raises(dist.DistBackendError) as at_synchronize:
        ringattn.synchronize()
    named_s = time.monotonic() - start
    torch.cuda.synchronize()
    return {
        "named_s": named_s,
        "message": str(at_synchronize.value),
        "nan": bool(out.isnan().all()),
    }


def test_a_lost_rank_is_named_while_new_kernels_are_launched():
    absent = 1
    with RankPool(2, "cuda", timeout_s=TIMEOUT_S) as ring:
        outcomes = ring.outcomes(lose_a_rank_and_launch_what_is_new, absent)
        assert outcomes[0].ok, outcomes[0].traceback
        assert outcomes[0].value["named_s"] < TIMEOUT_S + GRACE_S
        assert_names(outcomes[0].value["message"], absent)
        assert outcomes[0].value["nan"]


def make_another_call(lonely: int, usual_call: Call, lonely_call: Call) -> dict[str, object]:
    """Calls that all ranks know are not compared any more, and one rank makes another one of them
    than the others do."""
    usual, longer = (
        Case(
            Partition.even(rows * this().world_size, this().world_size),
            torch.bfloat16,
            transport="symmetric",
        )
        for rows in (64, 96)
    )
    usual_call(usual)
    lonely_call(longer)
    ringattn.synchronize()
    results = lonely_call(longer) if this().rank == lonely else usual_call(usual)
    with pytest.raises(dist.DistBackendError) as at_synchronize:
        ringattn.synchronize()
    with pytest.raises(dist.DistBackendError) as at_next_call:
        usual_call(usual)
    return {
        "messages": [str(at_synchronize.value), str(at_next_call.value)],
        "nan": all(bool(x.isnan().all()) for x in results),
    }


@pytest.mark.parametrize(
    "calls",
    [
        pytest.param((attend, attend), marks=pytest.mark.hopper),
        (attend_portably, attend_portably),
        (rotate, rotate),
        (rotate, attend_portably),
        (attend, rotate),
        (rotate, attend),
        (rotate_much, rotate_much),
        (rotate_much, attend_portably),
        (rotate, rotate_much),
        (rotate_much, rotate),
        (decode, decode),
        (decode, rotate),
        (rotate, decode),
        (decode, attend_portably),
    ],
    ids=lambda calls: "-".join(call.__name__ for call in calls),
)
@pytest.mark.parametrize("world_size", WORLD_SIZES[:2])
def test_ranks_in_different_calls_get_an_error(world_size, calls):
    lonely = world_size - 1
    with RankPool(world_size, "cuda", timeout_s=AT_ONCE_S) as pool:
        for outcome in pool.outcomes(make_another_call, lonely, *calls):
            assert outcome.ok, outcome.traceback
            value = outcome.value
            other = lonely if outcome.rank != lonely else r"\d"
            # Ranks in a ring wait for those in an exchange, which notice it and tell them.
            either = decode in calls and calls != (decode, decode)
            other, itself = (r"\d", r"\d") if either else (other, outcome.rank)
            expected = (
                rf"ranks must make the same calls in the same order, (got another one on rank "
                rf"{other} than on rank {itself}|and rank \d has seen one in another call); "
                r"the group cannot be used any more"
            )
            for message in value["messages"]:
                assert re.search(expected, message), message
            assert value["nan"]


def make_a_call_that_is_new(lonely: int, transport: str, calls_ahead: int) -> str:
    """One rank's keys require grad, which is new to it alone: it waits for words of the others,
    which have launched a call that they know, and more."""
    case = even(transport)
    q, k, v = (x.to(this().device) for x in case.local_inputs())

    def call() -> torch.Tensor:
        return ringattn.ring_attention(q, k, v, case.partition, transport=transport)

    call()
    ringattn.synchronize()
    k.requires_grad_(this().rank == lonely)
    with pytest.raises(dist.DistBackendError) as refusal:
        for _ in range(1 + calls_ahead):
            call()
        ringattn.synchronize()
    return str(refusal.value)


@pytest.mark.parametrize("calls_ahead", [0, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_call_that_is_new_to_one_rank_alone_ends_the_group(transport, calls_ahead):
    said = "ranks must agree on inputs that require grad, got none on rank 0 and k on rank 1"
    with RankPool(2, "cuda", timeout_s=AT_ONCE_S) as pool:
        for message in pool.run(make_a_call_that_is_new, 1, transport, calls_ahead):
            assert said in message and "timeout" not in message


def refuse_while_others_replay(captures_decode: bool) -> str:
    """Rank 1 refuses an eager call where the others replay a graph; what they are told."""
    case = even("symmetric")
    q, k, v = (x.to(this().device) for x in case.local_inputs())

    def call() -> torch.Tensor:
        if captures_decode:
            return ringattn.decode_attention(q[:, :1], k, v)
        return ringattn.ring_attention(q, k, v, case.partition, transport="symmetric")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    torch.cuda.synchronize()
    ringattn.synchronize()
    if this().rank == 1:
        with pytest.raises(ValueError, match="causal must be"):
            ringattn.ring_attention(q, k, v, case.partition, causal="yes")
        this().store.wait(["told"])  # this rank lives: it is not lost
        return ""
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(dist.DistBackendError) as raised:
        ringattn.synchronize()
    this().store.set("told", "")
    return str(raised.value)


@pytest.mark.parametrize("captures_decode", [False, True], ids=["ring", "decode"])
def test_ranks_that_replay_a_graph_learn_at_once_that_a_peer_refuses_its_call(captures_decode):
    with RankPool(2, "cuda", timeout_s=AT_ONCE_S) as pool:
        message, _ = pool.run(refuse_while_others_replay, captures_decode)
    assert "rank 1 refused a call while other ranks replay a CUDA graph: causal must be" in message


def agree_and_die(victim: int, has_met: bool) -> dict[str, object]:
    """Rank ``victim`` dies between the agreement on a call and the communicator that is made for
    it: it agrees in the others' words, and goes while they wait for its part of the exchange before
    the communicator, or with ``has_met``, in the communicator."""
    case = even("nccl")
    if this().rank == victim:
        store = dist.distributed_c10d._get_process_group_store(dist.group.WORLD)
        key = "ringattn/1/call/0/{}"
        store.wait([key.format(0)])
        store.set(key.format(victim), store.get(key.format(0)))
        store.wait(["ringattn/1/exchange/0/0"])  # rank 0's identifier; a part of its own, too
        if has_met:
            store.set(f"ringattn/1/exchange/0/{victim}", "")
        os._exit(1)
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as raised:
        ring_call(case)
    named_s = time.monotonic() - start
    q, k, v = (x.to(this().device) for x in case.local_inputs())
    ringattn.block_attention(q, k, v)  # without the group the device works on
    torch.cuda.synchronize()
    return {"named_s": named_s, "message": str(raised.value)}


@pytest.mark.nccl
@pytest.mark.parametrize("has_met", [False, True])
def test_a_rank_that_dies_before_the_communicator_is_there_is_named(has_met):
    victim = 1
    with RankPool(2, "cuda", timeout_s=TIMEOUT_S) as ring:
        outcomes = ring.outcomes(agree_and_die, victim, has_met)
        assert outcomes[victim].died
        assert outcomes[0].ok, outcomes[0].traceback
        assert outcomes[0].value["named_s"] < TIMEOUT_S + GRACE_S
        assert_names(outcomes[0].value["message"], victim)


def make_and_destroy(times: int, transport: str) -> list[int]:
    """Bytes in use after each of many groups has come and gone."""
    case = even(transport)
    q, k, v = (x.to(this().device) for x in case.local_inputs())
    used = []
    for _ in range(times):
        group = dist.new_group(list(range(this().world_size)))
        ringattn.ring_attention(q, k, v, case.partition, group=group, transport=transport)
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
        del group
        deadline = time.monotonic() + 3.0  # what a group owned is freed within moments
        while used and in_use() - used[-1] >= PAGE and time.monotonic() < deadline:
            time.sleep(0.1)
        used.append(in_use())
    return used


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_what_a_group_owns_dies_with_it(rank_pool, transport):
    for used in rank_pool(2, "cuda").run(make_and_destroy, 8, transport):
        assert not grows_each_time(used), used


def two_rings_at_once(num_calls: int, transport: str) -> None:
    """Two groups, two streams, everything in flight at the same time."""
    groups = [dist.new_group(list(range(this().world_size))) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in groups]
    partition = Partition.even(2048 * this().world_size, this().world_size)
    case = Case(partition, dtype=torch.bfloat16)
    q, k, v = (x.to(this().device) for x in case.local_inputs())
    expected = ringattn.ring_attention(q, k, v, partition, transport=transport)
    torch.cuda.synchronize()
    results = []
    for _ in range(num_calls):
        for group, stream in zip(groups, streams, strict=True):
            with torch.cuda.stream(stream):
                out = ringattn.ring_attention(q, k, v, partition, group=group, transport=transport)
                results.append(out)
    torch.cuda.synchronize()
    for result in results:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_rings_on_two_streams_are_correct(rank_pool, transport):
    rank_pool(2, "cuda").run(two_rings_at_once, 20, transport)


def late_host(call_delay_s: float, transport: str) -> None:
    """A rank that is slow, but within the timeout, is waited for."""
    case = even(transport)
    warm_up(case)
    ring_call(case)
    if this().rank == 0:
        time.sleep(call_delay_s)
    ring_call(case)
    ringattn.synchronize()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_slow_rank_is_waited_for(transport):
    with RankPool(2, "cuda", timeout_s=TIMEOUT_S) as ring:
        ring.run(late_host, TIMEOUT_S / 2, transport)
