"""Attribute the time of profiled steps to the causes of the plan, from a trace of torch.profiler (Chrome's format).

``python -m scaletrain_cli.engine.metrics.trace RAW FOLDER RANK`` summarizes and compresses the trace of a rank in a
process of its own, so that training goes on meanwhile. Standard library only. All times in a trace are microseconds.

The profiled time begins with the first step and ends at the mark ``scaletrain.end``, when the device has done its work.
Each moment counts once, as the first that applies of (``rundir.profiles.CAUSES``):

- ``compute``: a kernel that neither communicates nor belongs to the update runs. On a CPU: an operator with a
  namespace, such as ``aten::mm``, on the rank's main thread; others are Python functions, which may wait.
- ``optimizer``: a kernel that was launched in the update runs. On a CPU: the rank is in the update.
- ``exposed_communication``: a collective runs, including its wait for other ranks; ``bubble`` if it is a send or a
  receive of a pipeline.
- ``copies``: a copy or a fill of memory runs.
- ``data_wait``: the rank waits for its next batches. ``between_steps``: it is between two steps.
- ``host``: on a GPU, the next kernel had not been launched when the last one ended; on a CPU, the rest.
- ``idle``: the rest of the time of a GPU.

Intervals are united before they are summed, and overlap is (communication and compute at once) / communication, as in
Holistic Trace Analysis (facebookresearch/HolisticTraceAnalysis).
"""

import bisect
import gzip
import json
import os
import re
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from scaletrain_cli.rundir.documents import write_document
from scaletrain_cli.rundir.profiles import CAUSES, rank_file, write_summary
from scaletrain_cli.safe_files import open_new

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


