"""A report of one or several runs, or of a sweep, as one JSON object: what differs, and which run is the best."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.report.curves import MOST_BINS
from scaletrain_cli.report.reading import SCHEMA, read_run_report, without_secrets
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.sweeps import Sweep, read_sweep_place

MOST_RUNS = 256
_POINTS = 12_000  # of all curves of one kind in a page
_FEWEST_BINS = 60
_LAST_VALUES = 20


def read_report(runs: Sequence[RunDir], sweep: Sweep | None = None) -> dict[str, Any]:
    """Return the report (docs/json.md). Of several runs, those that cannot be read are in ``damaged``.

    Raises UsageError if none can be read.
    """
    if len(runs) > MOST_RUNS:
        raise UsageError(Reason("report.many-runs", {"runs": len(runs), "most": MOST_RUNS}))
    bins = MOST_BINS if len(runs) == 1 else max(_FEWEST_BINS, min(MOST_BINS // 2, _POINTS // len(runs)))
    found: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    for run in runs:
        try:
            found.append(read_run_report(run, most_bins=bins))
        except UsageError as error:
            if sweep is None and run == runs[-1] and not found:
                raise
            damaged.append({"run_id": run.run_id, "text": error.message})
    measure = "validation_loss" if found and all(_validated(run) for run in found if _trained(run)) else "loss"
    return {
        "schema": SCHEMA,
        "made": time.time(),
        "runs": found,
        "damaged": damaged,
        "differences": _differences(found) if len(found) > 1 else [],
        "measure": measure,
        "final": {run["run_id"]: _final(run, measure) for run in found},
        "sweep": None if sweep is None else _sweep(sweep, runs),
    }


def ranked(report: Mapping[str, Any]) -> list[str]:
    """Return the ids of the runs with a final loss, the best first."""
    known = {run_id: value for run_id, value in report["final"].items() if value is not None}
    return sorted(known, key=lambda run_id: known[run_id])


def _trained(run: Mapping[str, Any]) -> bool:
    return bool(run["curves"]["kept"]["step"])


def _validated(run: Mapping[str, Any]) -> bool:
    return run["status"]["validation_loss"] is not None


def _final(run: Mapping[str, Any], measure: str) -> float | None:
    """Return the last validation loss, or the median of the last 20 points of the training loss."""
    if measure == "validation_loss":
        found = run["status"]["validation_loss"]
        return found if isinstance(found, float) else None
    means = [value for value in run["curves"]["kept"]["columns"].get("loss", {"mean": []})["mean"] if value is not None]
    return statistics.median(means[-_LAST_VALUES:]) if means else None


def _differences(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys of the specs whose values differ, with a value for each run; None where a spec lacks the key."""
    specs = [{row["key"]: row["value"] for row in run["spec"]["keys"]} for run in runs]
    keys = dict.fromkeys(key for spec in specs for key in spec if key != "name")
    rows = [{"key": key, "values": [spec.get(key) for spec in specs]} for key in keys]
    return [row for row in rows if any(value != row["values"][0] for value in row["values"])]


def _sweep(sweep: Sweep, runs: Sequence[RunDir]) -> dict[str, Any]:
    """Return the name and size of a sweep, and its parameters with their values by run."""
    given: dict[str, dict[str, Any]] = {}
    for run in runs:
        place = read_sweep_place(run)
        for override in () if place is None else place.overrides:
            key, _, value = without_secrets(override).partition("=")
            given.setdefault(key.strip(), {})[run.run_id] = _parsed(value)
    return {
        "name": sweep.name,
        "points": sweep.points,
        "parameters": [{"key": key, "values": by} for key, by in given.items()],
    }


def _parsed(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
