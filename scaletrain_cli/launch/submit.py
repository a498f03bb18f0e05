"""Create run directories and submit jobs; submitting the same run id twice creates only one job.

A run directory is created atomically, by one rename; a lock serializes the submitters of one run. The
job that was submitted last is kept as text, and compared with the next one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import os
import platform
import re
import secrets
import shutil
import signal
import string
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scaletrain_cli import __version__
from scaletrain_cli.errors import InfeasibleError, UsageError
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.base import Backend
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.code import Snapshot, code_hash, take_snapshot, write_snapshot
from scaletrain_cli.launch.hub_fetch import FetchProgress, fetch_to_shared_cache, resolve_commits
from scaletrain_cli.launch.job import Request, Submission, open_request, read_submission, undone_if_refused
from scaletrain_cli.plan.reliability.node_sizes import NodeSize
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import read_document, write_document
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.preparation import forget_job, preparation_folder
from scaletrain_cli.rundir.record import (
    RunRecord,
    add_revision,
    read_first_record,
    read_record,
    read_size_plans,
    require_own_checkpoints,
    require_own_run,
    write_record,
    write_size_plans,
    write_spec_lines,
)
from scaletrain_cli.safe_files import FOLDER_MODE, create_file, locked, make_folder, replace_file, require_writable
from scaletrain_cli.spec import RunSpec, changed_keys
from scaletrain_cli.spec.source import read_documents

if TYPE_CHECKING:
    from scaletrain_cli.launch.branch import Branch


def plan_for_engine(spec: RunSpec, file: Path | str) -> RunPlan:
    """Return the plan. Raises InfeasibleError for a run that can be planned but not run by this engine."""
    from scaletrain_cli.launch.calibration import read_measurements
    from scaletrain_cli.plan import make_plan

    return _runnable(spec, make_plan(spec, read_measurements(spec)), file)


def _runnable(spec: RunSpec, plan: RunPlan, file: Path | str) -> RunPlan:
    from scaletrain_cli.plan import submittable

    if broken := submittable(spec, plan):
        problems = tuple(rule.problem(spec.where(rule.key)) for rule in broken)
        raise InfeasibleError(Reason("runs.not-runnable", {"file": str(file)}), problems)
    return plan


LONGEST_RUN_ID = 128
_RUN_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_RUN_ID - 1}}}")
_RECORDED_PACKAGES = ("torch", "deepspeed")


@dataclass(frozen=True)
class CreatedRun:
    """A run directory with its record. ``created`` is False if the same run existed already."""

    run: RunDir
    record: RunRecord
    created: bool


def new_run_id(name: str, now: float) -> str:
    """Return a readable id that is unique, sorts by time, and is safe in paths and on command lines."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower())[:48].strip("-") or "run"
    return f"{slug}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}-{secrets.token_hex(2)}"


def require_run_id(run_id: str) -> None:
    """Raise UsageError if a run id is not safe as the name of a folder."""
    if not _RUN_ID.fullmatch(run_id):
        raise UsageError(Reason("runs.invalid-id", {"id": run_id}))


def make_record(
    spec: RunSpec,
    plan: RunPlan,
    run_id: str | None = None,
    snapshot: Snapshot | None = None,
    hub: Mapping[str, str] | None = None,
    size_plans: Mapping[int, RunPlan] | None = None,
    branch: Branch | None = None,
) -> RunRecord:
    """Return the record that create_run would write. Raises UsageError for an invalid run id."""
    parent = None if branch is None else branch.parent
    now = time.time()
    run_id = run_id if run_id is not None else new_run_id(spec.name, now)
    require_run_id(run_id)
    spec = backend_for(spec.cluster.scheduler).with_local_defaults(spec)
    versions = {"python": platform.python_version(), "scaletrain": __version__}
    for name in _RECORDED_PACKAGES:  # without imports, which take seconds
        with contextlib.suppress(PackageNotFoundError):
            versions[name] = version(name)
    return RunRecord(
        run_id=run_id,
        created=now,
        spec=spec,
        plan=plan,
        versions=versions,
        code_hash=code_hash(),
        wandb_run_id="".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8)),
        working_folder=str(Path.cwd()) if parent is None else parent.working_folder,
        code=snapshot.record if snapshot is not None else None if parent is None else parent.code,
        hub=resolve_commits(spec, os.environ, hub if parent is None else parent.hub),
        sizes=tuple(size_plans or ()),
        branch_of=None if branch is None else branch.point,
    )


