# SPDX-License-Identifier: Apache-2.0
"""A rank that waits for another one says so, can be interrupted, and leaves the group's timeout
alone."""

import functools
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import AT_ONCE_S, RankPool, this
from _rings import Case, ring_call
from _waiting import eventually, has_ended
from ringattn import Partition
from ringattn.cache import ShardedKVCache

REPORT_S = 0.3


def even(world_size: int, rows: int = 6) -> Case:
    return Case(Partition.even(rows * world_size, world_size))


@contextmanager
def stderr_of_this_process(path: Path) -> Iterator[Callable[[], str]]:
    """Everything that is written to stderr, from C++ too."""
    before = os.dup(2)
    with path.open("w+") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield lambda: path.read_text()
        finally:
            os.dup2(before, 2)
            os.close(before)


def until(count: int, lines: Callable[[], list[str]]) -> list[str]:
    """The lines, once there are so many: a thread writes them."""
    eventually(lambda: len(lines()) >= count)
    return lines()


def calls() -> dict[str, Callable[[], object]]:
    size, rank = this().world_size, this().rank
    case = even(size)
    q, k, v = case.local_inputs()
    cost = ringattn.ModelCost.attention_only(num_heads=2, head_dim=8)
    rebalancer = ringattn.Rebalancer([ringattn.RankProfile(1.0, 1.0)] * size, cost)
    cache = ShardedKVCache(
        *([0, 2 * size] + [0] * (size - 2), rank),
        targets=[2] * size,
    )
    held = torch.zeros(1, cache.lengths[rank], 2, 8, device=this().device)
    cache.store(0, held, held)
    return {
        "ring": lambda: ring_call(case),
        "new ring": lambda: ring_call(replace(case, scale=0.3)),
        "decode": lambda: ringattn.decode_attention(q, k, v),
        "rotate": lambda: ringattn.rotate_kv(torch.stack([k, v]), case.partition).wait(),
        "gather": lambda: case.partition.gather(q),
        "observe": lambda: rebalancer.observe(ringattn.Timings()),
        "rebalance": lambda: cache.rebalance(dist.group.WORLD),
    }


CALLS = ["ring", "new ring", "decode", "rotate", "gather", "observe", "rebalance"]


# ---- Ctrl-C ------------------------------------------------------------------------------------


def interrupted(path: Path, name: str) -> tuple[float, str]:
    """Rank 0 waits for the others, which are late, and is interrupted once it has said that it
    waits: seconds until it has the exception, and the error of its next call. The others: seconds
    until their error, and the error."""
    call, ring = calls()[name], calls()["ring"]
    ring()
    if name in ("decode", "rotate", "gather"):
        call()
    if this().rank != 0:
        this().store.wait(["interrupted"])
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as reported:
            for later in (call, ring, ring):  # what rank 0 sent before may complete the first
                later()
        return time.monotonic() - start, str(reported.value)
    sent = []

    def press_ctrl_c() -> None:
        until(1, lambda: said().splitlines())
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with stderr_of_this_process(path / name) as said:
        threading.Thread(target=press_ctrl_c).start()
        with pytest.raises(KeyboardInterrupt):
            call()
    seconds = time.monotonic() - sent[0]
    this().store.set("interrupted", "")
    with pytest.raises(dist.DistBackendError) as refused:
        call()
    return seconds, str(refused.value)


@pytest.mark.parametrize("name", CALLS)
def test_ctrl_c_ends_a_wait_on_the_cpu_and_reaches_the_peers(name, tmp_path):
    with RankPool(2, environment={"RINGATTN_WAIT_REPORT_S": str(REPORT_S)}) as ring:
        (interrupt_s, own), (reported_s, reported) = ring.run(interrupted, tmp_path, name)
    assert interrupt_s < AT_ONCE_S
    assert re.match(r"rank 0 was interrupted in step \d of \w+; the group cannot be used", own)
    assert reported.strip() == own.strip() and reported_s < AT_ONCE_S


# ---- lines about waits and about what runs -----------------------------------------------------


def late_call(path: Path, name: str, logged: bool) -> list[str]:
    """What a rank says while rank 1 is late for a call, until rank 0 has said it twice: on stderr,
    or to a handler of the user's while stderr gets nothing."""
    call = calls()[name]
    if name in ("ring", "rotate"):
        call()
        # A rank may wait for a slow one in its next call, for what this one sends it.
        this().store.set(f"{name} {logged} {this().rank}", "")
        this().store.wait([f"{name} {logged} {rank}" for rank in range(2)])
    if name == "new ring":
        call = functools.partial(ring_call, replace(even(this().world_size), scale=0.4 + logged))
    lines: list[str] = []
    key = f"{name} {logged}"

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(f"{record.levelname} {record.getMessage()}")

    def tell() -> None:
        until(2, lambda: lines if logged else said().splitlines())
        this().store.set(key, "")

    handler = Lines()
    if logged:
        logging.getLogger().addHandler(handler)
    with stderr_of_this_process(path / f"{name}{logged}{this().rank}") as said:
        if this().rank == 1:
            this().store.wait([key])
        else:
            threading.Thread(target=tell).start()
        call()
        this().store.wait([key])
        written = said().splitlines()
    logging.getLogger().removeHandler(handler)
    assert not (logged and written), written
    return lines if logged else written


