# SPDX-License-Identifier: Apache-2.0
"""Two threads on one group: the second is told so, and the call under way is not harmed."""

import threading
import time
from collections.abc import Callable

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import this
from ringattn import _C, Partition
from torch.autograd import forward_ad

BUSY = (
    "a group must be in one call at a time, got {} while {} is under way; "
    r"give each thread a group of its own \(torch.distributed.new_group\)"
)


def wait_for_all(name: str) -> None:
    store, world_size = this().store, this().world_size
    store.add(name, 1)
    while store.add(name, 0) < world_size:
        time.sleep(0.01)


def until_under_way(call: Callable[[], object]) -> None:
    """Tries ``call`` until another thread's call of the group has begun."""
    with pytest.raises(ValueError, match="while ring_forward is under way"):
        while True:
            call()


def a_second_thread_is_refused() -> None:
    size, rank = this().world_size, this().rank
    p = Partition.zigzag([5, 3, 8][:size])
    whole = [torch.randn(2, p.seq_len, 2, 16, generator=torch.Generator().manual_seed(7))] * 3
    q, k, v = (p.shard(x, rank) for x in whole)
    group = dist.new_group(list(range(size)))
    name = group.group_name
    expected = ringattn.ring_attention(q, k, v, p, group=group)
    rotated = ringattn.rotate_kv(torch.stack([k, v]), p, group=group)
    wait_for_all("first call")
    if rank == 0:
        results: list[torch.Tensor] = []
        first = threading.Thread(
            target=lambda: results.append(ringattn.ring_attention(q, k, v, p, group=group))
        )
        first.start()  # waits for the other ranks
        until_under_way(lambda: ringattn.synchronize(group))
        calls = {
            "ring_forward": lambda: ringattn.ring_attention(q, k, v, p, group=group),
            "gather": lambda: p.gather(q, group),
            "rotate_kv": lambda: ringattn.rotate_kv(torch.stack([k, v]), p, group=group),
            "wait_kv": rotated.wait,
            "decode_attention": lambda: ringattn.decode_attention(q[:, :1], k, v, group=group),
            "synchronize": lambda: ringattn.synchronize(group),
            "an exchange": lambda: ringattn._distributed.collectives.barrier(
                ringattn._distributed.groups.resolve_group(group), "exchange"
            ),
        }
        for operation, call in calls.items():
            with pytest.raises(ValueError, match=BUSY.format(operation, "ring_forward")):
                call()
        # A wrong argument is still the caller's error; the other ranks, which are in the first
        # thread's call, must not be told of it.
        with pytest.raises(ValueError, match="causal must be"):
            ringattn.ring_attention(q, k, v, p, group=group, causal="yes")
        with forward_ad.dual_level(), pytest.raises(ValueError, match="must have no tangent"):
            ringattn.ring_attention(forward_ad.make_dual(q, q), k, v, p, group=group)
        with pytest.raises(RuntimeError, match="got a refused call while ring_forward"):
            _C.refuse_call(name, "a mistake")
    wait_for_all("refused")
    if rank == 0:
        first.join()
        assert torch.equal(results[0], expected)
    else:
        assert torch.equal(ringattn.ring_attention(q, k, v, p, group=group), expected)
    rotated.wait()
    for _ in range(3):  # the group works on, and its calls have the same numbers everywhere
        assert torch.equal(ringattn.ring_attention(q, k, v, p, group=group), expected)
    assert torch.equal(p.gather(q, group), whole[0])
    dist.destroy_process_group(group)


@pytest.mark.parametrize("size", [2, 3])
def test_a_second_thread_on_a_group_is_refused_and_the_first_is_not_harmed(rank_pool, size):
    rank_pool(size).run(a_second_thread_is_refused)


def threads_that_race(num_calls: int) -> int:
    """Two threads on each rank call at the same time; how many calls were refused here. Whichever
    of the threads is first, its calls meet those of the other ranks."""
    size, rank = this().world_size, this().rank
    p = Partition.even(6 * size, size)
    q = torch.full((1, 6, 1, 8), float(rank))
    group = dist.new_group(list(range(size)))
    expected = ringattn.ring_attention(q, q, q, p, group=group)
    refused = 0
    begin = threading.Barrier(2)
    wrong: list[str] = []
    made = [0, 0]

    def work(thread: int) -> None:
        nonlocal refused
        begin.wait()
        while sum(made) < num_calls:
            with lock:
                if sum(made) >= num_calls:
                    return
                made[thread] += 1
            while True:
                try:
                    out = ringattn.ring_attention(q, q, q, p, group=group)
                except ValueError as error:
                    if "in one call at a time" not in str(error):
                        wrong.append(str(error))
                        return
                    refused += 1
                    continue
                if not torch.equal(out, expected):
                    wrong.append("numbers")
                break

    lock = threading.Lock()
    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong
    dist.destroy_process_group(group)
    return refused


def test_threads_that_try_again_get_right_numbers(rank_pool):
    assert sum(rank_pool(2).run(threads_that_race, 60)) > 0
