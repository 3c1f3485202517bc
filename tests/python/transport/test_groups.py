# SPDX-License-Identifier: Apache-2.0
"""Several groups: two rings at once, what a group owns, and names that are used again."""

import copy
import gc
import io
import os
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, fake_default_group, this
from _gpus import WORLD_SIZES
from _rings import Case
from ringattn import _C, Partition
from ringattn.models import LLaMA, LLaMAConfig
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore


def even(world_size: int, rows: int = 6, **options) -> Case:
    return Case(Partition.even(rows * world_size, world_size), **options)


def two_rings_interleaved(case: Case, num_calls: int) -> None:
    everyone = list(range(this().world_size))
    groups = [dist.new_group(everyone), dist.new_group(everyone)]
    q, k, v = case.local_inputs()
    kv = torch.stack([k, v])
    expected = ringattn.ring_attention(q, k, v, case.partition)
    for call in range(num_calls):
        # A hop of one group is in flight while the other's ring goes round, on turns.
        hopping, ringing = groups if call % 2 else groups[::-1]
        handle = ringattn.rotate_kv(kv, case.partition, group=hopping)
        out = ringattn.ring_attention(q, k, v, case.partition, group=ringing)
        assert torch.equal(out, expected)
        before = case.partition.order[case.partition.order.index(this().rank) - 1]
        assert handle.wait().size(2) == case.partition.lengths[before]
    for group in groups:
        dist.destroy_process_group(group)


def test_two_rings_on_two_groups_interleave(rank_pool):
    rank_pool(3).run(two_rings_interleaved, Case(Partition.zigzag([7, 12, 3], [2, 0, 1])), 10)


def ring_over_two_hosts(case: Case) -> tuple[str, str | None]:
    """What "symmetric" says where half of the ranks are told to be another host, and what "auto"
    takes."""
    q, k, v = case.local_inputs()
    expected = ringattn.ring_attention(q, k, v, case.partition)
    os.environ["RINGATTN_HOST_ID"] = str(2 * this().rank // this().world_size)
    _C.reread_environment()
    group = dist.new_group(list(range(this().world_size)))
    try:
        with pytest.raises(ValueError) as refusal:
            ringattn.ring_attention(q, k, v, case.partition, group=group, transport="symmetric")
        out = ringattn.ring_attention(q, k, v, case.partition, group=group)
        torch.testing.assert_close(out, expected)
        return str(refusal.value), ringattn.last_transport(group)
    finally:
        del os.environ["RINGATTN_HOST_ID"]
        _C.reread_environment()
        dist.destroy_process_group(group)


@pytest.mark.nccl
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_ranks_that_are_told_to_be_two_hosts_share_no_memory(rank_pool, world_size: int):
    case = even(world_size, head_dim=64)
    for refusal, transport in rank_pool(world_size, "cuda").run(ring_over_two_hosts, case):
        last_of_first_host = (world_size - 1) // 2
        assert f"rank 0: it does not share a host with rank {last_of_first_host + 1}" in refusal
        assert transport == "nccl"


def two_rings_at_once(case: Case, num_calls: int) -> None:
    everyone = list(range(this().world_size))
    groups = [dist.new_group(everyone), dist.new_group(everyone)]
    q, k, v = case.local_inputs()
    expected = ringattn.ring_attention(q, k, v, case.partition)

    def work(group: dist.ProcessGroup) -> None:
        for _ in range(num_calls):
            out = ringattn.ring_attention(q, k, v, case.partition, group=group)
            assert torch.equal(out, expected)

    with ThreadPoolExecutor(len(groups)) as threads:
        for worked in [threads.submit(work, group) for group in groups]:
            worked.result()
    for group in groups:
        dist.destroy_process_group(group)


def test_two_rings_at_once_in_two_threads(rank_pool):
    rank_pool(3).run(two_rings_at_once, Case(Partition.zigzag([7, 12, 3])), 20)


def memory_of_this_process() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def make_and_destroy_groups(num_groups: int, use: bool) -> int:
    """Bytes this process has grown by."""
    case = even(this().world_size, rows=2000, batch=1)
    q, k, v = case.local_inputs()
    start = 0
    for number in range(num_groups + 5):
        if number == 5:
            gc.collect()
            start = memory_of_this_process()
        group = dist.new_group(list(range(this().world_size)))
        if use:
            ringattn.ring_attention(q, k, v, case.partition, group=group)
        else:
            dist.all_reduce(torch.ones(1), group=group)
        dist.destroy_process_group(group)
    gc.collect()
    time.sleep(1.2)  # what belonged to the last groups is freed by a watchdog
    return memory_of_this_process() - start


def test_what_a_group_owns_is_freed_with_it(rank_pool):
    blocks = 2000 * 2 * 2 * 64 * 4  # bytes of keys and values that travel in one call
    num_groups = 25
    pool = rank_pool(2)
    alone = max(pool.run(make_and_destroy_groups, num_groups, False))
    # What is kept grows every time; the allocator, until it has its size.
    grown = []
    while not grown or (min(grown) - alone >= num_groups * blocks / 4 and len(grown) < 4):
        grown.append(max(pool.run(make_and_destroy_groups, num_groups, True)))
    assert min(grown) - alone < num_groups * blocks / 4, f"{grown} bytes in {num_groups} groups"


def names_are_reused(num_times: int) -> None:
    """Each time the group of the same name is another one, with other ranks in other places."""
    world = this().world_size
    module = ringattn.RingAttention(dist.group.WORLD)
    for number in range(num_times):
        name = dist.group.WORLD.group_name
        dist.destroy_process_group()
        rank = (this().rank + number) % world
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(f"again{number}", this().store),
            rank=rank,
            world_size=world,
        )
        assert dist.group.WORLD.group_name == name
        case = even(world, rows=5 + number)
        q, k, v = (case.partition.shard(x, rank) for x in case.inputs("cpu"))
        out = ringattn.ring_attention(q, k, v, case.partition)
        assert torch.equal(module(q, k, v, case.partition), out)
        q, k, v = case.inputs("cpu")
        expected, _ = ringattn.block_attention(q, k, v, diagonal=0)
        torch.testing.assert_close(out, case.partition.shard(expected, rank), rtol=0, atol=4e-6)