MOST_TRACE_BYTES = 512 << 20  # of a compressed trace; a larger one is not kept
_TOP = 15
_RUN_PYTHON = ("autograd::", "torch::autograd::")  # operators that call hooks, which may wait for other ranks
_MOST_OPEN = 10_000  # of the depth of operators; a deeper one is not a trace


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of the intervals, in order and disjoint."""
    union: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(end, union[-1][1]))
        else:
            union.append((start, end))
    return union


def intersected(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    overlaps, one, two = [], 0, 0
    while one < len(first) and two < len(second):
        start, end = max(first[one][0], second[two][0]), min(first[one][1], second[two][1])
        if start < end:
            overlaps.append((start, end))
        if first[one][1] < second[two][1]:
            one += 1
        else:
            two += 1
    return overlaps


def subtracted(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    rest, two = [], 0
    for start, end in first:
        while two < len(second) and second[two][1] <= start:
            two += 1
        at = two
        while at < len(second) and second[at][0] < end:
            if start < second[at][0]:
                rest.append((start, second[at][0]))
            start = max(start, second[at][1])
            at += 1
        if start < end:
            rest.append((start, end))
    return rest


def total(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def summarize(events: Iterable[Mapping[str, Any]], *, pipelined: bool = False) -> dict[str, Any]:
    """Return the figures of one rank: ``rank-NNNNN.json`` without its trace. Raises ValueError without steps.

    ``pipelined``: the run has pipeline stages, so sends and receives are those of the pipeline.
    """
    trace = TraceEvents()
    for event in events:
        trace.add(event)
    if not trace.steps:
        raise ValueError("the trace has no steps")
    begun, ended = min(trace.steps)[0], max(end for _, end in trace.steps)
    whole = [(begun, max(ended, trace.end or 0.0))]
    between = subtracted(whole, united(trace.steps))
    if trace.kernels:
        layers, device = _device_layers(trace, pipelined), "gpu"
    else:
        layers, device = _host_layers(trace, pipelined), "cpu"
    layers |= {"data_wait": united(trace.data), "between_steps": between}
    left, causes = whole, dict.fromkeys(CAUSES, 0.0)
    for cause in CAUSES:
        if cause in layers:
            causes[cause] = total(intersected(layers[cause], left))
            left = subtracted(left, layers[cause])
    causes["host"], causes["idle"] = _without_work(trace, left)
    count = len(trace.steps)
    # With the time of each in itself, over all threads.
    operators = (timed for thread in trace.operators.values() for timed in _nested(thread) if timed[0].counts)
    communication = intersected(united([*layers["exposed_communication"], *layers["bubble"]]), whole)
    hidden = total(intersected(communication, united([*layers["compute"], *layers["optimizer"]])))
    return {
        "device": device,
        "steps": count,
        "step_seconds": total(whole) / count / 1e6,
        "causes": {cause: seconds / count / 1e6 for cause, seconds in causes.items()},
        "communication_seconds": total(communication) / count / 1e6,
        "overlap": hidden / total(communication) if communication else None,
        "top_kernels": _top(((kernel, kernel.end - kernel.start) for kernel in trace.kernels), whole[0], count),
        "top_operators": _top(operators, whole[0], count),
        "memory": _memory(trace),
    }


def _device_layers(trace: TraceEvents, pipelined: bool) -> dict[str, list[Interval]]:
    """Return the unions of the kernels of each kind."""
    updates = united(trace.updates)
    starts = [start for start, _ in updates]
    kinds: dict[str, list[Interval]] = defaultdict(list)
    for kernel in trace.kernels:
        kind = kernel.kind
        if kind == "compute":
            launched = trace.launches.get(-1 if kernel.correlation is None else kernel.correlation, kernel.start)
            at = bisect.bisect_right(starts, launched) - 1
            kind = "optimizer" if at >= 0 and launched < updates[at][1] else "compute"
        elif kind in ("communication", "pipeline"):
            kind = "bubble" if kind == "pipeline" and pipelined else "exposed_communication"
        kinds[kind].append((kernel.start, kernel.end))
    return {name: united(kinds[name]) for name in ("compute", "optimizer", "exposed_communication", "bubble", "copies")}


def _host_layers(trace: TraceEvents, pipelined: bool) -> dict[str, list[Interval]]:
    """Return the unions of what the main thread of a CPU rank does, and of its collectives."""
    kernels = [
        (one.start, one.end)
        for one in trace.operators[trace.main_thread]
        if one.counts and "::" in one.name and not one.name.startswith((*COLLECTIVE_OPERATORS, *_RUN_PYTHON))
    ]
    pipeline = united((start, end) for start, end, sends in trace.collectives if sends and pipelined)
    others = united((start, end) for start, end, sends in trace.collectives if not (sends and pipelined))
    compute, updates = united(kernels), united(trace.updates)
    waits = subtracted(united([*pipeline, *others]), compute)
    return {
        "compute": subtracted(compute, updates),
        "optimizer": subtracted(updates, waits),
        "exposed_communication": others,
        "bubble": pipeline,
    }


def _without_work(trace: TraceEvents, left: Sequence[Interval]) -> tuple[float, float]:
    """Return the time of ``left``, in which the device does nothing, that the host causes, and the rest."""
    if not trace.kernels:
        return total(left), 0.0
    kernels = sorted(trace.kernels, key=lambda kernel: kernel.start)
    starts = [kernel.start for kernel in kernels]
    busy = united((kernel.start, kernel.end) for kernel in kernels)
    host = idle = 0.0
    ends = [end for _, end in busy]
    for start, end in left:
        gap = bisect.bisect_right(ends, start) - 1
        begun = busy[gap][1] if gap >= 0 else float("-inf")  # when the last kernel before had ended
        at = bisect.bisect_left(starts, end)
        correlation = kernels[at].correlation if at < len(kernels) else None
        launched = trace.launches.get(-1 if correlation is None else correlation)
        if launched is not None and launched > begun:
            host += end - start
        else:
            idle += end - start
    return host, idle


def _nested(operators: Sequence[Operator]) -> Iterator[tuple[Operator, float]]:
    """Yield each operator of a thread, with the time of it outside the operators within it."""
    open_ones: list[list[Any]] = []  # operator, time of those directly within
    for one in sorted(operators, key=lambda operator: (operator.start, -operator.end)):
        while open_ones and open_ones[-1][0].end <= one.start:
            yield _closed(open_ones)
        if open_ones:
            open_ones[-1][1] += min(one.end, open_ones[-1][0].end) - one.start
        open_ones.append([one, 0.0])
        if len(open_ones) > _MOST_OPEN:
            raise ValueError("operators are nested too deeply")
    while open_ones:
        yield _closed(open_ones)


def _closed(open_ones: list[list[Any]]) -> tuple[Operator, float]:
    one, within = open_ones.pop()
    return one, one.end - one.start - within


def _top(timed: Iterable[tuple[Kernel | Operator, float]], whole: Interval, steps: int) -> list[dict[str, Any]]:
    """Return what takes most time by name, given the time of each kernel or operator; those at once all count."""
    times: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    kinds: dict[str, dict[str, str]] = {}
    for one, seconds in timed:
        if one.end > whole[0] and one.start < whole[1]:
            times[one.name][0] += seconds
            times[one.name][1] += 1
            kinds[one.name] = {"kind": one.kind} if isinstance(one, Kernel) else {}
    return [
        {"name": name[:200], "seconds": seconds / steps / 1e6, "count": count / steps, **kinds[name]}
        for name, (seconds, count) in sorted(times.items(), key=lambda item: -item[1][0])[:_TOP]
    ]


def _memory(trace: TraceEvents) -> dict[str, Any] | None:
    """Return the peak of the bytes allocated since the profile began, and the operators that hold them; or None.

    Of a GPU if the trace has any of its allocations, else of the host.
    """
    on_device = any(one.on_device for one in trace.allocations)
    events = sorted((one for one in trace.allocations if one.on_device == on_device), key=lambda one: one.at)
    if not events:
        return None
    peak, last = _peak(events)
    held: dict[int, Allocation] = {}
    for one in events[: last + 1]:
        if one.size > 0:
            held[one.address] = one
        else:
            held.pop(one.address, None)
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    finders = {thread: _Finder(operators) for thread, operators in trace.operators.items()}
    for one in held.values():
        name = finders[one.thread].at(one.at) if one.thread in finders else ""
        sizes[name or "(no operator)"][0] += one.size
        sizes[name or "(no operator)"][1] += 1
    most = sorted(sizes.items(), key=lambda item: -item[1][0])[:_TOP]
    rows = [{"name": name, "bytes": size, "count": count} for name, (size, count) in most]
    return {"device": "gpu" if on_device else "cpu", "peak_bytes": peak, "top": rows}


def _peak(events: Sequence[Allocation]) -> tuple[int, int]:
    """Return the most bytes held at once of those allocated in the trace, and the index of the event after which."""
    sizes: dict[int, int] = {}
    now = peak = 0
    last = -1
    for index, one in enumerate(events):
        if one.size > 0:
            now += one.size - sizes.get(one.address, 0)  # an address twice: its free is not in the trace
            sizes[one.address] = one.size
        else:
            now -= sizes.pop(one.address, 0)  # 0: allocated before the trace
        if now > peak:
            peak, last = now, index
    return peak, last


class _Finder:
    """Finds the outermost operator of a thread at a time."""

    def __init__(self, operators: Sequence[Operator]) -> None:
        outer: list[Operator] = []
        for one in sorted((call for call in operators if call.counts), key=lambda call: (call.start, -call.end)):
            if not outer or one.start >= outer[-1].end:
                outer.append(one)
        self._outer, self._starts = outer, [one.start for one in outer]

    def at(self, time: float) -> str | None:
        place = bisect.bisect_right(self._starts, time) - 1
        return self._outer[place].name if place >= 0 and time <= self._outer[place].end else None


def write_rank(raw: Path, folder: Path, rank: int, *, pipelined: bool) -> None:
    """Write the figures and the compressed trace of a rank, update ``summary.json``, and remove ``raw``.

    A trace that cannot be summarized gives figures with ``error``.
    """
    figures: dict[str, Any] = {"host": socket.gethostname()}
    try:
        with raw.open(encoding="utf-8", errors="replace") as file:
            figures |= summarize(read_trace(file), pipelined=pipelined)
        figures["trace"] = _compressed(raw, rank_file(folder, rank, ".trace.json.gz"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        figures["error"] = f"{type(error).__name__}: {error}"[:500]
    raw.unlink(missing_ok=True)
    memory = rank_file(folder, rank, ".memory.pickle")
    figures["snapshot"] = memory.name if memory.exists() else None
    write_document(rank_file(folder, rank), figures)
    write_summary(folder)


def _compressed(raw: Path, path: Path) -> dict[str, Any]:
    """Compress a trace; remove it again if it is larger than MOST_TRACE_BYTES."""
    with (
        raw.open("rb") as source,
        open_new(path) as file,
        gzip.GzipFile(fileobj=file, mode="wb", compresslevel=3) as to,
    ):
        while chunk := source.read(_CHUNK):
            to.write(chunk)
            if file.tell() > MOST_TRACE_BYTES:
                break
    size = path.stat().st_size
    if size > MOST_TRACE_BYTES:
        path.unlink()
        return {"file": None, "bytes": size, "most_bytes": MOST_TRACE_BYTES}
    return {"file": path.name, "bytes": size}


def main(arguments: Sequence[str]) -> None:
    """Write the figures of one rank: RAW FOLDER RANK, and ``pipelined`` or ``whole``."""
    raw, folder, rank, layout = arguments
    os.nice(10)
    write_rank(Path(raw), Path(folder), int(rank), pipelined=layout == "pipelined")


if __name__ == "__main__":
    main(sys.argv[1:])
