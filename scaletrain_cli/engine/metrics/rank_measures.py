"""The measurements of this rank in training, sent to the node agent; rank 0 also writes the layers' norms to a file."""

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from scaletrain_cli.engine.compose import Composed
from scaletrain_cli.engine.context import RankContext
from scaletrain_cli.engine.health.stragglers import Stragglers
from scaletrain_cli.engine.metrics.layer_measures import LayerMeasures, MeasuredLayers
from scaletrain_cli.engine.metrics.memory_measurement import MemorySampler
from scaletrain_cli.engine.metrics.noise_scale import NoiseScale, NoiseSteps
from scaletrain_cli.engine.metrics.step_split import CollectiveWaits, StepSplit
from scaletrain_cli.engine.parallel.mesh import Mesh
from scaletrain_cli.engine.step import Stepper
from scaletrain_cli.telemetry.run import layers_file
from scaletrain_cli.telemetry.series import SeriesWriter
from scaletrain_cli.worker.telemetry import RankTelemetry

_SPLIT_SECONDS = 0.05  # between the beginnings of two steps that are split: a row has the mean of a second
_WRITE_SECONDS = 10.0  # between two writes of the layers' norms
_CLOSE_SECONDS = 2.0  # for the last write
logger = logging.getLogger(__name__)


class LayersFile:
    """The file of the layers' norms. A thread writes it: training never waits for a file system that hangs."""

    def __init__(self, path: Path) -> None:
        self._writer = SeriesWriter(path)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._write, name="layers", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads may be created
            self._thread = None
            logger.warning("the norms of layers are not written: %s", error)

    def add(self, measured: MeasuredLayers) -> None:
        for name, columns in measured.columns.items():
            self._writer.add(f"layer {name}", time.time(), measured.step, columns)

    def close(self) -> None:
        """Write what is left, for at most 2 seconds."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)

    def _write(self) -> None:
        while not self._ended.wait(_WRITE_SECONDS):
            self._writer.flush()
        self._writer.close()


class RankMeasures:
    """Measures the steps of one rank. With ``telemetry.enabled: false`` every method does nothing.

    None waits for the GPU, and all but ``after_step`` are local. No value that is trained depends on it. Of short steps
    at most 20 a second are split.
    """

    def __init__(
        self,
        context: RankContext,
        composed: Composed,
        stepper: Stepper,
        stragglers: Stragglers,
        mesh: Mesh,
        *,
        first_step: int,
        sender: RankTelemetry | None = None,
    ) -> None:
        """``first_step``: the first one that this attempt trains. ``sender``: default, to the agent of this process."""
        layout, device, settings = context.layout, context.device, context.spec.telemetry
        self._enabled = settings.enabled
        self._stepper, self._stragglers = stepper, stragglers
        self._waits = CollectiveWaits() if self._enabled and device.type == "cpu" else None
        self._of_run: dict[str, float] = {}  # what rank 0 sends with its next step
        if not self._enabled:
            return
        self._sender = sender or RankTelemetry.from_environment(os.environ, interval_seconds=settings.interval)
        self._split, self._split_began = StepSplit(device, self._waits), -math.inf
        self._memory = MemorySampler(device, settings.interval / 2)  # so that each row that is sent has a value
        noise = NoiseScale.of(layout, composed.objective, device) if settings.noise_scale else None
        self._noise_steps = NoiseSteps(noise, context.consensus) if noise is not None else None
        stepper.noise_scale = noise
        self._layers = LayerMeasures(context, composed, mesh, first_step)
        self._file = LayersFile(layers_file(context.run, context.attempt)) if context.rank == 0 else None

    def __enter__(self) -> "RankMeasures":
        if self._waits is not None:
            self._waits.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *details: Any) -> None:
        if not self._enabled:
            return
        if self._waits is not None:
            self._waits.__exit__(kind, *details)
        if kind is None:  # else a GPU may have failed, whose events raise errors
            self._send()
        self._sender.send()
        if self._file is not None:
            self._file.close()

    def begin(self, step: int) -> None:
        """Begin step ``step`` (1-based), before its batches are taken."""
        if self._enabled:
            self._layers.begin(step)
            self._stepper.measures_noise = self._noise_steps is not None and self._noise_steps.begin(step)
            began = time.perf_counter()
            if began - self._split_began >= _SPLIT_SECONDS:
                self._split_began, self._stepper.split = began, self._split
                self._split.begin()
            else:
                self._stepper.split = None

    def end(self, step: int, waited: float, norm: Tensor | float) -> None:
        """End the step, whose work is enqueued. ``waited``: seconds for its batches; ``norm``: of its gradient."""
        if not self._enabled:
            return
        if self._stepper.split is not None:
            known: dict[str, float | Callable[[], float]] = {"data_wait_seconds": waited, **self._memory.due()}
            if (own := self._stragglers.own_seconds) is not None:
                known["own_seconds"] = own
            self._split.end(step, known)
            self._send()
        self._layers.end(step, norm, self._stepper.largest_norm)

    def after_step(self, step: int) -> None:
        """Finish a measurement of layers, if one is complete after step ``step``. Collective."""
        if not self._enabled:
            return
        if (measured := self._layers.finished(step)) is not None and self._file is not None:
            self._file.add(measured)
        if self._noise_steps is not None:
            self._noise_steps.after_step()

    def step_took(self, step: int, seconds: float) -> None:
        if self._enabled:
            self._layers.step_took(step, seconds)
            if self._noise_steps is not None:
                self._noise_steps.step_took(seconds)

    def add_of_run(self, values: Mapping[str, float]) -> None:
        """Send values of the whole run, of the latest step that was logged, with those of the next step."""
        self._of_run.update(values)

    def _send(self) -> None:
        for step, values in self._split.done():
            self._sender.add(step, values | self._of_run)
            self._of_run = {}
