# SPDX-License-Identifier: Apache-2.0
"""Plans that follow ranks whose speeds change, from what the ring itself takes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ringattn import _C
from ringattn._calls import collective
from ringattn._group import Group, Ring, resolve_group
from ringattn.planning import ModelCost, Plan, plan, predict
from ringattn.profiles import RankProfile
from ringattn.timings import StepTiming, Timings

_MOST_OVERHEAD = 0.5  # of what a call took: beyond, the rest says nothing about speed


class Rebalancer:
    """Plans between requests: each with :meth:`plan`, then, after its ring calls, :meth:`observe`.

    Speeds are what attention took, waits excluded, for work that is known. Small deviations from
    the profiles are averaged over about ten requests. A large one (more than 6 %, and than the
    noise so far explains) is believed when it is seen again: a fall after two of four requests, a
    rise after three in a row, because a rank that has too many tokens holds all others up, one that
    has too few only idles. A rank that falls soon after it rose has to be fast for twice as long
    before it is believed again. Plans change when that gains more than 2 %, at once after such a
    jump, else at most every fourth request. Between changes, :meth:`plan` gives equal plans for
    equal lengths.

    Matrix products are taken to slow down with attention, the only work that is timed. A rank
    without tokens shows nothing: its speed stays what it was. Requests need not all be observed:
    where a whole ring is one launch, one that is recorded goes block by block instead.

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
    (``csrc/partition/controller.h``).
    """

    def __init__(
        self,
        profiles: Sequence[RankProfile],
        cost: ModelCost,
        *,
        causal: bool = True,
        layout: str = "zigzag",
    ) -> None:
        self._measured = list(profiles)
        self._cost = cost
        self._causal = causal
        self._layout = layout
        plan(0, self._measured, cost, causal=causal, layout=layout)  # refuses wrong arguments
        self._controller = _C.Controller(len(self._measured))
        self._in_use = self._measured
        self._latest: Plan | None = None

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
        message, speed = None, None
        if ring.world_size != len(self._measured):
            message = (
                f"profiles must be one for each of the {ring.world_size} ranks of the group, "
                f"got {len(self._measured)}"
            )
        elif not isinstance(timings, Timings):
            message = f"timings must be Timings, got {type(timings).__name__}"
        else:
            speed = self._speed(timings.steps, ring.rank)
        seen = self._from_all(ring, message, speed)
        self._controller.observe(seen)
        if self._latest is None:
            return False
        seq_len = self._latest.partition.seq_len
        believed = [
            replace(
                profile,
                attention_tflops=profile.attention_tflops * speed,
                linear_tflops=profile.linear_tflops * speed,
            )
            for profile, speed in zip(self._measured, self.speeds, strict=True)
        ]
        current_ms = predict(
            self._latest.partition,
            believed,
            self._cost,
            causal=self._causal,
            depth=self._latest.depth,
        )
        best_ms = self._plan(seq_len, believed).predicted_ms
        excess = max(current_ms) / best_ms - 1 if best_ms > 0 else 0.0
        changed = self._controller.should_replan(excess, current_ms.index(max(current_ms)))
        if changed:
            self._in_use = believed
        return changed

    def _plan(self, seq_len: int, profiles: Sequence[RankProfile]) -> Plan:
        return plan(seq_len, profiles, self._cost, causal=self._causal, layout=self._layout)

    def _speed(self, steps: Sequence[StepTiming], rank: int) -> float | None:
        """Of this rank in a request, relative to its profile: the median over the ring calls. None:
        it had nothing to do."""
        planned = 0.0
        if self._latest is not None:
            partition = self._latest.partition
            visits = _C.schedule(
                partition.layout, list(partition.lengths), list(partition.order), rank, self._causal
            )
            planned = self._cost.attention_flops * sum(visit.num_pairs for visit in visits)
        calls: dict[int, list[StepTiming]] = {}
        for step in steps:
            calls.setdefault(step.call, []).append(step)
        profile = self._measured[rank]
        speeds = []
        for of_call in calls.values():
            flops = sum(step.flops for step in of_call) or planned
            took_ms = sum(step.attention_ms for step in of_call)
            if flops > 0 and took_ms > 0:
                work_ms = took_ms - min(profile.overhead_ms, _MOST_OVERHEAD * took_ms)
                speeds.append(flops / (work_ms * 1e9) / profile.attention_tflops)
        return statistics.median(speeds) if speeds else None

    def _from_all(self, ring: Ring, message: str | None, speed: float | None) -> list[float | None]:
        """The speeds of all ranks, or on every rank what is wrong on any."""
        own = (message, speed, self._latest, self._in_use)
        of_ranks: list[Any] = [own] * ring.world_size
        if ring.world_size > 1:
            with collective(ring, "observe"):
                dist.all_gather_object(of_ranks, own, group=ring.process_group)
        for rank, (problem, _, *planned) in enumerate(of_ranks):
            if problem is not None:
                raise ValueError(problem if rank == ring.rank else f"rank {rank}: {problem}")
            if planned != [*of_ranks[0][2:]]:
                raise ValueError(
                    "plans must be the same on all ranks, "
                    f"got another one on rank {rank} than on rank 0"
                )
        return [seen for _, seen, *_ in of_ranks]
