# SPDX-License-Identifier: Apache-2.0
"""One new token through a model on CUDA: fused kernels between its products, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import NoReturn, cast

import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ringattn import _C, _ops  # noqa: F401  defines the operators
from ringattn._decode_attention import attend_cached
from ringattn._distributed.errors import call
from ringattn.cache import ShardedKVCache
from ringattn.models.llama import (
    GatedLinearUnit,
    LLaMA,
    LLaMAAttention,
    LLaMABlock,
    LLaMAHeadless,
)

_kernels = torch.ops.ringattn

# The parts of a model that the step computes by itself; products are calls of whatever layers there
# are.
_COMPUTED = (
    *(nn.Embedding, nn.ModuleList, nn.RMSNorm),
    *(LLaMAHeadless, LLaMABlock, LLaMAAttention, GatedLinearUnit),
)
_PRODUCTS = ("qkv", "dense", "wg1", "w2")
_ROOM = 2**28  # bytes: several times what graphs and their memory take

# Each stretch between two attention calls ends with the layer and its queries.
_Stretches = Generator[tuple[int, torch.Tensor], torch.Tensor | None, torch.Tensor]


def misfit(model: LLaMAHeadless) -> str | None:
    """What of ``model`` the step has no kernels for; None: nothing."""
    for name, part in model.named_modules():
        if name.rpartition(".")[2] in _PRODUCTS:
            continue
        inside_product = any(parent in _PRODUCTS for parent in name.split("."))
        if not inside_product and type(part) not in _COMPUTED:
            return f"a {type(part).__name__} as {name}"
    weight, config = model.embedding.weight, model.config
    if config.window_size is not None:
        return f"a window of {config.window_size} keys"
    if weight.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"weights of {weight.dtype}"
    if config.emb_dim % 8 or config.hidden_dim % 8:
        return f"rows of {config.emb_dim} and {config.hidden_dim} elements, not multiples of 8"
    return None


def replayable(model: LLaMAHeadless) -> bool:
    """Whether a step does all that ``model`` does: all modules come from this package, no hook or
    dispatch mode (such as FlopCounterMode) observes them, and autocast is off."""
    if _get_current_dispatch_mode() is not None or torch.is_autocast_enabled("cuda"):
        return False
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return False
    return all(
        type(part) in (*_COMPUTED, nn.Linear)
        and not (part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part))
        for part in model.modules()
    )


class DecodeStep:
    """The forward pass of one new token per batch row, after what a cache holds. Collective.

    Kernels that do little for one token are fused: a residual with the norm behind it, the gate of
    the feed-forward layer, rotation with the cache's update. With :meth:`record` the launches of a
    token are replayed as CUDA graphs: one for the whole token, on one rank and over ranks that
    share memory ("symmetric"); over others one between two attention calls, in which they meet.

    The graphs hold the addresses of weights and cache: a model whose weights are replaced needs a
    new step; where a cache has grown, they are recorded anew, but for one graph over ranks, which
    is refused. Not thread safe; a call returns a buffer that the next one overwrites.

    Args:
        model: on a CUDA device, without a :func:`misfit`.
        cache: of the prompt, its rows of one length.
        batch: B.
    """

    @classmethod
    def of(
        cls, model: LLaMA, cache: ShardedKVCache, batch: int, *, observed: bool = False
    ) -> DecodeStep | None:
        """A step; None where the model itself has to run: on a CPU, under autocast, for rows of
        unequal lengths, where it is a :func:`misfit` and, unless ``observed`` says that it does not
        matter, where it is not :func:`replayable`."""
        base = model.base_model
        if base.embedding.weight.device.type != "cuda" or torch.is_autocast_enabled("cuda"):
            return None
        if cache.key_lengths is not None or misfit(base) is not None:
            return None
        return cls(model, cache, batch) if observed or replayable(base) else None

    def __init__(self, model: LLaMA, cache: ShardedKVCache, batch: int) -> None:
        base = model.base_model
        weight, config = base.embedding.weight, base.config
        self._model, self._ring, self._cache = base, model.ring, cache
        self._blocks = cast(list[LLaMABlock], list(base.layers))
        integers = {"dtype": torch.int32, "device": weight.device}
        self._token_ids = torch.zeros(batch, 1, dtype=torch.int64, device=weight.device)
        self._position_ids = torch.zeros(1, dtype=torch.int64, device=weight.device)
        self._slot = torch.full((1,), -1, **integers)  # where this rank keeps the token
        self._key_lengths = torch.zeros(batch, **integers)  # of this rank, with the token
        self._new_keys = weight.new_empty(batch, 0, config.kvheads, config.head_dim)
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._queries: list[tuple[int, torch.Tensor]] = []  # what graphs but the last end with
        self._records_attention = self._ring.world_size == 1
        self._recorded_storage = -1  # the version of the cache's storage that graphs hold

    @torch.inference_mode()
    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Hidden state ``[B, E]`` of ``token_ids``, int64 ``[B]``. Advances the cache."""
        cache = self._cache
        position = cache.seq_len
        kept = cache.advance(1)[cache.rank] > 0
        held = cache.lengths[cache.rank]
        self._token_ids.copy_(token_ids[:, None])
        self._position_ids.fill_(position)
        self._key_lengths.fill_(held)
        self._slot.fill_(held - 1 if kept else -1)
        if self._graphs and self._recorded_storage != cache.storage_version:
            if self._records_ranks:
                # Another rank, which keeps its storage, would not record in this call.
                self._fail("cache must have room for all tokens of a recorded step")
            self.record()
        if not self._graphs:
            return self._run(self._stretches(), self._attend)[:, 0]
        if self._records_ranks:
            place = (self._ring.name, self._slot.device.index)
            call(_C.begin_replay, *place)
            try:
                self._graphs[0].replay()
            finally:
                call(_C.end_replay, *place)
            return self._hidden[:, 0]
        self._graphs[0].replay()
        for graph, (layer, q) in zip(self._graphs[1:], self._queries, strict=True):
            self._attended.copy_(self._attend(layer, q))
            graph.replay()
        return self._hidden[:, 0]

    def has_room(self) -> bool:
        """Whether the device has memory for the graphs. Frees what the allocator keeps unused."""
        device = self._slot.device
        if torch.cuda.mem_get_info(device)[0] < _ROOM:
            torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0] >= _ROOM

    @torch.inference_mode()
    def record(self, *, required: bool = False) -> None:
        """Records the graphs; directly after a call. All ranks do, or none: their calls of
        attention are counted. Where recording fails (no memory is left), calls go on without
        graphs; where attention over ranks was to be recorded, the group ends.

        Raises:
            RuntimeError: where recording fails, if ``required`` or the group ends.
        """
        if not self._graphs and not self._records_attention:
            self._records_attention = _C.can_record(self._ring.name)
        try:
            self._record()
        except RuntimeError as error:
            if self._records_ranks:
                self._fail(f"recording failed: {error}", error)
            if required:
                raise

    @property
    def _records_ranks(self) -> bool:
        """Whether graphs hold attention in which ranks meet."""
        return self._records_attention and self._ring.world_size > 1

    def _fail(self, reason: str, cause: Exception | None = None) -> NoReturn:
        """Ends the group, whose other ranks replay, and raises."""
        _C.fail_group(self._ring.name, reason.split("\n")[0])
        raise RuntimeError(reason) from cause

    def _record(self) -> None:
        self._graphs, self._queries = [], []
        config, batch = self._model.config, self._token_ids.size(0)
        self._attended = self._new_keys.new_zeros(batch, 1, config.nheads * config.head_dim)
        kept = self._slot.clone()
        self._slot.fill_(-1)  # no cache takes what runs here
        current = torch.cuda.current_stream(self._slot.device)
        stream = torch.cuda.Stream(self._slot.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Once without a recording: products set up their library for this stream.
            self._run(self._stretches(), lambda layer, q: self._attended)
            graphs = self._recorded()
        current.wait_stream(stream)
        self._slot.copy_(kept)
        self._graphs, self._recorded_storage = graphs, self._cache.storage_version

    def _recorded(self) -> list[torch.cuda.CUDAGraph]:
        """The graphs of a token, for the current stream."""
        pool = torch.cuda.graph_pool_handle()
        graphs: list[torch.cuda.CUDAGraph] = []
        stretches = self._stretches()
        attended: torch.Tensor | None = None
        while True:
            # Note: not by torch.cuda.graph, which waits for the device and empties the memory cache
            # each time. thread_local, because c10d and ringattn watch events from other threads.
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                if self._records_attention:
                    self._hidden = self._run(stretches, self._attend)
                else:
                    self._queries.append(stretches.send(attended))
            except StopIteration as end:
                self._hidden = end.value
            finally:
                graph.capture_end()
            graphs.append(graph)
            if len(graphs) > len(self._queries):
                return graphs
            attended = self._attended

    def _stretches(self) -> _Stretches:
        """The kernels of a token, up to each attention call, whose result is sent in
        ``[B, 1, H * D]``, and to the end: the hidden state ``[B, 1, E]``."""
        model = self._model
        x = model.embedding(self._token_ids)
        cos, sin = model.rotary(self._position_ids)
        normed = self._blocks[0].ln(x)
        norms = [*(block.ln for block in self._blocks[1:]), model.dec_norm]
        for layer, (block, next_norm) in enumerate(zip(self._blocks, norms, strict=True)):
            keys, values = self._cache.storage(layer, self._new_keys)
            qkv = block.attn.qkv(normed)
            q = _kernels.rotate_into_cache(qkv, cos, sin, keys, values, self._slot)
            attended = yield layer, q
            x, normed = _add_norm(x, block.attn.dense(attended), block.ff_ln)
            gated = _kernels.gated_silu(block.ff_sub_layer.wg1(normed))
            x, normed = _add_norm(x, block.ff_sub_layer.w2(gated), next_norm)
        return normed

    def _attend(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        """Attention of q ``[B, 1, H, D]``: ``[B, 1, H * D]``. Collective."""
        keys, values = self._cache.storage(layer, self._new_keys)
        scale = self._blocks[layer].attn.scale
        out, _ = attend_cached(self._ring, q, keys, values, scale, self._key_lengths)
        return out.flatten(2)

    @staticmethod
    def _run(
        stretches: _Stretches, attend: Callable[[int, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """All stretches with ``attend`` between them: ``[B, 1, E]``."""
        try:
            layer, q = next(stretches)
            while True:
                layer, q = stretches.send(attend(layer, q))
        except StopIteration as end:
            return cast(torch.Tensor, end.value)


def _add_norm(
    x: torch.Tensor, delta: torch.Tensor, norm: nn.RMSNorm
) -> tuple[torch.Tensor, torch.Tensor]:
    eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
    return cast(
        tuple[torch.Tensor, torch.Tensor], _kernels.add_rms_norm(x, delta, norm.weight, eps)
    )
