# SPDX-License-Identifier: Apache-2.0
"""Ring attention for PyTorch: exact attention over a sequence spread across ranks.

Tensors are ``[B, S_r, H, D]``: batch, tokens of this rank, heads, head dimension. Keys and values
keep their own ``H_kv`` heads, ``H % H_kv == 0``.
"""

# The library comes first: it defines the operators; _ops adds their fake kernels.
from ringattn import (  # noqa: F401
    _library,
    _logging,
    _ops,
    models,
    reference,
    strategies,
    testing,
)
from ringattn._decode_attention import decode_attention
from ringattn.checkpointing import checkpoint_policy
from ringattn.functional import (
    block_attention,
    merge_states,
    ring_attention,
    synchronize,
)
from ringattn.generation import generate
from ringattn.gradients import all_reduce_gradients
from ringattn.modules import RingAttention
from ringattn.parallel import parallelize, unparallelize
from ringattn.partition import Partition
from ringattn.planning import ModelCost, Plan, plan, plan_cache
from ringattn.profiles import AttentionTile, RankProfile, load_profiles, save_profiles
from ringattn.profiling import measure_profiles
from ringattn.rebalancing import Rebalancer
from ringattn.rotation import RotatedKV, rotate_kv
from ringattn.timings import StepTiming, Timings, record_timings
from ringattn.transports import last_transport

_logging.install()

__version__ = _library.VERSION

__all__ = [
    "AttentionTile",
    "ModelCost",
    "Partition",
    "Plan",
    "RankProfile",
    "Rebalancer",
    "RingAttention",
    "RotatedKV",
    "StepTiming",
    "Timings",
    "all_reduce_gradients",
    "block_attention",
    "checkpoint_policy",
    "decode_attention",
    "generate",
    "last_transport",
    "load_profiles",
    "measure_profiles",
    "merge_states",
    "models",
    "parallelize",
    "plan",
    "plan_cache",
    "record_timings",
    "reference",
    "ring_attention",
    "rotate_kv",
    "save_profiles",
    "strategies",
    "synchronize",
    "testing",
    "unparallelize",
]
