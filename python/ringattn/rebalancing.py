# SPDX-License-Identifier: Apache-2.0
"""Plans that follow ranks whose speeds change, measured by the ring calls themselves."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ringattn._checks import check_int64
from ringattn._distributed.checksums import number_of
from ringattn._distributed.collectives import Content, agree
from ringattn._distributed.groups import Group, resolve_group
from ringattn._masks import CuSeqlens, check_window, checked_documents
from ringattn._profiling.equalize import NOISE, is_close, snap_equal
from ringattn._speed_tracking import SpeedTracker
from ringattn.partition import Partition
from ringattn.planning import ModelCost, Plan, plan, predict, work_in_tiles
from ringattn.profiles import RankProfile
from ringattn.timings import StepTiming, Timings, call_tflops

# A new plan is on trial for _TRIAL requests. It is given up if it is slower by more than _WORSE
# than the latest requests under the previous plan, of which there must be _MIN_BEFORE.
_TRIAL = 3
_MIN_BEFORE = 2
_WORSE = 0.01
_MEMORY = 48  # requests

# A request whose attention takes less than _ENOUGH overheads of a call, each of _LEAST_MS at least,
# says nothing about one that is more than _SIMILAR times as long.
_ENOUGH = 64
_LEAST_MS = 0.01
_SIMILAR = 2

# Operations of a backward of attention, in those of its forward.
_BACKWARD = 2.5


@dataclass
class _Observation:
    """One rank's timing of a request, sent to all ranks."""

    speed: float | None  # relative to its profile; None: it had nothing to do
    call_ms: float = 0.0  # time of a call, waits included; in training of both passes
    flops: float = 0.0  # operations of it


@dataclass(frozen=True)
class _Request:
    """What :meth:`Rebalancer.plan` was asked for."""

    seq_len: int
    cu_seqlens: tuple[int, ...] | None  # boundaries of documents
    size: float  # tokens of a sequence without a window and documents that has as many pairs


#: Requests under one plan, oldest first: what was asked for, the partition, milliseconds per
#: operation of all ranks.
_History = list[tuple[_Request, Partition, float]]


@dataclass
class _Trial:
    """State before a new plan, which is restored where the new plan turns out slower."""

    profiles: list[RankProfile]  # profiles of the previous plan
    history: _History
    excess: float  # time that the new plan was predicted to save, relative
    tracker: SpeedTracker  # with the speeds estimated then: a bad plan looks like slow ranks

    def outcome(self, history: _History) -> float | None:
        """Latency under the new plan over latency under the previous one; None: not known yet."""
        before = {partition for _, partition, _ in self.history}
        for request, partition in dict.fromkeys((request, used) for request, used, _ in history):
            new, old = (
                [ms for each, _, ms in requests if each == request][-_TRIAL:]
                for requests in (history, self.history)
            )
            is_other = partition not in before
            if is_other and len(new) == _TRIAL and len(old) >= _MIN_BEFORE:
                return statistics.median(new) / statistics.median(old)
        return None


