# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of calls after a cache run, small, on two ranks, and say how exact they were."""

import json
from pathlib import Path

from _commands import run_command


def test_both_ways_on_two_ranks_give_what_one_gives(tmp_path: Path) -> None:
    stem = tmp_path / "next_turn"
    sizes = ["--shapes", "tiny", "--cached", "65", "--tokens", "3,40", "--dtype", "float32"]
    rounds = ["--rounds", "2", "--warmup", "1"]
    command = ["benchmarks/next_turn.py", "--device", "cpu", *sizes, *rounds, "--out", stem]
    done = run_command(command, ranks=2)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    assert [row["way"] for row in rows] == ["one device", "every rank", "spread"] * 2
    assert [row["taken"] for row in rows] == ["", True, False, "", False, True]
    assert all(row["error"] < 1e-5 for row in rows)


def test_a_prompt_in_chunks_on_two_ranks_gives_what_it_gives_whole(tmp_path: Path) -> None:
    stem = tmp_path / "chunked_prefill"
    sizes = ["--shapes", "tiny", "--tokens", "64", "--chunks", "30", "--dtype", "float32"]
    rounds = ["--rounds", "2", "--warmup", "1"]
    command = ["benchmarks/chunked_prefill.py", "--device", "cpu", *sizes, *rounds, "--out", stem]
    done = run_command(command, ranks=2)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    assert [row["chunk"] for row in rows] == [64, 30]
    assert rows[0]["x whole"] == 1 and rows[0]["error"] == 0
    assert 0 < rows[1]["error"] < 1e-5
