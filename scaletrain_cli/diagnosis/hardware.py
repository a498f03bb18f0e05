"""The latest telemetry: memory of every rank, parts of a step, use, clocks and temperature of the GPUs.

And the checks of the nodes: errors of their GPUs, their memory, and the limits of their CPUs.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.case import Case, check, grown, level, levels, share, worst
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.diagnosis.findings import Finding, warning_if
from scaletrain_cli.reasons import Reason, Texts
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.telemetry.run import Telemetry, read_telemetry
from scaletrain_cli.telemetry.series import Series

TEXTS: Texts = {
    "gpu-hot": "GPU {gpu} lowers its clock for heat in {share:percent} of the time: {celsius:.0f} °C, {clock:.3g} of "
    "{highest:.3g} Hz",
    "gpu-slowed-by-hardware": "GPU {gpu} is slowed by its hardware in {share:percent} of the time: {celsius:.0f} °C, "
    "{watts:.0f} W, {clock:.3g} of {highest:.3g} Hz",
    "gpu-slow-clock": "the clock of GPU {gpu} is {share:percent} below that of the others: {clock:.3g} Hz, "
    "{celsius:.0f} °C, {watts:.0f} W",
    "gpu-at-power-limit": "GPU {gpu} is at its limit of power in {share:percent} of the time: {watts:.0f} W, "
    "{clock:.3g} of {highest:.3g} Hz",
    "gpu-errors": "GPU {gpu} had {errors:of error} of memory that its ECC could not correct",
    "pcie-replays": "GPU {gpu} sent {replays:of packet} again over PCIe in {seconds:seconds}",
    "cpu-throttled": "the CPU quota of its cgroup stops the processes of {node} in {share:percent} of the time",
    "node-memory-short": "{node} is short of memory: {available:bytes} of {total:bytes} are available",
    "cause-cooling": "the cooling of GPU {gpu} or of its rack does not suffice",
    "cause-power-supply": "power supply or cooling of GPU {gpu}: an external brake, or a temperature limit",
    "cause-clock-limit": "a clock was set on GPU {gpu}, or it is worn or in another slot",
    "cause-power-limit": "usual at full load; the limit of power sets the speed",
    "cause-failing-gpu": "GPU {gpu} is failing: drain its node, and have it tested",
    "cause-pcie-link": "a bad riser, cable or slot of GPU {gpu}",
    "cause-cpu-quota": "the job asked for fewer CPUs than it uses (CPU limit of the container or of the job)",
    "cause-many-workers": "too many reader processes for this node",
    "cause-host-memory": "offloaded states and pinned buffers fill the host's memory",
}

_NEWEST_ROWS = 20  # per subject: about the last minute
STEP_PARTS = ("forward_seconds", "backward_seconds", "optimizer_seconds", "communication_seconds", "data_wait_seconds")
_GPU_COLUMNS = ("utilization", "sm_clock_hertz", "temperature_celsius", "power_watts")
_THROTTLES = ("throttled_by_power", "throttled_by_heat", "throttled_by_hardware")


class Recent:
    """The latest rows of one rank, GPU or node. Each method returns None for a column that was not measured."""

    def __init__(self, series: Series) -> None:
        self._series = series

    def mean(self, column: str) -> float | None:
        """Return the mean, in which each row counts as often as the values that it stands for."""
        means, counts = self._series.mean.get(column, ()), self._series.counts
        pairs = [(value, count) for value, count in zip(means, counts, strict=False) if math.isfinite(value)]
        total = sum(count for _, count in pairs)
        return math.fsum(value * count for value, count in pairs) / total if total else None

    def highest(self, column: str) -> float | None:
        """Return the highest value."""
        return max(filter(math.isfinite, self._series.highest.get(column, ())), default=None)

    def latest(self, column: str) -> float | None:
        """Return the last value."""
        return next(filter(math.isfinite, reversed(self._series.mean.get(column, ()))), None)


@dataclass(frozen=True)
class Spread:
    """A measure over subjects: the lowest and highest value, each with the subject that has it, and the median."""

    count: int
    lowest: float
    lowest_name: str
    median: float
    highest: float
    highest_name: str

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object."""
        return dict(vars(self))


