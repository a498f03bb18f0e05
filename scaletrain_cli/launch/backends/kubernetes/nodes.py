"""Match nodes against a pod's requirements, choose bad nodes to exclude, and parse quantities."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.kubernetes.api_kinds import NODE, Object
from scaletrain_cli.launch.node_exclusion import Exclusion, exclusion
from scaletrain_cli.reasons import recorded
from scaletrain_cli.rundir.bad_nodes import read_bad_nodes
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.spec import RunSpec

if TYPE_CHECKING:
    from scaletrain_cli.launch.backends.kubernetes.api import Cluster


def parse_quantity(quantity: str | int | float) -> Fraction:
    """Return the amount of a quantity as the API server writes it (``8``, ``500m``, ``1536Gi``). Raises ValueError."""
    from kubernetes.utils import parse_quantity as parsed

    return Fraction(parsed(quantity))


def requested(pod: dict[str, Any], resource: str) -> Fraction:
    """Return the amount of a resource that a pod with this spec holds; of devices the limit is the request."""

    def held(key: str) -> list[Fraction]:
        found = [container.get("resources", {}) for container in pod.get(key) or ()]
        return [
            parse_quantity({**each.get("limits", {}), **each.get("requests", {})}.get(resource, 0)) for each in found
        ]

    return max(sum(held("containers"), Fraction(0)), *held("initContainers"), Fraction(0))


def quantity_text(amount: Fraction) -> str:
    """Return ``16``, or ``512.0Gi`` for an amount of bytes."""
    if amount.denominator == 1 and amount < 10**6:
        return str(amount.numerator)
    return f"{float(amount) / 2**30:.1f}Gi" if amount >= 2**30 else f"{float(amount):g}"


CORDONED = "being schedulable"  # what a cordoned node lacks for now; checked last
# Taints that Kubernetes sets on unhealthy nodes; the job's tolerations of them are for a limited time.
_UNWELL = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable")


def exclusion_for(run: RunDir, spec: RunSpec, reach: Callable[[], Cluster]) -> Exclusion:
    """Return the bad nodes to exclude; none if the cluster does not answer. ``reach`` is called only if needed."""
    bad = read_bad_nodes(run.path.parent, time.time())
    if not bad:
        return Exclusion()
    try:
        nodes = reach().find(NODE, "")
    except SchedulerError as error:
        return Exclusion(
            spared=tuple(sorted(node.node for node in bad)), reason=error.reason or recorded(error.message)
        )
    cluster = spec.cluster
    wanted = {} if cluster.gpu == "cpu" else {cluster.kubernetes.gpu_resource: cluster.gpus_per_node}
    usable = {node["metadata"]["name"] for node in nodes if not misfits(node, wanted, {}, None)}
    return exclusion(bad, usable=usable, needed=cluster.nodes)


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
    if spec.get("unschedulable"):
        return CORDONED
    return ""


def tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    """Return whether a toleration matches the taint, or the taint is only a preference or about the node's health."""
    if taint.get("effect") == "PreferNoSchedule" or taint.get("key") in _UNWELL:
        return True
    return any(_tolerates(toleration, taint) for toleration in tolerations)


def _tolerates(toleration: Object, taint: Object) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if not toleration.get("key"):
        return toleration.get("operator") == "Exists"
    if toleration["key"] != taint.get("key"):
        return False
    if toleration.get("operator", "Equal") == "Exists":
        return True
    return bool(toleration.get("value", "") == taint.get("value", ""))
