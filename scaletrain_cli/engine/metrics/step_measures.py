"""The measures of each step, fetched without waiting for it: one step late on a GPU, at once on a CPU."""

import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor


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
        doubles = [tensor.to(torch.float64) for tensor in tensors.values()]
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
        measures = []
        while self._waiting and self._waiting[0][0] <= last:
            measures.append(self._waiting.popleft()[1]())
        return measures


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
