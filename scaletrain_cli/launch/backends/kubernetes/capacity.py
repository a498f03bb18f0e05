"""Check whether the job fits into the cluster: the quota of its queue and namespace, and its nodes.

A job that does not fit now gives a note, since it can wait. One that can never fit gives a problem.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from scaletrain_cli.errors import Problem
from scaletrain_cli.launch.backends.base import Start
from scaletrain_cli.launch.backends.kubernetes import api_kinds as kinds
from scaletrain_cli.launch.backends.kubernetes.api import Cluster, ForbiddenError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.launch.backends.kubernetes.messages import problem, reason
from scaletrain_cli.launch.backends.kubernetes.names import NODE as NODE_CONTAINER
from scaletrain_cli.launch.backends.kubernetes.observation import condition
from scaletrain_cli.launch.backends.kubernetes.quota import (
    Cohort,
    TopologyRequest,
    accepts_namespace,
    check_quota,
    flavors_for,
    parse_quantity,
    quantity_text,
    tolerated,
)
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.bad_nodes import Exclusion, next_exclusion
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.text import listed

Found = Problem | Reason | Start  # a problem, a note, or the possible start
NAMES_SHOWN = 8
_CORDONED = "being schedulable"  # what a cordoned node lacks temporarily; checked last
# Labels of node pools that an autoscaler may extend.
_GROWING = (
    *("cloud.google.com/gke-nodepool", "eks.amazonaws.com/nodegroup", "kubernetes.azure.com/agentpool"),
    "karpenter.sh/nodepool",
)
_OF_CLUSTER_QUEUE = "ClusterQueueIsInactive"
_MULTIKUEUE = "kueue.x-k8s.io/multikueue"  # the controller of admission checks that sends jobs to other clusters


def missing(spec: RunSpec, key: str, given: str, what: str, there: Sequence[Object]) -> Problem:
    """Return the problem that no object ``given`` exists, with the names of existing ones."""
    names = listed(sorted(str(item["metadata"]["name"]) for item in there), NAMES_SHOWN) or "none"
    return problem(spec, key, reason("object-missing", kind=what, names=names), given)


def queue_capacity(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    """Yield why the queue cannot admit the job, ever or now, and when the job could start."""
    kubernetes = spec.cluster.kubernetes
    if kubernetes.queue is None:
        return
    if not kubernetes.kueue:
        if (queue := cluster.get(kinds.VOLCANO_QUEUE, "", kubernetes.queue)) is None:
            yield missing(spec, "queue", kubernetes.queue, "Volcano queue", cluster.find(kinds.VOLCANO_QUEUE, ""))
        elif queue.get("status", {}).get("state", "Open") != "Open":
            closed = reason("volcano-queue-closed", state=queue["status"]["state"])
            yield problem(spec, "queue", closed, kubernetes.queue)
        else:
            yield from _capability(spec, queue, pod)
        return
    local = cluster.get(kinds.LOCAL_QUEUE, kubernetes.used_namespace, kubernetes.queue)
    if local is None:
        there = cluster.find(kinds.LOCAL_QUEUE, kubernetes.used_namespace)
        yield missing(spec, "queue", kubernetes.queue, f"LocalQueue in namespace {kubernetes.used_namespace}", there)
        return
    if (name := local.get("spec", {}).get("clusterQueue")) is None:  # which its schema permits
        yield problem(spec, "queue", reason("queue-without-cluster-queue"), kubernetes.queue)
        return
    try:
        whole = cluster.get(kinds.CLUSTER_QUEUE, "", name)
    except ForbiddenError:
        yield from _activity(spec, local, kubernetes.queue)
        raise
    yield from _activity(spec, local, kubernetes.queue, caused_elsewhere=whole is not None)
    if whole is None:
        yield problem(spec, "queue", reason("cluster-queue-missing", queue=name), kubernetes.queue)
        return
    yield from _activity(spec, whole, kubernetes.queue)
    namespace = cluster.get(kinds.NAMESPACE, "", kubernetes.used_namespace) or {"metadata": {}}
    if not accepts_namespace(whole, namespace["metadata"].get("labels", {})):
        refused = reason("namespace-not-admitted", queue=name, namespace=kubernetes.used_namespace)
        yield problem(spec, "queue", refused, kubernetes.queue)
    yield from _quota(cluster, spec, whole, pod)
    for check in _admission_checks(whole):
        admission = cluster.get(kinds.ADMISSION_CHECK, "", check)
        if admission is not None and admission["spec"]["controllerName"] == _MULTIKUEUE:
            yield problem(spec, "queue", reason("queue-of-other-clusters", queue=name, check=check), kubernetes.queue)


def _admission_checks(queue: Object) -> list[str]:
    """Return the names of the admission checks of a ClusterQueue, which v1beta1 may list in two ways."""
    of_flavors = queue["spec"].get("admissionChecksStrategy", {}).get("admissionChecks", ())
    return [*queue["spec"].get("admissionChecks", ()), *(check["name"] for check in of_flavors)]


def _capability(spec: RunSpec, queue: Object, pod: Object) -> Iterator[Found]:
    """Yield a problem if the capability of the Volcano queue is too small: such a gang is never enqueued."""
    given = spec.cluster.kubernetes.queue
    taken = queue.get("status", {}).get("allocated", {})
    for name, amount in _needed(spec, pod).items():
        if (limit := queue.get("spec", {}).get("capability", {}).get(name)) is None:
            continue
        most = parse_quantity(limit)
        if amount > most:
            needed = quantity_text(amount)
            too_small = reason("volcano-queue-too-small", needed=needed, resource=name, total=str(limit))
            yield problem(spec, "queue", too_small, given)
        elif amount > most - parse_quantity(taken.get(name, 0)):
            why = reason("quota-used", used=str(taken[name]), total=str(limit), resource=name)
            yield reason("queue-busy", queue=given, why=why)


def _activity(spec: RunSpec, queue: Object, given: str, *, caused_elsewhere: bool = False) -> Iterator[Found]:
    """Yield why the queue admits no jobs. A LocalQueue repeats the state of its ClusterQueue, which has the cause."""
    what = f"{queue['kind']} {queue['metadata']['name']}"
    if queue["spec"].get("stopPolicy", "None") != "None":
        yield reason("queue-stopped", queue=what, policy=queue["spec"]["stopPolicy"])
        yield Start(None, reason("start-queue-stopped", queue=what))
        return
    inactive = condition(queue, "Active", status="False")
    if inactive is not None and not (caused_elsewhere and inactive.get("reason") == _OF_CLUSTER_QUEUE):
        said = f"{inactive.get('reason', '')}: {inactive.get('message', '')}"
        yield problem(spec, "queue", reason("queue-not-active", queue=what, said=said), given)


def _quota(cluster: Cluster, spec: RunSpec, queue: Object, pod: Object) -> Iterator[Found]:
    flavors = {flavor["metadata"]["name"]: flavor for flavor in cluster.find(kinds.FLAVOR, "")}
    name = queue["spec"].get("cohortName")
    cohort = None
    if name:
        own = cluster.get(kinds.COHORT, "", name)
        others = [other for other in cluster.find(kinds.CLUSTER_QUEUE, "") if other["spec"].get("cohortName") == name]
        cohort = Cohort(others, own, bounded=own is None or not own.get("spec", {}).get("parentName"))
    needed = _needed(spec, pod) | {"pods": Fraction(spec.cluster.nodes)}
    answer = check_quota(queue, flavors, cohort, needed, pod, _topology_request(cluster, spec))
    given = spec.cluster.kubernetes.queue
    for never in answer.never:
        yield problem(spec, "queue", reason("queue-never", queue=queue["metadata"]["name"], why=never), given)
    for busy in answer.busy if not answer.never else ():
        yield reason("queue-busy", queue=given, why=busy)
    yield _start(queue, str(given), busy=bool(answer.busy))
    for resource in answer.uncovered:
        yield reason("resource-without-quota", queue=given, resource=resource)


def _topology_request(cluster: Cluster, spec: RunSpec) -> TopologyRequest | None:
    topology = spec.cluster.kubernetes.topology
    if topology is None:
        return None
    try:
        known = cluster.find(kinds.TOPOLOGY, "")
    except ForbiddenError:
        known = []
    levels = {item["metadata"]["name"]: [level["nodeLabel"] for level in item["spec"]["levels"]] for item in known}
    return TopologyRequest(topology.key, levels)


def _start(queue: Object, given: str, *, busy: bool) -> Start:
    """Return the possible start. Kueue shows no times, and not which waiting jobs have a higher priority."""
    waiting = int(queue.get("status", {}).get("pendingWorkloads", 0))
    if busy:
        return Start(None, reason("start-quota-used", queue=given, waiting=waiting))
    if waiting:
        return Start(None, reason("start-behind-others", queue=given, waiting=waiting))
    return Start(time.time(), reason("start-quota-free", queue=given))


def _needed(spec: RunSpec, pod: Object) -> dict[str, Fraction]:
    """Return the total requests of all pods by resource."""
    return {name: amount * spec.cluster.nodes for name, amount in amounts(pod).items()}


def amounts(pod: Object, part: str = "requests") -> dict[str, Fraction]:
    """Return the ``requests`` or ``limits`` of a pod with this spec by resource; without a request, the limit is it.

    Those of its containers and side-cars together, but at least those of each container that runs before them.
    """
    by_resource: dict[str, Fraction] = {}
    beside, others = pod.get("containers") or (), pod.get("initContainers") or ()
    first = [init for init in others if init.get("restartPolicy") != "Always"]
    for container in (*beside, *(sidecar for sidecar in others if sidecar not in first), *first):
        resources = container.get("resources", {})
        requested = resources.get("requests", {}) if part == "requests" else {}
        for name, text in {**resources.get("limits", {}), **requested}.items():
            before, amount = by_resource.get(name, Fraction(0)), parse_quantity(text)
            by_resource[name] = max(before, amount) if container in first else before + amount
    return by_resource


def namespace_quota(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    """Yield the ResourceQuotas of the namespace that are too small: they would refuse single pods of the gang."""
    nodes = spec.cluster.nodes
    needed = _needed(spec, pod) | {"pods": Fraction(nodes)}
    needed |= {f"limits.{name}": amount * nodes for name, amount in amounts(pod, "limits").items()}
    quotas, namespace = [], spec.cluster.kubernetes.used_namespace
    for quota in cluster.find(kinds.RESOURCE_QUOTA, namespace):
        status = quota.get("status", {})
        if quota.get("spec", {}).get("scopes") or quota.get("spec", {}).get("scopeSelector"):
            continue  # its scope may not include these pods
        quotas.append(quota)
        for limited, hard in status.get("hard", {}).items():
            if (wanted := needed.get(limited.removeprefix("requests."))) is None:
                continue
            most, used = parse_quantity(hard), parse_quantity(status.get("used", {}).get(limited, 0))
            name = quota["metadata"]["name"]
            if wanted > most:
                needs = quantity_text(wanted)
                quota_of = {"quota": name, "total": str(hard), "resource": limited}
                yield problem(spec, "namespace", reason("namespace-quota-too-small", **quota_of, needed=needs))
            elif wanted > most - used:
                used_now = str(status["used"][limited])
                yield reason("namespace-quota-used", quota=name, total=str(hard), resource=limited, used=used_now)
    yield from _unstated(spec, pod, quotas, cluster.find(kinds.LIMIT_RANGE, namespace))


# What every container must state under a quota of it (k8s.io/kubernetes, pkg/quota/v1/evaluator/core/pods.go).
_STATED = tuple(f"{part}{name}" for part in ("", "requests.", "limits.") for name in ("cpu", "memory"))


def _unstated(spec: RunSpec, pod: Object, quotas: Iterable[Object], ranges: Iterable[Object]) -> Iterator[Found]:
    """Yield the quotas and LimitRanges that refuse each pod for an amount that a container does not state.

    The default of a LimitRange states it, but must not be below the request.
    """
    rules = [
        (f"LimitRange {limit_range['metadata']['name']}", rule)
        for limit_range in ranges
        for rule in limit_range.get("spec", {}).get("limits", ())
        if rule.get("type") == "Container"
    ]
    defaults = {name: text for _, rule in rules for name, text in rule.get("default", {}).items()}
    default_requests = {name for _, rule in rules for name in rule.get("defaultRequest", {})}
    for container in (*pod.get("initContainers", ()), *pod.get("containers", ())):
        name, resources = container["name"], container.get("resources", {})
        limits, requests = resources.get("limits", {}), resources.get("requests", {})
        limited, requested = {*limits, *defaults}, {*requests, *limits, *default_requests, *defaults}
        for quota in quotas:
            for resource in (stated for stated in _STATED if stated in quota.get("status", {}).get("hard", {})):
                if resource.rpartition(".")[2] not in (limited if resource.startswith("limits.") else requested):
                    yield unstated(spec, f"ResourceQuota {quota['metadata']['name']}", resource, name)
        for source, rule in rules:
            if "cpu" in rule.get("maxLimitRequestRatio", {}) and "cpu" not in limited:
                yield unstated(spec, source, "limits.cpu", name)
            default = None if "cpu" in limits else rule.get("default", {}).get("cpu")
            if default is not None and parse_quantity(requests.get("cpu", 0)) > parse_quantity(default):
                why = reason("default-limit-too-small", source=source, limit=str(default))
                yield problem(spec, "cpu_limit", why, spec.cluster.kubernetes.cpu_limit)


def unstated(spec: RunSpec, source: str, resource: str, container: str) -> Problem:
    """Return the problem that ``source``, a quota or LimitRange, refuses a container without this request or limit."""
    params = {"source": source, "resource": resource, "container": container}
    if container == NODE_CONTAINER and resource == "limits.cpu":
        return problem(spec, "cpu_limit", reason("amount-unstated", **params), spec.cluster.kubernetes.cpu_limit)
    return problem(spec, "pod_overrides", reason("amount-unstated-of-other", **params))


def node_capacity(cluster: Cluster, spec: RunSpec, pod: Object) -> Iterator[Found]:
    """Yield why there are not enough nodes for the gang. Kueue's quota ignores labels and cordons."""
    if not pod:
        return
    placements, may_grow = _placements(cluster, spec, pod)
    nodes = cluster.find(kinds.NODE, "")
    candidates = [_fit(nodes, amounts(pod), placement) for placement in placements]
    if not candidates:
        return
    fits, cordoned, unfit = max(candidates, key=lambda fit: fit[:2])
    if fits >= spec.cluster.nodes:
        return
    if fits + cordoned >= spec.cluster.nodes:
        yield reason("nodes-cordoned", nodes=unfit[_CORDONED])
        yield Start(None, reason("start-nodes-cordoned"))
        return
    lacks = ", ".join(f"{count} lack {lack}" for lack, count in unfit.most_common())
    numbers = {"nodes": len(nodes), "fit": fits, "needed": spec.cluster.nodes, "lacks": lacks}
    pools = any(label in node["metadata"].get("labels", {}) for node in nodes for label in _GROWING)
    if may_grow or pools:
        yield reason("nodes-until-pools-grow" if pools else "nodes-until-admission-check", **numbers)
        yield Start(None, reason("start-too-few-nodes"))
    else:
        why = reason("too-few-nodes", **numbers)
        yield Problem.because(spec.where("cluster.nodes"), "cluster.nodes", why, spec.cluster.nodes)


