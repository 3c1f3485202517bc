# SPDX-License-Identifier: Apache-2.0
"""Work, traffic and peak rates: what MFU and rooflines are made of, in one place.

Pairs of a query and a key are those of the schedule (``num_pairs`` of its visits); operations per
pair and per token are those of :class:`ringattn.ModelCost`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch
from lib.cli import positive
from ringattn import ModelCost, Partition
from ringattn.models import LLaMAConfig


@dataclass(frozen=True)
class PeakRates:
    """Of one device."""

    tflops: float  # dense matrix products in float16 and bfloat16
    gbps: float  # device memory, GB/s


#: By a part of the name of a device: the SXM models of the data sheets, without sparsity. Other
#: boards (PCIe, 40 GB) need --peak-tflops and --peak-gbps.
PEAK_RATES = {
    "A100": PeakRates(312.0, 2039.0),
    "H100": PeakRates(989.4, 3350.0),
    "H200": PeakRates(989.4, 4800.0),
    "L40S": PeakRates(362.1, 864.0),
}


def add_peak_arguments(parser: argparse.ArgumentParser) -> None:
    """--peak-tflops and --peak-gbps, in place of the table's rates."""
    known = ", ".join(PEAK_RATES)
    parser.add_argument(
        "--peak-tflops", type=positive, help=f"of a device (default: in half types on {known})"
    )
    parser.add_argument("--peak-gbps", type=positive, help="of its memory (default: likewise)")


def peak_rates(
    device: torch.device, dtype: torch.dtype, options: argparse.Namespace
) -> PeakRates | None:
    """Of ``device`` for ``dtype``: what the command line says, else the table's. None where one of
    the two is not known."""
    known = None
    if device.type == "cuda" and dtype in (torch.float16, torch.bfloat16):
        name = torch.cuda.get_device_name(device)
        known = next((rates for part, rates in PEAK_RATES.items() if part in name), None)
    tflops = options.peak_tflops or (known and known.tflops)
    gbps = options.peak_gbps or (known and known.gbps)
    return PeakRates(tflops, gbps) if tflops and gbps else None


def num_pairs(partition: Partition, causal: bool = True) -> list[int]:
    """Pairs of a query and a key that each rank computes, ``[W]``; together S (S + 1) / 2 under a
    causal mask, S * S without one."""
    return [partition.num_pairs(rank, causal=causal) for rank in range(partition.world_size)]


def prefill_flops(config: LLaMAConfig, partition: Partition, batch: int) -> float:
    """Operations of a prompt's way through a LLaMA to the logits of its last token."""
    cost = ModelCost.from_config(config)
    layer = cost.attention_flops * sum(num_pairs(partition))
    layer += cost.linear_flops * partition.seq_len
    head = 2.0 * config.emb_dim * config.src_vocab_size
    return batch * (config.nlayers * layer + head)


def mfu(flops: float, ms: float, ranks: int, peak_tflops: float | None) -> float | None:
    """Share of what ``ranks`` devices could do in this time; None without a peak rate."""
    return flops / (ms / 1e3) / (ranks * peak_tflops * 1e12) if peak_tflops else None


def attention_bytes(q: torch.Tensor, k: torch.Tensor, ranks: int) -> float:
    """Least traffic of one of the ranks: its queries and results, the keys and values of all."""
    return 2 * q.nbytes / ranks + 2 * k.nbytes
