"""Whether a cluster has room for the job at all: its queue's quota, its namespace's limits, its nodes; and whether now.

That there is no room now is a note: jobs wait. That there never will be is a problem.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from fractions import Fraction

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.kubernetes.api import Cluster
from scaletrain_cli.launch.kubernetes.kinds import (
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
from scaletrain_cli.launch.kubernetes.nodes import CORDONED, misfits
from scaletrain_cli.launch.kubernetes.obstacles import Found, missing, problem
from scaletrain_cli.launch.kubernetes.quantities import as_number, shown
from scaletrain_cli.launch.kubernetes.quota import Cohort, Nearness, judge_quota, takes_namespace
from scaletrain_cli.launch.kubernetes.refusals import RefusedError
from scaletrain_cli.launch.outlook import Start
from scaletrain_cli.spec import RunSpec

# Node pools that a cloud can make larger: that a node is not there now does not mean that it cannot come.
_GROWING = (
    *("cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "kubernetes.azure.com/agentpool"),
    "karpenter.sh/nodepool",
)


def queue_room(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
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
    yield from _activity(spec, local, kubernetes.queue)
    name = local["spec"]["clusterQueue"]
    whole = cluster.get(CLUSTER_QUEUE, "", name)
    if whole is None:
        yield problem(spec, "queue", f"leads to ClusterQueue {name}, which is not there.", kubernetes.queue)
        return
    yield from _activity(spec, whole, kubernetes.queue)
    namespace = cluster.get(NAMESPACE, "", kubernetes.namespace) or {"metadata": {}}
    if not takes_namespace(whole, namespace["metadata"].get("labels", {})):
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
        most = as_number(limit)
        if amount > most:
            text = f"can never hold it: the job needs {shown(amount)} {name}, and its capability is {limit}."
            yield problem(spec, "queue", text, given)
        elif amount > most - as_number(taken.get(name, 0)):
            yield f"queue {given} is busy: {taken[name]} of {limit} {name} are taken; the job will wait"


def _activity(spec: RunSpec, queue: Object, given: str) -> Iterator[Found]:
    what = f"{queue['kind']} {queue['metadata']['name']}"
    if queue["spec"].get("stopPolicy", "None") != "None":
        yield f"{what} is held (stopPolicy {queue['spec']['stopPolicy']}): the job waits until it is let go"
        yield Start(None, f"{what} is held")
        return
    for condition in queue.get("status", {}).get("conditions", ()):
        if condition["type"] == "Active" and condition["status"] == "False":
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
    answer = judge_quota(queue, flavors, cohort, needed, pod, _nearness(cluster, spec))
    given = spec.cluster.kubernetes.queue
    for reason in answer.never:
        yield problem(spec, "queue", f"ClusterQueue {queue['metadata']['name']} can never admit it: {reason}.", given)
    if answer.busy and not answer.never:
        yield f"queue {given} is busy: {answer.busy}; the job will wait"
    yield _start(queue, str(given), busy=bool(answer.busy))
    for resource in answer.uncovered:
        yield f"no quota of queue {given} covers {resource}: the job waits for ever unless Kueue is told to exclude it"


def _nearness(cluster: Cluster, spec: RunSpec) -> Nearness | None:
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
    return Nearness(topology.key, levels)


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
            found[name] = found.get(name, Fraction(0)) + as_number(amount) * spec.cluster.nodes
    return found


def namespace_room(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
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
            most, used = as_number(hard), as_number(status.get("used", {}).get(limited, 0))
            what = f"ResourceQuota {quota['metadata']['name']} of the namespace allows {hard} {limited}"
            if wanted > most:
                yield problem(spec, "namespace", f"{what}; the job needs more than that.")
            elif wanted > most - used:
                yield f"{what}, of which {status['used'][limited]} are used: the job waits for the rest"


def node_room(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    """Without a queue nobody else would say that no node will ever do."""
    if spec.cluster.kubernetes.kueue or not pod:
        return
    nodes = cluster.find(NODE, "")
    one = {name: amount / spec.cluster.nodes for name, amount in _needed(spec, pod).items()}
    why: dict[str, int] = {}
    fits = cordoned = 0
    for node in nodes:
        misfit = misfits(node, one, pod.get("nodeSelector", {}), pod.get("tolerations", ()))
        if misfit:
            why[misfit] = why.get(misfit, 0) + 1
        if not misfit:
            fits += _pods_on(node, one)
        elif misfit == CORDONED:
            cordoned += _pods_on(node, one)
    if fits >= spec.cluster.nodes:
        return
    if fits + cordoned >= spec.cluster.nodes:
        yield f"{why[CORDONED]} nodes that would do take no pods now (cordoned): the job waits until they do"
        return
    lacks = ", ".join(f"{count} lack {reason}" for reason, count in sorted(why.items(), key=lambda item: -item[1]))
    text = f"the {len(nodes)} nodes can ever run {fits} pods of it, and {spec.cluster.nodes} are needed ({lacks})"
    if any(label in node["metadata"].get("labels", {}) for node in nodes for label in _GROWING):
        yield f"{text}; the job waits until the node pools have grown"
    else:
        yield Problem(spec.where("cluster.nodes"), "cluster.nodes", f"{text}.", str(spec.cluster.nodes))


def _pods_on(node: Object, one: dict[str, Fraction]) -> int:
    """How many such pods have room on the node when nothing else is there; nothing keeps two of a gang apart."""
    has = node.get("status", {}).get("allocatable", {})
    return min((int(as_number(has.get(name, 0)) // amount) for name, amount in one.items() if amount), default=1)
