# SPDX-License-Identifier: Apache-2.0
"""Which results activation checkpointing keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy

_ops = torch.ops.ringattn

_KEPT = frozenset({_ops.ring_forward.default, _ops.block_attention.default})


def checkpoint_policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Policy of selective activation checkpointing that keeps what attention returns, ``out`` and
    ``lse``, and recomputes everything else: in a backward, no ring runs its forward again::

        contexts = functools.partial(
            torch.utils.checkpoint.create_selective_checkpoint_contexts, ringattn.checkpoint_policy
        )
        y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    Kept are ``S_r * H * (D * bytes + 4)`` bytes a layer and batch row, ``bytes`` those of an
    element of q; queries, keys and values are recomputed from the layer's input.

    Args:
        ctx: of torch's policies; not looked at.
        op: the operator that was called.
        args: its arguments; not looked at.
        kwargs: likewise.

    Returns:
        MUST_SAVE for :func:`ringattn.ring_attention` and :func:`ringattn.block_attention`, else
        PREFER_RECOMPUTE.
    """
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
