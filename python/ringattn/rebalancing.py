# SPDX-License-Identifier: Apache-2.0
"""Plans that follow ranks whose speeds change, from what the ring itself takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ringattn import _C
from ringattn._distributed.collectives import agree
from ringattn._distributed.groups import Group, resolve_group
from ringattn._profiling.equalize import NOISE, classes
from ringattn.partition import Partition
from ringattn.planning import ModelCost, Plan, plan, predict, work_in_tiles
from ringattn.profiles import RankProfile
from ringattn.timings import Timings, call_tflops

# A new plan is on trial until it has been seen so often, and is given up if it is that much slower
# than the latest requests under the plan before.
_TRIAL = 3
_FEWEST_BEFORE = 2
_WORSE = 0.01


@dataclass
class _Seen:
    """What one rank tells the others of a request."""

    speed: float | None  # relative to its profile; None: it had nothing to do
    took_ms: float = 0.0  # of a call, waits included
    flops: float = 0.0  # of a call


@dataclass
class _Paces:
    """How long the latest requests took for the work that all ranks did together, by length."""

    requests: int = 0
    partitions: dict[int, Partition] = field(default_factory=dict)
    # (number of the request, milliseconds an operation)
    latest: dict[int, list[tuple[int, float]]] = field(default_factory=dict)

    def add(self, partition: Partition, seen: Sequence[_Seen]) -> None:
        self.requests += 1
        flops = sum(of_rank.flops for of_rank in seen)
        if flops > 0:
            self.partitions[partition.seq_len] = partition
            paces = self.latest.setdefault(partition.seq_len, [])
            paces.append((self.requests, max(of_rank.took_ms for of_rank in seen) / flops))
            del paces[:-_TRIAL]

    def forget(self) -> None:
        """All but the very last requests: speeds have been others before."""
        for paces in self.latest.values():
            paces[:] = [pace for pace in paces if pace[0] > self.requests - _FEWEST_BEFORE]

    def of(self, seq_len: int) -> list[float]:
        return [ms for _, ms in self.latest.get(seq_len, [])]


@dataclass
class _Trial:
    """What a new plan has to prove itself against."""

    profiles: list[RankProfile]  # that plans were made from before
    paces: _Paces
    excess: float  # that the new plan was to save
    controller: _C.Controller  # with what was believed: a bad plan looks like slow ranks

    def outcome(self, paces: _Paces) -> float | None:
        """The new plan's time over that of the one before; None: not known yet."""
        for seq_len in paces.latest:
            new, old = paces.of(seq_len), self.paces.of(seq_len)
            if len(new) < _TRIAL or len(old) < _FEWEST_BEFORE:
                continue
            if paces.partitions[seq_len] != self.paces.partitions[seq_len]:
                return statistics.median(new) / statistics.median(old)
        return None