def create_run(
    spec: RunSpec,
    plan: RunPlan,
    run_id: str | None = None,
    *,
    root: Path | None = None,
    snapshot: Snapshot | None = None,
    trust_owner: bool = False,
    stored_secrets: Mapping[str, str] | None = None,
    hub: Mapping[str, str] | None = None,
    size_plans: Mapping[int, RunPlan] | None = None,
    branch: Branch | None = None,
) -> CreatedRun:
    """Create the run directory, or return the one with the same spec and code under this id.

    Takes a snapshot of the user's code unless ``snapshot`` is given. Raises UsageError, also for a directory
    of another user unless ``trust_owner``. ``stored_secrets``: values of ``secret_env`` that are not set here.
    ``hub``: commits of references that an earlier run has resolved. ``size_plans``: as in PlannedRun; without them the
    run has one size. ``branch``: the checkpoint of another run that it continues, with the code of that run unless
    ``snapshot`` is given.
    """
    snapshot = snapshot or (take_snapshot(spec) if branch is None else None)
    record = make_record(spec, plan, run_id, snapshot, hub, size_plans, branch)
    run = RunDir((root or runs_root()) / record.run_id)
    if os.path.lexists(run.path):
        require_own_run(run, trust_owner=trust_owner, remedy="Use another --run-id")
    require_own_checkpoints(run, spec, trust_owner=trust_owner)
    if run.record.exists():
        return _existing(run, record)
    values = _secret_values(spec, stored_secrets or {})
    require_writable(run.path.parent, f"the run directory {run.path} cannot be created")
    make_folder(run.path.parent, mode=0o777)
    draft = RunDir(run.path.with_name(f".{record.run_id}.{secrets.token_hex(4)}"))
    mode = backend_for(spec.cluster.scheduler).run_directory_mode()
    make_folder(draft.path, mode=FOLDER_MODE if mode is None else mode, exist_ok=False)
    try:
        if values:
            create_file(draft.secrets, json.dumps(values), private=True)
        if snapshot is not None:
            write_snapshot(draft, snapshot)
        write_spec_lines(draft, spec)
        write_size_plans(draft, 0, size_plans or {})
        if branch is not None:
            branch.fill(draft, run, record)
        write_record(draft, record)
        # rename() replaces only an empty folder, so one of two concurrent submitters fails here.
        draft.path.rename(run.path)
    except OSError as error:
        shutil.rmtree(draft.path)
        if run.record.exists():
            require_own_run(run, trust_owner=trust_owner, remedy="Use another --run-id")
            return _existing(run, record)
        raise UsageError(Reason("runs.not-created", {"folder": str(run.path), "said": str(error)})) from error
    except BaseException:
        shutil.rmtree(draft.path)
        raise
    return CreatedRun(run, record, created=True)


def submit_run(
    run: RunDir,
    record: RunRecord,
    scheduler: Backend,
    on_fetch: Callable[[FetchProgress], None] = lambda progress: None,
    preparation_tasks: int = 0,
    say: Callable[[str], None] = lambda line: None,
) -> Submission:
    """Submit the job, or return the earlier submission of this run.

    Fetches the files of the hub first if the nodes share their cache with this machine. ``preparation_tasks``: the
    tasks of a job that prepares the data first; 0: they are prepared. ``say`` gets lines of progress where this waits
    for that job. Raises HubError and FetchError.
    """
    if read_submission(run) is None:
        fetch_to_shared_cache(record.spec, record.hub, os.environ, on_fetch)
    with submit_lock(run):
        earlier, request = read_submission(run), open_request(run)
        if request is None and earlier is not None:
            return earlier
        if request is not None and (begun := _begun_since(run, request)) is not None:
            return _submitted(run, begun)
        return submit_prepared(run, record, scheduler, preparation_tasks, say)


