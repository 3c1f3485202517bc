# SPDX-License-Identifier: Apache-2.0
"""Decoding with CUDA graphs: fewer launches between two attention calls."""

from __future__ import annotations

from typing import cast

import torch

from ringattn.models.cache import ShardedKVCache
from ringattn.models.llama import LLaMABlock, LLaMAHeadless

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v of one layer


class DecodeGraphs:
    """A token's way through a model, recorded: what lies between two attention calls is one launch
    instead of about fifteen.

    Attention itself stays outside, because its keys grow and ranks meet in it. The graphs hold the
    addresses of the weights: a model whose weights are replaced needs new ones. Not thread safe;
    ``__call__`` returns a buffer that the next call overwrites.

    Args:
        model: on a CUDA device.
        batch: B.
    """

    @torch.inference_mode()
    def __init__(self, model: LLaMAHeadless, batch: int) -> None:
        config, weight = model.config, model.embedding.weight
        self._model = model
        self._blocks = cast(list[LLaMABlock], list(model.layers))
        self._token_ids = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self._position_ids = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._attended = weight.new_zeros(batch, 1, config.nheads * config.head_dim)
        # What each stretch hands to the next: kept alive, so that no graph reuses its memory.
        self._x: list[torch.Tensor] = []  # [B, 1, E]
        self._heads: list[Heads] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []

        stream, pool = torch.cuda.Stream(weight.device), torch.cuda.graph_pool_handle()
        stream.wait_stream(torch.cuda.current_stream(weight.device))
        with torch.cuda.stream(stream):  # libraries set themselves up outside of a recording
            for index in range(config.nlayers + 1):
                self._run(index)
        self._x.clear()
        self._heads.clear()
        for index in range(config.nlayers + 1):
            graph = torch.cuda.CUDAGraph()
            # Note: thread_local, because c10d and ringattn watch their events from other threads.
            with torch.cuda.graph(graph, pool, stream, capture_error_mode="thread_local"):
                self._run(index)
            self._graphs.append(graph)

    @torch.inference_mode()
    def __call__(
        self, token_ids: torch.Tensor, position: int, cache: ShardedKVCache
    ) -> torch.Tensor:
        """As :meth:`LLaMAHeadless.forward` of one new token: ``token_ids`` int64 ``[B, 1]``."""
        self._token_ids.copy_(token_ids)
        self._position_ids.fill_(position)
        for index, block in enumerate(self._blocks):
            self._graphs[index].replay()
            self._attended.copy_(block.attn.attend(*self._heads[index], None, cache, index))
        self._graphs[-1].replay()
        return self._x[-1]

    def _run(self, index: int) -> None:
        """The stretch before the attention of layer ``index``, or after that of the last."""
        model = self._model
        if index == 0:
            x = model.embedding(self._token_ids)
            self._rotation = model.rotary(self._position_ids)
        else:
            x = self._blocks[index - 1].after(self._x[index - 1], self._attended)
        if index == model.config.nlayers:
            x = model.dec_norm(x)
        else:
            self._heads.append(self._blocks[index].before(x, self._rotation))
        self._x.append(x)
