"""A resume with another length or learning-rate schedule: what it changes, and what it would change of the past.

Samples and their order do not depend on the length; what does is refused here once steps have been trained.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from scaletrain_cli.errors import Problem
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.schedules import averaged_from, learning_rate

LENGTH_KEYS = ("training.steps", "training.tokens", "training.samples")
SCHEDULE_EVENT = "schedule-changed"
# Keys that have an effect on later steps only: the learning rate is a function of the step, and no state.
SCHEDULE_KEYS = (
    *(*LENGTH_KEYS, "training.optimizer.lr", "training.schedule.name", "training.schedule.warmup_steps"),
    *("training.schedule.min_lr", "training.schedule.step_size", "training.schedule.gamma"),
    *("training.schedule.cooldown_steps", "training.early_stopping.patience"),
)
_MOST_RATES = 1000  # of the past that are compared


@dataclass(frozen=True)
class WasNow:
    """A value before and after a change; None where there is none."""

    was: float | None
    now: float | None


@dataclass(frozen=True)
class NewSchedule:
    """The effect of another length or schedule on a run that has trained ``step`` steps.

    ``learning_rate``: of the next step. ``same_past``: the learning rates up to ``step`` are those of a run with the
    new schedule from the start. Both are None for a program of the user's, which has a schedule of its own, and where
    ``step`` is None: the checkpoints are on a volume that is not visible here.
    """

    step: int | None
    total_steps: WasNow
    learning_rate: WasNow | None
    same_past: bool | None

    def to_json(self) -> dict[str, Any]:
        """Return the values for an event and for `resume --json`."""
        return asdict(self)


def new_schedule(before: RunSpec, after: RunSpec, step: int | None) -> NewSchedule:
    """Return what the schedule of ``after`` changes for a run of ``before`` with ``step`` trained steps."""
    totals = WasNow(before.total_steps, after.total_steps)
    if after.code.own_program or step is None:
        return NewSchedule(step, totals, None, None)

    def rates(number: int) -> tuple[float | None, float | None]:
        return _rate(before, number), _rate(after, number)

    compared = map(rates, range(step, 0, -max(1, step // _MOST_RATES)))
    same = all(was == now for was, now in compared)
    return NewSchedule(step, totals, WasNow(*rates(step + 1)), same)


def _rate(spec: RunSpec, step: int) -> float | None:
    """Return the learning rate of a step; None after the last one."""
    return learning_rate(step, spec.total_steps, spec.training) if step <= spec.total_steps else None


def length_objections(before: RunSpec, after: RunSpec, step: int | None) -> Iterator[Problem]:
    """Yield why a run that has trained ``step`` steps cannot continue with the length of ``after``, if it is another.

    With None, the ranks compare the length with their checkpoint.

    Beside too few steps these are settings whose past depends on the length: stages and shares of the data, and the
    mean of the weights of the last quarter.
    """
    total = after.total_steps
    if total == before.total_steps:
        return
    lengths = {key: getattr(after.training, key.removeprefix("training.")) for key in LENGTH_KEYS}
    key, given = next((key, value) for key, value in lengths.items() if value is not None)
    if step is not None and total <= step:
        yield _problem(key, "launch.resume-too-few-steps", given, {"steps": total, "step": step})
    for number, stage in enumerate(after.data.stages):
        first, now = stage.first_step(before.total_steps), stage.first_step(total)
        if first != now:
            params = {"stage": number, "was": first, "now": now, "steps": total}
            yield _problem(f"data.stages.{number}.start", "launch.resume-stage-moves", stage.start, params)
    sources = after.data.all_sources
    if any(source.weight for source in sources):  # else the ratio of the epochs decides, whatever the length
        for number, source in enumerate(sources):
            if source.epochs is not None:
                params = {"source": number, "was": before.total_steps, "now": total}
                yield _problem(f"data.sources.{number}.epochs", "launch.resume-epochs-move", source.epochs, params)
    if after.training.averaging.name == "checkpoints":
        first = min(averaged_from(each) for each in (before.total_steps, total))
        if step is None or step >= first:
            yield _problem(key, "launch.resume-mean-has-begun", given, {"first": first})


def _problem(key: str, code: str, given: object, params: dict[str, Any]) -> Problem:
    return Problem.because("--set", key, Reason(code, params), str(given))


def continues_after_early_stop(before: RunSpec, after: RunSpec) -> bool:
    """Return whether a run that has stopped early trains further with ``after``: its patience is no longer used up."""
    was, now = before.training.early_stopping.patience, after.training.early_stopping.patience
    return now == 0 or now > was
