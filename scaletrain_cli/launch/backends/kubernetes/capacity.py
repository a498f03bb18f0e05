"""Whether a cluster has room for the job at all: its queue's quota, its namespace's limits, its nodes; and whether now.

That there is no room now is a note: jobs wait. That there never will be is a problem.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.backends.base import Start
from scaletrain_cli.launch.backends.kubernetes.api import Cluster
from scaletrain_cli.launch.backends.kubernetes.api_errors import RefusedError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import (
    CLUSTER_QUEUE,
    COHORT,
    FLAVOR,
    LOCAL_QUEUE,
    NAMESPACE,
    NODE,
    RESOURCE_QUOTA,
    TOPOLOGY,
    VOLCANO_QUEUE,
    Object,
)
from scaletrain_cli.launch.backends.kubernetes.nodes import CORDONED, misfits, parse_quantity, quantity_text
from scaletrain_cli.launch.backends.kubernetes.quota import (
    Cohort,
    TopologyRequest,
    accepts_namespace,
    check_quota,
    flavors_for,
)
from scaletrain_cli.spec import RunSpec

# What a preflight finds: problems by the key of the spec, notes, and when the job could start.


Found = Problem | str | Start  # a problem, a note that is worth telling, or what is known of the start
_SECTION = "cluster.kubernetes"
_NAMES_SHOWN = 8


def missing(spec: RunSpec, key: str, given: str, what: str, there: Sequence[Object]) -> Problem:
    names = names_shown(sorted(str(item["metadata"]["name"]) for item in there))
    return problem(spec, key, f"there is no such {what}. There are: {names}.", given)


def problem(spec: RunSpec, key: str, message: str, given: str | None = None) -> Problem:
    dotted = f"{_SECTION}.{key}" if key else _SECTION
    return Problem(spec.where(dotted), dotted, message, given)


def names_shown(names: Sequence[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return ", ".join(names[:_NAMES_SHOWN]) + more


# Node pools that a cloud can make larger: that a node is not there now does not mean that it cannot come.
_GROWING = (
    *("cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "kubernetes.azure.com/agentpool"),
    "karpenter.sh/nodepool",
)
_OF_CLUSTER_QUEUE = "ClusterQueueIsInactive"


def queue_capacity(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    kubernetes = spec.cluster.kubernetes
    if kubernetes.queue is None:
        return
    if not kubernetes.kueue:
        queue = cluster.get(VOLCANO_QUEUE, "", kubernetes.queue)
        if queue is None:
            yield missing(spec, "queue", kubernetes.queue, "Volcano queue", cluster.find(VOLCANO_QUEUE, ""))
        elif queue.get("status", {}).get("state", "Open") != "Open":
            yield problem(spec, "queue", f"is {queue['status']['state']}, and takes no jobs.", kubernetes.queue)
        else:
            yield from _capability(spec, queue, pod)
        return
    local = cluster.get(LOCAL_QUEUE, kubernetes.namespace, kubernetes.queue)
    if local is None:
        there = cluster.find(LOCAL_QUEUE, kubernetes.namespace)
        yield missing(spec, "queue", kubernetes.queue, f"LocalQueue in namespace {kubernetes.namespace}", there)
        return
    name = local["spec"]["clusterQueue"]
    try:
        whole = cluster.get(CLUSTER_QUEUE, "", name)
    except RefusedError as error:
        if error.is_rights:
            yield from _activity(spec, local, kubernetes.queue)
        raise
    yield from _activity(spec, local, kubernetes.queue, caused_elsewhere=whole is not None)
    if whole is None:
        yield problem(spec, "queue", f"leads to ClusterQueue {name}, which is not there.", kubernetes.queue)
        return
    yield from _activity(spec, whole, kubernetes.queue)
    namespace = cluster.get(NAMESPACE, "", kubernetes.namespace) or {"metadata": {}}
    if not accepts_namespace(whole, namespace["metadata"].get("labels", {})):
        text = f"ClusterQueue {name} takes no jobs of namespace {kubernetes.namespace} (its namespaceSelector)."
        yield problem(spec, "queue", text, kubernetes.queue)
    yield from _quota(cluster, spec, whole, pod)


def _capability(spec: RunSpec, queue: Object, pod: Object) -> Iterator[Found]:
    """What a queue of Volcano may hold at the most; a gang that needs more is never enqueued."""
    given = spec.cluster.kubernetes.queue
    taken = queue.get("status", {}).get("allocated", {})
    for name, amount in _needed(spec, pod).items():
        limit = queue.get("spec", {}).get("capability", {}).get(name)
        if limit is None:
            continue
        most = parse_quantity(limit)
        if amount > most:
            text = f"can never hold it: the job needs {quantity_text(amount)} {name}, and its capability is {limit}."
            yield problem(spec, "queue", text, given)
        elif amount > most - parse_quantity(taken.get(name, 0)):
            yield f"queue {given} is busy: {taken[name]} of {limit} {name} are taken; the job will wait"


def _activity(spec: RunSpec, queue: Object, given: str, *, caused_elsewhere: bool = False) -> Iterator[Found]:
    """Yield why the queue takes no jobs. A LocalQueue repeats what its ClusterQueue says, which has the cause."""
    what = f"{queue['kind']} {queue['metadata']['name']}"
    if queue["spec"].get("stopPolicy", "None") != "None":
        yield f"{what} is held (stopPolicy {queue['spec']['stopPolicy']}): the job waits until it is let go"
        yield Start(None, f"{what} is held")
        return
    for condition in queue.get("status", {}).get("conditions", ()):
        if condition["type"] == "Active" and condition["status"] == "False":
            if caused_elsewhere and condition.get("reason") == _OF_CLUSTER_QUEUE:
                continue
            said = f"{condition.get('reason', '')}: {condition.get('message', '')}"
            yield problem(spec, "queue", f"{what} is not active: {said}", given)


def _quota(cluster: Cluster, spec: RunSpec, queue: Object, pod: Object) -> Iterator[Found]:
    flavors = {flavor["metadata"]["name"]: flavor for flavor in cluster.find(FLAVOR, "")}
    name = queue["spec"].get("cohortName")
    cohort = None
    if name:
        own = cluster.get(COHORT, "", name)
        others = [other for other in cluster.find(CLUSTER_QUEUE, "") if other["spec"].get("cohortName") == name]
        cohort = Cohort(others, own, bounded=own is None or not own.get("spec", {}).get("parentName"))
    needed = _needed(spec, pod) | {"pods": Fraction(spec.cluster.nodes)}
    answer = check_quota(queue, flavors, cohort, needed, pod, _nearness(cluster, spec))
    given = spec.cluster.kubernetes.queue
    for reason in answer.never:
        yield problem(spec, "queue", f"ClusterQueue {queue['metadata']['name']} can never admit it: {reason}.", given)
    if answer.busy and not answer.never:
        yield f"queue {given} is busy: {answer.busy}; the job will wait"
    yield _start(queue, str(given), busy=bool(answer.busy))
    for resource in answer.uncovered:
        yield f"no quota of queue {given} covers {resource}: the job waits for ever unless Kueue is told to exclude it"


def _nearness(cluster: Cluster, spec: RunSpec) -> TopologyRequest | None:
    topology = spec.cluster.kubernetes.topology
    if topology is None:
        return None
    try:
        known = cluster.find(TOPOLOGY, "")
    except RefusedError as error:
        if not error.is_rights:
            raise
        known = []
    levels = {item["metadata"]["name"]: [level["nodeLabel"] for level in item["spec"]["levels"]] for item in known}
    return TopologyRequest(topology.key, levels)


def _start(queue: Object, given: str, *, busy: bool) -> Start:
    """Kueue tells of no time. Whether a job that waits is of a lower priority than this one, only Kueue knows."""
    waiting = int(queue.get("status", {}).get("pendingWorkloads", 0))
    before = f", with {waiting} jobs before it at the most" if waiting else ""
    if busy:
        return Start(None, f"queue {given} has to get quota back first{before}; Kueue tells no time")
    if waiting:
        return Start(None, f"queue {given} has quota free{before}; Kueue tells no time")
    return Start(
        time.time(), f"queue {given} has quota free and nothing waits for it (Kueue); pods and image take more"
    )


def _needed(spec: RunSpec, pod: Object) -> dict[str, Fraction]:
    """What all pods request together."""
    found: dict[str, Fraction] = {}
    for container in pod.get("containers", ()):
        resources = container.get("resources", {})
        for name, amount in {**resources.get("limits", {}), **resources.get("requests", {})}.items():
            found[name] = found.get(name, Fraction(0)) + parse_quantity(amount) * spec.cluster.nodes
    return found


def namespace_quota(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    """A namespace's own limits, at which pods are refused one by one."""
    needed = _needed(spec, pod) | {"pods": Fraction(spec.cluster.nodes)}
    for quota in cluster.find(RESOURCE_QUOTA, spec.cluster.kubernetes.namespace):
        status = quota.get("status", {})
        if quota.get("spec", {}).get("scopes") or quota.get("spec", {}).get("scopeSelector"):
            continue  # it may not be about such pods
        for limited, hard in status.get("hard", {}).items():
            wanted = needed.get(limited.removeprefix("requests."))
            if wanted is None:
                continue
            most, used = parse_quantity(hard), parse_quantity(status.get("used", {}).get(limited, 0))
            what = f"ResourceQuota {quota['metadata']['name']} of the namespace allows {hard} {limited}"
            if wanted > most:
                yield problem(spec, "namespace", f"{what}; the job needs more than that.")
            elif wanted > most - used:
                yield f"{what}, of which {status['used'][limited]} are used: the job waits for the rest"