def test_a_name_that_is_used_again_means_the_new_group():
    with RankPool(3) as ring:
        ring.run(names_are_reused, 4)


def a_name_means_other_ranks() -> None:
    """What was given one group does not go on with another of the same name."""
    old = dist.new_group([0, 1, 2])
    module = ringattn.RingAttention(old)
    q, k, v, partition = ring_inputs()
    with torch.no_grad():
        module(q, k, v, partition)
    rank = this().rank
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    dist.destroy_process_group()
    for take in (lambda: ringattn.ring_attention(q, k, v, group=mesh), lambda: tiny_model(mesh)):
        with pytest.raises(ValueError, match="got a DeviceMesh whose group has been destroyed"):
            take()
    store = dist.PrefixStore("others", this().store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
    new = dist.new_group([0, 1])
    reason = "group must exist, got "
    if rank < 2:
        assert new.group_name == old.group_name
        reason = r"of ranks \[0, 1, 2\], got another one of that name, of ranks \[0, 1\]"
    with pytest.raises(ValueError, match=reason):
        module(q, k, v)
    with pytest.raises(ValueError, match="group must not have been destroyed, got "):
        ringattn.ring_attention(q, k, v, group=old)
    with pytest.raises(ValueError, match="group must not have been destroyed, got "):
        ringattn.RingAttention(old)(q, k, v)


def test_another_group_of_the_same_name_is_not_taken_for_it():
    with RankPool(3) as ring:
        ring.run(a_name_means_other_ranks)


def without_a_backend() -> None:
    group = dist.new_group(backend="cuda:gloo")
    size = this().world_size
    q, k, v = even(size).local_inputs()
    partition, kv = Partition.even(6 * size, size), torch.stack([k, v])
    message = "group must have a backend for tensors on cpu, got one that has none"
    for _ in range(2):
        for call in (
            lambda: ringattn.ring_attention(q, k, v, partition, group=group),
            lambda: ringattn.decode_attention(q[:, :1], k, v, group=group),
            lambda: ringattn.rotate_kv(kv, partition, group=group),
            lambda: partition.gather(q, group),
        ):
            with pytest.raises(ValueError, match=message):
                call()
    dist.destroy_process_group(group)


def test_a_group_that_cannot_carry_the_tensors_is_refused(rank_pool):
    rank_pool(2).run(without_a_backend)


def two_threads_use_a_group_first() -> None:
    size = this().world_size
    x = torch.zeros(1, 4, 1, 8)
    for _ in range(10):
        group = dist.new_group(list(range(size)))
        if this().rank == 0:
            begin = threading.Barrier(4)

            def use(begin=begin, group=group) -> None:
                begin.wait()
                _C.check_group(group.group_name)

            with ThreadPoolExecutor(4) as threads:
                for used in [threads.submit(use) for _ in range(4)]:
                    used.result()
        ringattn.ring_attention(x, x, x, Partition.even(4 * size, size), group=group)
        dist.destroy_process_group(group)


def test_a_group_that_several_threads_use_first_is_one(rank_pool):
    rank_pool(2).run(two_threads_use_a_group_first)


def one_rank_asks_alone() -> bool:
    group = dist.new_group(list(range(this().world_size)))
    store = dist.distributed_c10d._get_process_group_store(group)
    ringattn.synchronize(group)
    counted = store.check([f"ringattn/{this().rank}"])
    x = torch.zeros(1, 4, 1, 8)
    size = this().world_size
    ringattn.ring_attention(x, x, x, Partition.even(4 * size, size), group=group)
    assert store.check([f"ringattn/{this().rank}"])
    dist.destroy_process_group(group)
    return counted


def test_asking_alone_does_not_count_as_a_group_of_the_store(rank_pool):
    """Ranks count the groups of a store that they have used, and must have the same count."""
    assert not any(rank_pool(2).run(one_rank_asks_alone))


class StoreWithoutClones(dist.Store):
    """A store in Python has no clone()."""


@pytest.mark.parametrize(
    ("store", "refusal"),
    [
        (StoreWithoutClones, "group must have a store that can be cloned, got one"),
        # It keeps nothing; since torch 2.14 it can be cloned.
        (FakeStore, "group must have a store that can be cloned|must keep what ranks publish"),
    ],
)
def test_groups_without_messages_or_usable_stores_are_refused(
    store: type[dist.Store], refusal: str
) -> None:
    x = torch.zeros(1, 4, 1, 8)
    with (
        fake_default_group(store()),
        pytest.raises((ValueError, dist.DistBackendError), match=refusal),
    ):
        ringattn.ring_attention(x, x, x, Partition.even(8, 2))


TINY = LLaMAConfig(src_vocab_size=16, emb_dim=16, nlayers=1, nheads=2, hidden_dim=8)


def saved_and_loaded(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def a_module_is_copied(make: Callable, args: Callable) -> None:
    """Copies work on the module's group; none of them keeps it alive when it is destroyed."""
    size = this().world_size
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,))
    for group in (None, dist.group.WORLD, mesh, dist.new_group(list(range(size)))):
        module, inputs = make(group), args()
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        copies.append(saved_and_loaded(module))
        with torch.no_grad():
            for twin in copies:
                assert torch.equal(twin(*inputs), module(*inputs))
    held = weakref.ref(group)
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert held() is None
    for twin in (module, *copies):
        with pytest.raises(ValueError, match="group must exist, got '"):
            twin(*inputs)