class Rebalancer:
    """Plans between requests: each with :meth:`plan`, then, after its ring calls, :meth:`observe`.

    A rank's speed is the work of its attention over the time of its attention, waits excluded.
    Small deviations from the profiles are averaged over up to forty requests. A large deviation
    (more than 6 %, and more than the noise so far explains) is accepted once it repeats: a fall
    after two of four requests, a rise after three in a row, because a rank that has too many tokens
    delays all others, and one that has too few only idles. A rank that falls soon after it rose has
    to be fast for twice as long before the next rise is accepted. Ranks with equal profiles are
    treated as equal until they differ by 5 %, and again below 2.5 % (hysteresis): equal devices
    drift apart and back by that much. Plans change when that gains more than 2 %: at once after
    such a jump, else at most every fourth request. Between changes, :meth:`plan` gives equal plans
    for equal lengths.

    A new plan is measured against the previous one. Where the first three requests of one length
    (with the same documents) are slower under it than the latest under the previous one, it is
    given up, together with the speeds estimated under it; until a speed is seen to change, or for
    48 requests, plans then change only for 2 % more than the failed plan had promised.

    Matrix products are assumed to slow down with attention, the only work that is timed. A rank
    without tokens has no speed, and one whose calls are mostly overhead looks slow: a rank that
    has fallen that far comes back with new profiles only. Requests whose attention takes less than
    64 overheads teach nothing about ones that are more than twice as long: among the last 48 only
    the longest teach then, and longer ones begin with the profiles again. Requests need not all be
    observed. Where a whole ring is one launch, ``record_timings(by_block=False)`` measures that
    launch, its own waits included; block by block, calls are slower, and not equally on all ranks.

    With ``training``, plans are those of steps of training, and a request is such a step. What it
    teaches is how long the forward and the backward of attention take together, each at its own
    speed. Without, backward calls teach nothing.

    Where all ranks hold the same arguments and call the same methods, all have the same plans, bit
    for bit. Not thread safe.

    Args:
        profiles: one per rank, ``[W]``: speeds to begin with.
        cost: of one layer.
        causal: as in :func:`ringattn.plan`.
        window_size: as in :func:`ringattn.plan`.
        layout: as in :func:`ringattn.plan`.
        training: as in :func:`ringattn.plan`.

    Raises:
        ValueError: as :func:`ringattn.plan`.

    The control law is exponential smoothing with a test for level shifts and hysteresis
    (``_speed_tracking.py``).
    """

    def __init__(
        self,
        profiles: Sequence[RankProfile],
        cost: ModelCost,
        *,
        causal: bool = True,
        window_size: Sequence[int] = (-1, -1),
        layout: str | None = None,
        training: bool = False,
    ) -> None:
        self._mask: dict[str, Any] = {"causal": causal, "window_size": check_window(window_size)}
        self._training = training
        # Refuses wrong arguments.
        plan(0, profiles, cost, **self._mask, layout=layout, training=training)
        self._measured = list(profiles)
        self._cost = cost
        self._layout = layout
        overhead_ms = max(_LEAST_MS, *(profile.overhead_ms for profile in self._measured))
        tflops = sum(profile.attention_tflops for profile in self._measured)
        pairs = _ENOUGH * overhead_ms * tflops * 1e9 / max(cost.attention_flops, 1.0)
        self._enough = math.sqrt(2 * pairs if causal else pairs)  # tokens
        self._sizes: list[float] = []  # of the latest requests
        self._latest: tuple[_Request, Plan] | None = None
        self._start_over()

    def _start_over(self) -> None:
        """Forgets all that requests have shown."""
        self._tracker = SpeedTracker(len(self._measured))
        self._in_use = self._measured
        self._history: _History = []
        self._trial: _Trial | None = None

    @property
    def profiles(self) -> list[RankProfile]:
        """Profiles that plans are made from now, ``[W]``."""
        return list(self._in_use)

    @property
    def speeds(self) -> list[float]:
        """Estimated speed of each rank, relative to its first profile, ``[W]``."""
        return self._tracker.speeds

    def plan(self, seq_len: int, cu_seqlens: CuSeqlens | None = None) -> Plan:
        """The plan of the next request.

        Args:
            seq_len: S.
            cu_seqlens: boundaries of its packed documents, as in :func:`ringattn.plan`.

        Raises:
            ValueError: as :func:`ringattn.plan`.
        """
        request = self._request(seq_len, cu_seqlens)
        profiles = self._measured if self._is_beyond_all(request.size) else self._in_use
        self._latest = request, self._plan(request, profiles)
        return self._latest[1]

    def _request(self, seq_len: int, cu_seqlens: CuSeqlens | None) -> _Request:
        seq_len = check_int64("seq_len", seq_len, least=0)
        if cu_seqlens is None and self._mask["window_size"] == (-1, -1):
            return _Request(seq_len, None, seq_len)
        ends = None
        if cu_seqlens is not None:
            ends = tuple(checked_documents(cu_seqlens, seq_len).tolist())
        pairs = Partition.contiguous([seq_len]).num_pairs(0, **self._mask, cu_seqlens=ends)
        return _Request(seq_len, ends, math.sqrt(2 * pairs if self._mask["causal"] else pairs))

    def observe(self, timings: Timings, group: Group = None) -> bool:
        """Learns from one request. Collective.

        Args:
            timings: of this rank's ring calls in it, from :func:`ringattn.record_timings`. Any
                partition will do; calls whose steps have no ``flops`` are taken to be of the latest
                plan.
            group: as in :func:`ringattn.ring_attention`.

        Returns:
            Whether plans change from now on; the same on every rank.

        Raises:
            ValueError: a group of another size than there are profiles, ranks that have planned for
                different lengths or from different profiles, on all of them; ``timings`` that are
                no :class:`ringattn.Timings`, hold what nothing can have recorded, or with
                ``training`` have forward calls alone.
        """
        ring = resolve_group(group)
        mistake, own = None, _Observation(None)
        if ring.world_size != len(self._measured):
            mistake = (
                f"profiles must be one for each of the {ring.world_size} ranks of the group, "
                f"got {len(self._measured)}"
            )
        elif not isinstance(timings, Timings):
            mistake = f"timings must be Timings, got {type(timings).__name__}"
        else:
            try:
                own = self._observation(timings, ring.rank)
                if self._training and timings.steps and not any(s.backward for s in timings.steps):
                    mistake = (
                        "timings must be of forward and backward with training=True, got forward "
                        "calls alone: record loss.backward() too"
                    )
            except Exception as error:  # of any type: the peers must hear of it
                mistake = (
                    "timings must be those of record_timings(), got steps that nothing recorded: "
                    f"{error}"
                )
        documents = None if self._latest is None else self._latest[0].cu_seqlens
        # Everything that plans depend on.
        facts = {
            **{f"the profile of rank {rank}": each for rank, each in enumerate(self._in_use)},
            "cost": self._cost,
            **self._mask,
            "layout": self._layout,
            "training": self._training,
            "seq_len": None if self._latest is None else self._latest[0].seq_len,
            "cu_seqlens": None if documents is None else Content(number_of(documents)),
        }
        observations = agree(ring, "observe", mistake, facts, own)
        if self._latest is not None and not self._teaches(self._latest[0].size):
            return False
        jumps = self._tracker.jumps
        self._tracker.observe([observation.speed for observation in observations])
        if self._latest is None:
            return False
        request, current = self._latest
        if (flops := sum(observation.flops for observation in observations)) > 0:
            slowest_ms = max(observation.call_ms for observation in observations)
            self._history.append((request, current.partition, slowest_ms / flops))
        # Requests before a jump ran at other speeds.
        del self._history[: -_MEMORY if self._tracker.jumps == jumps else -_MIN_BEFORE]
        return self._give_up() or self._change(request, current)

    def _is_beyond_all(self, size: float) -> bool:
        """Whether no request so far says anything about one of this size."""
        longest = max(self._sizes, default=0)
        return longest < self._enough and size >= min(self._enough, _SIMILAR * longest)

    def _teaches(self, size: float) -> bool:
        """Whether a request says something about the latest ones, the longest of them too."""
        if self._is_beyond_all(size):
            self._start_over()
        self._sizes = [*self._sizes[1 - _MEMORY :], size]
        return size >= min(self._enough, max(self._sizes) / _SIMILAR)

    def _give_up(self) -> bool:
        """Returns to the previous plan where the new one has turned out slower."""
        if (trial := self._trial) is None or (outcome := trial.outcome(self._history)) is None:
            return False
        self._trial = None
        if outcome <= 1 + _WORSE:
            return False
        self._tracker = trial.tracker
        self._tracker.record_failed_replan(trial.excess)
        self._in_use, self._history = trial.profiles, trial.history
        return True

    def _change(self, request: _Request, current: Plan) -> bool:
        """Changes to plans for the estimated speeds, where that pays."""
        estimated = [
            replace(
                profile,
                attention_tflops=profile.attention_tflops * speed,
                linear_tflops=profile.linear_tflops * speed,
            )
            for profile, speed in zip(self._measured, self._snapped_speeds(), strict=True)
        ]
        mask = self._mask | {"cu_seqlens": request.cu_seqlens}
        current_ms = predict(
            current.partition,
            estimated,
            self._cost,
            **mask,
            depth=current.depth,
            training=self._training,
        )
        best_ms = self._plan(request, estimated).predicted_ms
        excess = max(current_ms) / best_ms - 1 if best_ms > 0 else 0.0
        if not self._tracker.should_replan(excess, current_ms.index(max(current_ms))):
            return False
        self._trial = _Trial(self._in_use, self._history, excess, copy.deepcopy(self._tracker))
        self._in_use, self._history = estimated, []
        return True

    def _snapped_speeds(self) -> list[float]:
        """Estimated speeds without differences of ranks with equal profiles that are noise.

        Ranks that are treated as unequal drift closer, because the one that owned too much no
        longer rests while it waits: they count as equal again at half the tolerance.
        """
        estimated = self.speeds
        measured = [profile.attention_tflops for profile in self._measured]
        in_use = [profile.attention_tflops for profile in self._in_use]

        def equal(first: int, rank: int) -> bool:
            tolerance = NOISE if in_use[rank] == in_use[first] else NOISE / 2
            close = is_close(estimated[rank], estimated[first], tolerance)
            return measured[rank] == measured[first] and close

        return snap_equal(estimated, equal)

    def _plan(self, request: _Request, profiles: Sequence[RankProfile]) -> Plan:
        mask = self._mask | {"cu_seqlens": request.cu_seqlens}
        return plan(
            request.seq_len,
            profiles,
            self._cost,
            **mask,
            layout=self._layout,
            training=self._training,
        )

    def _observation(self, timings: Timings, rank: int) -> _Observation:
        """This rank's part of a request: medians over the ring calls, of each pass."""
        calls = timings.calls
        for step in timings.steps:
            for name in ("attention_ms", "wait_ms", "flops"):
                value = getattr(step, name)
                # A wait is a difference of times, which may round to less than 0.
                if not math.isfinite(value) or (name != "wait_ms" and value < 0):
                    raise ValueError(f"{name} of a step must be finite and at least 0, got {value}")
        profile = self._measured[rank]
        in_tiles, planned = 1.0, 0.0
        if self._latest is not None:
            request, latest = self._latest
            mask = self._mask | {"cu_seqlens": request.cu_seqlens}
            planned = self._cost.attention_flops * latest.partition.num_pairs(rank, **mask)
            in_tiles = work_in_tiles(latest.partition, rank, self._cost, profile.tiles, **mask)
        observed = _Observation(None)
        done = took = 0.0  # operations, and what they take at the speeds seen
        for backward in (False, True) if self._training else (False,):
            of_pass = [call for call in calls if call[0].backward == backward]
            passes = _BACKWARD if backward else 1.0
            for steps in of_pass:
                if not any(step.flops for step in steps):
                    steps[0] = replace(steps[0], flops=passes * planned)
            if not of_pass:
                continue
            observed.call_ms += _median(of_pass, lambda step: step.attention_ms + step.wait_ms)
            observed.flops += _median(of_pass, lambda step: step.flops)
            if speeds := call_tflops(of_pass, profile.overhead_ms):
                done += passes
                took += passes / statistics.median(speeds)
        if took > 0:
            observed.speed = in_tiles * done / took / profile.attention_tflops
        return observed


def _median(calls: Sequence[Sequence[StepTiming]], of: Callable[[StepTiming], float]) -> float:
    """Over calls, of the sum over a call's steps."""
    return statistics.median(sum(map(of, steps)) for steps in calls)
