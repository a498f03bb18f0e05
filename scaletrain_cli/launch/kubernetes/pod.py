"""The pod template of a run, alike for every backend: its container, volumes, security and placement. Pure.

Secrets are in it by reference only. `$` in every value is doubled, because the kubelet expands `$(NAME)`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.launch.kubernetes.names import MASTER_PORT, NODE, Workload
from scaletrain_cli.launch.kubernetes.placement import (
    UNMOVABLE,
    affinity,
    node_selector,
    tolerations,
    topology_annotations,
)
from scaletrain_cli.launch.kubernetes.resources import pod_resources, quantity, shm_bytes
from scaletrain_cli.own_processes import absolute_paths, python_words
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.spec import RunSpec

DOCUMENTS_PATH = "/etc/scaletrain/run"
AGENT_MODULE = "scaletrain_cli.launch.kubernetes.pod_agent"
# After the ranks' grace period: 30 s for ranks that hang in the kernel, 45 s for pod 0's verdict, 5 s to leave.
AGENT_SECONDS = 80

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GANG = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
# Where the pod finds its number, and the number of its gang: each restart of the whole gets another one.
_FIELDS = {
    "jobset": (_INDEX, _GANG),
    "trainjob": (_INDEX, _GANG),
    "volcano": ("metadata.labels['volcano.sh/task-index']", "metadata.annotations['volcano.sh/job-version']"),
}
# What the template, or a controller behind it, sets itself: a second entry of one name would be refused, or win.
OWN_VARIABLES = frozenset(
    "MASTER_ADDR MASTER_PORT NODE_RANK SCALETRAIN_NODE_RANK SCALETRAIN_GANG SCALETRAIN_WORKLOAD SCALETRAIN_NODE_NAME "
    "SCALETRAIN_POD VC_TASK_INDEX VK_TASK_INDEX".split()
)


def pod_template(
    spec: RunSpec, plan: RunPlan, workload: Workload, documents: Mapping[str, str | bytes], avoid: Sequence[str] = ()
) -> dict[str, Any]:
    """``metadata`` and ``spec`` of every pod. ``avoid``: node names that must not be used."""
    kubernetes = spec.cluster.kubernetes
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": grace_seconds(spec),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a variable for every Service of the namespace would only slow the start down
        "securityContext": _pod_security(spec),
        "containers": [_container(spec, plan, workload)],
        "volumes": list(_volumes(spec, workload, documents)),
        "tolerations": tolerations(spec),
    }
    if kubernetes.service_account is not None:
        pod["serviceAccountName"] = kubernetes.service_account
    if kubernetes.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in kubernetes.pull_secrets]
    if kubernetes.pod_priority is not None:
        pod["priorityClassName"] = kubernetes.pod_priority
    if selected := node_selector(spec):
        pod["nodeSelector"] = selected
    if avoid:
        pod["affinity"] = affinity(avoid)
    if kubernetes.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if kubernetes.native_gang != "none":
        pod["schedulingGroup"] = {"podGroupName": workload.name}
    annotations = workload.annotations | topology_annotations(spec) | UNMOVABLE
    return {"metadata": {"labels": workload.labels, "annotations": annotations}, "spec": pod}


def grace_seconds(spec: RunSpec) -> int:
    """From SIGTERM to SIGKILL: the ranks' own grace period and what the agent needs after it."""
    return math.ceil(spec.cluster.grace_seconds) + AGENT_SECONDS


def escaped(value: str) -> str:
    """Text that comes out of the kubelet's expansion of ``$(NAME)`` unchanged."""
    return value.replace("$", "$$")


def _container(spec: RunSpec, plan: RunPlan, workload: Workload) -> dict[str, Any]:
    kubernetes = spec.cluster.kubernetes
    pull = kubernetes.image_pull_policy
    if pull == "auto":
        pull = "IfNotPresent" if kubernetes.image_is_pinned else "Always"
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if kubernetes.rdma_resource is not None and kubernetes.ipc_lock:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        "name": NODE,
        "image": kubernetes.image,
        "imagePullPolicy": pull,
        # Exec form: the agent is PID 1 and hears SIGTERM itself.
        "command": ["python", *python_words(AGENT_MODULE)],
        "args": [escaped(word) for word in ("--documents", DOCUMENTS_PATH, "--runs-root", kubernetes.runs.path)],
        "env": list(_environment(spec, workload)),
        "resources": pod_resources(spec, plan),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": list(_mounts(spec)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _environment(spec: RunSpec, workload: Workload) -> Iterator[dict[str, Any]]:
    rank, gang = _FIELDS[workload.backend]
    yield _from_field("SCALETRAIN_NODE_RANK", rank)
    yield _from_field("SCALETRAIN_GANG", gang)
    yield _from_field("SCALETRAIN_NODE_NAME", "spec.nodeName")
    yield _from_field("SCALETRAIN_POD", "metadata.name")
    yield {"name": "SCALETRAIN_WORKLOAD", "value": workload.id}
    yield {"name": "MASTER_ADDR", "value": workload.master_address}
    yield {"name": "MASTER_PORT", "value": str(MASTER_PORT)}
    for name, value in absolute_paths(spec.env).items():  # the agents'; the ranks' are in the record
        if name not in OWN_VARIABLES:
            yield {"name": name, "value": escaped(value)}
    for name, secret in spec.cluster.kubernetes.secrets.items():
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod_security(spec: RunSpec) -> dict[str, Any]:
    kubernetes = spec.cluster.kubernetes
    context: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": kubernetes.run_as_user,
        "runAsGroup": kubernetes.run_as_user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if kubernetes.fs_group is not None:
        # Without the policy the kubelet changes the owner of every file of the volume at every start.
        context |= {"fsGroup": kubernetes.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def _claims(spec: RunSpec) -> dict[str, str]:
    """Volume names by claim: a claim that is mounted twice is still one volume."""
    kubernetes = spec.cluster.kubernetes
    claims = [kubernetes.runs.claim or "", *(volume.claim for volume in kubernetes.volumes)]
    return {claim: "runs" if not index else f"volume-{index}" for index, claim in enumerate(dict.fromkeys(claims))}


def _volumes(spec: RunSpec, workload: Workload, documents: Mapping[str, str | bytes]) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(shm_bytes(spec))}}
    items = [{"key": name, "path": name} for name in sorted(documents)]
    yield {"name": "documents", "configMap": {"name": workload.config_map, "items": items}}
    for claim, name in _claims(spec).items():
        yield {"name": name, "persistentVolumeClaim": {"claimName": claim}}


def _mounts(spec: RunSpec) -> Iterator[dict[str, Any]]:
    kubernetes, names = spec.cluster.kubernetes, _claims(spec)
    yield {"name": "shm", "mountPath": "/dev/shm"}
    yield {"name": "documents", "mountPath": DOCUMENTS_PATH, "readOnly": True}
    yield {"name": "runs", "mountPath": kubernetes.runs.path, **_below(kubernetes.runs.sub_path)}
    for volume in kubernetes.volumes:
        mount = {"name": names[volume.claim], "mountPath": volume.path, **_below(volume.sub_path)}
        yield mount | ({"readOnly": True} if volume.read_only else {})


def _below(sub_path: str | None) -> dict[str, str]:
    return {} if sub_path is None else {"subPath": sub_path}
