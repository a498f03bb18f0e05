"""The view of a cluster: nodes, Kueue's quotas and a namespace's runs, in the rows common to all back ends.

fetch_objects() sends the requests; make_view() is pure. Resources that the user may not list are left out with a note.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.backends.cluster_view import ClusterView, GpuRow, NodesRow, QueueRow, QuotaRow
from scaletrain_cli.launch.backends.kubernetes import api_kinds as kinds
from scaletrain_cli.launch.backends.kubernetes.api import ForbiddenError, NotServedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Kind, Object
from scaletrain_cli.launch.backends.kubernetes.capacity import amounts
from scaletrain_cli.launch.backends.kubernetes.conditions import job_of, size_of
from scaletrain_cli.launch.backends.kubernetes.job_ref import read_job_ref
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.launch.backends.kubernetes.names import INSTANCE_LABEL, MANAGED, QUEUE_LABEL, RUN_ID_ANNOTATION
from scaletrain_cli.launch.backends.kubernetes.observation import (
    Observation,
    condition,
    index_of,
    is_ready,
    is_trainers,
    owned_by,
    unix_time,
)
from scaletrain_cli.launch.backends.kubernetes.quota import parse_quantity, reserved
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import list_runs
from scaletrain_cli.spec.kubernetes import KubernetesSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.kubernetes.api import Cluster


@dataclass(frozen=True)
class Runs:
    """The runs of a namespace, and the contents of its queues of Kueue."""

    workloads: tuple[tuple[str, Object], ...] = ()  # each with its back end
    pods: tuple[Object, ...] = ()
    queued: tuple[Object, ...] = ()  # Kueue's Workloads of all users
    groups: tuple[Object, ...] = ()  # Volcano's PodGroups
    nodes: tuple[Object, ...] = ()
    queue_known: bool = True
    nodes_known: bool = True

    @cached_property
    def waiting(self) -> int:
        return sum(map(_waits, self.queued))

    def seen(self) -> Iterator[tuple[str, Observation]]:
        """Yield each run with its back end, without the JobSets that Trainer creates for TrainJobs."""
        for backend, workload in self.workloads:
            if is_trainers(workload):
                continue
            pods = [pod for pod in self.pods if _labels(pod).get(INSTANCE_LABEL) == workload["metadata"]["name"]]
            yield (
                backend,
                Observation(
                    workload,
                    tuple(sorted(pods, key=index_of)),
                    queued=owned_by(workload, self.queued),
                    group=owned_by(workload, self.groups),
                    nodes=self.nodes,
                    nodes_known=self.nodes_known,
                    queue_known=self.queue_known,
                ),
            )


def queue_rows(runs: Runs, queues: Mapping[str, str], gpu_resource: str, now: float) -> tuple[QueueRow, ...]:
    """Return the running jobs, then the waiting ones in order. ``queues`` maps a LocalQueue to its ClusterQueue."""
    waiting = sorted(filter(_waits, runs.queued), key=_order)
    rows: list[tuple[tuple[bool, float, float], QueueRow]] = []
    for backend, seen in runs.seen():
        assert seen.workload is not None
        metadata, queued = seen.workload["metadata"], seen.queued
        job = job_of(seen, f"{backend}/{metadata['name']}", now)
        if not job.is_active:
            continue
        queue = _labels(seen.workload).get(QUEUE_LABEL) or str(seen.workload["spec"].get("queue", ""))
        to = queues.get(queue, queue)
        ahead = None
        if queued is not None and _waits(queued):
            ahead = sum(
                _order(other) < _order(queued)
                for other in waiting
                if queues.get(other["spec"].get("queueName", ""), other["spec"].get("queueName", "")) == to
            )
        starts = [unix_time(at) for pod in seen.pods if (at := pod.get("status", {}).get("startTime"))]
        row = QueueRow(
            job_id=job.id,
            name=metadata.get("annotations", {}).get(RUN_ID_ANNOTATION, metadata["name"]),
            state=job.state,
            queue=queue,
            nodes=size_of(seen.workload),
            gpus=_gpus(seen, gpu_resource),
            ahead=ahead,
            reason=job.detail if job.state == "queued" else "",
            start=min(starts) if starts and job.state == "running" else None,
        )
        order = _order(queued) if queued is not None else (0.0, unix_time(metadata["creationTimestamp"]))
        rows.append(((job.state != "running", *order), row))
    return tuple(row for _, row in sorted(rows, key=lambda item: item[0]))


def count_other_jobs(
    runs: Runs, pods: Iterable[Object], cluster_queues: Iterable[Object], gpu_resource: str
) -> tuple[int, int]:
    """Return how many jobs of other users run and wait: those whose pods request GPUs, and those in the same queues."""
    mine = {pod["metadata"].get("uid") for pod in runs.pods}
    placed: dict[str, bool] = {}
    for pod in pods:
        if pod["metadata"].get("uid") in mine or not amounts(pod["spec"]).get(gpu_resource):
            continue
        owners = pod["metadata"].get("ownerReferences") or [pod["metadata"]]
        uid = str(owners[0].get("uid"))
        placed[uid] = placed.get(uid, False) or bool(pod["spec"].get("nodeName"))
    pending = sum(int(queue.get("status", {}).get("pendingWorkloads", 0)) for queue in cluster_queues)
    own = sum(seen.queued is not None and _waits(seen.queued) for _, seen in runs.seen())
    running = sum(placed.values())
    return running, len(placed) - running + max(0, max(pending, runs.waiting) - own)


def _waits(queued: Object) -> bool:
    is_over = condition(queued, "Finished") is not None or queued["spec"].get("active") is False
    return not is_over and condition(queued, "QuotaReserved") is None


def _order(queued: Object) -> tuple[float, float]:
    """Return the sort key: priority, then age; a workload whose pods did not become ready is last."""
    evicted = condition(queued, "Evicted")
    since = queued["metadata"]["creationTimestamp"]
    if evicted is not None and evicted.get("reason") == "PodsReadyTimeout":
        since = evicted["lastTransitionTime"]
    return -float(queued["spec"].get("priority") or 0), unix_time(since)


def _gpus(seen: Observation, resource: str) -> int | None:
    """Return the number of GPUs of the gang; None if there is no pod template yet, as at the start of a TrainJob."""
    assert seen.workload is not None
    spec, queued = seen.workload["spec"], seen.queued if seen.queued is not None else {"spec": {}}
    described = [
        *(job["template"]["spec"]["template"] for job in spec.get("replicatedJobs", ())),
        *(part["template"] for part in (*spec.get("tasks", ()), *queued["spec"].get("podSets", ()))),
        *seen.pods,
    ]
    return int(size_of(seen.workload) * amounts(described[0]["spec"]).get(resource, 0)) if described else None


def _labels(item: Object) -> Mapping[str, str]:
    return item["metadata"].get("labels", {})  # type: ignore[no-any-return]


_PRODUCT = "nvidia.com/gpu.product"  # a label that GPU feature discovery puts on nodes
_ACTIVE = "status.phase!=Succeeded,status.phase!=Failed"
_BYTES = ("memory", "ephemeral-storage")
_GIB = 2**30
# What is missing from the view without the right to list a resource.
_PARTS = {
    "nodes": "GPUs and nodes",
    "pods": "which GPUs are free, and jobs of others",
    "localqueues.kueue.x-k8s.io": "quotas",
    "clusterqueues.kueue.x-k8s.io": "quotas",
    "workloads.kueue.x-k8s.io": "why runs wait in queues, and how many are ahead",
    "jobsets.jobset.x-k8s.io": "runs submitted as JobSets",
    "jobs.batch.volcano.sh": "runs submitted as Volcano Jobs",
    "trainjobs.trainer.kubeflow.org": "runs submitted as TrainJobs",
}


@dataclass(frozen=True)
class ClusterObjects:
    """The objects of a cluster. ``forbidden``: resources that the user may not list; their fields are None or empty."""

    runs: Runs
    nodes: tuple[Object, ...] | None = ()
    pods: tuple[Object, ...] | None = ()  # active ones in all namespaces
    local_queues: tuple[Object, ...] = ()
    cluster_queues: tuple[Object, ...] = ()
    forbidden: tuple[str, ...] = ()


def kubernetes_view(settings: KubernetesSpec) -> ClusterView:
    """Return the view of the configured context and namespace. Raises SchedulerError if the server does not answer.

    Default namespace: that of this user's newest run that has not ended; else the kubeconfig's.
    """
    from scaletrain_cli.launch.backends.kubernetes.api import connect, default_namespace

    elsewhere: list[str] = []
    namespace = settings.namespace
    if namespace is None:
        namespace, *elsewhere = _namespaces_of_runs(settings.context) or [default_namespace(settings.context)]
        settings = settings.model_copy(update={"namespace": namespace})
    view = make_view(fetch_objects(connect(settings.context, namespace), namespace), settings, time.time())
    if not elsewhere:
        return view
    return dataclasses.replace(view, warnings=(*view.warnings, reason("view-runs-elsewhere", namespaces=elsewhere)))


def _namespaces_of_runs(context: str | None) -> list[str]:
    """Return the namespaces of this user's runs that have not ended according to their records, newest first."""
    refs = []
    for run in list_runs():
        with contextlib.suppress(UsageError, OSError):  # reported when that run is shown
            ref = read_job_ref(run)
            if ref is not None and not ref.ended and context in (None, ref.context):
                refs.append((run.record.stat().st_mtime, ref.namespace))
    return list(dict.fromkeys(namespace for _, namespace in sorted(refs, reverse=True)))