def submit_prepared(
    run: RunDir,
    record: RunRecord,
    scheduler: Backend,
    preparation_tasks: int,
    say: Callable[[str], None] = lambda line: None,
    automatic: int = 0,
) -> Submission:
    """Submit the job, and before it the one that prepares the data, if it has tasks. As submit_job() and submit_run().

    Raises the error of the preparation where this waits for it; the job and the failure stay recorded.
    """
    if not preparation_tasks:
        forget_job(preparation_folder(run))
        return submit_job(run, record, scheduler, automatic)
    scheduler.submit_preparation(run, record, preparation_tasks)
    scheduler.await_preparation(run, record, say)

    def withdraw() -> None:
        scheduler.cancel_preparation(run)
        forget_job(preparation_folder(run))

    with undone_if_refused(withdraw):
        return submit_job(run, record, scheduler, automatic)


def _begun_since(run: RunDir, request: Request) -> Submission | None:
    """Return the submission whose answer was lost, if an attempt of its job proves that the scheduler accepted it."""
    begun = [attempt for attempt in read_attempts(run) if attempt.number >= request.first_attempt]
    if not begun:
        return None
    return Submission(request.scheduler, begun[-1].job_id, request.asked, request.first_attempt, request.revision)


@contextlib.contextmanager
def _through_hangups() -> Iterator[None]:
    """Ignore that the terminal is gone, as after a cut connection: the answer of the scheduler would not be recorded.

    What the block starts ignores it, too.
    """
    if threading.current_thread() is not threading.main_thread():  # which alone gets signals
        yield
        return
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


@_through_hangups()
def submit_job(run: RunDir, record: RunRecord, scheduler: Backend, automatic: int = 0) -> Submission:
    """Submit the job even if the run was submitted before. The caller holds submit_lock().

    ``automatic``: number of the resume without a person, which the event records; 0: a person submits it.

    The intent is written before the request, and kept unless the scheduler refuses, since an answer may be lost.
    """
    text = scheduler.render(run, record)
    with _asked(run, record) as first_attempt:
        job_id = scheduler.submit(run, record)
    return _accepted(run, record, scheduler, job_id, first_attempt, text, automatic)


@_through_hangups()
def submit_together(
    sweep: str, runs: Sequence[tuple[RunDir, RunRecord]], scheduler: Backend, cap: int
) -> list[Submission]:
    """Submit the runs of a sweep as one job array, or return their earlier submissions.

    Raises UsageError if only some of them were submitted before.
    """
    for _, record in runs:
        fetch_to_shared_cache(record.spec, record.hub, os.environ)
    with contextlib.ExitStack() as locks:
        for run, _ in runs:
            locks.enter_context(submit_lock(run))
        earlier = [None if open_request(run) is not None else read_submission(run) for run, _ in runs]
        if all(one is not None for one in earlier):
            return [one for one in earlier if one is not None]
        if any(one is not None for one in earlier):
            raise UsageError(Reason("launch.array-partly-submitted", {"sweep": sweep}))
        again = any(open_request(run) is not None for run, _ in runs)
        texts = [scheduler.render(run, record) for run, record in runs]
        with contextlib.ExitStack() as requests:
            first = [requests.enter_context(_asked(run, record)) for run, record in runs]
            job_ids = scheduler.submit_array(sweep, runs, cap, again=again)
        return [
            _accepted(run, record, scheduler, job_id, first_attempt, text)
            for (run, record), job_id, first_attempt, text in zip(runs, job_ids, first, texts, strict=True)
        ]


