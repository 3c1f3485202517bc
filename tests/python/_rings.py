# SPDX-License-Identifier: Apache-2.0
"""Ring calls as the tests make them: one case, the same inputs on every rank, each its own rows."""

import itertools
import random
from dataclasses import dataclass

import ringattn
import torch
from _distributed import RankPool, this
from _numerics import Error, check_attention, poisoned_memory
from ringattn import Partition, reference

#: Lengths and order for each number of ranks: even, odd, lopsided, with empty ranks, reordered.
SPLITS: dict[int, list[tuple[list[int], list[int] | None]]] = {
    1: [([37], None), ([1], None), ([0], None)],
    2: [([18, 18], None), ([20, 17], [1, 0]), ([1, 36], None), ([0, 37], None)],
    3: [([12, 12, 12], None), ([5, 3, 29], [2, 0, 1]), ([0, 37, 0], None), ([13, 1, 8], [1, 2, 0])],
    4: [
        ([8, 8, 8, 8], None),
        ([7, 0, 19, 11], [3, 1, 0, 2]),
        ([1, 1, 0, 35], None),
        ([0, 0, 0, 9], [1, 3, 2, 0]),
    ],
}


def random_documents(draw: random.Random, seq_len: int) -> tuple[int, ...]:
    """Boundaries with short and empty documents among them."""
    inner = [draw.randint(0, seq_len) for _ in range(draw.choice([0, 1, 3, 8]))]
    return (0, *sorted(inner + inner[:1]), seq_len)


def random_partition(draw: random.Random, world_size: int, seq_len: int) -> Partition:
    """Uneven, ranks without tokens among them."""
    layout = draw.choice(["zigzag", "contiguous", "pieces", "even"])
    if layout == "even":
        return Partition.even(seq_len, world_size)
    cuts = sorted(draw.randint(0, seq_len) for _ in range(world_size - 1))
    if layout != "pieces":
        lengths = [stop - start for start, stop in zip([0, *cuts], [*cuts, seq_len], strict=True)]
        order = draw.sample(range(world_size), world_size)
        return Partition(layout, tuple(lengths), tuple(order))
    ends = sorted({0, seq_len, *(draw.randint(0, seq_len) for _ in range(9))})
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    for piece in itertools.pairwise(ends):
        draw.choice(pieces).append(piece)
    return Partition.pieces(pieces)


