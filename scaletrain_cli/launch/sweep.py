"""Sweeps: one run per combination of values. Submit, show and cancel all of them together."""

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.cancel import cancel
from scaletrain_cli.launch.job import Submission, open_request, read_submission, undone_if_refused
from scaletrain_cli.launch.preparation import PreparedData
from scaletrain_cli.launch.prepared_submission import PreparedSubmission, SubmittedRun
from scaletrain_cli.launch.run_status import OVER, RunStatus
from scaletrain_cli.launch.status import exit_code_of, is_over, run_statuses
from scaletrain_cli.launch.submit import CreatedRun, submit_run, submit_together
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.paths import RunDir, Sweep, SweepPlace, read_sweep_place, write_sweep_place

MOST_POINTS = 500
_LONGEST_ID = 100
_END_SECONDS, _POLL_SECONDS = 10.0, 0.2  # for the ends of cancelled jobs that have begun no attempt


@dataclass(frozen=True)
class Point(PreparedSubmission):
    """One run of a sweep, with the overrides that only it has. All points are prepared before the first is submitted.

    ``snapshot``: of the user's code, as the tree may change meanwhile; ``data``: what is prepared for it.
    """

    overrides: tuple[str, ...] = ()
    data: PreparedData = field(default_factory=PreparedData)


def point_ids(sweep: str, variants: Sequence[tuple[str, ...]]) -> list[str]:
    """Return ids such as ``SWEEP-lr-1e-4_seed-2``; numbers replace values that make an id too long or not unique."""
    named = [f"{sweep}-{'_'.join(map(_slug, overrides))}" for overrides in variants]
    if len(set(named)) == len(named) and all(len(name) <= _LONGEST_ID for name in named):
        return named
    digits = len(str(len(named)))
    return [f"{sweep}-{number:0{digits}d}" for number in range(1, len(named) + 1)]


def submit_sweep(
    sweep: str, points: Sequence[Point], cap: int, say: Callable[[str], None] = lambda line: None
) -> list[SubmittedRun]:
    """Submit all points; if one fails, cancel those already submitted, raise its error. ``say``: as in submit_run()."""
    done: list[tuple[CreatedRun, Submission]] = []
    for index, point in enumerate(points):
        after = points[index - cap].run_id if index >= cap else None
        made: CreatedRun | None = None
        try:
            made = point.create(point.data)
            earlier = None if made.created else read_sweep_place(made.run)
            # Of an array that was not queued, as far as is known: it is still looked for.
            of_array = earlier is not None and earlier.array
            if made.created or (read_submission(made.run) is None and (earlier is None or of_array)):
                place = SweepPlace(sweep, index + 1, len(points), point.overrides, after, array=of_array)
                write_sweep_place(made.run, place)
            tasks = point.data.tasks
            done.append((made, submit_run(made.run, made.record, point.backend, preparation_tasks=tasks, say=say)))
        except ScaletrainError as error:
            silent = isinstance(error, SchedulerSilentError)
            left = _cancel_submitted([made for made, _ in done], point.backend)
            if made is not None and made.created and not silent:
                shutil.rmtree(made.run.path)
            cause = error.reason or recorded(error.message.rstrip("."))
            params = {"run": point.run_id, "overrides": list(point.overrides), "cause": cause}
            why = Reason("launch.sweep-unanswered" if silent else "launch.sweep-not-submitted", params)
            error.explain(why)
            if left:
                error.explain(Reason("launch.sweep-partly-submitted", {"why": why, "runs": left}))
            raise
    return [SubmittedRun.of(made, submission) for made, submission in done]


def submit_as_array(sweep: str, points: Sequence[Point], cap: int) -> list[SubmittedRun]:
    """Submit all points as one job array, of which ``cap`` run at a time; if that fails, nothing is left of them.

    Raises UsageError if they do not request the same from the scheduler, or their data are not prepared.
    """
    scheduler = points[0].backend
    scheduler.require_array([point.spec for point in points])
    if any(point.data.tasks for point in points):
        raise UsageError(Reason("launch.array-not-prepared"))
    made: list[CreatedRun] = []

    def remove() -> None:
        for one in made:
            if one.created:
                shutil.rmtree(one.run.path)

    with undone_if_refused(remove):  # the same command finds an array whose answer was lost
        for index, point in enumerate(points):
            made.append(one := point.create(point.data))
            if one.created or (read_submission(one.run) is None and open_request(one.run) is None):
                write_sweep_place(one.run, SweepPlace(sweep, index + 1, len(points), point.overrides, array=True))
        done = submit_together(sweep, [(one.run, one.record) for one in made], scheduler, cap)
    return [SubmittedRun.of(*both) for both in zip(made, done, strict=True)]


