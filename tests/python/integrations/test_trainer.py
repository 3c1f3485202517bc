# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers over ringattn's context_parallel."""

import json
from pathlib import Path
from typing import Any

import pytest
from _commands import run_command

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).with_name("_trainer.py")


def train(ranks: int, folder: Path) -> dict[str, Any]:
    run = run_command([SCRIPT, folder], ranks=ranks)
    assert run.returncode == 0, run.stderr[-4000:]
    (printed,) = (line for line in run.stdout.splitlines() if line.startswith('{"losses"'))
    return json.loads(printed)


def test_losses_of_two_ranks_are_those_of_one_process(tmp_path):
    alone, over_the_ring = (train(ranks, tmp_path / str(ranks)) for ranks in (1, 2))
    assert alone["called"] == 0 and over_the_ring["called"] == len(alone["losses"]) == 6
    assert over_the_ring["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert over_the_ring["norms"] == pytest.approx(alone["norms"], rel=1e-3)
