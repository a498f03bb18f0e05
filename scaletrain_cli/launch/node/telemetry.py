"""The telemetry of one node: what its ranks send, and the use of its GPUs and of the node, written to one file.

A thread measures and writes, so that neither a driver nor a file system that hangs can delay the agent: it only adds
rows to a queue. Errors lose telemetry, and nothing else.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import random
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.launch.node.host_usage import HostSampler
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.telemetry.series import SeriesWriter
from scaletrain_cli.worker.telemetry import RankRow

# Between two writes: an append to a network file system by each node of a large cluster.
FLUSH_SECONDS = 10.0
_FIRST_FLUSH_SECONDS = 2.0
FINISH_SECONDS = 2.0
_KILL_SECONDS = 0.5
_READ_BYTES = 1 << 16
_MODULE = "scaletrain_cli.launch.node.gpu_usage"
logger = logging.getLogger(__name__)


def measures_gpus(spec: RunSpec) -> bool:
    """Return whether the ranks have GPUs whose driver can be read here."""
    return spec.cluster.gpu != "cpu" and importlib.util.find_spec("pynvml") is not None


@dataclass
class NodeTelemetry:
    """The thread that measures and writes. ``rows``: (rank, row) as they arrive. ``step``: returns the newest step.

    ``path``: None to write nothing. ``on_gpu``: gets index and values of each GPU in the thread; it must not wait.

    No method raises or waits, except ``finish`` for at most 2.5 seconds.
    """

    path: Path | None
    interval_seconds: float
    rows: deque[tuple[int, RankRow]]
    step: Callable[[], int]
    on_gpu: Callable[[int, Mapping[str, float]], None] = lambda index, values: None
    host: HostSampler = field(default_factory=HostSampler)
    _ended: threading.Event = field(default_factory=threading.Event, init=False)
    _gpus: subprocess.Popen[bytes] | None = field(default=None, init=False)
    _rest: bytes = field(default=b"", init=False)
    _measures_host: bool = field(default=True, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def start(self, spec: RunSpec) -> None:
        """Start the thread, and the process that reads the GPUs. Call it in the agent's main thread."""
        if measures_gpus(spec):
            self._start_gpus(spec)
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads may be created
            self._thread = None
            logger.warning("no telemetry is written: %s", error)

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that this object has started."""
        return () if self._gpus is None else (self._gpus.pid,)

    def finish(self, seconds: float = FINISH_SECONDS) -> None:
        """End the process that reads the GPUs, and write what is left: for ``seconds``, and at most 2; then give up."""
        self._ended.set()
        if self._gpus is not None:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # it may hang in the driver
                self._gpus.kill()
                self._gpus.wait(_KILL_SECONDS)
        if self._thread is not None:
            self._thread.join(max(0.0, min(seconds, FINISH_SECONDS)))

    def _start_gpus(self, spec: RunSpec) -> None:
        # In the main thread: a process that is to die with its parent dies with the thread that started it.
        words = ("--parent-pid", str(os.getpid()), "--count", str(spec.cluster.gpus_per_node))
        command = python_command(_MODULE, *words, "--interval", str(self.interval_seconds))
        environment = {**os.environ}
        if (visible := spec.env.get("CUDA_VISIBLE_DEVICES")) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = visible
        try:
            self._gpus = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, bufsize=0
            )
            assert self._gpus.stdout is not None
            os.set_blocking(self._gpus.stdout.fileno(), False)
        except OSError as error:
            logger.warning("the GPUs are not measured: %s", error)

    def _run(self) -> None:
        try:
            writer = None if self.path is None else SeriesWriter(self.path)
            due = time.monotonic()
            flush_due = due + _FIRST_FLUSH_SECONDS * random.random()
            while True:
                self._measure(writer)
                if writer is not None and time.monotonic() >= flush_due:
                    writer.flush()
                    # Nodes of one job start together, and write at different times.
                    flush_due = time.monotonic() + FLUSH_SECONDS * random.uniform(0.8, 1.2)
                due = max(due + self.interval_seconds, time.monotonic())
                if self._ended.wait(max(0.0, due - time.monotonic())):
                    break
            if writer is not None:
                self._add_ranks(writer)
                writer.close()
        except Exception as error:
            logger.warning("no more telemetry is written: %s: %s", type(error).__name__, error)
        finally:
            if self._gpus is not None and self._gpus.stdout is not None:
                self._gpus.stdout.close()

    def _measure(self, writer: SeriesWriter | None) -> None:
        step = self.step()
        for moment, index, values in self._gpu_rows():
            self.on_gpu(index, values)
            if writer is not None:
                writer.add(f"gpu {index}", moment, step, values)
        if writer is None:
            return
        self._add_ranks(writer)
        if self._measures_host:
            try:
                writer.add("node", time.time(), step, self.host.sample())
            except Exception as error:  # of a kernel that psutil does not know
                self._measures_host = False
                logger.warning("the node is not measured: %s: %s", type(error).__name__, error)

    def _add_ranks(self, writer: SeriesWriter) -> None:
        for _ in range(len(self.rows)):
            rank, row = self.rows.popleft()
            writer.add(
                f"rank {rank}", row.time, row.step, row.mean, count=row.count, lowest=row.lowest, highest=row.highest
            )

    def _gpu_rows(self) -> list[tuple[float, int, dict[str, float]]]:
        """Return time, index and values that the process has printed since the last call."""
        if self._gpus is None or self._gpus.stdout is None:
            return []
        rows = []
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._gpus.stdout.fileno(), _READ_BYTES):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError, TypeError, KeyError):  # text that a library has printed
                        found = json.loads(line)
                        moment = float(found["time"])
                        rows += [(moment, int(index), values) for index, values in found["gpus"].items() if values]
        return rows