def _cancel_submitted(made: Sequence[CreatedRun], scheduler: Backend) -> list[str]:
    """Cancel the points just submitted, the last first, so that none starts; return the ids that are not cancelled."""
    left, until = [], time.time() + _END_SECONDS
    for run, record in [(one.run, one.record) for one in reversed(made) if one.created]:
        try:
            scheduler.cancel(run, record)
            while (is_left := scheduler.job(run, record).may_be_active) and not run.attempts() and time.time() < until:
                time.sleep(_POLL_SECONDS)
            if not is_left and not run.attempts():
                shutil.rmtree(run.path)  # so that the same sweep can be submitted again
        except SchedulerError:
            left.append(run.run_id)
    return left


def _slug(override: str) -> str:
    """Return ``lr-1e-4`` for ``training.optimizer.lr=1e-4``."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', value).strip('-') or 'empty'}".replace("+", "")


@dataclass(frozen=True)
class Member:
    """One run of a sweep. If its record is damaged, ``status`` is None and ``error`` describes the damage."""

    run: RunDir
    status: RunStatus | None
    error: str = ""

    @property
    def state(self) -> str:
        return self.status.state if self.status is not None else "damaged"

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended and does not restart without a resume."""
        return self.status is not None and is_over(self.run, self.status)

    def to_json(self) -> dict[str, Any]:
        """Return the object of `scaletrain status --json`."""
        if self.status is None:
            return {"run_id": self.run.run_id, "state": self.state, "error": UsageError(self.error).to_json()}
        return self.status.to_json()


@dataclass(frozen=True)
class BestRun:
    """The run with the lowest value of ``measure``: validation_loss, or loss where not all runs are validated."""

    run_id: str
    measure: str
    value: float


@dataclass(frozen=True)
class SweepStatus:
    """The status of all existing runs of a sweep, in order."""

    sweep: Sweep
    members: tuple[Member, ...]

    @property
    def states(self) -> dict[str, int]:
        """Return the number of runs in each state, the most frequent first."""
        return dict(Counter(member.state for member in self.members).most_common())

    @property
    def states_in_words(self) -> str:
        """Return ``2 queued, 1 running``."""
        return ", ".join(f"{count} {state}" for state, count in self.states.items())

    @property
    def best(self) -> BestRun | None:
        """The best of the finished runs, if there are several; None where they measure no common loss."""
        finished = [run for member in self.members if (run := member.status) is not None and run.state == "finished"]
        for measure in ("validation_loss", "loss"):
            values = {status.run_id: getattr(status, measure) for status in finished}
            if len(values) > 1 and None not in values.values():
                run_id = min(values, key=values.__getitem__)
                return BestRun(run_id, measure, values[run_id])
        return None

    def to_json(self) -> dict[str, Any]:
        """Return the stable JSON object."""
        head = {"schema": "scaletrain.sweep-status/v1", "sweep": self.sweep.name, "points": self.sweep.points}
        best = None if self.best is None else asdict(self.best)
        return head | {"states": self.states, "best": best, "runs": [member.to_json() for member in self.members]}


@dataclass(frozen=True)
class SweepCancellation:
    """Run ids by result: cancelled, already ended, and refused with the reason."""

    cancelled: tuple[str, ...] = ()
    over: tuple[str, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()


def sweep_status(sweep: Sweep) -> SweepStatus:
    """Return the status of every run; a damaged record is reported in the row of its run."""
    return SweepStatus(sweep, tuple(_look(sweep.runs)))


def refreshed_sweep_status(before: SweepStatus) -> SweepStatus:
    """Return the updated status; queries the scheduler only about runs that may have changed."""
    changing = [member.run for member in before.members if member.state not in (*OVER, "damaged")]
    by_run = {member.run: member for member in _look(changing)}
    return SweepStatus(before.sweep, tuple(by_run.get(member.run, member) for member in before.members))


def exit_code_of_all(members: Sequence[Member]) -> int:
    """Return 0 if all runs have finished, else the exit code of the first that has not."""
    for member in members:
        code = ExitCode.CRASHED if member.status is None else exit_code_of(member.run, member.status)
        if code != ExitCode.DONE:
            return int(code)
    return int(ExitCode.DONE)


def cancel_members(members: Sequence[Member], *, force: bool = False, trust_owner: bool = False) -> SweepCancellation:
    """Cancel the runs, the last first, so that none starts when another ends. Continues after a refusal."""
    done = SweepCancellation()
    for member in reversed(members):
        name = member.run.run_id
        if member.state in OVER:
            done = replace(done, over=(name, *done.over))
            continue
        try:
            cancel(member.run, force=force, trust_owner=trust_owner, seen=member.status)
            done = replace(done, cancelled=(name, *done.cancelled))
        except ScaletrainError as error:
            done = replace(done, refused=((name, error.message), *done.refused))
    return done


def _look(runs: Sequence[RunDir]) -> list[Member]:
    return [
        Member(run, None, status.message) if isinstance(status, UsageError) else Member(run, status)
        for run, status in zip(runs, run_statuses(runs), strict=True)
    ]