@contextlib.contextmanager
def _asked(run: RunDir, record: RunRecord) -> Iterator[int]:
    """Record the request while it is sent, and keep it unless the scheduler refuses; yield the first attempt."""
    earlier, request, before = read_document(run.submission), open_request(run), read_submission(run)
    first_attempt = max(run.attempts(), default=0) + 1
    lost = None if request is None else request.asked
    asked = Request(record.spec.cluster.scheduler, time.time(), first_attempt, record.revision, before, lost)
    write_document(run.submission, {"state": "asked", **dataclasses.asdict(asked)})

    def restore() -> None:
        if earlier is None:
            run.submission.unlink(missing_ok=True)
        else:
            write_document(run.submission, earlier)

    with undone_if_refused(restore):
        yield first_attempt


def _accepted(
    run: RunDir, record: RunRecord, scheduler: Backend, job_id: str, first_attempt: int, text: str, automatic: int = 0
) -> Submission:
    """Record the submission that the scheduler has accepted. ``text``: the job as it was submitted."""
    submission = Submission(record.spec.cluster.scheduler, job_id, time.time(), first_attempt, record.revision)
    more: dict[str, Any] = {} if record.code is None else {"code": record.code.name}
    if automatic:
        more["automatic"] = automatic
    _submitted(run, submission, **more)
    store_rendered_job(run, text)
    if record.spec.evaluation.tasks and record.spec.evaluation.job.submit == "auto":
        scheduler.start_following_evaluations(run)
    return submission


def _submitted(run: RunDir, submission: Submission, **more: Any) -> Submission:
    """Record that the scheduler accepted the job."""
    data = dataclasses.asdict(submission)
    write_document(run.submission, {"state": "submitted", **data})
    record_event(run, "submitted", **{key: value for key, value in data.items() if key != "submitted"}, **more)
    return submission


@contextlib.contextmanager
def submit_lock(run: RunDir) -> Iterator[None]:
    """Wait for the lock that serializes submissions of this run, and hold it."""
    with locked(run.path / "submit.lock"):
        yield


def _existing(run: RunDir, given: RunRecord) -> CreatedRun:
    first = read_first_record(run)  # as first submitted: a resize since then does not make it another run
    if first.branch_of != given.branch_of:
        raise UsageError(Reason("runs.other-beginning", {"run": run.run_id}))
    if first.spec != given.spec:
        differing = [f"{key} was {old}, now {new}" for key, (old, new) in changed_keys(first.spec, given.spec).items()]
        shown = "; ".join(differing[:3]) + (f"; and {len(differing) - 3} more" if len(differing) > 3 else "")
        raise UsageError(Reason("runs.other-spec", {"run": run.run_id, "differences": shown}))
    if first.code is not None and given.code is not None and first.code.sha256 != given.code.sha256:
        params = {"run": run.run_id, "before": first.code.name, "given": given.code.name}
        raise UsageError(Reason("runs.other-code", params))
    return CreatedRun(run, read_record(run), created=False)


def keep_secrets(run: RunDir, spec: RunSpec) -> None:
    """Store the values of ``secret_env`` from this environment; names that are not set here keep their stored value.

    Raises UsageError for names without a value in either place.
    """
    before = read_document(run.secrets) or {}
    values = _secret_values(spec, before)
    if values and values != before:
        replace_file(run.secrets, json.dumps(values), private=True)


def _secret_values(spec: RunSpec, stored: Mapping[str, str]) -> dict[str, str]:
    if not spec.cluster.traits.secrets_from_submitter:
        return {}  # the scheduler stores them; the values are not needed here
    known = {**stored, **os.environ}
    missing = [name for name in spec.secret_env if name not in known]
    if missing:
        raise UsageError(Reason("runs.secret-not-set", {"names": missing}))
    return {name: known[name] for name in spec.secret_env}


# Names of Kubernetes workloads contain the number of the submission, which is not a change of the job.
_NUMBERED = re.compile(r"(-s|submission: \"?)\d+")


