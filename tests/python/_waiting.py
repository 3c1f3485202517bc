# SPDX-License-Identifier: Apache-2.0
"""Waits for what other processes and threads do, on a busy machine too."""

import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 600.0


def eventually(condition: Callable[[], bool]) -> bool:
    """Whether it holds, once it does or a long time has passed."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


def has_ended(process: int) -> bool:
    """Whether it has closed what it had open: its last thread does that."""
    threads = Path(f"/proc/{process}/task")
    try:
        states = [(one / "stat").read_text().rpartition(") ")[2][0] for one in threads.iterdir()]
    except (FileNotFoundError, ProcessLookupError):  # of a thread, or of the process
        return not threads.exists()
    return states == ["Z"]
