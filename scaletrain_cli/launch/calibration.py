"""The user's measurements of step times, with which plans on the same hardware are corrected.

``~/.config/scaletrain/calibration/`` has a JSON file for each measured run; deleting one removes its effect.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from scaletrain_cli import __version__
from scaletrain_cli.errors import UsageError
from scaletrain_cli.plan.calibration import Measurement, samples_length, workload_text
from scaletrain_cli.plan.catalogue.hardware import find_accelerator
from scaletrain_cli.plan.planning import Measurements
from scaletrain_cli.plan.search.layout_search import evaluate
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import DamagedError, from_document, read_document
from scaletrain_cli.rundir.journal import read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import make_folder, replace_file
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.clusters_file import clusters_file

if TYPE_CHECKING:
    from scaletrain_cli.diagnosis.rehearsal import Rehearsal

SCHEMA = "scaletrain.measurement/v1"
FEWEST_STEPS = 20
_MOST_FILES = 1000  # a folder of others is not searched for long
_CPU_NAMES = Path("/proc/cpuinfo")
_MOST_STEPS = 1000
_P90 = 1.2816  # standard deviations from the median to the 90th percentile of a normal distribution
_NOT_COUNTED = 3  # first steps of an attempt: they allocate, compile and open files


def calibration_folder() -> Path:
    """Return the folder of the user's measurements, beside clusters.yaml."""
    return clusters_file().parent / "calibration"


def read_measurements(spec: RunSpec) -> Measurements:
    """Return the user's measurements by this version, and where the run will train. Unreadable files are left out."""
    return Measurements(tuple(_measured()), machine_of(spec))


def _measured() -> Iterator[Measurement]:
    folder = calibration_folder()
    for path in sorted(folder.glob("*.json"))[:_MOST_FILES] if folder.is_dir() else ():
        with contextlib.suppress(DamagedError):
            stored = {key: value for key, value in (read_document(path, SCHEMA) or {}).items() if key != "factor"}
            kept = from_document(Measurement, stored, path)
            numbers = (kept.seconds, kept.low, kept.high, kept.planned_seconds, kept.measured)
            if kept.versions.get("scaletrain") == __version__ and min(numbers) > 0:
                yield kept


def machine_of(spec: RunSpec) -> str:
    """Return the name of the CPU for ranks on CPUs of this machine; empty where it is not known."""
    if spec.cluster.gpu != "cpu" or not spec.cluster.traits.runs_here:
        return ""
    try:
        lines = _CPU_NAMES.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def measure_run(run: RunDir) -> Measurement:
    """Return the measurement of a run, from its metrics. Raises UsageError if it has too few measured steps."""
    record = read_record(run)
    rows = _measured_steps(run)
    if len(rows) < FEWEST_STEPS:
        params = {"run": record.run_id, "steps": len(rows), "needed": FEWEST_STEPS}
        raise UsageError(Reason("launch.calibration-few-steps", params))
    ordered = sorted(seconds for seconds, _ in rows)

    def percentile(share: float) -> float:
        return ordered[min(len(ordered) - 1, math.floor(share * len(ordered)))]

    low, middle, high = (percentile(share) for share in (0.1, 0.5, 0.9))
    return _measurement(record, record.run_id, (low, middle, high), len(rows), rows[-1][1], record.versions)


def measure_rehearsal(run: RunDir, rehearsal: Rehearsal) -> Measurement | None:
    """Return the measurement of a rehearsal's job; None if it has not timed steps.

    Percentiles are those of a normal distribution with the measured robust standard deviation.
    """
    timing, versions = rehearsal.measured.get("step") or {}, rehearsal.measured.get("versions") or {}
    middle, spread, steps = (timing.get(name) for name in ("step_seconds", "spread_seconds", "steps"))
    if not isinstance(middle, int | float) or not isinstance(steps, int) or middle <= 0:
        return None
    apart = _P90 * float(spread or 0.0)
    seconds = (max(middle - apart, middle / 2), middle, middle + apart)
    source = f"{run.path.parent.name}-{run.run_id}"  # the folder is one of this rehearsal alone
    return _measurement(read_record(run), source, seconds, steps, rehearsal.created, versions)


def _measurement(
    record: RunRecord,
    source: str,
    seconds: tuple[float, float, float],
    steps: int,
    measured: float,
    versions: Mapping[str, object],
) -> Measurement:
    spec, layout, (low, middle, high) = record.spec, record.plan.layout, seconds
    device = find_accelerator(spec.cluster)
    return Measurement(
        gpu=device.name,
        machine=machine_of(spec),
        family=spec.model.family,
        precision=spec.training.precision,
        framework=spec.planner.framework,
        workload=workload_text(spec),
        parameters=record.plan.model.parameters,
        samples_length=samples_length(spec),
        nodes=spec.cluster.nodes,
        layout=layout,
        seconds=middle,
        low=low,
        high=high,
        steps=steps,
        planned_seconds=evaluate(spec, layout, device).time.step,
        measured=measured,
        source=source,
        versions={
            **{name: str(versions[name]) for name in ("torch", "deepspeed") if versions.get(name)},
            "scaletrain": __version__,
        },
    )


def keep_measurement(measurement: Measurement) -> Path:
    """Write the measurement to the user's folder; it replaces an earlier one of the same source. Raises UsageError."""
    folder = calibration_folder()
    path = folder / f"{measurement.source}.json"
    data = {"schema": SCHEMA, **dataclasses.asdict(measurement), "factor": measurement.factor}
    try:
        make_folder(folder)
        replace_file(path, json.dumps(data, indent=1).encode() + b"\n")
    except OSError as error:
        why = error.strerror or str(error)
        raise UsageError(Reason("launch.calibration-not-written", {"path": str(path), "why": why})) from error
    return path


def _measured_steps(run: RunDir) -> list[tuple[float, float]]:
    """Return (seconds, Unix time) of up to 1,000 steps of the newest attempt, oldest first, without its first steps."""
    steps: list[tuple[float, float]] = []
    attempt = None
    for line in read_lines_backwards(run.metrics):
        seconds, at = line.get("step_seconds"), line.get("time")
        if not isinstance(seconds, int | float) or not isinstance(at, int | float) or not math.isfinite(seconds):
            continue
        attempt = line.get("attempt") if attempt is None else attempt
        if line.get("attempt") != attempt or len(steps) == _MOST_STEPS:
            break
        steps.append((float(seconds), float(at)))
    else:
        del steps[-_NOT_COUNTED:]
        return steps[::-1]
    return steps[: None if len(steps) == _MOST_STEPS else -_NOT_COUNTED][::-1]