# The labels that a node must have, and the taints that the pod tolerates.
_Placement = tuple[Mapping[str, str], Sequence[Object]]


def _placements(cluster: Cluster, spec: RunSpec, pod: Object) -> tuple[list[_Placement], bool]:
    """Return the placement of the pods for each flavor that Kueue could choose, and whether nodes may be added.

    An admission check of the queue may add nodes on demand.
    """
    selector, tolerations = pod.get("nodeSelector", {}), list(pod.get("tolerations", ()))
    kubernetes = spec.cluster.kubernetes
    if not kubernetes.kueue or kubernetes.queue is None:
        return [(selector, tolerations)], False
    local = cluster.get(kinds.LOCAL_QUEUE, kubernetes.used_namespace, kubernetes.queue)
    name = local.get("spec", {}).get("clusterQueue") if local is not None else None
    if name is None or (queue := cluster.get(kinds.CLUSTER_QUEUE, "", name)) is None:
        return [], False  # reported by the check of the queue
    flavors = {flavor["metadata"]["name"]: flavor for flavor in cluster.find(kinds.FLAVOR, "")}
    placements: list[_Placement] = []
    for name in flavors_for(queue, flavors, _needed(spec, pod), pod):
        more = flavors[name].get("spec", {})
        placements.append(({**more.get("nodeLabels", {}), **selector}, [*tolerations, *more.get("tolerations", ())]))
    return placements, bool(_admission_checks(queue))


