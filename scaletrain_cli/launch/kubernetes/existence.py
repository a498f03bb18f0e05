"""Whether what the job names is there: priority classes, claims, the service account, secrets and their keys."""

from __future__ import annotations

from collections.abc import Iterator

from scaletrain_cli.launch.kubernetes.api import Cluster
from scaletrain_cli.launch.kubernetes.kinds import CLAIM, PRIORITY_CLASS, SECRET, SERVICE_ACCOUNT, WORKLOAD_PRIORITY
from scaletrain_cli.launch.kubernetes.obstacles import Found, missing, names_shown, problem
from scaletrain_cli.launch.kubernetes.refusals import RefusedError
from scaletrain_cli.spec import RunSpec


def priority(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    kubernetes = spec.cluster.kubernetes
    if kubernetes.priority is None:
        return
    kind = WORKLOAD_PRIORITY if kubernetes.kueue else PRIORITY_CLASS
    if cluster.get(kind, "", kubernetes.priority) is None:
        what = f"{kind.name}, and the job would wait in silence"
        yield missing(spec, "priority", kubernetes.priority, what, cluster.find(kind, ""))


def pod_priority(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    name = spec.cluster.kubernetes.pod_priority
    if name is not None and cluster.get(PRIORITY_CLASS, "", name) is None:
        yield missing(spec, "pod_priority", name, "PriorityClass", cluster.find(PRIORITY_CLASS, ""))


def claims(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    kubernetes = spec.cluster.kubernetes
    wanted = {volume.claim: f"volumes.{index}.claim" for index, volume in enumerate(kubernetes.volumes)}
    if kubernetes.runs.claim is not None:
        wanted = {kubernetes.runs.claim: "runs.claim", **wanted}
    for name, key in wanted.items():
        claim = cluster.get(CLAIM, kubernetes.namespace, name)
        if claim is None:
            there = cluster.find(CLAIM, kubernetes.namespace)
            yield missing(spec, key, name, f"PersistentVolumeClaim in namespace {kubernetes.namespace}", there)
            continue
        phase = claim.get("status", {}).get("phase")
        if phase == "Pending":
            yield _pending_claim(cluster, spec, key, name)
        elif phase != "Bound":
            yield problem(spec, key, f"the claim is {phase}; the pods could not start.", name)
        modes = claim["spec"].get("accessModes", ())
        if key == "runs.claim" and spec.cluster.nodes > 1 and "ReadWriteMany" not in modes:
            allowed = ", ".join(modes) or "none"
            yield problem(spec, key, f"must be ReadWriteMany for {spec.cluster.nodes} pods; it is {allowed}.", name)


def _pending_claim(cluster: Cluster, spec: RunSpec, key: str, name: str) -> Found:
    events = cluster.events(spec.cluster.kubernetes.namespace, name)
    if any(event.get("reason") == "WaitForFirstConsumer" for event in events):
        return f"claim {name} is not bound yet; its volume is made for the first pod that uses it"
    said = f": {' '.join(str(events[-1].get('message', '')).split())}" if events else ""
    return problem(spec, key, f"the claim is not bound to a volume{said}.", name)


def service_account(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    kubernetes = spec.cluster.kubernetes
    name = kubernetes.service_account
    if name is not None and cluster.get(SERVICE_ACCOUNT, kubernetes.namespace, name) is None:
        there = cluster.find(SERVICE_ACCOUNT, kubernetes.namespace)
        yield missing(spec, "service_account", name, f"ServiceAccount in namespace {kubernetes.namespace}", there)


def secrets(cluster: Cluster, spec: RunSpec) -> Iterator[Found]:
    """Names and keys alone; no value is kept. Most users may not read Secrets, and should not."""
    kubernetes = spec.cluster.kubernetes
    wanted: list[tuple[str, str, str | None]] = [
        (f"pull_secrets.{index}", name, None) for index, name in enumerate(kubernetes.pull_secrets)
    ]
    wanted += [(f"secrets.{name}", secret.secret, secret.key) for name, secret in kubernetes.secrets.items()]
    for key, name, entry in wanted:
        try:
            secret = cluster.get(SECRET, kubernetes.namespace, name)
        except RefusedError as error:
            if not error.is_rights:
                raise
            names = ", ".join(sorted({name for _, name, _ in wanted}))
            yield f"you may not read Secrets, so whether {names} are there, with their keys, is not known"
            return
        if secret is None:
            yield problem(spec, key, f"there is no such Secret in namespace {kubernetes.namespace}.", name)
        elif entry is not None and entry not in secret.get("data", {}):
            there = names_shown(sorted(secret.get("data", {})))
            yield problem(spec, key, f"Secret {name} has no key {entry}; it has {there}.", entry)
