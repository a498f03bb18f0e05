"""The Python interface: what the commands do, for notebooks, scripts and pipelines.

    from scaletrain_cli.api import load_spec, make_plan, submit

    spec = load_spec("run.yaml", ["training.steps=2000"])
    print(make_plan(spec).time.to_train)
    run = submit(spec).run
    print(run.wait(timeout_seconds=3600).state)

The verb resume calls this module. The others call the same functions of ``launch``, as each needs a part of what is
imported here.

No function prints or prompts. Each raises a ScaletrainError: SpecError for a wrong spec, InfeasibleError for a run that
does not fit, SchedulerError where the scheduler refuses or does not answer, UsageError for the rest. The names in
``__all__`` are the stable surface, versioned by API_VERSION as semver.org describes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import (
    InfeasibleError,
    ScaletrainError,
    SchedulerError,
    SchedulerSilentError,
    SpecError,
    UsageError,
)
from scaletrain_cli.launch import prepared_submission
from scaletrain_cli.launch.backends.base import Backend, SubmissionSummary
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.branch import find_branch
from scaletrain_cli.launch.cancel import Cancellation
from scaletrain_cli.launch.cancel import cancel as cancel_run
from scaletrain_cli.launch.dataset_checks import require_same_data
from scaletrain_cli.launch.epochs import in_steps
from scaletrain_cli.launch.explain import explain as explain_run
from scaletrain_cli.launch.finding import Explanation
from scaletrain_cli.launch.hub_fetch import FetchProgress
from scaletrain_cli.launch.job import submitted_before
from scaletrain_cli.launch.logs import LogLine, fetched_logs, read_logs
from scaletrain_cli.launch.preparation import Choice, prepare_data
from scaletrain_cli.launch.prepared_submission import RenderedJob, rendered_job
from scaletrain_cli.launch.replan import Resize, replan
from scaletrain_cli.launch.resource_checks.checks import require_external_to_resume
from scaletrain_cli.launch.resume import ResumeReport, inspect_resume, refuse, refuse_branch
from scaletrain_cli.launch.resume import resume as resume_run
from scaletrain_cli.launch.run_status import RunStatus
from scaletrain_cli.launch.shared_folder import disk_space_notes
from scaletrain_cli.launch.status import is_over, run_status
from scaletrain_cli.launch.submit import changes_since_sent, require_run_id
from scaletrain_cli.plan import RunPlan, make_plan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import committed_folders
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.paths import find_run as find_directory
from scaletrain_cli.rundir.paths import list_runs as list_directories
from scaletrain_cli.rundir.record import (
    RunRecord,
    checkpoint_folder,
    read_record,
    require_changeable,
    require_own_checkpoints,
    require_own_run,
)
from scaletrain_cli.spec import RunSpec, load_spec

API_VERSION = "1.0"

__all__ = [
    "API_VERSION",
    "Cancellation",
    "Explanation",
    "InfeasibleError",
    "LogLine",
    "PreparedResume",
    "PreparedSubmission",
    "Reason",
    "RenderedJob",
    "ResumeReport",
    "Run",
    "RunPlan",
    "RunSpec",
    "RunStatus",
    "ScaletrainError",
    "SchedulerError",
    "SchedulerSilentError",
    "SpecError",
    "SubmissionSummary",
    "Submitted",
    "UsageError",
    "cancel",
    "explain",
    "find_run",
    "in_steps",
    "list_runs",
    "load_spec",
    "logs",
    "make_plan",
    "prepare_branch",
    "prepare_resume",
    "prepare_submission",
    "resume",
    "status",
    "submit",
    "wait",
]

_POLL_SECONDS = 2.0


@dataclass(frozen=True)
class Submitted:
    """A submitted run. ``created`` is False if an earlier submission, even a refused one, created its run directory."""

    run: Run
    scheduler: str
    job_id: str
    created: bool


class PreparedSubmission(prepared_submission.PreparedSubmission):
    """A spec that was planned and checked on this machine; nothing has been written or queued."""

    def submit(
        self,
        on_created: Callable[[Run], None] = lambda run: None,
        on_fetch: Callable[[FetchProgress], None] = lambda progress: None,
        prepare: Choice = "auto",
        on_preparation: Callable[[str], None] = lambda line: None,
    ) -> Submitted:
        """Create the run directory and submit the job, once: a second call with the same ``run_id`` submits nothing.

        Data that are not prepared are prepared first, as ``prepare`` says. Arguments as of create_and_submit().
        """
        done = self.create_and_submit(lambda run: on_created(Run(run.path)), on_fetch, prepare, on_preparation)
        return Submitted(Run(done.run.path), done.scheduler, done.job_id, done.created)


@dataclass(frozen=True)
class PreparedResume:
    """A run that was inspected for a resume; nothing has been written or queued. ``resize``: the new layout, if any."""

    run: Run
    report: ResumeReport
    resize: Resize | None
    from_scratch: bool
    trust_owner: bool
    take_over: bool = False

    @property
    def record(self) -> RunRecord:
        """The record that the job would read."""
        return read_record(self.run.directory) if self.resize is None else self.resize.after

    @property
    def backend(self) -> Backend:
        """The back end of the job."""
        return backend_for(self.record.spec.cluster.scheduler)

    def require_possible(self) -> tuple[Reason, ...]:
        """Return warnings. Raises UsageError where the run is active or finished, or nothing valid is left of it."""
        run = self.run.directory
        refuse(run, self.report, from_scratch=self.from_scratch, resize=self.resize)
        require_own_checkpoints(run, read_record(run).spec, trust_owner=self.trust_owner)
        return require_external_to_resume(run, self.record, None if self.resize is None else self.resize.snapshot)

    def render(self) -> RenderedJob:
        """Return the job that submit() would hand to the scheduler."""
        return rendered_job(self.backend, self.run.directory, self.record)

    def changes(self, job: RenderedJob) -> list[str] | None:
        """Return the lines in which ``job`` differs from the last submission; None if there was none."""
        return changes_since_sent(self.run.directory, job.text)

    def check(self) -> SubmissionSummary:
        """Query the scheduler; return the cost of the remaining steps, the start and warnings. Raises SchedulerError.

        Leaves nothing behind.
        """
        run, record, report = self.run.directory, self.record, self.report
        spec, plan = record.spec, record.plan
        preflight = self.backend.preflight(spec, plan, run, record.code)
        space = disk_space_notes(
            spec, plan, run.path.parent, there=len(committed_folders(checkpoint_folder(run, spec)))
        )
        # If the checkpoints are not visible here, estimate progress from the steps that the ranks printed.
        step = report.checkpoint.step if report.checkpoint is not None else int(report.job.progress.get("step", 0))
        return SubmissionSummary(spec, plan, preflight.start, step, (*preflight.warnings, *space), record.code)

    def submit(self, prepare: Choice = "auto", on_preparation: Callable[[str], None] = lambda line: None) -> Submitted:
        """Submit the job, and prepare the data before if they are not, as PreparedSubmission.submit() does."""
        record, run = self.record, self.run.directory
        data = prepare_data(record.spec, prepare, on_preparation, record.working_folder, run.path.parent, run)
        if self.report.checkpoint is not None:
            require_same_data(record.spec, self.report.checkpoint, data.datasets, Path(record.working_folder))
        data.record(run)
        done = resume_run(
            run,
            from_scratch=self.from_scratch,
            take_over=self.take_over,
            resize=self.resize,
            preparation_tasks=data.tasks,
            say=on_preparation,
        ).submission
        return Submitted(self.run, done.scheduler, done.job_id, created=False)


def find_run(run: str | Path | Run) -> Run:
    """Return the run of an id, of the beginning of one, or of a directory. Raises UsageError."""
    return run if isinstance(run, Run) else Run(find_directory(str(run)).path)


def list_runs() -> list[Run]:
    """Return every run below the runs root (``$SCALETRAIN_RUNS``), in order of their ids."""
    return [Run(run.path) for run in list_directories()]


def status(run: str | Path | Run) -> RunStatus:
    """Return the state of a run. A scheduler that does not answer makes the state unknown; it raises no error."""
    return run_status(find_run(run).directory)


def wait(run: str | Path | Run, timeout_seconds: float | None = None) -> RunStatus:
    """Return the state once the run has ended, or after ``timeout_seconds``. Queries the scheduler every 2 s."""
    handle = find_run(run)
    deadline = float("inf") if timeout_seconds is None else time.monotonic() + timeout_seconds
    while True:
        seen = run_status(handle.directory)
        left = deadline - time.monotonic()
        if is_over(handle.directory, seen) or left <= 0:
            return seen
        time.sleep(min(_POLL_SECONDS, left))


def explain(run: str | Path | Run) -> Explanation:
    """Return why a run waits, or why it ended, with evidence and what to do."""
    return explain_run(find_run(run).directory)


def logs(
    run: str | Path | Run, attempt: int | None = None, rank: int | None = None, last_lines: int | None = None
) -> list[LogLine]:
    """Return what the ranks of an attempt printed (default: the last one), rank by rank.

    Raises UsageError where there is no such attempt or rank.
    """
    directory = find_run(run).directory
    with fetched_logs(directory):
        return list(read_logs(directory, attempt, rank, last_lines))


prepare_submission = PreparedSubmission.prepare


def submit(spec: RunSpec, *, run_id: str | None = None, trust_owner: bool = False) -> Submitted:
    """Plan, check and submit a run. With a ``run_id`` it can be repeated: the same run is submitted once."""
    prepared = prepare_submission(spec, run_id=run_id, trust_owner=trust_owner)
    if prepared.earlier is None:
        prepared.check()
    return prepared.submit()


def prepare_resume(
    run: str | Path | Run,
    overrides: Sequence[str] = (),
    *,
    from_scratch: bool = False,
    new_code: bool = False,
    trust_owner: bool = False,
    dry_run: bool = False,
    take_over: bool = False,
) -> PreparedResume:
    """Inspect a run and plan it again where ``overrides`` or ``new_code`` change it; write and queue nothing.

    ``overrides``: as ``cluster.nodes=4``; ``dry_run``: the run directory need not be writable; ``take_over``: a job
    whose scheduler does not answer any more counts as over.
    """
    handle = find_run(run)
    owner = "Ask that user to resume it, or submit a run of your own"
    require_own_run(handle.directory, trust_owner=trust_owner, remedy=owner)
    if not dry_run:
        require_changeable(handle.directory, f"{handle.run_id} cannot be resumed")
    resize = replan(handle.directory, [*overrides], new_code=new_code) if overrides or new_code else None
    report = inspect_resume(handle.directory, take_over=take_over)
    return PreparedResume(handle, report, resize, from_scratch, trust_owner, take_over)


def prepare_branch(
    run: str | Path | Run,
    run_id: str,
    overrides: Sequence[str] = (),
    *,
    step: int | None = None,
    new_code: bool = False,
    trust_owner: bool = False,
    dry_run: bool = False,
) -> PreparedSubmission:
    """Plan a new run that continues a checkpoint of ``run``, which may be active; write and queue nothing.

    It has the weights, the optimizer state, the random state and the position in the data of the checkpoint of
    ``step``, by default the latest valid one, and the spec and code of ``run`` with ``overrides``: of what a resume may
    change, and of ``name``. Raises UsageError, with the steps that are there, where there is no such
    checkpoint.
    """
    directory = find_run(run).directory
    require_run_id(run_id)
    require_own_run(directory, trust_owner=trust_owner, remedy="Copy the run to a folder of your own")
    parent = read_record(directory)
    require_own_checkpoints(directory, parent.spec, trust_owner=trust_owner)
    branch = find_branch(directory, parent, step)
    resize = replan(directory, [*overrides], new_code=new_code, branch_at=branch.checkpoint.step)
    refuse_branch(branch, resize)
    target = RunDir(directory.path.parent / run_id)
    if os.path.lexists(target.path):
        require_own_run(target, trust_owner=trust_owner, remedy="Use another id")
    earlier = None if dry_run else submitted_before(target)
    record = resize.after
    warnings = require_external_to_resume(directory, record, resize.snapshot) if earlier is None else ()
    return PreparedSubmission(
        record.spec,
        record.plan,
        backend_for(record.spec.cluster.scheduler),
        resize.snapshot,
        warnings,
        earlier,
        run_id,
        trust_owner,
        branch=branch,
        resize=resize,
    )


def resume(
    run: str | Path | Run,
    overrides: Sequence[str] = (),
    *,
    from_scratch: bool = False,
    new_code: bool = False,
    trust_owner: bool = False,
) -> Submitted:
    """Check and resume a run from its latest valid checkpoint, with fresh restart budgets.

    ``overrides`` change its size or layout, as ``cluster.nodes=4``, or its length; what was trained cannot change.
    """
    prepared = prepare_resume(run, overrides, from_scratch=from_scratch, new_code=new_code, trust_owner=trust_owner)
    prepared.require_possible()
    prepared.check()
    return prepared.submit()


def cancel(
    run: str | Path | Run, *, force: bool = False, trust_owner: bool = False, seen: RunStatus | None = None
) -> Cancellation:
    """Let the ranks save and stop, without waiting for them; no further attempt starts.

    ``force`` also removes what is left on dead nodes. ``seen`` is the latest status, if the caller has it.
    """
    return cancel_run(find_run(run).directory, force=force, trust_owner=trust_owner, seen=seen)


@dataclass(frozen=True)
class Run:
    """A run, by its directory. It holds no state: every method reads the directory and queries the scheduler."""

    path: Path

    @property
    def run_id(self) -> str:
        """The id, which is the name of the directory."""
        return self.directory.run_id

    @property
    def directory(self) -> RunDir:
        """The paths within the run directory."""
        return RunDir(self.path)

    @property
    def spec(self) -> RunSpec:
        """The spec that the run has now. Raises UsageError for a damaged record."""
        return read_record(self.directory).spec

    @property
    def plan(self) -> RunPlan:
        """The plan of the spec. Raises UsageError for a damaged record."""
        return read_record(self.directory).plan

    # The functions above, with this run as their first argument.
    status = status
    wait = wait
    explain = explain
    logs = logs
    cancel = cancel
    resume = resume