def _fit(
    nodes: Sequence[Object], per_pod: Mapping[str, Fraction], placement: _Placement
) -> tuple[int, int, Counter[str]]:
    """Return how many pods fit now, how many more once nodes are uncordoned, and the number of unfit nodes by cause."""
    fits, why = {"": 0, _CORDONED: 0}, Counter[str]()
    for node in nodes:
        misfit = misfits(node, per_pod, *placement)
        why[misfit] += 1
        if misfit in fits:
            fits[misfit] += _pods_on(node, per_pod)
    del why[""]
    return fits[""], fits[_CORDONED], why


def _pods_on(node: Object, per_pod: Mapping[str, Fraction]) -> int:
    """Return how many of these pods fit on the empty node; pods of a gang may share a node."""
    has = node.get("status", {}).get("allocatable", {})
    return min(
        (int(parse_quantity(has.get(name, 0)) // amount) for name, amount in per_pod.items() if amount), default=1
    )


def exclusion_for(run: RunDir, spec: RunSpec, reach: Callable[[], Cluster]) -> Exclusion:
    """Return the bad nodes to exclude; none if the cluster does not answer.

    ``reach`` returns the connection; it is called only if there are bad nodes.
    """
    cluster = spec.cluster
    wanted = {} if cluster.gpu == "cpu" else {cluster.kubernetes.gpu_resource: cluster.gpus_per_node}

    def nodes() -> dict[str, bool]:
        all_nodes = reach().find(kinds.NODE, "")
        return {node["metadata"]["name"]: not misfits(node, wanted, {}, None) for node in all_nodes}

    return next_exclusion(run, nodes, cluster.nodes)


def misfits(
    node: Object, wanted: Mapping[str, Any], labels: Mapping[str, str], tolerations: Iterable[Object] | None
) -> str:
    """Return why the node cannot run the pod; empty if it can. ``tolerations`` None tolerates every taint."""
    spec, has = node.get("spec", {}), node.get("status", {}).get("allocatable", {})
    held = node["metadata"].get("labels", {})
    for key, value in labels.items():
        if held.get(key) != value:
            return f"label {key}={value}"
    for resource, amount in wanted.items():
        if parse_quantity(has.get(resource, 0)) < parse_quantity(amount):
            return f"{quantity_text(parse_quantity(amount))} {resource}"
    if tolerations is not None:
        given = list(tolerations)
        for taint in spec.get("taints", ()):
            if not tolerated(taint, given):
                return f"a toleration of {taint['key']}={taint.get('value', '')}:{taint['effect']}"
    return _CORDONED if spec.get("unschedulable") else ""
