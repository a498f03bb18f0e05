"""The Slurm back end: runs jobs with sbatch, squeue, scancel and scontrol, by their stable text interfaces.

script.py renders the batch script; job.py is what the script calls to begin and end an attempt.

The srun command that starts a session on a node of a running job (`scaletrain exec`, `shell`, `port-forward`).

``--overlap`` lets the step share the processors, memory and GPUs that the step of the node agents holds; it needs no
right beyond those of the job's owner. Before Slurm 22.05 it shares processors only, so that a step which also asks for
GPUs or memory would wait until the run ends: there the step asks for none. A site that confines devices then shows
none to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from scaletrain_cli.errors import Problem, SchedulerError
from scaletrain_cli.launch.attempts import AttemptRecord, signaled_nodes
from scaletrain_cli.launch.backends.base import Backend, Check, JobNode, NodeCommand, PreflightResult, session_words
from scaletrain_cli.launch.backends.slurm.array import (
    ArrayPlan,
    array_script,
    number_of_step,
    require_one_array,
    submit_array,
)
from scaletrain_cli.launch.backends.slurm.commands import call_slurm, commands_check, passed_on
from scaletrain_cli.launch.backends.slurm.preparation import (
    cancel_preparation,
    submit_preparation,
    why_it_is_not_prepared,
)
from scaletrain_cli.launch.backends.slurm.queue import (
    cancel_jobs,
    cancelled_by_another,
    failed_preparation,
    job_of_run,
    jobs_of_runs,
    preparation_comment,
    submit_job,
    submitted_job,
)
from scaletrain_cli.launch.backends.slurm.script import job_script, session_script, session_srun_words
from scaletrain_cli.launch.backends.slurm.site import (
    Site,
    exclude_option,
    exclusion_for,
    preemption_rule,
    query_site,
    record_exclusion,
)
from scaletrain_cli.launch.finding import Evidence, Finding
from scaletrain_cli.launch.job import Job, read_submission
from scaletrain_cli.launch.resource_checks.view import is_missing
from scaletrain_cli.own_processes import absolute_paths
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.bad_nodes import Exclusion
from scaletrain_cli.rundir.paths import RunDir, read_sweep_place, runs_root
from scaletrain_cli.rundir.preparation import PreparationJob, preparation_folder, preparation_name, read_job
from scaletrain_cli.rundir.record import CodeRecord, RunRecord
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.spec import ClusterSpec, RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.cluster_view import ClusterView
    from scaletrain_cli.launch.node.inspection import NodeFacts
    from scaletrain_cli.launch.resource_checks.view import View
    from scaletrain_cli.launch.run_status import RunStatus

_VERSION = re.compile(r"\b(\d+)\.(\d+)")
_SHARES_ALL = (22, 5)
_START_SECONDS = 60  # for the controller to create the step; without it srun would wait without end
_VERSION_SECONDS = 10.0


def session_command(spec: RunSpec, run_folder: Path, node: JobNode) -> tuple[str, ...]:
    """Return the words of srun. ``run_folder``: as the node sees it. Raises SchedulerError without the node's name."""
    if not node.named:
        raise SchedulerError(Reason("slurm.session-node-unknown", {"job": node.job_id, "number": node.number}))
    script = session_script(spec, run_folder, session_words(run_folder, node))
    options = overlap_options(srun_version())
    container = [word for text in session_srun_words(spec.cluster, run_folder) for word in shlex.split(text)]
    return (
        "srun",
        f"--jobid={number_of_step(node.job_id)}",
        *options,
        "--nodes=1",
        "--ntasks=1",
        f"--nodelist={node.name}",
        f"--immediate={_START_SECONDS}",
        "--export=ALL",
        "--mpi=none",
        "--quiet",
        *container,
        "/bin/bash",
        "-c",
        script,
    )


def overlap_options(version: tuple[int, int] | None) -> Iterator[str]:
    """Yield the options by which the step waits for nothing; ``version`` of srun, None if it is unknown."""
    yield "--overlap"  # shares processors, memory and GPUs; before Slurm 22.05 processors only, and waits for the rest
    if version is not None and version < _SHARES_ALL:
        yield "--gres=none"
        yield "--mem=0"


def srun_version() -> tuple[int, int] | None:
    """Return the major and minor version of srun; None if it is not known."""
    match = None
    with contextlib.suppress(SchedulerError):
        match = _VERSION.search(call_slurm(["srun", "--version"], seconds=_VERSION_SECONDS).stdout)
    return (int(match[1]), int(match[2])) if match else None


