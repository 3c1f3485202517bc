# SPDX-License-Identifier: Apache-2.0
"""What all ranks must give to a call, compared without a wait for the device."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._guards import detect_fake_mode

from ringattn._distributed.checksums import checksum, number_of
from ringattn._distributed.collectives import all_gather
from ringattn._distributed.errors import known_to_all
from ringattn._distributed.groups import GroupInfo
from ringattn._distributed.host_copy import HostCopy


@dataclass
class Given:
    """What this rank gives to a call, by the names that errors use.

    Args:
        facts: values that the host knows, of which there are few: a call with new ones is compared
            through the group's store, before anything is computed from it.
        values: integers, and tensors of integers that are compared by their checksum.
        flaws: a sentence, and whether it holds: a bool tensor without a dimension, None for no. On
            any rank, it is the error of all.
        hints: what to do about a value that differs, by its name.
        trained: what ``trained_weights`` of ``weights.py`` returns. Ranks warn where it differs.
    """

    facts: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, torch.Tensor | int | None] = field(default_factory=dict)
    flaws: Mapping[str, torch.Tensor | None] = field(default_factory=dict)
    hints: Mapping[str, str] = field(default_factory=dict)
    trained: torch.Tensor | None = None

    @property
    def may_be_flawed(self) -> bool:
        """Whether a flaw may be there."""
        return any(flaw is not None for flaw in self.flaws.values())


class Agreement:
    """Compares what the ranks give to the calls of one model, with one all-gather of a few numbers.

    On a CPU the call itself fails. On CUDA the host does not wait for this call's numbers, but for
    those of the call before, which are there.

    Note: on CUDA the same holds for facts that all ranks have agreed on before. NCCL gets the sizes
    of its messages from the host, and a host that waits for no peer does not know what the peers
    ask for: where facts decide how many rows are gathered, ranks enqueue unequal gathers before
    they notice.
    """

    def __init__(self) -> None:
        self._pending: tuple[Given, HostCopy] | None = None
        self._has_warned = False

    def __getstate__(self) -> dict[str, Any]:
        return {"_pending": None, "_has_warned": False}  # of a copy, which has made no call

    def check(self) -> None:
        """ValueError, on every rank, where the call before had values that differ or a flaw."""
        pending, self._pending = self._pending, None
        if pending is not None:
            given, numbers = pending
            with known_to_all():
                self._check(given, numbers.wait().tolist())

    def compare(self, ring: GroupInfo, operation: str, device: torch.device, given: Given) -> None:
        """Collective. ``device``: of the call's tensors.

        Raises:
            ValueError: on every rank: facts that differ; on a CPU values that differ, or a flaw.
        """
        if ring.world_size == 1 and not given.may_be_flawed:
            return
        # Ranks exchange nothing while a call is traced, and nothing reads what a graph compares.
        if torch.compiler.is_compiling() or detect_fake_mode() is not None:
            return
        # Nor does a rank that runs a compiled model's call as it is, past Dynamo's recompile_limit:
        # its peers may have a graph of the same call.
        if get_eval_frame_callback() is not None:
            return
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with torch.no_grad(), known_to_all():
            numbers = all_gather(ring, operation, _numbers(device, given), _lines(given.facts))
            if device.type == "cpu":
                self._check(given, numbers.tolist())
                return
        self._pending = (given, HostCopy(numbers))

    def _check(self, given: Given, numbers: Sequence[Sequence[int]]) -> None:
        """ValueError for the first flaw or difference in ``numbers``, ``[W, N]``."""
        compared = (*given.facts, *given.values)
        for i, sentence in enumerate(given.flaws, start=len(compared)):
            if any(of_rank[i] for of_rank in numbers):
                raise ValueError(sentence)
        for i, name in enumerate(compared):
            for rank, of_rank in enumerate(numbers):
                if of_rank[i] != numbers[0][i]:
                    hint = f": {given.hints[name]}" if name in given.hints else ""
                    raise ValueError(
                        f"{name} must be the same on all ranks, got different ones on ranks 0 and "
                        f"{rank}{hint}"
                    )
        weights = {of_rank[-1] for of_rank in numbers}
        if len(weights) > 1 and _NOT_TRAINED not in weights and not self._has_warned:
            self._has_warned = True
            warnings.warn(_DRIFT, stacklevel=3)


_NOT_TRAINED = 0
_DRIFT = (
    "weights must be the same on all ranks, got different ones where gradients are recorded: sum "
    "gradients over the ring before each step (ringattn.all_reduce_gradients), and set the same "
    "seed before weights are made"
)


def _lines(facts: Mapping[str, Any]) -> str:
    """As signatures have them. A line has no newline within it."""
    return "".join(f"{name}={value!r}\n" for name, value in facts.items())


def _numbers(device: torch.device, given: Given) -> torch.Tensor:
    """Facts, values, flaws, weights: int64 ``[N]`` on ``device``."""
    numbers: list[torch.Tensor | int] = [number_of(fact) for fact in given.facts.values()]
    for value in given.values.values():
        if not isinstance(value, torch.Tensor):
            numbers.append(0 if value is None else value)
            continue
        total = value if value.dim() == 0 else checksum(value)
        numbers.append(total if total.device == device else int(total))
    for flaw in given.flaws.values():
        numbers.append(0 if flaw is None else flaw.to(device, torch.int64))
    trained = given.trained
    numbers.append(_NOT_TRAINED if trained is None or trained.device != device else trained)
    if device.type == "cpu":
        return torch.tensor([int(number) for number in numbers], device=device)
    known = torch.tensor(
        [number if isinstance(number, int) else 0 for number in numbers],
        device="cpu",
        pin_memory=True,
    ).to(device, non_blocking=True)
    return torch.stack(
        [known[i] if isinstance(number, int) else number for i, number in enumerate(numbers)]
    )
