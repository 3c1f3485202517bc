# SPDX-License-Identifier: Apache-2.0
"""The timed work: attention alone, or a whole LLaMA layer, split over the ranks or on one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

import ringattn
import torch
import torch.distributed as dist
from lib.problem import DTYPES, Problem
from lib.ranks import rank
from lib.timing import Contestant
from ringattn.model_call import ModelCall
from ringattn.models import LLaMA, LLaMAConfig
from ringattn.testing import slowdown

from study.settings import Cell, Settings

_VOCABULARY = 256  # size of the layer's vocabulary: any will do
_SAMPLED_ROWS = 32  # rows of a rank that the error is computed from


class Workload(Protocol):
    """One problem, the same on every rank."""

    flops: float
    cost: ringattn.ModelCost

    def ring(self, partition: ringattn.Partition, depth: int | None) -> Callable[[], torch.Tensor]:
        """One call on this rank's share. Collective. -> [B, S_r, ...]"""

    def alone(self) -> torch.Tensor:
        """The whole problem on this rank. -> [B, S, ...]"""

    def max_error(self, contestant: Contestant) -> float:
        """Largest error of one ring call over sampled rows of this rank."""


class Attention:
    """Causal attention forward."""

    def __init__(self, seq_len: int, settings: Settings, device: torch.device) -> None:
        self._problem = Problem.of(settings, seq_len, device, causal=True)
        for tensor in self._problem.tensors:
            # Random numbers depend on how many multiprocessors a process sees.
            dist.broadcast(tensor, 0)
        self._transport = settings.transport
        self.flops = self._problem.flops
        self.cost = ringattn.ModelCost.attention_only(
            settings.heads,
            settings.head_dim,
            num_kv_heads=settings.kv_heads,
            dtype=DTYPES[settings.dtype],
        )

    def ring(self, partition: ringattn.Partition, depth: int | None) -> Callable[[], torch.Tensor]:
        q, k, v = (partition.shard(x, rank()) for x in self._problem.tensors)
        transport = self._transport
        return lambda: ringattn.ring_attention(q, k, v, partition, transport=transport, depth=depth)

    def alone(self) -> torch.Tensor:
        # The operator itself: a ring of one, which testing.slowdown slows as it slows a ring.
        q, k, v = self._problem.tensors
        lengths, order, group = [self._problem.seq_len], [0], ""
        out, _ = torch.ops.ringattn.ring_forward(
            *(q, k, v, lengths, order, "zigzag", True, q.size(-1) ** -0.5, group, "auto", None)
        )
        return out

    def max_error(self, contestant: Contestant) -> float:
        return self._problem.max_error(contestant.call(), contestant.positions, _SAMPLED_ROWS)


class Layer:
    """A model of one layer, from token ids to hidden states. Errors are differences from the same
    layer on one rank, in the same dtype."""

    def __init__(self, seq_len: int, settings: Settings, device: torch.device) -> None:
        config = LLaMAConfig(
            src_vocab_size=_VOCABULARY,
            emb_dim=settings.heads * settings.head_dim,
            nlayers=1,
            nheads=settings.heads,
            kvheads=settings.kv_heads,
            head_dim=settings.head_dim,
            hidden_dim=settings.hidden_dim,
            max_expected_seq_len=seq_len,
        )
        self._model = LLaMA(config, device=device, dtype=DTYPES[settings.dtype])
        for parameter in self._model.requires_grad_(False).parameters():
            dist.broadcast(parameter, 0)
        self._transport = settings.transport
        self._lone = self._model.alone()
        self._ids = (torch.arange(seq_len, device=device) * 7919 % _VOCABULARY)[None]
        self._everything = ringattn.Partition.zigzag([seq_len])
        self.cost = ringattn.ModelCost.from_config(config, dtype=DTYPES[settings.dtype])
        pairs = seq_len * (seq_len + 1) / 2
        self.flops = self.cost.attention_flops * pairs + self.cost.linear_flops * seq_len

    def ring(self, partition: ringattn.Partition, depth: int | None) -> Callable[[], torch.Tensor]:
        ids = partition.shard(self._ids, rank())
        positions = partition.position_ids(rank(), self._ids.device)

        def forward() -> torch.Tensor:
            call = ModelCall.prefill(
                self._model.ring, partition, transport=self._transport, depth=depth
            )
            return self._model.base_model(ids, positions, call)

        return forward

    def alone(self) -> torch.Tensor:
        positions = torch.arange(self._ids.size(1), device=self._ids.device)
        call = self._lone.prefill_call(self._everything)
        return self._lone.base_model(self._ids, positions, call)

    def max_error(self, contestant: Contestant) -> float:
        if contestant.positions.numel() == 0:
            contestant.call()
            return 0.0
        if not hasattr(self, "_expected"):
            self._expected = self.alone()
        # Sampled rows do: the whole has gigabytes.
        stride = max(1, contestant.positions.numel() // _SAMPLED_ROWS)
        expected = self._expected[:, contestant.positions[::stride]]
        return (contestant.call()[:, ::stride].double() - expected.double()).abs().max().item()


def workload(cell: Cell, settings: Settings, device: torch.device) -> Workload:
    kind = {"attention": Attention, "layer": Layer}[cell.what]
    return kind(cell.seq_len, settings, device)


@contextlib.contextmanager
def throttled(settings: Settings, percentage: float) -> Iterator[None]:
    """Slows this rank to `percentage` of its speed, unless it was started under MPS."""
    if settings.throttle == "mps":
        yield
        return
    with slowdown(100.0 / percentage):
        yield