@dataclass(frozen=True)
class SlurmBackend(Backend):
    """Jobs of the cluster that this machine's Slurm commands address.

    ``answers``: known jobs by run directory, so that job() needs no request for them.
    """

    name: ClassVar[str] = "slurm"
    can_probe: ClassVar[bool] = True
    replaces_nodes: ClassVar[bool] = True
    prepares_in_jobs: ClassVar[bool] = True

    answers: Mapping[Path, Job | SchedulerError] = field(default_factory=dict)
    _sites: dict[str, Site] = field(default_factory=dict)  # cache: each command queries the site once

    def prefetched(self, runs: Sequence[RunDir]) -> SlurmBackend:
        """Return a back end with the jobs of all these runs, from one squeue and at most one sacct call."""
        return SlurmBackend(jobs_of_runs(runs))

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        """Return the reasons why the job would wait, and Slurm's estimate of its start.

        Raises SchedulerError with every problem that keeps the job from ever running, or with Slurm's message.
        """
        from scaletrain_cli.launch.backends.slurm.preflight import check_job

        _check_path(runs_root())
        excluded = None if run is None else exclude_option(spec, exclusion_for(run, spec))
        site = self._site(spec)
        return check_job(site, site.with_cores(spec), excluded)

    def render(self, run: RunDir, record: RunRecord) -> str:
        return self._script(run, record, exclusion_for(run, record.spec))

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Queue the job and return its id. If a submitter died after sbatch, return the id of the existing job."""
        _check_path(run.path)
        if (submitted := submitted_job(run, record)) is not None:
            return submitted
        excluded = exclusion_for(run, record.spec)
        job_id = submit_job(run, record, self._script(run, record, excluded))
        record_exclusion(run, excluded)
        return job_id

    def require_array(self, specs: Sequence[RunSpec]) -> None:
        require_one_array(specs)

    def render_array(self, sweep: str, runs: Sequence[tuple[RunDir, RunRecord]], cap: int) -> str:
        return array_script(self._array(sweep, runs, cap))

    def submit_array(
        self, sweep: str, runs: Sequence[tuple[RunDir, RunRecord]], cap: int, *, again: bool
    ) -> Sequence[str]:
        """Queue one job array for the runs and return the id of each task."""
        for run, _ in runs:
            _check_path(run.path)
        known = [submitted_job(run, record) for run, record in runs] if again else []
        queued = [job_id for job_id in known if job_id is not None]
        if len(queued) == len(runs):
            return queued
        if queued:
            raise SchedulerError(Reason("slurm.array-partly-queued", {"sweep": sweep}))
        (first, record), *_ = runs
        excluded = exclusion_for(first, record.spec)
        for run, one in runs:
            replace_file(run.path / "job.sh", self._script(run, one, excluded))
        job_ids = submit_array(self._array(sweep, runs, cap, exclude_option(record.spec, excluded)))
        for run, _ in runs:
            record_exclusion(run, excluded)
        return job_ids

    def preparation_cores(self, cluster: ClusterSpec) -> int:
        return cluster.slurm.preparation.cpus_per_task

    def preparation_tasks(self, cluster: ClusterSpec) -> int | None:
        return cluster.slurm.preparation.tasks

    def submit_preparation(self, run: RunDir, record: RunRecord, tasks: int) -> None:
        _check_path(run.path)
        folder, name = preparation_folder(run), preparation_name(run)
        mark, working = preparation_comment(run, record), Path(record.working_folder or run.path)
        submit_preparation(record.spec, name, folder, working, run.secrets, tasks, mark, record.revision)

    def queue_preparation(self, spec: RunSpec, name: str, folder: Path, tasks: int) -> PreparationJob:
        _check_path(folder)
        return submit_preparation(spec, name, folder, Path.cwd(), RunDir(folder).secrets, tasks, name)

    def preparation_failure(self, run: RunDir, gang: Job) -> Reason | None:
        return failed_preparation(run, gang)

    def was_taken_away(self, run: RunDir, job: Job, last: AttemptRecord | None) -> bool:
        """Return whether Slurm ended the job: for another job, a lost node, its time limit, or by another user.

        A job that Slurm has forgotten counts only if its attempt has reported no end, as when its first node is lost,
        and not all of its nodes were signaled, as those of a job that its owner deletes are.
        """
        if job.cause == "cancelled":
            return cancelled_by_another(job.id)
        if job.cause is not None:
            return True
        if last is None or last.ended is not None:
            return False
        return not (job.forgotten and len(signaled_nodes(run, last.number)) >= max(1, len(last.nodes)))

    def cancel_preparation(self, run: RunDir) -> None:
        cancel_preparation(preparation_name(run))

    def _script(self, run: RunDir, record: RunRecord, excluded: Exclusion) -> str:
        site = self._known_site(record.spec)
        place = read_sweep_place(run)
        return job_script(
            self._with_cores(record.spec),
            record.run_id,
            run.path,
            exclude=exclude_option(record.spec, excluded),
            preemption="" if site is None else preemption_rule(site, record.spec.cluster),
            sizes=record.sizes,
            # Only the first submission of a run is a task of its sweep's array.
            in_array=place is not None and place.array and read_submission(run) is None,
        )

    def _array(
        self, sweep: str, runs: Sequence[tuple[RunDir, RunRecord]], cap: int, exclude: str | None = None
    ) -> ArrayPlan:
        """Return the array, which requests what the scripts of its tasks use."""
        runs = [(run, dataclasses.replace(record, spec=self._with_cores(record.spec))) for run, record in runs]
        return ArrayPlan(sweep, tuple(runs), cap, exclude)

    def _with_cores(self, spec: RunSpec) -> RunSpec:
        """Return the spec with the CPU cores that its job requests; unchanged if Slurm does not answer."""
        site = self._known_site(spec)
        return spec if site is None else site.with_cores(spec)

    def _known_site(self, spec: RunSpec) -> Site | None:
        """Return the site; None if Slurm does not answer, as in a dry run on a laptop."""
        try:
            return self._site(spec)
        except SchedulerError:
            return None

    def _site(self, spec: RunSpec) -> Site:
        key = f"{spec.cluster!r} {sorted(spec.secret_env)}"
        if key not in self._sites:
            self._sites[key] = query_site(spec.cluster, spec.secret_env)
        return self._sites[key]

    def job(self, run: RunDir, record: RunRecord) -> Job:
        answer = self.answers.get(run.path)
        if isinstance(answer, SchedulerError):
            raise answer
        if answer is not None:
            return answer
        return job_of_run(run)

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Signal the ranks of every job of the run to save and exit; delete its queued jobs."""
        cancel_jobs(run)

    def probe(self, spec: RunSpec, plan: RunPlan) -> list[NodeFacts]:
        """Run a short job on the nodes and return the facts of each. Raises WrongNodesError for a mismatch."""
        from scaletrain_cli.launch.backends.slurm.probe import probe_nodes

        return probe_nodes(self._with_cores(spec), plan)

    def max_concurrent(self, cluster: ClusterSpec, requested: int | None, points: int) -> int:
        """Return ``requested``, at most ``points``: a job of the sweep waits for the one before it (afterany)."""
        return min(points, requested or points)

    def has_own_python(self, spec: RunSpec) -> bool:
        """Return whether a script, modules or a container in ``cluster.slurm`` sets up Python on the nodes."""
        slurm = spec.cluster.slurm
        return bool(slurm.activate is not None or slurm.modules or slurm.container is not None)

    def resource_problems(self, view: View) -> Iterator[Problem]:
        """Yield missing files of ``activate`` and ``container``, where their file system is visible here."""
        slurm, container = view.spec.cluster.slurm, view.spec.cluster.slurm.container
        if slurm.activate is not None and is_missing(slurm.activate):
            yield view.problem("cluster.slurm.activate", Reason("slurm.no-activate-script"), slurm.activate)
        if container is None:
            return
        if container.image.startswith("/") and is_missing(container.image):
            yield view.problem("cluster.slurm.container.image", Reason("slurm.no-image"), container.image)
        for index, mount in enumerate(container.mounts):
            source = mount.partition(":")[0]
            if is_missing(source):
                why = Reason("slurm.no-mount-source", {"source": source})
                yield view.problem(f"cluster.slurm.container.mounts.{index}", why, mount)

    def node_command(self, run: RunDir, record: RunRecord, node: JobNode) -> NodeCommand:
        """Return srun for a step that shares the resources of the running one, its devices too (Slurm 22.05)."""
        words = session_command(record.spec, run.path, node)
        return NodeCommand(words, absolute_paths(passed_on(record.spec.secret_env)))

    def job_log(self, run: RunDir, job_id: str) -> Path | None:
        log = run.path / f"slurm-{job_id}.log"
        return log if log.is_file() else None

    def explain_waiting(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        from scaletrain_cli.launch.backends.slurm.explain import why_it_waits

        try:
            finding = why_it_waits(status.job_id, run.run_id)
            if finding.cause == "dependency" and read_job(preparation_folder(run)) is not None:
                return why_it_is_not_prepared(run, finding)
            return finding
        except SchedulerError as error:
            evidence = (Evidence.because("Slurm", error.reason or recorded(error.message)),)
            return Finding.because("unknown", Reason("slurm.wait-no-answer"), evidence)

    def explain_never_began(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        from scaletrain_cli.launch.backends.slurm.explain import how_it_ended

        finding = super().explain_never_began(run, record, status)
        if not status.job_id:
            return finding
        more = how_it_ended(status.job_id, run.path / f"slurm-{status.job_id}.log")
        return dataclasses.replace(finding, evidence=(*finding.evidence, *more))

    def actions_if_suspended(self, job_id: str) -> tuple[str, ...]:
        return (str(Reason("slurm.resume-suspended", {"job": job_id})),)

    def is_available(self) -> bool:
        return shutil.which("sbatch") is not None

    def has_this_machine(self) -> bool:
        return shutil.which("sinfo") is not None

    def cluster_view(self, cluster: ClusterSpec) -> ClusterView:
        from scaletrain_cli.launch.backends.slurm.explain import QUEUE, make_view

        # Without --states, whose RUNNING and PENDING are only those without a flag, such as STOPPED and REQUEUE_HOLD.
        text = call_slurm(["squeue", "--noheader", "--all", f"--format={QUEUE}"]).stdout
        return make_view(query_site(cluster), text)

    def checks(self) -> Iterator[Check]:
        yield commands_check()


def _check_path(path: Path) -> None:
    if "%" in str(path) or "\\" in str(path):
        raise SchedulerError(Reason("slurm.path-with-patterns", {"path": str(path)}))
