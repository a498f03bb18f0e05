"""Collect the objects of one run from the API server, with as few requests as its state needs."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from scaletrain_cli.launch.backends.kubernetes import api_kinds as kinds
from scaletrain_cli.launch.backends.kubernetes import names
from scaletrain_cli.launch.backends.kubernetes.api import ForbiddenError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.kubernetes.api import Cluster
    from scaletrain_cli.rundir.record import RunRecord

T = TypeVar("T")
_OWNER_LABEL = "kueue.x-k8s.io/job-uid"  # on Kueue's Workload: the UID of the job that it is for
_MOST_PODS_QUERIED = 3  # of the waiting ones: all pods of a gang wait for the same reason, and each takes a request
_MOST_NODES_QUERIED = 8  # requested individually; above this number one list request is cheaper


@dataclass(frozen=True)
class Observation:
    """The objects at one time. ``workload`` is the JobSet, Volcano Job or TrainJob; ``jobs`` are its child Jobs."""

    workload: Object | None
    pods: tuple[Object, ...] = ()
    jobs: tuple[Object, ...] = ()
    queued: Object | None = None  # Kueue's Workload
    group: Object | None = None  # Volcano's PodGroup
    events: tuple[Object, ...] = ()
    nodes: tuple[Object, ...] = ()  # the nodes of terminating, starting or unready pods, if they still exist
    nodes_known: bool = True  # False if the user may not read nodes
    queue_known: bool = True  # False if the user may not read Kueue's Workloads
    jobset: Object | None = None  # created by Trainer for a TrainJob; may outlive it
    others: tuple[Object, ...] = ()  # other workloads of the run, the newest first


def observe(cluster: Cluster, namespace: str, job_id: str, record: RunRecord) -> Observation:
    """Return the run's workloads by label, details of ``job_id``, and the remaining pods if it is deleted.

    Raises SchedulerError. Details that the user may not read are left out.
    """
    backend, _, name = job_id.partition("/")
    workloads = workloads_of(cluster, kinds.BACKENDS[backend], namespace, record)
    workload = next((one for one in workloads if one["metadata"]["name"] == name), None)
    others = tuple(one for one in workloads if one is not workload)
    instance = f"{names.INSTANCE_LABEL}={name}"
    jobset = _allowed(lambda: cluster.get(kinds.JOB_SET, namespace, name)) if backend == "trainjob" else None
    if jobset is not None and not names.belongs_to(jobset, record):
        jobset = None
    if workload is None:
        pods = cluster.find(kinds.POD, namespace, labels=f"{names.RUN_LABEL}={names.run_label(record.run_id)}")
        marks = [(pod["metadata"].get("annotations") or {}).get(names.RECORD_ANNOTATION, "") for pod in pods]
        pods = [pod for pod, mark in zip(pods, marks, strict=True) if mark in ("", names.record_mark(record))]
        active = tuple(pod for pod in pods if not has_ended(pod))
        nodes, known = _nodes_in_question(cluster, active)
        return Observation(None, active, nodes=nodes, nodes_known=known, jobset=jobset, others=others)
    pods = cluster.find(kinds.POD, namespace, labels=instance)
    nodes, nodes_known = _nodes_in_question(cluster, pods)
    is_volcano = kinds.BACKENDS[backend] is kinds.VOLCANO_JOB
    jobs = [] if is_volcano else _allowed(lambda: cluster.find(kinds.JOB, namespace, labels=instance)) or []
    queued: Object | None = None
    queue_known = True
    if names.QUEUE_LABEL in workload["metadata"].get("labels", {}):
        owner = f"{_OWNER_LABEL}={workload['metadata'].get('uid', '')}"
        queues = _allowed(lambda: cluster.find(kinds.WORKLOAD, namespace, labels=owner))
        queued, queue_known = owned_by(workload, queues or []), queues is not None
    groups = _allowed(lambda: cluster.find(kinds.POD_GROUP, namespace)) if is_volcano else None
    evicted = queued is not None and not pods and condition(queued, "Evicted") is not None
    return Observation(
        workload,
        tuple(sorted(pods, key=index_of)),
        tuple(jobs),
        queued,
        owned_by(workload, groups or []),
        tuple(_allowed(lambda: _events(cluster, namespace, name, jobs, pods, of_lost_pods=evicted)) or ()),
        nodes,
        nodes_known,
        queue_known,
        jobset,
        others,
    )


def workloads_of(cluster: Cluster, kind: Kind, namespace: str, record: RunRecord) -> list[Object]:
    """Return this run's workloads of one kind, the newest first, also those that are not recorded here."""
    workloads = cluster.find(kind, namespace, labels=f"{names.RUN_LABEL}={names.run_label(record.run_id)}")
    own = [one for one in workloads if names.belongs_to(one, record) and not is_trainers(one)]
    named = [{"apiVersion": kind.api_version, "kind": kind.name, **one} for one in own]  # list items may lack both
    return sorted(named, key=lambda one: names.submission_number(one["metadata"]["name"]), reverse=True)


