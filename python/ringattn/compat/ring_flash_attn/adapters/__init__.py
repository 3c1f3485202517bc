# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face transformers whose attention is that of ring-flash-attn."""

from ringattn.compat.ring_flash_attn.adapters.hf_adapter import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)

__all__ = ["substitute_hf_flash_attn", "update_ring_flash_attn_params"]
