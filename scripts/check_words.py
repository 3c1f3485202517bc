#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fails where a retired word is used again, in names or in comments.

    scripts/check_words.py [root]

docs/glossary.md explains the terms that are used instead. Logs and results keep the words of their
time. A line that needs one, such as a quotation, says ``words: ok``.
"""

import argparse
import pathlib
import re
import sys

FOLDERS = ("csrc", "python", "benchmarks", "tests", "docs")
LEFT_OUT = ("docs/log/", "benchmarks/results/")
SUFFIXES = {".c", ".cpp", ".cu", ".cuh", ".h", ".md", ".py", ".pyi", ".txt"}
ALLOWED = "words: ok"

# Retired word (a regular expression, in any case) -> what is written now.
RETIRED = {
    r"attends_(?:lists|segments)": "supports_segment_lists",
    r"\battendable": "as_attention_input",
    r"bringing|\bbrought|brings_much|BringOrder": "fetch, RemoteFetch, is_fetch_bound",
    r"errand": "BoundedTask",
    r"even_out|order_of_last_turns|with_last_in_order": "rebalance_tail, with_tail_order",
    r"\bgathering\b": "ResidentBlocks",
    r"handshake": "SignalPad",
    r"(?:Host|Launch|Stream|Watched)Words": "HostSignalPad, LaunchScratch, StreamMemOps",
    r"hostil(?:e|ity)": "fault injection, inject_transfer_delays",
    r"in_round\b": "source_at, destination_at",
    r"\bk(?:Most|Least|Fewest)[A-Z]": "kMax, kMin",
    r"\bkernel_ready|is_kernel_ready": "as_kernel_input, is_kernel_input",
    r"least_depth": "min_depth",
    r"\blookout\b": "watchdog",
    r"more_keys": "overhead_keys",
    r"on_lanes|\blanes\.h": "device_emulator",
    r"\bown_read|\bpeer_read": "read_by_peer, read_by_this_rank",
    r"OwnParts": "LocalResources",
    r"parcel": "fetch buffer",
    r"part_rows": "rows_per_warpgroup",
    r"process_wide": "process_singleton",
    r"regret": "record_failed_replan",
    r"RemoteKeys|BroughtKeys": "RemoteBlock, RemoteSegment",
    r"RingGroup|ring_group\.h": "GroupContext",
    r"stageable": "as_stage_input",
    r"take_lane|give_lane_back": "take_stream, return_stream",
    r"\btakers?\b": "workers",
    r"taken_back": "read_by_peer, clear",
    r"TurnShape|TurnsTaken|TurnsHandedOut": "work tile, dispatch",
}


def uses(root: pathlib.Path) -> list[str]:
    """One line for each use of a retired word: where it is, and what to write."""
    found = []
    pattern = re.compile("|".join(f"({word})" for word in RETIRED), re.IGNORECASE)
    terms = list(RETIRED.values())
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root).as_posix()
            if path.suffix not in SUFFIXES or name.startswith(LEFT_OUT):
                continue
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if (use := pattern.search(line)) and use.lastindex and ALLOWED not in line:
                    term = terms[use.lastindex - 1]
                    found.append(f"{name}:{number}: retired word {use[0]!r}, write: {term}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = pathlib.Path(__file__).resolve().parents[1]
    parser.add_argument("root", type=pathlib.Path, nargs="?", default=here, help="a checkout")
    arguments = parser.parse_args()
    if not arguments.root.is_dir():
        parser.error(f"root must be a folder, got {arguments.root}")
    found = uses(arguments.root)
    print("\n".join(found), end="\n" if found else "")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
