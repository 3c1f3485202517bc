# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers over ringattn's context_parallel, and with a parallelized model."""

import json
from pathlib import Path
from typing import Any

import pytest
from _commands import run_command

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).with_name("_trainer.py")


def train(ranks: int, folder: Path, way: str) -> dict[str, Any]:
    run = run_command([SCRIPT, folder, way], ranks=ranks)
    assert run.returncode == 0, run.stderr[-4000:]
    (printed,) = (line for line in run.stdout.splitlines() if line.startswith('{"losses"'))
    return json.loads(printed)


def test_losses_over_context_parallel_are_those_of_one_process(tmp_path):
    alone, over_the_ring = (train(ranks, tmp_path / str(ranks), "context") for ranks in (1, 2))
    assert len(alone["losses"]) == 6 and len(alone["evaluated"]) == 2
    assert alone["called"] == 0 and over_the_ring["called"] == 6 + 2 * 2
    assert over_the_ring["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert over_the_ring["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
    assert over_the_ring["norms"] == pytest.approx(alone["norms"], rel=1e-3)


def test_losses_of_packed_documents_are_those_of_one_process(tmp_path):
    alone, over_the_ring = (train(ranks, tmp_path / str(ranks), "parallelize") for ranks in (1, 2))
    assert len(alone["losses"]) == 6 and len(alone["evaluated"]) == 2
    assert over_the_ring["losses"] == pytest.approx(alone["losses"], rel=1e-4)
    assert over_the_ring["evaluated"] == pytest.approx(alone["evaluated"], rel=1e-4)
    assert over_the_ring["norms"] == pytest.approx(alone["norms"], rel=1e-3)
