"""Create, annotate and delete the objects of a submission; a lost answer or a refusal leaves no partial state."""

import contextlib
import time
from collections.abc import Iterator, Sequence

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.launch.backends.kubernetes import api_kinds as kinds
from scaletrain_cli.launch.backends.kubernetes import names
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, RefusedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object
from scaletrain_cli.launch.backends.kubernetes.conditions import CANCELLED, dead_nodes
from scaletrain_cli.launch.backends.kubernetes.manifest import Manifest
from scaletrain_cli.launch.backends.kubernetes.messages import is_runtime_missing, reason
from scaletrain_cli.launch.backends.kubernetes.observation import Observation, has_ended, is_ready
from scaletrain_cli.launch.job import undone_if_refused
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import touch

_RUNTIME_SECONDS = 15.0  # until a new runtime is in the webhooks' caches
_RETRY_SECONDS = 0.5
_SERVER_ERROR = 500  # and above
_LOST_ANSWER_PAUSES = (1.0, 3.0)  # between repetitions of an unanswered request


def delete_workload(cluster: Cluster, kind: Kind, namespace: str, workload: Object, *, dry_run: bool = False) -> None:
    """Delete a workload, unless its name now belongs to another one.

    A TrainJob is deleted before what it owns: Trainer's webhook refuses every change of one whose TrainingRuntime no
    longer exists, also the one that ends a foreground deletion. A second request ends a deletion that is stuck so.
    """
    metadata = workload["metadata"]
    background = kind is kinds.TRAIN_JOB
    cluster.delete(kind, namespace, metadata["name"], uid=metadata["uid"], background=background, dry_run=dry_run)


@contextlib.contextmanager
def stop_requested(
    run: RunDir, cluster: Cluster, kind: Kind, namespace: str, workloads: Sequence[Object]
) -> Iterator[None]:
    """Write the stop file, and annotate the objects for observers without it; undo both if the server refuses."""
    had = run.stop_file.exists()
    touch(run.stop_file)
    names = [one["metadata"]["name"] for one in workloads]
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def mark(value: str | None) -> None:
        for name in names:
            with contextlib.suppress(SchedulerError):  # the mark is only information
                cluster.annotate(kind, namespace, name, {CANCELLED: value})

    def withdraw() -> None:
        if not had:
            run.stop_file.unlink(missing_ok=True)
        mark(None)

    mark(stamp)
    with undone_if_refused(withdraw, SchedulerError):
        yield


def remove_leftovers(cluster: Cluster, workload: names.Workload, namespace: str, record: RunRecord) -> None:
    """Delete ownerless objects that were created for a workload that the server did not accept."""
    left = [(kinds.CONFIG_MAP, workload.config_map)]
    left += [(kinds.RUNTIME, workload.name)] if workload.backend == "trainjob" else []
    left += [(kinds.NATIVE_POD_GROUP, workload.name)] if record.spec.cluster.kubernetes.native_gang != "none" else []
    for kind, name in left:
        with contextlib.suppress(SchedulerError):
            there = cluster.get(kind, namespace, name)
            if there is not None and names.belongs_to(there, record) and not there["metadata"].get("ownerReferences"):
                cluster.delete(kind, namespace, name, uid=there["metadata"]["uid"], background=True)  # at once


def apply_owned(cluster: Cluster, objects: Sequence[Object], existing: Object | None) -> None:
    """Apply the objects, the workload last, and make it the owner of the others. A refusal deletes what was created."""
    *others, workload = objects
    made: list[Object] = []

    def delete_made() -> None:
        for body in made if existing is None else ():
            with contextlib.suppress(SchedulerError):
                metadata = body["metadata"]
                cluster.delete(kinds.kind_of(body), metadata["namespace"], metadata["name"])

    with undone_if_refused(delete_made, SchedulerError):
        for body in others:
            _apply_until_answered(cluster, body)
            made.append(body)
        created = existing if existing is not None else _apply_workload(cluster, workload)
    owner = {key: created[key] for key in ("apiVersion", "kind")}
    owner |= {key: created["metadata"][key] for key in ("name", "uid")}
    for body in others:
        with contextlib.suppress(SchedulerError):  # the job exists; without an owner the others only outlive it
            _apply_until_answered(cluster, {**body, "metadata": {**body["metadata"], "ownerReferences": [owner]}})


