# SPDX-License-Identifier: Apache-2.0
"""No interleaving of kernels, streams and watchdogs breaks the protocol of peer_sync/protocol.h."""

import itertools
import re
from pathlib import Path

import pytest
from _interleavings import Violation
from _protocol import KERNEL, ROUND, STAGING, STREAM, STREAMS, Call, Protocol

WAYS = (KERNEL, STREAM)
PAIRS = list(itertools.product(WAYS, repeat=2))
#: Of two ranks.
WAYS_OF_RANKS = [*PAIRS, (STREAMS, STREAMS), (ROUND, ROUND)]
HEADER = Path(__file__).resolve().parents[3] / "csrc/peer_sync/protocol.h"
#: The calls of both ranks, and who may fail, with which a bug is found soon.
ONCE, TWICE = [[Call()], [Call()]], [[Call()] * 2, [Call()] * 2]
MIXED = [[Call(), Call()], [Call(STREAM), Call()]]
FOUND_WITH = {
    "staging: does not wait for read": (MIXED, {}),
    "staging: the next kernel begins before read is cleared": (TWICE, {}),
    "staging: writes tag after staged": ([[Call()], [Call(STREAM)]], {}),
    "staging: signals heads before they are copied": (ONCE, {}),
    "staging: writes staged_mirror before staged": ([[Call()], [Call(STREAM)]], {}),
    "staging: writes the block after it has given up": (
        [[Call(STREAM)] * 2, [Call(STREAM)] * 2],
        {"late": (0,)},
    ),
    "fetching: signals read before it has read": (TWICE, {}),
    "fetching: clears staged_mirror without waiting for it": (ONCE, {}),
    "fetching: clears staged after it has signalled read": (TWICE, {}),
    "fetching: ends before peers have read": (TWICE, {}),
    "fetching: does not compare tags": ([[Call()], [Call(tag=2)]], {}),
    "stream: writes read before read_mirror": (MIXED, {}),
    "stream: does not wait until read_mirror is visible": (MIXED, {}),
    "streams: do not wait for their own writes": ([[Call(STREAMS), Call(STREAM)]] * 2, {}),
    "round: ends before its own staging kernels": ([[Call(ROUND)] * 2] * 2, {}),
    "watchdog: sets signals before given_up": (ONCE, {"mortal": (1,)}),
}


@pytest.mark.parametrize("first", PAIRS, ids=" ".join)
def test_calls_in_a_row_are_right_and_leave_signals_as_they_were(first: tuple[str, ...]) -> None:
    for second in PAIRS:
        Protocol([[Call(way) for way in first], [Call(way) for way in second]]).explore()


@pytest.mark.parametrize("way", [STREAMS, ROUND])
@pytest.mark.parametrize("other", WAYS_OF_RANKS, ids=" ".join)
def test_calls_beside_one_of_streams_of_all_ranks_are_right(
    other: tuple[str, ...], way: str
) -> None:
    Protocol([[Call(way), Call(kind)] for kind in other]).explore()
    Protocol([[Call(kind), Call(way)] for kind in other]).explore()


@pytest.mark.parametrize("ways", WAYS_OF_RANKS, ids=" ".join)
def test_a_rank_that_dies_leaves_no_rank_waiting_and_no_wrong_number(ways: tuple[str, ...]) -> None:
    Protocol([[Call(way)] for way in ways], mortal=(0, 1)).explore()
    Protocol([[Call(way), Call(ways[0])] for way in ways], mortal=(1,)).explore()


@pytest.mark.parametrize("ways", WAYS_OF_RANKS, ids=" ".join)
def test_a_watchdog_that_gives_up_on_a_slow_rank_spoils_no_result(ways: tuple[str, ...]) -> None:
    Protocol([[Call(way)] for way in ways], late=(0,)).explore()


@pytest.mark.parametrize("ways", WAYS_OF_RANKS, ids=" ".join)
def test_ranks_in_calls_of_different_kinds_get_no_numbers(ways: tuple[str, ...]) -> None:
    # As of a replay that meets a call that is none.
    Protocol([[Call(way, tag)] for tag, way in enumerate(ways, 1)]).explore()


@pytest.mark.parametrize("way", WAYS)
def test_streams_of_all_ranks_meet_a_call_of_another_kind(way: str) -> None:
    Protocol([[Call(STREAMS, 1)], [Call(way, 2)]]).explore()


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("ways", [*WAYS, STREAMS, ROUND])
def test_random_interleavings_of_more_ranks_are_right(size: int, ways: str) -> None:
    of_all = ways in (STREAMS, ROUND)
    other, first = (KERNEL, STREAM) if of_all else (WAYS[1 - WAYS.index(ways)], ways)
    protocol = Protocol([[Call(ways), Call(other if rank else first)] for rank in range(size)])
    for seed in range(40):
        protocol.walk(seed)
    mortal = Protocol([[Call(ways)] * 2 for _ in range(size)], mortal=(size - 1,))
    for seed in range(40):
        mortal.walk(seed)


@pytest.mark.parametrize("bug", FOUND_WITH)
def test_a_planted_bug_is_found(bug: str) -> None:
    calls, who_fails = FOUND_WITH[bug]
    with pytest.raises(Violation):
        Protocol(calls, bug=bug, **who_fails).explore()


def test_the_model_writes_and_clears_as_the_tables_in_the_header_say() -> None:
    calls = [[Call(way) for way in (KERNEL, STREAM, STREAMS, ROUND)]] * 2
    modelled = Protocol(calls).writers
    writes, clears = tables()
    assert set(writes) == set(clears) == {signal for signal, _, _ in modelled}
    for rows, is_clear in ((writes, False), (clears, True)):
        for signal, text in rows.items():
            named = {writer for writer in (STAGING, KERNEL, STREAM) if writer in text}
            found = {
                writer for name, writer, clear in modelled if (name, clear) == (signal, is_clear)
            }
            assert named == found, f"{signal}: {text}"


def tables() -> tuple[dict[str, str], dict[str, str]]:
    """Of each signal what the header says: what writes it, and what clears it."""
    text = HEADER.read_text()
    found = []
    for title, following in (("writer, order", "value "), ("cleared to 0 by", "\n")):
        begin = text.index(title)
        start = begin - text.rindex("\n", 0, begin) - 1
        end = start + text.index(following, begin) - begin if following != "\n" else None
        rows: dict[str, str] = {}
        name = ""
        for line in text[begin : text.index("\n//\n", begin)].splitlines()[2:]:
            name = re.match(r"//   (\w*)", line)[1] or name
            rows[name] = rows.get(name, "") + line[start:end] + " "
        found.append(rows)
    return found[0], found[1]
