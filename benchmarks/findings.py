# SPDX-License-Identifier: Apache-2.0
"""What follows from a sweep of benchmarks/heterogeneous.py that was measured before.

    python benchmarks/findings.py STEM.json

Writes STEM_findings.{md,csv,json}, as the sweep itself does, and leaves its tables as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lib.report import Report
from study.tables import FINDING_COLUMNS, findings, sweep_rows

# What the findings follow from: nothing else that is written here has all of these columns.
NEEDED = {"what", "percentages", "seq_len", "split_type", "overall_latency_ms", "ideal_ms"}


def read_sweep(path: Path) -> dict[str, Any]:
    """Title, header and rows.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is something else.
    """
    content: Any = json.loads(path.read_text())
    if not isinstance(content, dict) or not {"title", "header", "rows"} <= content.keys():
        raise ValueError("a report must have a title, a header and rows")
    if not all(isinstance(row, dict) and row.keys() >= NEEDED for row in content["rows"]):
        raise ValueError(f"rows of a sweep must have {', '.join(sorted(NEEDED))}")
    return content


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, metavar="STEM.json")
    path = parser.parse_args().sweep
    try:
        content = read_sweep(path)
    except OSError as error:
        parser.error(f"STEM.json must be a file that can be read, got {path}: {error.strerror}")
    except ValueError:
        parser.error(f"STEM.json must be a sweep of benchmarks/heterogeneous.py, got {path}")
    report = Report(f"{content['title']}: findings", content["header"], FINDING_COLUMNS)
    report.start()
    for row in findings(sweep_rows(content["rows"])):
        report.add(row)
    report.write(str(path.with_suffix("")) + "_findings")


if __name__ == "__main__":
    main()
