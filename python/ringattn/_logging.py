# SPDX-License-Identifier: Apache-2.0
"""The logger ``ringattn``: lines of the C++ library.

A rank that waits for another one writes a line after ``RINGATTN_WAIT_REPORT_S`` seconds (10 by
default), then every six times as long, at level WARNING. ``RINGATTN_LOG=info`` adds lines at level
INFO: the transport chosen, the ring formed, the kernels used.

A line goes to the handlers of the logging module where there are any, else to stderr.
"""

import atexit
import logging
import sys

from ringattn import _C

logger = logging.getLogger("ringattn")


class _Stderr(logging.Handler):
    """Writes to stderr what no other handler takes, so that no line appears twice."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [handler for handler in logger.handlers if handler is not self]
        if not others and not (logger.propagate and logging.getLogger().handlers):
            # One write: ranks share a terminal.
            sys.stderr.write(f"ringattn: {record.getMessage()}\n")


def _write(is_warning: bool, line: str) -> None:
    logger.log(logging.WARNING if is_warning else logging.INFO, "%s", line)


def install() -> None:
    """Sends the library's lines to the logger until the interpreter ends."""
    logger.addHandler(_Stderr())
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)  # lines of that level are made where RINGATTN_LOG asks
    _C.set_logger(_write)
    atexit.register(_C.set_logger, None)
