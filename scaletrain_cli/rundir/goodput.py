"""Times and costs of a run: ledger.json of each attempt, goodput summed over attempts, steps, time and money left."""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

from scaletrain_cli.plan.result import Range, RunPlan
from scaletrain_cli.rundir.documents import read_document, reporting_damage, typed, undamaged_as, write_document
from scaletrain_cli.rundir.journal import read_events, read_lines_backwards
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, read_revision_figures

LEDGER_SCHEMA = "scaletrain.ledger/v1"
# step: without waiting for data; save: time that a checkpoint blocked training; restore: set-up of an attempt.
Category = Literal["step", "data", "save", "restore", "evaluation", "rollback", "other"]
CATEGORIES: tuple[Category, ...] = get_args(Category)


@dataclass(frozen=True)
class Ledger:
    """The time of rank 0. ``began`` and ``updated`` in Unix seconds; ``closed`` after a regular end of the engine."""

    attempt: int
    began: float
    updated: float
    closed: bool
    steps: int  # steps trained by this attempt, with repetitions
    seconds: dict[Category, float]


def write_ledger(run: RunDir, ledger: Ledger) -> None:
    """Write the ledger of an attempt. Raises OSError."""
    write_document(run.ledger(ledger.attempt), {"schema": LEDGER_SCHEMA, **dataclasses.asdict(ledger)})


def read_ledger(run: RunDir, attempt: int) -> Ledger | None:
    """Return the ledger of an attempt, or None if it wrote none that can be read."""
    return undamaged_as(Ledger, run.ledger(attempt))


@dataclass(frozen=True)
class AttemptSpan:
    """Start and end of an attempt in Unix seconds; ``ended`` is None if it runs, or if its end was not recorded."""

    started: float
    ended: float | None
    ledger: Ledger | None
    in_vain: bool = False  # the run was restarted from scratch after it
    revision: int | None = None  # that it trained, if it was recorded

    @property
    def until(self) -> float:
        """Return its end, or the latest known time."""
        known = self.ledger.updated if self.ledger is not None else self.started
        return max(self.started, known if self.ended is None else self.ended)


