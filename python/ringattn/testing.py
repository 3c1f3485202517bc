# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of code that uses ringattn."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from ringattn import _C

_factors = [1.0]  # of the contexts entered, innermost last


@contextmanager
def slowdown(factor: float) -> Iterator[None]:
    """Makes this process a slower rank: it repeats the computation of every attention block inside
    the context, so that it takes about ``factor`` times as long, with the same result. An unequal
    ring anywhere, on CPU too. Contexts nest; the innermost factor holds.

    Args:
        factor: how many times slower, a number of at least 1; 2.5 repeats every second block once
            more.

    Raises:
        ValueError: a factor below 1 or not finite.
    """
    if not math.isfinite(factor) or factor < 1:
        raise ValueError(f"factor must be a finite number of at least 1, got {factor}")
    _factors.append(float(factor))
    _C.set_slowdown(_factors[-1])
    try:
        yield
    finally:
        _factors.pop()
        _C.set_slowdown(_factors[-1])
