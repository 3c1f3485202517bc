# SPDX-License-Identifier: Apache-2.0
"""Device memory that is kept, on a GPU that other processes may use too."""

from collections.abc import Sequence
from itertools import pairwise

import torch

PAGE = 2 << 20  # bytes; a transport's memory is a multiple of it


def in_use() -> int:
    """Bytes of this rank's device that all processes together use."""
    free, total = torch.cuda.mem_get_info()
    return total - free


def grows_each_time(used: Sequence[int]) -> bool:
    """Whether memory is kept in each repetition, after which so much was in use: the first one
    keeps what lasts. A leak shows in all repetitions; what other processes allocate and free
    meanwhile shows in some."""
    return all(after - before >= PAGE for before, after in pairwise(used[1:]))
