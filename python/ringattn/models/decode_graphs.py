# SPDX-License-Identifier: Apache-2.0
"""Decoding with CUDA graphs: fewer launches between two attention calls."""

from __future__ import annotations

from typing import cast

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ringattn.model_call import ModelCall
from ringattn.models.llama import GatedLinearUnit, LLaMAAttention, LLaMABlock, LLaMAHeadless

# Types of the modules that models of this package are made of.
_OWN_PARTS = (
    *(nn.Embedding, nn.Linear, nn.ModuleList, nn.RMSNorm),
    *(LLaMAHeadless, LLaMABlock, LLaMAAttention, GatedLinearUnit),
)

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # q, k, v of one layer


def replayable(model: LLaMAHeadless) -> bool:
    """Whether a replay does all that ``model`` does: all modules come from this package, no hook or
    dispatch mode (such as FlopCounterMode) observes them, and autocast is off."""
    if _get_current_dispatch_mode() is not None or torch.is_autocast_enabled("cuda"):
        return False
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return False
    return all(
        type(part) in _OWN_PARTS
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in model.modules()
    )


def record(model: LLaMAHeadless, batch: int) -> DecodeGraphs | None:
    """:class:`DecodeGraphs`; None where the model itself has to run: on a CPU, where the model is
    not :func:`replayable`, and where recording fails (no memory is left)."""
    if model.embedding.weight.device.type != "cuda" or not replayable(model):
        return None
    try:
        return DecodeGraphs(model, batch)
    except RuntimeError:
        return None


class DecodeGraphs:
    """The forward pass of one token as CUDA graphs: the kernels between two attention calls are one
    launch instead of about fifteen.

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
        # Outputs of each stretch, read by the next one: kept alive, so that no graph reuses them.
        self._x: list[torch.Tensor] = []  # [B, 1, E]
        self._heads: list[Heads] = []
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._pool = torch.cuda.graph_pool_handle()

        current = torch.cuda.current_stream(weight.device)
        stream = torch.cuda.Stream(weight.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for index in range(config.nlayers + 1):
                self._run(index)  # one-time setup of libraries, outside of a recording
            self._x.clear()
            self._heads.clear()
            for index in range(config.nlayers + 1):
                self._graphs.append(self._record(index))
        current.wait_stream(stream)

    @torch.inference_mode()
    def __call__(self, token_ids: torch.Tensor, call: ModelCall) -> torch.Tensor:
        """:meth:`LLaMAHeadless.forward` for one new token: ``token_ids`` int64 ``[B, 1]``."""
        self._token_ids.copy_(token_ids)
        self._position_ids.fill_(call.num_before)
        for index, block in enumerate(self._blocks):
            self._graphs[index].replay()
            self._attended.copy_(block.attn.attend(*self._heads[index], call, index))
        self._graphs[-1].replay()
        return self._x[-1]

    def _record(self, index: int) -> torch.cuda.CUDAGraph:
        """The graph of :meth:`_run`. Note: not by ``torch.cuda.graph``, which waits for the device
        and empties the memory cache each time."""
        graph = torch.cuda.CUDAGraph()
        # Note: thread_local, because c10d and ringattn watch their events from other threads.
        graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            self._run(index)
        finally:
            graph.capture_end()
        return graph

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
