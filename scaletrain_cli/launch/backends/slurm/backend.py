"""The Slurm back end: sbatch, squeue, scancel and scontrol, by their stable text interfaces.

script.py renders the batch script; job.py is what the script calls to begin and end an attempt.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, ClassVar

from scaletrain_cli.errors import Problem, SchedulerError, SchedulerSilentError, UsageError, sentence
from scaletrain_cli.launch.attempts import read_attempts
from scaletrain_cli.launch.backends.base import Backend, Check, Job, PreflightResult, Start
from scaletrain_cli.launch.backends.cluster_view import ClusterView
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, commands_check, node_names
from scaletrain_cli.launch.backends.slurm.nodes import exclude_option, exclusion_for, record_exclusion
from scaletrain_cli.launch.backends.slurm.preflight import check_site, preemption_rule
from scaletrain_cli.launch.backends.slurm.queue import (
    JobRow,
    accounted_states,
    forgotten_job,
    mark_of,
    rows_by_id,
    rows_of_run,
)
from scaletrain_cli.launch.backends.slurm.script import job_script, sbatch_options
from scaletrain_cli.launch.backends.slurm.site import Site, ask_site, user_name
from scaletrain_cli.launch.backends.slurm.tables import moment
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.node_exclusion import Exclusion
from scaletrain_cli.launch.resource_checks.files import is_missing, is_shared
from scaletrain_cli.launch.restart import forget_secrets
from scaletrain_cli.launch.shared_folder import unshared_notes
from scaletrain_cli.launch.submit import Request, open_request, read_submission
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.rundir.sweeps import read_sweep_place
from scaletrain_cli.safe_files import expand_home, replace_file, touch
from scaletrain_cli.spec import ClusterSpec, RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.node.probe import NodeFacts
    from scaletrain_cli.launch.resource_checks.files import View
    from scaletrain_cli.launch.status import RunStatus

# "sbatch: Job 12 to start at 2026-11-22T00:30:00 using 16 processors on nodes n[1-2] in partition main"
_ESTIMATE = re.compile(
    r"Job \d+ to start at (?P<at>\S+)(?:.*? on (?:nodes )?(?P<nodes>\S+))?(?: in partition (?P<partition>\S+))?"
)


def start_and_rest(lines: Sequence[str], now: float, *, reservations_hidden: bool = False) -> tuple[Start, list[str]]:
    """Return Slurm's estimate of the start, and the other lines that Slurm or a plugin of the site printed."""
    counted = ", reservations that are hidden from you counted" if reservations_hidden else ""
    start: Start | None = None
    rest = []
    for line in lines:
        match = _ESTIMATE.search(line)
        at = moment(match["at"]) if match is not None else None
        if match is None or at is None:
            rest.append(line)
            continue
        nodes = f" on {match['nodes']}" if match["nodes"] else ""
        partition = f" of {match['partition']}" if match["partition"] else ""
        source = f"Slurm's estimate (sbatch --test-only){nodes}{partition}{counted}"
        start = Start(at, f"{source}; jobs of a higher priority may come before it" if at > now + 60 else source)
    return start or Start(None, "sbatch --test-only gave no time"), rest


# How long after an unanswered sbatch its job may still appear: the controller works through a backlog.
_SETTLED_SECONDS = 300.0
_LOOKS_FOR_LOST, _PAUSE_SECONDS = 3, 1.0


