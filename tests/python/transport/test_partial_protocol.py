# SPDX-License-Identifier: Apache-2.0
"""No interleaving of kernels and watchdogs breaks the protocol of peer_sync/partial_exchange.h."""

import pytest
from _interleavings import Violation
from _partial_protocol import Call, PartialProtocol

EXCHANGE, RING = Call(), Call(is_ring=True)


def everywhere(ranks: int, *calls: Call) -> list[list[Call]]:
    return [list(calls) for _ in range(ranks)]


@pytest.mark.parametrize(("ranks", "chunks", "exchanges"), [(2, 1, 4), (2, 2, 3), (3, 1, 2)])
def test_exchanges_in_a_row_are_right(ranks: int, chunks: int, exchanges: int) -> None:
    PartialProtocol(everywhere(ranks, *[EXCHANGE] * exchanges), chunks=chunks).explore()


def test_exchanges_and_rings_in_turn_are_right() -> None:
    PartialProtocol(everywhere(2, EXCHANGE, RING, EXCHANGE, RING, EXCHANGE)).explore()


@pytest.mark.parametrize(("ranks", "chunks", "exchanges"), [(2, 1, 3), (2, 2, 2), (3, 1, 1)])
def test_a_rank_that_dies_leaves_no_rank_waiting_and_no_wrong_number(
    ranks: int, chunks: int, exchanges: int
) -> None:
    calls = everywhere(ranks, *[EXCHANGE] * exchanges)
    PartialProtocol(calls, chunks=chunks, mortal=range(ranks)).explore()


def test_a_watchdog_that_gives_up_on_a_slow_rank_spoils_no_result() -> None:
    PartialProtocol(everywhere(2, *[EXCHANGE] * 3), late=(0,)).explore()


@pytest.mark.parametrize("other", [Call(tag=2), RING], ids=["another exchange", "a ring"])
def test_ranks_in_different_calls_get_no_numbers(other: Call) -> None:
    PartialProtocol([[EXCHANGE, EXCHANGE], [EXCHANGE, other]], chunks=2).explore()


@pytest.mark.parametrize("mortal", [(), (2,)], ids=["all live", "one may die"])
def test_random_interleavings_of_three_ranks_are_right(mortal: tuple[int, ...]) -> None:
    calls = everywhere(3, EXCHANGE, EXCHANGE, RING, EXCHANGE, EXCHANGE)
    protocol = PartialProtocol(calls, chunks=2, mortal=mortal)
    for seed in range(60):
        protocol.walk(seed)


#: The calls of both ranks, and who may fail, with which a bug is found soon.
FOUND_WITH = {
    "one half": (everywhere(2, EXCHANGE, EXCHANGE), {}),
    "signals before it writes": (everywhere(2, EXCHANGE), {}),
    "does not wait": (everywhere(2, EXCHANGE), {}),
    "waits in the other half": (everywhere(2, EXCHANGE), {}),
    "writes after a failure": (everywhere(2, *[EXCHANGE] * 3), {"late": (0,)}),
    "does not compare tags": ([[EXCHANGE], [Call(tag=2)]], {}),
    "does not look for rings": ([[EXCHANGE], [RING]], {}),
    "does not look at the signal again": (everywhere(2, EXCHANGE, RING), {}),
}


@pytest.mark.parametrize("bug", FOUND_WITH)
def test_a_planted_bug_is_found(bug: str) -> None:
    calls, who_fails = FOUND_WITH[bug]
    PartialProtocol(calls, **who_fails).explore()
    with pytest.raises(Violation):
        PartialProtocol(calls, bug=bug, **who_fails).explore()
