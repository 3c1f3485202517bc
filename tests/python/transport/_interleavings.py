# SPDX-License-Identifier: Apache-2.0
"""Visits every state that threads of several ranks reach in some interleaving.

A state is memory (named integers), the next operation of each thread, and stores that are not yet
visible. A store to host memory or to another device becomes visible at any later time; a release
store not before the earlier stores that it orders.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence

SAME_LANE, SAME_KERNEL = 1, 10  # which earlier stores a release store comes after
THREADS = 4  # of a rank; the last one is its watchdog

Memory = Sequence[int]
Store = tuple[int, int, int, int]  # place, value, 10 * thread + lane, the order of a release store
State = tuple[tuple[int, ...], tuple[int, ...], tuple[Store, ...]]
Guard = Callable[[Memory], bool]


class Violation(Exception):
    """A state that must not be reached."""


def always(memory: Memory) -> bool:
    return True


@dataclasses.dataclass(frozen=True)
class Operation:
    guard: Guard
    act: Callable[[list[int], list[Store]], None]
    #: When no other operation can tell whether it has happened, or keep it from happening: then it
    #: happens at once, which leaves out interleavings that lead to the same states. None: never.
    at_once: Guard | None = None


def compute(guard: Guard, act: Callable[[list[int]], None], hidden: bool = False) -> Operation:
    """Reads and writes of memory that only one rank uses."""
    return Operation(guard, lambda memory, stores: act(memory), guard if hidden else None)


def put(*values: tuple[int, int], where: Guard = always, hidden: bool = False) -> Operation:
    """Stores that are visible at once: of a device to its own memory, of a host to its own."""

    def act(memory: list[int], stores: list[Store]) -> None:
        if where(memory):
            for place, value in values:
                memory[place] = value

    return Operation(always, act, always if hidden else None)


def after(*values: tuple[int, int]) -> Operation:
    """A wait of a stream, or the order of launches: until each place has its value."""

    def guard(memory: Memory) -> bool:
        return all(memory[place] == value for place, value in values)

    return Operation(guard, lambda memory, stores: None, guard)


class Interleavings:
    """threads: of all ranks, THREADS each. dead: for each rank the place that says that it is.
    under_way: for each thread the place that counts its stores that are not yet visible.
    mortal: ranks of which one may die, at any point."""

    def __init__(
        self,
        memory: Sequence[int],
        threads: Sequence[Sequence[Operation]],
        dead: Sequence[int],
        under_way: Sequence[int],
        mortal: Sequence[int],
        forget: Callable[[list[int], int], None],
    ) -> None:
        self._threads, self._dead, self._mortal = threads, dead, mortal
        self._under_way, self._forget = under_way, forget
        self.start = self._settle(list(memory), [0] * len(threads), [])

    def _settle(self, memory: list[int], counters: list[int], stores: list[Store]) -> State:
        """The state after all that happens at once. Stores of different threads have no order."""
        goes_on = True
        while goes_on:
            goes_on = False
            for thread, operations in enumerate(self._threads):
                counter = counters[thread]
                while counter < len(operations):
                    at_once = operations[counter].at_once
                    if at_once is None or not at_once(memory):
                        break
                    if memory[self._dead[thread // THREADS]]:
                        break
                    operations[counter].act(memory, stores)
                    counter += 1
                    goes_on = True
                counters[thread] = counter
        if len(stores) > 1:
            stores.sort(key=_thread_of)
        return tuple(memory), tuple(counters), tuple(stores)

    def successors(self, state: State) -> Iterator[State]:
        memory, counters, stores = state
        moving = {_thread_of(store) // THREADS for store in stores}
        for thread, operations in enumerate(self._threads):
            rank, counter = thread // THREADS, counters[thread]
            if counter == len(operations) or memory[self._dead[rank]]:
                continue
            is_watchdog = thread % THREADS == THREADS - 1
            if is_watchdog and counter == 0 and rank in moving:
                continue  # a watchdog acts on a rank that has waited for a timeout
            if not operations[counter].guard(memory):
                continue
            moving.add(rank)
            changed, added, counted = list(memory), list(stores), list(counters)
            operations[counter].act(changed, added)
            counted[thread] = (counter + 1) % len(operations) if is_watchdog else counter + 1
            yield self._settle(changed, counted, added)
        for number, store in enumerate(stores):
            if any(_comes_before(earlier, store) for earlier in stores[:number]):
                continue
            changed = list(memory)
            changed[store[0]] = store[1]
            changed[self._under_way[_thread_of(store)]] -= 1
            yield self._settle(changed, list(counters), [*stores[:number], *stores[number + 1 :]])
        for rank in self._mortal:
            if not any(memory[place] for place in self._dead):
                yield self._death(rank, state)

    def _death(self, rank: int, state: State) -> State:
        memory, counters = list(state[0]), list(state[1])
        self._forget(memory, rank)
        memory[self._dead[rank]] = 1
        counters[THREADS * rank : THREADS * (rank + 1)] = [0] * THREADS
        kept = [store for store in state[2] if _thread_of(store) // THREADS != rank]
        return self._settle(memory, counters, kept)

    def explore(self, check_end: Callable[[Memory], None], limit: int) -> int:
        """The number of states. check_end: of the memory of a state without a successor."""
        seen, left = {self.start}, [self.start]
        while left:
            state = left.pop()
            is_end = True
            for following in self.successors(state):
                is_end = False
                if following not in seen:
                    seen.add(following)
                    left.append(following)
            if is_end:
                check_end(state[0])
            if len(seen) > limit:
                raise RuntimeError(f"states must be at most {limit}, got more")
        return len(seen)

    def walk(self, check_end: Callable[[Memory], None], seed: int) -> int:
        """One random interleaving to its end. The number of states on its way."""
        draw, state, length = random.Random(seed), self.start, 1
        while followers := list(self.successors(state)):
            state = draw.choice(followers)
            length += 1
        check_end(state[0])
        return length


def _thread_of(store: Store) -> int:
    return store[2] // 10


def _comes_before(earlier: Store, store: Store) -> bool:
    if _thread_of(earlier) != _thread_of(store):
        return False
    order = store[3]
    return earlier[0] == store[0] or (order > 0 and earlier[2] // order == store[2] // order)