@pytest.mark.parametrize("logged", [False, True], ids=["stderr", "logger"])
@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("ring", "step 1 of ring_forward"),
        ("new ring", "step 0 of ring_forward"),
        ("rotate", "step 1 of rotate_kv"),
        ("observe", "step 0 of observe"),
        ("rebalance", "step 0 of rebalance"),
    ],
)
def test_a_rank_that_waits_says_so_once_then_after_six_times_as_long(
    name, place, logged, reporting_ring, tmp_path
):
    waiting, late = reporting_ring.run(late_call, tmp_path, name, logged)
    prefix = "WARNING " if logged else "ringattn: "
    assert len(waiting) >= 2, waiting  # more where rank 1 learns of the second line late
    for number, line in enumerate(waiting):
        said = re.fullmatch(rf"{prefix}rank 0 has waited (\d+\.\d) s for rank 1 in {place}", line)
        assert said, line
        assert float(said[1]) >= (6 * number or 1) * REPORT_S - 0.05
    assert late == []


@pytest.fixture(scope="module")
def reporting_ring() -> Iterator[RankPool]:
    environment = {"RINGATTN_WAIT_REPORT_S": str(REPORT_S)}
    with RankPool(2, environment=environment) as ring:
        yield ring


def transports_of_calls(path: Path) -> tuple[list[str | None], list[str]]:
    group = dist.new_group(list(range(this().world_size)))
    case = even(this().world_size)
    q, k, v = case.local_inputs()
    taken = [ringattn.last_transport(group)]
    with stderr_of_this_process(path / f"info{this().rank}") as said:
        ringattn.ring_attention(q, k, v, case.partition, group=group)
        taken.append(ringattn.last_transport(group))
        written = until(2, lambda: said().splitlines())
    taken.append(ringattn.last_transport(dist.new_group([0])) if this().rank == 0 else None)
    return taken, written


def test_the_log_and_last_transport_say_which_way_a_call_went(tmp_path):
    with RankPool(2, environment={"RINGATTN_LOG": "info"}) as ring:
        for rank, (taken, written) in enumerate(ring.run(transports_of_calls, tmp_path)):
            assert taken == [None, "process_group", None]
            assert written == [
                f"ringattn: rank {rank} of 2: ring formed over transport process_group "
                "(chosen for device cpu)",
                "ringattn: attention kernels: cpu",
            ]


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("RINGATTN_LOG", "loud", "info or warning"),
        ("RINGATTN_WAIT_REPORT_S", "soon", "a positive number of seconds"),
        ("RINGATTN_WAIT_REPORT_S", "-1", "a positive number of seconds"),
    ],
)
def test_variables_that_mean_nothing_are_refused(variable, value, rule, set_variable):
    set_variable(variable, value)
    x = torch.zeros(1, 4, 1, 8)
    with pytest.raises(ValueError, match=f"{variable} must be {rule}, got {value}"):
        ringattn.ring_attention(x, x, x)


def test_last_transport_of_a_process_by_itself_is_none():
    assert ringattn.last_transport() is None


# ---- known calls that differ -------------------------------------------------------------------


def two_known_calls(about: str) -> tuple[str, float]:
    """The error of a rank when the last rank makes another call than the rest, both known to all;
    then the ranks make the same call again."""
    size, rank = this().world_size, this().rank
    case = even(size, rows=12)
    q, k, v = case.local_inputs()
    kv = torch.stack([k, v])
    ring = lambda **options: ringattn.ring_attention(q, k, v, case.partition, **options)  # noqa: E731
    one, other = {
        "causal": (ring, lambda: ring(causal=False)),
        "scale": (ring, lambda: ring(scale=0.5)),
        "lengths": (ring, lambda: ring_call(even(size, rows=20))),
        "operator": (
            lambda: ringattn.rotate_kv(kv, case.partition).wait(),
            lambda: ringattn.decode_attention(q, k, v),
        ),
    }[about]
    for known in (one, other):
        known()
    start = time.monotonic()
    said = "no error"
    try:
        (other if rank == size - 1 else one)()
    except ValueError as error:
        said = str(error)
    seconds = time.monotonic() - start
    expected, _ = ringattn.ring_attention(q, k, v, case.partition, return_lse=True)
    assert torch.equal(ring(), expected)
    return said, seconds


