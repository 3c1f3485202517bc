# SPDX-License-Identifier: Apache-2.0
"""Packed documents of a call: their boundaries, from what trainers and collators of transformers
give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ringattn._masks import checked_documents

DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k")  # keywords of a call


def packed_documents(
    given: Mapping[str, Any], num_tokens: int, *, use_cache: bool, keeps_cache: bool | None = None
) -> torch.Tensor | None:
    """Boundaries of the documents of a call, int64 ``[0, ..., S]`` on the CPU, or None of one text.
    Waits for the device.

    ``cu_seq_lens_q`` and ``cu_seq_lens_k`` say them; without these, position ids that do not go on
    by 1, where there is neither cache nor mask, as transformers has it: ``use_cache`` as in its
    config, whether keys are kept (``keeps_cache``, which None takes from it) or not.

    Raises:
        ValueError: boundaries together with a cache or a mask, or which are not the same for
            queries and keys or not those of this call; rows whose position ids differ in where
            they restart.
    """
    mask, position_ids = given.get("attention_mask"), given.get("position_ids")
    of_queries, of_keys = given.get("cu_seq_lens_q"), given.get("cu_seq_lens_k")
    if of_queries is not None or of_keys is not None:
        keeps_cache = use_cache if keeps_cache is None else keeps_cache
        return _given(of_queries, of_keys, num_tokens, mask is not None, keeps_cache)
    if position_ids is None or use_cache or mask is not None:
        return None
    restarts = (position_ids.diff(dim=-1) != 1).cpu()
    if not bool(restarts.any()):
        return None
    for row in range(1, restarts.size(0)):
        if not torch.equal(restarts[row], restarts[0]):
            raise ValueError(
                "position_ids must restart at the same tokens in all rows of packed documents, "
                f"got others in row {row} than in row 0: call the model row by row"
            )
    starts = restarts[0].nonzero().flatten() + 1
    return torch.cat((starts.new_tensor([0]), starts, starts.new_tensor([num_tokens])))


def _given(
    of_queries: Any, of_keys: Any, num_tokens: int, has_mask: bool, keeps_cache: bool
) -> torch.Tensor:
    if of_queries is None or of_keys is None:
        missing = "cu_seq_lens_q" if of_queries is None else "cu_seq_lens_k"
        raise ValueError(f"cu_seq_lens_q and cu_seq_lens_k must both be given, got no {missing}")
    try:
        queries, keys = (checked_documents(x, num_tokens) for x in (of_queries, of_keys))
    except ValueError as error:
        rule = str(error).replace("cu_seqlens", "cu_seq_lens_q and cu_seq_lens_k", 1)
        raise ValueError(rule) from None
    if not torch.equal(queries, keys):
        raise ValueError("cu_seq_lens_k must be equal to cu_seq_lens_q, got other boundaries")
    if has_mask:
        raise ValueError("attention_mask must be None with cu_seq_lens_q, got one")
    if keeps_cache:
        raise ValueError("use_cache must be False with cu_seq_lens_q, got True or a cache")
    return queries
