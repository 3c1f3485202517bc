# SPDX-License-Identifier: Apache-2.0
"""One hop of a ring: a rank's keys and values to the next rank."""

import torch

from ringattn._checks import (
    check_collective,
    check_dims,
    check_no_grad,
    check_tensors,
    check_transport,
)
from ringattn._distributed.errors import ErrorsToPeers, call
from ringattn._distributed.groups import Group, resolve_group
from ringattn.partition import Partition, check_partition, partition_arguments

_ops = torch.ops.ringattn


class RotatedKV:
    """A key/value block on its way here, from :func:`rotate_kv`. Not thread safe."""

    def __init__(self, received: torch.Tensor, sent: torch.Tensor) -> None:
        self._received = received  # [2, B, S_previous, H_kv, D], filled by the side stream
        self._sent: torch.Tensor | None = sent  # [2, B, S_r, H_kv, D]

    def wait(self) -> torch.Tensor:
        """The previous rank's block, ``[2, B, S_previous, H_kv, D]``: work queued after this call,
        on the current stream, sees it. Waiting twice returns the same tensor.

        Raises:
            torch.distributed.DistBackendError: a peer died or never arrived.
        """
        if self._sent is not None:
            self._received = call(_ops.wait_kv, self._received, self._sent)
            self._sent = None
        return self._received


def rotate_kv(
    kv: torch.Tensor, partition: Partition, *, group: Group = None, transport: str = "auto"
) -> RotatedKV:
    """Starts one hop of a ring: sends this rank's block to the next rank of the partition's order
    and receives the previous one's, cyclic. Returns at once. Collective.

    Args:
        kv: keys and values stacked, ``[2, B, S_r, H_kv, D]``; they are copied, so it may be written
            to as soon as this returns.
        partition: which rank owns which tokens.
        group: as in :func:`ring_attention`.
        transport: as in :func:`ring_attention`.

    Returns:
        A :class:`RotatedKV`; its ``wait()`` returns the previous rank's block. Under autocast that
        is of autocast's dtype, as the operands of attention are.

    Raises:
        ValueError, torch.distributed.DistBackendError: as in :func:`ring_attention`; ``kv`` that
            requires grad under grad mode.
    """
    ring = resolve_group(group)
    with ErrorsToPeers(ring):
        check_tensors(kv=kv)
        check_dims("kv", kv, "[2, B, S_r, H_kv, D]")
        check_collective(kv=kv)
        check_no_grad("rotate_kv", kv=kv)
        lengths, order, _, _ = partition_arguments(check_partition(partition, ring))
        check_transport(transport)
    received = call(_ops.rotate_kv, kv, lengths, order, ring.name, transport)
    return RotatedKV(received, kv)
