"""The native gang of Kubernetes 1.36 (scheduling.k8s.io/v1alpha2), behind `native_gang`. Pure.

Its shape was another in 1.35 and is another in 1.37, so it is never rendered unasked.
"""

from __future__ import annotations

from typing import Any

from scaletrain_cli.launch.kubernetes.names import Workload
from scaletrain_cli.spec import RunSpec


def pod_group(spec: RunSpec, workload: Workload) -> dict[str, Any]:
    """What the pods' schedulingGroup names; no pod of it is bound before all can be."""
    kubernetes = spec.cluster.kubernetes
    return {
        "apiVersion": f"scheduling.k8s.io/{kubernetes.native_gang}",
        "kind": "PodGroup",
        "metadata": {
            "name": workload.name,
            "namespace": kubernetes.namespace,
            "labels": workload.labels,
            "annotations": workload.annotations,
        },
        "spec": {"schedulingPolicy": {"gang": {"minCount": spec.cluster.nodes}}},
    }
