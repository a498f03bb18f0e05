"""What the API server holds of one run, gathered with as few questions as its state needs. Judges nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scaletrain_cli.launch.kubernetes.kinds import (
    BACKENDS,
    JOB,
    NODE,
    POD,
    POD_GROUP,
    VOLCANO_JOB,
    WORKLOAD,
    Object,
)
from scaletrain_cli.launch.kubernetes.names import NODE as CONTAINER
from scaletrain_cli.launch.kubernetes.refusals import RefusedError

if TYPE_CHECKING:
    from scaletrain_cli.launch.kubernetes.api import Cluster

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_OWNER_LABEL = "kueue.x-k8s.io/job-uid"  # on the Workload that Kueue makes: the UID of what it was made for
_PODS_ASKED = 3  # of those that wait: all of a gang wait for the same, and each is a question


@dataclass(frozen=True)
class Observation:
    """One look. ``workload`` is the JobSet, Volcano Job or TrainJob; ``jobs`` are its child Jobs."""

    workload: Object | None
    pods: tuple[Object, ...] = ()
    jobs: tuple[Object, ...] = ()
    queued: Object | None = None  # Kueue's Workload
    group: Object | None = None  # Volcano's PodGroup
    events: tuple[Object, ...] = ()
    nodes: tuple[Object, ...] = ()  # those of pods that are ending, as far as they still exist
    nodes_known: bool = True  # False where the user may not look at nodes
    queue_known: bool = True  # False where the user may not look at Kueue's Workloads


def observe(cluster: Cluster, namespace: str, job_id: str, run_label: str) -> Observation:
    """Look at the workload ``job_id`` and, where it is gone, at pods that any workload of the run has left.

    Raises SchedulerError. A right that is missing for a detail leaves the detail out.
    """
    backend, _, name = job_id.partition("/")
    workload = cluster.get(BACKENDS[backend], namespace, name)
    if workload is None:
        pods = cluster.find(POD, namespace, labels=f"scaletrain.dev/run={run_label}")
        living = tuple(pod for pod in pods if pod.get("status", {}).get("phase") not in ("Succeeded", "Failed"))
        nodes, known = _nodes_of_ending(cluster, living)
        return Observation(None, living, nodes=nodes, nodes_known=known)
    pods = cluster.find(POD, namespace, labels=f"app.kubernetes.io/instance={name}")
    nodes, nodes_known = _nodes_of_ending(cluster, pods)
    is_volcano = BACKENDS[backend] is VOLCANO_JOB
    labels = f"app.kubernetes.io/instance={name}"
    jobs = [] if is_volcano else _allowed(lambda: cluster.find(JOB, namespace, labels=labels)) or []
    queued: Object | None = None
    queue_known = True
    if QUEUE_LABEL in workload["metadata"].get("labels", {}):
        owner = f"{_OWNER_LABEL}={workload['metadata'].get('uid', '')}"
        queues = _allowed(lambda: cluster.find(WORKLOAD, namespace, labels=owner))
        queued, queue_known = owned_by(workload, queues or []), queues is not None
    groups = _allowed(lambda: cluster.find(POD_GROUP, namespace)) if is_volcano else None
    return Observation(
        workload,
        tuple(sorted(pods, key=index_of)),
        tuple(jobs),
        queued,
        owned_by(workload, groups or []),
        tuple(_allowed(lambda: _events(cluster, namespace, name, jobs, pods)) or ()),
        nodes,
        nodes_known,
        queue_known,
    )


def index_of(pod: Object) -> int:
    """Which node of the gang the pod is; the first where nothing says so."""
    metadata = pod["metadata"]
    marks = {**metadata.get("labels", {}), **metadata.get("annotations", {})}
    found = marks.get("batch.kubernetes.io/job-completion-index", marks.get("volcano.sh/task-index", ""))
    return int(found) if found.isdigit() else 0


def own_container(pod: Object) -> Object:
    """The status of the container that trains: a mesh or a monitor may have put others beside it."""
    containers = pod.get("status", {}).get("containerStatuses", ())
    return next((container for container in containers if container.get("name") == CONTAINER), {})


def is_heard_of(pod: Object) -> bool:
    """Whether the pod's node reports: nothing else makes a pod unready whose containers are ready."""
    found = {each.get("type"): each.get("status") for each in pod.get("status", {}).get("conditions", ())}
    return found.get("Ready") != "False" or found.get("ContainersReady") == "False"


def _allowed(ask: Callable[[], list[Object]]) -> list[Object] | None:
    """The answer; None where the user lacks the right to ask."""
    try:
        return ask()
    except RefusedError as error:
        if not error.is_rights:
            raise
        return None


def owned_by(owner: Object, candidates: Iterable[Object]) -> Object | None:
    """The one that a controller has made for ``owner``: Kueue's Workload, Volcano's PodGroup."""
    uid = owner["metadata"].get("uid")
    for found in candidates:
        if any(reference.get("uid") == uid for reference in found["metadata"].get("ownerReferences", ())):
            return found
    return None


def _events(cluster: Cluster, namespace: str, name: str, jobs: list[Object], pods: list[Object]) -> list[Object]:
    """Of the workload and its jobs while something is missing, and of some pods that wait."""
    waiting = [pod for pod in pods if pod.get("status", {}).get("phase", "Pending") == "Pending"]
    if pods and not waiting:
        return []
    names = [name, *(job["metadata"]["name"] for job in jobs)] if not pods else []
    names += [pod["metadata"]["name"] for pod in waiting[:_PODS_ASKED]]
    return [event for asked in names for event in cluster.events(namespace, asked)]


def _nodes_of_ending(cluster: Cluster, pods: Iterable[Object]) -> tuple[tuple[Object, ...], bool]:
    names = {
        pod["spec"]["nodeName"]
        for pod in pods
        if pod["metadata"].get("deletionTimestamp") and pod.get("spec", {}).get("nodeName")
    }
    found = _allowed(lambda: [node for name in sorted(names) if (node := cluster.get(NODE, "", name)) is not None])
    return tuple(found or ()), found is not None
