# SPDX-License-Identifier: Apache-2.0
"""The README and the pages of docs/ as the tests read them: sections, code blocks, links."""

import contextlib
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Names = dict[str, Any]

ROOT = Path(__file__).resolve().parents[3]
#: What users and developers read; docs/log and the results index hold history and are left out.
PAGES = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    *(f"docs/{x.name}" for x in sorted((ROOT / "docs").glob("*.md"))),
]
HISTORY = [
    "benchmarks/results/README.md",
    *(f"docs/log/{x.name}" for x in sorted((ROOT / "docs/log").glob("*.md"))),
]

_FENCE = re.compile(r"^(?:<!-- not run: ([^\n]*) -->\n\n)?```(\S*)\n(.*?)^```$", re.M | re.S)
_HEADING = re.compile(r"^#+ (.*)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block, below the heading it stands under."""

    page: str
    section: str
    language: str
    text: str
    not_run: str | None  # the reason that the page gives


def text_of(page: str) -> str:
    return (ROOT / page).read_text()


def blocks(page: str) -> Iterator[Block]:
    text = text_of(page)
    for found in _FENCE.finditer(text):
        above = _HEADING.findall(_without_code(text[: found.start()]))
        yield Block(page, above[-1], found[2], found[3], found[1])


def shown(page: str, *sections: str) -> list[str]:
    """The Python blocks of these sections that run, in order."""
    found = [
        block.text
        for block in blocks(page)
        if block.section in sections and block.language == "python" and block.not_run is None
    ]
    assert found, f"{page} must have Python blocks below {sections}"
    return found


def output(page: str, section: str) -> list[str]:
    """The lines of a section's last block that is no code."""
    text = [x.text for x in blocks(page) if x.section == section and x.language == ""][-1]
    return [line for line in text.splitlines() if not line.startswith("$")]


def run(texts: list[str], names: Names) -> list[str]:
    """Runs blocks one after the other in `names`; the lines that they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for text in texts:
            exec(text, names)
    return printed.getvalue().splitlines()


def anchors(page: str) -> set[str]:
    """Headings as GitHub turns them into anchors."""
    headings = _HEADING.findall(_without_code(text_of(page)))
    return {re.sub(r"[^\w\- ]", "", x.lower()).replace(" ", "-") for x in headings}


def links(page: str) -> list[str]:
    """Targets of links and figures within the repository."""
    targets = re.findall(r"\]\(([^)\s]+)\)", _without_code(text_of(page)))
    return [target for target in targets if not target.startswith("http")]


def _without_code(text: str) -> str:
    return _FENCE.sub("", text)
