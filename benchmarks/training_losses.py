# SPDX-License-Identifier: Apache-2.0
"""Losses of one training on one process and over rings, step by step, on CPU.

    python tools/demo_model/measure.py --write-data build/pydoc
    python benchmarks/training_losses.py --data build/pydoc --out build/training_losses \\
        --figure build/training-losses.svg

Runs examples/train.py, in float32 and without dropout, once for each ring of --rings: the number of
ranks, or the shares of ranks that are unequal, as 5:1:2. The first one is what the others are
compared with. What is behind -- goes to each run. A column of the table is the loss of a ring, and
`largest difference` is relative to the first column.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from lib.cli import common_arguments
from lib.report import Report, environment

ROOT = Path(__file__).resolve().parents[1]
#: A small model: 0.1 million weights.
SMALL = (
    *("--tokens", "1024", "--steps", "200", "--learning-rate", "2e-3", "--tie-heads"),
    *("--layers", "2", "--width", "64", "--heads", "4", "--kv-heads", "2", "--hidden", "128"),
)
WATCHED = 50  # steps at the beginning, before small differences have grown


@dataclass(frozen=True)
class Ring:
    """Ranks of one training."""

    text: str  # "3", or shares: "5:1:2"

    @property
    def ranks(self) -> int:
        return self.text.count(":") + 1 if ":" in self.text else int(self.text)

    @property
    def name(self) -> str:
        """A column's."""
        shares = f", {self.text}" if ":" in self.text else ""
        return f"{self.ranks} rank{'s' * (self.ranks > 1)}{shares}"

    def losses(self, data: Path, options: Sequence[str]) -> list[float]:
        """Of each step.

        Raises:
            subprocess.CalledProcessError: the training failed; it has said why.
        """
        with tempfile.TemporaryDirectory() as folder:
            run = Path(folder) / "run"
            command = ["-m", "torch.distributed.run", "--standalone"]
            command += ["--nproc-per-node", str(self.ranks)]
            if self.ranks == 1:
                command = []
            command += [str(ROOT / "examples" / "train.py"), "--dtype", "float32"]
            command += ["--data", str(data), "--out", str(run), *options]
            if ":" in self.text:
                command += ["--weights", *self.text.split(":")]
            alone = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
            subprocess.run([sys.executable, *command], check=True, env=alone)
            with (run / "losses.csv").open(newline="") as file:
                return [float(row["loss"]) for row in csv.DictReader(file)]


def table(found: dict[str, list[float]]) -> list[dict[str, float]]:
    """Rows: the losses of a step, and how far they are from the first one's."""
    rows = []
    for step, losses in enumerate(zip(*found.values(), strict=True), start=1):
        difference = max(abs(loss - losses[0]) / abs(losses[0]) for loss in losses)
        row = {"step": step, **dict(zip(found, losses, strict=True))}
        rows.append(row | {"largest difference": difference})
    return rows


def draw(rows: Sequence[dict[str, float]], names: Sequence[str], path: Path) -> None:
    """The losses, and differences from the first one's."""
    from study.style import legend_below, overlaid, panels, plt

    figure, (losses, differences) = panels(2, "One training on one process and over rings")
    steps = [row["step"] for row in rows]
    colours = ("#000000", "#0072B2", "#E69F00", "#009E73", "#CC79A7")
    widths = [3 * width for width in overlaid(len(names))]
    for name, colour, width in zip(names, colours, widths, strict=False):
        of_ring = [row[name] for row in rows]
        losses.plot(steps, of_ring, color=colour, linewidth=width, label=name)
        if name != names[0]:
            apart = [abs(row[name] / row[names[0]] - 1) for row in rows]
            differences.plot(steps, apart, color=colour, linewidth=1, label=name)
    losses.set_title("loss of a token", fontsize=10)
    differences.set_title(f"relative difference from {names[0]}", fontsize=10)
    differences.set_yscale("log")
    differences.axhline(1e-4, color="#555555", linewidth=1, linestyle="--")
    differences.axvline(WATCHED, color="#555555", linewidth=1, linestyle=":")
    for ax in (losses, differences):
        ax.set_xlabel("step")
    legend_below(figure, losses)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def rings(text: str) -> list[Ring]:
    """A type of arguments: "1,2,5:1:2"."""
    found = [Ring(part) for part in text.split(",")]
    for ring in found:
        if not all(part.isdecimal() and int(part) for part in ring.text.split(":")):
            raise argparse.ArgumentTypeError(f"must be like 1,2,5:1:2, got {text!r}")
    return found


def parse() -> argparse.Namespace:
    given, more = sys.argv[1:], []
    if "--" in given:
        place = given.index("--")
        given, more = given[:place], given[place + 1 :]
    parser = common_arguments(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="of scripts/prepare_data.py")
    parser.add_argument("--rings", type=rings, default=rings("1,2,5:1:2,4"), help="with commas")
    parser.add_argument("--figure", type=Path, metavar="FILE.svg", help="drawn by matplotlib")
    arguments = parser.parse_args(given)
    arguments.options = [*SMALL, *more]
    return arguments


def main() -> None:
    arguments = parse()
    header = environment(torch.device("cpu"))
    header["ranks"] = ", ".join(ring.text for ring in arguments.rings)
    header["training"] = " ".join(arguments.options) + ", float32, AdamW"
    found: dict[str, list[float]] = {}
    for ring in arguments.rings:
        begun = time.perf_counter()
        found[ring.name] = ring.losses(arguments.data, arguments.options)
        header[f"seconds, {ring.name}"] = f"{time.perf_counter() - begun:.0f}"
    rows = table(found)
    for name, part in ((f"the first {WATCHED}", rows[:WATCHED]), ("all", rows)):
        largest = max(row["largest difference"] for row in part)
        header[f"largest difference, {name} steps"] = f"{largest:.1e}"
    columns = ["step", *found, "largest difference"]
    report = Report("Losses of one training over rings", header, columns)
    report.start()
    for row in rows:
        report.add(row)
    report.write(arguments.out)
    if arguments.figure is not None:
        draw(rows, list(found), arguments.figure)


if __name__ == "__main__":
    main()
