"""Seconds per step and dollars of a run: from metrics.jsonl, the ledgers and the plans of its attempts.

`status`, `watch`, the report and the trackers show the same figures because all of them use these functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from scaletrain_cli.plan.result import Range, RunPlan
from scaletrain_cli.rundir.goodput import CATEGORIES, read_ledger, read_span
from scaletrain_cli.rundir.journal import read_events, read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_revision_figures

RECENT_STEPS = 200
_FEWEST = 5
_MOST_LINES = 4 * RECENT_STEPS  # searched from the end, with those of validations and of steps that were undone


class MeasuredStep(NamedTuple):
    """A line of metrics.jsonl: seconds of a step, and those that rank 0 waited for data; NaN if not measured."""

    step: int
    seconds: float
    data_wait: float
    attempt: float


def newest_steps(run: RunDir) -> list[MeasuredStep]:
    """Return the last 201 measured steps, oldest first, without those that a rollback or a restart undid."""
    found: list[MeasuredStep] = []
    for line in itertools.islice(read_lines_backwards(run.metrics), _MOST_LINES):
        step = line.get("step")
        is_undone = found and isinstance(step, int) and step >= found[-1].step
        if type(step) is not int or is_undone or math.isnan(_number(line.get("loss"))):
            continue
        found.append(
            MeasuredStep(step, *(_number(line.get(name)) for name in ("step_seconds", "data_wait", "attempt")))
        )
        if len(found) > RECENT_STEPS:
            break
    return found[::-1]


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


def without_first_steps(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """Return the measured ones of the last 201 steps without the first of an attempt, which allocates and compiles.

    The very first is left out, too: whether it is the first of its attempt is not known.
    """
    pairs = itertools.pairwise(steps[-RECENT_STEPS - 1 :])
    # An attempt that was not recorded is NaN, and equal to no other.
    return [step for before, step in pairs if step.seconds == step.seconds and before.attempt == step.attempt]


def typical_seconds(steps: Iterable[MeasuredStep]) -> float | None:
    """Return the median seconds of steps; None for fewer than five."""
    seconds = [step.seconds for step in steps]
    return median(seconds) if len(seconds) >= _FEWEST else None


def seconds_with_pauses(run: RunDir, step_seconds: float) -> float:
    """Return the seconds per step with evaluations and with saves that block, by the ledger of the newest attempt."""
    for number in reversed(run.attempts()):
        ledger = read_ledger(run, number)
        if ledger is not None and ledger.steps:
            pauses = sum(ledger.seconds.get(name, 0.0) for name in CATEGORIES if name in ("save", "evaluation"))
            return step_seconds + pauses / ledger.steps
    return step_seconds


def remaining_seconds(run: RunDir, steps: int, step_seconds: float | None) -> float | None:
    """Return the time of ``steps`` more steps at the present rate, without interruptions; None if it is not known."""
    if steps <= 0:
        return 0.0
    return None if step_seconds is None else steps * seconds_with_pauses(run, step_seconds)


def planned_step_seconds(plan: RunPlan, step: int) -> float:
    """Return the planned seconds of a step: those of the training stage of ``step``, if there are several."""
    for stage in plan.training_stages:
        if stage.first_step <= step <= stage.last_step:
            return stage.step_seconds
    return plan.time.step


def planned_step_range(plan: RunPlan, step: int) -> Range | None:
    """Return the 10th and 90th percentile of the planned seconds of a step; None if the plan has none."""
    found = plan.ranges.step_seconds
    if found is None or plan.time.step <= 0:
        return None
    scale = planned_step_seconds(plan, step) / plan.time.step
    return Range(scale * found.p10, scale * found.p90)


def cost_to_come(plan: RunPlan, remaining: float | None) -> float | None:
    """Return the dollars of the seconds that remain, for all GPUs of the plan; None without a price."""
    price = plan.cost.price_per_gpu_hour
    return None if price is None or remaining is None else price * plan.layout.world_size * remaining / 3600


def cost_so_far(run: RunDir, record: RunRecord, *, is_over: bool, now: float) -> float | None:
    """Return the dollars of all attempts, each with the GPUs and the price of its revision; None without a price.

    ``is_over``: no attempt lives; ``now``: Unix seconds, until when the newest attempt has lived otherwise.
    """
    submissions = [event for event in read_events(run) if event.get("event") == "submitted"]
    total, numbers = 0.0, run.attempts()
    for number in numbers:
        span = read_span(run, number)
        if span is None:
            continue
        gpus, price = _figures_of_attempt(run, record, submissions, number, span.revision)
        if price is None:
            return None
        is_living = not is_over and number == numbers[-1] and span.ended is None
        total += price * gpus * max(0.0, (now if is_living else span.until) - span.started) / 3600
    return total if record.plan.cost.price_per_gpu_hour is not None else None


def _figures_of_attempt(
    run: RunDir, record: RunRecord, submissions: Sequence[Any], number: int, own: int | None
) -> tuple[int, float | None]:
    """Return the GPUs and the dollars per GPU-hour of an attempt, by its own revision or that of its submission."""
    revision = record.revision if own is None else own
    for event in submissions if own is None else ():
        if event.get("first_attempt") is not None and event["first_attempt"] <= number:
            revision = event.get("revision", 0)
    if revision == record.revision:
        return record.plan.layout.world_size, record.plan.cost.price_per_gpu_hour
    return read_revision_figures(run, revision)