def store_rendered_job(run: RunDir, text: str) -> None:
    """Store the text of a submission in the run directory. Raises OSError."""
    replace_file(run.sent, text)


def changes_since_sent(run: RunDir, text: str) -> list[str] | None:
    """Return the diff to the last submission, removed and added lines only; None before the first submission."""
    try:
        before = run.sent.read_text(encoding="utf-8")
    except OSError:
        return None
    old, new = (_NUMBERED.sub(r"\1N", one).splitlines() for one in (before, text))
    return [
        line for line in difflib.unified_diff(old, new, lineterm="", n=0) if not line.startswith(("---", "+++", "@@"))
    ]


def in_format(backend: Backend, text: str, output: str) -> str:
    """Return the text of Backend.render(), or its JSON. Raises UsageError for a format that the back end lacks."""
    usual = backend.output_format
    if output == usual:
        return text
    if output == "json":
        whole: dict[str, Any] = {"schema": "scaletrain.sent/v1", "scheduler": backend.name, "script": text}
        if usual != "script":
            whole = {"apiVersion": "v1", "kind": "List", "items": read_documents(text)}
        return json.dumps(whole, indent=1) + "\n"
    params = {"requested": output, "scheduler": backend.traits.display_name, "format": usual}
    raise UsageError(Reason("runs.output-format", params))


@dataclass(frozen=True)
class PlannedRun:
    """The run on its largest usable size, with its plan; ``sizes``: every size of the range, empty without a range."""

    spec: RunSpec
    plan: RunPlan
    sizes: tuple[NodeSize, ...] = ()

    @property
    def size_plans(self) -> Mapping[int, RunPlan]:
        """Return the plans of the sizes on which an attempt may start, by number of nodes, fewest first.

        Empty if there is one size only: the job is then the same as without a range.
        """
        from scaletrain_cli.plan.reliability.node_sizes import usable_plans

        plans = usable_plans(self.sizes)
        return plans if len(plans) > 1 else {}


def plan_run(spec: RunSpec, file: Path | str) -> PlannedRun:
    """Return the plans of a run for the engine. Raises InfeasibleError if it cannot run on the fewest nodes."""
    if spec.cluster.node_range is None:
        return PlannedRun(spec, plan_for_engine(spec, file))
    from scaletrain_cli.launch.calibration import read_measurements
    from scaletrain_cli.plan.planning import plan_or_raise
    from scaletrain_cli.plan.reliability.node_sizes import least_size_problem, plan_sizes, usable_sizes

    measurements = read_measurements(spec)
    sizes = plan_sizes(spec, lambda one: _runnable(one, plan_or_raise(one, measurements, compared=False), file))
    if (problem := least_size_problem(spec, sizes)) is not None:
        raise InfeasibleError(Reason("runs.not-runnable", {"file": str(file)}), (problem,))
    largest = spec.with_changes("cluster", nodes=usable_sizes(sizes)[-1])
    return PlannedRun(largest, plan_for_engine(largest, file), sizes)


def take_size(run: RunDir, record: RunRecord, nodes: int, job_id: str) -> RunRecord:
    """Return the record with the plan for ``nodes`` nodes, one of ``record.sizes``; written as a revision if it is new.

    Raises UsageError if the run was changed by someone else meanwhile.
    """
    if record.spec.cluster.nodes == nodes:
        return record
    plan = read_size_plans(run, record)[nodes]
    with submit_lock(run):
        if read_record(run).revision != record.revision:
            raise UsageError(Reason("launch.resume-resized-meanwhile", {"run": run.run_id}))
        before = record.spec.cluster.nodes
        revised = add_revision(run, record, record.spec.with_changes("cluster", nodes=nodes), plan, ())
        why = Reason("launch.resized", {"job": job_id, "nodes": nodes, "before": before, "sizes": list(record.sizes)})
        record_event(
            run,
            "resized",
            nodes=nodes,
            before=before,
            revision=revised.revision,
            job_id=job_id,
            why=str(why),
            **why.to_document(),
        )
    return revised
