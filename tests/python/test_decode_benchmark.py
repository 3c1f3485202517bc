# SPDX-License-Identifier: Apache-2.0
"""The decode benchmark runs, small, on two ranks, and says how exact it was."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_ranks_together_decode_what_one_decodes(tmp_path: Path) -> None:
    stem = tmp_path / "decode"
    sizes = ["--shapes", "tiny", "--contexts", "1,65", "--batch", "2", "--dtype", "float32"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "benchmarks/decode.py", "--device", "cpu", *sizes),
            *("--rounds", "3", "--warmup", "1", "--bandwidth", "10", "--out", str(stem)),
        ],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path(f"{stem}.json").read_text())["rows"]
    assert [row["context"] for row in rows] == [1, 65]
    for row in rows:
        assert row["error"] < 1e-5
        assert row["x floor"] == row["ms"] / row["floor ms"]
    # 32 more tokens on the fuller rank, of 2 sequences, 2 layers, 2 heads of 16, keys and values.
    more_bytes = 32 * 2 * 2 * 2 * 16 * 2 * 4
    assert abs((rows[1]["floor ms"] - rows[0]["floor ms"]) - 1e3 * more_bytes / 10e9) < 1e-9
