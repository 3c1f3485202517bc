# SPDX-License-Identifier: Apache-2.0
"""The signals of csrc/peer_sync/protocol.h as a model that is small enough to be explored whole.

Each rank makes a sequence of calls. Its threads are those of the sources: the warps of the staging
kernel that signal, those that copy, what fetches (a kernel, or a stream with copy engines), and the
watchdog of the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from _interleavings import (
    SAME_KERNEL,
    SAME_LANE,
    THREADS,
    Guard,
    Interleavings,
    Memory,
    Operation,
    Store,
    Violation,
    after,
    always,
    compute,
    put,
)

KERNEL, STREAM = "fetching", "stream"  # what fetches in a call, by its name in protocol.h
STREAMS = "streams of all ranks"
ROUND = "a round of messages"  # of which streams of all ranks fetch one after the other
STAGING = "staging"
BEING_STAGED, STAGED, RELEASED = 1, 2, 3  # values of staged
GIVEN_UP, MISMATCH = 1, 2  # values of failed
MISMATCH_TAG = 9

#: The signals, and their values at rest.
SIGNALS = {"tag": None, "staged": 0, "staged_mirror": 0, "read": 1, "read_mirror": 1}


@dataclasses.dataclass(frozen=True)
class Call:
    fetches: str = KERNEL
    tag: int = 1


class Protocol:
    """calls: of each rank. mortal: ranks of which one may die, at any point. late: ranks whose
    watchdog may give up while its peers are only slow. bug: what a rank does wrong."""

    OF_RANK = ("failed", "given_up", "given_up_copy", "tag_waited_for", "waits", "block", "bad")
    PROGRESS = ("silent", "stopped", "signalled", "copied", "staged_all", "ended", "dead")

    def __init__(
        self,
        calls: Sequence[Sequence[Call]],
        *,
        mortal: Sequence[int] = (),
        late: Sequence[int] = (),
        bug: str | None = None,
    ) -> None:
        self.calls, self.late, self.bug = calls, late, bug
        self.ranks = range(len(calls))
        #: (signal, what writes it in a peer's pad or clears it in its own, whether it clears).
        self.writers: set[tuple[str, str, bool]] = set()
        under_way = [f"under_way_{thread}" for thread in range(THREADS)]
        names = [(name, r, p) for r in self.ranks for name in SIGNALS for p in self.peers(r)]
        of_rank = (*self.OF_RANK, *self.PROGRESS, *under_way)
        names += [(name, rank, rank) for rank in self.ranks for name in of_rank]
        self._places = {name: place for place, name in enumerate(names)}
        threads: list[list[Operation]] = []
        for rank in self.ranks:
            for make in (self._signal, self._copy, self._fetch, self._watch):
                self._thread = len(threads)
                threads.append(list(make(rank)))
        self._interleavings = Interleavings(
            [SIGNALS.get(name) or 0 for name, _, _ in names],
            threads,
            [self._at("dead", rank) for rank in self.ranks],
            [self._at(name, rank) for rank in self.ranks for name in under_way],
            mortal,
            self._forget,
        )

    def peers(self, rank: int) -> list[int]:
        return [peer for peer in self.ranks if peer != rank]

    def around(self, rank: int, way: int) -> list[int]:
        """The peers in the order of a round: those that a rank's messages go to, or come from."""
        size = len(self.ranks)
        return [(rank + way * step) % size for step in range(1, size)]

    def explore(self, limit: int = 500_000) -> int:
        """The number of states; raises Violation at the first one that breaks a rule."""
        return self._interleavings.explore(self._check_end, limit)

    def walk(self, seed: int) -> int:
        """The same for one random interleaving."""
        return self._interleavings.walk(self._check_end, seed)

    def _at(self, name: str, rank: int, peer: int | None = None) -> int:
        return self._places[name, rank, rank if peer is None else peer]

    def _forget(self, memory: list[int], rank: int) -> None:
        """A rank is dead: others see its block, and what it has written in their pads."""
        for (name, owner, _), place in self._places.items():
            if owner == rank and name != "block":
                memory[place] = 0

    def _check_end(self, memory: Memory) -> None:
        alive = [rank for rank in self.ranks if not memory[self._at("dead", rank)]]
        for rank in alive:
            ended = memory[self._at("ended", rank)]
            if ended < len(self.calls[rank]):
                raise Violation(f"rank {rank} waits for ever in call {ended + 1}")
        failed = any(memory[self._at(name, r)] for name in ("given_up", "failed") for r in alive)
        if failed or len(alive) < len(self.ranks):
            return
        for (name, rank, peer), place in self._places.items():
            at_rest = SIGNALS.get(name)
            if at_rest is not None and memory[place] != at_rest:
                raise Violation(f"{name}[{peer}] of rank {rank} is left at {memory[place]}")

    # ---- operations --------------------------------------------------------------------------

    def _store(
        self,
        name: str,
        pad: int,
        value: int | Callable[[Memory], int],
        writer: str,
        *,
        of: int,
        lane: int = 0,
        order: int = 0,
        where: Guard = always,
    ) -> Operation:
        """A store to the signal of rank `of` in a pad that is not in this device's memory."""
        self.writers.add((name, writer, value == 0))
        place, issuer = self._at(name, pad, of), 10 * self._thread + lane
        rank, thread = divmod(self._thread, THREADS)
        under_way = self._at(f"under_way_{thread}", rank)

        def act(memory: list[int], stores: list[Store]) -> None:
            if where(memory):
                now = value if isinstance(value, int) else value(memory)
                stores.append((place, now, issuer, order))
                memory[under_way] += 1

        return Operation(always, act, always)

    def _clear(self, name: str, rank: int, peer: int, by: str, where: Guard = always) -> Operation:
        """In this rank's device memory."""
        self.writers.add((name, by, True))
        return put((self._at(name, rank, peer), 0), where=where)

    def _done(self, name: str, rank: int, number: int, *forget: str) -> Operation:
        forgotten = [(self._at(other, rank), 0) for other in forget]
        return put((self._at(name, rank), number), *forgotten, hidden=True)

    def _wait(
        self, name: str, rank: int, peer: int, least: int, where: Guard = always
    ) -> Operation:
        """A wait of a kernel: until the signal is there, or the host has given up."""
        place = self._at(name, rank, peer)
        failed, given_up = self._at("failed", rank), self._at("given_up", rank)

        def is_there(memory: Memory) -> bool:
            return memory[place] >= least or not where(memory)

        def act(memory: list[int], stores: list[Store]) -> None:
            if not is_there(memory) and memory[failed] == 0:
                memory[failed] = GIVEN_UP

        return Operation(lambda m: is_there(m) or m[failed] + m[given_up] > 0, act, is_there)

    def _begin(self, rank: int, number: int, act: Callable[[list[int]], None]) -> Operation:
        return compute(after((self._at("ended", rank), number - 1)).guard, act)

    # ---- the staging kernel ------------------------------------------------------------------

    def _signal(self, rank: int) -> Iterator[Operation]:
        """The warp that signals first, and the one that signals heads."""
        silent, stopped = self._at("silent", rank), self._at("stopped", rank)
        failed, copy = self._at("failed", rank), self._at("given_up_copy", rank)

        def begin(memory: list[int]) -> None:  # 2: no signals; 1: those of a mismatch
            given_up = memory[copy] != 0 or memory[failed] == GIVEN_UP
            memory[silent] = 2 if given_up else int(memory[failed] == MISMATCH)

        def signals(memory: Memory) -> bool:
            return memory[silent] < 2

        def has_copied(memory: Memory) -> bool:
            return memory[silent] < 2 and memory[stopped] == 0

        kernels = [
            (number, call, peers)
            for number, call in enumerate(self.calls[rank], 1)
            for peers in (
                [[peer] for peer in self.around(rank, -1)]
                if call.fetches == ROUND
                else [self.peers(rank)]
            )
        ]
        for place, (number, call, peers) in enumerate(kernels):
            is_last = place + 1 == len(kernels) or kernels[place + 1][0] != number

            def tag(memory: Memory, tag: int = call.tag) -> int:
                return MISMATCH_TAG if memory[silent] == 1 else tag

            yield self._begin(rank, number, begin)
            if self.bug == "staging: the next kernel begins before read is cleared":
                yield self._done("signalled", rank, number)
            for peer in peers:
                if self.bug == "staging: does not wait for read":
                    continue
                yield self._wait("read", rank, peer, 1, where=signals)

                def in_vain(memory: list[int], read: int = self._at("read", rank, peer)) -> None:
                    memory[silent] = memory[silent] if memory[read] else 2

                yield compute(always, in_vain, hidden=True)
            for peer in peers:
                yield self._clear("read", rank, peer, STAGING, where=signals)
                to_peer = {"of": rank, "lane": peer, "where": signals}
                stores = [self._store("tag", peer, tag, STAGING, **to_peer)]
                if call.fetches != ROUND:
                    to_peer["order"] = SAME_LANE
                    stores.append(self._store("staged", peer, BEING_STAGED, STAGING, **to_peer))
                    del to_peer["order"]
                if self.bug == "staging: writes tag after staged":
                    stores.reverse()
                yield from stores
                to_peer["of"] = peer
                yield self._store("read_mirror", rank, 0, STAGING, **to_peer)
            if is_last:
                yield self._done("signalled", rank, number)
            if self.bug != "staging: signals heads before they are copied":
                yield after((self._at("copied", rank), number))
            for peer in peers:
                to_peer = {"of": rank, "lane": peer, "order": SAME_KERNEL, "where": has_copied}
                stores = [
                    self._store("staged", peer, STAGED, STAGING, **to_peer),
                    self._store("staged_mirror", peer, tag, STAGING, **to_peer),
                ]
                if self.bug == "staging: writes staged_mirror before staged":
                    stores.reverse()
                yield from stores
            yield after((self._at("copied", rank), number))
            if is_last:
                yield self._done("staged_all", rank, number, "silent", "stopped")

    def _copy(self, rank: int) -> Iterator[Operation]:
        """The warps that copy the block to where peers read it."""
        block, stopped = self._at("block", rank), self._at("stopped", rank)
        failed, copy = self._at("failed", rank), self._at("given_up_copy", rank)

        def begin(memory: list[int]) -> None:
            memory[stopped] = int(memory[copy] != 0 or memory[failed] == GIVEN_UP)

        def copies(memory: Memory) -> bool:
            return memory[stopped] == 0 or "after it has given up" in (self.bug or "")

        for number, call in enumerate(self.calls[rank], 1):
            yield self._begin(rank, number, begin)
            yield put((block, -1), where=copies)
            yield put((block, 10 * number + call.tag), where=copies)
            yield self._done("copied", rank, number)

    # ---- what fetches ------------------------------------------------------------------------

    def _fetch(self, rank: int) -> Iterator[Operation]:
        for number, call in enumerate(self.calls[rank], 1):
            fetch = self._kernel if call.fetches == KERNEL else self._stream
            yield from fetch(rank, number, call)
            yield put((self._at("bad", rank), 0), (self._at("ended", rank), number))

    def _read(self, rank: int, peer: int, number: int, call: Call) -> list[Operation]:
        """The first and the last bytes of a peer's block."""
        bad, failed = self._at("bad", rank), self._at("failed", rank)
        block, right = self._at("block", peer), 10 * number + call.tag

        def read(memory: list[int]) -> None:
            skips = call.fetches == KERNEL and memory[failed] != 0
            if skips or memory[block] != right:
                memory[bad] = 1

        return [compute(always, read)] * 2

    def _judge(self, rank: int, number: int, *poison: str) -> Operation:
        def judge(memory: list[int]) -> None:
            is_nan = any(memory[self._at(name, rank)] for name in poison)
            if memory[self._at("bad", rank)] and not is_nan:
                raise Violation(f"rank {rank} has a wrong result in call {number} that is not NaN")

        return compute(always, judge, hidden=True)

    def _kernel(self, rank: int, number: int, call: Call) -> Iterator[Operation]:
        """The thread block of the staging kernel that waits, and the kernel that fetches."""
        failed, copy = self._at("failed", rank), self._at("given_up_copy", rank)
        peers = self.peers(rank)

        def heed_copy(memory: list[int]) -> None:
            memory[failed] = GIVEN_UP if memory[copy] else memory[failed]

        yield self._begin(rank, number, heed_copy)
        for peer in peers:
            yield self._wait("staged", rank, peer, BEING_STAGED)

            def compare(memory: list[int], tag: int = self._at("tag", rank, peer)) -> None:
                if memory[tag] != call.tag and memory[failed] == 0:
                    memory[failed] = MISMATCH

            if self.bug != "fetching: does not compare tags":
                yield compute(always, compare)
        yield after((self._at("signalled", rank), number))
        for peer in peers:
            yield self._wait("staged", rank, peer, STAGED)
        reads = [op for peer in peers for op in self._read(rank, peer, number, call)]
        reads.append(self._judge(rank, number, "failed"))
        if self.bug != "fetching: signals read before it has read":
            yield from reads
        if self.bug != "fetching: clears staged_mirror without waiting for it":
            for peer in peers:
                yield self._wait("staged_mirror", rank, peer, 1)
        for peer in peers:
            to_peer = {"of": rank, "lane": peer}
            stores = [
                self._clear("staged", rank, peer, KERNEL),
                self._store("staged_mirror", rank, 0, KERNEL, of=peer, lane=peer),
                self._store("read_mirror", peer, 1, KERNEL, **to_peer),
                self._store("read", peer, 1, KERNEL, order=SAME_LANE, **to_peer),
            ]
            if self.bug == "fetching: clears staged after it has signalled read":
                stores = [*stores[2:], *stores[:2]]
            yield from stores
        if self.bug == "fetching: signals read before it has read":
            yield from reads
        if self.bug != "fetching: ends before peers have read":
            for peer in peers:
                yield self._wait("read", rank, peer, 1)
        # A kernel ends when its stores are visible.
        stores_of = [(self._at(f"under_way_{thread}", rank), 0) for thread in (0, 2)]
        yield after((self._at("staged_all", rank), number), *stores_of)

    def _stream(self, rank: int, number: int, call: Call) -> Iterator[Operation]:
        """The stream behind the staging kernel, and its copy engine."""
        peers, waits = self.peers(rank), self._at("waits", rank)
        copy, given_up = self._at("given_up_copy", rank), self._at("given_up", rank)
        has_staged = after(
            (self._at("staged_all", rank), number), (self._at("under_way_0", rank), 0)
        )
        of_all_ranks = call.fetches in (STREAMS, ROUND)
        if call.fetches == ROUND:
            yield self._begin(rank, number, lambda memory: None)
        else:
            yield has_staged
        arrivals = [[peer] for peer in self.around(rank, 1)] if call.fetches == ROUND else []
        for arrival in [*arrivals, peers]:
            yield put((self._at("tag_waited_for", rank), call.tag), (waits, 1))
            for peer in arrival:
                yield after((self._at("staged_mirror", rank, peer), call.tag))
            yield put((waits, 0))
            if call.fetches == ROUND and arrival is not peers:
                yield from self._read(rank, arrival[0], number, call)
        for peer in peers:
            yield self._store("staged_mirror", rank, 0, STREAM, of=peer, order=SAME_KERNEL)
            yield self._clear("staged", rank, peer, STREAM)
        for peer in peers:
            if call.fetches != ROUND:
                yield from self._read(rank, peer, number, call)
            self.writers.add(("read", STREAM, False))
            mirror = self._store("read_mirror", peer, 1, STREAM, of=rank, order=SAME_KERNEL)
            if of_all_ranks:
                yield mirror
                continue
            visible = after((self._at("read_mirror", peer, rank), 1))
            operations = [mirror, visible, put((self._at("read", peer, rank), 1))]
            if self.bug == "stream: writes read before read_mirror":
                operations = [operations[2], *operations[:2]]
            if self.bug == "stream: does not wait until read_mirror is visible":
                operations.remove(visible)
            yield from operations
        if call.fetches == ROUND and self.bug != "round: ends before its own staging kernels":
            yield has_staged
        if of_all_ranks and self.bug != "streams: do not wait for their own writes":
            yield after((self._at("under_way_2", rank), 0))
        for peer in peers:
            yield after((self._at("read_mirror", rank, peer), 1))
        if of_all_ranks:
            yield from (put((self._at("read", rank, peer), 1)) for peer in peers)

        def see(memory: list[int]) -> None:
            memory[copy] = memory[given_up]

        yield compute(always, see)
        yield self._judge(rank, number, "failed", "given_up_copy")

    # ---- the host ----------------------------------------------------------------------------

    def _watch(self, rank: int) -> Iterator[Operation]:
        """What the watchdog sets once it has given up, again for what begins to wait later."""
        given_up, failed = self._at("given_up", rank), self._at("failed", rank)
        tag, waits, ended = (self._at(n, rank) for n in ("tag_waited_for", "waits", "ended"))
        staged_mirror, read_mirror, staged, read = (
            [self._at(name, rank, peer) for peer in self.peers(rank)]
            for name in ("staged_mirror", "read_mirror", "staged", "read")
        )
        of_peers = [self._at(n, p) for p in self.peers(rank) for n in ("dead", "given_up")]

        def may_act(memory: Memory) -> bool:
            if memory[ended] == len(self.calls[rank]):
                return False
            if memory[given_up]:
                return any(memory[place] != memory[tag] for place in staged_mirror) or not all(
                    memory[place] for place in (*read_mirror, *read, *staged, failed)
                )
            seen = [memory[place] for place in staged_mirror] if memory[waits] else []
            mismatch = any(value not in (0, memory[tag]) for value in seen)
            in_vain = rank in self.late or any(memory[place] for place in of_peers)
            return in_vain or mismatch or memory[failed] == MISMATCH

        def set_mirrors(memory: list[int]) -> None:
            for place in staged_mirror:
                memory[place] = memory[tag]
            for place in read_mirror:
                memory[place] = 1

        signals = [*((place, RELEASED) for place in staged), *((place, 1) for place in read)]
        operations = [
            put((given_up, 1)),
            compute(always, set_mirrors),
            put((failed, GIVEN_UP)),
            put(*signals),
        ]
        if self.bug == "watchdog: sets signals before given_up":
            operations = [operations[1], operations[3], operations[0], operations[2]]
        operations[0] = dataclasses.replace(operations[0], guard=may_act)
        yield from operations