@dataclass(frozen=True)
class SlurmBackend(Backend):
    """Jobs of the cluster that this machine's Slurm commands address.

    ``answers``: known jobs by run directory, so that job() needs no request for them.
    """

    name: ClassVar[str] = "slurm"
    can_probe: ClassVar[bool] = True
    replaces_nodes: ClassVar[bool] = True

    answers: Mapping[Path, Job | SchedulerError] = field(default_factory=dict)
    _sites: dict[str, Site] = field(default_factory=dict)  # cache: each command queries the site once

    def asked_once(self, runs: Sequence[RunDir]) -> SlurmBackend:
        """Return a back end with the jobs of all these runs, from one squeue and at most one sacct call."""
        ids: dict[RunDir, str] = {}
        for run in runs:
            with contextlib.suppress(UsageError):  # the row of the run reports the damage
                if open_request(run) is None and (job_id := _latest_id(run)):
                    ids[run] = job_id
        try:
            rows = rows_by_id(ids.values())
        except SchedulerError as error:
            return SlurmBackend({run.path: error for run in ids})
        accounted = accounted_states(ids[run] for run in ids if ids[run] not in rows and _end_is_open(run))
        return SlurmBackend(
            {
                run.path: rows[job_id].job if job_id in rows else forgotten_job(job_id, accounted.get(job_id, ""))
                for run, job_id in ids.items()
            }
        )

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        """Return the reasons why the job would wait, and Slurm's estimate of its start.

        Raises SchedulerError with every problem that keeps the job from ever running, or with Slurm's message.
        """
        _check_path(runs_root())
        site = self._site(spec)
        verdict = check_site(site, spec, lambda hosts: node_names(hosts, spec.secret_env))
        if verdict.problems:
            raise SchedulerError(Reason("slurm.never-runs"), verdict.problems)
        excluded = None if run is None else exclude_option(spec, exclusion_for(run, spec))
        options = sbatch_options(spec, "preflight", excluded)
        script = "\n".join(["#!/bin/bash", *(f"#SBATCH --{option}" for option in options)])
        try:
            answer = call_slurm(["sbatch", "--test-only"], text=script + "\ntrue\n", without=spec.secret_env)
        except SchedulerSilentError:
            raise
        except SchedulerError as error:
            raise _at_its_key(spec, error) from error
        said = [line.removeprefix("sbatch: ") for line in answer.stderr.splitlines() if line.strip()]
        start, rest = start_and_rest(said, site.now, reservations_hidden=site.hides_reservations)
        if spec.cluster.slurm.extra.get("hold") is True:
            start = Start(None, "the job is submitted on hold (cluster.slurm.extra); `scontrol release` starts it")
        notes = (*map(sentence, verdict.notes), *unshared_notes(runs_root(), spec.cluster.nodes), *rest)
        return PreflightResult(start, notes, verdict.notes)

    def render(self, run: RunDir, record: RunRecord) -> str:
        return self._script(run, record, exclusion_for(run, record.spec))

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Queue the job and return its id. If a submitter died after sbatch, return the id of the existing job."""
        _check_path(run.path)
        secrets = record.spec.secret_env
        comment = f"{mark_of(run)}-{record.revision}"
        for row in _rows_before(run, secrets):
            if row.state == "ended":
                continue
            if row.comment == comment:
                return row.job_id
            raise SchedulerError(Reason("slurm.older-job", {"job": row.job_id, "run": record.run_id}))
        _refuse_while_unsettled(run)
        script = run.path / "job.sh"
        excluded = exclusion_for(run, record.spec)
        replace_file(script, self._script(run, record, excluded))
        command = ["sbatch", "--parsable", f"--comment={comment}", *_dependency(run), script.name]
        try:
            # In the run directory, so that the log's name needs no path, which could contain blanks and quotes.
            job_id = call_slurm(command, folder=run.path, without=secrets).stdout.strip().split(";")[0]  # id;cluster
        except SchedulerSilentError as error:
            job_id = _found_after_all(run, comment, error, secrets)
        if excluded.nodes or excluded.spared:
            record_exclusion(run, excluded)
        return job_id

    def _script(self, run: RunDir, record: RunRecord, excluded: Exclusion) -> str:
        return job_script(
            record.spec,
            record.run_id,
            run.path,
            exclude=exclude_option(record.spec, excluded),
            preemption=self._preemption(record.spec),
        )

    def _site(self, spec: RunSpec) -> Site:
        key = f"{spec.cluster.model_dump_json()} {sorted(spec.secret_env)}"
        if key not in self._sites:
            self._sites[key] = ask_site(spec.cluster, spec.secret_env)
        return self._sites[key]

    def _preemption(self, spec: RunSpec) -> str:
        """Return the site's preemption rule as text; empty without Slurm, as in a dry run on a laptop."""
        try:
            return preemption_rule(self._site(spec), spec.cluster)
        except SchedulerError:
            return ""

    def job(self, run: RunDir, record: RunRecord) -> Job:
        answer = self.answers.get(run.path)
        if isinstance(answer, SchedulerError):
            raise answer
        if answer is not None:
            return answer
        request, job_id = open_request(run), _latest_id(run)
        if request is not None:
            rows = rows_of_run(run)
            living = [row for row in rows if row.state != "ended"]
            if rows:
                return (living or rows)[-1].job
            if job_id == "":
                return _never_seen(request)
        if job_id == "":
            return Job("", "unknown", "never submitted")
        row = rows_by_id([job_id]).get(job_id)
        if row is not None:
            return row.job
        return forgotten_job(job_id, accounted_states([job_id]).get(job_id, "") if _end_is_open(run) else "")

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Signal the ranks to save and exit; ``slurm/job.py`` then ends the job. A queued job is deleted.

        This applies to every job of the run, also one whose id was never received. Slurm's permission is checked
        first: if it refuses, no stop file is written. Raises SchedulerError.
        """
        living = [row for row in self._rows(run) if row.state != "ended"]
        running = [row for row in living if row.state in ("running", "suspended")]
        for row in running:
            if row.user != user_name():
                _require_right(row, run.run_id)
        for row in running:
            if row.state == "suspended":  # a stopped process cannot save, and Slurm would kill it without continuing it
                _continue(row, record)
        for row in living:
            if row.state == "queued":
                call_slurm(["scancel", row.job_id])
        was_cancelled = run.is_cancelled
        touch(run.stop_file)
        try:
            for row in running:
                # A plain scancel would grant KillWait instead of the grace period before SIGKILL.
                call_slurm(["scancel", "--signal=TERM", row.job_id])
        except SchedulerSilentError as error:
            note = "The stop file of the run is set all the same; its nodes see that within seconds and stop it."
            raise SchedulerSilentError(f"{error.message} {note}") from error
        except SchedulerError:
            if not was_cancelled:
                run.stop_file.unlink(missing_ok=True)
            raise
        if not running and not any(row.state == "ending" for row in living):
            record_event(run, "cancelled")
            forget_secrets(run)

    def probe(self, spec: RunSpec, plan: RunPlan) -> list[NodeFacts]:
        """Run a short job on the nodes and return the facts of each. Raises WrongNodesError for a mismatch."""
        from scaletrain_cli.launch.backends.slurm.probe import probe_nodes

        return probe_nodes(spec, plan)

    def max_concurrent(self, cluster: ClusterSpec, wanted: int | None, points: int) -> int:
        """Return ``wanted``, at most ``points``: a job of the sweep waits for the one before it (afterany)."""
        return min(points, wanted or points)

    def unseen_place(self, view: View, path: str) -> str:
        """Return ``in the container`` or ``on the nodes`` where the path is not visible from here."""
        place = PurePosixPath(view.folder / expand_home(path))
        container = view.spec.cluster.slurm.container
        if container is not None:
            seen = [mount.split(":")[:2] for mount in container.mounts]
            if not any(len(set(mount)) == 1 and place.is_relative_to(mount[0]) for mount in seen):
                return "in the container"
        beside_the_submitter = not expand_home(path).is_absolute()
        if beside_the_submitter or os.path.lexists(place) or is_shared(place):
            return ""
        return "on the nodes"

    def has_own_python(self, spec: RunSpec) -> bool:
        """Return whether ``cluster.slurm`` sets up Python on the nodes: by a script, modules or a container."""
        slurm = spec.cluster.slurm
        return bool(slurm.activate is not None or slurm.modules or slurm.container is not None)

    def resource_problems(self, view: View) -> Iterator[Problem]:
        """Yield missing files of ``activate`` and ``container``, where their file system is visible here."""
        slurm = view.spec.cluster.slurm
        if slurm.activate is not None and is_missing(slurm.activate):
            hint = "Name the script that sets up Python on the nodes."
            yield view.problem("cluster.slurm.activate", "there is no such file.", slurm.activate, hint)
        container, key = slurm.container, "cluster.slurm.container"
        if container is None:
            return
        if container.image.startswith("/") and is_missing(container.image):
            yield view.problem(f"{key}.image", "there is no such file.", container.image, "Name an image.")
        for index, mount in enumerate(container.mounts):
            source = mount.partition(":")[0]
            if is_missing(source):
                message = f"{source} does not exist."
                yield view.problem(f"{key}.mounts.{index}", message, mount, "Name a folder of the nodes.")

    def secret_hint(self, name: str) -> str:
        """Return the hint to export and name the variable: jobs get no other part of the environment."""
        return f"Export {name} and name it in secret_env"

    def job_log(self, run: RunDir, job_id: str) -> Path | None:
        """Return the log of the batch script; None where it never started."""
        log = run.path / f"slurm-{job_id}.log"
        return log if log.is_file() else None

    def explain_waiting(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return the finding for Slurm's pending reason, with the state of the queue."""
        from scaletrain_cli.launch.backends.slurm.explain import why_it_waits

        try:
            return why_it_waits(status.job_id, run.run_id)
        except SchedulerError as error:
            evidence = (Evidence("the scheduler", error.message),)
            return Finding.because("unknown", Reason("slurm.wait-no-answer"), evidence)

    def explain_never_began(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return the finding from the controller, the accounting and the job's log."""
        from scaletrain_cli.launch.backends.slurm.explain import how_it_ended

        found = super().explain_never_began(run, record, status)
        if not status.job_id:
            return found
        more = how_it_ended(status.job_id, run.path / f"slurm-{status.job_id}.log")
        return dataclasses.replace(found, evidence=(*found.evidence, *more))

    def actions_if_suspended(self, job_id: str) -> tuple[str, ...]:
        """Return the command with which an operator resumes the job."""
        return (f"scontrol resume {job_id} (for operators of the cluster)",)

    def is_available(self) -> bool:
        """Return whether sbatch is installed on this machine."""
        return shutil.which("sbatch") is not None

    def has_this_machine(self) -> bool:
        """Return whether sinfo is installed on this machine."""
        return shutil.which("sinfo") is not None

    def cluster_view(self, cluster: ClusterSpec) -> ClusterView:
        """Return the view, with the quotas of the account and QOS of ``cluster.slurm``."""
        from scaletrain_cli.launch.backends.slurm.cluster_view import slurm_view

        return slurm_view(cluster)

    def checks(self) -> Iterator[Check]:
        """Yield the check that the commands are installed and the controller answers."""
        yield commands_check()

    def _rows(self, run: RunDir) -> list[JobRow]:
        """Return the run's jobs by the mark in their comments, and the latest by id: sites may rewrite comments."""
        rows, job_id = rows_of_run(run), _latest_id(run)
        if job_id and all(row.job_id != job_id for row in rows):
            rows += rows_by_id([job_id]).values()
        return rows


def _latest_id(run: RunDir) -> str:
    """Return the id of the newest known job, from its submission or from an attempt that it began."""
    request, submission = open_request(run), read_submission(run)
    if request is not None:  # the answer of sbatch was lost; if the job exists and has begun, its attempt has the id
        attempts = [attempt for attempt in read_attempts(run) if attempt.number >= request.first_attempt]
        return attempts[-1].job_id if attempts else ""
    return submission.job_id if submission is not None else ""


def _end_is_open(run: RunDir) -> bool:
    """Return whether the run directory does not show how the run ended: only then is the accounting queried."""
    attempts = read_attempts(run)
    return not attempts or attempts[-1].ended is None or attempts[-1].may_be_followed


def _never_seen(request: Request) -> Job:
    at = time.strftime("%H:%M:%S", time.localtime(request.asked))
    said = f"sbatch was called at {at} and gave no answer; Slurm has no job of this run"
    if time.time() - request.asked < _SETTLED_SECONDS:
        return Job("", "unknown", f"{said} so far, and may still accept it", unsettled=True)
    return Job("", "ended", said)


def _rows_before(run: RunDir, secrets: Sequence[str]) -> list[JobRow]:
    """Return rows_of_run(); a missing answer becomes a SchedulerError, since nothing was submitted yet."""
    try:
        return rows_of_run(run, secrets)
    except SchedulerSilentError as error:
        raise SchedulerError(Reason("slurm.nothing-queued", {"failure": _cause(error)})) from error


def _cause(error: SchedulerError) -> Reason:
    return error.reason or recorded(error.message.rstrip("."))


def _refuse_while_unsettled(run: RunDir) -> None:
    """Raise SchedulerError if the job of an earlier, unanswered request may still appear."""
    request = open_request(run)
    left = 0.0 if request is None or request.earlier is None else request.earlier + _SETTLED_SECONDS - time.time()
    if left > 0:
        raise SchedulerError(
            Reason("slurm.earlier-submission-open", {"run": run.run_id, "minutes": math.ceil(left / 60)})
        )


def _found_after_all(run: RunDir, comment: str, error: SchedulerSilentError, secrets: Sequence[str]) -> str:
    """Return the id of the job that Slurm accepted although its answer was lost. Raises SchedulerSilentError."""
    for _ in range(_LOOKS_FOR_LOST):
        with contextlib.suppress(SchedulerError):
            found = [row for row in rows_of_run(run, secrets) if row.comment == comment and row.state != "ended"]
            if found:
                return found[-1].job_id
        time.sleep(_PAUSE_SECONDS)
    raise SchedulerSilentError(
        Reason("slurm.submission-unknown", {"run": run.run_id, "failure": _cause(error)})
    ) from error


def _require_right(row: JobRow, run_id: str) -> None:
    """Raise SchedulerError unless this user may signal the job. Sends SIGCONT, which running processes ignore."""
    try:
        call_slurm(["scancel", "--signal=CONT", row.job_id])
    except SchedulerError as error:
        raise SchedulerError(
            Reason(
                "slurm.job-of-other-user",
                {"job": row.job_id, "run": run_id, "user": row.user, "failure": _cause(error)},
            )
        ) from error


def _continue(row: JobRow, record: RunRecord) -> None:
    """Resume a suspended job. Raises SchedulerError if only an operator may do that."""
    try:
        call_slurm(["scontrol", "resume", row.job_id])
    except SchedulerError as error:
        raise SchedulerError(
            Reason("slurm.cannot-resume-suspended", {"job": row.job_id, "run": record.run_id, "failure": _cause(error)})
        ) from error


# Messages of sbatch about the value of one key (schedmd/slurm, slurm_errno.c).
_SAID_OF: dict[str, tuple[str, ...]] = {
    "constraint": ("Invalid feature specification", "Requested node configuration is not available"),
    "licenses": ("Invalid license specification", "Licenses are not available"),
    "reservation": ("Requested reservation is invalid", "reservation not usable"),
    "account": ("Invalid account",),
    "qos": ("Invalid qos",),
    "partition": ("Invalid partition",),
    "gres_type": ("Invalid generic resource",),
    "nodelist": ("Invalid node name",),
    "time": ("Requested time limit is invalid",),
}


def _at_its_key(spec: RunSpec, error: SchedulerError) -> SchedulerError:
    """Return sbatch's refusal as a problem of the key that it is about; unchanged if the key is not certain."""
    said = "" if error.reason is None else str(error.reason.params.get("said", ""))
    for name, phrases in _SAID_OF.items():
        value = getattr(spec.cluster.slurm, name)
        if value is not None and any(phrase in said for phrase in phrases):
            key = f"cluster.slurm.{name}"
            why = Reason("slurm.refused-value", {"said": said.rstrip(".")})
            problem = Problem.because(spec.where(key), key, why, value)
            return SchedulerError(Reason("slurm.refused"), (problem,))
    return error


def _dependency(run: RunDir) -> list[str]:
    """Return the dependency of a sweep's run on the job before it in its lane; none once it is resumed."""
    place = read_sweep_place(run)
    if place is None or place.after is None or read_submission(run) is not None:
        return []
    before = read_submission(RunDir(run.path.parent / place.after))
    return [f"--dependency=afterany:{before.job_id}"] if before is not None else []


def _check_path(path: Path) -> None:
    if "%" in str(path) or "\\" in str(path):
        raise SchedulerError(Reason("slurm.path-with-patterns", {"path": str(path)}))