class Rebalancer:
    """Plans between requests: each with :meth:`plan`, then, after its ring calls, :meth:`observe`.

    Speeds are what attention took, waits excluded, for work that is known. Small deviations from
    the profiles are averaged over up to forty requests. A large one (more than 6 %, and than the
    noise so far explains) is believed when it is seen again: a fall after two of four requests, a
    rise after three in a row, because a rank that has too many tokens holds all others up, one that
    has too few only idles. A rank that falls soon after it rose has to be fast for twice as long
    before it is believed again. Ranks that began with equal profiles count as equal while they
    differ by less than 5 %, and again once they differ by less than 2.5: so much equal devices
    drift apart and back. Plans change when that
    gains more than 2 %, at once after such a jump, else at most every fourth request. Between
    changes, :meth:`plan` gives equal plans for equal lengths.

    A new plan is measured against the one before. Where the first three requests of one length are
    slower under it than the latest under that one, it is given up, with what was believed of speeds
    because of it; until a speed is seen to change, or for 48 requests, plans then change only for
    2 % more than it had promised.

    Matrix products are taken to slow down with attention, the only work that is timed. A rank
    without tokens shows nothing, and one whose calls are mostly overhead looks slow: a rank that
    has fallen that far comes back with new profiles only. Requests need not all be observed.
    Where a whole ring is one launch, ``record_timings(by_block=False)`` shows how fast that is,
    what the launch waits for by itself included; block by block, calls are slower, and not by the
    same on all ranks.

    All ranks hold the same arguments and call the same methods; then all have the same plans, bit
    for bit. Not thread safe.

    Args:
        profiles: one per rank, ``[W]``: speeds to begin with.
        cost: of one layer.
        causal: as in :func:`ringattn.plan`.
        layout: as in :func:`ringattn.plan`.

    Raises:
        ValueError: as :func:`ringattn.plan`.

    The control law is exponential smoothing with a test for level shifts and hysteresis
    (``csrc/planner/controller.h``).
    """

    def __init__(
        self,
        profiles: Sequence[RankProfile],
        cost: ModelCost,
        *,
        causal: bool = True,
        layout: str = "zigzag",
    ) -> None:
        plan(0, profiles, cost, causal=causal, layout=layout)  # refuses wrong arguments
        self._measured = list(profiles)
        self._cost = cost
        self._causal = causal
        self._layout = layout
        self._controller = _C.Controller(len(self._measured))
        self._in_use = self._measured
        self._latest: Plan | None = None
        self._paces = _Paces()
        self._trial: _Trial | None = None

    @property
    def profiles(self) -> list[RankProfile]:
        """What plans are made from now, ``[W]``."""
        return list(self._in_use)

    @property
    def speeds(self) -> list[float]:
        """What is believed of each rank, relative to its first profile, ``[W]``; plans follow only
        when that pays."""
        return self._controller.speeds()

    def plan(self, seq_len: int) -> Plan:
        """The plan of the next request.

        Args:
            seq_len: S.

        Raises:
            ValueError: as :func:`ringattn.plan`.
        """
        self._latest = self._plan(seq_len, self._in_use)
        return self._latest

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
                no :class:`ringattn.Timings`.
        """
        ring = resolve_group(group)
        mistake, own = None, _Seen(None)
        if ring.world_size != len(self._measured):
            mistake = (
                f"profiles must be one for each of the {ring.world_size} ranks of the group, "
                f"got {len(self._measured)}"
            )
        elif not isinstance(timings, Timings):
            mistake = f"timings must be Timings, got {type(timings).__name__}"
        else:
            own = self._see(timings, ring.rank)
        # What plans are made from.
        facts = {
            **{f"the profile of rank {rank}": own for rank, own in enumerate(self._in_use)},
            "cost": self._cost,
            "causal": self._causal,
            "layout": self._layout,
            "seq_len": None if self._latest is None else self._latest.partition.seq_len,
        }
        seen = agree(ring, "observe", mistake, facts, own)
        jumps = self._controller.jumps()
        self._controller.observe([of_rank.speed for of_rank in seen])
        if self._latest is None:
            return False
        self._paces.add(self._latest.partition, seen)
        if self._controller.jumps() != jumps:
            self._paces.forget()
        return self._give_up() or self._change(self._latest)

    def _give_up(self) -> bool:
        """Back to the plan before, where the new one has turned out slower."""
        trial = self._trial
        if trial is None:
            return False
        outcome = trial.outcome(self._paces)
        if outcome is None:
            return False
        self._trial = None
        if outcome <= 1 + _WORSE:
            return False
        self._controller = trial.controller
        self._controller.regret(trial.excess)
        self._in_use, self._paces = trial.profiles, trial.paces
        return True

    def _change(self, current: Plan) -> bool:
        """To plans for the speeds that are believed, where that pays."""
        believed = [
            replace(
                profile,
                attention_tflops=profile.attention_tflops * speed,
                linear_tflops=profile.linear_tflops * speed,
            )
            for profile, speed in zip(self._measured, self._levelled(), strict=True)
        ]
        current_ms = predict(
            current.partition,
            believed,
            self._cost,
            causal=self._causal,
            depth=current.depth,
        )
        best_ms = self._plan(current.partition.seq_len, believed).predicted_ms
        excess = max(current_ms) / best_ms - 1 if best_ms > 0 else 0.0
        if not self._controller.should_replan(excess, current_ms.index(max(current_ms))):
            return False
        self._trial = _Trial(self._in_use, self._paces, excess, self._controller.copy())
        self._in_use, self._paces = believed, _Paces()
        return True

    def _levelled(self) -> list[float]:
        """What is believed, without differences of ranks with equal profiles that are noise. Ranks
        that have been parted come closer, because who owned too much no longer rests while it
        waits: to be equal again takes half as much."""
        believed = self.speeds
        profiles, in_use = (
            [profile.attention_tflops for profile in of_ranks]
            for of_ranks in (self._measured, self._in_use)
        )

        def equal(first: int, rank: int) -> bool:
            closeness = NOISE if in_use[rank] == in_use[first] else NOISE / 2
            return (
                profiles[rank] == profiles[first]
                and believed[rank] >= (1 - closeness) * believed[first]
            )

        speeds = list(believed)
        for ranks in classes(believed, equal):
            mean = statistics.fmean(believed[rank] for rank in ranks)
            for rank in ranks:
                speeds[rank] = mean
        return speeds

    def _plan(self, seq_len: int, profiles: Sequence[RankProfile]) -> Plan:
        return plan(seq_len, profiles, self._cost, causal=self._causal, layout=self._layout)

    def _see(self, timings: Timings, rank: int) -> _Seen:
        """This rank in a request: medians over the ring calls."""
        calls = timings.calls
        planned, in_tiles = 0.0, 1.0
        profile = self._measured[rank]
        if self._latest is not None:
            partition = self._latest.partition
            visits = _C.schedule(
                partition.layout, list(partition.lengths), list(partition.order), rank, self._causal
            )
            planned = self._cost.attention_flops * sum(visit.num_pairs for visit in visits)
            in_tiles = work_in_tiles(
                partition, rank, self._cost, profile.tiles, causal=self._causal
            )
        for steps in calls:
            if not any(step.flops for step in steps):
                steps[0] = replace(steps[0], flops=planned)
        if not calls:
            return _Seen(None)
        speeds = call_tflops(calls, profile.overhead_ms)
        took = [sum(step.attention_ms + step.wait_ms for step in steps) for steps in calls]
        flops = [sum(step.flops for step in steps) for steps in calls]
        return _Seen(
            in_tiles * statistics.median(speeds) / profile.attention_tflops if speeds else None,
            statistics.median(took),
            statistics.median(flops),
        )
