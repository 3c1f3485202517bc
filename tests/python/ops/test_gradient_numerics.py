# SPDX-License-Identifier: Apache-2.0
"""Half-precision gradients through a ring: their error is that of PyTorch's own backward on one
device, for any number of ranks, also where one key has most of a row's weight."""

import itertools

import pytest
import ringattn
import torch
from _distributed import RankPool, this
from _gradients import NAMES, result_gradients, whole_gradients
from _numerics import RMS_GROWTH, TIMES_PYTORCH, Error, measure, sdpa
from _rings import Case
from ringattn import Partition, reference

RMS_TIMES_PYTORCH = 1.1
SEEDS = 3
WIDTHS = (1.0, 4.0, 16.0)  # of scores: the widest rows have one key with most of their weight
HEAD_DIMS = {"cpu": (64,), "cuda": (64, 128)}


def gradients(cases: list[Case]) -> list[list[torch.Tensor]]:
    """Of each case dq, dk and dv of this rank's rows, of the gradient of out alone."""
    return [gradients_of(case) for case in cases]


def gradients_of(case: Case) -> list[torch.Tensor]:
    inputs = [x.requires_grad_() for x in case.local_inputs()]
    out = ringattn.ring_attention(*inputs, case.partition, causal=case.causal)
    of_out = case.partition.shard(result_gradients(case)[0], this().rank).to(out.device)
    return [x.cpu() for x in torch.autograd.grad(out, inputs, of_out)]


def gradients_alone(case: Case, device: str) -> list[torch.Tensor]:
    """Of the whole sequence, through one block."""
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    out, _ = ringattn.block_attention(*inputs, diagonal=0 if case.causal else None)
    return list(torch.autograd.grad(out, inputs, result_gradients(case)[0].to(device)))


def expected_gradients(case: Case, device: str) -> list[torch.Tensor]:
    """Of the same inputs in float64."""
    inputs = [x.double().requires_grad_() for x in case.inputs(device)]
    scale = case.head_dim**-0.5
    out, _ = reference.masked_attention(*inputs, case.visible(device), scale)
    return list(torch.autograd.grad(out, inputs, result_gradients(case)[0].double().to(device)))


def pytorch_gradients(case: Case, device: str) -> list[torch.Tensor]:
    """Of PyTorch's attention in the same dtype, through its default backend."""
    inputs = [x.requires_grad_() for x in case.inputs(device)]
    out = sdpa(*inputs, case.visible(device), case.head_dim**-0.5)
    return list(torch.autograd.grad(out, inputs, result_gradients(case)[0].to(device)))


def errors(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> list[Error]:
    return [measure(mine, right) for mine, right in zip(actual, expected, strict=True)]


def uneven(seq_len: int, world_size: int) -> list[int]:
    """Ranks 0, 1, ... own one share, two, ..."""
    ends = [seq_len * r * (r + 1) // (world_size * (world_size + 1)) for r in range(world_size + 1)]
    return [stop - start for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_error_of_gradients_is_that_of_pytorch_for_any_number_of_ranks(
    ring: RankPool, dtype: torch.dtype, causal: bool
) -> None:
    device = ring.device_type
    partition = Partition.zigzag(uneven(1024 if device == "cuda" else 160, ring.world_size))
    cases = [
        Case(partition, dtype, causal, 1, 8, head_dim=head_dim, width=width, seed=10 * seed)
        for head_dim in HEAD_DIMS[device]
        for width in WIDTHS
        for seed in range(SEEDS)
    ]
    of_ranks = ring.run(gradients, cases)
    for first in range(0, len(cases), SEEDS):
        several = range(first, first + SEEDS)
        results = [whole_gradients(cases[i], [part[i] for part in of_ranks]) for i in several]
        check([cases[i] for i in several], results, device)


@pytest.mark.cuda
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "dense"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_error_of_gradients_of_a_long_block_is_that_of_pytorch(
    dtype: torch.dtype, causal: bool
) -> None:
    """So many tiles that pairs of thread blocks take them, where there are 132 multiprocessors."""
    seq_len, heads = (8192, 8) if causal else (2048, 32)
    partition = Partition.zigzag([seq_len])
    cases = [Case(partition, dtype, causal, 1, heads, 8, 128, seed=10 * i) for i in range(SEEDS)]
    check(cases, [gradients_alone(case, "cuda") for case in cases], "cuda")


def check(cases: list[Case], results: list[list[torch.Tensor]], device: str) -> None:
    """Cases that differ in their seeds: the rms error holds for each, the largest for all."""
    largest = {name: [0.0, 0.0, 0.0] for name in NAMES[:3]}  # ours, PyTorch's, of rounding
    for case, ours in zip(cases, results, strict=True):
        expected = expected_gradients(case, device)
        found = zip(
            largest,
            errors(ours, expected),
            errors(pytorch_gradients(case, device), expected),
            errors([x.to(case.dtype) for x in expected], expected),
            errors(gradients_alone(case, device), expected),
            strict=True,
        )
        for name, error, pytorch, rounding, alone in found:
            maxima = (error.max, pytorch.max, rounding.max)
            largest[name] = [max(pair) for pair in zip(largest[name], maxima, strict=True)]
            allowed = max(RMS_TIMES_PYTORCH * pytorch.rms, rounding.rms)
            for limit, whose in ((allowed, "PyTorch's"), (RMS_GROWTH * alone.rms, "one device's")):
                assert error.rms <= limit, (
                    f"rms error of {name} must be at most {limit:.3g} by {whose}, "
                    f"got {error.rms:.3g}; {case}"
                )
    for name, (error, pytorch, rounding) in largest.items():
        allowed = max(TIMES_PYTORCH * pytorch, rounding)
        assert error <= allowed, (
            f"largest error of {name} must be at most {allowed:.3g}, got {error:.3g}; {cases[0]}"
        )
