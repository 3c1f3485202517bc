# SPDX-License-Identifier: Apache-2.0
"""What follows from a sweep of benchmarks/heterogeneous.py that was measured before.

    python benchmarks/findings.py STEM.json

Writes STEM_findings.{md,csv,json}, as the sweep itself does, and leaves its tables as they are.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from report import Report
from study.tables import FINDING_COLUMNS, findings, sweep_rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path, metavar="STEM.json")
    path = parser.parse_args().sweep
    content = json.loads(path.read_text())
    report = Report(f"{content['title']}: findings", content["header"], FINDING_COLUMNS)
    report.start()
    for row in findings(sweep_rows(content["rows"])):
        report.add(row)
    report.write(str(path.with_suffix("")) + "_findings")


if __name__ == "__main__":
    main()
