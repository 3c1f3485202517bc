# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of calls after a cache run, small, on two ranks, and say how exact they were."""

import json
from pathlib import Path
from typing import Any

from _commands import run_command


def rows_of(name: str, folder: Path, *sizes: str) -> list[dict[str, Any]]:
    """What a benchmark writes of the tiny model."""
    stem = folder / name
    model = ["--device", "cpu", "--shapes", "tiny", "--dtype", "float32"]
    rounds = ["--rounds", "2", "--warmup", "1"]
    command = [f"benchmarks/{name}.py", *model, *sizes, *rounds, "--out", stem]
    done = run_command(command, ranks=2)
    assert done.returncode == 0, done.stderr
    return json.loads(Path(f"{stem}.json").read_text())["rows"]


def test_both_ways_on_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    rows = rows_of("next_turn", tmp_path, "--cached", "65", "--tokens", "3,40")
    assert [row["way"] for row in rows] == ["one device", "every rank", "spread"] * 2
    assert [row["taken"] for row in rows] == ["", True, False, "", False, True]
    assert all(row["error"] < 1e-5 for row in rows)


def test_a_prompt_in_chunks_on_two_ranks_gives_what_it_gives_whole(tmp_path: Path) -> None:
    rows = rows_of("chunked_prefill", tmp_path, "--tokens", "64", "--chunks", "30")
    assert [row["chunk"] for row in rows] == [64, 30]
    assert rows[0]["x whole"] == 1 and rows[0]["error"] == 0
    assert 0 < rows[1]["error"] < 1e-5
