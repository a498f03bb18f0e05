"""The preparation of data as an Indexed Job of CPU pods, for which the submitter waits before it creates the gang.

The gang is a separate object that does not exist meanwhile, so that no queue holds quota of GPUs for it. The volume of
the runs may not be visible here: the pods say in their output why they failed. A pod that succeeds has seen all data
prepared, so that one is enough. The Job is recorded in the run directory before it is requested; a submitter that ends
loses nothing, and the next one goes on.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ExitCode, ScaletrainError, SchedulerError
from scaletrain_cli.launch.backends.kubernetes import names
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, RefusedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import JOB, POD, Object
from scaletrain_cli.launch.backends.kubernetes.conditions import exit_code_of_pod, failed_pod, why_pods_wait
from scaletrain_cli.launch.backends.kubernetes.job_ref import job_ref_of, next_submission_number
from scaletrain_cli.launch.backends.kubernetes.manifest import require_submittable
from scaletrain_cli.launch.backends.kubernetes.messages import one_line, reason
from scaletrain_cli.launch.backends.kubernetes.objects import apply_owned, delete_workload
from scaletrain_cli.launch.backends.kubernetes.observation import Observation, condition, index_of, own_container
from scaletrain_cli.launch.backends.kubernetes.pod import PREPARATION_DOCUMENT, preparation_template
from scaletrain_cli.launch.backends.kubernetes.pod_output import preparation_end
from scaletrain_cli.launch.backends.kubernetes.workloads import config_map, on_codes
from scaletrain_cli.launch.engine_process import EngineProcessError
from scaletrain_cli.launch.job import Job, undone_if_refused
from scaletrain_cli.plan.data_size import DataSize
from scaletrain_cli.reasons import Reason, reason_from, recorded
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.preparation import (
    PreparationJob,
    exit_code_of_failure,
    forget_job,
    preparation_folder,
    read_failure,
    read_job,
    record_job,
    record_job_failure,
    why_not_prepared,
)
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import locked, make_folder
from scaletrain_cli.spec import RunSpec

_LOOK_EVERY_SECONDS = 3.0
_SILENT_SECONDS = 600.0  # of a server that does not answer, after which the submitter gives up
_LINES_READ = 50
_RETRIES = 3  # of each pod that was killed, as for its memory
_BY_INDEX_SINCE = (1, 29)  # backoffLimitPerIndex is on by default
# A retry does not help where the preparation itself ended with an error.
_OWN_CODES = frozenset(ExitCode) - {ExitCode.DONE, ExitCode.PREEMPTED}


def preparation_objects(
    spec: RunSpec,
    name: str,
    run_id: str,
    tasks: int,
    hub: Mapping[str, str],
    annotations: Mapping[str, str],
    *,
    by_index: bool = True,
) -> tuple[Object, Object]:
    """Return the ConfigMap with what the pods prepare, and the Job. Raises SpecError.

    ``by_index``: the server counts the retries of each pod apart.
    """
    require_submittable(spec)
    kubernetes = spec.cluster.kubernetes
    labels = names.own_labels(name, names.PREPARATION_LABEL, run_id)
    marks = {names.RUN_ID_ANNOTATION: run_id, **annotations}
    metadata = {"namespace": kubernetes.used_namespace, "labels": labels, "annotations": marks}
    document = json.dumps({"spec": spec.model_dump(mode="json", by_alias=True), "hub": dict(hub)})
    texts = config_map({"name": f"{name}-spec", **metadata}, {PREPARATION_DOCUMENT: document})
    ttl = kubernetes.ttl_seconds_after_finished
    queue = kubernetes.preparation.queue
    retries = {"backoffLimitPerIndex": _RETRIES} if by_index else {"backoffLimit": _RETRIES * tasks}
    job = {
        "completionMode": "Indexed",
        "completions": tasks,
        "parallelism": tasks,
        **retries,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                on_codes(_OWN_CODES),
            ]
        },
        # Not before the submitter, which looks from time to time, has seen how it ended.
        **({} if ttl is None else {"ttlSecondsAfterFinished": math.ceil(max(ttl, _SILENT_SECONDS))}),
        "template": preparation_template(spec, texts["metadata"]["name"], labels, marks),
    }
    of_job = {"name": name, **metadata, "labels": labels | ({} if queue is None else {names.QUEUE_LABEL: queue})}
    return texts, JOB.object(of_job, job)


def objects_of_run(
    run: RunDir, record: RunRecord, number: int | None = None, *, by_index: bool = True
) -> tuple[Object, Object]:
    """Return the objects of the next preparation of a run. ``number``: of the Job for the next submission."""
    submission, known = next_submission_number(run), read_job(preparation_folder(run))
    if number is None:
        number = known.number if known is not None and known.submission == submission else 1
    workload = names.Workload(record.run_id, submission).name
    name = f"{workload}-data" + ("" if number == 1 else str(number))
    marks = {names.REVISION_ANNOTATION: str(record.revision), names.RECORD_ANNOTATION: names.record_mark(record)}
    tasks = record.spec.cluster.kubernetes.preparation.tasks
    return preparation_objects(
        record.spec, name, record.run_id, _useful(record.spec, tasks), record.hub, marks, by_index=by_index
    )


def _useful(spec: RunSpec, tasks: int) -> int:
    return tasks if spec.training.objective == "causal_lm" else 1  # rows are prepared by one process


def submit_for_run(cluster: Cluster, run: RunDir, record: RunRecord) -> None:
    """Create the Job, unless the data are known to be prepared, or a Job for them has not ended.

    Raises SchedulerError, with nothing recorded where the server refuses.
    """
    folder, data = preparation_folder(run), digest_of(record.spec)
    known, submission, number = read_job(folder), next_submission_number(run), 1
    if known is not None and known.scheduler == "kubernetes":
        if known.prepared and known.data == data and known.submission == submission:
            return  # for this gang; before later ones it is looked again whether the volume still has them
        there = _own_job(cluster, known, record)
        is_over = there is None or _end_of(there) == "failed" or "deletionTimestamp" in there["metadata"]
        if there is not None and not is_over and known.data == data and read_failure(folder) is None:
            record_job(folder, dataclasses.replace(known, submission=submission, revision=record.revision))
            return
        if there is not None and not is_over:
            delete_workload(cluster, JOB, known.namespace, there)
        number = known.number + 1 if known.submission == submission else 1
    by_index, kubernetes = _counts_by_index(cluster), record.spec.cluster.kubernetes
    while True:
        texts, job = objects_of_run(run, record, number, by_index=by_index)
        name = job["metadata"]["name"]
        if (existing := cluster.get(JOB, kubernetes.used_namespace, name)) is None:
            break
        if not names.belongs_to(existing, record):
            other = (existing["metadata"].get("annotations") or {}).get(names.RUN_ID_ANNOTATION, name)
            raise SchedulerError(reason("object-of-other-run", where=cluster.where, object=f"Job {name}", owner=other))
        number += 1  # an earlier Job of this run, which has ended or is being deleted
    make_folder(folder, parents=True)
    forget_job(folder)
    record_job(folder, _named_job(record.spec, job, revision=record.revision, submission=submission, number=number))
    with undone_if_refused(lambda: forget_job(folder), SchedulerError):
        apply_owned(cluster, (texts, job), None)


def queue_for_spec(cluster: Cluster, spec: RunSpec, name: str, tasks: int) -> PreparationJob:
    """Create a Job that prepares the data of a spec for later runs, and return it. Raises SchedulerError."""
    # At most 50 characters: with it, the names of the pods are labels of a host.
    short = name if len(name) <= 50 else f"{name[:41].rstrip('-')}-{name[-8:]}"
    texts, job = preparation_objects(
        spec, short, name, _useful(spec, tasks), {}, {}, by_index=_counts_by_index(cluster)
    )
    apply_owned(cluster, (texts, job), None)
    return _named_job(spec, job)


def _named_job(spec: RunSpec, job: Object, **numbers: Any) -> PreparationJob:
    """Return the record of a Job that prepares the data of a spec. ``numbers``: as in PreparationJob."""
    kubernetes, name, tasks = spec.cluster.kubernetes, f"job/{job['metadata']['name']}", job["spec"]["completions"]
    namespace, context, data = kubernetes.used_namespace, kubernetes.context, digest_of(spec)
    return PreparationJob("kubernetes", name, "", tasks, data=data, namespace=namespace, context=context, **numbers)


def digest_of(spec: RunSpec) -> str:
    """Return a digest of everything on which the prepared data of a spec, and their place, depend."""
    kubernetes = spec.cluster.kubernetes
    prepared = [spec.data.model_dump(mode="json"), spec.model.model_dump(mode="json"), spec.training.objective]
    place = [kubernetes.context, kubernetes.used_namespace, kubernetes.runs.model_dump(mode="json")]
    return hashlib.sha256(json.dumps([*prepared, *place], sort_keys=True).encode()).hexdigest()


def _counts_by_index(cluster: Cluster) -> bool:
    """Return whether the server counts the retries of each index of a Job; False for a version that is unknown."""
    try:
        match = re.match(r"v(\d+)\.(\d+)", cluster.version())
    except RefusedError:  # a proxy that serves only some paths
        return False
    return match is not None and (int(match[1]), int(match[2])) >= _BY_INDEX_SINCE


def pending_job(run: RunDir, record: RunRecord) -> PreparationJob | None:
    """Return the preparation job after which no gang was submitted; None if there is none."""
    job = read_job(preparation_folder(run))
    if job is None or job.scheduler != "kubernetes":
        return None
    ref = job_ref_of(run, record)
    return job if ref is None or names.submission_number(ref.job_id) < job.submission else None


def _own_job(cluster: Cluster, job: PreparationJob, record: RunRecord | None) -> Object | None:
    """Return the Job. ``record``: of its run; None: its name is of no other Job."""
    existing = cluster.get(JOB, job.namespace, job.job_id.partition("/")[2])
    return existing if existing is not None and (record is None or names.belongs_to(existing, record)) else None


def _end_of(job: Object) -> str:
    """Return ``prepared``, ``failed``, or '' for a Job that has not ended. Each pod that succeeds has seen all data."""
    if int(job.get("status", {}).get("succeeded") or 0) or condition(job, "Complete", "SuccessCriteriaMet"):
        return "prepared"
    return "failed" if condition(job, "Failed", "FailureTarget") else ""


@dataclasses.dataclass(frozen=True)
class Seen:
    """The state of a preparation job: its end as _end_of(), or ``gone``, and how its pods are."""

    end: str
    detail: Reason
    error: ScaletrainError | None = None


def look(cluster: Cluster, record: RunRecord | None, job: PreparationJob) -> Seen:
    """Return the state of the Job, with the error of its pods if it has failed. Raises SchedulerError.

    ``record``: of the run for which the Job was created; None: for later runs.
    """
    run = "RUN" if record is None else record.run_id  # in remedies
    there = _own_job(cluster, job, record)
    if there is None or "deletionTimestamp" in there["metadata"]:
        return Seen("gone", reason("preparation-gone", job=job.job_id))
    name, end = there["metadata"]["name"], _end_of(there)
    if end == "prepared":
        return Seen(end, reason("preparation-done", job=job.job_id, run=run))
    pods = sorted(cluster.find(POD, job.namespace, labels=f"{names.INSTANCE_LABEL}={name}"), key=index_of)
    if end == "failed":
        error = _failure(cluster, job, there, pods)
        cause = None if error.problems else error.reason
        return Seen(end, cause or recorded(str(error).rstrip(".")), error)
    phases = [pod.get("status", {}).get("phase", "Pending") for pod in pods]
    counts = {"running": phases.count("Running"), "tasks": job.tasks}
    if there.get("spec", {}).get("suspend"):
        return Seen(end, reason("preparation-suspended", job=job.job_id, run=run))
    waiting = [pod for pod, phase in zip(pods, phases, strict=True) if phase == "Pending"]
    events = [event for pod in waiting[:1] for event in cluster.events(job.namespace, pod["metadata"]["name"])]
    if not pods:
        events = cluster.events(job.namespace, name)
    waits = () if counts["running"] else why_pods_wait(waiting, Observation(there, tuple(pods), events=tuple(events)))
    if waits:
        return Seen(end, reason("preparation-waits", job=job.job_id, run=run, cause=waits[0]))
    return Seen(end, reason("preparation-runs", job=job.job_id, run=run, **counts))


def _failure(cluster: Cluster, job: PreparationJob, there: Object, pods: Sequence[Object]) -> ScaletrainError:
    """Return the error of the first pod that says why it failed; else how a pod, or the Job, ended."""
    failed = [pod for pod in pods if exit_code_of_pod(pod)]
    for pod in failed:
        if (said := _last_words(cluster, job, pod)) is not None:
            return error_of(said)
    if how := failed_pod(failed):
        return ScaletrainError(reason("preparation-pod-failed", job=job.job_id, cause=how[0]))
    conditions = there.get("status", {}).get("conditions", ())
    messages = [one_line(entry.get("message")) for entry in conditions if entry.get("type") == "Failed"]
    return ScaletrainError(reason("preparation-failed", job=job.job_id, said="; ".join(filter(None, messages))))


def _last_words(cluster: Cluster, job: PreparationJob, pod: Object) -> dict[str, Any] | None:
    """Return the object of the preparation-end line of a pod; None if it has printed none, or cannot be read."""
    ended = own_container(pod).get("state", {}).get("terminated") or {}
    if (said := preparation_end(str(ended.get("message", "")).splitlines())) is None:
        with contextlib.suppress(SchedulerError):
            lines = cluster.log(job.namespace, pod["metadata"]["name"], names.NODE, last_lines=_LINES_READ)
            said = preparation_end(line.partition(" ")[2] for line in lines)
    return said


def error_of(said: Mapping[str, Any]) -> ScaletrainError:
    """Return the error that a pod has printed, as its command would have raised it here."""
    error = EngineProcessError(int(said["exit_code"]), said.get("error") or {})
    if said.get("reason") is not None and not error.problems:
        error.reason = reason_from(said["reason"])
    return error


def await_job(cluster: Cluster, run: RunDir, record: RunRecord, say: Callable[[str], None]) -> None:
    """Wait until the data are prepared. Raises the error of the preparation, and SchedulerError."""
    folder = preparation_folder(run)
    job = read_job(folder)
    if job is None or job.prepared or job.scheduler != "kubernetes":
        return
    deleted = reason("preparation-deleted", job=job.job_id, run=run.run_id)
    try:
        _await_end(cluster, record, job, say, deleted, lambda seen: record_state(folder, job, seen))
    except KeyboardInterrupt:
        say(str(reason("preparation-goes-on", job=job.job_id, run=run.run_id)))
        raise


def await_sizes(cluster: Cluster, job: PreparationJob, say: Callable[[str], None]) -> dict[str, DataSize]:
    """Wait for a Job of queue_for_spec(), and return the sizes of the sources that one of its pods has printed.

    The Job is deleted then. Raises the error of the preparation, and SchedulerError.
    """
    try:
        _await_end(cluster, None, job, say, reason("preparation-gone", job=job.job_id))
    except KeyboardInterrupt:
        say(str(reason("preparation-is-shared", job=job.job_id)))
        raise
    name = job.job_id.partition("/")[2]
    for pod in cluster.find(POD, job.namespace, labels=f"{names.INSTANCE_LABEL}={name}"):
        if (sizes := (_last_words(cluster, job, pod) or {}).get("sizes")) is not None:
            if (there := _own_job(cluster, job, None)) is not None:
                delete_workload(cluster, JOB, job.namespace, there)
            return {source: DataSize(*numbers) for source, numbers in sizes.items()}
    raise SchedulerError(reason("preparation-unsaid", job=job.job_id))


def _await_end(
    cluster: Cluster,
    record: RunRecord | None,
    job: PreparationJob,
    say: Callable[[str], None],
    deleted: Reason,
    keep: Callable[[Seen], None] = lambda seen: None,
) -> None:
    """Wait until the Job has prepared the data. ``keep`` gets each state.

    Raises the error of the preparation, and SchedulerError, for ``deleted`` if there is no Job any more.
    """
    shown, answered = "", time.monotonic()
    while True:
        try:
            seen = look(cluster, record, job)
        except SchedulerError:
            if time.monotonic() - answered > _SILENT_SECONDS:
                raise
            _pause(_LOOK_EVERY_SECONDS)
            continue
        answered = time.monotonic()
        keep(seen)
        if seen.end == "prepared":
            return
        if seen.error is not None:
            raise seen.error
        if seen.end == "gone":
            raise SchedulerError(deleted)
        if str(seen.detail) != shown:
            shown = str(seen.detail)
            say(shown)
        _pause(_LOOK_EVERY_SECONDS)


def _pause(seconds: float) -> None:
    time.sleep(seconds)


def record_state(folder: Path, job: PreparationJob, seen: Seen) -> None:
    """Record the end of the Job, whose object is deleted later. A run directory that is read-only stays as it is."""
    with contextlib.suppress(OSError):
        if seen.end == "prepared":
            record_job(folder, dataclasses.replace(job, prepared=True))
        elif seen.error is not None:
            record_job_failure(folder, seen.detail, int(seen.error.exit_code))


def job_of_preparation(cluster: Cluster, run: RunDir, record: RunRecord, job: PreparationJob) -> Job:
    """Return the run's job while its data are prepared, or after that failed, before its gang exists."""
    folder = preparation_folder(run)
    if run.is_cancelled:
        return Job.because(job.job_id, "ended", reason("preparation-cancelled", job=job.job_id))
    failed = read_failure(folder)
    if failed is None and not job.prepared:
        seen = look(cluster, record, job)
        record_state(folder, job, seen)
        if seen.end == "":
            return Job.because(job.job_id, "queued", seen.detail, resumable=True)
        if seen.end == "gone":
            return Job.because(job.job_id, "ended", seen.detail, exit_code=int(ExitCode.SCHEDULER))
        failed = read_failure(folder)
    if failed is not None:
        why = why_not_prepared(run) or failed
        return Job.because(job.job_id, "ended", why, exit_code=exit_code_of_failure(folder))
    why = reason("preparation-done", job=job.job_id, run=run.run_id)
    with locked(run.path / "submit.lock", wait_seconds=0) as nobody_waits:
        return Job.because(job.job_id, "ended" if nobody_waits else "queued", why, resumable=not nobody_waits)


def delete_jobs(cluster: Cluster, namespace: str, record: RunRecord) -> list[str]:
    """Delete the preparation Jobs of a run, with their pods; return their names. Raises SchedulerError."""
    jobs = cluster.find(JOB, namespace, labels=f"{names.PREPARATION_LABEL}={names.run_label(record.run_id)}")
    own = [one for one in jobs if names.belongs_to(one, record) and "deletionTimestamp" not in one["metadata"]]
    for one in own:
        delete_workload(cluster, JOB, namespace, one)
    return [str(one["metadata"]["name"]) for one in own]
