"""A Kubernetes cluster at a glance: nodes, Kueue's quotas and a namespace's runs, as rows that all schedulers share.

look() asks; make_view() is pure. A right that is missing for a part leaves the part out, and a note says so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from scaletrain_cli.errors import UsageError
from scaletrain_cli.launch.cluster_view import ClusterView, GpuRow, NodesRow, QuotaRow
from scaletrain_cli.launch.kubernetes.kinds import (
    BACKENDS,
    CLUSTER_QUEUE,
    LOCAL_QUEUE,
    NODE,
    POD,
    POD_GROUP,
    WORKLOAD,
    Kind,
    Object,
)
from scaletrain_cli.launch.kubernetes.names import MANAGED
from scaletrain_cli.launch.kubernetes.quantities import as_number, requested
from scaletrain_cli.launch.kubernetes.queue_rows import Runs, others, queue_rows
from scaletrain_cli.launch.kubernetes.refusals import NotServedError, RefusedError
from scaletrain_cli.launch.kubernetes.watchdog import is_ready
from scaletrain_cli.launch.kubernetes.whereabouts import read_whereabouts
from scaletrain_cli.rundir.paths import list_runs
from scaletrain_cli.spec.kubernetes import KubernetesSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.kubernetes.api import Cluster

_PRODUCT = "nvidia.com/gpu.product"  # a label that GPU feature discovery puts on nodes
_LIVING = "status.phase!=Succeeded,status.phase!=Failed"
_BYTES = ("memory", "ephemeral-storage")
_GIB = 2**30
# What a part takes the right to list, and what is missing without it.
_PARTS = {
    "nodes": "GPUs and nodes",
    "pods": "which GPUs are free, and jobs of others",
    "localqueues.kueue.x-k8s.io": "quotas",
    "clusterqueues.kueue.x-k8s.io": "quotas",
    "workloads.kueue.x-k8s.io": "why runs wait in queues, and how many are ahead",
    "jobsets.jobset.x-k8s.io": "runs that were sent as JobSets",
    "jobs.batch.volcano.sh": "runs that were sent as Volcano Jobs",
    "trainjobs.trainer.kubeflow.org": "runs that were sent as TrainJobs",
}


@dataclass(frozen=True)
class Seen:
    """What the API server holds. ``forbidden`` names what the user may not list, which is None here or left out."""

    runs: Runs
    nodes: tuple[Object, ...] | None = ()
    pods: tuple[Object, ...] | None = ()  # those that live, in all namespaces
    local_queues: tuple[Object, ...] = ()
    cluster_queues: tuple[Object, ...] = ()
    forbidden: tuple[str, ...] = ()


def kubernetes_view(settings: KubernetesSpec) -> ClusterView:
    """Return the view of the context and namespace that are set. Raises SchedulerError when the API server is silent.

    Where no namespace is set: that of this user's runs which are not over, the newest first; else the kubeconfig's.
    """
    from scaletrain_cli.launch.kubernetes.api import configured_namespace, connect

    elsewhere: list[str] = []
    if "namespace" not in settings.model_fields_set:
        used = _namespaces_of_runs(settings.context)
        chosen, *elsewhere = used or [configured_namespace(settings.context) or settings.namespace]
        settings = settings.model_copy(update={"namespace": chosen})
    view = make_view(look(connect(settings.context, settings.namespace), settings.namespace), settings, time.time())
    if not elsewhere:
        return view
    note = f"runs of yours are in {', '.join(elsewhere)}, too: set cluster.kubernetes.namespace in clusters.yaml"
    return dataclasses.replace(view, notes=(*view.notes, note))


def _namespaces_of_runs(context: str | None) -> list[str]:
    """Where this user's runs are that are not over as far as is known here, the newest first."""
    places = []
    for run in list_runs():
        with contextlib.suppress(UsageError, OSError):  # a damaged run is told of where it is looked at
            place = read_whereabouts(run)
            if place is not None and not place.ended and context in (None, place.context):
                places.append((run.record.stat().st_mtime, place.namespace))
    return list(dict.fromkeys(namespace for _, namespace in sorted(places, reverse=True)))


def look(cluster: Cluster, namespace: str) -> Seen:
    """Everything that the view is made of; raises SchedulerError."""
    forbidden: list[str] = []

    def ask(kind: Kind, where: str = namespace, **selectors: str) -> tuple[Object, ...] | None:
        try:
            return tuple(_named(kind, one) for one in cluster.find(kind, where, **selectors))
        except NotServedError:
            return ()
        except RefusedError as error:
            if not error.is_rights:
                raise
            if not cluster.serves(kind):  # rights are looked at before that
                return ()
            forbidden.append(f"{kind.plural}.{kind.group}" if kind.group else kind.plural)
            return None

    workloads = {name: ask(kind, labels=MANAGED) or () for name, kind in BACKENDS.items()}
    queued = ask(WORKLOAD)
    nodes = ask(NODE, "")
    runs = Runs(
        tuple((name, one) for name, found in workloads.items() for one in found),
        tuple(cluster.find(POD, namespace, labels=MANAGED)),
        queued or (),
        ask(POD_GROUP) or () if workloads["volcano"] else (),
        nodes or (),
        queue_known=queued is not None,
        nodes_known=nodes is not None,
    )
    pods = ask(POD, "", fields=_LIVING)
    return Seen(runs, nodes, pods, ask(LOCAL_QUEUE) or (), ask(CLUSTER_QUEUE, "") or (), tuple(forbidden))


