# SPDX-License-Identifier: Apache-2.0
"""LLaMA over a ring of ranks, with the structure and names of IBM's Foundation Model Stack.

Every rank holds all weights and some of the tokens. Ranks meet in one place only, in
:class:`LLaMAAttention`: a prompt goes through the ring, a new token through the sharded cache.

Architecture: Touvron et al., https://arxiv.org/abs/2302.13971, and Llama 3,
https://arxiv.org/abs/2407.21783. Weights of Hugging Face give the logits of Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ringattn._checks import check_device, check_floating, is_concrete
from ringattn._distributed.agreement import Agreement, Given
from ringattn._distributed.errors import ErrorsToPeers
from ringattn._distributed.groups import Group, GroupInfo, keep, resolve_group
from ringattn._distributed.weights import trained_weights
from ringattn._masks import CuSeqlens, checked_documents, sliding
from ringattn.cache import ShardedKVCache
from ringattn.model_call import ModelCall
from ringattn.model_inputs import Inputs
from ringattn.models.config import LLaMAConfig
from ringattn.models.rope import RotaryEmbedding, Rotation, rotate
from ringattn.partition import Partition, check_num_ranks, check_partition


class LLaMAAttention(nn.Module):
    """Self-attention with grouped key/value heads: the one layer that talks to other ranks."""

    def __init__(self, config: LLaMAConfig, **factory: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.nheads, config.kvheads
        self.head_dim = config.head_dim
        self.scale = 1 / math.sqrt(config.head_dim)
        self.mask = sliding(config.window_size)
        width = config.nheads * config.head_dim
        kv_width = config.kvheads * config.head_dim
        self.qkv = nn.Linear(config.emb_dim, width + 2 * kv_width, config.attn_bias, **factory)
        self.dense = nn.Linear(width, config.emb_dim, config.attn_bias, **factory)

    def project(
        self, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q ``[B, S_r, H, D]``, k and v ``[B, S_r, H_kv, D]`` of ``x``, ``[B, S_r, E]``; q and k
        rotated to their positions."""
        num_heads, num_kv_heads = self.num_heads, self.num_kv_heads
        batch, length, _ = x.shape
        heads = self.qkv(x).view(batch, length, num_heads + 2 * num_kv_heads, self.head_dim)
        qk, v = heads.split((num_heads + num_kv_heads, num_kv_heads), 2)
        q, k = rotate(qk, rotation).split((num_heads, num_kv_heads), 2)
        return q, k, v

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        call: ModelCall,
        layer: int,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """``[B, S_r, H * D]``; ``call`` and ``cu_seqlens`` as in :meth:`LLaMAHeadless.forward`."""
        mask = self.mask
        if cu_seqlens is not None:
            if call.cache is not None:
                raise ValueError(
                    "cache must be left out in a model call with packed documents, got one"
                )
            mask = mask._replace(cu_seqlens=cu_seqlens)
        return call.attend(layer, q, k, v, self.scale, mask).flatten(2)


class GatedLinearUnit(nn.Module):
    """SwiGLU feed-forward layer (Shazeer, https://arxiv.org/abs/2002.05202)."""

    def __init__(self, config: LLaMAConfig, **factory: Any) -> None:
        super().__init__()
        # Gate rows first, then up rows: one product reads the input once.
        self.wg1 = nn.Linear(config.emb_dim, 2 * config.hidden_dim, config.mlp_bias, **factory)
        self.w2 = nn.Linear(config.hidden_dim, config.emb_dim, config.mlp_bias, **factory)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.wg1(x).chunk(2, -1)
        return self.w2(F.silu(gate) * up)


