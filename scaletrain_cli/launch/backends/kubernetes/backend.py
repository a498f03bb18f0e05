"""The Kubernetes scheduler: what is rendered is applied, looked at, and deleted, by the API server alone.

The objects are manifest's, the checks preflight's, the meaning of what is seen conditions'. This is the order of calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.launch.backends.base import Backend, Check, Job, PreflightResult
from scaletrain_cli.launch.backends.cluster_view import ClusterView
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, connect, is_configured
from scaletrain_cli.launch.backends.kubernetes.api_errors import RefusedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import (
    BACKENDS,
    CONFIG_MAP,
    NATIVE_POD_GROUP,
    RUNTIME,
    TRAIN_JOB,
    Kind,
    Object,
    kind_of,
)
from scaletrain_cli.launch.backends.kubernetes.conditions import CANCELLED, job_of
from scaletrain_cli.launch.backends.kubernetes.job_ref import (
    JobRef,
    confirmed,
    job_ref_of,
    previous_job_ref,
    read_job_ref,
    record_end,
    record_progress,
    shares_volume,
    submission_recorded,
    update,
    withdraw_intent,
)
from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest, documents_for, manifest, to_yaml
from scaletrain_cli.launch.backends.kubernetes.names import (
    DOCUMENTS_ANNOTATION,
    NODE,
    RECORD_ANNOTATION,
    REVISION_ANNOTATION,
    RUN_ID_ANNOTATION,
    Workload,
    belongs_to,
    parse_id,
    submission_number,
)
from scaletrain_cli.launch.backends.kubernetes.nodes import exclusion_for
from scaletrain_cli.launch.backends.kubernetes.observation import Observation, index_of, observe, own_container, reports
from scaletrain_cli.launch.backends.kubernetes.pod_logs import PodLogs
from scaletrain_cli.launch.backends.kubernetes.pod_output import progress_in
from scaletrain_cli.launch.backends.kubernetes.watchdog import StuckJob, force_delete, stuck_jobs
from scaletrain_cli.launch.backends.kubernetes.workloads import misses_runtime
from scaletrain_cli.launch.code.snapshot import take_snapshot
from scaletrain_cli.launch.node_exclusion import Exclusion
from scaletrain_cli.launch.submit import make_record, read_submission
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.rundir.code import CodeRecord
from scaletrain_cli.rundir.journal import record_event
from scaletrain_cli.rundir.paths import RunDir, runs_root
from scaletrain_cli.rundir.record import RunRecord, read_record
from scaletrain_cli.safe_files import touch
from scaletrain_cli.spec import ClusterSpec, RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.attempts import AttemptRecord
    from scaletrain_cli.launch.finding import Finding
    from scaletrain_cli.launch.resource_checks.view import View
    from scaletrain_cli.launch.status import RunStatus

_LINES_LOOKED_AT = 200  # of pod 0, for the newest step
_RUNTIME_SECONDS = 15.0  # until webhooks, which read from caches, have seen a runtime that was just made
_RETRY_SECONDS = 0.5
_CHECK_SECONDS = 10  # of `scaletrain doctor`, which must not hang
_SERVER_TROUBLE = 500  # and above: no answer to what was asked
_LOST_ANSWER_PAUSES = (1.0, 3.0)  # before a request without an answer is made again


@dataclass(frozen=True)
class KubernetesBackend(Backend):
    """Jobs of the clusters that the kubeconfig names. ``connect`` is how one is reached; tests put their own there."""

    name: ClassVar[str] = "kubernetes"
    output_format: ClassVar[Literal["script", "yaml"]] = "yaml"
    can_force: ClassVar[bool] = True
    replaces_nodes: ClassVar[bool] = False  # a pod is only moved with its gang

    connect: Callable[[str | None, str], Cluster] = connect

    def preflight(
        self, spec: RunSpec, plan: RunPlan, run: RunDir | None = None, code: CodeRecord | None = None
    ) -> PreflightResult:
        """Look for everything that would keep the job from starting, and let the server judge each object.

        Raises SchedulerError with all problems at once.
        """
        from scaletrain_cli.launch.backends.kubernetes.preflight import check

        # A name that nobody has: the server judges the objects as if they were to be made now.
        name = f"preflight-{secrets.token_hex(4)}"
        if run is None:
            record = make_record(spec, plan, name, take_snapshot(spec))
            documents = documents_for(RunDir(runs_root() / name), record)
        else:  # the code is that which is kept with it, whatever has become of the tree
            record = dataclasses.replace(read_record(run), run_id=name, spec=spec, plan=plan, code=code)
            documents = documents_for(run, record)
        rendered = manifest(record, documents)
        seen = run if run is not None and shares_volume(run) else None
        return check(self._cluster(spec), spec, rendered, seen)

    def render(self, run: RunDir, record: RunRecord) -> str:
        return to_yaml(self._manifest(run, record, lambda: self._cluster(record.spec))[0].objects)

    def submit(self, run: RunDir, record: RunRecord) -> str:
        """Apply the objects, unless they are there: a submitter may have died after that."""
        cluster = self._cluster(record.spec)
        rendered, excluded = self._manifest(run, record, lambda: cluster)
        spec, workload = record.spec.cluster.kubernetes, rendered.workload
        found = cluster.get(kind_of(rendered.workload_object), spec.namespace, workload.name)
        if found is not None:
            _refuse_anothers(cluster, found, rendered, record)
        try:
            with submission_recorded(run, JobRef(workload.id, spec.namespace, spec.context)):
                _apply(cluster, rendered, found)
        except SchedulerSilentError as error:
            raise SchedulerSilentError(
                f"{error.message} The run is {run.run_id}: `scaletrain status {run.run_id}` looks for its job, and "
                f"`scaletrain cancel {run.run_id}` removes it. Submitting or resuming it again makes no second one."
            ) from error
        if excluded.nodes or excluded.spared:
            record_event(run, "nodes-excluded", nodes=excluded.nodes, spared=excluded.spared, why=excluded.why)
        return workload.id

    def job(self, run: RunDir, record: RunRecord) -> Job:
        place = job_ref_of(run, record)
        if place is None:
            return Job("", "unknown", "never submitted")
        return self._job_at(run, record, place)

    def _job_at(self, run: RunDir, record: RunRecord, place: JobRef) -> Job:
        """The job at this place. What is learned is kept, where this user may write to the run directory."""
        if place.ended:  # nothing brings it back, and its object may be gone
            return Job(
                place.job_id,
                "ended",
                place.detail,
                exit_code=place.exit_code,
                progress=place.progress,
                forgotten=place.forgotten,
            )
        try:
            cluster, seen = self._look(place, record)
        except UsageError as error:  # no client here: the run directory may still tell most of it
            raise SchedulerError(error.message) from error
        now = time.time()
        if not place.confirmed:
            if seen.workload is not None:
                with contextlib.suppress(OSError):
                    update(run, place, confirmed(place))
                place = confirmed(place)
            elif not seen.pods and all(_has_ended(other) for other in seen.others):
                return self._job_of_lost_request(run, record, place, now)
        job = job_of(seen, place.job_id, now, cancelled=run.is_told_to_stop)
        if job.state == "ended" and (earlier := self._active_earlier(cluster, place, record, seen, now)) is not None:
            return earlier
        if not shares_volume(run) and seen.workload is not None and job.state in ("running", "ending", "ended"):
            progress = _progress(cluster, place, seen)
            job = dataclasses.replace(job, progress={**place.progress, **progress})
            if job.is_active:
                with contextlib.suppress(OSError):
                    record_progress(run, place, job.progress)
        if job.state == "ended":
            with contextlib.suppress(OSError):
                record_end(run, place, job)
        return job if job.progress else dataclasses.replace(job, progress=place.progress)

    def _job_of_lost_request(self, run: RunDir, record: RunRecord, place: JobRef, now: float) -> Job:
        """The API server did not answer, and has nothing of the job now."""
        wait = place.unsettled_seconds(now)
        if wait:
            asked = time.strftime("%H:%M:%S", time.localtime(place.asked))
            words = f"the API server was asked at {asked}, has not answered and has nothing of {place.job_id} so far"
            return Job(place.job_id, "unknown", f"{words}; whether it takes it is known in {math.ceil(wait)} s")
        with contextlib.suppress(OSError):
            withdraw_intent(run, place)
        if (before := previous_job_ref(run, place)) is not None:
            return self._job_at(run, record, before)
        return Job("", "unknown", f"never submitted: the API server did not answer, and has nothing of {place.job_id}")

    def _active_earlier(
        self, cluster: Cluster, place: JobRef, record: RunRecord, seen: Observation, now: float
    ) -> Job | None:
        """An earlier job of this run that still lives, although a later one was submitted."""
        for other in seen.others:
            backend = place.job_id.partition("/")[0]
            job_id = f"{backend}/{other['metadata']['name']}"
            if _has_ended(other):
                continue
            job = job_of(observe(cluster, place.namespace, job_id, record), job_id, now)
            if job.is_active:
                return dataclasses.replace(job, detail=f"{job_id}, another job of this run: {job.detail}")
        return None

    def cancel(self, run: RunDir, record: RunRecord) -> None:
        """Delete the run's workloads, their pods before them: each gets SIGTERM and its whole grace period to save.

        Raises SchedulerError, with nothing changed, where the server refuses, or may still take a job that it has not
        answered for. The object of a JobSet or Volcano Job stays until its last pod is gone.
        """
        place = job_ref_of(run, record)
        if place is None:
            touch(run.stop_file)
            record_event(run, "cancelled")
            return
        cluster, seen = self._look(place, record)
        wait = place.unsettled_seconds(time.time())
        if wait and seen.workload is None and not seen.pods:
            raise SchedulerError(
                f"{cluster.where} has not answered for {place.job_id} and may still take it. Repeat "
                f"`scaletrain cancel {run.run_id}` in {math.ceil(wait)} s; nothing was changed."
            )
        kind = BACKENDS[parse_id(place.job_id)[0]]
        named = () if seen.workload is None else (seen.workload,)
        doomed = [
            *(one for one in named if not one["metadata"].get("deletionTimestamp") or kind is TRAIN_JOB),
            *(one for one in seen.others if not one["metadata"].get("deletionTimestamp") and not _has_ended(one)),
        ]
        for one in doomed:  # asked before anything is changed
            _delete(cluster, kind, place.namespace, one, dry_run=True)
        with _stop_requested(run, cluster, kind, place.namespace, doomed):
            for one in doomed:
                _delete(cluster, kind, place.namespace, one)
        if doomed:
            with contextlib.suppress(SchedulerError):  # the pods take their output along when they go
                self._logs(run, record, place, cluster).bring()
        elif seen.workload is None and not place.confirmed:
            _remove_leftovers(cluster, place, record)
        if not (seen.pods and shares_volume(run)):  # else the first pod records it, once all have saved
            record_event(run, "cancelled", job_id=place.job_id)

    def remove_ended(self, run: RunDir, record: RunRecord) -> list[str]:
        """Delete the run's workloads, all of which are over; return their names. What they own goes with them."""
        place = job_ref_of(run, record)
        if place is None:
            return []
        cluster, seen = self._look(place, record)
        kind = BACKENDS[parse_id(place.job_id)[0]]
        doomed = [one for one in (seen.workload, *seen.others) if one is not None and _has_ended(one)]
        for one in doomed:
            _delete(cluster, kind, place.namespace, one)
        return [str(one["metadata"]["name"]) for one in doomed]

    def logs(self, run: RunDir, record: RunRecord) -> PodLogs | None:
        """What brings the pods' output here; None where it is here already, or there is no job."""
        place = job_ref_of(run, record)
        if place is None or shares_volume(run):
            return None  # of a job that has ended, the pods may still be there
        return self._logs(run, record, place, self.connect(place.context, place.namespace))

    def findings(self, run: RunDir, record: RunRecord) -> list[StuckJob]:
        """What the job would wait for in vain; empty in the good case."""
        place = job_ref_of(run, record)
        return [] if place is None else stuck_jobs(self._look(place, record)[1], time.time())

    def force(self, run: RunDir, record: RunRecord) -> list[str]:
        """Remove pods of dead nodes; returns their names. Only for who knows that the nodes are off."""
        place = job_ref_of(run, record)
        if place is None:
            return []
        cluster, seen = self._look(place, record)
        removed = force_delete(cluster, place.namespace, seen, time.time())
        if removed:
            record_event(run, "pods-force-deleted", pods=removed)
        return removed

    def max_concurrent(self, cluster: ClusterSpec, wanted: int | None, points: int) -> int:
        """Return ``points``: the quota of a queue limits them. Raises UsageError for any ``wanted``."""
        if wanted is not None:
            raise UsageError(
                f"--max-concurrent {wanted}: on Kubernetes a queue's quota is what keeps runs apart. Leave the option "
                "out, and name a queue that holds as many as are to run at once."
            )
        return points

    def unseen_place(self, view: View, path: str) -> str:
        """Return ``in the pods``, which have file systems of their own."""
        return "in the pods"

    def has_own_python(self, spec: RunSpec) -> bool:
        """Return True: it is in the image."""
        return True

    def passes_on(self, spec: RunSpec, name: str, environment: Mapping[str, str]) -> bool:
        """Return whether a Secret holds the variable: the environment of the submitting machine is not sent."""
        return name in spec.cluster.kubernetes.secrets

    def secret_hint(self, name: str) -> str:
        """Return that the secret must be named in the section too."""
        return f"Add {name} to secret_env and to cluster.kubernetes.secrets"

    def run_directory_mode(self) -> int | None:
        """Return the mode for pods, which write as a user of their own with the group of the volume."""
        return 0o770

    def preflight_settings(self) -> tuple[str, ...]:
        """Return that the objects of the short run go soon."""
        return ("cluster.kubernetes.ttl_seconds_after_finished=10m",)

    def latest_job_id(self, run: RunDir, record: RunRecord, submitted: str) -> str:
        """Return the id of the job that was sent, or may have been: the answer may have been lost."""
        place = job_ref_of(run, record)
        return "" if place is None else place.job_id

    def explain_stuck(self, run: RunDir, record: RunRecord, status: RunStatus) -> Iterator[Finding]:
        """Yield what keeps the pods from starting or from ending; nothing where the server does not answer."""
        from scaletrain_cli.launch.backends.kubernetes.explain import what_never_ends

        with contextlib.suppress(SchedulerError):  # the status reports that
            yield from what_never_ends(self.findings(run, record))

    def explain_waiting(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return why the pods wait, from the conditions of the job and the queue."""
        from scaletrain_cli.launch.backends.kubernetes.explain import why_it_waits

        return why_it_waits(run, record, status)

    def explain_never_began(self, run: RunDir, record: RunRecord, status: RunStatus) -> Finding:
        """Return how the job ended. Its attempts may be on a volume that is not visible here."""
        from scaletrain_cli.launch.backends.kubernetes.explain import how_it_ended

        return how_it_ended(run, status)

    def restarts_lost_nodes_free(self, attempt: AttemptRecord) -> bool:
        """Return True for all but Volcano, which counts each restart."""
        return not attempt.job_id.startswith("volcano/")

    def is_available(self) -> bool:
        """Return whether there is a kubeconfig, or this process is in a pod."""
        return is_configured()

    def cluster_view(self, cluster: ClusterSpec) -> ClusterView:
        """Return the nodes, quotas and jobs of the context and namespace of the section."""
        from scaletrain_cli.launch.backends.kubernetes.cluster_view import kubernetes_view

        return kubernetes_view(cluster.kubernetes)

    def checks(self) -> Iterator[Check]:
        """Yield whether the API server answers. It is asked only where a context names it."""
        name = self.name
        if not is_configured():
            yield Check(name, "none", "no kubeconfig", "scheduler: kubernetes needs one; set $KUBECONFIG")
            return
        try:
            cluster = self.connect(None, "default")
            yield Check(name, "ok", f"{cluster.version(_CHECK_SECONDS)}, {cluster.where}")
        except UsageError as error:
            yield Check(name, "none", "a kubeconfig, and no client", error.message)
        except SchedulerError as error:
            yield Check(name, "warn", "the cluster of the current context cannot be asked", error.message)

    def _cluster(self, spec: RunSpec) -> Cluster:
        return self.connect(spec.cluster.kubernetes.context, spec.cluster.kubernetes.namespace)

    def _look(self, place: JobRef, record: RunRecord) -> tuple[Cluster, Observation]:
        cluster = self.connect(place.context, place.namespace)
        return cluster, observe(cluster, place.namespace, place.job_id, record)

    def _logs(self, run: RunDir, record: RunRecord, place: JobRef, cluster: Cluster) -> PodLogs:
        return PodLogs(run, cluster, place, record.spec.cluster.gpus_per_node)

    def _manifest(self, run: RunDir, record: RunRecord, reach: Callable[[], Cluster]) -> tuple[Manifest, Exclusion]:
        excluded = exclusion_for(run, record.spec, reach)
        number = _next_number(run)
        return manifest(record, documents_for(run, record), number, excluded.nodes), excluded


def _next_number(run: RunDir) -> int:
    """Return the number of this submission. A job whose answer was lost is asked for again under the same number."""
    submission, place = read_submission(run), read_job_ref(run)
    recorded = 0 if submission is None else submission_number(submission.job_id)
    if place is None:
        return recorded + 1
    if not place.confirmed:
        before = previous_job_ref(run, place)
        return max(recorded, 0 if before is None else submission_number(before.job_id)) + 1
    known = submission_number(place.job_id)
    if known > recorded and not place.ended:  # found after its answer was lost
        return known
    return max(recorded, known) + 1


def _has_ended(workload: Object) -> bool:
    return not job_of(Observation(workload), "", time.time()).is_active


def _delete(cluster: Cluster, kind: Kind, namespace: str, workload: Object, *, dry_run: bool = False) -> None:
    """Delete a workload, unless another of its name has taken its place.

    A TrainJob goes before what it owns: Trainer's webhook takes no change of one whose TrainingRuntime is gone, not
    even that which ends a foreground deletion. Asked again, the server ends a deletion that is stuck in that way.
    """
    metadata = workload["metadata"]
    background = kind is TRAIN_JOB
    cluster.delete(kind, namespace, metadata["name"], uid=metadata["uid"], background=background, dry_run=dry_run)


@contextlib.contextmanager
def _stop_requested(
    run: RunDir, cluster: Cluster, kind: Kind, namespace: str, doomed: Sequence[Object]
) -> Iterator[None]:
    """With the stop file, and the mark on the objects for who does not see that file; both go if the server refuses."""
    had = run.stop_file.exists()
    touch(run.stop_file)
    names = [one["metadata"]["name"] for one in doomed]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def mark(value: str | None) -> None:
        for name in names:
            with contextlib.suppress(SchedulerError):  # only for who looks at the object
                cluster.annotate(kind, namespace, name, {CANCELLED: value})

    mark(stamp)
    try:
        yield
    except SchedulerSilentError:
        raise  # it may have been done
    except SchedulerError:
        if not had:
            run.stop_file.unlink(missing_ok=True)
        mark(None)
        raise


def _remove_leftovers(cluster: Cluster, place: JobRef, record: RunRecord) -> None:
    """Remove what was made for a workload that the server never took: nothing owns it."""
    workload = Workload(record.run_id, submission_number(place.job_id), backend=parse_id(place.job_id)[0])
    left = [(CONFIG_MAP, workload.config_map)]
    left += [(RUNTIME, workload.name)] if workload.backend == "trainjob" else []
    left += [(NATIVE_POD_GROUP, workload.name)] if record.spec.cluster.kubernetes.native_gang != "none" else []
    for kind, name in left:
        with contextlib.suppress(SchedulerError):
            there = cluster.get(kind, place.namespace, name)
            if there is not None and belongs_to(there, record) and not there["metadata"].get("ownerReferences"):
                cluster.delete(kind, place.namespace, name, uid=there["metadata"]["uid"])


def _apply(cluster: Cluster, rendered: Manifest, found: Object | None) -> None:
    """The workload last, and then the owner of the rest. A refusal takes back what was made for it."""
    *others, workload = rendered.objects
    made: list[Object] = []
    try:
        for body in others:
            _apply_surely(cluster, body)
            made.append(body)
        whole = found if found is not None else _apply_workload(cluster, workload)
    except SchedulerSilentError:
        raise  # the server may have it all; whoever looks next finds out
    except SchedulerError:
        for body in made if found is None else ():
            with contextlib.suppress(SchedulerError):
                metadata = body["metadata"]
                cluster.delete(kind_of(body), metadata["namespace"], metadata["name"])
        raise
    owner = {key: whole[key] for key in ("apiVersion", "kind")}
    owner |= {key: whole["metadata"][key] for key in ("name", "uid")}
    for body in others:
        with contextlib.suppress(SchedulerError):  # the job is there; without an owner they only stay behind it
            _apply_surely(cluster, {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}})


def _apply_workload(cluster: Cluster, workload: Object) -> Object:
    """Make it; a TrainJob once its runtime is known to all who are asked for their consent."""
    deadline = time.monotonic() + _RUNTIME_SECONDS
    while True:
        try:
            return _apply_surely(cluster, workload, to_make=True)
        except RefusedError as error:
            if not misses_runtime(error.said) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def _apply_surely(cluster: Cluster, body: Object, *, to_make: bool = False) -> Object:
    """Apply, and again where the answer was lost: a second time changes nothing of what the first has made.

    What there is ``to_make`` is looked for first then: a controller may have changed it meanwhile. Raises
    SchedulerSilentError where all that does not help, RefusedError where the server is known not to have it.
    """
    lost: SchedulerSilentError | None = None
    kind, metadata = kind_of(body), body["metadata"]
    for pause in (0.0, *_LOST_ANSWER_PAUSES):
        time.sleep(pause)
        try:
            if lost is not None and to_make:
                there = cluster.get(kind, metadata["namespace"], metadata["name"])
                if there is not None:
                    return there
            return cluster.apply(body)
        except SchedulerSilentError as error:
            lost = error
        except RefusedError as refused:
            if lost is None:
                raise
            if refused.status >= _SERVER_TROUBLE:  # of the look before it
                continue
            try:
                there = cluster.get(kind, metadata["namespace"], metadata["name"])
            except SchedulerError as error:
                raise lost from error
            if there is None:
                raise
            return there
        except SchedulerError:
            if lost is None:
                raise
    assert lost is not None
    raise lost


def _refuse_anothers(cluster: Cluster, found: Object, rendered: Manifest, record: RunRecord) -> None:
    """Raise SchedulerError unless the object that is there is this very submission's."""
    workload, metadata = rendered.workload, found["metadata"]
    name, marks = f"{found['kind']} {metadata['name']}", metadata.get("annotations", {})
    if marks.get(RUN_ID_ANNOTATION) != workload.run_id:
        owner = marks.get(RUN_ID_ANNOTATION, "something else")
        raise SchedulerError(f"{cluster.where}: {name} is there and belongs to {owner}. Submit under another --run-id.")
    documents = cluster.get(CONFIG_MAP, metadata["namespace"], workload.config_map)
    theirs = (documents or {}).get("metadata", {}).get("annotations", {}).get(DOCUMENTS_ANNOTATION)
    ours = rendered.objects[0]["metadata"]["annotations"][DOCUMENTS_ANNOTATION]
    if not belongs_to(found, record) or (RECORD_ANNOTATION not in marks and theirs not in (None, ours)):
        raise SchedulerError(
            f"{cluster.where}: {name} is there since {metadata.get('creationTimestamp')} and belongs to another run of "
            f"the id {workload.run_id}, which may be somebody else's. It is left alone. Submit under another --run-id."
        )
    if metadata.get("deletionTimestamp"):
        raise SchedulerError(f"{cluster.where}: {name} is still being deleted. Wait for its pods to end.")
    if marks.get(REVISION_ANNOTATION) != str(workload.revision) or (theirs is not None and theirs != ours):
        raise SchedulerError(
            f"{cluster.where}: {name} is there with another spec or layout of {workload.run_id}. "
            f"Run `scaletrain cancel {workload.run_id}` first, and resume it then."
        )


def _progress(cluster: Cluster, place: JobRef, seen: Observation) -> dict[str, float]:
    """How far the run is, by what pod 0 printed last; nothing where that cannot be read."""
    begun = [pod for pod in seen.pods if index_of(pod) == 0 and "waiting" not in own_container(pod).get("state", {})]
    first = [pod for pod in begun if reports(pod)]  # a dead node would be waited for
    if not first:
        return {}
    with contextlib.suppress(SchedulerError):
        lines = cluster.log(place.namespace, first[-1]["metadata"]["name"], NODE, last_lines=_LINES_LOOKED_AT)
        return progress_in(line.partition(" ")[2] for line in lines)
    return {}
