# SPDX-License-Identifier: Apache-2.0
"""How fast every rank is: measured on all of them at once, so that plans hold where they run."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ringattn import _C
from ringattn._calls import collective
from ringattn._checks import check_transport
from ringattn._clock import Spread, bursts, repeat
from ringattn._group import Group, Ring, resolve_group
from ringattn._shard import Shard, resolve_device, settling_seconds
from ringattn.functional import ring_attention, rotate_kv
from ringattn.partition import Partition
from ringattn.planning import ModelCost, plan, predict, work_in_tiles
from ringattn.profiles import AttentionTile, RankProfile, is_number
from ringattn.timings import call_tflops, check_not_recording, record_timings

#: Heads and layers of LLaMA-3-8B.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 8, 128, 32
#: Relative difference of two speeds that is none, see :func:`equalize`.
NOISE = 0.05

_FEWEST_CALLS = 3  # of a ring
_MEMORY_SHARE = 0.9  # of the free memory, that tokens may fill
_Value = TypeVar("_Value")


def measure_profiles(
    group: Group = None,
    *,
    num_heads: int = NUM_HEADS,
    num_kv_heads: int = NUM_KV_HEADS,
    head_dim: int = HEAD_DIM,
    num_layers: int = NUM_LAYERS,
    num_tokens: int | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    seconds: float | None = None,
    transport: str = "auto",
    noise: float = NOISE,
) -> list[RankProfile]:
    """Measures every rank of a group, all at once, because the speed of a GPU depends on its
    temperature and on the power it and its neighbours draw. Collective; takes about six times
    ``seconds``.

    * ``attention_tflops``: causal attention of ``num_tokens`` tokens on themselves; of several
      ranks then that of a ring of them all, with so many tokens each on average, dealt out by the
      former speeds: devices are not as fast in a ring as alone, and not all by the same;
    * ``linear_tflops``: a linear layer ``[num_tokens, E] -> [num_tokens, E]``, ``E = num_heads *
      head_dim``;
    * ``overhead_ms``: W attention calls of one token, what a rank pays per ring call whatever it
      owns;
    * ``memory_gbps``: how fast decode attention reads cached keys and values, GB/s;
    * ``link_gbps``, ``link_latency_us``: the hop that brings blocks to a rank, all ranks sending at
      once, GB/s and microseconds; None on a single rank;
    * ``tiles``: what kernels of the device compute together, none on CPU;
    * ``max_tokens``: tokens whose keys and values over all layers fit into nine tenths of the free
      memory; ranks on one device share it, as do CPU ranks on one host.

    Values are medians; values of ranks that differ by less than their noise are reported as equal,
    see :func:`equalize`. Inside :func:`ringattn.testing.slowdown`, attention and linear layers
    measure slower.

    Args:
        group: as in :func:`ringattn.ring_attention`.
        num_heads: query heads, H.
        num_kv_heads: key/value heads, H_kv.
        head_dim: D.
        num_layers: layers whose keys and values ``max_tokens`` counts.
        num_tokens: tokens of a typical shard, S_r; None means 8192 on CUDA and 256 on CPU. Speeds
            depend on it: plans are best for sequences of about W times as many.
        dtype: None means bfloat16 on CUDA and float32 on CPU.
        device: this rank's; None means the current CUDA device if there is one and the group, where
            there is a group, has NCCL; else the CPU.
        seconds: how long all ranks compute before their speeds count, so that clocks settle; None
            means 1 on CUDA and 0.2 on CPU.
        transport: as in :func:`ringattn.ring_attention`.
        noise: smallest relative difference of two speeds that counts.

    Returns:
        One :class:`ringattn.RankProfile` per rank, the same list on every rank.

    Raises:
        ValueError: sizes or seconds that are not positive, noise outside [0, 1), a device without
            kernels, what :func:`ringattn.ring_attention` refuses, a recording of timings.
        torch.distributed.DistBackendError: a peer died or never arrived.
    """
    measured = measure_ranks(
        group,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_layers=num_layers,
        num_tokens=num_tokens,
        dtype=dtype,
        device=device,
        seconds=seconds,
        transport=transport,
        noise=noise,
    )
    return equalize(measured, noise)


@dataclass(frozen=True)
class RankMeasurement:
    """What one rank measured, under the names of :class:`ringattn.RankProfile`."""

    device: str  # ranks with equal ones have equal hardware: model, multiprocessors in use
    attention_tflops: Spread
    linear_tflops: Spread
    overhead_ms: Spread
    memory_gbps: Spread
    link_gbps: Spread | None
    link_latency_us: Spread | None
    max_tokens: int
    tiles: tuple[AttentionTile, ...] = ()


def equalize(measured: Sequence[RankMeasurement], noise: float = NOISE) -> list[RankProfile]:
    """Profiles out of measurements, the noise taken out.

    For each quantity, from the largest median down: ranks whose medians are less than ``noise``
    below it, and ranks whose median lies between its quartiles, or its median between theirs, are
    one class; all of them get the mean of their medians. The rest is divided in the same way. Ranks
    on the same model of device with as many multiprocessors are one class up to ``2 * noise``:
    under load, speeds of equal GPUs drift apart and back by that much, and a plan that follows them
    is slower than an even one. That does not hold for ranks whose matrix products differ by more
    than ``noise``, which hardly drift: a device that gave one of them less than was asked for.

    Raises:
        ValueError: noise outside [0, 1).
    """
    _check_noise(noise)
    values: list[dict[str, float]] = [{} for _ in measured]
    for field in fields(RankMeasurement):
        spreads = [getattr(of_rank, field.name) for of_rank in measured]
        if not all(isinstance(spread, Spread) for spread in spreads):
            continue
        for ranks in _classes(spreads, measured, noise):
            mean = statistics.fmean(spreads[rank].median for rank in ranks)
            for rank in ranks:
                values[rank][field.name] = mean
    return [
        RankProfile(max_tokens=of_rank.max_tokens, tiles=of_rank.tiles, **own)
        for of_rank, own in zip(measured, values, strict=True)
    ]


def _check_noise(noise: float) -> None:
    if not is_number(noise) or not 0 <= noise < 1:
        raise ValueError(f"noise must lie in [0, 1), got {noise!r}")


def _classes(
    spreads: Sequence[Spread], measured: Sequence[RankMeasurement], noise: float
) -> Iterator[list[int]]:
    left = sorted(range(len(spreads)), key=lambda rank: -spreads[rank].median)
    while left:
        first = left[0]
        ranks = []
        for rank in left:
            tolerance = 2 * noise if _alike(measured[rank], measured[first], noise) else noise
            close = spreads[rank].median >= (1 - tolerance) * spreads[first].median
            explained = spreads[rank].explains(spreads[first])
            if close or explained or spreads[first].explains(spreads[rank]):
                ranks.append(rank)
        yield ranks
        left = [rank for rank in left if rank not in ranks]


def _alike(one: RankMeasurement, other: RankMeasurement, noise: float) -> bool:
    """Whether two ranks have equal hardware, as far as can be seen."""
    slower, faster = sorted((one.linear_tflops.median, other.linear_tflops.median))
    return one.device == other.device and slower >= (1 - noise) * faster


# ---- measuring ---------------------------------------------------------------------------------


def measure_ranks(
    group: Group,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_layers: int,
    num_tokens: int | None,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    seconds: float | None,
    transport: str,
    noise: float = NOISE,
) -> list[RankMeasurement]:
    """What :func:`measure_profiles` starts from, noise and all: its arguments, its errors, the same
    list on every rank. Collective."""
    ring = resolve_group(group)
    mistake = None
    try:
        _check_noise(noise)
        check_transport(transport)
        check_not_recording()  # of speeds in a ring, one is made
        shard = Shard.on(
            resolve_device(device, ring),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            num_tokens=num_tokens,
            dtype=dtype,
        )
        settling = settling_seconds(shard.device, seconds)
        # How many calls a rank makes depends on these.
        asked = (replace(shard, device=torch.device("cpu")), settling, transport, noise)
    except ValueError as error:
        mistake, asked = error, None
    answers = _from_all(ring, (None if mistake is None else str(mistake), asked))
    if mistake is not None:
        raise mistake
    for rank, (of_rank, theirs) in enumerate(answers):
        if of_rank is not None:
            raise ValueError(f"{of_rank} (on rank {rank})")
        if theirs != answers[0][1]:
            raise ValueError(
                f"arguments must be the same on all ranks, got others on rank {rank} than on rank 0"
            )
    on_cuda = shard.device.type == "cuda"
    with torch.no_grad(), torch.cuda.device(shard.device) if on_cuda else contextlib.nullcontext():
        measured = _from_all(ring, _measure(ring, shard, settling, transport))
        if ring.world_size == 1:
            return measured
        return _from_all(ring, _in_ring(ring, shard, settling, transport, measured))


def _measure(ring: Ring, shard: Shard, seconds: float, transport: str) -> RankMeasurement:
    """This rank's part."""
    # The links come first: what they allocate is not free afterwards.
    link_gbps, link_latency_us = None, None
    if ring.world_size > 1:
        link_gbps, link_latency_us = _link(ring, shard, transport)
    max_tokens = _max_tokens(ring, shard)

    attention, attention_flops = shard.attention(shard.num_tokens, transport)
    linear, linear_flops = shard.linear()
    # More than any cache of the device holds.
    large = 2**28 if shard.device.type == "cuda" else 2**24
    decode, decode_bytes = shard.decode(large // shard.token_bytes + 1)
    one_token, _ = shard.attention(1, transport)
    for work in (linear, decode, one_token, attention):  # what only a first call does
        work()
    if ring.world_size > 1:
        with collective(ring, "measure_profiles"):
            dist.barrier(ring.process_group)
    # Attention in one go: after any lighter work, clocks are higher for a while than they stay.
    attention_ms = _settled(attention, shard.device, seconds, seconds)
    linear_ms = _settled(linear, shard.device, seconds / 4, seconds / 2)
    decode_ms = _settled(decode, shard.device, seconds / 4, seconds / 2)
    overhead_ms = bursts(one_token, shard.device)

    def rate(amount: float, times: Sequence[float]) -> Spread:
        return Spread.of([amount / ms for ms in times])

    return RankMeasurement(
        device=_hardware(shard.device),
        attention_tflops=rate(1e-9 * attention_flops, attention_ms),
        linear_tflops=rate(1e-9 * linear_flops, linear_ms),
        overhead_ms=Spread.of([ring.world_size * ms for ms in overhead_ms]),
        memory_gbps=rate(1e-6 * decode_bytes, decode_ms),
        link_gbps=link_gbps,
        link_latency_us=link_latency_us,
        max_tokens=max_tokens,
        tiles=attention_tiles(shard.device, shard.dtype, shard.head_dim),
    )


def _in_ring(
    ring: Ring, shard: Shard, seconds: float, transport: str, measured: Sequence[RankMeasurement]
) -> RankMeasurement:
    """This rank's part, with the speed of its attention in a ring that is balanced by what was
    measured: all ranks at work, on the kernels that rings have."""
    cost = ModelCost.attention_only(
        shard.num_heads, shard.head_dim, num_kv_heads=shard.num_kv_heads, dtype=shard.dtype
    )
    profiles = equalize(measured)
    # Every rank is to show its speed, whatever a call, a hop, or room for all layers costs.
    bare = [RankProfile(of.attention_tflops, of.linear_tflops, tiles=of.tiles) for of in profiles]
    planned = plan(shard.num_tokens * ring.world_size, bare, cost)
    own, overhead_ms = measured[ring.rank], profiles[ring.rank].overhead_ms
    num_tokens = planned.partition.lengths[ring.rank]
    q = shard.random(1, num_tokens, shard.num_heads, shard.head_dim)
    k, v = (shard.random(1, num_tokens, shard.num_kv_heads, shard.head_dim) for _ in range(2))
    group = ring.process_group

    def call() -> Any:
        return ring_attention(q, k, v, planned.partition, group=group, transport=transport)

    # By number and not by the clock: all ranks make the same calls.
    call_ms = max(predict(planned.partition, profiles, cost))
    calls = max(_FEWEST_CALLS, math.ceil(1e3 * seconds / call_ms))
    with collective(ring, "measure_profiles"):
        dist.barrier(ring.process_group)
    repeat(call, shard.device, 0.0, at_least=calls)
    with record_timings(by_block=False) as timings:
        repeat(call, shard.device, 0.0, at_least=calls)
    speeds = call_tflops(timings.calls, overhead_ms)
    if not speeds:
        return own  # too slow for a token
    in_tiles = work_in_tiles(planned.partition, ring.rank, cost, own.tiles)
    return replace(own, attention_tflops=Spread.of([in_tiles * speed for speed in speeds]))


def _settled(
    work: Callable[[], Any], device: torch.device, settling: float, seconds: float
) -> list[float]:
    """Milliseconds of each call in so many seconds, after as many as it takes to settle."""
    repeat(work, device, settling, at_least=1)
    return repeat(work, device, seconds)


def _link(ring: Ring, shard: Shard, transport: str) -> tuple[Spread, Spread]:
    """Bandwidth in GB/s and latency in microseconds of the hop that ends here."""

    def hop(num_tokens: int) -> Callable[[], Any]:
        kv = shard.random(2, 1, num_tokens, shard.num_kv_heads, shard.head_dim)
        partition = Partition.contiguous([num_tokens] * ring.world_size)
        group = ring.process_group
        return lambda: rotate_kv(kv, partition, group=group, transport=transport).wait()

    # The second is one token longer: the difference is what the bytes cost.
    small, large = hop(1), hop(shard.num_tokens + 1)
    small()
    large()

    def meet() -> None:
        for _ in range(ring.world_size):  # after so many hops, every rank has waited for all others
            small()

    with collective(ring, "measure_profiles"):
        dist.barrier(ring.process_group)
    latency = Spread.of([1e3 * ms for ms in bursts(small, shard.device, meet)])
    times = bursts(large, shard.device, meet)
    # Noise may make the longer hop the faster one: a tenth of its time is the least that counts.
    transfer = [max(1e-3 * ms - 1e-6 * latency.median, 1e-4 * ms) for ms in times]
    num_bytes = shard.num_tokens * shard.token_bytes
    return Spread.of([1e-9 * num_bytes / seconds for seconds in transfer]), latency


def attention_tiles(
    device: torch.device, dtype: torch.dtype, head_dim: int
) -> tuple[AttentionTile, ...]:
    """In which the device's attention computes."""
    tiles = _C.attention_tiles(str(device), str(dtype).removeprefix("torch."), head_dim)
    names = [field.name for field in fields(AttentionTile)]
    return tuple(AttentionTile(**{name: getattr(tile, name) for name in names}) for tile in tiles)


def _max_tokens(ring: Ring, shard: Shard) -> int:
    if shard.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(shard.device)
        free += torch.cuda.memory_reserved(shard.device)
        free -= torch.cuda.memory_allocated(shard.device)
        memory = str(torch.cuda.get_device_properties(shard.device).uuid)
    else:
        free, memory = _free_host_memory(), "cpu"
    place = (platform.node(), memory)
    num_sharing = _from_all(ring, place).count(place)
    return int(_MEMORY_SHARE * free / num_sharing) // (shard.num_layers * shard.token_bytes)


def _free_host_memory() -> int:
    """Bytes that the host can give without swapping."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * int(line.split()[1])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _hardware(device: torch.device) -> str:
    if device.type != "cuda":
        return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    properties = torch.cuda.get_device_properties(device)
    return f"{properties.name}, {properties.multi_processor_count} SMs"


def _from_all(ring: Ring, own: _Value) -> list[_Value]:
    """What every rank gives, in rank order."""
    if ring.world_size == 1:
        return [own]
    values: list[Any] = [None] * ring.world_size
    with collective(ring, "measure_profiles"):
        dist.all_gather_object(values, own, group=ring.process_group)
    return values
