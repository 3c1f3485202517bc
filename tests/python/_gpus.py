# SPDX-License-Identifier: Apache-2.0
"""How many GPUs a test needs, and the groups in which ``scripts/gpu_results.sh`` runs those tests.

A group needs one number of GPUs and ends within ten minutes.
"""

import zlib
from collections.abc import Sequence

import pytest

#: Group -> number of GPUs. Groups of one number share the tests that need so many.
GROUPS = {"1": 1, "2a": 2, "2b": 2, "3a": 3, "3b": 3, "4a": 4, "4b": 4}

#: Numbers of ranks of a test, each with as many GPUs.
WORLD_SIZES = [pytest.param(size, marks=pytest.mark.multi_gpu(size=size)) for size in (2, 3, 4)]


def parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def num_gpus(item: pytest.Item) -> int:
    """The mark's number, the nearest one where there are several; 0: a test for the CPU."""
    if marker := item.get_closest_marker("multi_gpu"):
        return marker.kwargs.get("size", 2)
    return 1 if item.get_closest_marker("cuda") else 0


def group_of(item: pytest.Item) -> str | None:
    """The group that runs a test; None: a test for the CPU. A test keeps its group whichever
    others there are."""
    size = num_gpus(item)
    if size == 0:
        return None
    of_size = [name for name, number in GROUPS.items() if number == size]
    if not of_size:
        raise ValueError(f"multi_gpu(size=) must be one of a group, got {size} in {item.nodeid}")
    return of_size[zlib.crc32(item.nodeid.encode()) % len(of_size)]


def only(items: Sequence[pytest.Item], group: str) -> list[pytest.Item]:
    return [item for item in items if group_of(item) == group]
