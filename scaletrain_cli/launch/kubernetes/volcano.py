"""A run as a Volcano Job: one task, one pod per node, all or none. Pure.

Volcano counts every restart of a job against maxRetry, evictions included, and has no rule that leaves them out. So
where the run may be preempted without limit its retries have none either, and pod 0 keeps the budgets.
"""

from __future__ import annotations

import math
from typing import Any

from scaletrain_cli.launch.kubernetes.jobset import FINAL_CODES, MOST_RESTARTS, charged_restarts
from scaletrain_cli.launch.kubernetes.names import NODE, Workload
from scaletrain_cli.spec import RunSpec

_MODES = {"required": "hard", "preferred": "soft"}


def volcano_job(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """The workload object around a pod template."""
    kubernetes, nodes = spec.cluster.kubernetes, spec.cluster.nodes
    job: dict[str, Any] = {
        "schedulerName": "volcano",
        "minAvailable": nodes,
        "maxRetry": max_retry(spec),
        # svc: a headless Service with the job's name, which must answer before the pods are ready. env: VC_TASK_INDEX.
        "plugins": {"svc": ["--publish-not-ready-addresses=true"], "env": []},
        "policies": [
            *({"exitCode": int(code), "action": "TerminateJob"} for code in sorted(FINAL_CODES)),
            {"events": ["PodFailed", "PodEvicted"], "action": "RestartJob"},
        ],
        "tasks": [{"name": NODE, "replicas": nodes, "minAvailable": nodes, "template": template}],
    }
    if kubernetes.queue is not None:
        job["queue"] = kubernetes.queue
    if kubernetes.priority is not None:
        job["priorityClassName"] = kubernetes.priority
    if kubernetes.ttl_seconds_after_finished is not None:
        job["ttlSecondsAfterFinished"] = math.ceil(kubernetes.ttl_seconds_after_finished)
    if kubernetes.topology is not None:
        job["networkTopology"] = {
            "mode": _MODES[kubernetes.topology.kind],
            "highestTierName": kubernetes.topology.key,
        }
    return {
        "apiVersion": workload.api_version,
        "kind": workload.kind,
        "metadata": {
            "name": workload.name,
            "namespace": kubernetes.namespace,
            "labels": workload.labels,
            "annotations": workload.annotations,
        },
        "spec": job,
    }


def max_retry(spec: RunSpec) -> int:
    """Restarts after which Volcano gives up, and one more: it fails the job when it counts as many. 0 would mean 3."""
    preemptions = spec.restarts.preemption
    return MOST_RESTARTS if preemptions == "unlimited" else min(charged_restarts(spec) + preemptions + 1, MOST_RESTARTS)
