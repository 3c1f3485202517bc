# SPDX-License-Identifier: Apache-2.0
"""The functions of ring-flash-attn 0.1.8 (https://github.com/zhuzilin/ring-flash-attention) under
their names and arguments, over :func:`ringattn.ring_attention`.

Replace ``from ring_flash_attn import ...`` by ``from ringattn.compat.ring_flash_attn import ...``.
Tensors hold the rows of this rank, dense ``[B, S_r, H, D]``, varlen ``[T_r, H, D]``, as many as on
every other rank; ``kvpacked`` and ``qkvpacked`` forms have them stacked before the heads.

=================  ================================================================================
function           rows of rank r
=================  ================================================================================
``ring_``          chunk r of W
``zigzag_ring_``   chunks r and 2W - 1 - r of 2W
``stripe_``        r, r + W, r + 2W, ...
``ring_*varlen``   of each document chunk r of W; ``cu_seqlens`` are the boundaries of these shares
``zigzag_*varlen`` of each document chunks r and 2W - 1 - r of 2W; ``cu_seqlens`` likewise
``llama3_``        chunk r of W of the whole pack; ``llama3_flash_attn_prepare_cu_seqlens``
=================  ================================================================================

Keywords of all functions: ``softmax_scale``, None for ``1 / sqrt(D)``; ``causal``, False unless it
is given, with every layout; ``window_size`` (left, right), counted in positions of the sequence or
document; ``return_attn_probs``: also lse, ``[B, H, S_r]`` or ``[H, T_r]``, and None; ``group``,
None for the default group. ``dropout_p`` must be 0 and ``alibi_slopes`` None.
``deterministic=True`` is for calls without gradients, or under
``torch.use_deterministic_algorithms(True)``. ``max_seqlen`` and ``heads_k_stride`` are not needed;
any value will do.
"""

from ringattn.compat.ring_flash_attn.adapters import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from ringattn.compat.ring_flash_attn.dense import (
    ring_flash_attn_func,
    ring_flash_attn_kvpacked_func,
    ring_flash_attn_qkvpacked_func,
    stripe_flash_attn_func,
    stripe_flash_attn_kvpacked_func,
    stripe_flash_attn_qkvpacked_func,
    zigzag_ring_flash_attn_func,
    zigzag_ring_flash_attn_kvpacked_func,
    zigzag_ring_flash_attn_qkvpacked_func,
)
from ringattn.compat.ring_flash_attn.llama3 import (
    llama3_flash_attn_prepare_cu_seqlens,
    llama3_flash_attn_varlen_func,
    llama3_flash_attn_varlen_kvpacked_func,
    llama3_flash_attn_varlen_qkvpacked_func,
)
from ringattn.compat.ring_flash_attn.varlen import (
    ring_flash_attn_varlen_func,
    ring_flash_attn_varlen_kvpacked_func,
    ring_flash_attn_varlen_qkvpacked_func,
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
)

__all__ = [
    "llama3_flash_attn_prepare_cu_seqlens",
    "llama3_flash_attn_varlen_func",
    "llama3_flash_attn_varlen_kvpacked_func",
    "llama3_flash_attn_varlen_qkvpacked_func",
    "ring_flash_attn_func",
    "ring_flash_attn_kvpacked_func",
    "ring_flash_attn_qkvpacked_func",
    "ring_flash_attn_varlen_func",
    "ring_flash_attn_varlen_kvpacked_func",
    "ring_flash_attn_varlen_qkvpacked_func",
    "stripe_flash_attn_func",
    "stripe_flash_attn_kvpacked_func",
    "stripe_flash_attn_qkvpacked_func",
    "substitute_hf_flash_attn",
    "update_ring_flash_attn_params",
    "zigzag_ring_flash_attn_func",
    "zigzag_ring_flash_attn_kvpacked_func",
    "zigzag_ring_flash_attn_qkvpacked_func",
    "zigzag_ring_flash_attn_varlen_func",
    "zigzag_ring_flash_attn_varlen_kvpacked_func",
    "zigzag_ring_flash_attn_varlen_qkvpacked_func",
]
