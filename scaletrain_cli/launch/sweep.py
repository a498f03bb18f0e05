"""A sweep: one run per combination of values, all of them handed over or none.

The cap on how many run at once is kept in lanes: with a cap of three, the fourth run waits for the end of the first,
the fifth for that of the second. A run that is preempted keeps its place in its lane, since its job has not ended, and
each run has its own job, requeues, checkpoints and `scaletrain resume`. An array would share one script and one life,
and its throttle would not know a resumed run.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scaletrain_cli.errors import ScaletrainError, SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.code.snapshot import Snapshot, take_snapshot
from scaletrain_cli.launch.submit import CreatedRun, Submission, create_run, read_submission, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.sweeps import SweepPlace, read_sweep_place, write_sweep_place
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.sections import CodeSpec

MOST_POINTS = 500
_LONGEST_ID = 100


@dataclass(frozen=True)
class Point:
    """One run to be: its id, what of the sweep made it, and its spec and plan."""

    run_id: str
    overrides: tuple[str, ...]
    spec: RunSpec
    plan: RunPlan


@dataclass(frozen=True)
class SubmittedPoint:
    """What became of a point. ``created`` is False where an equal run stood there already."""

    run: RunDir
    submission: Submission
    created: bool


def point_ids(sweep: str, variants: Sequence[tuple[str, ...]]) -> list[str]:
    """``SWEEP-lr-1e-4_seed-2``: named after the values, by number where that is too long or not unique."""
    named = [f"{sweep}-{'_'.join(map(_slug, overrides))}" for overrides in variants]
    if len(set(named)) == len(named) and all(len(name) <= _LONGEST_ID for name in named):
        return named
    digits = len(str(len(named)))
    return [f"{sweep}-{number:0{digits}d}" for number in range(1, len(named) + 1)]


def take_snapshots(points: Sequence[Point]) -> dict[CodeSpec, Snapshot | None]:
    """Return one snapshot for each code section of the points. Raises UsageError as take_snapshot()."""
    return {code: take_snapshot(spec) for code, spec in {point.spec.code: point.spec for point in points}.items()}


def submit_sweep(
    sweep: str,
    points: Sequence[Point],
    scheduler: Backend,
    cap: int,
    snapshots: Mapping[CodeSpec, Snapshot | None] | None = None,
) -> list[SubmittedPoint]:
    """Hand over every point, or take back those that were. Raises what the scheduler or the file system refused.

    ``snapshots``: of take_snapshots(), where the code was looked at before; else it is taken as it is now.
    """
    done: list[tuple[CreatedRun, Submission]] = []
    code = take_snapshots(points) if snapshots is None else snapshots  # before any: the tree may change meanwhile
    for index, point in enumerate(points):
        after = points[index - cap].run_id if index >= cap else None
        made: CreatedRun | None = None
        try:
            made = create_run(point.spec, point.plan, point.run_id, snapshot=code[point.spec.code])
            if made.created or (read_submission(made.run) is None and read_sweep_place(made.run) is None):
                write_sweep_place(made.run, SweepPlace(sweep, index + 1, len(points), point.overrides, after))
            done.append((made, submit_run(made.run, made.record, scheduler)))
        except ScaletrainError as error:
            silent = isinstance(error, SchedulerSilentError)
            left = _take_back([made for made, _ in done], scheduler)
            if made is not None and made.created and not silent:
                shutil.rmtree(made.run.path)
            told = f"{point.run_id} ({', '.join(point.overrides)}) could not be submitted, so none is: {error.message}"
            if silent:
                told += f" Whether its job was taken is not known: look at {point.run_id} with scaletrain status."
            if left:
                told += f" These could not be taken back: {', '.join(left)}. Use scaletrain cancel."
            raise type(error)(told, error.problems) from error
    return [SubmittedPoint(made.run, submission, made.created) for made, submission in done]


def _take_back(made: Sequence[CreatedRun], scheduler: Backend) -> list[str]:
    """Cancel what was handed over just now, the last first: none of a lane may start meanwhile. Who resisted."""
    left = []
    for one in reversed([one for one in made if one.created]):
        try:
            scheduler.cancel(one.run, one.record)
            if not one.run.attempts() and not scheduler.job(one.run, one.record).may_be_active:
                shutil.rmtree(one.run.path)  # as if it had never been: the same sweep can be submitted again
        except SchedulerError:
            left.append(one.run.run_id)
    return left


def _slug(override: str) -> str:
    """``training.optimizer.lr=1e-4`` as ``lr-1e-4``."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}-{re.sub(r'[^A-Za-z0-9.+-]+', '-', value).strip('-') or 'empty'}".replace("+", "")
