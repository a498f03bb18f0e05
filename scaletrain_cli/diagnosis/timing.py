"""Times of a run beside its plan: seconds per step, the time that is left, and what it costs."""

from dataclasses import dataclass
from typing import Any

from scaletrain_cli.diagnosis.case import Case
from scaletrain_cli.plan.result import Range
from scaletrain_cli.rundir import goodput
from scaletrain_cli.rundir.goodput import RECENT_STEPS, MeasuredStep
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord


@dataclass(frozen=True)
class RunFigures:
    """Seconds and US dollars of a run; None where they are not known.

    ``eta_seconds``: until the last step, at the present rate and without interruptions; 0 after the last step.
    ``cost_so_far_usd``: of the attempts so far, at the planned price, for all GPUs of the run; ``cost_to_come_usd``: of
    ``eta_seconds``. ``step_seconds``: the median of the last 200 measured steps, and the planned time
    with its range from the 10th to the 90th percentile.
    """

    eta_seconds: float | None
    cost_so_far_usd: float | None
    cost_to_come_usd: float | None
    planned_step_seconds: float
    measured_step_seconds: float | None
    planned_step_range: Range | None = None

    def to_json(self) -> dict[str, Any]:
        """Return JSON values with stable keys."""
        span = self.planned_step_range
        return {
            "eta_seconds": self.eta_seconds,
            "cost_so_far_usd": self.cost_so_far_usd,
            "cost_to_come_usd": self.cost_to_come_usd,
            "step_seconds": {
                "planned": self.planned_step_seconds,
                "measured": self.measured_step_seconds,
                "planned_p10": None if span is None else span.p10,
                "planned_p90": None if span is None else span.p90,
            },
        }


def run_figures(run: RunDir, record: RunRecord, case: Case, *, step: int, is_over: bool, now: float) -> RunFigures:
    """Return the figures of a run after ``step`` steps. ``is_over``: it trains no more; ``now``: Unix seconds."""
    left = record.spec.total_steps - step
    measured = recent_steps_seconds(case)
    eta = None if is_over and left > 0 else goodput.remaining_seconds(run, left, measured)
    return RunFigures(
        eta_seconds=eta,
        cost_so_far_usd=goodput.cost_so_far(run, record, is_over=is_over, now=now),
        cost_to_come_usd=goodput.cost_to_come(record, eta),
        planned_step_seconds=planned_step_seconds(case),
        measured_step_seconds=measured,
        planned_step_range=goodput.planned_step_range(case.plan, case.history.last_step),
    )


def recent_steps(case: Case) -> list[MeasuredStep]:
    """Return the last 200 measured steps without the first of an attempt, which allocates and compiles."""
    history = case.history
    columns = (history.column(name)[-RECENT_STEPS - 1 :] for name in ("step_seconds", "data_wait", "attempt"))
    rows = zip(history.steps[-RECENT_STEPS - 1 :], *columns, strict=True)
    return goodput.without_first_steps([MeasuredStep(*row) for row in rows])


def recent_steps_seconds(case: Case) -> float | None:
    """Return the median seconds of the recent steps; None for fewer than five."""
    return goodput.typical_seconds(recent_steps(case))


def planned_step_seconds(case: Case) -> float:
    """Return the planned seconds of a step: those of the present training stage, if there are several."""
    return goodput.planned_step_seconds(case.plan, case.history.last_step)
