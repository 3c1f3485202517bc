# SPDX-License-Identifier: Apache-2.0
"""IBM's Foundation Model Stack (FMS 1.13): ``pip install 'ibm-fms>=1.13.1,<2'``.

:func:`ringattn.parallelize` puts a model on the ring. :func:`get_model` loads one onto it, and
:func:`generate` draws the same tokens on every rank. Importing this module registers the attention
op "ring".
"""

from ringattn.integrations.fms.attach import attach, cost, detach, handles
from ringattn.integrations.fms.attention import NAME, register
from ringattn.integrations.fms.generate import generate
from ringattn.integrations.fms.strategy import RingAttentionStrategy, get_model
from ringattn.integrations.fms.support import refusal

__all__ = [
    "NAME",
    "RingAttentionStrategy",
    "attach",
    "cost",
    "detach",
    "generate",
    "get_model",
    "handles",
    "refusal",
    "register",
]

register()
