# SPDX-License-Identifier: Apache-2.0
"""Recording where the time of a ring goes, and making a rank slow on purpose."""

import time

import pytest
import ringattn
import torch
from _distributed import this
from _rings import Case
from ringattn import Partition, StepTiming, Timings


def record(case: Case, num_calls: int, by_block: bool = True) -> Timings:
    q, k, v = case.local_inputs()
    with ringattn.record_timings(by_block=by_block) as timings:
        assert timings.steps == []
        for _ in range(num_calls):
            ringattn.ring_attention(q, k, v, case.partition, causal=case.causal)
    return timings


def test_one_step_for_every_visiting_block(ring):
    size = ring.world_size
    order = list(range(size))[::-1]
    case = Case(Partition.zigzag([16] * size, order))
    for rank, timings in enumerate(ring.run(record, case, 3)):
        place = order.index(rank)
        sources = [order[place - step] for step in range(size)]
        assert [step.call for step in timings.steps] == [n for n in range(3) for _ in range(size)]
        assert [step.source for step in timings.steps] == sources * 3
        assert [step.kind for step in timings.steps] == (["own"] + ["remote"] * (size - 1)) * 3
        for step in timings.steps:
            assert step.attention_ms > 0
            assert step.transfer_ms >= 0 and step.wait_ms >= 0
            if step.kind == "own":
                assert step.transfer_ms == 0 and step.wait_ms == 0


def record_training(case: Case, seconds: float, by_block: bool = True) -> Timings:
    """Both passes, of a ring whose first rank enters the second one late."""
    inputs = [x.requires_grad_() for x in case.local_inputs()]
    with ringattn.record_timings(by_block=by_block) as timings:
        out = ringattn.ring_attention(*inputs, case.partition, causal=case.causal)
        if this().rank == 0:
            time.sleep(seconds)
        out.sum().backward()
    return timings


def test_a_backward_is_a_call_of_its_own_with_the_own_block_last_under_zigzag(ring):
    size = ring.world_size
    case = Case(Partition.even(16 * size, size), causal=False)
    for rank, timings in enumerate(ring.run(record_training, case, 0.0)):
        forward, backward = timings.calls
        assert [step.backward for step in timings.steps] == [False] * size + [True] * size
        assert [step.source for step in forward] == [(rank - step) % size for step in range(size)]
        for there, back in zip([*forward[1:], forward[0]], backward, strict=True):
            assert (back.source, back.kind) == (there.source, there.kind)
            assert back.flops == 2.5 * there.flops
            assert back.attention_ms > 0 and back.wait_ms >= 0 and back.transfer_ms >= 0
            assert back.kind == "remote" or back.transfer_ms == 0


def test_a_backward_attends_to_the_own_block_last_where_it_sees_no_other_too(ring):
    size = ring.world_size
    case = Case(Partition.even(16 * size, size, layout="contiguous"))
    for rank, timings in enumerate(ring.run(record_training, case, 0.0)):
        backward = timings.calls[1]
        assert [step.kind for step in backward] == ["remote"] * (size - 1) + ["own"]
        assert sorted(step.source for step in backward) == list(range(size))
        seen = [step.flops > 0 for step in backward]
        assert seen == [step <= rank for step in range(1, size)] + [True]


@pytest.mark.parametrize("by_block", [True, False])
def test_transfers_are_timed_where_each_block_is(rank_pool, by_block):
    # Messages that are timed are sent one by one: calls as they are must not ask for that.
    case = Case(Partition.even(64, 2))
    for timings in rank_pool(2).run(record_training, case, 0.0, by_block):
        for steps in timings.calls:
            assert [step.transfer_ms > 0 for step in steps if step.kind == "remote"] == [by_block]


def test_waits_for_blocks_are_no_attention_of_a_backward(rank_pool):
    case = Case(Partition.even(64, 2))
    rank_pool(2).run(record_training, case, 0.0)
    (_, waiting) = rank_pool(2).run(record_training, case, 1.0)
    remote, own = waiting.calls[1]
    assert remote.wait_ms > 500 > own.attention_ms + remote.attention_ms


def one_rank_slow_in_training(case: Case) -> tuple[list[float], list[Timings]]:
    """Processor time of the backward at full speed, and with the first rank's work repeated, each
    the least of some; timings of the slow ones."""
    least, recorded = [], []
    for factor in (1.0, 8.0 if this().rank == 0 else 1.0):
        spent = []
        for _ in range(5):
            inputs = [x.requires_grad_() for x in case.local_inputs()]
            with ringattn.testing.slowdown(factor), ringattn.record_timings() as timings:
                loss = ringattn.ring_attention(*inputs, case.partition, causal=case.causal).sum()
                start = time.thread_time()
                loss.backward()
                spent.append(time.thread_time() - start)
            recorded.append(timings)
        least.append(min(spent))
    return least, recorded[5:]


@pytest.mark.parametrize("causal", [True, False])
def test_a_slow_rank_is_slow_in_its_backward_and_others_wait_for_its_gradients(rank_pool, causal):
    case = Case(Partition.even(512, 2), batch=1, causal=causal)
    (slow_ms, slow), (fast_ms, fast) = rank_pool(2).run(one_rank_slow_in_training, case)
    assert slow_ms[1] > 3 * slow_ms[0] and fast_ms[1] < 2 * fast_ms[0]
    computed, waited = (
        [
            sum(getattr(step, name) for step in of_fast.calls[1])
            / sum(step.attention_ms for step in of_slow.calls[1])
            for of_slow, of_fast in zip(slow, fast, strict=True)
        ]
        for name in ("attention_ms", "wait_ms")
    )
    # On a busy machine a fast rank has less time to wait; it has some in each backward.
    assert min(computed) < 0.5 and max(waited) > 0.15


