# SPDX-License-Identifier: Apache-2.0
"""What benchmarks write: a header that says how it was measured, and a table."""

from __future__ import annotations

import contextlib
import csv
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lib.ranks import rank, world_size

# Defaults of benchmarks/heterogeneous.py for options that its command line leaves out.
SEQ_LEN_VARIABLES = ("SEQ_LEN", "SWEEP_SEQ_LEN")
PERCENTAGE_VARIABLES = ("WEAK_GPU_PERCENTAGE", "SWEEP_SLOWDOWN_PCT")
# Switches of the compiled library. Others (RINGATTN_CUDA) are for builds, and change no run.
RUN_VARIABLES = (
    "NCCL_HOSTID",
    "RINGATTN_HOST_ID",
    "RINGATTN_KERNEL_FAMILY",
    "RINGATTN_KERNEL_WAITS",
)


def environment(device: torch.device) -> dict[str, str]:
    """What a reader needs to believe or repeat a figure."""
    facts = {
        "command": command(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "ringattn": importlib.metadata.version("ringattn"),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "ranks": str(world_size()),
    }
    if device.type == "cuda":
        count = torch.cuda.device_count()
        facts["device"] = f"{torch.cuda.get_device_name(device)} ({count} in this machine)"
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    else:
        facts["device"] = f"{_cpu_name()}, {os.cpu_count()} cores"
        facts["threads of a rank"] = str(torch.get_num_threads())
    return facts


def command(arguments: Sequence[str] | None = None) -> str:
    """The command line, repeatable: with the environment variables that have an effect, and the
    ranks, but without the folder of the output. `arguments` replace those of this process."""
    names = sorted((*SEQ_LEN_VARIABLES, *PERCENTAGE_VARIABLES, *RUN_VARIABLES))
    switches = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    launcher = ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        launcher = ["torchrun", "--nproc-per-node", str(world_size())]
    given = sys.argv[1:] if arguments is None else arguments
    words = _without_folders(given)
    return shlex.join([*switches, *launcher, Path(sys.argv[0]).name, *words])


def _without_folders(arguments: Sequence[str]) -> list[str]:
    """`arguments` with the last part of the path after --out: its folder depends on the machine."""
    words: list[str] = []
    for word in arguments:
        if words and words[-1] == "--out":
            word = Path(word).name
        elif word.startswith("--out="):
            word = f"--out={Path(word.removeprefix('--out=')).name}"
        words.append(word)
    return words


def _commit() -> str:
    def git(*arguments: str) -> str:
        command = ["git", "-C", str(Path(__file__).parents[1]), *arguments]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    # A copy of the tree has no history, or an older one: the variable names its commit.
    if given := os.environ.get("RINGATTN_COMMIT"):
        return given
    commit = git("rev-parse", "--short=12", "HEAD")
    if not commit:
        return "unknown"
    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", "../csrc", "../python", "."
    )
    return commit + (" with changes" if changed else "")


def _cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.machine()


@dataclass
class Report:
    """A `#` header and a table; printed by rank 0, written as Markdown, CSV and JSON."""

    title: str
    header: dict[str, str]
    columns: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)

    def start(self) -> None:
        if rank() == 0:
            print(f"# {self.title}")
            for name, value in self.header.items():
                print(f"# {name}: {value}")
            print("  ".join(f"{name:>{self._width(name)}}" for name in self.columns), flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Keys are column names; what is left out stays empty."""
        if unknown := set(row) - set(self.columns):
            raise ValueError(f"keys of a row must be columns, got {sorted(unknown)}")
        self.rows.append(row)
        if rank() == 0:
            cells = (f"{_text(row.get(name)):>{self._width(name)}}" for name in self.columns)
            print("  ".join(cells), flush=True)

    def remark(self, text: str) -> None:
        """A line that belongs to the header, said once."""
        if text not in self.header.values():
            self.header[f"remark {len(self.header)}"] = text
            if rank() == 0:
                print(f"# {text}", flush=True)

    def write(self, stem: str | None) -> None:
        """`stem`.md, .csv and .json; nothing without a stem."""
        if stem is None or rank() != 0:
            return
        Path(stem).parent.mkdir(parents=True, exist_ok=True)
        lines = [f"# {self.title}", "", "```"]
        lines += [f"{name}: {value}" for name, value in self.header.items()]
        lines += ["```", "", "| " + " | ".join(self.columns) + " |"]
        lines.append("|" + " --- |" * len(self.columns))
        for row in self.rows:
            lines.append("| " + " | ".join(_text(row.get(name)) for name in self.columns) + " |")
        Path(f"{stem}.md").write_text("\n".join(lines) + "\n")
        with Path(f"{stem}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
        content = {"title": self.title, "header": self.header, "rows": self.rows}
        Path(f"{stem}.json").write_text(json.dumps(content, indent=1) + "\n")

    def _width(self, name: str) -> int:
        return max(len(name), 40 if name == "what" else 8)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        if value == 0 or 0.01 <= abs(value) < 1e5:
            return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
        return f"{value:.1e}"
    return str(value)
