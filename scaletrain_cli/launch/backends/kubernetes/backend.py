"""The Kubernetes back end: renders, submits, observes and deletes the jobs of runs through the API server."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.base import Backend, Check, JobNode, NodeCommand, PreflightResult, ViewWaitsError
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, connect, default_namespace, is_configured
from scaletrain_cli.launch.backends.kubernetes.api_kinds import BACKENDS, TRAIN_JOB, Object, kind_of
from scaletrain_cli.launch.backends.kubernetes.capacity import exclusion_for
from scaletrain_cli.launch.backends.kubernetes.code_store import upload_code
from scaletrain_cli.launch.backends.kubernetes.conditions import (
    Explanation,
    StuckJob,
    job_of,
    steps_reported,
    stuck_jobs,
)
from scaletrain_cli.launch.backends.kubernetes.job_ref import (
    JobRef,
    confirmed,
    job_ref_of,
    next_submission_number,
    previous_job_ref,
    record_end,
    record_progress,
    shares_volume,
    submission_recorded,
    update,
)
from scaletrain_cli.launch.backends.kubernetes.manifest import (
    Manifest,
    documents_for,
    has_archive,
    manifest,
    notes,
    to_yaml,
)
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.backends.kubernetes.names import Workload, parse_id
from scaletrain_cli.launch.backends.kubernetes.objects import (
    apply_owned,
    delete_workload,
    force_delete,
    refuse_foreign,
    remove_leftovers,
    stop_requested,
)
from scaletrain_cli.launch.backends.kubernetes.observation import Observation, observe
from scaletrain_cli.launch.backends.kubernetes.pod_logs import PodLogs, newest_progress
from scaletrain_cli.launch.backends.kubernetes.preparation import (
    await_job,
    await_sizes,
    delete_jobs,
    job_of_preparation,
    objects_of_run,
    pending_job,
    queue_for_spec,
    submit_for_run,
)
from scaletrain_cli.launch.backends.kubernetes.view_pod import session_command
from scaletrain_cli.launch.code import take_snapshot
from scaletrain_cli.launch.job import Job, open_request
from scaletrain_cli.launch.submit import make_record
from scaletrain_cli.plan.data_size import DataSize
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.rundir.bad_nodes import Exclusion
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.preparation import PreparationJob, preparation_folder, read_failure, read_job
from scaletrain_cli.rundir.record import CodeRecord, RunRecord, read_record
from scaletrain_cli.safe_files import touch
from scaletrain_cli.spec import ClusterSpec, RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.cluster_view import ClusterView
    from scaletrain_cli.launch.finding import Finding
    from scaletrain_cli.launch.run_status import RunStatus

_CHECK_SECONDS = 10  # timeout of `scaletrain doctor`


@dataclass(frozen=True)
class KubernetesBackend(Backend):
    """Jobs of the clusters in the kubeconfig. ``connect`` opens a connection to one; tests replace it."""

    name: ClassVar[str] = "kubernetes"
    output_format: ClassVar[Literal["script", "yaml"]] = "yaml"
    can_force: ClassVar[bool] = True
    replaces_nodes: ClassVar[bool] = False  # pods restart only as a whole gang
    prepares_in_jobs: ClassVar[bool] = True

    connect: Callable[[str | None, str], Cluster] = connect

    def with_local_defaults(self, spec: RunSpec) -> RunSpec:
        """Return the spec with the namespace of the kubeconfig's context, if it names none."""
        kubernetes = spec.cluster.kubernetes
        if kubernetes.namespace is not None:
            return spec
        named = kubernetes.model_copy(update={"namespace": default_namespace(kubernetes.context)})
        return spec.with_changes("cluster", kubernetes=named)

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        """Check everything that would keep the job from starting, and let the server validate each object.

        Raises SchedulerError with all problems at once.
        """
        from scaletrain_cli.launch.backends.kubernetes.preflight import check

        # An unused name, so that the server validates the objects as new ones.
        name = f"preflight-{secrets.token_hex(4)}"
        spec = self.with_local_defaults(spec)
        if run is None:
            record = make_record(spec, plan, name, take_snapshot(spec))
            documents = documents_for(RunDir(runs_root() / name), record)
        else:  # with the code kept in the run directory, not the current working tree
            record = dataclasses.replace(read_record(run), run_id=name, spec=spec, plan=plan, code=code)
            documents = documents_for(run, record)
        rendered = manifest(record, documents)
        return check(self._cluster(spec), spec, rendered, run if run is not None and shares_volume(run) else None)

    def prepares_itself(self, cluster: ClusterSpec) -> bool:
        """Return whether the pod of a run has its own volume, on which only it can prepare the data."""
        return cluster.kubernetes.runs.per_pod

    def preparation_cores(self, cluster: ClusterSpec) -> int:
        return cluster.kubernetes.preparation.cpus

    def preparation_tasks(self, cluster: ClusterSpec) -> int | None:
        return cluster.kubernetes.preparation.tasks

    def submit_preparation(self, run: RunDir, record: RunRecord, tasks: int) -> None:
        """Create the Job whose pods prepare the data; submit() creates the gang only after await_preparation()."""
        submit_for_run(self._cluster(record.spec), run, record)

    def await_preparation(self, run: RunDir, record: RunRecord, say: Callable[[str], None]) -> None:
        """Wait for the Job. An interruption leaves it as it is: the next submission goes on."""
        await_job(self._cluster(record.spec), run, record, say)

    def queue_preparation(self, spec: RunSpec, name: str, folder: Path, tasks: int) -> PreparationJob:
        """Create the Job; ``folder`` is not used, since its files would be on another volume."""
        spec = self.with_local_defaults(spec)
        return queue_for_spec(self._cluster(spec), spec, name, tasks)

    def sizes_of_preparation(self, job: PreparationJob, say: Callable[[str], None]) -> dict[str, DataSize]:
        """Wait for the Job, and return what its pods have counted."""
        return await_sizes(self.connect(job.context, job.namespace), job, say)

    def render_preparation(self, run: RunDir, record: RunRecord) -> str:
        """Return the objects of the preparation as YAML; none for a run whose pod prepares its data itself."""
        return "" if record.spec.cluster.kubernetes.runs.per_pod else to_yaml(objects_of_run(run, record))

    def render(self, run: RunDir, record: RunRecord) -> str:
        return to_yaml(self._manifest(run, record, lambda: self._cluster(record.spec))[0].objects)

    def notes(self, spec: RunSpec) -> Iterable[Reason]:
        return notes(spec)

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Apply the objects and return the job id. Objects of an interrupted submission are kept."""
        cluster = self._cluster(record.spec)
        rendered, excluded = self._manifest(run, record, lambda: cluster)
        spec, workload = record.spec.cluster.kubernetes, rendered.workload
        existing = cluster.get(kind_of(rendered.workload_object), spec.used_namespace, workload.name)
        if existing is not None:
            refuse_foreign(cluster, existing, rendered, record)
        else:  # of a request that was lost: nothing can change its ConfigMap
            remove_leftovers(cluster, workload, spec.used_namespace, record)
        if not has_archive(rendered.objects[0].get("binaryData", {})):
            upload_code(run, record)
        try:
            with submission_recorded(run, JobRef(workload.id, spec.used_namespace, spec.context)):
                apply_owned(cluster, rendered.objects, existing)
        except SchedulerSilentError as error:
            failure = error.reason or recorded(error.message)
            raise SchedulerSilentError(reason("submission-unanswered", failure=failure, run=run.run_id)) from error
        if excluded.nodes or excluded.spared:
            record_event(run, "nodes-excluded", **excluded.to_event())
        return workload.id

    def job(self, run: RunDir, record: RunRecord) -> Job:
        """Return the state of the run's latest job, or of the preparation after which it is created."""
        if (preparing := pending_job(run, record)) is not None:
            return job_of_preparation(self.connect(preparing.context, preparing.namespace), run, record, preparing)
        if (ref := job_ref_of(run, record)) is None:
            return Explanation(reason("never-submitted")).job("", "unknown")
        return self._job_at(run, record, ref)

    def _job_at(self, run: RunDir, record: RunRecord, ref: JobRef) -> Job:
        """Return the job of this reference, and record its state if the run directory is writable."""
        if ref.ended:  # final, and its object may have been deleted
            return Job(
                ref.job_id,
                "ended",
                ref.detail,
                exit_code=ref.exit_code,
                progress=ref.progress,
                forgotten=ref.forgotten,
                reason=None if ref.reason is None else reason_from(ref.reason),
            )
        try:
            cluster, seen = self._observe(ref, record)
        except UsageError as error:  # the client is not installed; the run directory has most of the status
            raise SchedulerError(error.reason or error.message) from error
        now = time.time()
        if not ref.confirmed:
            if seen.workload is not None:
                with contextlib.suppress(OSError):
                    update(run, ref, confirmed(ref))
                ref = confirmed(ref)
            elif not seen.pods and all(_has_ended(other) for other in seen.others):
                return self._job_of_lost_request(run, record, ref, now)
        job = job_of(seen, ref.job_id, now, cancelled=run.is_cancelled)
        if job.state == "ended" and (earlier := self._active_earlier(cluster, ref, record, seen, now)) is not None:
            return earlier
        if not shares_volume(run) and seen.workload is not None and job.state in ("running", "ending", "ended"):
            progress = newest_progress(cluster, ref, seen) or steps_reported(seen.pods)
            job = dataclasses.replace(job, progress={**ref.progress, **progress})
            if job.is_active:
                with contextlib.suppress(OSError):
                    record_progress(run, ref, job.progress)
        if job.state == "ended":
            with contextlib.suppress(OSError):
                record_end(run, ref, job)
        return job if job.progress else dataclasses.replace(job, progress=ref.progress)

    def _job_of_lost_request(self, run: RunDir, record: RunRecord, ref: JobRef, now: float) -> Job:
        """Return the job of an unanswered request for which the API server has no object now."""
        wait = ref.unsettled_seconds(now)
        if wait:
            asked = time.strftime("%H:%M:%S", time.localtime(ref.asked))
            pending = reason("request-pending", asked=asked, job=ref.job_id, seconds=math.ceil(wait))
            return Explanation(pending).job(ref.job_id, "unknown")
        before = previous_job_ref(run, ref)
        with contextlib.suppress(OSError):
            update(run, ref, before)
        if before is not None:
            return self._job_at(run, record, before)
        return Explanation(reason("request-lost", job=ref.job_id)).job("", "unknown")

    def _active_earlier(
        self, cluster: Cluster, ref: JobRef, record: RunRecord, seen: Observation, now: float
    ) -> Job | None:
        """Return an earlier job of this run that is still active although a later one was submitted."""
        for other in seen.others:
            backend = ref.job_id.partition("/")[0]
            job_id = f"{backend}/{other['metadata']['name']}"
            if _has_ended(other):
                continue
            job = job_of(observe(cluster, ref.namespace, job_id, record), job_id, now)
            if job.is_active:
                other_job = reason("other-job-active", job=job_id)
                return dataclasses.replace(job, detail=f"{other_job}: {job.detail}")
        return None

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Delete the run's workloads, after their pods: each pod gets SIGTERM and its full grace period to save.

        Raises SchedulerError, with nothing changed, if the server refuses, or if it may still create the job of an
        unanswered request. The object of a JobSet or Volcano Job exists until its last pod is deleted. Before the
        workload exists, the Job that prepares the data is deleted.
        """
        if (preparing := pending_job(run, record)) is not None:
            delete_jobs(self.connect(preparing.context, preparing.namespace), preparing.namespace, record)
            touch(run.stop_file)
            record_event(run, "cancelled", job_id=preparing.job_id)
            return
        if (ref := job_ref_of(run, record)) is None:
            self._remove_lost(run, record)
            touch(run.stop_file)
            record_event(run, "cancelled")
            return
        cluster, seen = self._observe(ref, record)
        wait = ref.unsettled_seconds(time.time())
        if wait and seen.workload is None and not seen.pods:
            params = {"where": cluster.where, "job": ref.job_id, "run": run.run_id, "seconds": math.ceil(wait)}
            raise SchedulerError(reason("cancel-unsettled", **params))
        kind = BACKENDS[parse_id(ref.job_id)[0]]
        named = () if seen.workload is None else (seen.workload,)
        targets = [
            *(one for one in named if not one["metadata"].get("deletionTimestamp") or kind is TRAIN_JOB),
            *(one for one in seen.others if not one["metadata"].get("deletionTimestamp") and not _has_ended(one)),
        ]
        for one in targets:  # check all of them before anything is changed
            delete_workload(cluster, kind, ref.namespace, one, dry_run=True)
        with stop_requested(run, cluster, kind, ref.namespace, targets):
            for one in targets:
                delete_workload(cluster, kind, ref.namespace, one)
        if targets:
            with contextlib.suppress(SchedulerError):  # the output is deleted with the pods
                self._logs(run, record, ref, cluster).fetch()
        else:
            self._remove_lost(run, record)
        if not (seen.pods and shares_volume(run)):  # else the first pod records it, once all have saved
            record_event(run, "cancelled", job_id=ref.job_id)

    def _remove_lost(self, run: RunDir, record: RunRecord) -> None:
        """Delete what a request without an answer has left; its number is that of the next submission."""
        spec = record.spec.cluster.kubernetes
        lost = Workload(record.run_id, next_submission_number(run), backend=spec.backend)
        with contextlib.suppress(SchedulerError, UsageError):  # the run is cancelled, even if it cannot be deleted
            if open_request(run) is not None:
                remove_leftovers(self._cluster(record.spec), lost, spec.used_namespace, record)

    def remove_ended(self, run: RunDir, record: RunRecord) -> list[str]:
        """Delete the run's workloads, all of which have ended, with their dependents; return their names."""
        prepared = read_job(preparation_folder(run))
        removed = []
        if prepared is not None and prepared.scheduler == self.name:
            removed = delete_jobs(self.connect(prepared.context, prepared.namespace), prepared.namespace, record)
        if (ref := job_ref_of(run, record)) is None:
            return removed
        cluster, seen = self._observe(ref, record)
        kind = BACKENDS[parse_id(ref.job_id)[0]]
        targets = [one for one in (seen.workload, *seen.others) if one is not None and _has_ended(one)]
        for one in targets:
            delete_workload(cluster, kind, ref.namespace, one)
        return [*removed, *(str(one["metadata"]["name"]) for one in targets)]

    def logs(self, run: RunDir, record: RunRecord) -> PodLogs | None:
        """Return the fetcher of the pods' output; None if this machine sees their files, or there is no job."""
        ref = job_ref_of(run, record)
        if ref is None or shares_volume(run):
            return None  # the pods of a job that has ended may still exist
        return self._logs(run, record, ref, self.connect(ref.context, ref.namespace))

    def node_command(self, run: RunDir, record: RunRecord, node: JobNode) -> NodeCommand:
        ref = job_ref_of(run, record)
        assert ref is not None  # the job runs
        cluster, seen = self._observe(ref, record)
        return NodeCommand(session_command(ref, seen.pods, record, node, cluster.where))

    @contextlib.contextmanager
    def view_command(self, run: RunDir, record: RunRecord, say: Callable[[str], None]) -> Iterator[NodeCommand]:
        """Yield kubectl for a process in a running pod of the run; once the run is over, in a pod made for the view."""
        from scaletrain_cli.launch.backends.kubernetes.view_pod import pod_for_view, serving_pod, view_in_pod

        ref = job_ref_of(run, record)
        if ref is None or pending_job(run, record) is not None:
            why = reason("view-never-ran", run=run.run_id)
            is_final = run.is_cancelled or read_failure(preparation_folder(run)) is not None  # until a resume
            raise SchedulerError(why) if is_final else ViewWaitsError(why)
        if shutil.which("kubectl") is None:  # nothing is created in the cluster for it then
            raise SchedulerError(Reason("launch.session-no-command", {"command": "kubectl"}))
        cluster, seen = self._observe(ref, record)
        if (serving := serving_pod(record, seen.pods)) is not None:
            yield NodeCommand(view_in_pod(ref, str(serving["metadata"]["name"]), record))
            return
        job = job_of(seen, ref.job_id, time.time(), cancelled=run.is_cancelled)
        if job.state in ("queued", "running", "suspended") or (job.state == "unknown" and not ref.ended):
            raise ViewWaitsError(reason("view-waits", run=run.run_id, state=job.state))
        with pod_for_view(cluster, ref, record, seen.pods, say) as name:
            yield NodeCommand(view_in_pod(ref, name, record))

    def findings(self, run: RunDir, record: RunRecord) -> list[StuckJob]:
        """Return why the job never ends by itself; empty if nothing keeps it from ending."""
        ref = job_ref_of(run, record)
        return [] if ref is None else stuck_jobs(self._observe(ref, record)[1], time.time())

    def force(self, run: RunDir, record: RunRecord) -> list[str]:
        """Delete the pods of dead nodes; return their names. Only safe if the nodes are powered off."""
        if (ref := job_ref_of(run, record)) is None:
            return []
        cluster, seen = self._observe(ref, record)
        removed = force_delete(cluster, ref.namespace, seen, time.time())
        if removed:
            record_event(run, "pods-force-deleted", pods=removed)
        return removed

    def max_concurrent(self, cluster: ClusterSpec, requested: int | None, points: int) -> int:
        """Return ``points``: the quota of a queue limits them. Raises UsageError for any ``requested``."""
        if requested is not None:
            raise UsageError(reason("max-concurrent", given=requested))
        return points

    def has_own_python(self, spec: RunSpec) -> bool:
        """Return True: the ranks use the Python of the image."""
        return True

    def passes_on(self, spec: RunSpec, name: str, environment: Mapping[str, str]) -> bool:
        """Return whether a Secret supplies the variable: the environment of the submitting machine is not sent."""
        return name in spec.cluster.kubernetes.secrets

    def secret_hint(self, name: str) -> str:
        return f"Add {name} to secret_env and to cluster.kubernetes.secrets"

    def run_directory_mode(self) -> int | None:
        """Return the mode for pods, which write as another user with the volume's group."""
        return 0o770

    def preflight_settings(self) -> tuple[str, ...]:
        """Return overrides that delete the objects of the short run soon after its end."""
        return ("cluster.kubernetes.ttl_seconds_after_finished=10m",)

    def latest_job_id(self, run: RunDir, record: RunRecord, submitted: str) -> str:
        """Return the id of the submitted job, also of one whose answer was lost."""
        ref = job_ref_of(run, record)
        return "" if ref is None else ref.job_id

    def explain_stuck(self, run: RunDir, record: RunRecord, status: RunStatus) -> Iterator[Finding]:
        """Yield the conditions that keep pods from starting or ending; nothing if the server does not answer."""
        from scaletrain_cli.launch.backends.kubernetes.explain import what_never_ends

        with contextlib.suppress(SchedulerError):  # the status reports the error
            yield from what_never_ends(run, record, self.findings(run, record))

    def explain_waiting(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        from scaletrain_cli.launch.backends.kubernetes.explain import why_it_waits

        return why_it_waits(run, record, status)

    def explain_never_began(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return how the job ended. Its attempts may be on a volume that is not visible here."""
        from scaletrain_cli.launch.backends.kubernetes.explain import how_it_ended

        return how_it_ended(run, status)

    def is_available(self) -> bool:
        """Return whether there is a kubeconfig, or this process is in a pod."""
        return is_configured()

    def cluster_view(self, cluster: ClusterSpec) -> ClusterView:
        from scaletrain_cli.launch.backends.kubernetes.cluster_view import kubernetes_view

        return kubernetes_view(cluster.kubernetes)

    def checks(self) -> Iterator[Check]:
        name = self.name
        if not is_configured():
            yield Check(name, "none", "no kubeconfig", "required for cluster.scheduler: kubernetes; set $KUBECONFIG")
            return
        try:
            cluster = self.connect(None, default_namespace(None))
            yield Check(name, "ok", f"{cluster.version(_CHECK_SECONDS)}, {cluster.where}")
        except UsageError as error:
            yield Check(name, "none", "kubeconfig found, but no client", str(error))
        except SchedulerError as error:
            yield Check(name, "warn", "the cluster of the current context does not answer", str(error))

    def _cluster(self, spec: RunSpec) -> Cluster:
        return self.connect(spec.cluster.kubernetes.context, spec.cluster.kubernetes.used_namespace)

    def _observe(self, ref: JobRef, record: RunRecord) -> tuple[Cluster, Observation]:
        cluster = self.connect(ref.context, ref.namespace)
        return cluster, observe(cluster, ref.namespace, ref.job_id, record)

    def _logs(self, run: RunDir, record: RunRecord, ref: JobRef, cluster: Cluster) -> PodLogs:
        return PodLogs(run, cluster, ref, record.spec.cluster.gpus_per_node)

    def _manifest(self, run: RunDir, record: RunRecord, reach: Callable[[], Cluster]) -> tuple[Manifest, Exclusion]:
        excluded = exclusion_for(run, record.spec, reach)
        number = next_submission_number(run)
        return manifest(record, documents_for(run, record), number, excluded.nodes), excluded


def _has_ended(workload: Object) -> bool:
    return not job_of(Observation(workload), "", time.time()).is_active