def test_without_kernels_for_lists_of_blocks_each_is_recorded_either_way(rank_pool):
    case = Case(Partition.zigzag([10, 22]))
    by_block, as_is = (rank_pool(2).run(record, case, 2, which) for which in (True, False))
    for ours, theirs in zip(as_is, by_block, strict=True):
        shown = [
            [(step.call, step.source, step.kind, step.flops) for step in timings.steps]
            for timings in (ours, theirs)
        ]
        assert shown[0] == shown[1] and len(shown[0]) == 4
        assert all(step.attention_ms > 0 for step in ours.steps)


def test_how_to_record_is_yes_or_no():
    with (
        pytest.raises(ValueError, match="by_block must be True or False, got 1"),
        ringattn.record_timings(by_block=1),
    ):
        raise AssertionError("the context must not be entered")


def test_a_block_of_which_nothing_is_visible_takes_no_attention(ring):
    case = Case(Partition.contiguous([16] * ring.world_size))
    for rank, timings in enumerate(ring.run(record, case, 1)):
        for step in timings.steps:
            assert (step.attention_ms > 0) == (step.source <= rank)


def nothing_outside() -> tuple[int, int]:
    case = Case(Partition.even(8 * this().world_size, this().world_size))
    q, k, v = case.local_inputs()
    ringattn.ring_attention(q, k, v, case.partition)
    with ringattn.record_timings() as timings:
        pass
    ringattn.ring_attention(q, k, v, case.partition)
    return len(timings.steps)


def test_calls_outside_are_not_recorded(ring):
    assert ring.run(nothing_outside) == [0] * ring.world_size


def test_summary_adds_up():
    timings = Timings(
        [
            StepTiming(0, 1, "own", 2.0, 0.0, 0.0),
            StepTiming(0, 0, "remote", 3.0, 1.5, 0.5),
            StepTiming(1, 1, "own", 4.0, 0.0, 0.25),
        ]
    )
    assert timings.summary() == {
        "calls": 2,
        "steps": 3,
        "attention_ms": 9.0,
        "own_attention_ms": 6.0,
        "remote_attention_ms": 3.0,
        "transfer_ms": 1.5,
        "wait_ms": 0.75,
    }
    assert Timings().summary()["attention_ms"] == 0


def test_a_recording_does_not_nest_and_ends_with_an_exception():
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(KeyError), ringattn.record_timings() as timings:
        ringattn.ring_attention(q, q, q)
        with (
            pytest.raises(ValueError, match="must not be nested"),
            ringattn.record_timings(),
        ):
            raise AssertionError("a second recording must not begin")
        raise KeyError
    assert len(timings.steps) == 1
    with ringattn.record_timings() as timings:
        pass
    assert timings.steps == []


def test_slowdown_multiplies_the_attention_time_and_changes_no_bit():
    q = torch.randn(1, 1024, 4, 64)
    outs: list[torch.Tensor] = []

    def attention_ms() -> float:
        """Processor time: other programs do not count."""
        start = time.thread_time()
        with ringattn.record_timings() as timings:
            outs.append(ringattn.ring_attention(q, q, q))
        spent_ms = 1e3 * (time.thread_time() - start)
        assert timings.summary()["attention_ms"] > 0.5 * spent_ms  # repetitions are recorded
        return spent_ms

    def one_round() -> dict[str, float]:
        ms = {"alone": attention_ms()}
        with ringattn.testing.slowdown(4.0):
            ms["slow"] = attention_ms()
            with ringattn.testing.slowdown(1.0):
                ms["inner"] = attention_ms()
            ms["again"] = attention_ms()
        return ms | {"after": attention_ms()}

    one_round()
    rounds = [one_round() for _ in range(8)]
    least = {name: min(ms[name] for ms in rounds) for name in rounds[0]}
    for name in ("slow", "again"):
        assert 2 < least[name] / least["alone"] < 8, least  # 4, not 1 or 16
    for name in ("inner", "after"):
        assert least[name] / least["alone"] < 2, least
    assert all(torch.equal(out, outs[0]) for out in outs)


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, float("nan"), float("inf")])
def test_slowdown_refuses_factors_below_one(factor):
    with (
        pytest.raises(ValueError, match="factor must be a finite number of at least 1, got"),
        ringattn.testing.slowdown(factor),
    ):
        raise AssertionError("the context must not be entered")


def one_slow_rank(case: Case) -> float:
    q, k, v = case.local_inputs()
    factor = 8.0 if this().rank == 0 else 1.0
    with ringattn.testing.slowdown(factor), ringattn.record_timings() as timings:
        start = time.thread_time()
        out = ringattn.ring_attention(q, k, v, case.partition, causal=False)
        spent = time.thread_time() - start
    return timings, spent, out


def test_peers_do_not_slow_down_with_a_slow_rank(rank_pool):
    case = Case(Partition.even(1024, 2), batch=1, causal=False)
    rank_pool(2).run(one_slow_rank, case)
    (_, slow, _), (_, fast, _) = rank_pool(2).run(one_slow_rank, case)
    assert slow > 3 * fast  # processor time
