"""A run as a TrainJob of Kubeflow Trainer with a TrainingRuntime of its own. Pure.

The stock runtime has no failure policy, no tolerations and no grace period; and it would start torchrun's rendezvous,
which our node agent does without.
"""

from __future__ import annotations

import re
from typing import Any

from scaletrain_cli.launch.kubernetes.jobset import jobset_spec, queue_labels
from scaletrain_cli.launch.kubernetes.names import Workload
from scaletrain_cli.spec import RunSpec

RUNTIME_API_VERSION = "trainer.kubeflow.org/v1alpha1"
RUNTIME_KIND = "TrainingRuntime"
# By this label on a replicated job Trainer knows the one that has the nodes.
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
# Trainer's webhook, and Kueue's.
_NO_RUNTIME = re.compile(r"must be created before the TrainJob|runtime '[^']*' not found")


def training_runtime(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """The runtime, of the same name as its only TrainJob; must be there first."""
    inner = jobset_spec(spec, workload, template)
    metadata = inner["replicatedJobs"][0]["template"]["metadata"]
    metadata["labels"] = metadata["labels"] | _ANCESTOR
    return {
        "apiVersion": RUNTIME_API_VERSION,
        "kind": RUNTIME_KIND,
        "metadata": _metadata(spec, workload),
        "spec": {
            "mlPolicy": {"numNodes": spec.cluster.nodes},
            "template": {
                "metadata": {"labels": workload.labels, "annotations": workload.annotations},
                "spec": inner,
            },
        },
    }


def trainjob(spec: RunSpec, workload: Workload) -> dict[str, Any]:
    """The workload object. Kueue reads its labels, not the JobSet's that Trainer makes of it."""
    metadata = _metadata(spec, workload)
    return {
        "apiVersion": workload.api_version,
        "kind": workload.kind,
        "metadata": metadata | {"labels": metadata["labels"] | queue_labels(spec)},
        "spec": {
            "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": RUNTIME_KIND, "name": workload.name},
            "trainer": {"numNodes": spec.cluster.nodes},
        },
    }


def misses_runtime(said: str) -> bool:
    """Whether a refusal of a TrainJob is for want of its runtime: not made yet, or not yet seen by who refuses."""
    return _NO_RUNTIME.search(said) is not None


def _metadata(spec: RunSpec, workload: Workload) -> dict[str, Any]:
    return {
        "name": workload.name,
        "namespace": spec.cluster.kubernetes.namespace,
        "labels": workload.labels,
        "annotations": workload.annotations,
    }
