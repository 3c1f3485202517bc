# SPDX-License-Identifier: Apache-2.0
"""How many connections to the server of a store the groups of a process make."""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import ringattn
import torch
import torch.distributed as dist
from _distributed import RankPool, this
from ringattn import Partition


def connections_to(port: int) -> int:
    """How many sockets of this process are connected to a port of this host."""
    remote = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with open(table) as lines:
            for fields in (line.split() for line in list(lines)[1:]):
                if int(fields[2].rpartition(":")[2], 16) == port:
                    remote.add(f"socket:[{fields[9]}]")
    found = set()
    for file in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed since
            found.add(os.readlink(f"/proc/self/fd/{file}"))
    return len(remote & found)


def store_connections_of_groups(num_groups: int) -> list[int]:
    """Connections to the server of the store: before any call, and after each new group's first."""
    store, size = this().store, this().world_size
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    x = torch.zeros(1, 4, 1, 8)
    counts = [connections_to(store.port)]
    groups = []
    for _ in range(num_groups):
        group = dist.new_group(list(range(size)))
        groups.append(group)
        ringattn.ring_attention(x, x, x, Partition.even(4 * size, size), group=group)
        with ThreadPoolExecutor(1) as thread:  # threads share it
            thread.submit(ringattn.synchronize, group).result()
        counts.append(connections_to(store.port))
    for group in groups:
        dist.destroy_process_group(group)
    return counts


def test_groups_over_one_store_share_one_connection_to_it():
    """c10d looks up a name for each connection, which takes seconds without reverse DNS."""
    with RankPool(2) as pool:
        for counts in pool.run(store_connections_of_groups, 3):
            assert counts[0] >= 1
            assert max(counts) <= counts[0] + 1
