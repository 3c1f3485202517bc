# SPDX-License-Identifier: Apache-2.0
"""checkpoint_policy: what attention returns is kept, everything else is recomputed."""

import ringattn
import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def test_results_of_attention_alone_are_kept():
    kept = (torch.ops.ringattn.ring_forward.default, torch.ops.ringattn.block_attention.default)
    for op in kept:
        assert ringattn.checkpoint_policy(None, op) is CheckpointPolicy.MUST_SAVE
    recomputed = (torch.ops.aten.mm.default, torch.ops.ringattn.gather.default, torch.add)
    for op in recomputed:
        policy = ringattn.checkpoint_policy(None, op, torch.ones(1), out=None)
        assert policy is CheckpointPolicy.PREFER_RECOMPUTE
    assert create_selective_checkpoint_contexts(ringattn.checkpoint_policy) is not None
