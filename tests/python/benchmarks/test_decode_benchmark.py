# SPDX-License-Identifier: Apache-2.0
"""The decode benchmark runs, small, on two ranks, and says how exact it was."""

import json
from pathlib import Path

from _commands import run_command


def test_ranks_together_decode_what_one_decodes(tmp_path: Path) -> None:
    stem = tmp_path / "decode"
    sizes = ["--shapes", "tiny", "--contexts", "1,65", "--batch", "2", "--dtype", "float32"]
    rounds = ["--rounds", "3", "--warmup", "1", "--bandwidth", "10"]
    command = ["benchmarks/decode.py", "--device", "cpu", *sizes, *rounds, "--out", stem]
    done = run_command(command, ranks=2)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    assert [row["context"] for row in rows] == [1, 65]
    for row in rows:
        assert row["error"] < 1e-5
        assert row["x floor"] == row["ms"] / row["floor ms"]
    # 32 more tokens on the fuller rank, of 2 sequences, 2 layers, 2 heads of 16, keys and values.
    more_bytes = 32 * 2 * 2 * 2 * 16 * 2 * 4
    assert abs((rows[1]["floor ms"] - rows[0]["floor ms"]) - 1e3 * more_bytes / 10e9) < 1e-9
