"""Check whether a queue of Kueue can admit a gang, ever and now. Pure: takes Kueue's objects and returns reasons.

A gang takes all resources of one group from one flavor. Borrowable quota is estimated as an upper bound: only refusals
that are certain are reported.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from scaletrain_cli.launch.backends.kubernetes.api_kinds import Object
from scaletrain_cli.launch.backends.kubernetes.messages import reason
from scaletrain_cli.reasons import Reason


def parse_quantity(quantity: str | int | float) -> Fraction:
    """Return the amount of a quantity as the API server writes it (``8``, ``500m``, ``1536Gi``). Raises ValueError."""
    from kubernetes.utils import parse_quantity as parsed

    return Fraction(parsed(quantity))


def quantity_text(amount: Fraction) -> str:
    """Return ``16``, or ``512.0Gi`` for an amount of bytes."""
    if amount.denominator == 1 and amount < 10**6:
        return str(amount.numerator)
    return f"{float(amount) / 2**30:.1f}Gi" if amount >= 2**30 else f"{float(amount):g}"


# Taints that Kubernetes sets on unhealthy nodes; the job's tolerations of them are for a limited time.
_UNWELL = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable")


def tolerated(taint: Object, tolerations: Iterable[Object]) -> bool:
    """Return whether a toleration matches the taint, or the taint is a preference or one of the node's health."""
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


Amounts = Mapping[str, Fraction]
# Resources of every quota. A site may configure Kueue to exclude others from all quotas
# (resources.excludeResourcePrefixes), which users cannot read.
_NEVER_EXCLUDED = ("cpu", "memory")
_COUNT = "pods"  # a resource that Kueue counts where a queue covers it


@dataclass(frozen=True)
class QuotaAnswer:
    """``never``: why no flavor can ever hold the gang, one reason each; ``busy``: why none can now. Empty: it fits."""

    never: tuple[Reason, ...] = ()
    busy: tuple[Reason, ...] = ()
    uncovered: tuple[str, ...] = ()  # requested, but not in the quota; Kueue may be configured to exclude them


@dataclass(frozen=True)
class TopologyRequest:
    """The topology that the pods request. ``level`` is a node label, None for any; ``known`` has the levels of each
    Topology by name, as far as the user may read them.
    """

    level: str | None
    known: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Cohort:
    """The queues that a queue can borrow from. ``bounded`` is False if a parent cohort may lend too."""

    queues: Sequence[Object] = ()
    own: Object | None = None
    bounded: bool = True


def accepts_namespace(queue: Object, labels: Mapping[str, str]) -> bool:
    """Return whether a ClusterQueue admits jobs of a namespace with these labels; without a selector it admits none."""
    if (selector := queue["spec"].get("namespaceSelector")) is None:
        return False
    meant = {"In": True, "Exists": True, "NotIn": False, "DoesNotExist": False}
    for rule in selector.get("matchExpressions") or ():
        held = labels.get(rule["key"])
        fits = held is not None and (held in rule.get("values", ()) or rule["operator"] in ("Exists", "DoesNotExist"))
        if fits != meant[rule["operator"]]:
            return False
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())


def check_quota(
    queue: Object,
    flavors: Mapping[str, Object],
    cohort: Cohort | None,
    needed: Amounts,
    pod: Object,
    request: TopologyRequest | None = None,
) -> QuotaAnswer:
    """Return whether the queue can hold the gang. ``needed``: of the whole gang; ``pod``: the spec of one pod."""
    groups = queue["spec"].get("resourceGroups", ())
    covered = {resource for group in groups for resource in group["coveredResources"]}
    missing = [resource for resource in needed if resource not in covered and resource != _COUNT]
    named = [flavors.get(flavor["name"], {}) for group in groups for flavor in group["flavors"]]
    all_have_topology = all(
        "topologyName" in flavor.get("spec", {}) for flavor in named
    )  # then pods need not request a topology
    uncovered = tuple(name for name in missing if name not in _NEVER_EXCLUDED)
    never = [reason("no-flavor", resource=name) for name in missing if name not in uncovered]
    busy: tuple[Reason, ...] = ()
    for group in groups:
        if not (amounts := _covered(group, needed)):
            continue
        reasons: list[Reason] = []
        waits: list[Reason | None] = []
        for flavor in group["flavors"]:
            name, definition = flavor["name"], flavors.get(flavor["name"])
            why = _misfit(name, definition, pod) or _topology_mismatch(name, definition, request, all_have_topology)
            why = why or _too_small(queue, flavor, cohort, amounts)
            if why is not None:
                reasons.append(why)
            else:
                waits.append(_busy(queue, flavor, cohort, amounts))
        busy_now = [wait for wait in waits if wait is not None]
        if not waits:
            never += reasons
        elif len(busy_now) == len(waits):
            busy = tuple(busy_now)
    return QuotaAnswer(tuple(never), busy, uncovered)


