# SPDX-License-Identifier: Apache-2.0
"""What runs in each rank: `python -m study.worker`, started by study.ranks, which sends the job."""

from __future__ import annotations

import json
import os
import sys
import threading
from typing import Any

import torch
from lib.ranks import process_group, rank
from lib.report import environment
from ringattn.profiling import RankMeasurement

from study.ranks import MARK
from study.rebalancing import trace
from study.settings import SWEEP, Job
from study.sweep import measure_cell, measured_ranks, tokens_measured
from study.workloads import throttled


def report(content: dict[str, Any]) -> None:
    """Sends a report to the process that started the ranks."""
    if rank() == 0:
        print(MARK + json.dumps(content), flush=True)


def receive_job() -> Job:
    """Waits for the job. Until it comes, modules are loaded and no device is touched."""
    line = sys.stdin.readline()
    if not line:
        sys.exit(1)  # the parent process is gone
    return Job.from_json(line)


def end_with_parent() -> None:
    """Ends this process with its parent: however that ends, its end of the pipe is closed."""

    def watch() -> None:
        sys.stdin.read()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    job = receive_job()
    end_with_parent()
    settings = job.settings
    with process_group(settings.device, settings.ranks_per_gpu) as device, torch.no_grad():
        report({"header": environment(device)})
        measured: dict[int, list[RankMeasurement]] = {}
        for cell in job.cells:
            if cell.kind != SWEEP:
                rows = trace(cell, settings, device)
            else:
                with throttled(settings, job.percentages[rank()]):
                    tokens = tokens_measured(cell, device)
                    if tokens not in measured:
                        measured[tokens] = measured_ranks(tokens, settings, device)
                    rows = measure_cell(cell, measured[tokens], settings, device)
            report({"cell": job.cells.index(cell), "rows": rows})


if __name__ == "__main__":
    main()