def fetch_objects(cluster: Cluster, namespace: str) -> ClusterObjects:
    """Return the objects from which the view is made. Raises SchedulerError."""
    forbidden: list[str] = []

    def list_allowed(kind: Kind, where: str = namespace, **selectors: str) -> tuple[Object, ...] | None:
        try:
            # Items of some lists lack their kind.
            named = {"apiVersion": kind.api_version, "kind": kind.name}
            return tuple({**named, **one} for one in cluster.find(kind, where, **selectors))
        except NotServedError:
            return ()
        except ForbiddenError:
            if not cluster.serves(kind):  # permissions are checked before existence
                return ()
            forbidden.append(f"{kind.plural}.{kind.group}" if kind.group else kind.plural)
            return None

    workloads = {name: list_allowed(kind, labels=MANAGED) or () for name, kind in kinds.BACKENDS.items()}
    queued = list_allowed(kinds.WORKLOAD)
    nodes = list_allowed(kinds.NODE, "")
    runs = Runs(
        tuple((name, one) for name, objects in workloads.items() for one in objects),
        tuple(cluster.find(kinds.POD, namespace, labels=MANAGED)),
        queued or (),
        list_allowed(kinds.POD_GROUP) or () if workloads["volcano"] else (),
        nodes or (),
        queue_known=queued is not None,
        nodes_known=nodes is not None,
    )
    pods = list_allowed(kinds.POD, "", fields=_ACTIVE)
    return ClusterObjects(
        runs,
        nodes,
        pods,
        list_allowed(kinds.LOCAL_QUEUE) or (),
        list_allowed(kinds.CLUSTER_QUEUE, "") or (),
        tuple(forbidden),
    )


