"""The events of a trace of torch.profiler that a summary needs: steps, kernels, operators, collectives, allocations.

All times are microseconds. Standard library only.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

# The ranges that the engine marks in a trace; END: the device has done the work of the last step.
STEP, DATA, UPDATE, END = "scaletrain.step", "scaletrain.data", "scaletrain.update", "scaletrain.end"
COLLECTIVE_OPERATORS = ("c10d::", "_c10d_functional::", "gloo:", "nccl:", "mpi:", "ucc:")
_COMMUNICATES = re.compile(r"^nccl|ncclKernel|^rccl|nvshmem|deep_ep")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "hip_runtime")
_CHUNK = 1 << 20

Interval = tuple[float, float]


def read_trace(file: TextIO) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace one by one, without holding it in memory. Raises ValueError for other contents."""
    decoder, buffer = json.JSONDecoder(strict=False), ""
    while (place := re.search(r'"traceEvents"\s*:\s*\[', buffer)) is None:
        if not (chunk := file.read(_CHUNK)):
            raise ValueError("no trace events")
        buffer = buffer[-64:] + chunk
    at = place.end()
    while True:
        while at < len(buffer) and buffer[at] in " \t\r\n,":
            at += 1
        if at < len(buffer) and buffer[at] == "]":
            return
        try:
            event, at = decoder.raw_decode(buffer, at)
        except ValueError:
            if not (chunk := file.read(_CHUNK)):
                raise ValueError("the trace ends within an event") from None
            buffer, at = buffer[at:] + chunk, 0
            continue
        yield event


@dataclass(frozen=True)
class Kernel:
    start: float
    end: float
    name: str
    kind: str  # compute, communication, pipeline or copies
    correlation: int | None


@dataclass(frozen=True)
class Operator:
    start: float
    end: float
    name: str
    counts: bool  # False: an annotation, which is no operator


@dataclass(frozen=True)
class Allocation:
    at: float
    thread: Any
    address: int
    size: int  # negative: freed
    on_device: bool


@dataclass
class TraceEvents:
    """The events of a trace that a summary needs, by kind."""

    steps: list[Interval] = field(default_factory=list)
    main_thread: Any = None
    end: float | None = None
    data: list[Interval] = field(default_factory=list)
    updates: list[Interval] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)
    launches: dict[int, float] = field(default_factory=dict)
    collectives: list[tuple[float, float, bool]] = field(default_factory=list)  # of the host; True: send or receive
    operators: dict[Any, list[Operator]] = field(default_factory=lambda: defaultdict(list))
    allocations: list[Allocation] = field(default_factory=list)

    def add(self, event: Mapping[str, Any]) -> None:
        name, category = str(event.get("name", "")), str(event.get("cat", ""))
        if event.get("ph") == "i" and name == "[memory]":
            about = event["args"]
            on_device = int(about.get("Device Type", 0)) != 0
            size, address = int(about["Bytes"]), int(about.get("Addr", 0))
            self.allocations.append(Allocation(float(event["ts"]), event.get("tid"), address, size, on_device))
        if event.get("ph") != "X" or "ts" not in event:
            return
        start = float(event["ts"])
        end = start + float(event.get("dur", 0.0))
        about = event.get("args") or {}
        if category in ("kernel", "gpu_memcpy", "gpu_memset"):
            kind = _kind_of(name, about) if category == "kernel" else "copies"
            self.kernels.append(Kernel(start, end, name, kind, about.get("correlation")))
        elif category in _LAUNCHES:
            if "correlation" in about:
                self.launches[about["correlation"]] = start
        elif category in ("user_annotation", "cpu_op"):
            self._add_range(event, name, category, start, end)

    def _add_range(self, event: Mapping[str, Any], name: str, category: str, start: float, end: float) -> None:
        if name.startswith(COLLECTIVE_OPERATORS):
            self.collectives.append((start, end, _is_point_to_point(name)))
        if name == STEP:
            self.steps.append((start, end))
            self.main_thread = event.get("tid")
        elif name == END:
            self.end = start
        elif name == DATA:
            self.data.append((start, end))
        elif name == UPDATE or (name.startswith("Optimizer.step#") and category == "user_annotation"):
            self.updates.append((start, end))
        self.operators[event.get("tid")].append(Operator(start, end, name, category == "cpu_op"))


def _kind_of(name: str, about: Mapping[str, Any]) -> str:
    """Return the kind of a kernel; the name of its collective, where the trace has it, tells send and receive."""
    if not _COMMUNICATES.search(name):
        return "compute"
    collective = str(about.get("Collective name", "SendRecv" if "SendRecv" in name else ""))
    return "pipeline" if _is_point_to_point(collective) or collective == "SendRecv" else "communication"


def _is_point_to_point(name: str) -> bool:
    return name.rpartition(":")[2].rstrip("_") in ("send", "recv", "recvAnysource", "recv_any_source")
