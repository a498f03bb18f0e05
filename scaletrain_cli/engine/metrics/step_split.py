"""Split each step of a rank into forward passes, backward passes, the update and communication, without waiting for it.

On a CPU by host clocks, on a GPU by events on its stream that are read in a later step, once they have passed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch.distributed.distributed_c10d import Work

Phase = Literal["forward", "backward", "optimizer", "communication", "other"]

_MOST_PENDING = 16  # steps whose events have not passed; older ones are dropped


class SplitStep(NamedTuple):
    """The columns of a rank's telemetry that were measured in optimizer step ``step``."""

    step: int
    values: dict[str, float]


class CollectiveWaits:
    """A context that counts the seconds in which this thread waits for collectives and messages of gloo.

    Every blocking collective of torch.distributed calls ``Work.wait``. With NCCL this only enqueues, so the seconds
    there do not include the transfer.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = 0.0
        self._clock = clock
        self._before: Callable[..., Any] | None = None

    def __enter__(self) -> "CollectiveWaits":
        wait, thread, clock, own_thread = Work.wait, threading.get_ident(), self._clock, threading.get_ident

        def timed_wait(work: Work, *arguments: Any, **named: Any) -> Any:
            if own_thread() != thread:  # a checkpoint that is written in the background
                return wait(work, *arguments, **named)
            began = clock()
            try:
                return wait(work, *arguments, **named)
            finally:
                self.seconds += clock() - began

        self._before = wait
        Work.wait = timed_wait  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            Work.wait, self._before = self._before, None  # type: ignore[method-assign]


class _Mark(NamedTuple):
    """The moment at which a phase begins: on the host, and on the GPU's stream."""

    phase: Phase
    seconds: float
    event: Any


@dataclass
class _Pending:
    """A step whose work is enqueued. ``known``: its other columns, which may be read once the step is done."""

    step: int
    marks: list[_Mark]
    known: Mapping[str, float | Callable[[], float]]


class StepSplit:
    """Measures the phases of steps. ``begin``, ``enter`` and ``end`` only take the time, or enqueue an event.

    A phase lasts until the next one is entered. Columns: ``step_seconds``, and of each phase that was entered its sum
    over the micro-batches, as ``forward_seconds``. ``communication_seconds``: on a CPU the waits for collectives
    (``waits``), which are part of the other phases; on a GPU the messages of a pipeline, which are not.
    ``host_seconds``: on a CPU the step; on a GPU the step times the share of the forward passes' time that the host
    needs to enqueue them. Backward passes and updates do not show that: DeepSpeed waits for the device in them.
    """

    def __init__(
        self, device: torch.device, waits: CollectiveWaits | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._on_gpu, self._device, self._clock = device.type == "cuda", device, clock
        self._waits, self._waited_before = waits, 0.0
        self._marks: list[_Mark] = []
        self._pending: deque[_Pending] = deque()
        self._unused: list[Any] = []  # events that have been read
        self._running = False

    def begin(self) -> None:
        """Begin a step, in the phase ``other``."""
        self._marks, self._running = [], True
        self._waited_before = self._waits.seconds if self._waits is not None else 0.0
        self.enter("other")

    def enter(self, phase: Phase) -> None:
        """End the present phase of the step and begin another one. Does nothing outside of a step."""
        if self._running:
            now, event = self._clock(), None
            if self._on_gpu:
                event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record(torch.cuda.current_stream(self._device))
            self._marks.append(_Mark(phase, now, event))

    def end(self, step: int, known: Mapping[str, float | Callable[[], float]]) -> None:
        """End the step. ``known``: further columns; a callable is called after the work of the step is done."""
        self.enter("other")
        self._running = False
        if self._waits is not None:
            known = {**known, "communication_seconds": self._waits.seconds - self._waited_before}
        self._pending.append(_Pending(step, self._marks, known))
        if len(self._pending) > _MOST_PENDING:
            self._pending.popleft()

    def done(self) -> list[SplitStep]:
        """Return the steps whose work is done, oldest first, each once. Never waits."""
        steps = []
        while self._pending and (not self._on_gpu or self._pending[0].marks[-1].event.query()):
            steps.append(self._read(self._pending.popleft()))
        return steps

    def _read(self, pending: _Pending) -> SplitStep:
        marks, sums, host = pending.marks, dict[Phase, float](), dict[Phase, float]()
        for this, following in pairwise(marks):
            enqueued = following.seconds - this.seconds
            passed = this.event.elapsed_time(following.event) / 1e3 if self._on_gpu else enqueued
            sums[this.phase] = sums.get(this.phase, 0.0) + passed
            host[this.phase] = host.get(this.phase, 0.0) + enqueued
        total = sum(sums.values())
        if self._on_gpu:
            self._unused += [mark.event for mark in marks]
        elif self._waits is not None:
            sums.pop("communication", None)
        values = {"step_seconds": total}
        values |= {f"{phase}_seconds": seconds for phase, seconds in sums.items() if phase != "other"}
        if not self._on_gpu:
            values["host_seconds"] = total
        elif sums.get("forward"):
            values["host_seconds"] = total * min(1.0, host["forward"] / sums["forward"])
        values |= {name: value() if callable(value) else value for name, value in pending.known.items()}
        return SplitStep(pending.step, values)