def make_view(seen: ClusterObjects, settings: KubernetesSpec, now: float) -> ClusterView:
    """Return the view; ``now`` is Unix time."""
    nodes = seen.nodes or ()
    backed = [queue for queue in seen.local_queues if "clusterQueue" in queue.get("spec", {})]  # which is optional
    queues = {queue["metadata"]["name"]: queue["spec"]["clusterQueue"] for queue in backed}
    reachable = [queue for queue in seen.cluster_queues if queue["metadata"]["name"] in queues.values()]
    running, waiting = count_other_jobs(seen.runs, seen.pods or (), reachable, settings.gpu_resource)
    context = f"context {settings.context}" if settings.context else "current context"
    return ClusterView(
        scheduler="kubernetes",
        cluster=f"{context}, {settings.used_namespace}",
        gpus=_gpu_rows(nodes, seen.pods, settings.gpu_resource) if seen.pods is not None else (),
        nodes=tuple(NodesRow(state, count) for state, count in Counter(map(_state, nodes)).items()),
        quotas=tuple(row for queue in reachable for row in _quotas(queue, queues, settings.gpu_resource)),
        queue=queue_rows(seen.runs, queues, settings.gpu_resource, now),
        others_running=running,
        others_queued=waiting,
        warnings=tuple(_warnings(seen, reachable, settings)),
    )


