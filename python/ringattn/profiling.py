# SPDX-License-Identifier: Apache-2.0
"""Profiles of all ranks, measured at once, so that plans hold under the load of a ring."""

from __future__ import annotations

import contextlib
import math

import torch

from ringattn._checks import check_transport
from ringattn._distributed.collectives import agree, gather_objects
from ringattn._distributed.groups import Group, resolve_group
from ringattn._profiling.devices import resolve_device, settling_seconds, usual_tokens
from ringattn._profiling.equalize import NOISE, RankMeasurement, check_noise, equalize
from ringattn._profiling.speeds import measure_alone, measure_in_ring
from ringattn._profiling.workloads import ProbeWorkload
from ringattn.profiles import RankProfile
from ringattn.timings import check_not_recording

__all__ = [
    "HEAD_DIM",
    "NOISE",
    "NUM_HEADS",
    "NUM_KV_HEADS",
    "NUM_LAYERS",
    "RankMeasurement",
    "equalize",
    "measure_profiles",
    "measure_ranks",
    "tokens_to_measure",
]

#: Heads and layers of LLaMA-3-8B.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS = 32, 8, 128, 32


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
    see :func:`ringattn.profiling.equalize`. Inside :func:`ringattn.testing.slowdown`, attention and
    linear layers measure slower.

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
        noise: smallest relative difference of two values that counts; for attention and matrix
            products half of it where hardware differs, for all twice that where it is equal.

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
    """The measurements behind :func:`measure_profiles`, noise included. Arguments and errors as
    there, the same list on every rank. Collective."""
    ring = resolve_group(group)
    facts, mistake = {}, None
    try:
        check_noise(noise)
        check_transport(transport)
        check_not_recording()  # of speeds in a ring, one is made
        probe = ProbeWorkload.on(
            resolve_device(device, ring),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_layers=num_layers,
            num_tokens=num_tokens,
            dtype=dtype,
        )
        settling = settling_seconds(probe.device, seconds)
        # How many calls a rank makes depends on these.
        facts = {**vars(probe), "seconds": settling, "transport": transport, "noise": noise}
        del facts["device"]
    except ValueError as error:
        mistake = str(error)
    agree(ring, "measure_profiles", mistake, facts)
    on_cuda = probe.device.type == "cuda"
    with torch.no_grad(), torch.cuda.device(probe.device) if on_cuda else contextlib.nullcontext():
        alone = measure_alone(ring, probe, settling, transport)
        measured = gather_objects(ring, "measure_profiles", alone)
        if ring.world_size == 1:
            return measured
        own = measure_in_ring(ring, probe, settling, transport, measured)
        return gather_objects(ring, "measure_profiles", own)


def tokens_to_measure(seq_len: int, world_size: int, device: torch.device) -> int:
    """Tokens of a shard with which to measure for plans of ``seq_len`` tokens, because speeds
    depend on length. Measuring takes a few calls, a prefill one for each layer."""
    return max(usual_tokens(device), math.ceil(seq_len / world_size))
