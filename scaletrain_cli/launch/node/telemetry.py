"""The telemetry of one node: what its ranks send, and the use of its GPUs and of the node, written to one file.

A thread measures and writes, so that neither a driver nor a file system that hangs can delay the agent: it only adds
rows to a queue. Errors lose telemetry, and nothing else.
"""

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from scaletrain_cli.available_memory import available_bytes, control_groups, text_of, used_bytes
from scaletrain_cli.own_processes import python_command
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.telemetry.series import SeriesWriter
from scaletrain_cli.worker.telemetry import RankRow

_INFINIBAND = "sys/class/infiniband"
_WORD_BYTES = 4  # port_rcv_data and port_xmit_data count words of 4 bytes
_INFINIBAND_ERRORS = (
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "port_rcv_errors",
    "port_xmit_discards",
    "symbol_error",
)


class _CpuGroup(NamedTuple):
    """A control group with a limit of ``cores``: its CPU seconds, and the scheduler's periods in which it was stopped.

    Counted from the start of the group.
    """

    cores: float
    seconds: float | None
    periods: float
    throttled_periods: float


class HostSampler:
    """Reads the use of this node. ``root``: the folder with ``proc`` and ``sys``, for tests.

    CPU and memory are those of the tightest control group that limits the job, else of the machine. Disk, network and
    InfiniBand are those of the machine, so that jobs of others on it count as well. ``infiniband_errors`` counts from
    the first call on.
    A value that is not known here, such as a rate at the first call, is absent.
    """

    def __init__(self, root: Path = Path("/"), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._root, self._clock = root, clock
        self._before: dict[str, tuple[float, float]] = {}
        self._has_infiniband = False
        self._errors_before: float | None = None

    def sample(self) -> dict[str, float]:
        """Return the values since the last call."""
        now = self._clock()
        values: dict[str, float | None] = self._cpu(now) | self._traffic(now) | self._infiniband(now)
        values["memory_used_bytes"] = used_bytes(self._root)
        values["memory_available_bytes"] = available_bytes(self._root)
        return {name: float(value) for name, value in values.items() if value is not None}

    def _cpu(self, now: float) -> dict[str, float | None]:
        group = next(self._limited_groups(), None)
        if group is None:
            return {"cpu_utilization": self._machine_cpu()}
        used = None if group.seconds is None else self._rate("cpu", group.seconds, now)
        passed = self._increase("periods", group.periods)
        stopped = self._increase("throttled", group.throttled_periods)
        return {
            "cpu_utilization": None if used is None else min(1.0, used / group.cores),
            "cpu_throttled": None if not passed or stopped is None else min(1.0, stopped / passed),
        }

    def _machine_cpu(self) -> float | None:
        """Return the share of time for which the cores that this process may use were busy."""
        import psutil

        cores = os.sched_getaffinity(0)
        times = [spent for core, spent in enumerate(psutil.cpu_times(percpu=True)) if core in cores]
        idle = sum(spent.idle + getattr(spent, "iowait", 0.0) for spent in times)
        # Time of guests is part of that of users.
        total = sum(sum(spent) - getattr(spent, "guest", 0.0) - getattr(spent, "guest_nice", 0.0) for spent in times)
        passed, idled = self._increase("cpu_total", total), self._increase("cpu_idle", idle)
        return None if not passed or idled is None else 1.0 - min(1.0, idled / passed)

    def _limited_groups(self) -> Iterator[_CpuGroup]:
        """Yield the control groups of this process whose CPU time is limited, the lowest first (version 2 or 1)."""
        for folder, top, version in control_groups(self._root, "cpu"):
            limit = text_of(folder / "cpu.max").split()
            if version == 1:
                limit = [text_of(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
            pairs = (line.split() for line in text_of(folder / "cpu.stat").splitlines())
            statistics = {pair[0]: float(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
            if len(limit) == 2 and all(word.isdigit() and int(word) for word in limit):
                seconds = statistics["usage_usec"] / 1e6 if "usage_usec" in statistics else None
                if version == 1:  # the files of cpuacct are beside those of cpu, or in a folder of its own
                    names = (folder, self._root / "sys/fs/cgroup/cpuacct" / folder.relative_to(top))
                    texts = [text_of(name / "cpuacct.usage").strip() for name in names]
                    seconds = next((int(text) / 1e9 for text in texts if text.isdigit()), None)
                yield _CpuGroup(
                    cores=min(int(limit[0]) / int(limit[1]), float(len(os.sched_getaffinity(0)))),
                    seconds=seconds,
                    periods=statistics.get("nr_periods", 0.0),
                    throttled_periods=statistics.get("nr_throttled", 0.0),
                )

    def _traffic(self, now: float) -> dict[str, float | None]:
        import psutil

        rates: dict[str, float | None] = {}
        disks = psutil.disk_io_counters()
        if disks is not None:
            rates["disk_read_bytes_per_second"] = self._rate("read", disks.read_bytes, now)
            rates["disk_written_bytes_per_second"] = self._rate("written", disks.write_bytes, now)
        cards = {name: card for name, card in psutil.net_io_counters(pernic=True).items() if name != "lo"}
        # A bridge or a bond counts the bytes of its cards once more. In a container no interface is a device.
        real = [name for name in cards if (self._root / "sys/class/net" / name / "device").exists()]
        counted = [cards[name] for name in real or cards]
        if counted:
            received, sent = (sum(getattr(card, key) for card in counted) for key in ("bytes_recv", "bytes_sent"))
            rates["network_received_bytes_per_second"] = self._rate("received", received, now)
            rates["network_sent_bytes_per_second"] = self._rate("sent", sent, now)
        return rates

    def _infiniband(self, now: float) -> dict[str, float | None]:
        ports = sorted((self._root / _INFINIBAND).glob("*/ports/*"))
        # Ports that no cable has ever connected are no network; one that has gone down is.
        self._has_infiniband = self._has_infiniband or any("ACTIVE" in text_of(port / "state") for port in ports)
        if not self._has_infiniband:
            return {}
        received, sent = (
            float(sum(_WORD_BYTES * _number(port / "counters" / name) for port in ports))
            for name in ("port_rcv_data", "port_xmit_data")
        )
        errors = sum(_number(port / "counters" / name) for port in ports for name in _INFINIBAND_ERRORS)
        self._errors_before = errors if self._errors_before is None else self._errors_before
        return {
            "infiniband_received_bytes_per_second": self._rate("infiniband_received", received, now),
            "infiniband_sent_bytes_per_second": self._rate("infiniband_sent", sent, now),
            "infiniband_errors": max(0.0, errors - self._errors_before),
        }

    def _rate(self, name: str, value: float, now: float) -> float | None:
        """Return the increase per second since the last call; None at the first, and after a counter was reset."""
        before = self._before.get(name)
        increase = self._increase(name, value, now)
        return None if increase is None or before is None or now <= before[0] else increase / (now - before[0])

    def _increase(self, name: str, value: float, now: float = 0.0) -> float | None:
        before, self._before[name] = self._before.get(name), (now, value)
        return None if before is None or value < before[1] else value - before[1]


def _number(path: Path) -> float:
    text = text_of(path).strip()
    return float(text) if text.isdigit() else 0.0


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
                        sample = json.loads(line)
                        moment = float(sample["time"])
                        rows += [(moment, int(index), values) for index, values in sample["gpus"].items() if values]
        return rows
