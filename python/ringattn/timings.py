# SPDX-License-Identifier: Apache-2.0
"""Timings of ring calls: one record per visiting block."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from ringattn import _C
from ringattn._checks import check_flag


@dataclass(frozen=True)
class StepTiming:
    """One visiting block of one ring call (or one launch, see :func:`record_timings`), in
    milliseconds. From CUDA events on CUDA, from a steady clock on CPU; there a transfer ends when
    it has been waited for, so that ``transfer_ms`` is an upper bound (the process group does not
    say when it was done)."""

    call: int  #: number of the ring call inside the context, from 0 (a model's layers)
    source: int  #: the rank that owns the block
    kind: str  #: "own" or "remote"
    attention_ms: float  #: computing; 0 where nothing is visible
    transfer_ms: float  #: of the block's transfer; 0 for the own one, and without ``by_block``
    #: attention stood still because the block was not here yet; in a backward also until the
    #: gradients that return beside it are here and added
    wait_ms: float
    flops: float = 0.0  #: operations of the attention; repetitions do not count
    backward: bool = False  #: of the backward of a ring call, which is a call of its own


@dataclass
class Timings:
    """Timings of ring calls, filled when the context of :func:`record_timings` ends."""

    steps: list[StepTiming] = field(default_factory=list)

    @property
    def calls(self) -> list[list[StepTiming]]:
        """The steps of each ring call."""
        calls: dict[int, list[StepTiming]] = {}
        for step in self.steps:
            calls.setdefault(step.call, []).append(step)
        return list(calls.values())

    def summary(self) -> dict[str, float]:
        """The steps added up.

        Returns:
            ``calls`` (number of ring calls), ``steps`` (number of visiting blocks), and in
            milliseconds ``attention_ms``, ``own_attention_ms``, ``remote_attention_ms``,
            ``transfer_ms``, ``wait_ms``.
        """
        own = sum(step.attention_ms for step in self.steps if step.kind == "own")
        remote = sum(step.attention_ms for step in self.steps if step.kind == "remote")
        return {
            "calls": len({step.call for step in self.steps}),
            "steps": len(self.steps),
            "attention_ms": own + remote,
            "own_attention_ms": own,
            "remote_attention_ms": remote,
            "transfer_ms": sum(step.transfer_ms for step in self.steps),
            "wait_ms": sum(step.wait_ms for step in self.steps),
        }


_MAX_OVERHEAD = 0.5  # share of a call's time: the rest of it must say something about speed


def call_tflops(calls: Sequence[Sequence[StepTiming]], overhead_ms: float) -> list[float]:
    """Speed of attention in each call that had any, TFLOP/s, without waits and the constant
    overhead of a call."""
    speeds = []
    for steps in calls:
        flops = sum(step.flops for step in steps)
        busy_ms = sum(step.attention_ms for step in steps)
        if flops > 0 and busy_ms > 0:
            speeds.append(flops / (busy_ms - min(overhead_ms, _MAX_OVERHEAD * busy_ms)) / 1e9)
    return speeds


_recording = False


def check_not_recording() -> None:
    """ValueError inside :func:`record_timings`."""
    if _recording:
        raise ValueError(
            "record_timings must not be nested, got a second recording in this process"
        )


@contextmanager
def record_timings(*, by_block: bool = True) -> Iterator[Timings]:
    """Records every ring call of this process inside the context, and every backward of one; costs
    nothing when it is off.

    Args:
        by_block: attention goes block by block, and ``steps`` has each. False: calls go as they
            would by themselves; where that is one launch for some blocks or all of them,
            ``steps`` has one entry for it, with the first block's ``source`` and ``kind``, and what
            a kernel waits for blocks by itself is in its ``attention_ms``. It is timed alone:
            what would run beside it, as staging does, has ended before.

    Yields:
        A :class:`Timings`; its ``steps`` are there once the context has ended, also by an
        exception. On CUDA the end of the context waits for the recorded work.

    Raises:
        ValueError: another recording is going on, ``by_block`` that is no bool.
    """
    global _recording
    check_not_recording()
    by_block = check_flag("by_block", by_block)
    timings = Timings()
    _C.start_recording(by_block)
    _recording = True
    try:
        yield timings
    finally:
        _recording = False
        timings.steps = [
            StepTiming(
                step.call,
                step.source,
                step.kind,
                step.attention_ms,
                step.transfer_ms,
                step.wait_ms,
                step.flops,
                step.backward,
            )
            for step in _C.stop_recording()
        ]