class LLaMABlock(nn.Module):
    """One layer: attention, then feed-forward, each with a norm before and a residual around it."""

    def __init__(self, config: LLaMAConfig, **factory: Any) -> None:
        super().__init__()
        self.ln = nn.RMSNorm(config.emb_dim, config.norm_eps, **factory)
        self.attn = LLaMAAttention(config, **factory)
        self.ff_ln = nn.RMSNorm(config.emb_dim, config.norm_eps, **factory)
        self.ff_sub_layer = GatedLinearUnit(config, **factory)

    def forward(
        self,
        x: torch.Tensor,
        rotation: Rotation,
        call: ModelCall,
        layer: int,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """``[B, S_r, E]`` to the same shape; see :meth:`LLaMAHeadless.forward`."""
        q, k, v = self.before(x, rotation)
        return self.after(x, self.attn.attend(q, k, v, call, layer, cu_seqlens))

    def before(
        self, x: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The part of the layer before attention: q, k and v of ``x``."""
        return self.attn.project(self.ln(x), rotation)

    def after(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The part of the layer after attention; ``attended``: its result, ``[B, S_r, H * D]``."""
        x = x + self.attn.dense(attended)
        return x + self.ff_sub_layer(self.ff_ln(x))


class LLaMAHeadless(nn.Module):
    """Embedding, layers and final norm: tokens of this rank to their hidden states."""

    def __init__(self, config: LLaMAConfig, **factory: Any) -> None:
        super().__init__()
        self.config = config
        self.rotary = RotaryEmbedding(config.head_dim, config.rope_theta, config.rope_scaling)
        # Note: not nn.Embedding's own random weights. On the meta device torch imports its compiler
        # to draw them, which takes a second and keeps the default process group alive for good.
        self.embedding = nn.Embedding.from_pretrained(
            torch.empty(config.src_vocab_size, config.emb_dim, **factory), freeze=False
        )
        self.layers = nn.ModuleList(LLaMABlock(config, **factory) for _ in range(config.nlayers))
        self.dec_norm = nn.RMSNorm(config.emb_dim, config.norm_eps, **factory)

    def forward(
        self,
        token_ids: torch.Tensor,
        position_ids: torch.Tensor,
        call: ModelCall,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """Hidden states of this rank's tokens, or of new tokens. Collective.

        Args:
            token_ids: int64 ``[B, S_r]``, in position order: the rows of ``call``.
            position_ids: int64 ``[S_r]``, their places in the whole sequence or its documents.
            call: of a prompt, or of new tokens after one.
            cu_seqlens: boundaries of packed documents, without a cache, as in
                :func:`ringattn.ring_attention`.

        Returns:
            ``[B, S_r, E]``.
        """
        x = self.embedding(token_ids)
        rotation = self.rotary(position_ids)
        for index, layer in enumerate(self.layers):
            x = layer(x, rotation, call, index, cu_seqlens)
        return self.dec_norm(x)


class LLaMA(nn.Module):
    """A LLaMA whose sequence is spread over the ranks of a group.

    Args:
        config: its shape.
        group: as in :func:`ringattn.ring_attention`, looked up once: a model that was made without
            a default group stays one of this process alone.
        device: where the weights lie.
        dtype: of the weights.
        transport: how blocks travel, in every layer, see :func:`ringattn.ring_attention`.
        depth: how many blocks may be under way ahead of the one being attended to, likewise.

    The group is kept by its name: the model can be copied and pickled, and does not keep a group
    alive that is destroyed.

    Weights are drawn at random (normal, standard deviation 0.02); :func:`load_model` reads them
    from files. Gradients of weights are the parts of this rank's tokens:
    :func:`ringattn.all_reduce_gradients` sums them.
    """

    def __init__(
        self,
        config: LLaMAConfig,
        *,
        group: Group = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        transport: str = "auto",
        depth: int | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        ring = resolve_group(group)
        self._group = keep(ring.group)
        factory: dict[str, Any] = {
            "device": None if device is None else check_device(device, or_meta=True),
            "dtype": None if dtype is None else check_floating(dtype),
        }
        self._travel: dict[str, Any] = {"transport": transport, "depth": depth}
        self._agreement = Agreement()
        self.base_model = LLaMAHeadless(config, **factory)
        self.head = (  # None: the embedding's weight is the head's
            None
            if config.tie_heads
            else nn.Linear(config.emb_dim, config.src_vocab_size, bias=False, **factory)
        )
        if self.device.type != "meta":
            self.reset_parameters()

    @property
    def ring(self) -> GroupInfo:
        """This process among the ranks of the group, as it is now."""
        return resolve_group(self._group)

    @torch.no_grad()
    def reset_parameters(self, std: float = 0.02) -> None:
        """Draws all weights anew: normal with standard deviation ``std``; norms 1, biases 0."""
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                module.weight.normal_(0, std)
                if isinstance(bias := getattr(module, "bias", None), torch.Tensor):
                    bias.zero_()
            elif isinstance(module, nn.RMSNorm):
                module.weight.fill_(1)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.base_model.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights, and of the logits."""
        return self.base_model.embedding.weight.dtype

    def forward(
        self,
        token_ids: torch.Tensor,
        partition: Partition | None = None,
        *,
        sharded: bool = False,
        cu_seqlens: CuSeqlens | None = None,
    ) -> torch.Tensor:
        """Logits of this rank's tokens, ``[B, S_r, V]``. Collective: every rank calls it.

        Args:
            token_ids: int64, the whole sequence ``[B, S]`` on every rank, or with ``sharded`` this
                rank's tokens ``[B, S_r]`` in position order.
            partition: which rank owns which tokens, such as ``Partition.even(S, W)``, and so whose
                logits come back. None, all tokens on this rank, is for a single rank alone.
            sharded: whether ``token_ids`` are this rank's own already.
            cu_seqlens: boundaries of packed documents, as in :func:`ringattn.ring_attention`: each
                gets the logits that it gets alone, its positions counted from its start.

        Raises:
            ValueError: ids that differ between ranks (on CUDA in the next call); ``cu_seqlens``
                that are no boundaries of the sequence; no partition on more than one rank, one for
                another number of ranks or tokens, more tokens than the model was trained for,
                tokens on another device than the weights or (on CPU; a GPU would have to be waited
                for) outside the vocabulary, and what :func:`ringattn.ring_attention` raises.
        """
        if not torch.compiler.is_compiling():
            self._agreement.check()
        ring = self.ring
        with ErrorsToPeers(ring):  # errors of a layer too
            return self._logits(ring, token_ids, partition, sharded=sharded, cu_seqlens=cu_seqlens)

    def _logits(
        self,
        ring: GroupInfo,
        token_ids: torch.Tensor,
        partition: Partition | None,
        *,
        sharded: bool,
        cu_seqlens: CuSeqlens | None,
    ) -> torch.Tensor:
        partition = self.check(token_ids, partition, sharded=sharded)
        self._check_ids(token_ids)
        if cu_seqlens is not None:
            cu_seqlens = checked_documents(cu_seqlens, partition.seq_len)
        local_ids = token_ids if sharded else partition.shard(token_ids, ring.rank)
        position_ids = partition.position_ids(
            ring.rank, device=local_ids.device, cu_seqlens=cu_seqlens
        )
        inputs = None
        if not sharded and not torch.compiler.is_compiling():
            trained = trained_weights(ring, self) if torch.is_grad_enabled() else None
            inputs = Inputs(self._agreement, token_ids, "token_ids", more=Given(trained=trained))
        call = self.prefill_call(partition, inputs=inputs)
        hidden = self.base_model(local_ids, position_ids, call, cu_seqlens)
        call.compare()
        return self.project(hidden)

    def _check_ids(self, token_ids: torch.Tensor) -> None:
        if token_ids.device != self.device:
            raise ValueError(f"token_ids must be on {self.device}, got {token_ids.device}")
        if torch.compiler.is_compiling() or not token_ids.is_cpu or token_ids.numel() == 0:
            return
        if is_concrete(token_ids):
            self.check_in_vocabulary("token_ids", token_ids)

    def check_in_vocabulary(self, name: str, ids: torch.Tensor) -> None:
        """ValueError where ``ids``, some, have no embedding. Waits for their device."""
        least, most = (int(bound) for bound in ids.aminmax())
        vocabulary = self.config.src_vocab_size
        if least < 0 or most >= vocabulary:
            wrong = least if least < 0 else most
            raise ValueError(f"{name} must lie in [0, {vocabulary}), got {wrong}")

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[..., E]`` to logits ``[..., V]``."""
        weight = self.base_model.embedding.weight if self.head is None else self.head.weight
        return F.linear(hidden, weight)

    def prefill_call(
        self,
        partition: Partition,
        cache: ShardedKVCache | None = None,
        *,
        inputs: Inputs | None = None,
    ) -> ModelCall:
        """The call of a prompt spread by ``partition``, whose keys and values ``cache`` keeps;
        ``inputs`` as in :meth:`ringattn.model_call.ModelCall.prefill`."""
        return ModelCall.prefill(self.ring, partition, cache=cache, inputs=inputs, **self._travel)

    def call_after(self, cache: ShardedKVCache, partition: Partition) -> ModelCall:
        """The call of new tokens after what ``cache`` holds, spread by ``partition`` where that is
        faster; see :meth:`ringattn.model_call.ModelCall.after`."""
        return ModelCall.after(
            *(self.ring, cache, partition.seq_len, lambda _: partition),
            device=self.device,
            **self._travel,
        )

    def new_cache(
        self,
        partition: Partition,
        *,
        new_tokens: int = 0,
        targets: Sequence[int] | None = None,
    ) -> ShardedKVCache:
        """An empty cache for prompts spread by ``partition``, with room for ``new_tokens`` after
        them; ``targets`` as in :class:`ringattn.cache.ShardedKVCache`."""
        return ModelCall.new_cache(self.ring, partition, new_tokens=new_tokens, targets=targets)

    def alone(self) -> LLaMA:
        """The same weights, shared and not copied, for this process alone."""
        twin = LLaMA(self.config, group="single", device="meta", dtype=self.dtype, **self._travel)
        twin.train(self.training)
        twin.load_state_dict(self.state_dict(), assign=True)
        for ours, theirs in zip(self.parameters(), twin.parameters(), strict=True):
            theirs.requires_grad_(ours.requires_grad)
        return twin

    def check(
        self,
        token_ids: torch.Tensor,
        partition: Partition | None,
        *,
        sharded: bool = False,
        new_tokens: int = 0,
        name: str = "token_ids",
    ) -> Partition:
        """The partition of a call, if its arguments hold; nothing is sent.

        Args:
            token_ids: as in :meth:`forward`.
            partition: as in :meth:`forward`.
            sharded: as in :meth:`forward`.
            new_tokens: how many tokens are to follow, for the length the model was trained for.
            name: what errors call ``token_ids``.

        Raises:
            ValueError: as in :meth:`forward`.
        """
        ring = self.ring
        rank, world_size = ring.rank, ring.world_size
        if not isinstance(token_ids, torch.Tensor) or token_ids.dim() != 2:
            got = getattr(token_ids, "shape", type(token_ids).__name__)
            raise ValueError(f"{name} must be a tensor [B, S], got {got}")
        if token_ids.dtype not in (torch.int64, torch.int32):
            raise ValueError(f"{name} must be int64 or int32, got {token_ids.dtype}")
        given = token_ids.size(1)
        if partition is None and world_size == 1:
            partition = Partition.even(given, 1)
        partition = check_partition(partition, ring)
        check_num_ranks(partition.world_size, world_size)
        expected = partition.lengths[rank] if sharded else partition.seq_len
        if given != expected:
            raise ValueError(
                f"{name} must have the {expected} tokens of "
                f"{f'rank {rank}' if sharded else 'the partition'}, got {given}"
            )
        self.config.check_seq_len(partition.seq_len + new_tokens)
        return partition
