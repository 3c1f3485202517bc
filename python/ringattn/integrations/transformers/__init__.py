# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers (4.57 and 5): ``pip install 'transformers>=4.57'``.

:func:`ringattn.parallelize` puts a model on the ring. Importing this module also registers the
attention implementation "ringattn" for one process: ``from_pretrained(...,
attn_implementation="ringattn")``.
"""

from ringattn.integrations.transformers.attach import attach, cost, detach, handles
from ringattn.integrations.transformers.attention import NAME, register
from ringattn.integrations.transformers.support import refusal

__all__ = ["NAME", "attach", "cost", "detach", "handles", "refusal", "register"]

register()
