"""Checks of nodes and devices by their telemetry: errors of hardware, CPUs that are held back, memory that is short."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.findings import Cause, Finding, Severity
from scaletrain_cli.diagnosis.telemetry_rows import grown, share, worst
from scaletrain_cli.reasons import Reason

_THROTTLED, _MUCH_THROTTLED = 0.05, 0.2
_LEAST_AVAILABLE = 0.05
_REPLAYS_PER_HOUR = 100.0


def gpu_errors(case: Case) -> Iterator[Finding]:
    """Yield a warning for each GPU with memory errors that its ECC could not correct since the attempt began.

    A note about one whose PCIe link repeats over a hundred packets per hour.
    """
    for gpu, series in case.telemetry.gpus.items():
        errors = grown(series, "uncorrected_errors")
        if errors > 0:
            evidence = {"gpu": gpu, "errors": errors}
            causes = (Cause(Reason("diagnosis.cause-failing-gpu", {"gpu": gpu})),)
            yield Finding(Reason("diagnosis.gpu-errors", evidence), "warning", "high", causes)
            continue
        hours = (series.times[-1] - series.times[0]) / 3600 if len(series.times) > 1 else 0.0
        replays = grown(series, "pcie_replays")
        if hours > 0 and replays / max(hours, 0.1) > _REPLAYS_PER_HOUR:
            evidence = {"gpu": gpu, "replays": replays, "seconds": 3600 * hours}
            causes = (Cause(Reason("diagnosis.cause-pcie-link", {"gpu": gpu})),)
            yield Finding(Reason("diagnosis.pcie-replays", evidence), "note", "high", causes)


def cpu_throttled(case: Case) -> Iterator[Finding]:
    """Yield a finding if the limit of its cgroup stops the processes of a node for over 5 % of the time.

    A warning from 20 % on: counted by the kernel, as the share of periods in which the quota was used up. The use of
    its cores is not known where the control groups of version 1 do not count the CPU time of the same processes.
    """
    found = worst({node: share(case, series, "cpu_throttled") for node, series in case.telemetry.nodes.items()})
    if found is None or found[1] <= _THROTTLED:
        return
    node, part = found
    busy = share(case, case.telemetry.nodes[node], "cpu_utilization")
    evidence = {"node": node, "share": part, "utilization": busy}
    causes = (
        Cause(Reason("diagnosis.cause-cpu-quota"), case.change("cluster")),
        Cause(Reason("diagnosis.cause-many-workers"), case.change("data.loader.workers")),
    )
    severity: Severity = "warning" if part > _MUCH_THROTTLED else "note"
    yield Finding(Reason("diagnosis.cpu-throttled", evidence), severity, "high", causes)


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
            Cause(Reason("diagnosis.cause-many-workers"), case.change("data.loader.workers")),
            Cause(Reason("diagnosis.cause-host-memory"), case.change("layout.offload")),
            Cause(Reason("diagnosis.cause-leak")),
        )
        yield Finding(Reason("diagnosis.node-memory-short", evidence), "warning", "high", causes)
        return
