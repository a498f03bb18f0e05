"""A run that is planned and checked before it is submitted: alone, as a branch of another run, or in a sweep."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch import preparation as data_preparation
from scaletrain_cli.launch.backends.base import Backend, SubmissionSummary
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.code import Snapshot, take_snapshot
from scaletrain_cli.launch.dataset_checks import require_same_data
from scaletrain_cli.launch.epochs import in_steps
from scaletrain_cli.launch.hub_fetch import FetchProgress
from scaletrain_cli.launch.job import Submission, submitted_before, undone_if_refused
from scaletrain_cli.launch.preparation import Choice, PreparedData, prepare_data
from scaletrain_cli.launch.resource_checks.checks import require_external
from scaletrain_cli.launch.shared_folder import disk_space_notes
from scaletrain_cli.launch.submit import CreatedRun, PlannedRun, create_run, make_record, plan_run, submit_run
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.preparation import preparation_folder, read_job
from scaletrain_cli.rundir.record import RunRecord, read_size_plans, require_own_run
from scaletrain_cli.rundir.shared_datasets import shared_root_notes
from scaletrain_cli.safe_files import require_writable
from scaletrain_cli.spec import RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.branch import Branch
    from scaletrain_cli.launch.replan import Resize
    from scaletrain_cli.plan.reliability.node_sizes import NodeSize

_Prepared = TypeVar("_Prepared", bound="PreparedSubmission")


@dataclass(frozen=True)
class RenderedJob:
    """The rendered job that submit() hands to the scheduler: ``text`` is the script, the manifest or the command.

    ``preparation``: what is submitted before it and prepares the data, if the job does not name it; else ''.
    """

    run_id: str
    run_dir: Path
    text: str
    preparation: str = ""

    @property
    def whole_text(self) -> str:
        """The documents of ``preparation`` and ``text``."""
        return f"{self.preparation.rstrip()}\n---\n{self.text}" if self.preparation else self.text


def rendered_job(backend: Backend, run: RunDir, record: RunRecord) -> RenderedJob:
    """Return the job that the back end would submit for a run with this record. Contacts no server."""
    before = backend.render_preparation(run, record) if data_preparation.reads_prepared_data(record.spec) else ""
    return RenderedJob(run.run_id, run.path, backend.render(run, record), before)


@dataclass(frozen=True)
class SubmittedRun:
    """A submitted run. ``created`` is False if its run directory existed, as after an earlier submission."""

    run: RunDir
    scheduler: str
    job_id: str
    created: bool

    @classmethod
    def of(cls, made: CreatedRun, submission: Submission) -> SubmittedRun:
        return cls(made.run, submission.scheduler, submission.job_id, made.created)


@dataclass(frozen=True)
class PreparedSubmission:
    """A run that was planned and checked on this machine; nothing has been written or queued.

    ``warnings`` are those of the checks; ``earlier`` is the submission of the same run where it was submitted before.
    ``branch``: the checkpoint of another run that it continues, and ``resize``, what differs from that run.
    """

    spec: RunSpec
    plan: RunPlan
    backend: Backend
    snapshot: Snapshot | None = None  # of the user's code
    warnings: tuple[Reason, ...] = ()
    earlier: Submission | None = None
    run_id: str | None = None
    trust_owner: bool = False
    sizes: tuple[NodeSize, ...] = ()  # every number of nodes of the range, if the spec has one
    epochs: Reason | None = None  # how training.epochs was counted in steps, which ``spec`` has in their place
    branch: Branch | None = None
    resize: Resize | None = None

    @classmethod
    def prepare(
        cls: type[_Prepared],
        spec: RunSpec,
        *,
        run_id: str | None = None,
        trust_owner: bool = False,
        name: str | Path = "the run spec",
        dry_run: bool = False,
        prepare: Choice = "auto",
        on_preparation: Callable[[str], None] = lambda line: None,
    ) -> _Prepared:
        """Plan a run and check what the spec refers to on this machine. Contacts no scheduler.

        ``run_id`` (default: a new one) makes the submission repeatable. ``trust_owner`` accepts a run directory of
        another user. ``name`` is what errors call the spec. ``dry_run``: check it as if it had not been submitted.

        Writes nothing, unless the spec has ``training.epochs`` and data that are not prepared: these are then prepared,
        to be counted, with ``prepare`` and ``on_preparation`` as in create_and_submit(). A dry run estimates their
        size. Raises UsageError where they are not prepared on this machine.
        """
        backend = backend_for(spec.cluster.scheduler)
        spec, epochs = in_steps(backend.with_local_defaults(spec), name, None if dry_run else prepare, on_preparation)
        planned, snapshot = plan_run(spec, name), take_snapshot(spec)
        spec, plan = planned.spec, planned.plan
        if run_id is not None and os.path.lexists(runs_root() / run_id):
            require_own_run(RunDir(runs_root() / run_id), trust_owner=trust_owner, remedy="Use another --run-id")
        earlier = None if run_id is None or dry_run else submitted_before(RunDir(runs_root() / run_id))
        warnings = require_external(spec, snapshot) if earlier is None else ()
        return cls(spec, plan, backend, snapshot, warnings, earlier, run_id, trust_owner, planned.sizes, epochs)

    @property
    def root(self) -> Path:
        """The folder of the run directory: the runs root, or that of the run from which it branches."""
        return runs_root() if self.branch is None else self.branch.run.path.parent

    @property
    def size_plans(self) -> Mapping[int, RunPlan]:
        """The plans of the sizes on which an attempt may start, by number of nodes."""
        if self.branch is not None and self.resize is not None:
            planned = self.resize.size_plans
            return read_size_plans(self.branch.run, self.branch.parent) if planned is None else planned
        return PlannedRun(self.spec, self.plan, self.sizes).size_plans

    def new_record(self) -> tuple[RunDir, RunRecord]:
        """Return the directory and the record of the run that create() would write."""
        record = make_record(
            self.spec, self.plan, self.run_id, self.snapshot, size_plans=self.size_plans, branch=self.branch
        )
        return RunDir(self.root / record.run_id), record

    def render(self) -> RenderedJob:
        """Return the job that would be handed to the scheduler. Contacts no server and writes nothing."""
        return rendered_job(self.backend, *self.new_record())

    def check(self) -> SubmissionSummary:
        """Query the scheduler; return the cost, the start and all warnings. Raises SchedulerError if it cannot run.

        Leaves nothing behind.
        """
        require_writable(self.root, "no run can be submitted")
        code, step = None if self.snapshot is None else self.snapshot.record, 0
        if self.branch is None:
            preflight = self.backend.preflight(self.spec, self.plan)
        else:
            code, step = code or self.branch.parent.code, self.branch.checkpoint.step
            preflight = self.backend.preflight(self.spec, self.plan, self.branch.run, code)
        shared = shared_root_notes(self.root, prepares=not self.spec.code.own_program)
        warnings = (*self.warnings, *preflight.warnings, *shared, *disk_space_notes(self.spec, self.plan, self.root))
        return SubmissionSummary(self.spec, self.plan, preflight.start, step, warnings, code, self.sizes)

    def create(self, data: PreparedData, stored_secrets: Mapping[str, str] | None = None) -> CreatedRun:
        """Create the run directory with its data and return it, or that of the same run.

        Raises UsageError, also where the run that is there has another spec or other code.
        """
        made = create_run(
            self.spec,
            self.plan,
            self.run_id,
            root=self.root,
            snapshot=self.snapshot,
            trust_owner=self.trust_owner,
            stored_secrets=stored_secrets,
            size_plans=self.size_plans,
            branch=self.branch,
        )
        if self.earlier is None:
            replace(data, epochs=self.epochs).record(made.run)
        return made

    def create_and_submit(
        self,
        on_created: Callable[[RunDir], None] = lambda run: None,
        on_fetch: Callable[[FetchProgress], None] = lambda progress: None,
        prepare: Choice = "auto",
        on_preparation: Callable[[str], None] = lambda line: None,
    ) -> SubmittedRun:
        """Create the run directory and submit the job, once: a second call with the same ``run_id`` submits nothing.

        Data that are not prepared are prepared first: here, before anything is created, or by a job that the gang waits
        for, as ``prepare`` says; ``on_preparation`` gets what is chosen, and lines of progress. ``on_created`` is
        called before the request to the scheduler, whose answer may be lost (SchedulerSilentError), ``on_fetch`` each
        second while files of the hub are fetched to a cache that the nodes share.
        """
        data, stored = PreparedData(), None
        if self.earlier is None and self.branch is None:
            data = prepare_data(self.spec, prepare, on_preparation)
        elif self.earlier is None and self.branch is not None:  # with the datasets of the other run
            run, folder = self.branch.run, self.branch.parent.working_folder
            data = prepare_data(self.spec, prepare, on_preparation, folder, self.root, run)
            require_same_data(self.spec, self.branch.checkpoint, data.datasets, Path(folder))
            stored = read_document(run.secrets)
        made = self.create(data, stored)
        if self.earlier is not None:
            return SubmittedRun.of(made, self.earlier)
        on_created(made.run)

        def remove() -> None:  # except for a preparation of the data that failed, so that `explain` can name the cause
            if made.created and read_job(preparation_folder(made.run)) is None:
                shutil.rmtree(made.run.path)

        with undone_if_refused(remove, SchedulerError):
            submission = submit_run(made.run, made.record, self.backend, on_fetch, data.tasks, on_preparation)
        return SubmittedRun.of(made, submission)