@dataclass(frozen=True)
class Hardware:
    """The telemetry of the newest attempt that has any. ``is_whole``: all nodes were read.

    ``memory``: bytes by rank, the most of the rows read. ``step_parts``: seconds, the median over ranks of their mean;
    ``step_seconds``: of the whole steps, the same ones.
    ``gpu_spreads``: by column. ``throttled``: share of time by cause, of the GPU with the most.
    """

    ranks: Mapping[int, Recent]
    gpus: Mapping[str, Recent]
    nodes: Mapping[str, Recent]
    is_whole: bool
    memory: Spread | None
    step_parts: Mapping[str, float]
    step_seconds: float | None
    gpu_spreads: Mapping[str, Spread]
    throttled: Mapping[str, Spread]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of `status`; null for what was not measured."""
        return {
            "is_whole": self.is_whole,
            "memory_bytes": None if self.memory is None else self.memory.to_json(),
            "step_parts": dict(self.step_parts),
            "step_seconds": self.step_seconds,
            "gpus": {name: spread.to_json() for name, spread in self.gpu_spreads.items()},
            "throttled": {name: spread.to_json() for name, spread in self.throttled.items()},
        }


def read_hardware(run: RunDir) -> Hardware | None:
    """Return what was measured last; None if the run has no telemetry. Bounded cost, whatever its size."""
    telemetry = read_telemetry(run, newest=_NEWEST_ROWS)
    if not (telemetry.ranks or telemetry.gpus or telemetry.nodes):
        return None
    return hardware_of(telemetry)


def hardware_of(telemetry: Telemetry) -> Hardware:
    """Return the figures of a telemetry that was read."""
    ranks = {number: Recent(series) for number, series in telemetry.ranks.items()}
    gpus = {name: Recent(series) for name, series in telemetry.gpus.items()}
    nodes = {name: Recent(series) for name, series in telemetry.nodes.items()}
    parts = {}
    for column in ("step_seconds", *STEP_PARTS):
        means = [value for rank in ranks.values() if (value := rank.mean(column)) is not None]
        if means:
            parts[column] = median(means)
    step_seconds = parts.pop("step_seconds", None)
    memory = _spread((f"rank {number}", rank.highest("memory_bytes")) for number, rank in ranks.items())
    by_column = {c: _spread((name, gpu.mean(c)) for name, gpu in gpus.items()) for c in (*_GPU_COLUMNS, *_THROTTLES)}
    known = {column: spread for column, spread in by_column.items() if spread is not None}
    spreads = {column: known[column] for column in _GPU_COLUMNS if column in known}
    throttled = {column: known[column] for column in _THROTTLES if column in known}
    return Hardware(ranks, gpus, nodes, telemetry.is_whole, memory, parts, step_seconds, spreads, throttled)


def _spread(values: Iterable[tuple[str, float | None]]) -> Spread | None:
    known = sorted((value, name) for name, value in values if value is not None)
    if not known:
        return None
    (lowest, lowest_name), (highest, highest_name) = known[0], known[-1]
    return Spread(len(known), lowest, lowest_name, median([value for value, _ in known]), highest, highest_name)


_THROTTLED, _MUCH_THROTTLED = 0.05, 0.2
_LEAST_AVAILABLE = 0.05
_REPLAYS_PER_HOUR = 100.0
_HEAT_SHARE = 0.05
_HARDWARE_SHARE = 0.01
_POWER_SHARE = 0.5
_SLOW_CLOCK = 0.85


@check()
def gpu_errors(case: Case) -> Iterator[Finding]:
    """Yield a warning for each GPU with memory errors that its ECC could not correct since the attempt began.

    A note about one whose PCIe link repeats over a hundred packets per hour.
    """
    for gpu, series in case.telemetry.gpus.items():
        errors = grown(series, "uncorrected_errors")
        if errors > 0:
            evidence = {"gpu": gpu, "errors": errors}
            causes = (case.cause("diagnosis.cause-failing-gpu", gpu=gpu),)
            yield Finding(Reason("diagnosis.gpu-errors", evidence), "warning", "high", causes)
            continue
        hours = (series.times[-1] - series.times[0]) / 3600 if len(series.times) > 1 else 0.0
        replays = grown(series, "pcie_replays")
        if hours > 0 and replays / max(hours, 0.1) > _REPLAYS_PER_HOUR:
            evidence = {"gpu": gpu, "replays": replays, "seconds": 3600 * hours}
            causes = (case.cause("diagnosis.cause-pcie-link", gpu=gpu),)
            yield Finding(Reason("diagnosis.pcie-replays", evidence), "note", "high", causes)


@check()
def memory_short(case: Case) -> Iterator[Finding]:
    """Yield a warning if less than 5 % of the memory of a node is available: the kernel then swaps, or kills a process.

    Available is what can be had without swapping, as the kernel estimates it, within the limit of the cgroup.
    """
    for node, series in case.telemetry.nodes.items():
        available = [value for value in series.lowest.get("memory_available_bytes", ()) if value == value]
        used = [value for value in series.highest.get("memory_used_bytes", ()) if value == value]
        if not available or not used:
            continue
        total = used[-1] + available[-1]
        if total <= 0 or min(available[-5:]) >= _LEAST_AVAILABLE * total:
            continue
        evidence = {"node": node, "available": min(available[-5:]), "total": total}
        causes = (
            case.cause("diagnosis.cause-many-workers", "data.loader.workers"),
            case.cause("diagnosis.cause-host-memory", "layout.offload"),
            case.cause("diagnosis.cause-leak"),
        )
        yield Finding(Reason("diagnosis.node-memory-short", evidence), "warning", "high", causes)
        return


@check()
def cpu_throttled(case: Case) -> Iterator[Finding]:
    """Yield a finding if the limit of its cgroup stops the processes of a node for over 5 % of the time.

    A warning from 20 % on: counted by the kernel, as the share of periods in which the quota was used up. The use of
    its cores is not known where the control groups of version 1 do not count the CPU time of the same processes.
    """
    highest = worst({node: share(case, series, "cpu_throttled") for node, series in case.telemetry.nodes.items()})
    if highest is None or highest[1] <= _THROTTLED:
        return
    node, part = highest
    busy = share(case, case.telemetry.nodes[node], "cpu_utilization")
    evidence = {"node": node, "share": part, "utilization": busy}
    causes = (
        case.cause("diagnosis.cause-cpu-quota", "cluster"),
        case.cause("diagnosis.cause-many-workers", "data.loader.workers"),
    )
    yield Finding(Reason("diagnosis.cpu-throttled", evidence), warning_if(part > _MUCH_THROTTLED), "high", causes)


@check()
def throttled(case: Case) -> Iterator[Finding]:
    """Yield a finding if a GPU lowers its clock: for heat in over 5 % of the time, or by its hardware in over 1 %.

    The limit of power is usual at full load, hence a note, unless the clock is below 85 % of that of the other GPUs.
    """
    gpus = case.telemetry.gpus
    hot = worst({gpu: share(case, series, "throttled_by_heat") for gpu, series in gpus.items()})
    if hot is not None and hot[1] > _HEAT_SHARE:
        gpu, evidence = hot[0], _of_gpu(case, *hot)
        cooling = case.cause("diagnosis.cause-cooling", gpu=gpu)
        yield Finding(Reason("diagnosis.gpu-hot", evidence), "warning", "high", (cooling,))
        return
    slowed = worst({gpu: share(case, series, "throttled_by_hardware") for gpu, series in gpus.items()})
    if slowed is not None and slowed[1] > _HARDWARE_SHARE:
        gpu, evidence = slowed[0], _of_gpu(case, *slowed)
        power = case.cause("diagnosis.cause-power-supply", gpu=gpu)
        yield Finding(Reason("diagnosis.gpu-slowed-by-hardware", evidence), "warning", "high", (power,))
        return
    clocks = levels(case, gpus, "sm_clock_hertz")
    if len(clocks) > 1:
        gpu = min(clocks, key=clocks.__getitem__)
        others = median([clock for other, clock in clocks.items() if other != gpu])
        if clocks[gpu] < _SLOW_CLOCK * others:
            evidence = _of_gpu(case, gpu, 1 - clocks[gpu] / others)
            clock = case.cause("diagnosis.cause-clock-limit", gpu=gpu)
            yield Finding(Reason("diagnosis.gpu-slow-clock", evidence), "warning", "high", (clock,))
            return
    limited = worst({gpu: share(case, series, "throttled_by_power") for gpu, series in gpus.items()})
    if limited is not None and limited[1] > _POWER_SHARE:
        usual = case.cause("diagnosis.cause-power-limit")
        evidence = _of_gpu(case, *limited)
        yield Finding(Reason("diagnosis.gpu-at-power-limit", evidence), "note", "high", (usual,))


def _of_gpu(case: Case, gpu: str, part: float) -> dict[str, Any]:
    """Return the evidence about a GPU: ``part`` is a share of time, or of its clock."""
    series = case.telemetry.gpus[gpu]
    names = {"clock": "sm_clock_hertz", "highest": "sm_clock_max_hertz"}
    names |= {"celsius": "temperature_celsius", "watts": "power_watts"}
    return {"gpu": gpu, "share": part, **{name: level(case, series, column) or 0.0 for name, column in names.items()}}