def node_capacity(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    """Yield why there are not enough nodes for the gang. Kueue's quota is a number, without labels and cordons."""
    if not pod:
        return
    places, may_grow = _places(cluster, spec, pod)
    nodes = cluster.find(NODE, "")
    one = {name: amount / spec.cluster.nodes for name, amount in _needed(spec, pod).items()}
    rooms = [_room(nodes, one, place) for place in places]
    room = max(rooms, key=lambda room: (room.fits, room.cordoned), default=None)
    if room is None or room.fits >= spec.cluster.nodes:
        return
    if room.fits + room.cordoned >= spec.cluster.nodes:
        yield f"{room.why[CORDONED]} nodes that would do take no pods now (cordoned): the job waits until they do"
        yield Start(None, "nodes that it needs are cordoned")
        return
    lacks = ", ".join(f"{count} lack {reason}" for reason, count in sorted(room.why.items(), key=lambda item: -item[1]))
    text = f"the {len(nodes)} nodes can ever run {room.fits} pods of it, and {spec.cluster.nodes} are needed ({lacks})"
    pools = any(label in node["metadata"].get("labels", {}) for node in nodes for label in _GROWING)
    if may_grow or pools:
        come = "the node pools have grown" if pools else "an admission check of its queue brings more"
        yield f"{text}; the job waits until {come}"
        yield Start(None, "there are not yet enough nodes for it")
    else:
        yield Problem(spec.where("cluster.nodes"), "cluster.nodes", f"{text}.", str(spec.cluster.nodes))


@dataclass(frozen=True)
class _Place:
    """Which nodes a pod may be on."""

    labels: Mapping[str, str]
    tolerations: Sequence[Object]


@dataclass(frozen=True)
class _Room:
    """Pods that the nodes could run now, and once uncordoned; ``why`` counts the other nodes by what they lack."""

    fits: int
    cordoned: int
    why: Mapping[str, int]


def _places(cluster: Cluster, spec: RunSpec, pod: Object) -> tuple[list[_Place], bool]:
    """Where the pods may go, one place for each flavor that a queue of Kueue could choose; and whether nodes may come.

    An admission check of the queue may stand for another cluster, or for nodes that are made on demand.
    """
    selector, tolerations = pod.get("nodeSelector", {}), list(pod.get("tolerations", ()))
    kubernetes = spec.cluster.kubernetes
    if not kubernetes.kueue or kubernetes.queue is None:
        return [_Place(selector, tolerations)], False
    local = cluster.get(LOCAL_QUEUE, kubernetes.namespace, kubernetes.queue)
    queue = cluster.get(CLUSTER_QUEUE, "", local["spec"]["clusterQueue"]) if local is not None else None
    if queue is None:
        return [], False  # which is told where the queue is looked at
    flavors = {flavor["metadata"]["name"]: flavor for flavor in cluster.find(FLAVOR, "")}
    found = []
    for name in flavors_for(queue, flavors, _needed(spec, pod), pod):
        more = flavors[name].get("spec", {})
        place = _Place({**more.get("nodeLabels", {}), **selector}, [*tolerations, *more.get("tolerations", ())])
        found.append(place)
    return found, any(key in queue["spec"] for key in ("admissionChecks", "admissionChecksStrategy"))


def _room(nodes: Sequence[Object], one: Mapping[str, Fraction], place: _Place) -> _Room:
    why: dict[str, int] = {}
    fits = cordoned = 0
    for node in nodes:
        misfit = misfits(node, one, place.labels, place.tolerations)
        if misfit:
            why[misfit] = why.get(misfit, 0) + 1
        if not misfit:
            fits += _pods_on(node, one)
        elif misfit == CORDONED:
            cordoned += _pods_on(node, one)
    return _Room(fits, cordoned, why)


def _pods_on(node: Object, one: Mapping[str, Fraction]) -> int:
    """How many such pods have room on the node when nothing else is there; nothing keeps two of a gang apart."""
    has = node.get("status", {}).get("allocatable", {})
    return min((int(parse_quantity(has.get(name, 0)) // amount) for name, amount in one.items() if amount), default=1)
