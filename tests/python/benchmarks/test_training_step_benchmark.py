# SPDX-License-Identifier: Apache-2.0
"""benchmarks/training_step.py: one stack whose attention goes over the ranks in several ways."""

import sys
from pathlib import Path
from typing import Any

import launching
import pytest
import torch
import training_step
from decode import SHAPES
from ringattn.models import LLaMA
from test_benchmarks import read, run
from torch.utils.flop_counter import FlopCounterMode

STEP = ["benchmarks/training_step.py", "--device", "cpu", "--iterations", "1", "--warmup", "0"]


def close(row: dict[str, str], right: dict[str, str]) -> bool:
    names = ("loss", "gradient_norm")
    return all(float(row[x]) == pytest.approx(float(right[x]), rel=1e-5) for x in names)


def test_ways_of_a_training_step_have_one_loss_and_one_gradient(tmp_path: Path) -> None:
    stem = tmp_path / "step"
    split = ["--partitions", "even,auto,3:1", "--ways", "ring,context_parallel,ulysses,zigzag"]
    sizes = ["--seq-lens", "96", "--rows", "20", "--head-rows", "7"]
    run(*STEP, *sizes, *split, "--percentages", "100,50", "--out", str(stem), ranks=2)
    rows = read(stem)
    assert [(row["way"], row["partition"]) for row in rows] == [
        *(("ring", "even"), ("ring", "auto"), ("ring", "3:1")),
        *(("Ulysses on PyTorch's kernel", "even"), ("zigzag on torch CPU", "even")),
    ]
    assert rows[2]["lengths"] == "zigzag 72, 24"
    assert all(row["status"] == "ok" and float(row["tokens_per_s"]) > 0 for row in rows)
    assert "context_parallel left out" in Path(f"{stem}.md").read_text()

    alone = tmp_path / "alone"
    run(*STEP, *sizes, "--ways", "ring", "--world-size", "1", "--out", str(alone))
    assert all(close(row, read(alone)[0]) for row in rows)


class WithoutDaemon:
    """MPS where there is none."""

    def __enter__(self) -> "WithoutDaemon":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def environment(self, percentage: float) -> dict[str, str]:
        return {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{percentage:g}"}


MEMBER = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
own = f"{dist.get_rank()} {os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE']}"
open(f"{sys.argv[1]}/{dist.get_rank()}", "w").write(own)
dist.barrier()
sys.exit(int(sys.argv[2]))
"""


def test_ranks_under_mps_start_with_their_shares(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "member.py"
    script.write_text(MEMBER)
    monkeypatch.setattr(launching, "MPS", WithoutDaemon)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), "0"])
    assert not launching.under_mps([100, 50])
    assert [(tmp_path / f"{rank}").read_text() for rank in range(2)] == ["0 100", "1 50"]
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path), "3"])
    with pytest.raises(SystemExit):
        launching.under_mps([100, 50])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launching.under_mps([100, 50])


def test_operations_of_a_step_are_those_of_its_products_and_of_visible_pairs() -> None:
    config, seq_len = SHAPES["tiny"], 64
    model = LLaMA(config, group="single")
    ids = torch.randint(config.src_vocab_size, (1, seq_len))
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    products = sum(count for name, count in counts.items() if "ringattn" not in str(name))
    pairs = seq_len * (seq_len + 1) // 2
    attention = 3 * 4 * config.nheads * config.head_dim * config.nlayers * pairs
    assert training_step.training_flops(config, seq_len) == products + attention