def is_trainers(item: Object) -> bool:
    """Return whether Trainer created it for a TrainJob, whose labels it has."""
    return any(owner.get("kind") == "TrainJob" for owner in item["metadata"].get("ownerReferences", ()))


def index_of(pod: Object) -> int:
    """Return the index of the pod in the gang; 0 if it has none."""
    metadata = pod["metadata"]
    marks = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
    index = marks.get("batch.kubernetes.io/job-completion-index", marks.get("volcano.sh/task-index", ""))
    return int(index) if index.isdigit() else 0


def own_container(pod: Object) -> Object:
    """Return the status of the training container; a service mesh may have added others."""
    containers = pod.get("status", {}).get("containerStatuses", ())
    return next((container for container in containers if container.get("name") == names.NODE), {})


def reports(pod: Object) -> bool:
    """Return whether the pod's node reports. A pod with ready containers is unready only if its node does not."""
    statuses = {entry.get("type"): entry.get("status") for entry in pod.get("status", {}).get("conditions", ())}
    return statuses.get("Ready") != "False" or statuses.get("ContainersReady") == "False"


def _allowed(send: Callable[[], T]) -> T | None:
    """Return the answer; None if the user lacks the right."""
    try:
        return send()
    except ForbiddenError:
        return None


def owned_by(owner: Object, candidates: Iterable[Object]) -> Object | None:
    """Return the object that a controller created for ``owner``: Kueue's Workload or Volcano's PodGroup."""
    uid = owner["metadata"].get("uid")
    for candidate in candidates:
        if any(reference.get("uid") == uid for reference in candidate["metadata"].get("ownerReferences", ())):
            return candidate
    return None


def _events(
    cluster: Cluster, namespace: str, name: str, jobs: list[Object], pods: list[Object], *, of_lost_pods: bool
) -> list[Object]:
    """Return events of the workload and its jobs while something is missing, and of some pods that wait.

    ``of_lost_pods``: also of deleted pods. Kueue deletes pods that did not become ready, and their status with them.
    """
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") == "Pending"]
    if pods and not waiting:
        return []
    asked = [name, *(job["metadata"]["name"] for job in jobs)] if not pods else []
    asked += [pod["metadata"]["name"] for pod in waiting[:_MOST_PODS_QUERIED]]
    events = [event for subject in asked for event in cluster.events(namespace, subject)]
    if of_lost_pods:
        start = f"{name}-{names.NODE}-"
        of_pods = cluster.find(kinds.EVENT, namespace, fields="involvedObject.kind=Pod,type=Warning")
        events += [event for event in of_pods if str(event.get("involvedObject", {}).get("name", "")).startswith(start)]
    return events


def _nodes_in_question(cluster: Cluster, pods: Iterable[Object]) -> tuple[tuple[Object, ...], bool]:
    """Return the nodes of pods that are starting, ending or not ready, and whether the user may read nodes."""
    chosen = {
        pod["spec"]["nodeName"]
        for pod in pods
        if pod.get("spec", {}).get("nodeName")
        and (
            pod["metadata"].get("deletionTimestamp")
            or pod.get("status", {}).get("phase", "Pending") == "Pending"
            or not reports(pod)
        )
    }

    def send() -> list[Object]:
        if len(chosen) > _MOST_NODES_QUERIED:
            return [node for node in cluster.find(kinds.NODE, "") if node["metadata"]["name"] in chosen]
        return [node for name in sorted(chosen) if (node := cluster.get(kinds.NODE, "", name)) is not None]

    nodes = _allowed(send) if chosen else []
    return tuple(nodes or ()), nodes is not None


def is_ready(node: Object) -> bool:
    """Return whether the node is Ready: its kubelet reports, and reports no problem."""
    return condition(node, "Ready") is not None


def condition(item: Object, *kinds: str, status: str = "True") -> Object | None:
    """Return the first condition of an object with one of these types and this status, or None."""
    conditions = item.get("status", {}).get("conditions", ())
    return next((entry for entry in conditions if entry.get("type") in kinds and entry.get("status") == status), None)


def has_ended(pod: Object) -> bool:
    """Return whether all containers of the pod have ended."""
    return pod.get("status", {}).get("phase") in ("Succeeded", "Failed")


def unix_time(stamp: str) -> float:
    """Return the Unix time of an RFC 3339 time stamp of the API server."""
    return datetime.datetime.fromisoformat(stamp.replace("Z", "+00:00")).timestamp()