def _named(kind: Kind, item: Object) -> Object:
    """As it would be had alone: the items of some lists do not say what they are."""
    return {"apiVersion": kind.api_version, "kind": kind.name, **item}


def make_view(seen: Seen, settings: KubernetesSpec, now: float) -> ClusterView:
    """The view of what was seen; ``now`` is Unix time."""
    nodes = seen.nodes or ()
    queues = {queue["metadata"]["name"]: queue["spec"]["clusterQueue"] for queue in seen.local_queues}
    reachable = [queue for queue in seen.cluster_queues if queue["metadata"]["name"] in queues.values()]
    running, waiting = others(seen.runs, seen.pods or (), reachable, settings.gpu_resource)
    return ClusterView(
        scheduler="kubernetes",
        cluster=f"{f'context {settings.context}' if settings.context else 'current context'}, {settings.namespace}",
        gpus=_gpu_rows(nodes, seen.pods, settings.gpu_resource) if seen.pods is not None else (),
        nodes=tuple(NodesRow(state, count) for state, count in Counter(map(_state, nodes)).items()),
        quotas=tuple(row for queue in reachable for row in _quotas(queue, queues, settings.gpu_resource)),
        queue=queue_rows(seen.runs, queues, settings.gpu_resource, now),
        others_running=running,
        others_queued=waiting,
        notes=tuple(_notes(seen, reachable, settings)),
    )


def _gpu_rows(nodes: Iterable[Object], pods: Iterable[Object], resource: str) -> tuple[GpuRow, ...]:
    used: Counter[str] = Counter()
    for pod in pods:
        used[pod.get("spec", {}).get("nodeName", "")] += int(requested(pod["spec"], resource))
    having: dict[str, list[Object]] = {}
    for node in nodes:
        if _count(node, "capacity", resource):
            having.setdefault(node["metadata"].get("labels", {}).get(_PRODUCT, resource), []).append(node)
    found = []
    for kind, members in having.items():
        total = in_order = taken = wholly_free = 0
        for node in members:
            there, well = (_count(node, key, resource) for key in ("capacity", "allocatable"))
            usable = well if _state(node) == "Ready" else 0
            held = min(usable, used[node["metadata"]["name"]])
            total, in_order, taken = total + there, in_order + usable, taken + held
            wholly_free += usable == there and not held
        found.append(GpuRow(kind, total, taken, in_order - taken, total - in_order, len(members), wholly_free))
    return tuple(found)


def _count(node: Object, key: str, resource: str) -> int:
    """Of ``allocatable``, a device that its plugin found broken is no longer part; of ``capacity`` it is."""
    return int(as_number(node.get("status", {}).get(key, {}).get(resource, 0)))


def _state(node: Object) -> str:
    """As kubectl has it."""
    words = "Ready" if is_ready(node) else "NotReady"
    return f"{words},SchedulingDisabled" if node.get("spec", {}).get("unschedulable") else words


def _quotas(queue: Object, local: dict[str, str], gpu_resource: str) -> Iterator[QuotaRow]:
    """What a ClusterQueue may hold, by flavor, under the names of the queues that lead to it."""
    owner = "queue " + ", ".join(name for name, to in local.items() if to == queue["metadata"]["name"])
    cohort = queue["spec"].get("cohortName")
    reserved = {
        (flavor["name"], resource["name"]): as_number(resource.get("total", 0))
        for flavor in queue.get("status", {}).get("flavorsReservation", ())
        for resource in flavor.get("resources", ())
    }
    for group in queue["spec"].get("resourceGroups", ()):
        for flavor in group["flavors"]:
            for quota in flavor["resources"]:
                name, limit = quota["name"], flavor["name"]
                if cohort:
                    most = quota.get("borrowingLimit")
                    limit += f", and may borrow {'' if most is None else f'{most} '}of cohort {cohort}"
                held = reserved.get((flavor["name"], name), Fraction(0))
                unit = _GIB if name in _BYTES else 1
                words = {gpu_resource: "GPUs", "cpu": "CPUs"}.get(name, f"{name}, GiB" if unit > 1 else name)
                allowed = as_number(quota.get("nominalQuota", 0))
                yield QuotaRow(owner, limit, words, float(allowed / unit), float(held / unit))


def _notes(seen: Seen, reachable: Iterable[Object], settings: KubernetesSpec) -> Iterator[str]:
    for right in seen.forbidden:
        where = " in all namespaces" if right == "pods" else ""
        if right in _PARTS:
            yield f"not shown: {_PARTS[right]}; it takes the right to list {right}{where}"
    down = [f"{node['metadata']['name']} {_state(node)}" for node in seen.nodes or () if _state(node) != "Ready"]
    if down:
        yield f"out of order: {', '.join(down)}"
    for queue in (*seen.local_queues, *reachable):
        what = f"{queue['kind']} {queue['metadata']['name']}"
        for condition in queue.get("status", {}).get("conditions", ()):
            if condition["type"] == "Active" and condition["status"] == "False":
                yield f"{what} is not active: {condition.get('message') or condition.get('reason', '')}"
    waiting = sum(int(queue.get("status", {}).get("pendingWorkloads", 0)) for queue in reachable)
    if waiting and seen.runs.queue_known and waiting > seen.runs.waiting:
        yield f"ahead counts namespace {settings.namespace} alone, of the {waiting} that wait for the same quota"
