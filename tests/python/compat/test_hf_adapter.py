# SPDX-License-Identifier: Apache-2.0
"""Models of transformers whose "flash_attention_2" goes through the ring."""

import re
from itertools import pairwise
from typing import Any

import pytest
import torch
from _distributed import this
from _llama import random_ids, tiny_llama
from ringattn.compat.ring_flash_attn import (
    substitute_hf_flash_attn,
    update_ring_flash_attn_params,
)
from ringattn.compat.ring_flash_attn.adapters import hf_adapter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

DOCUMENTS = (0, 7, 20, 24)


def model_with(attention: str, **changes: Any) -> Any:
    model = tiny_llama(**changes).double().eval()
    # What from_pretrained would set, where the package flash-attn is installed.
    model.config._attn_implementation = attention
    return model


def position_ids() -> torch.Tensor:
    return torch.cat([torch.arange(end - start) for start, end in pairwise(DOCUMENTS)])[None]


@torch.no_grad()
def logits_over_the_ring() -> torch.Tensor:
    rank, size = this().rank, this().world_size
    before = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    try:
        substitute_hf_flash_attn(None, 1)
        substitute_hf_flash_attn(torch.distributed.group.WORLD, heads_k_stride=1)  # again
        update_ring_flash_attn_params(torch.tensor(DOCUMENTS, dtype=torch.int32), None)
        names = ["cu_seqlens_k", "cu_seqlens_q", "local_k_slice", "max_seqlen_k", "max_seqlen_q"]
        assert sorted(hf_adapter.DATA_PARAMS) == sorted([*names, "cu_seqlens"])
        model = model_with("flash_attention_2")
        ids = random_ids(1, DOCUMENTS[-1]).chunk(size, 1)[rank]
        places = position_ids().chunk(size, 1)[rank]
        logits = model(ids, position_ids=places, use_cache=False).logits
        called = []
        hf_adapter._replaced = lambda module, query, *args, **kwargs: (
            called.append(module),
            (query.transpose(1, 2), None),
        )[1]
        hf_adapter.use_ring_attn(False)
        model(ids, position_ids=places, use_cache=False)
        assert len(called) == model.config.num_hidden_layers
        return logits
    finally:
        hf_adapter.use_ring_attn(True)
        hf_adapter._replaced = None
        hf_adapter.DATA_PARAMS.clear()
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = before


@pytest.mark.parametrize("size", [1, 2, 3])
def test_packed_logits_are_those_of_each_document(rank_pool, size):
    logits = torch.cat(rank_pool(size).run(logits_over_the_ring), 1)
    model, ids = model_with("eager"), random_ids(1, DOCUMENTS[-1])
    with torch.no_grad():
        alone = [model(ids[:, start:end]).logits for start, end in pairwise(DOCUMENTS)]
    torch.testing.assert_close(logits, torch.cat(alone, 1), rtol=0, atol=1e-6)


def refuse(what: str) -> str:
    rank, size = this().rank, this().world_size
    before = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
    try:
        substitute_hf_flash_attn(None, 1)
        if what != "no documents":
            update_ring_flash_attn_params(torch.tensor([0, 4 * size]), None)
        x = torch.ones(1, 2, 4, 8)
        options: dict[str, Any] = {}
        if rank == size - 1:
            if what == "mask":
                options = {"attention_mask": torch.ones(1, 4)}
            elif what == "dropout":
                options = {"dropout": 0.1}
            elif what == "batch":
                x = torch.ones(2, 2, 4, 8)
        attention = ALL_ATTENTION_FUNCTIONS["flash_attention_2"]
        with pytest.raises(ValueError) as error:
            attention(torch.nn.Module(), x, x, x, **{"attention_mask": None, **options})
        return str(error.value)
    finally:
        hf_adapter._replaced = None
        hf_adapter.DATA_PARAMS.clear()
        ALL_ATTENTION_FUNCTIONS["flash_attention_2"] = before


REFUSED = {
    "mask": "attention_mask must be None, .*, got shape",
    "dropout": "attention dropout must be 0, got 0.1",
    "batch": r"q and k must be the same rows of one batch row, got \[2, 4\]",
    "no documents": r"update_ring_flash_attn_params\(cu_seqlens, group\) must be called before",
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_the_adapter_does_not_serve_is_refused_on_all_ranks(rank_pool, what):
    for message in rank_pool(2).run(refuse, what):
        assert re.search(REFUSED[what], message), message
