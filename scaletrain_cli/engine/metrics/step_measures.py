"""The measures of each step, fetched without waiting for it: one step late on a GPU, at once on a CPU.

And the report on ranks that wait for their batches: one wait holds up every rank, and more readers can end it.

A step is split into forward passes, backward passes, the update and communication: on a CPU by host clocks, on a GPU by
events on its stream that are read in a later step, once they have passed.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from scaletrain_cli.engine.context import RankContext


class StepMeasures(NamedTuple):
    """Seconds and values of optimizer step ``step``."""

    step: int
    seconds: float
    values: dict[str, float]


class DeferredMetrics:
    """A queue between the GPU, which computes the values, and the host, which logs them.

    ``begin`` and ``end`` enclose a step and only enqueue work. ``due`` returns the steps that are old enough. Which
    ones depends on the step alone, so that all ranks decide by the same values at the same step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lag = 1 if device.type == "cuda" else 0
        self._clock = clock_of(device)
        self._waiting: deque[tuple[int, Callable[[], StepMeasures]]] = deque()

    def begin(self) -> None:
        self._clock.start()

    def end(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Queue the values of a step, scalars, whose work is enqueued or done."""
        kind = self._device.type
        on_device = {name: x for name, x in values.items() if isinstance(x, Tensor) and x.device.type == kind}
        tensors = {name: value.detach() for name, value in on_device.items()}
        known = {name: float(value) for name, value in values.items() if name not in tensors}
        seconds = self._clock.stop()
        doubles = [each.to(torch.float64) for each in tensors.values()]
        fetch = fetched_later(torch.stack(doubles) if doubles else torch.zeros(0))

        def measures() -> StepMeasures:
            fetched = dict(zip(tensors, fetch(), strict=True))
            return StepMeasures(step, seconds(), {name: (known | fetched)[name] for name in values})

        self._waiting.append((step, measures))

    def due(self, step: int) -> list[StepMeasures]:
        """Return the measures to check after step ``step``, oldest first: on a GPU all but the newest."""
        return self._until(step - self._lag)

    def remaining(self) -> list[StepMeasures]:
        return self._until(self._waiting[-1][0]) if self._waiting else []

    def _until(self, last: int) -> list[StepMeasures]:
        found = []
        while self._waiting and self._waiting[0][0] <= last:
            found.append(self._waiting.popleft()[1]())
        return found


def fetched_later(values: Tensor) -> Callable[[], list[Any]]:
    """Return a function that waits for values. On a GPU their copy to pinned memory follows the step on its stream."""
    if values.device.type != "cuda":
        known = values.tolist()
        return lambda: known
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record()

    def wait() -> list[Any]:
        copied.synchronize()
        return host.tolist()

    return wait


class HostClock:
    """Measures host time."""

    def start(self) -> None:
        self._began = time.perf_counter()

    def stop(self) -> Callable[[], float]:
        seconds = time.perf_counter() - self._began
        return lambda: seconds


class GpuClock:
    """Measures time on the GPU's stream, which runs behind the host."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)

    def start(self) -> None:
        self._began = self._moment()

    def stop(self) -> Callable[[], float]:
        began, ended = self._began, self._moment()

        def seconds() -> float:
            ended.synchronize()
            return float(began.elapsed_time(ended)) / 1e3

        return seconds

    def _moment(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event


Clock = HostClock | GpuClock


def clock_of(device: torch.device) -> Clock:
    """Return the clock for work on the device; on a GPU the host only enqueues it."""
    return GpuClock(device) if device.type == "cuda" else HostClock()


WINDOW_STEPS = 50
LARGEST_SHARE = 0.05  # of the time of a window; a smaller wait is not worth reporting


@dataclass
class DataWaits:
    """Sums up the waits of a rank; every 50 steps rank 0 reports the rank that waited most, if that is much.

    Reported again only after a window with less. The first wait of an attempt does not count: nothing was read ahead.
    """

    context: RankContext
    clock: Callable[[], float] = time.perf_counter
    _since: float | None = field(default=None, init=False)
    _waited: float = field(default=0.0, init=False)
    _steps: int = field(default=0, init=False)
    _reported: bool = field(default=False, init=False)

    def add(self, step: int, seconds: float, *, workers: int, prefetch: int) -> None:
        """Add the wait before ``step``. Collective at steps that are multiples of 50, the same on every rank."""
        now = self.clock()
        if self._since is not None:
            self._waited += seconds
            self._steps += 1
        if step % WINDOW_STEPS == 0 and self._since is not None:
            self._compare(step, self._waited / max(now - self._since, 1e-9), workers, prefetch)
        if self._since is None or step % WINDOW_STEPS == 0:
            self._since, self._waited, self._steps = now, 0.0, 0

    def _compare(self, step: int, share: float, workers: int, prefetch: int) -> None:
        shares = self.context.consensus.share(share)
        most = max(range(len(shares)), key=shares.__getitem__)
        high = shares[most] > LARGEST_SHARE
        if high and not self._reported:
            details = {"share": round(shares[most], 4), "steps": self._steps, "workers": workers, "prefetch": prefetch}
            self.context.report("data-wait", step=step, rank=most, **details)
        self._reported = high


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
            self._marks.append(_Mark(phase, self._clock(), self._event() if self._on_gpu else None))

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
        found = []
        while self._pending and (not self._on_gpu or self._pending[0].marks[-1].event.query()):
            found.append(self._read(self._pending.popleft()))
        return found

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

    def _event(self) -> Any:
        event = self._unused.pop() if self._unused else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event
