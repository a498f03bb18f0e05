"""Times of a run beside its plan: seconds per step, the time that is left, and what it costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.diagnosis.curves import median
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.goodput import CATEGORIES, read_ledger
from scaletrain_cli.rundir.journal import read_events
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_revision_figures

_RECENT = 200


@dataclass(frozen=True)
class RunFigures:
    """Seconds and US dollars of a run; None where they are not known.

    ``eta_seconds``: until the last step, at the present rate and without interruptions; 0 after the last step.
    ``cost_so_far_usd``: of the attempts so far, at the planned price, for all GPUs of the run; ``cost_to_come_usd``: of
    ``eta_seconds``. ``step_seconds``: the median of the last 200 measured steps, and the planned time.
    """

    eta_seconds: float | None
    cost_so_far_usd: float | None
    cost_to_come_usd: float | None
    planned_step_seconds: float
    measured_step_seconds: float | None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values with stable keys."""
        return {
            "eta_seconds": self.eta_seconds,
            "cost_so_far_usd": self.cost_so_far_usd,
            "cost_to_come_usd": self.cost_to_come_usd,
            "step_seconds": {"planned": self.planned_step_seconds, "measured": self.measured_step_seconds},
        }


def run_figures(run: RunDir, record: RunRecord, case: Case, *, step: int, is_over: bool, now: float) -> RunFigures:
    """Return the figures of a run after ``step`` steps. ``is_over``: it trains no more; ``now``: Unix seconds."""
    left = record.spec.total_steps - step
    measured = recent_steps_seconds(case)
    each = _seconds_with_pauses(run, case, measured)
    eta = 0.0 if left <= 0 else None if each is None or is_over else left * each
    price, gpus = record.plan.cost.price_per_gpu_hour, record.plan.layout.world_size
    to_come = None if price is None or eta is None else price * gpus * eta / 3600
    return RunFigures(
        eta_seconds=eta,
        cost_so_far_usd=_cost_so_far(run, record, is_over=is_over, now=now),
        cost_to_come_usd=to_come,
        planned_step_seconds=planned_step_seconds(case),
        measured_step_seconds=measured,
    )


def recent_steps(case: Case) -> list[tuple[int, float, float]]:
    """Return (step, seconds, seconds waited for data) of the last 200 measured steps without the first of an attempt.

    The first step of an attempt allocates and compiles. The wait is NaN where it was not measured.
    """
    history = case.history
    columns = (history.column(name)[-_RECENT - 1 :] for name in ("step_seconds", "data_wait", "attempt"))
    rows = list(zip(history.steps[-_RECENT - 1 :], *columns, strict=True))
    if len(rows) < 2:
        return []
    pairs = itertools.pairwise(rows)
    return [(row[0], row[1], row[2]) for before, row in pairs if row[1] == row[1] and before[3] == row[3]]


def recent_steps_seconds(case: Case) -> float | None:
    """Return the median seconds of the recent steps; None for fewer than five."""
    seconds = [seconds for _, seconds, _ in recent_steps(case)]
    return median(seconds) if len(seconds) >= 5 else None


def planned_step_seconds(case: Case) -> float:
    """Return the planned seconds of a step: those of the present training stage, if there are several."""
    step = case.history.last_step
    for stage in case.plan.training_stages:
        if stage.first_step <= step <= stage.last_step:
            return stage.step_seconds
    return case.plan.time.step


def _seconds_with_pauses(run: RunDir, case: Case, step_seconds: float | None) -> float | None:
    """Return the seconds per step with evaluations and with saves that block, by the ledger of the newest attempt."""
    if step_seconds is None:
        return None
    for number in reversed(run.attempts()):
        ledger = read_ledger(run, number)
        if ledger is not None and ledger.steps:
            pauses = sum(ledger.seconds.get(name, 0.0) for name in CATEGORIES if name in ("save", "evaluation"))
            return step_seconds + pauses / ledger.steps
    return step_seconds


def _cost_so_far(run: RunDir, record: RunRecord, *, is_over: bool, now: float) -> float | None:
    """Return the dollars of all attempts, each with the GPUs and the price of its revision."""
    submissions = [event for event in read_events(run) if event.get("event") == "submitted"]
    total = 0.0
    for number in run.attempts():
        data = read_document(run.attempt(number) / "attempt.json")
        if data is None or not isinstance(data.get("started"), int | float):
            continue
        gpus, price = _figures_of_attempt(run, record, submissions, number)
        if price is None:
            return None
        ended = data.get("ended")
        until = ended if isinstance(ended, int | float) else _last_sign(run, number, is_over=is_over, now=now)
        total += price * gpus * max(0.0, until - data["started"]) / 3600
    return total if record.plan.cost.price_per_gpu_hour is not None else None


def _figures_of_attempt(
    run: RunDir, record: RunRecord, submissions: Sequence[Any], number: int
) -> tuple[int, float | None]:
    """Return the GPUs and the dollars per GPU-hour of an attempt, by the revision that its job was submitted with."""
    revision = record.revision
    for event in submissions:
        if isinstance(event.get("first_attempt"), int) and event["first_attempt"] <= number:
            revision = event.get("revision", 0)
    if revision == record.revision:
        return record.plan.layout.world_size, record.plan.cost.price_per_gpu_hour
    return read_revision_figures(run, revision)


def _last_sign(run: RunDir, number: int, *, is_over: bool, now: float) -> float:
    """Return until when an attempt without a recorded end has run, as far as is known."""
    if not is_over:
        return now
    ledger = read_ledger(run, number)
    return 0.0 if ledger is None else ledger.updated
