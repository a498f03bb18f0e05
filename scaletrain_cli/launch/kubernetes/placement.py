"""Which nodes the pods may be on: taints, labels, nodes to avoid, and how near to one another. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from scaletrain_cli.spec import RunSpec

GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"  # from GPU feature discovery of the GPU Operator
# The taints that spot nodes carry. GKE and AKS set theirs; on EKS and with Karpenter it is what the node pool says,
# and these are what their documentation uses; `spot` is that of k8s/kueue.yaml.
_SPOT_TAINTS = {
    "gke": "cloud.google.com/gke-spot",
    "aks": "kubernetes.azure.com/scalesetpriority",
    "karpenter": "karpenter.sh/capacity-type",
    "eks": "eks.amazonaws.com/capacityType",
}
_OWN_SPOT_TAINT = "spot"
_NODE_TROUBLE = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_KUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
# Autoscalers move pods together to free nodes; one pod that is moved restarts the whole gang.
UNMOVABLE = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def tolerations(spec: RunSpec) -> list[dict[str, Any]]:
    """Of GPU nodes, of spot nodes where the run takes those, and how long of a node in trouble."""
    cluster, kubernetes = spec.cluster, spec.cluster.kubernetes
    found: list[dict[str, Any]] = []
    if cluster.gpu != "cpu":
        found.append(_tolerate(_gpu_taint(kubernetes.gpu_resource)))
    if cluster.spot and kubernetes.spot_taint != "none":
        chosen = _SPOT_TAINTS if kubernetes.spot_taint == "auto" else [kubernetes.spot_taint]
        found += [_tolerate(_SPOT_TAINTS[provider]) for provider in chosen]
        found.append(_tolerate(_OWN_SPOT_TAINT))
    # The API server would put 300 s here: so long nobody would restart the gang of a node that is gone.
    seconds = math.ceil(kubernetes.not_ready_seconds)
    found += [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds} for key in _NODE_TROUBLE
    ]
    for own in kubernetes.tolerations:
        given = {"key": own.key, "operator": own.operator, "value": own.value, "effect": own.effect}
        toleration: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        found.append(toleration | ({} if own.seconds is None else {"tolerationSeconds": math.ceil(own.seconds)}))
    return found


def node_selector(spec: RunSpec) -> dict[str, str]:
    """Labels that a node must have."""
    kubernetes = spec.cluster.kubernetes
    product = {} if kubernetes.gpu_product is None else {GPU_PRODUCT_LABEL: kubernetes.gpu_product}
    return {**product, **kubernetes.node_selector}


def affinity(avoid: Sequence[str]) -> dict[str, Any]:
    """Keeps pods off these nodes. By label as well as by name: Kueue's placement reads labels only."""
    by_label = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid)}
    by_name = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in avoid]  # one value each
    term = {"matchExpressions": [by_label], "matchFields": by_name}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}}


def topology_annotations(spec: RunSpec) -> dict[str, str]:
    """What Kueue reads on the pod template."""
    topology = spec.cluster.kubernetes.topology
    if topology is None or not spec.cluster.kubernetes.kueue:
        return {}
    return {_KUEUE_TOPOLOGY.format(topology.kind): topology.key or "true"}


def exclusive_annotation(spec: RunSpec) -> dict[str, str]:
    """What JobSet reads on itself."""
    topology = spec.cluster.kubernetes.topology
    if topology is None or topology.kind != "exclusive":
        return {}
    return {EXCLUSIVE_TOPOLOGY: topology.key or ""}


def _gpu_taint(resource: str) -> str:
    return "nvidia.com/gpu" if resource.startswith("nvidia.com/") else resource  # slices of MIG lie on the same nodes


def _tolerate(key: str) -> dict[str, Any]:
    return {"key": key, "operator": "Exists", "effect": "NoSchedule"}
