"""A run as a JobSet of one Indexed Job, one pod per node. Pure.

Who restarts what: no pod is replaced; a pod that fails fails its Job, and the Job's reason tells the JobSet whether to
make the whole gang anew free of charge, at the expense of the budget, or not at all.
"""

from __future__ import annotations

import math
from typing import Any

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.kubernetes.names import NODE, Workload
from scaletrain_cli.launch.kubernetes.placement import exclusive_annotation
from scaletrain_cli.spec import RunSpec

MOST_RESTARTS = 1_000_000  # far from what 32 bits hold
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
# A retry cures none of these.
FINAL_CODES = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.DO_NOT_REQUEUE)


def jobset(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """The workload object around a pod template."""
    return {
        "apiVersion": workload.api_version,
        "kind": workload.kind,
        "metadata": {
            "name": workload.name,
            "namespace": spec.cluster.kubernetes.namespace,
            "labels": workload.labels | queue_labels(spec),
            "annotations": workload.annotations | exclusive_annotation(spec),
        },
        "spec": jobset_spec(spec, workload, template),
    }


def jobset_spec(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """What a JobSet and Trainer's runtime have in common."""
    ttl = spec.cluster.kubernetes.ttl_seconds_after_finished
    return {
        # The Service is named as the JobSet; a pod must be found before it is ready, or none would ever be.
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": failure_policy(spec),
        **({} if ttl is None else {"ttlSecondsAfterFinished": math.ceil(ttl)}),
        "replicatedJobs": [
            {
                "name": NODE,
                "replicas": 1,
                "template": {
                    "metadata": {"labels": workload.labels, "annotations": workload.annotations},
                    "spec": _job_spec(spec, template),
                },
            }
        ],
    }


def queue_labels(spec: RunSpec) -> dict[str, str]:
    """How Kueue knows whose job this is."""
    kubernetes = spec.cluster.kubernetes
    if not kubernetes.kueue or kubernetes.queue is None:
        return {}
    return {QUEUE_LABEL: kubernetes.queue, **({PRIORITY_LABEL: kubernetes.priority} if kubernetes.priority else {})}


def charged_restarts(spec: RunSpec) -> int:
    """How often in all a gang may fail; which budget an end is charged to, the agent of pod 0 knows."""
    restarts = spec.restarts
    return min(restarts.node + restarts.crash + restarts.oom, MOST_RESTARTS)


def failure_policy(spec: RunSpec) -> dict[str, Any]:
    """The JobSet's rules, of which the first that matches decides; what matches none is charged."""
    final = "|".join(str(int(code)) for code in FINAL_CODES)
    free = "FailJobSet" if spec.restarts.preemption == 0 else "RestartJobSetAndIgnoreMaxRestarts"
    return {
        "maxRestarts": charged_restarts(spec),
        # No new pod while an old one lives: two gangs must not meet.
        "restartStrategy": "BlockingRecreate",
        # Only letters, digits, _ , and : in a rule's name; the webhook refuses others.
        "rules": [
            _rule("final_exit_code", "FailJobSet", rf"failed with exit code ({final}) matching"),
            _rule("disruption", free, r"has condition DisruptionTarget matching"),
            _rule("preempted", free, rf"failed with exit code {int(ExitCode.PREEMPTED)} matching"),
            {"name": "deadline", "action": "FailJobSet", "onJobFailureReasons": ["DeadlineExceeded"]},
            {"name": "charged", "action": "RestartJobSet"},
        ],
    }


def _rule(name: str, action: str, pattern: str) -> dict[str, Any]:
    return {
        "name": name,
        "action": action,
        "onJobFailureReasons": ["PodFailurePolicy"],
        "onJobFailureMessagePatterns": [pattern],
        "targetReplicatedJobs": [NODE],
    }


def _job_spec(spec: RunSpec, template: dict[str, Any]) -> dict[str, Any]:
    nodes, deadline = spec.cluster.nodes, spec.cluster.kubernetes.active_deadline
    return {
        "completionMode": "Indexed",
        "parallelism": nodes,
        "completions": nodes,
        "backoffLimit": 0,
        # Not before the old one has really ended: else two pods of one rank could write at once.
        "podReplacementPolicy": "Failed",
        **({} if deadline is None else {"activeDeadlineSeconds": math.ceil(deadline)}),
        "podFailurePolicy": {
            # In this order: a pod that is evicted may also leave with a code, and the eviction is why.
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                _on_codes([int(code) for code in FINAL_CODES]),
                _on_codes([int(ExitCode.PREEMPTED)]),
            ]
        },
        "template": template,
    }


def _on_codes(codes: list[int]) -> dict[str, Any]:
    return {
        "action": "FailJob",
        "onExitCodes": {"containerName": NODE, "operator": "In", "values": sorted(codes)},
    }
