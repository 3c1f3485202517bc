# SPDX-License-Identifier: Apache-2.0
"""--partition auto: the ranks are measured, prompts and cache planned for what they can do, and
plans follow from one run to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from ringattn.models import LLaMA
from ringattn.partition import Partition
from ringattn.planning import ModelCost, Plan, plan_cache
from ringattn.profiles import RankProfile, load_profiles
from ringattn.profiling import measure_profiles, tokens_to_measure
from ringattn.rebalancing import Rebalancer
from ringattn.timings import Timings


@dataclass
class AutoPartition:
    """What one prompt's runs are planned with. Collective throughout."""

    model: LLaMA
    num_tokens: int  # of the prompt
    profiles: list[RankProfile]
    cache_lengths: list[int] | None  # None: keys stay where the prompt has them
    rebalancer: Rebalancer
    plans: list[Plan]  # one per run so far

    @classmethod
    def measured(
        cls,
        model: LLaMA,
        num_tokens: int,
        max_new_tokens: int,
        layout: str,
        profiles: list[RankProfile] | None,
    ) -> AutoPartition:
        """With these profiles; None: of the ranks as they are now.

        Raises:
            ValueError: as :func:`ringattn.plan`.
        """
        config, ring = model.config, model.ring
        if profiles is None:
            profiles = measure_profiles(
                ring.group,
                num_heads=config.nheads,
                num_kv_heads=config.kvheads,
                head_dim=config.head_dim,
                num_layers=config.nlayers,
                num_tokens=tokens_to_measure(num_tokens, ring.world_size, model.device),
                dtype=model.dtype,
                device=model.device,
            )
        cost = ModelCost.from_config(config, dtype=model.dtype)
        left = -1 if config.window_size is None else config.window_size - 1
        cached = num_tokens + max(0, max_new_tokens - 1)  # nothing attends to the last token
        return cls(
            model,
            num_tokens,
            profiles,
            # A windowed model's cached keys stay in the order of the sequence.
            None if config.window_size is not None else plan_cache(cached, profiles, cost),
            Rebalancer(profiles, cost, window_size=(left, -1), layout=layout),
            [],
        )

    def next(self) -> Partition:
        """For the run that begins."""
        self.plans.append(self.rebalancer.plan(self.num_tokens))
        return self.plans[-1].partition

    def learn(self, timings: Timings) -> None:
        """From the run that ended."""
        self.rebalancer.observe(timings, self.model.ring.group)

    def result(self) -> dict[str, Any]:
        """What was planned for the last run, as the JSON has it."""
        plan = self.plans[-1]
        lengths: list[Sequence[int]] = [plan.partition.lengths for plan in self.plans]
        return {
            "profiles": [asdict(profile) for profile in self.profiles],
            "speeds": self.rebalancer.speeds,
            "predicted_ms": plan.predicted_ms,
            "rank_ms": list(plan.rank_ms),
            "ideal_ms": plan.ideal_ms,
            "efficiency": plan.efficiency,
            "cache_lengths": self.cache_lengths,
            "replans": sum(a != b for a, b in pairwise(lengths)),
        }


def profiles_of(file: Path | None, world_size: int) -> list[RankProfile] | None:
    """Those in a ``--profiles``; None without one.

    Raises:
        ValueError: profiles for another number of ranks; as :func:`ringattn.load_profiles`.
    """
    if file is None:
        return None
    profiles = load_profiles(file)
    if len(profiles) != world_size:
        raise ValueError(
            f"--profiles must hold one for each of the {world_size} ranks, got {len(profiles)}"
        )
    return profiles


def describe(plan: dict[str, Any]) -> str:
    """:meth:`AutoPartition.result` in a sentence."""
    speeds = ", ".join(f"{profile['attention_tflops']:.3g}" for profile in plan["profiles"])
    changes = f", changed {plan['replans']} times" if plan["replans"] else ""
    lengths = plan["cache_lengths"]
    cache = "" if lengths is None else f"; cache {' '.join(map(str, lengths))}"
    return (
        f"planned for {speeds} TFLOPS of attention: {plan['predicted_ms']:.3g} ms a layer, "
        f"{100 * plan['efficiency']:.0f} % of ideal{changes}{cache}"
    )