@dataclass(frozen=True)
class Case:
    """One ring call."""

    partition: Partition
    dtype: torch.dtype = torch.float32
    causal: bool = True
    batch: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    scale: float | None = None
    width: float = 1.0  # of q, and with it the scores: few keys have most of a row's weight
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    with_sinks: bool = False
    cu_seqlens: tuple[int, ...] | None = None
    key_partition: Partition | None = None
    transport: str = "auto"
    depth: int | None = None
    seed: int = 11

    @property
    def keys_of(self) -> Partition:
        """Which rank owns which keys."""
        return self.partition if self.key_partition is None else self.key_partition

    def inputs(self, device: torch.device | str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v of the whole sequence, the same wherever they are asked for."""
        generator = torch.Generator().manual_seed(self.seed)
        rows, keys = self.partition.seq_len, self.keys_of.seq_len
        q = torch.randn(self.batch, rows, self.num_heads, self.head_dim, generator=generator)
        k = torch.randn(self.batch, keys, self.num_kv_heads, self.head_dim, generator=generator)
        v = torch.randn(self.batch, keys, self.num_kv_heads, self.head_dim, generator=generator)
        q, k, v = (x.to(device, self.dtype) for x in (self.width * q, k, v))
        return q, k, v

    def sinks(self, device: torch.device | str) -> torch.Tensor | None:
        """A logit per head, one of them no sink."""
        if not self.with_sinks:
            return None
        generator = torch.Generator().manual_seed(self.seed + 1)
        sinks = 2 * torch.randn(self.num_heads, generator=generator)
        sinks[-1] = -torch.inf
        return sinks.to(device, self.dtype)

    def visible(self, device: torch.device | str = "cpu") -> torch.Tensor:
        """bool ``[S, S_k]``: which query sees which key."""
        positions = torch.arange(self.keys_of.seq_len, device=device)
        queries = positions[positions.numel() - self.partition.seq_len :]
        mask = (self.causal, self.window_size, self.cu_seqlens)
        return reference.visible_keys(queries, positions, *mask)

    def local_inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The rows of this rank, on its device."""
        q, k, v = self.inputs(this().device)
        rank = this().rank
        return (self.partition.shard(q, rank), *(self.keys_of.shard(x, rank) for x in (k, v)))


HALVES = [torch.bfloat16, torch.float16]


def random_case(
    draw: random.Random,
    world_size: int,
    dtype: torch.dtype,
    grow: int = 1,
    *,
    with_key_partition: bool = False,
) -> Case:
    """Any mask on any partition of up to ``60 * grow`` tokens. With a key partition the queries are
    the last of them."""
    num_keys = grow * draw.randint(1, 60)
    num_queries, key_partition = num_keys, None
    if with_key_partition:
        num_queries = draw.choice([1, num_keys, *(draw.randint(0, num_keys) for _ in range(2))])
        key_partition = random_partition(draw, world_size, num_keys)
    window = [draw.choice([-1, 0, 1, draw.randint(0, num_keys)]) for _ in range(2)]
    num_kv_heads = draw.choice([1, 2])
    return Case(
        random_partition(draw, world_size, num_queries),
        dtype,
        causal=draw.random() < 0.6,
        batch=draw.choice([1, 2]),
        num_heads=num_kv_heads * draw.choice([1, 2, 3]),
        num_kv_heads=num_kv_heads,
        head_dim=draw.choice([16, 64, 72, 128] if grow == 1 else [64, 72, 128, 256]),
        scale=draw.choice([None, None, 0.3, -0.1]),
        window_size=(window[0], window[1]) if draw.random() < 0.6 else (-1, -1),
        softcap=draw.choice([0.0, 0.0, 1.5, 30.0]),
        with_sinks=draw.random() < 0.4,
        cu_seqlens=random_documents(draw, num_keys) if draw.random() < 0.5 else None,
        key_partition=key_partition,
        depth=draw.choice([None, 1]),
        seed=draw.randint(0, 10**6),
    )


def apart_case(world_size: int, dtype: torch.dtype, *, causal: bool) -> Case:
    """Each rank has a part of the first document, one of its own and a part of the last. Others see
    nothing of the middle one, which is longer than what travels of it."""
    pieces: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
    ends = [0]
    position = 0
    for of_piece in (lambda rank: 30 + 11 * rank, lambda rank: 1200, lambda rank: 70 - 13 * rank):
        for rank in range(world_size):
            pieces[rank].append((position, position + of_piece(rank)))
            position += of_piece(rank)
            if of_piece(rank) == 1200 or rank == world_size - 1:
                ends.append(position)
    ends = sorted(set(ends))
    return Case(
        Partition.pieces(pieces),
        dtype,
        causal=causal,
        batch=1,
        num_heads=2,
        num_kv_heads=1,
        cu_seqlens=tuple(ends),
    )


def ring_call(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of this rank."""
    q, k, v = case.local_inputs()
    with poisoned_memory():
        return ringattn.ring_attention(
            q,
            k,
            v,
            case.partition,
            causal=case.causal,
            window_size=case.window_size,
            softcap=case.softcap,
            sinks=case.sinks(q.device),
            cu_seqlens=case.cu_seqlens,
            key_partition=case.key_partition,
            scale=case.scale,
            transport=case.transport,
            depth=case.depth,
            return_lse=True,
        )


def whole(case: Case, states: list) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse of the whole sequence, from those of each rank."""
    outs, lses = zip(*states, strict=True)
    return case.partition.unshard(outs), case.partition.unshard(lses, dim=2)


def check_ring(ring: RankPool, case: Case) -> Error:
    """Runs the case on every rank and holds the whole against the error rule."""
    out, lse = whole(case, ring.run(ring_call, case))
    # PyTorch's error, which ours is measured by, is that of the device the ring runs on.
    on_device = [x.to(ring.device_type) for x in (out, lse, *case.inputs("cpu"))]
    return check_attention(
        *on_device,
        visible=case.visible(ring.device_type),
        scale=case.scale,
        softcap=case.softcap,
        sinks=case.sinks(ring.device_type),
        what=f"{ring.world_size} ranks, {case}",
    )
