# SPDX-License-Identifier: Apache-2.0
"""Ranks that compute different tokens find out."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ringattn._distributed.collectives import checksum, complete
from ringattn._distributed.groups import GroupInfo


class Agreement:
    """Compares the tokens of each call between the ranks, with one all-reduce of three numbers.

    On a CPU the call itself fails. On CUDA the host does not wait for this call's numbers, but for
    those of the call before, which are there.
    """

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.cuda.Event] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_pending": None}  # of a copy, which has made no call

    def check(self) -> None:
        """ValueError, on every rank, where the call before had different tokens or a wrong mask."""
        pending, self._pending = self._pending, None
        if pending is not None:
            numbers, arrived = pending
            arrived.synchronize()
            _check(numbers)

    def compare(self, ring: GroupInfo, tokens: torch.Tensor, wrong: torch.Tensor | None) -> None:
        """Collective.

        Args:
            ring: the ranks.
            tokens: ids of this call, ``[B, S]``, or embeddings ``[B, S, E]``, whose ranks are not
                compared.
            wrong: whether this call's mask is one that it must not be; None: it is not.

        Raises:
            ValueError: on every rank, on a CPU.
        """
        if ring.world_size == 1 and wrong is None:
            return
        total = tokens.new_zeros((), dtype=torch.int64)
        if not tokens.is_floating_point():
            total = checksum(tokens)
        wrong = torch.zeros_like(total) if wrong is None else wrong.to(torch.int64)
        # The largest and, negated, the smallest sum. Note: ~x = -x - 1, which does not overflow.
        numbers = torch.stack((total, ~total, wrong))
        if ring.world_size > 1:
            group = ring.process_group
            complete(
                *(ring, "forward", numbers.device),
                lambda: [dist.all_reduce(numbers, dist.ReduceOp.MAX, group, async_op=True)],
            )
        if numbers.device.type == "cpu":
            _check(numbers)
            return
        on_host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        on_host.copy_(numbers, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record(torch.cuda.current_stream(numbers.device))
        self._pending = (on_host, arrived)


def _check(numbers: torch.Tensor) -> None:
    largest, smallest, wrong = numbers.tolist()
    if wrong:
        raise ValueError(OTHER_MASK)
    if largest != ~smallest:
        raise ValueError(
            "x must be the same tokens on all ranks, got different ones: generate with "
            "ringattn.integrations.fms.generate(), where ranks draw the same tokens, or with "
            "do_sample=False"
        )


OTHER_MASK = "mask must be the prompt's mask and 0 for the tokens after it, got another one"