@pytest.mark.parametrize("about", ["causal", "scale", "lengths", "operator"])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_ranks_that_make_different_known_calls_get_an_error_at_once(world_size, about, own_pool):
    said = own_pool(world_size).run(two_known_calls, about)
    last = world_size - 1
    for rank, (sentence, seconds) in enumerate(said):
        if about == "operator" and world_size == 4 and rank == 1:
            # It has what it needs from rank 0, and rank 2 what it needs from it.
            assert sentence == "no error"
            continue
        subject = rf"(partition\.)?{about}, got .* on rank \d and .* on rank {last}"
        assert re.fullmatch(f"ranks must agree on {subject}", sentence), sentence
        assert seconds < AT_ONCE_S
    if world_size == 2:
        assert said[0][0] == said[1][0]


# ---- the end of a group ------------------------------------------------------------------------


def the_owner_of_the_store_dies(path: Path, warm: bool) -> tuple[str, str]:
    rank, size = this().rank, this().world_size
    dist.destroy_process_group()
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        this().store.set("port", str(store.port))
    else:
        port = int(this().store.get("port"))
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    case = even(size)
    ring_call(case if warm else even(size, rows=9))
    this().store.set(f"process of {rank}", str(os.getpid()))
    dist.barrier()
    if rank == 0:
        os._exit(1)
    owner = int(this().store.get("process of 0"))
    assert eventually(lambda: has_ended(owner))
    with stderr_of_this_process(path / f"owner{rank}") as said:
        with pytest.raises(dist.DistBackendError) as error:
            ring_call(case)
        with pytest.raises(dist.DistBackendError):
            ring_call(case)
        return str(error.value).strip(), said()


@pytest.mark.parametrize("warm", [False, True], ids=["new signature", "repeated signature"])
def test_when_the_owner_of_the_store_dies_there_is_one_sentence_and_nothing_else(warm, tmp_path):
    with RankPool(3) as ring:
        outcomes = ring.outcomes(the_owner_of_the_store_dies, tmp_path, warm)
    for outcome in outcomes[1:]:
        assert outcome.ok, outcome
        sentence, written = outcome.value
        assert re.fullmatch(
            r"rank 0 closed its connection in step \d of [\w ]+; the group cannot be used any more",
            sentence,
        )
        assert written == ""
        assert outcome.seconds < AT_ONCE_S


def timeouts_while_waiting(name: str) -> set[float]:
    """The group's timeout, looked at while rank 0 waits."""
    call = calls()[name]
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if this().rank == 1:
        time.sleep(1.0)
    seen, over = {backend.options._timeout.total_seconds()}, threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            seen.add(backend.options._timeout.total_seconds())

    looking = threading.Thread(target=look)
    looking.start()
    call()
    over.set()
    looking.join()
    return seen


@pytest.mark.parametrize("name", ["gather", "observe", "rebalance"])
def test_the_callers_group_keeps_its_timeout(name, own_pool):
    seen = own_pool(2).run(timeouts_while_waiting, name)
    assert seen[0] == seen[1] and len(seen[0]) == 1


def abandoned_messages(num_calls: int) -> int:
    """Calls that rank 1 refuses leave messages behind; the group goes on for as long as it is
    asked to, and so do collectives of torch.distributed's own."""
    case = even(this().world_size)
    q, k, v = case.local_inputs()
    expected = ringattn.ring_attention(q, k, v, case.partition)
    right = 0
    for _ in range(num_calls):
        with pytest.raises(ValueError, match="q must be"):
            ringattn.ring_attention(q[0] if this().rank == 1 else q, k, v, case.partition)
        right += torch.equal(ringattn.ring_attention(q, k, v, case.partition), expected)
        total = torch.ones(1)
        dist.all_reduce(total)
        right += int(total) == this().world_size
    return right


def test_a_group_works_on_after_many_refused_calls(own_pool):
    assert own_pool(3).run(abandoned_messages, 10) == [20, 20, 20]


def rotations_that_each_rank_refuses_once() -> str:
    """A stale message of a refused call meets no later one, in either direction."""
    size, rank = this().world_size, this().rank
    partition = Partition.even(4 * size, size)
    kv = torch.full((2, 1, 4, 2, 8), float(rank))
    ringattn.rotate_kv(kv, partition).wait()
    for culprit in range(size):
        with pytest.raises(ValueError, match="kv must"):
            ringattn.rotate_kv(kv[:, 0] if rank == culprit else kv, partition).wait()
        received = ringattn.rotate_kv(kv + culprit, partition).wait()
        assert torch.equal(received, kv - rank + (rank - 1) % size + culprit)
    return "right"


def test_messages_of_a_refused_call_are_not_taken_for_later_ones(own_pool):
    # In a ring of two, every rank waits for the one that refuses.
    assert own_pool(2).run(rotations_that_each_rank_refuses_once) == ["right", "right"]
