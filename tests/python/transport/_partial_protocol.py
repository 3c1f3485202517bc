# SPDX-License-Identifier: Apache-2.0
"""The exchange of csrc/peer_sync/partial_exchange.h as a model that is small enough to be explored.

Each rank makes a sequence of calls: exchanges, and rings, of which there is only what an exchange
must tell apart from its own. Its threads are the thread blocks of the kernel, one for each chunk,
and the watchdog of the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from _interleavings import (
    SAME_KERNEL,
    THREADS,
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

GIVEN_UP, MISMATCH = 1, 2  # values of failed


@dataclasses.dataclass(frozen=True)
class Call:
    is_ring: bool = False
    tag: int = 1


class PartialProtocol:
    """calls: of each rank. chunks: of a partial, 1 or 2. mortal: ranks of which one may die, at any
    point. late: ranks whose watchdog may give up while its peers are only slow. bug: what a rank
    does wrong."""

    def __init__(
        self,
        calls: Sequence[Sequence[Call]],
        *,
        chunks: int = 1,
        mortal: Sequence[int] = (),
        late: Sequence[int] = (),
        bug: str | None = None,
    ) -> None:
        self.calls, self.chunks, self.late, self.bug = calls, chunks, late, bug
        self.ranks = range(len(calls))
        self.may_fail = bool(mortal or late) or any(list(made) != list(calls[0]) for made in calls)
        self._places: dict[tuple[object, ...], int] = {}
        names: list[tuple[object, ...]] = []
        for rank in self.ranks:
            names += [(name, rank) for name in ("failed", "given_up", "done", "ended", "dead")]
            names += [("under_way", rank, thread) for thread in range(THREADS)]
            for chunk in range(chunks):
                names += [
                    (name, rank, chunk) for name in ("silent", "in_vain", "absent", "sees_ring")
                ]
                for peer in self.ranks:
                    for half in (0, 1):
                        names += [(name, rank, peer, half, chunk) for name in ("slot", "signal")]
            names += [(name, rank, peer) for name in ("staged", "read") for peer in self.ranks]
        self._places = {name: place for place, name in enumerate(names)}
        threads: list[list[Operation]] = []
        for rank in self.ranks:
            blocks = [list(self._block(rank, chunk)) for chunk in range(chunks)]
            idle: list[list[Operation]] = [[] for _ in range(THREADS - 1 - chunks)]
            threads += [*blocks, *idle, list(self._watch(rank))]
        self._interleavings = Interleavings(
            [0] * len(names),
            threads,
            [self._at("dead", rank) for rank in self.ranks],
            [self._at("under_way", rank, t) for rank in self.ranks for t in range(THREADS)],
            mortal,
            self._forget,
        )

    def explore(self, limit: int = 500_000) -> int:
        """The number of states; raises Violation at the first one that breaks a rule."""
        return self._interleavings.explore(self._check_end, limit)

    def walk(self, seed: int) -> int:
        """The same for one random interleaving."""
        return self._interleavings.walk(self._check_end, seed)

    def _at(self, *name: object) -> int:
        return self._places[name]

    def _peers(self, rank: int) -> list[int]:
        return [peer for peer in self.ranks if peer != rank]

    def _forget(self, memory: list[int], rank: int) -> None:
        for name, place in self._places.items():
            if name[1] == rank:
                memory[place] = 0

    def _check_end(self, memory: Memory) -> None:
        for rank in self.ranks:
            ended = memory[self._at("ended", rank)]
            if not memory[self._at("dead", rank)] and ended < len(self.calls[rank]):
                raise Violation(f"rank {rank} waits for ever in call {ended + 1}")
            if memory[self._at("failed", rank)] and not self.may_fail:
                raise Violation(f"rank {rank} has failed")

    def _store(
        self, rank: int, thread: int, place: int, value: int, order: int = 0, unless: int = -1
    ) -> Operation:
        """A store to memory of another device. unless: a place that keeps it from being made."""
        issuer, under_way = 10 * (THREADS * rank + thread), self._at("under_way", rank, thread)

        def act(memory: list[int], stores: list[Store]) -> None:
            if unless < 0 or not memory[unless]:
                stores.append((place, value, issuer, order))
                memory[under_way] += 1

        return Operation(always, act, always)

    def _block(self, rank: int, chunk: int) -> Iterator[Operation]:
        done, ended = self._at("done", rank), self._at("ended", rank)
        number = 0  # of the exchange
        for count, call in enumerate(self.calls[rank], 1):
            yield after((ended, count - 1))
            if call.is_ring:
                yield from self._ring(rank, number) if chunk == 0 else ()
            else:
                number += 1
                yield from self._exchange(rank, chunk, number, call.tag)

            def leave(memory: list[int]) -> None:
                memory[done] += 1

            yield compute(always, leave, hidden=True)
            if chunk == 0:  # a kernel ends when its stores are visible
                stores = [(self._at("under_way", rank, t), 0) for t in range(THREADS)]
                yield after((done, self.chunks), *stores)
                yield put((done, 0), (ended, count), hidden=True)

    def _exchange(self, rank: int, chunk: int, number: int, tag: int) -> Iterator[Operation]:
        failed, silent = self._at("failed", rank), self._at("silent", rank, chunk)
        in_vain = self._at("in_vain", rank, chunk)
        half = 0 if self.bug == "one half" else number % 2
        value = 10 * number + tag

        def begin(memory: list[int]) -> None:
            memory[in_vain] = int(memory[failed] != 0)
            goes_on = self.bug == "writes after a failure"
            memory[silent] = 0 if goes_on else memory[in_vain]

        def keep(memory: list[int], stores: list[Store]) -> None:
            if not memory[silent]:
                memory[self._at("slot", rank, rank, half, chunk)] = value

        yield compute(always, begin)
        yield Operation(always, keep, always)
        for peer in self._peers(rank):
            slot, signal = (self._at(n, peer, rank, half, chunk) for n in ("slot", "signal"))
            stores = [
                self._store(rank, chunk, slot, value, unless=silent),
                self._store(rank, chunk, signal, value, SAME_KERNEL, unless=silent),
            ]
            if self.bug == "signals before it writes":
                stores.reverse()
            yield from stores
        for peer in self._peers(rank):
            if self.bug != "does not wait":
                yield from self._wait(rank, chunk, number, tag, peer)
        for peer in (*self.ranks, *self.ranks):  # the first and the last bytes
            yield self._read(rank, chunk, half, value, peer)

    def _wait(self, rank: int, chunk: int, number: int, tag: int, peer: int) -> Iterator[Operation]:
        half = number % 2
        if self.bug == "one half":
            half = 0
        if self.bug == "waits in the other half":
            half = 1 - half
        signal, staged = self._at("signal", rank, peer, half, chunk), self._at("staged", rank, peer)
        failed, given_up = self._at("failed", rank), self._at("given_up", rank)
        in_vain = self._at("in_vain", rank, chunk)
        absent, sees_ring = (self._at(n, rank, chunk) for n in ("absent", "sees_ring"))
        has_rings = any(call.is_ring for calls in self.calls for call in calls)
        looks = self.bug != "does not look for rings"

        def has_arrived(memory: Memory) -> bool:
            return memory[signal] // 10 == number

        def may_go_on(memory: Memory) -> bool:
            sees = looks and memory[staged]
            return bool(
                memory[in_vain] or has_arrived(memory) or memory[failed] or memory[given_up] or sees
            )

        def mismatch(memory: list[int]) -> None:
            memory[in_vain] = 1
            memory[failed] = memory[failed] or MISMATCH

        def poll(memory: list[int]) -> None:
            memory[absent] = int(not has_arrived(memory))

        def look(memory: list[int]) -> None:
            is_absent = memory[absent] if has_rings else not has_arrived(memory)
            memory[absent] = 0
            if memory[in_vain] or not (is_absent and (memory[staged] or not has_arrived(memory))):
                return
            if memory[failed] or memory[given_up]:
                memory[failed] = memory[failed] or GIVEN_UP
                memory[in_vain] = 1
            elif looks and self.bug == "does not look at the signal again":
                mismatch(memory)
            elif looks:
                memory[sees_ring] = 1

        def judge(memory: list[int]) -> None:
            is_other = memory[sees_ring] and not has_arrived(memory)
            memory[sees_ring] = 0
            if memory[in_vain]:
                return
            if is_other or (memory[signal] % 10 != tag and self.bug != "does not compare tags"):
                mismatch(memory)

        if has_rings:  # otherwise all that it sees is in the signal
            yield compute(always, poll)
        yield compute(may_go_on, look)
        yield compute(always, judge)

    def _read(self, rank: int, chunk: int, half: int, value: int, peer: int) -> Operation:
        slot, in_vain = (
            self._at("slot", rank, peer, half, chunk),
            self._at("in_vain", rank, chunk),
        )

        def read(memory: list[int]) -> None:
            if not memory[in_vain] and memory[slot] != value:
                raise Violation(f"rank {rank} reads {memory[slot]} of rank {peer}, not {value}")

        return compute(always, read)

    def _ring(self, rank: int, number: int) -> Iterator[Operation]:
        """Signals that a ring begins with and ends with."""
        failed, given_up = self._at("failed", rank), self._at("given_up", rank)

        def wait(name: str, peer: int) -> Operation:
            place = self._at(name, rank, peer)
            return Operation(
                lambda m: bool(m[place] or m[failed] or m[given_up]), lambda m, stores: None
            )

        for peer in self._peers(rank):
            yield self._store(rank, 0, self._at("staged", peer, rank), 1, unless=failed)
        for peer in self._peers(rank):
            yield wait("staged", peer)
        for peer in self._peers(rank):
            yield put((self._at("staged", rank, peer), 0))
            yield self._store(rank, 0, self._at("read", peer, rank), 1)
        for peer in self._peers(rank):
            yield wait("read", peer)
            yield put((self._at("read", rank, peer), 0))

    def _watch(self, rank: int) -> Iterator[Operation]:
        failed, given_up, ended = (self._at(n, rank) for n in ("failed", "given_up", "ended"))
        of_peers = [self._at(n, p) for p in self._peers(rank) for n in ("dead", "given_up")]

        def may_act(memory: Memory) -> bool:
            if memory[given_up] or memory[failed] == MISMATCH:  # reported also after the call
                return not memory[given_up]
            if memory[ended] == len(self.calls[rank]):
                return False
            return rank in self.late or any(memory[place] for place in of_peers)

        def give_up(memory: list[int]) -> None:
            memory[given_up] = 1

        yield compute(may_act, give_up)
        yield put((failed, GIVEN_UP))
