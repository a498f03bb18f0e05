"""The metrics of each step: a line in metrics.jsonl, a line in the log, and the trackers of the run."""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from scaletrain_cli.engine.metrics.trackers import start_trackers
from scaletrain_cli.rundir.journal import append_lines
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.tracking.guard import Trackers
from scaletrain_cli.tracking.jsonl import JsonlWriter
from scaletrain_cli.worker.progress import progress_line

logger = logging.getLogger(__name__)

# Measures of a step, fetched without waiting for it: one step late on a GPU, at once on a CPU.


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
        """Start the clock of a step."""
        self._clock.start()

    def end(self, step: int, values: Mapping[str, Tensor | float]) -> None:
        """Queue the values of a step, scalars, whose work is enqueued or done."""
        known = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
        tensors = {name: value.detach() for name, value in values.items() if isinstance(value, Tensor)}
        seconds, fetch = self._clock.stop(), self._fetch(list(tensors.values()))

        def measures() -> StepMeasures:
            fetched = dict(zip(tensors, fetch(), strict=True))
            return StepMeasures(step, seconds(), {name: (known | fetched)[name] for name in values})

        self._waiting.append((step, measures))

    def due(self, step: int) -> list[StepMeasures]:
        """Return the measures to judge after step ``step``, oldest first: on a GPU all but the newest."""
        return self._until(step - self._lag)

    def rest(self) -> list[StepMeasures]:
        """Wait for all remaining measures and return them."""
        return self._until(self._waiting[-1][0]) if self._waiting else []

    def _until(self, last: int) -> list[StepMeasures]:
        found = []
        while self._waiting and self._waiting[0][0] <= last:
            found.append(self._waiting.popleft()[1]())
        return found

    def _fetch(self, tensors: list[Tensor]) -> Callable[[], list[float]]:
        """Return a function that waits for the values. The copy to pinned memory follows the step on its stream."""
        if self._device.type != "cuda" or not tensors:
            values = [float(tensor) for tensor in tensors]
            return lambda: values
        stacked = torch.stack([tensor.to(self._device, torch.float64) for tensor in tensors])
        host = torch.empty(len(tensors), dtype=torch.float64, pin_memory=True).copy_(stacked, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()

        def wait() -> list[float]:
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


class MetricsLog:
    """Writes metrics on rank 0; on other ranks every method does nothing."""

    def __init__(self, run: RunDir, record: RunRecord, rank: int, attempt: int, device: torch.device) -> None:
        self._run, self._record, self._attempt, self._device = run, record, attempt, device
        self._active = rank == 0
        self._writer = JsonlWriter(run.metrics, append_lines)
        self._trackers = start_trackers(run, record, attempt) if self._active else Trackers()
        self.finished = False  # set by the loop after the last step
        # MFU is model FLOPs per second over peak FLOPs per second; the plan has it for its own speed.
        plan = record.plan.time
        known = record.spec.cluster.gpu != "cpu" and plan.tokens_per_second > 0
        self._mfu_per_token_per_second = plan.mfu / plan.tokens_per_second if known else None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._writer.close()
        except OSError:
            if error is None:
                raise
        self._trackers.finish("failed" if error is not None else "finished" if self.finished else "preempted")

    def log(self, step: int, *, tokens: int, step_seconds: float, **measured: float) -> None:
        """Record optimizer step ``step`` (1-based), which trained on ``tokens`` tokens over all ranks."""
        if not self._active:
            return
        tokens_per_second = tokens / step_seconds
        factor = self._mfu_per_token_per_second
        line: dict[str, Any] = {
            "step": step,
            **measured,
            "tokens_per_second": round(tokens_per_second, 1),
            "step_seconds": round(step_seconds, 5),
            "memory_bytes": peak_memory_bytes(self._device),
            "mfu": None if factor is None else round(factor * tokens_per_second, 4),
            "attempt": self._attempt,
            "time": round(time.time(), 3),
        }
        self._append(line)
        total = self._record.spec.total_steps
        logger.info(_log_line(line, total))
        print(progress_line(step, total, measured["loss"], line["tokens_per_second"]), flush=True)

    def flush(self) -> None:
        """Wait until every line is in the file. Raises OSError."""
        self._writer.flush()

    def log_validation(self, step: int, sequences: int, **losses: float) -> None:
        """Record losses after ``step`` steps, over ``sequences`` sequences, as a line of its own."""
        if not self._active:
            return
        measured = {**losses, "validation_sequences": sequences}
        self._append({"step": step, **measured, "attempt": self._attempt, "time": round(time.time(), 3)})
        shown = "  ".join(f"{name.replace('_', ' ')} {loss:.4f}" for name, loss in losses.items())
        logger.info("step %d/%d  %s", step, self._record.spec.total_steps, shown)

    def _append(self, line: dict[str, Any]) -> None:
        self._writer.put(line)
        self._trackers.log(line)


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes allocated on the GPU since the first update, or resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _log_line(line: dict[str, Any], total_steps: int) -> str:
    parts = [f"step {line['step']}/{total_steps}", f"loss {line['loss']:.4f}"]
    skipped = "skipped, the gradient overflowed"
    parts += [f"grad norm {line['grad_norm']:.3f}" if "grad_norm" in line else skipped]
    parts += [f"lr {line['learning_rate']:.2e}"]
    parts += [f"{line['tokens_per_second']:,.0f} tokens/s", f"{line['step_seconds']:.2f} s/step"]
    parts.append(f"{line['memory_bytes'] / 1e9:.2f} GB")
    if line["mfu"] is not None:
        parts.append(f"MFU {100 * line['mfu']:.1f} %")
    return "  ".join(parts)