@dataclass(frozen=True)
class Goodput:
    """Seconds by activity; the sum is the time from the first attempt's start to the last one's end.

    ``productive``: steps that were kept, without waiting for data. ``lost_work``: steps undone by a crash or a
    rollback, each with the mean time of a step. ``idle``: between attempts. ``suspended``: all processes were stopped,
    by the scheduler or with the machine.
    """

    productive: float
    data: float
    save: float
    restore: float
    evaluation: float
    rollback: float
    lost_work: float
    idle: float
    other: float
    suspended: float = 0.0

    @property
    def wall(self) -> float:
        return math.fsum(vars(self).values())

    @property
    def share(self) -> float:
        """Return the productive share of the time: the goodput, from 0 to 1."""
        return self.productive / self.wall if self.wall > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values with stable keys: seconds, except for ``goodput``, a share."""
        seconds = {f"{name}_seconds": round(value, 3) for name, value in dataclasses.asdict(self).items()}
        return {"goodput": round(self.share, 6), "wall_seconds": round(self.wall, 3), **seconds}


def sum_goodput(attempts: Sequence[AttemptSpan], lost_steps: int, suspended: float = 0.0) -> Goodput:
    """Return the goodput of ``attempts`` in order; ``lost_steps``: trained and then undone, in attempts not
    ``in_vain``. ``suspended``: seconds of these attempts, which the ledgers count to the steps that they interrupted.
    """
    seconds: dict[Category, float] = dict.fromkeys(CATEGORIES, 0.0)
    in_vain = counted = 0.0
    steps = 0
    for attempt in attempts:
        spent = _spent(attempt)
        if attempt.ledger is not None:
            counted += attempt.ledger.seconds.get("step", 0.0)
            steps += attempt.ledger.steps
        if attempt.in_vain:
            in_vain += spent.pop("step", 0.0)
        for name, value in spent.items():
            seconds[name] += value
    suspended = min(seconds["step"], suspended)
    seconds["step"] -= suspended
    redone = min(seconds["step"], lost_steps * max(0.0, counted - suspended) / steps if steps else 0.0)
    return Goodput(
        productive=seconds["step"] - redone,
        lost_work=redone + in_vain,
        idle=sum(max(0.0, after.started - before.until) for before, after in itertools.pairwise(attempts)),
        suspended=suspended,
        **{name: seconds[name] for name in ("data", "save", "restore", "evaluation", "rollback", "other")},
    )


def run_goodput(run: RunDir) -> Goodput | None:
    """Return the goodput of the run so far, or None before its first attempt has written a ledger."""
    events = read_events(run)
    scratch = max((place for place, event in enumerate(events) if event["event"] == "from-scratch"), default=0)
    # By the order of events, not by their times: clocks are set back, and differ between machines.
    numbers = (event.get("attempt") for event in events[:scratch])
    in_vain = max((number for number in numbers if type(number) is int), default=0)
    spans = [span for number in run.attempts() if (span := read_span(run, number, number <= in_vain)) is not None]
    if all(span.ledger is None for span in spans):
        return None
    kept = events[scratch:]
    stops = [event.get("seconds") for event in kept if event["event"] == "suspended"]
    return sum_goodput(spans, steps_lost(kept), math.fsum(stop for stop in stops if isinstance(stop, int | float)))


def steps_lost(events: Iterable[Mapping[str, Any]]) -> int:
    """Return how many steps were trained and undone, by crashes and rollbacks."""
    return sum(lost for event in events if type(lost := event.get("lost_steps")) is int)


def _spent(attempt: AttemptSpan) -> dict[Category, float]:
    """Return the seconds of an attempt; seconds missing in its ledger are set-up, and a few steps before a kill."""
    ledger = attempt.ledger
    if ledger is None:
        return {"restore": attempt.until - attempt.started}
    tail: Category = "other" if ledger.closed else "step" if ledger.steps else "restore"
    spent = dict(ledger.seconds)
    spent["restore"] = spent.get("restore", 0.0) + max(0.0, ledger.began - attempt.started)
    spent[tail] = spent.get(tail, 0.0) + max(0.0, attempt.until - max(ledger.updated, attempt.started))
    return spent


def read_span(run: RunDir, number: int, in_vain: bool = False) -> AttemptSpan | None:
    """Return the start and the end of an attempt; None if it has recorded neither. Raises DamagedError."""
    path, ledger = run.attempt(number) / "attempt.json", read_ledger(run, number)
    if (data := read_document(path)) is None:
        return None if ledger is None else AttemptSpan(ledger.began, None, ledger, in_vain)
    with reporting_damage(path):
        started, ended = typed(float, data["started"]), typed(float | None, data["ended"])
        return AttemptSpan(started, ended, ledger, in_vain, typed(int | None, data.get("revision")))


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
    steps: list[MeasuredStep] = []
    for line in itertools.islice(read_lines_backwards(run.metrics), _MOST_LINES):
        step = line.get("step")
        is_undone = steps and isinstance(step, int) and step >= steps[-1].step
        if type(step) is not int or is_undone or math.isnan(_number(line.get("loss"))):
            continue
        steps.append(
            MeasuredStep(step, *(_number(line.get(name)) for name in ("step_seconds", "data_wait", "attempt")))
        )
        if len(steps) > RECENT_STEPS:
            break
    return steps[::-1]


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
    seconds = plan.ranges.step_seconds
    if seconds is None or plan.time.step <= 0:
        return None
    scale = planned_step_seconds(plan, step) / plan.time.step
    return Range(scale * seconds.p10, scale * seconds.p90)


def cost_to_come(record: RunRecord, remaining: float | None) -> float | None:
    """Return the dollars of the seconds that remain, for all GPUs of the job; None without a price."""
    price = record.plan.cost.price_per_gpu_hour
    return None if price is None or remaining is None else price * record.spec.allocated_devices * remaining / 3600


def cost_so_far(run: RunDir, record: RunRecord, *, is_over: bool, now: float) -> float | None:
    """Return the dollars of all attempts, each with the GPUs and the price of its revision; None without a price.

    ``is_over``: no attempt lives; ``now``: Unix seconds, until when the newest attempt has lived otherwise.
    """
    submissions = [event for event in read_events(run) if event.get("event") == "submitted"]
    total, numbers = 0.0, run.attempts()
    for number in numbers:
        if (span := read_span(run, number)) is None:
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
        return record.spec.allocated_devices, record.plan.cost.price_per_gpu_hour
    return read_revision_figures(run, revision)
