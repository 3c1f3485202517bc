# SPDX-License-Identifier: Apache-2.0
"""What one rank computes for all, and how a failure there, or in the callers' code on any rank,
reaches all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ringattn._distributed.collectives import all_gather, gather_objects
from ringattn._distributed.errors import report_to_peers
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.host_copy import HostCopy


class OnOneRank:
    """Integers that one rank computes, on every rank.

    Args:
        ring: the ranks.
        source: the one that computes.
        what: what it does, for errors: "draw a token".
        callers: whether all ranks run code of the caller's for it. Where that fails, its exception
            comes out unchanged, and the other ranks fail, too; on CUDA one call later, because
            reading a result would make every rank wait for its device in each step.
    """

    def __init__(self, ring: GroupInfo, source: int, what: str, *, callers: bool = False) -> None:
        self.ring = ring
        self.source = source
        self.what = what
        self.callers = callers
        self._pending: HostCopy | None = None  # whether each rank failed, of the latest call

    def __call__(
        self, count: int, device: torch.device, compute: Callable[[], torch.Tensor | None]
    ) -> torch.Tensor:
        """int64 ``[count]``: what ``compute()``, called on every rank, returned on the source.
        Collective.

        Raises:
            RuntimeError: it failed; on a CPU on all ranks, on CUDA as the class says. Without
                ``callers``, ranks on CUDA report that the source is gone.
        """
        self.check()
        on_cpu = device.type == "cpu"
        problem: Exception | None = None
        own: torch.Tensor | None = None
        try:
            own = compute()
        except Exception as error:  # of any type: the peers wait for this rank
            problem = error
        # Note: on CUDA each kernel of a token costs time.
        flagged = on_cpu or self.callers
        mine = own
        if own is None or flagged:
            mine = torch.zeros(count + flagged, dtype=torch.int64, device=device)
            if own is not None:
                mine[:count] = own
            if flagged and problem is not None:
                mine[count] = 1
        assert mine is not None
        numbers = all_gather(self.ring, "generate", mine)
        if on_cpu:
            self._check(numbers[:, count], problem)
        elif problem is not None:
            if not self.callers:
                report_to_peers(self.ring, problem)
            raise problem
        elif self.callers and self.ring.world_size > 1:
            self._pending = HostCopy(numbers[:, count])
        return numbers[self.source, :count]

    def check(self) -> None:
        """RuntimeError where a peer failed in the call before."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        failed = pending.wait()
        if failed.any():
            raise RuntimeError(f"rank {int(failed.argmax())} could not {self.what}")

    def _check(self, failed: torch.Tensor, problem: Exception | None) -> None:
        """Raises, where a rank failed, on every rank."""
        if not failed.any():
            return
        sentence = None if problem is None else f"could not {self.what}: {problem}"
        sentences = gather_objects(self.ring, "generate", sentence)
        if problem is not None and self.callers:
            raise problem
        rank = next(rank for rank, given in enumerate(sentences) if given is not None)
        raise RuntimeError(f"rank {rank} {sentences[rank]}") from problem