def _apply_workload(cluster: Cluster, workload: Object) -> Object:
    """Create the workload; for a TrainJob, repeat the request until the webhooks have its runtime in their caches."""
    deadline = time.monotonic() + _RUNTIME_SECONDS
    while True:
        try:
            queue = workload["metadata"].get("labels", {}).get(names.QUEUE_LABEL)
            tried = queue is None or workload["kind"] != kinds.TRAIN_JOB.name  # those of other kinds: in the preflight
            if not tried and is_unmanaged(workload, cluster.apply(workload, dry_run=True)):
                raise SchedulerError(reason("queue-without-kind", kind=workload["kind"], queue=queue))
            return _apply_until_answered(cluster, workload, is_new=True)
        except RefusedError as error:
            if not is_runtime_missing(error.said) or time.monotonic() > deadline:
                raise
        time.sleep(_RETRY_SECONDS)


def is_unmanaged(body: Object, answer: Object) -> bool:
    """Return whether a job of a queue of Kueue would start at once, outside the quota: Kueue does not manage its kind.

    ``answer``: the server's version of it, in which Kueue's webhook has suspended it.
    """
    in_queue = names.QUEUE_LABEL in body["metadata"].get("labels", {})
    return in_queue and answer.get("spec", {}).get("suspend") is not True


def _apply_until_answered(cluster: Cluster, body: Object, *, is_new: bool = False) -> Object:
    """Apply an object, and repeat the request if its answer was lost.

    For ``is_new``, the object is read before the request is repeated, since a controller may have changed it. Raises
    SchedulerSilentError if no request is answered, RefusedError if the server does not have the object.
    """
    lost: SchedulerSilentError | None = None
    kind, metadata = kinds.kind_of(body), body["metadata"]
    for pause in (0.0, *_LOST_ANSWER_PAUSES):
        time.sleep(pause)
        try:
            if lost is not None and is_new:
                there = cluster.get(kind, metadata["namespace"], metadata["name"])
                if there is not None:
                    return there
            return cluster.apply(body)
        except SchedulerSilentError as error:
            lost = error
        except RefusedError as refused:
            if lost is None:
                raise
            if refused.status >= _SERVER_ERROR:  # of the read before it
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


def refuse_foreign(cluster: Cluster, existing: Object, rendered: Manifest, record: RunRecord) -> None:
    """Raise SchedulerError if the existing object belongs to another submission."""
    workload, metadata = rendered.workload, existing["metadata"]
    name, marks = f"{existing['kind']} {metadata['name']}", metadata.get("annotations", {})
    if marks.get(names.RUN_ID_ANNOTATION) != workload.run_id:
        other = marks.get(names.RUN_ID_ANNOTATION)
        known = reason("object-of-other-run", where=cluster.where, object=name, owner=other)
        raise SchedulerError(known if other else reason("object-of-no-run", where=cluster.where, object=name))
    documents = cluster.get(kinds.CONFIG_MAP, metadata["namespace"], workload.config_map)
    theirs = (documents or {}).get("metadata", {}).get("annotations", {}).get(names.DOCUMENTS_ANNOTATION)
    ours = rendered.objects[0]["metadata"]["annotations"][names.DOCUMENTS_ANNOTATION]
    if not names.belongs_to(existing, record):
        since = metadata.get("creationTimestamp")
        params = {"where": cluster.where, "object": name, "since": since, "run": workload.run_id}
        raise SchedulerError(reason("object-of-same-id", **params))
    if metadata.get("deletionTimestamp"):
        raise SchedulerError(reason("object-deleting", where=cluster.where, object=name))
    if marks.get(names.REVISION_ANNOTATION) != str(workload.revision) or (theirs is not None and theirs != ours):
        params = {"where": cluster.where, "object": name, "run": workload.run_id}
        raise SchedulerError(reason("object-of-other-revision", **params))


def force_delete(cluster: Cluster, namespace: str, seen: Observation, now: float) -> list[str]:
    """Delete the pods of dead nodes from the API, so that a deleted job ends; return their names.

    This applies to overdue pods and, once their workload is deleted, to all pods on nodes that do not report: no
    kubelet would use their grace period.

    A pod of a Job that is not deleted stays, without its grace period: podReplacementPolicy Failed keeps the Job's
    finalizer on it until the pod is marked as failed, as a deleted node or the out-of-service taint does.

    Only safe where the node is off or cut from storage: a pod that still runs would write beside its successor.
    """
    by_name = {pod["metadata"]["name"]: pod["metadata"].get("uid", "") for pod in seen.pods}
    names = [name for stuck in dead_nodes(seen, now) for name in stuck.pods]
    if seen.workload is None or seen.workload["metadata"].get("deletionTimestamp"):
        dead = {node["metadata"]["name"] for node in seen.nodes if not is_ready(node)}
        active = [pod for pod in seen.pods if not has_ended(pod)]
        names += [pod["metadata"]["name"] for pod in active if pod.get("spec", {}).get("nodeName") in dead]
    unique = dict.fromkeys(names)
    return [name for name in unique if cluster.delete(kinds.POD, namespace, name, uid=by_name[name], at_once=True)]
