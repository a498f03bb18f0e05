"""Simulate a run on a recorded spot market: days, dollars and lost work with the recorded capacity."""

import gzip
import json
import math
import statistics
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.plan.result import Durability, RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec

_LONGEST_SECONDS = 1e10  # larger times are typing errors; Unix time in seconds is smaller
_Nodes = TypeVar("_Nodes", int, bool)


@dataclass(frozen=True)
class SpotTrace:
    """The recorded capacity, as consecutive intervals of (seconds, available nodes)."""

    name: str
    intervals: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        return math.fsum(seconds for seconds, _ in self.intervals)


def read_trace(path: Path) -> SpotTrace:
    """Return the trace in a file. Raises UsageError if it cannot be read or is not a trace."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _invalid_trace(path, Reason("plan.trace-unreadable", {"detail": str(error)})) from error
    intervals = _from_json(path, text) if text.lstrip()[:1] in ("{", "[") else _from_csv(path, text)
    if not any(nodes for _, nodes in intervals):
        raise _invalid_trace(path, Reason("plan.trace-without-nodes"))
    return SpotTrace(path.name, tuple(intervals))


def _from_json(path: Path, text: str) -> list[tuple[float, int]]:
    """Return the intervals of a JSON trace: ``metadata.gap_seconds``, and ``data``, the nodes at each point."""
    try:
        document: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _invalid_trace(path, Reason("plan.trace-not-json", {"detail": str(error)})) from error
    document = document if isinstance(document, dict) else {}
    if isinstance(document.get("files"), dict):
        names = list(document["files"])
        raise _invalid_trace(path, Reason("plan.several-traces", {"count": len(names), "names": names[:2]}))
    metadata, data = document.get("metadata"), document.get("data")
    gap: Any = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    if not _is_number(gap) or not 0 < gap <= _LONGEST_SECONDS:
        raise _invalid_trace(path, Reason("plan.trace-without-gap"))
    if not isinstance(data, list) or not data:
        raise _invalid_trace(path, Reason("plan.trace-without-data"))
    return joined((float(gap), _nodes(path, f"data[{index}]", point)) for index, point in enumerate(data))


def joined(intervals: Iterable[tuple[float, _Nodes]]) -> list[tuple[float, _Nodes]]:
    """Return the intervals with neighbors of the same number of nodes as one."""
    merged: list[tuple[float, _Nodes]] = []
    for seconds, nodes in intervals:
        if merged and merged[-1][1] == nodes:
            merged[-1] = (merged[-1][0] + seconds, nodes)
        else:
            merged.append((seconds, nodes))
    return merged


def _from_csv(path: Path, text: str) -> list[tuple[float, int]]:
    """Return the intervals of lines ``seconds,nodes``, each the start of one; the last is as long as the one before."""
    points: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip() or (not points and cells[0].lower() in ("seconds", "time", "t")):
            continue
        try:
            seconds, nodes = (float(cell) for cell in cells)
        except ValueError:
            raise _invalid_trace(path, Reason("plan.trace-line-not-numbers", {"line": number}), line) from None
        if not abs(seconds) <= _LONGEST_SECONDS or (points and seconds <= points[-1][0]):
            raise _invalid_trace(path, Reason("plan.trace-not-ascending", {"line": number}), line)
        points.append((seconds, _nodes(path, f"line {number}", nodes)))
    if len(points) < 2:
        raise _invalid_trace(path, Reason("plan.trace-too-few-points"))
    ends = [seconds for seconds, _ in points[1:]]
    ends.append(2 * points[-1][0] - points[-2][0])
    return [(end - seconds, nodes) for (seconds, nodes), end in zip(points, ends, strict=True)]


def _nodes(path: Path, where: str, value: Any) -> int:
    if isinstance(value, bool):
        return int(value)
    if not _is_number(value) or not 0 <= value <= 1e6 or value != int(value):
        raise _invalid_trace(path, Reason("plan.trace-not-nodes", {"where": where}), str(value))
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _invalid_trace(path: Path, reason: Reason, given: str | None = None) -> UsageError:
    shown = None if given is None else given.encode("unicode_escape").decode("ascii")[:80]
    problem = Problem.because(str(path), "", reason, shown)
    return UsageError(Reason("plan.unusable-trace", {"path": str(path)}), (problem,))


_STARTS = 16
_DAY = 86400.0
_NEVER_SECONDS = 1000 * 365 * _DAY
_Intervals = list[tuple[float, bool]]  # seconds, and whether the run has all its nodes


@dataclass(frozen=True)
class Spread:
    """Median and percentiles over the simulated starting points."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class TraceOutcome:
    """The result of a simulation. ``days`` include waiting for nodes; ``spot_usd`` counts only time with all nodes."""

    name: str
    trace_days: float
    repeats: float
    nodes_needed: int
    nodes_assumed: Reason
    starts: int
    finished: int
    days: Spread
    goodput: Spread
    interruptions: Spread
    lost_hours: Spread
    waiting_hours: Spread
    spot_usd: Spread | None
    on_demand_days: float
    on_demand_usd: float | None
    notes: tuple[Reason, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the fields; ``nodes_assumed`` and ``notes`` as texts, with their codes in ``..._reason(s)``."""
        return asdict(self) | {
            "nodes_assumed": str(self.nodes_assumed),
            "nodes_assumed_reason": self.nodes_assumed.to_document(),
            "notes": [f"{note}." for note in self.notes],
            "note_reasons": [note.to_document() for note in self.notes],
        }


def simulate(spec: RunSpec, plan: RunPlan, trace: SpotTrace) -> TraceOutcome:
    """Simulate the run from 16 starting points spread evenly over the trace, which repeats if the run is longer.

    The job needs all its nodes at once, spare ones too, which replace failed nodes only. Once it has them it loads for
    ``restart_seconds``, then trains and saves as planned. When it loses a node, it loses the work since the last
    checkpoint; if the notice is long enough for a last checkpoint, it loses only the notice. Deterministic. Raises
    UsageError if the run would never finish on this trace.
    """
    most, needed = max(nodes for _, nodes in trace.intervals), spec.cluster.allocated_nodes
    intervals = _availability(trace, min(needed, most))
    ended = []
    for start in range(_STARTS):
        run = _Simulation(spec, plan)
        if run.to_the_end(intervals, trace.seconds * start / _STARTS):
            ended.append(run)
    if not ended:
        longest = max((seconds for seconds, up in intervals if up), default=0.0)
        durability = plan.durability
        params = {"longest": longest, "nodes": needed, "restart": durability.restart_seconds}
        reason = Reason("plan.trace-intervals-too-short", {**params, "interval": durability.interval_seconds})
        problem = Problem.because("--trace", "", reason)
        raise UsageError(Reason("plan.never-finishes-on-trace", {"trace": trace.name}), (problem,))
    price = plan.cost.spot.price_per_gpu_hour if plan.cost.spot else None
    gpu_hours = spec.allocated_devices / 3600
    on_demand = plan.cost.on_demand
    wall = on_demand.wall_seconds if on_demand and on_demand.wall_seconds is not None else plan.time.to_train
    fewer = Reason("plan.trace-of-fewer-nodes", {"most": most, "needed": needed})
    return TraceOutcome(
        name=trace.name,
        trace_days=trace.seconds / _DAY,
        repeats=spread([run.wall / trace.seconds for run in ended]).median,
        nodes_needed=needed,
        nodes_assumed=Reason("plan.trace-as-recorded") if needed <= most else fewer,
        starts=_STARTS,
        finished=len(ended),
        days=spread([run.wall / _DAY for run in ended]),
        goodput=spread([plan.time.to_train / run.wall for run in ended]),
        interruptions=spread([run.interruptions for run in ended]),
        lost_hours=spread([run.lost / 3600 for run in ended]),
        waiting_hours=spread([run.waiting / 3600 for run in ended]),
        spot_usd=None if price is None else spread([price * gpu_hours * (run.wall - run.waiting) for run in ended]),
        on_demand_days=wall / _DAY,
        on_demand_usd=on_demand.usd if on_demand else None,
        notes=_notes(spec, plan, trace, most, max(run.wall for run in ended)),
    )


class _Simulation:
    """The state of one run on a trace: seconds elapsed (``wall``), waiting for nodes, and of work that was lost."""

    def __init__(self, spec: RunSpec, plan: RunPlan) -> None:
        self.spec, self.durability = spec, plan.durability
        self.pace = 1 + plan.durability.blocked_seconds / plan.durability.interval_seconds
        self.left = plan.time.to_train
        self.wall = self.waiting = self.lost = self.interruptions = 0.0

    def to_the_end(self, intervals: _Intervals, start: float) -> bool:
        """Return whether the run finishes. Each repetition of the trace adds the same amount, so most are skipped."""
        if self._through(intervals_from(start, intervals)) or self._through(intervals):
            return True
        outcomes = [self._outcome(seconds) for seconds, up in intervals if up]
        per_round = math.fsum(gain for gain, _ in outcomes)
        whole = math.fsum(seconds for seconds, _ in intervals)
        if self.left * whole >= _NEVER_SECONDS * per_round:
            return False
        # The run cannot finish in a repetition that begins with more remaining work than this plus that of one round.
        most = max(seconds - self.durability.restart_seconds for seconds, up in intervals if up) / self.pace
        rounds = max(0, math.floor((self.left - most) / per_round) - 1)
        self.left -= rounds * per_round
        self.wall += rounds * whole
        self.waiting += rounds * math.fsum(seconds for seconds, up in intervals if not up)
        self.lost += rounds * math.fsum(lost for _, lost in outcomes)
        self.interruptions += rounds * len(outcomes)
        while not self._through(intervals):
            pass
        return True

    def _through(self, intervals: Iterable[tuple[float, bool]]) -> bool:
        """Return whether the run finishes within these intervals."""
        for seconds, up in intervals:
            ending = self.durability.restart_seconds + self.left * self.pace
            if up and ending <= seconds:
                self.wall += ending
                return True
            self.wall += seconds
            if not up:
                self.waiting += seconds
                continue
            gain, lost = self._outcome(seconds)
            self.left -= gain
            self.lost += lost
            self.interruptions += 1
        return False

    def _outcome(self, seconds: float) -> tuple[float, float]:
        """Return the seconds of progress kept, and of work lost, when the run loses a node after ``seconds``."""
        worked = max(0.0, seconds - self.durability.restart_seconds)
        kept = kept_seconds(self.durability, self.spec.cluster.grace_seconds, worked)
        return kept / self.pace, 0.0 if self.durability.grace_ok else (worked - kept) / self.pace


def kept_seconds(durability: Durability, grace_seconds: float, worked: float) -> float:
    """Return the seconds of steps and blocking checkpoints that are kept of ``worked`` ones when a node is lost."""
    if durability.grace_ok:
        return max(0.0, worked - grace_seconds)
    segment = durability.interval_seconds + durability.blocked_seconds
    behind = durability.save_seconds - durability.blocked_seconds  # until a checkpoint is committed
    return math.floor(max(0.0, worked - behind) / segment) * segment


def intervals_from(start: float, intervals: Iterable[tuple[float, _Nodes]]) -> Iterator[tuple[float, _Nodes]]:
    """Yield what is left of the intervals after ``start`` seconds."""
    passed = 0.0
    for seconds, nodes in intervals:
        passed += seconds
        if passed > start:
            yield min(seconds, passed - start), nodes


def _availability(trace: SpotTrace, needed: int) -> _Intervals:
    """Return alternating intervals with and without ``needed`` nodes, the end of the trace joined to its beginning."""
    intervals = joined((seconds, nodes >= needed) for seconds, nodes in trace.intervals)
    if len(intervals) > 1 and intervals[0][1] == intervals[-1][1]:
        seconds, up = intervals.pop(0)
        intervals[-1] = (intervals[-1][0] + seconds, up)
    if len(intervals) == 1 and intervals[0][1]:
        return [(math.inf, True)]
    return intervals


def spread(values: list[float]) -> Spread:
    ordered = sorted(values)
    last = len(ordered) - 1
    return Spread(median=statistics.median(ordered), p10=ordered[round(0.1 * last)], p90=ordered[round(0.9 * last)])


def _notes(spec: RunSpec, plan: RunPlan, trace: SpotTrace, most: int, longest: float) -> tuple[Reason, ...]:
    notes = []
    if spec.cluster.allocated_nodes > most:
        notes.append(Reason("plan.trace-optimistic", {"nodes": spec.cluster.allocated_nodes, "most": most}))
    if longest > trace.seconds:
        notes.append(Reason("plan.trace-repeats", {"seconds": trace.seconds}))
    if plan.durability.grace_ok:
        notes.append(Reason("plan.trace-with-notice", {"grace_seconds": spec.cluster.grace_seconds}))
    notes.append(Reason("plan.trace-leaves-out"))
    return tuple(notes)