def ring_inputs() -> tuple[torch.Tensor, ...]:
    case = even(this().world_size)
    return (*case.local_inputs(), case.partition)


def token_ids() -> tuple[torch.Tensor, Partition]:
    return torch.arange(12)[None] % 16, Partition.even(12, 2)


def tiny_model(group) -> LLaMA:
    torch.manual_seed(0)
    return LLaMA(TINY, group=group)


def test_modules_are_copied_and_keep_no_group(rank_pool):
    rank_pool(2).run(a_module_is_copied, ringattn.RingAttention, ring_inputs)
    rank_pool(2).run(a_module_is_copied, tiny_model, token_ids)


def compiled_models_follow_a_name(num_times: int) -> None:
    """The compiled module sees that the group of its name is another one, with another rank."""
    torch._dynamo.reset()
    world = this().world_size
    model = tiny_model(None)
    ids = token_ids()[0]
    with torch.no_grad():
        expected = model.alone()(ids)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for number in range(num_times):
        rank = (this().rank + number) % world
        if number > 0:
            dist.destroy_process_group()
            store = dist.PrefixStore(f"compiled{number}", this().store)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        partition = Partition.zigzag([5, 7])
        with torch.no_grad():
            for called in (model, compiled):
                logits = called(ids, partition)
                expected_here = partition.shard(expected, rank)
                torch.testing.assert_close(logits, expected_here, rtol=0, atol=1e-5)


def a_mesh_in_another_order() -> None:
    q, k, v = even(this().world_size).local_inputs()
    mesh = dist.device_mesh.DeviceMesh("cpu", [1, 0])
    partition = Partition.even(12, 2)
    out = ringattn.ring_attention(q, k, v, partition, group=mesh)
    same = ringattn.ring_attention(q, k, v, partition, group=mesh.get_group())
    assert torch.equal(out, same)


def test_meshes_have_ranks_in_any_order(rank_pool):
    rank_pool(2).run(a_mesh_in_another_order)


def a_module_is_made_while_compiling() -> None:
    q, k, v, partition = ring_inputs()
    make = torch.compile(
        lambda q: ringattn.RingAttention(dist.group.WORLD)(q, k, v, partition),
        fullgraph=True,
        backend="aot_eager",
    )
    with torch.no_grad():
        assert torch.equal(make(q), ringattn.ring_attention(q, k, v, partition))


def test_a_module_can_be_made_while_compiling(rank_pool):
    rank_pool(2).run(a_module_is_made_while_compiling)


def test_a_compiled_model_follows_the_name_of_its_group():
    with RankPool(2) as ring:
        ring.run(compiled_models_follow_a_name, 3)
