"""Replay a run on a recorded spot market: days, dollars and lost work with the recorded capacity."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import Problem, UsageError
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec

_LONGEST_SECONDS = 1e10  # bounds typing errors, and admits Unix time in seconds


@dataclass(frozen=True)
class SpotTrace:
    """The recorded capacity, as consecutive intervals of (seconds, nodes)."""

    name: str
    stretches: tuple[tuple[float, int], ...]

    @property
    def seconds(self) -> float:
        return math.fsum(seconds for seconds, _ in self.stretches)


def read_trace(path: Path) -> SpotTrace:
    """Return the trace in a file. Raises UsageError if it cannot be read or is not a trace."""
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise _invalid_trace(path, f"cannot be read: {error}.", "Give a JSON or CSV file, plain or gzipped.") from error
    stretches = _from_json(path, text) if text.lstrip()[:1] in ("{", "[") else _from_csv(path, text)
    if not any(nodes for _, nodes in stretches):
        raise _invalid_trace(
            path, "has no point with a node up, so nothing can run on it.", "Record a time with capacity."
        )
    return SpotTrace(path.name, tuple(stretches))


def _from_json(path: Path, text: str) -> list[tuple[float, int]]:
    try:
        document: Any = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise _invalid_trace(path, f"is not JSON: {error}.", "Check that the file is whole.") from error
    if isinstance(document, dict) and isinstance(document.get("files"), dict):
        some = ", ".join(list(document["files"])[:2])
        raise _invalid_trace(
            path, f"holds {len(document['files'])} traces.", f"Write one of them to a file, such as {some}."
        )
    metadata = document.get("metadata") if isinstance(document, dict) else None
    gap: Any = metadata.get("gap_seconds") if isinstance(metadata, dict) else None
    data = document.get("data") if isinstance(document, dict) else None
    if not _is_number(gap) or not 0 < gap <= _LONGEST_SECONDS:
        raise _invalid_trace(
            path, "lacks metadata.gap_seconds, the seconds between two points.", 'Add {"gap_seconds": 600}.'
        )
    if not isinstance(data, list) or not data:
        raise _invalid_trace(
            path, "lacks data, the list of nodes up at each point.", "Add it, or give CSV lines seconds,nodes."
        )
    stretches: list[tuple[float, int]] = []
    for index, point in enumerate(data):
        nodes = _nodes(path, f"data[{index}]", point)
        if stretches and stretches[-1][1] == nodes:
            stretches[-1] = (stretches[-1][0] + gap, nodes)
        else:
            stretches.append((float(gap), nodes))
    return stretches


def _from_csv(path: Path, text: str) -> list[tuple[float, int]]:
    """Return the trace in lines ``seconds,nodes``, each the start of an interval; the last one lasts as long as the one
    before.
    """
    points: list[tuple[float, int]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        cells = [cell.strip() for cell in line.split(",")]
        if not line.strip() or (not points and cells[0].lower() in ("seconds", "time", "t")):
            continue
        try:
            seconds, nodes = (float(cell) for cell in cells)
        except ValueError:
            raise _invalid_trace(
                path, f"line {number} is not seconds,nodes.", "Write two numbers, as 600,4.", line
            ) from None
        if not abs(seconds) <= _LONGEST_SECONDS or (points and seconds <= points[-1][0]):
            raise _invalid_trace(
                path, f"line {number} does not come after the one before it.", "Sort the lines by time.", line
            )
        points.append((seconds, _nodes(path, f"line {number}", nodes)))
    if len(points) < 2:
        raise _invalid_trace(path, "has fewer than two points.", "Write at least two lines seconds,nodes.")
    ends = [seconds for seconds, _ in points[1:]]
    ends.append(2 * points[-1][0] - points[-2][0])
    return [(end - seconds, nodes) for (seconds, nodes), end in zip(points, ends, strict=True)]


def _nodes(path: Path, where: str, value: Any) -> int:
    if isinstance(value, bool):
        return int(value)
    if not _is_number(value) or not 0 <= value <= 1e6 or value != int(value):
        raise _invalid_trace(path, f"{where} is not a number of nodes.", "Give whole numbers from 0 on.", str(value))
    return int(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _invalid_trace(path: Path, message: str, hint: str, given: str | None = None) -> UsageError:
    shown = None if given is None else given.encode("unicode_escape").decode("ascii")[:80]
    return UsageError(f"the spot trace {path} cannot be used", (Problem(str(path), "", message, shown, hint),))


_STARTS = 16
_DAY = 86400.0
_NEVER_SECONDS = 1000 * 365 * _DAY
_Stretches = list[tuple[float, bool]]  # seconds, and whether all nodes are up


@dataclass(frozen=True)
class Spread:
    """Median and percentiles over the simulated starting points."""

    median: float
    p10: float
    p90: float


@dataclass(frozen=True)
class TraceOutcome:
    """The result of a simulation. ``days`` include waiting for nodes; dollars count time with nodes only."""

    name: str
    trace_days: float
    repeats: float
    nodes_needed: int
    nodes_assumed: str
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
    notes: tuple[str, ...] = ()


def simulate(spec: RunSpec, plan: RunPlan, trace: SpotTrace) -> TraceOutcome:
    """Replay the run from 16 starting points spread over the trace, which repeats if the run is longer.

    The run needs all its nodes at once. With all nodes it loads for ``restart_seconds``, then trains and saves as
    planned; when it loses a node, the work since the last checkpoint is lost, or only the notice if a last save fits in
    it. Deterministic. Raises UsageError if the run would never end on this trace.
    """
    most = max(nodes for _, nodes in trace.stretches)
    needed = min(spec.cluster.nodes, most)
    stretches = _availability(trace, needed)
    ended = []
    for start in range(_STARTS):
        run = _Replay(spec, plan)
        if run.to_the_end(stretches, trace.seconds * start / _STARTS):
            ended.append(run)
    if not ended:
        longest = max((seconds for seconds, up in stretches if up), default=0.0)
        raise UsageError(
            f"the run never finishes on {trace.name}",
            (
                Problem(
                    "--trace",
                    "",
                    f"its longest stretch with {spec.cluster.nodes} nodes leaves no time for a checkpoint.",
                    f"{longest:,.0f} s",
                    f"Loading takes {plan.durability.restart_seconds:,.0f} s and a checkpoint comes every "
                    f"{plan.durability.interval_seconds:,.0f} s; lower checkpoint.every or use fewer nodes.",
                ),
            ),
        )
    price = plan.cost.spot.price_per_gpu_hour if plan.cost.spot else None
    gpu_hours = plan.layout.world_size / 3600
    on_demand = plan.cost.on_demand
    wall = on_demand.wall_seconds if on_demand and on_demand.wall_seconds is not None else plan.time.to_train
    return TraceOutcome(
        name=trace.name,
        trace_days=trace.seconds / _DAY,
        repeats=_spread([run.wall / trace.seconds for run in ended]).median,
        nodes_needed=spec.cluster.nodes,
        nodes_assumed=_assumed(spec.cluster.nodes, most),
        starts=_STARTS,
        finished=len(ended),
        days=_spread([run.wall / _DAY for run in ended]),
        goodput=_spread([plan.time.to_train / run.wall for run in ended]),
        interruptions=_spread([run.interruptions for run in ended]),
        lost_hours=_spread([run.lost / 3600 for run in ended]),
        waiting_hours=_spread([run.waiting / 3600 for run in ended]),
        spot_usd=None if price is None else _spread([price * gpu_hours * (run.wall - run.waiting) for run in ended]),
        on_demand_days=wall / _DAY,
        on_demand_usd=on_demand.usd if on_demand else None,
        notes=_notes(spec, plan, trace, most, max(run.wall for run in ended)),
    )


class _Replay:
    """The state of one run in a trace: seconds elapsed, seconds of waiting, and seconds of repeated work."""

    def __init__(self, spec: RunSpec, plan: RunPlan) -> None:
        self.spec, self.durability = spec, plan.durability
        self.pace = 1 + plan.durability.blocked_seconds / plan.durability.interval_seconds
        self.left = plan.time.to_train
        self.wall = self.waiting = self.lost = self.interruptions = 0.0

    def to_the_end(self, stretches: _Stretches, start: float) -> bool:
        """Return whether the run ends. An interval adds the same amount in each round, so rounds are skipped."""
        if self._through(_after(stretches, start)) or self._through(stretches):
            return True
        outcomes = [self._outcome(seconds) for seconds, up in stretches if up]
        per_round = math.fsum(gain for gain, _ in outcomes)
        whole = math.fsum(seconds for seconds, _ in stretches)
        if self.left * whole >= _NEVER_SECONDS * per_round:
            return False
        # No run ends in a round that begins with more remaining work than this and the work of a round.
        most = max(seconds - self.durability.restart_seconds for seconds, up in stretches if up) / self.pace
        rounds = max(0, math.floor((self.left - most) / per_round) - 1)
        self.left -= rounds * per_round
        self.wall += rounds * whole
        self.waiting += rounds * math.fsum(seconds for seconds, up in stretches if not up)
        self.lost += rounds * math.fsum(lost for _, lost in outcomes)
        self.interruptions += rounds * len(outcomes)
        while not self._through(stretches):
            pass
        return True

    def _through(self, stretches: _Stretches) -> bool:
        """Return whether the run ends within these intervals."""
        for seconds, up in stretches:
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
        """Return the seconds of progress kept, and of work lost, when an interval with all nodes ends early."""
        segment = self.durability.interval_seconds + self.durability.blocked_seconds
        worked = max(0.0, seconds - self.durability.restart_seconds)
        if self.durability.grace_ok:
            return max(0.0, worked - self.spec.cluster.grace_seconds) / self.pace, 0.0
        behind = self.durability.save_seconds - self.durability.blocked_seconds  # until a checkpoint is whole
        kept = math.floor(max(0.0, worked - behind) / segment) * segment
        return kept / self.pace, (worked - kept) / self.pace


def _availability(trace: SpotTrace, needed: int) -> _Stretches:
    """Return the intervals with and without enough nodes in turn; the end of the trace is joined to its beginning."""
    joined: _Stretches = []
    for seconds, nodes in trace.stretches:
        up = nodes >= needed
        if joined and joined[-1][1] == up:
            joined[-1] = (joined[-1][0] + seconds, up)
        else:
            joined.append((seconds, up))
    if len(joined) > 1 and joined[0][1] == joined[-1][1]:
        seconds, up = joined.pop(0)
        joined[-1] = (joined[-1][0] + seconds, up)
    if len(joined) == 1 and joined[0][1]:
        return [(math.inf, True)]
    return joined


def _after(stretches: _Stretches, start: float) -> _Stretches:
    """Return the rest of a round after ``start`` seconds."""
    rest, passed = [], 0.0
    for seconds, up in stretches:
        passed += seconds
        if passed > start:
            rest.append((min(seconds, passed - start), up))
    return rest


def _spread(values: list[float]) -> Spread:
    ordered = sorted(values)
    last = len(ordered) - 1
    middle = (ordered[last // 2] + ordered[(last + 1) // 2]) / 2
    return Spread(median=middle, p10=ordered[round(0.1 * last)], p90=ordered[round(0.9 * last)])


def _assumed(needed: int, most: int) -> str:
    if needed <= most:
        return "as recorded"
    return f"the trace has at most {most}: all of them up stands for all {needed} up"


def _notes(spec: RunSpec, plan: RunPlan, trace: SpotTrace, most: int, longest: float) -> tuple[str, ...]:
    lines = []
    if spec.cluster.nodes > most:
        lines.append(f"{spec.cluster.nodes} nodes are rarely all up when {most} are: expect more days than these.")
    if longest > trace.seconds:
        lines.append(f"the trace of {trace.seconds / _DAY:,.1f} days repeats until the run ends.")
    if plan.durability.grace_ok:
        lines.append(f"each preemption is assumed to come with {spec.cluster.grace_seconds:g} s of notice.")
    lines.append("nodes that are up while others are missing are not paid for; failures of hardware are not replayed.")
    return tuple(lines)