def _gpu_rows(nodes: Iterable[Object], pods: Iterable[Object], resource: str) -> tuple[GpuRow, ...]:
    used: Counter[str] = Counter()
    for pod in pods:
        used[pod.get("spec", {}).get("nodeName", "")] += int(amounts(pod["spec"]).get(resource, 0))
    having: dict[str, list[Object]] = {}
    for node in nodes:
        if _count(node, "capacity", resource):
            having.setdefault(node["metadata"].get("labels", {}).get(_PRODUCT, resource), []).append(node)
    rows = []
    for kind, members in having.items():
        total = healthy = taken = free_nodes = 0
        for node in members:
            capacity, allocatable = (_count(node, key, resource) for key in ("capacity", "allocatable"))
            usable = allocatable if _state(node) == "Ready" else 0
            held = min(usable, used[node["metadata"]["name"]])
            total, healthy, taken = total + capacity, healthy + usable, taken + held
            free_nodes += usable == capacity and not held
        rows.append(GpuRow(kind, total, taken, healthy - taken, total - healthy, len(members), free_nodes))
    return tuple(rows)


def _count(node: Object, key: str, resource: str) -> int:
    """Return the devices of a node; ``allocatable`` excludes broken ones, ``capacity`` does not."""
    return int(parse_quantity(node.get("status", {}).get(key, {}).get(resource, 0)))


def _state(node: Object) -> str:
    """Return the state of the node as kubectl shows it."""
    words = "Ready" if is_ready(node) else "NotReady"
    return f"{words},SchedulingDisabled" if node.get("spec", {}).get("unschedulable") else words


def _quotas(queue: Object, local: dict[str, str], gpu_resource: str) -> Iterator[QuotaRow]:
    """Yield the quotas of a ClusterQueue by flavor, under the names of the LocalQueues that point to it."""
    owner = "queue " + ", ".join(name for name, to in local.items() if to == queue["metadata"]["name"])
    cohort = queue["spec"].get("cohortName")
    for group in queue["spec"].get("resourceGroups", ()):
        for flavor in group["flavors"]:
            for quota in flavor["resources"]:
                name, limit = quota["name"], flavor["name"]
                if cohort:
                    most = quota.get("borrowingLimit")
                    limit += f", and may borrow {'' if most is None else f'{most} '}of cohort {cohort}"
                held = reserved(queue, flavor["name"], name)
                unit = _GIB if name in _BYTES else 1
                words = {gpu_resource: "GPUs", "cpu": "CPUs"}.get(name, f"{name}, GiB" if unit > 1 else name)
                allowed = parse_quantity(quota.get("nominalQuota", 0))
                yield QuotaRow(owner, limit, words, float(allowed / unit), float(held / unit))


def _warnings(seen: ClusterObjects, reachable: Iterable[Object], settings: KubernetesSpec) -> Iterator[Reason]:
    for right in seen.forbidden:
        if right in _PARTS:
            code = "view-not-permitted-in-all-namespaces" if right == "pods" else "view-not-permitted"
            yield reason(code, part=_PARTS[right], right=right)
    down = [f"{node['metadata']['name']} {_state(node)}" for node in seen.nodes or () if _state(node) != "Ready"]
    if down:
        yield reason("view-nodes-not-ready", nodes=down)
    for queue in (*seen.local_queues, *reachable):
        if (inactive := condition(queue, "Active", status="False")) is not None:
            said = inactive.get("message") or inactive.get("reason", "")
            yield reason("view-queue-not-active", kind=queue["kind"], queue=queue["metadata"]["name"], said=said)
    waiting = sum(int(queue.get("status", {}).get("pendingWorkloads", 0)) for queue in reachable)
    if waiting and seen.runs.queue_known and waiting > seen.runs.waiting:
        yield reason("view-ahead-in-namespace", namespace=settings.used_namespace, waiting=waiting)