def flavors_for(queue: Object, flavors: Mapping[str, Object], needed: Amounts, pod: Object) -> list[str]:
    """Return the flavors that the job's pods may use, of the group that decides: that of devices, else of cores."""
    groups = [group for group in queue["spec"].get("resourceGroups", ()) if _covered(group, needed)]
    deciding = max(groups, key=lambda group: any("/" in name for name in _covered(group, needed)), default=None)
    named = [] if deciding is None else [flavor["name"] for flavor in deciding["flavors"]]
    return [name for name in named if name in flavors and not _misfit(name, flavors[name], pod)]


def _covered(group: Object, needed: Amounts) -> dict[str, Fraction]:
    return {name: needed[name] for name in group["coveredResources"] if needed.get(name)}


def _misfit(name: str, flavor: Object | None, pod: Object) -> Reason | None:
    """Return why such a pod cannot be on the flavor's nodes; None if it can."""
    if flavor is None:
        return reason("flavor-missing", flavor=name)
    spec = flavor.get("spec", {})
    tolerations = [*pod.get("tolerations", ()), *spec.get("tolerations", ())]
    for taint in spec.get("nodeTaints", ()):
        if not tolerated(taint, tolerations):
            text = f"{taint['key']}={taint.get('value', '')}:{taint['effect']}"
            return reason("flavor-taint", flavor=name, taint=text)
    for key, value in pod.get("nodeSelector", {}).items():
        if spec.get("nodeLabels", {}).get(key, value) != value:
            return reason("flavor-label", flavor=name, label=key, has=spec["nodeLabels"][key], needed=value)
    return None


def _topology_mismatch(
    name: str, flavor: Object | None, request: TopologyRequest | None, all_have_topology: bool
) -> Reason | None:
    """Return why Kueue's placement refuses such pods for the flavor; its own message names another flavor's quota."""
    topology = (flavor or {}).get("spec", {}).get("topologyName")
    if request is None:
        lacks = topology is not None and not all_have_topology
        return reason("flavor-needs-topology", flavor=name) if lacks else None
    if topology is None:
        return reason("flavor-without-topology", flavor=name)
    levels = request.known.get(topology)
    if levels is not None and request.level is not None and request.level not in levels:
        return reason("flavor-without-level", flavor=name, topology=topology, level=request.level, levels=list(levels))
    return None


def _too_small(queue: Object, flavor: Object, cohort: Cohort | None, amounts: Amounts) -> Reason | None:
    """Return the resource that the flavor can never supply; None if it can supply all."""
    for name, amount in amounts.items():
        most = _most(queue, flavor, cohort, name)
        if most is not None and amount > most:
            shown = {"needed": quantity_text(amount), "total": quantity_text(most)}
            return reason("flavor-too-small", flavor=flavor["name"], resource=name, **shown)
    return None


def _busy(queue: Object, flavor: Object, cohort: Cohort | None, amounts: Amounts) -> Reason | None:
    """Return the resource of the flavor that is in use now; None if the gang fits."""
    for name, amount in amounts.items():
        most, taken = _most(queue, flavor, cohort, name), reserved(queue, flavor["name"], name)
        if most is not None and amount > most - taken:
            return reason(
                "flavor-busy",
                flavor=flavor["name"],
                resource=name,
                used=quantity_text(taken),
                total=quantity_text(most),
                needed=quantity_text(amount),
            )
    return None


def _most(queue: Object, flavor: Object, cohort: Cohort | None, resource: str) -> Fraction | None:
    """Return the queue's quota plus the maximum that it may borrow; None if unlimited."""
    if (own := _resource(flavor, resource)) is None:
        return Fraction(0)
    nominal, limit = parse_quantity(own.get("nominalQuota", 0)), own.get("borrowingLimit")
    if cohort is None:
        return nominal
    most = nominal + parse_quantity(limit) if limit is not None else None
    if not cohort.bounded:
        return most
    lenders = [other for other in cohort.queues if other["metadata"]["name"] != queue["metadata"]["name"]]
    lent = sum((_lent(lender, flavor["name"], resource) for lender in lenders), Fraction(0))
    if cohort.own is not None:
        lent += _lent(cohort.own, flavor["name"], resource)
    return min(most, nominal + lent) if most is not None else nominal + lent


def _lent(holder: Object, flavor: str, resource: str) -> Fraction:
    for group in holder.get("spec", {}).get("resourceGroups", ()):
        for quotas in group["flavors"]:
            quota = _resource(quotas, resource) if quotas["name"] == flavor else None
            if quota is not None:
                return parse_quantity(quota.get("lendingLimit") or quota.get("nominalQuota") or 0)
    return Fraction(0)


def reserved(queue: Object, flavor: str, resource: str) -> Fraction:
    """Return how much of a resource the admitted jobs of a ClusterQueue hold."""
    for reservation in queue.get("status", {}).get("flavorsReservation", ()):
        usage = _resource(reservation, resource) if reservation["name"] == flavor else None
        if usage is not None:
            return parse_quantity(usage.get("total", 0))
    return Fraction(0)


def _resource(flavor: Object, name: str) -> Object | None:
    resources: Iterable[Object] = flavor.get("resources", ())
    return next((resource for resource in resources if resource["name"] == name), None)
