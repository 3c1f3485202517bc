# SPDX-License-Identifier: Apache-2.0
"""Tests pass on a busy machine: they wait for long and take free ports."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
LEAST_S = 100.0
#: Timeouts that are what is tested, or end what is to be killed.
TESTED = {("test_commands.py", 0.5), ("_distributed.py", 1)}


def sources() -> Iterator[tuple[Path, str]]:
    for path in sorted(TESTS.rglob("*.py")):
        if path != Path(__file__):
            yield path, path.read_text()


def test_timeouts_that_are_not_tested_are_long() -> None:
    short = [
        f"{path.name}:{node.value.lineno}: {node.value.value} s"
        for path, text in sources()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.keyword)
        and node.arg in ("timeout", "timeout_s")
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, (int, float))
        and node.value.value < LEAST_S
        and (path.name, node.value.value) not in TESTED
    ]
    assert short == []


def test_no_test_expects_to_be_quick() -> None:
    clock = re.compile(r"(?:(?:monotonic|perf_counter|time)\(\) - \w+|seconds|_s\b)\W* < ([0-9.]+)")
    quick = [
        f"{path.name}: {found[0]}"
        for path, text in sources()
        for found in clock.finditer(text)
        if float(found[1]) < LEAST_S
    ]
    assert quick == []


def test_ports_are_free_ones() -> None:
    port = re.compile(r"(?:localhost|127\.0\.0\.1)\"?[:,] ?\"?[1-9]\d+|MASTER_PORT\"?[=:,] ?\"?\d")
    fixed = [
        f"{path.name}: {found[0]}" for path, text in sources() for found in port.finditer(text)
    ]
    assert fixed == []
