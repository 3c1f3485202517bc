# SPDX-License-Identifier: Apache-2.0
"""The strategies: how many tokens each rank owns, from which inputs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import ringattn
from ringattn import strategies

from study.settings import Settings

#: Split types, in the order of tables and figures. The first four are contiguous, as in the study
#: that they come from (https://github.com/AnshSG13/hetero_gpu_context_parallelism).
STRATEGIES = (
    "even",
    "uneven",
    "lut",
    "formula",
    "even_zigzag",
    "uneven_zigzag",
    "planned_contiguous",
    "planned",
    "rebalanced",
)


@dataclass(frozen=True)
class Split:
    partition: ringattn.Partition
    depth: int | None = None  # None: as deep as there are other ranks
    predicted_ms: float | None = None
    note: str = ""

    @property
    def same(self) -> tuple[ringattn.Partition, int]:
        """Equal for splits with equal ring calls."""
        most = max(1, self.partition.world_size - 1)
        return self.partition, min(self.depth or most, most)


@dataclass(frozen=True)
class PlanInputs:
    """What a strategy may use."""

    seq_len: int
    percentages: Sequence[int]
    profiles: Sequence[ringattn.RankProfile]  # with the noise taken out, as plans need them
    linear_tflops: Sequence[float]  # [W], as measured
    cost: ringattn.ModelCost
    settings: Settings

    @property
    def world_size(self) -> int:
        return len(self.percentages)


def split(strategy: str, inputs: PlanInputs) -> Split:
    """Everything but "rebalanced", which has to run first."""
    name, _, layout = strategy.partition("_")
    if name == "planned":
        planned = ringattn.plan(
            inputs.seq_len, inputs.profiles, inputs.cost, layout=layout or "zigzag"
        )
        return Split(planned.partition, planned.depth, planned.predicted_ms)
    return _PRIOR[name](inputs, layout or "contiguous")


def _even(inputs: PlanInputs, layout: str) -> Split:
    return Split(strategies.even(inputs.seq_len, inputs.world_size, layout=layout))


def _uneven(inputs: PlanInputs, layout: str) -> Split:
    # The percentages, as in that study: nothing is measured.
    return Split(strategies.uneven(inputs.seq_len, inputs.percentages, layout=layout))


def _lut(inputs: PlanInputs, layout: str) -> Split:
    if inputs.settings.lut is not None:
        table = strategies.read_table(inputs.settings.lut)
    else:
        table = strategies.matmul_table(inputs.percentages, inputs.linear_tflops)
    return Split(strategies.lut(inputs.seq_len, inputs.percentages, table, layout=layout))


def _formula(inputs: PlanInputs, layout: str) -> Split:
    path = inputs.settings.regression
    regression = None if path is None else strategies.Regression.read(path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", strategies.ClampWarning)
        partition = strategies.formula(
            inputs.seq_len, inputs.percentages, regression, layout=layout
        )
    return Split(partition, note="; ".join(str(warning.message) for warning in caught))


_PRIOR: dict[str, Callable[[PlanInputs, str], Split]] = {
    "even": _even,
    "uneven": _uneven,
    "lut": _lut,
    "formula": _formula,
}
