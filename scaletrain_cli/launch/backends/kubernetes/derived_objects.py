"""The objects that controllers create for a workload, for the dry run. Pure.

The API server accepts a JobSet with a pod template that is invalid for a Job; it then never starts, and only an event
shows why.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

Object = dict[str, Any]


def children(objects: Iterable[Object]) -> list[Object]:
    """Return the JobSets of TrainJobs, the Jobs of JobSets, and the first pod of each."""
    known = list(objects)
    found: list[Object] = []
    for one in known:
        if one.get("kind") == "TrainJob":
            runtime = next((other for other in known if other.get("kind") == "TrainingRuntime"), None)
            found += [child_jobset(runtime, one)] if runtime is not None else []
        elif _is_volcano(one):
            found += child_pods(one)
    jobs = [child for one in (*known, *found) if one.get("kind") == "JobSet" for child in child_jobs(one)]
    return [*found, *jobs, *map(child_pod, jobs)]


def child_job(jobset: Object) -> Object:
    """Return the first batch/v1 Job of a JobSet, as its controller writes it."""
    return next(child_jobs(jobset))


def child_jobs(jobset: Object) -> Iterator[Object]:
    """Yield the first Job of every replicated job."""
    metadata, spec = jobset.get("metadata", {}), jobset.get("spec", {})
    name, namespace = metadata.get("name", ""), metadata.get("namespace", "default")
    network = spec.get("network", {})
    for replicated in spec.get("replicatedJobs", []):
        job = copy.deepcopy(replicated.get("template", {}))
        own_name = f"{name}-{replicated.get('name', '')}-0"
        marks = {
            "jobset.sigs.k8s.io/jobset-name": name,
            "jobset.sigs.k8s.io/replicatedjob-name": str(replicated.get("name", "")),
            "jobset.sigs.k8s.io/replicatedjob-replicas": str(replicated.get("replicas", 1)),
            "jobset.sigs.k8s.io/restart-attempt": "0",
            "jobset.sigs.k8s.io/job-index": "0",
            "jobset.sigs.k8s.io/job-key": hashlib.sha1(f"{namespace}/{own_name}".encode()).hexdigest(),
        }
        template = job.setdefault("spec", {}).setdefault("template", {})
        for one in (job, template):
            inner = one.setdefault("metadata", {})
            inner["labels"] = {**inner.get("labels", {}), **marks}
            inner["annotations"] = {**inner.get("annotations", {}), **marks}
        if network.get("enableDNSHostnames", True):
            template.setdefault("spec", {})["subdomain"] = network.get("subdomain", name)
        yield {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": own_name, "namespace": namespace, **job["metadata"]},
            "spec": {**job["spec"], "suspend": bool(spec.get("suspend", False))},
        }


def child_pod(job: Object) -> Object:
    """Return the first pod of an Indexed batch/v1 Job, with ``xxxxx`` for its random letters.

    The namespace's security level, limits and priority classes apply to pods, not to Jobs.
    """
    metadata = job["metadata"]
    template = copy.deepcopy(job["spec"]["template"])
    inner, first = template.get("metadata", {}), f"{metadata['name']}-0"
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **inner,
            "name": f"{first}-xxxxx",
            "namespace": metadata["namespace"],
            "labels": {**inner.get("labels", {}), **index, "batch.kubernetes.io/job-name": metadata["name"]},
            "annotations": {**inner.get("annotations", {}), **index},
        },
        "spec": {**template.get("spec", {}), "hostname": first},
    }


def child_jobset(runtime: Object, trainjob: Object) -> Object:
    """Return the JobSet that Kubeflow Trainer creates for a TrainJob and its runtime."""
    metadata, nodes = trainjob.get("metadata", {}), trainjob.get("spec", {}).get("trainer", {}).get("numNodes")
    template = copy.deepcopy(runtime.get("spec", {}).get("template", {}))
    if nodes is not None:
        for replicated in template.get("spec", {}).get("replicatedJobs", []):
            replicated["replicas"] = 1
            replicated["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {
            **template.get("metadata", {}),
            "name": metadata.get("name", ""),
            "namespace": metadata.get("namespace", "default"),
        },
        "spec": template.get("spec", {}),
    }


def child_pods(volcano_job: Object) -> Iterator[Object]:
    """Yield the first pod of every task of a Volcano Job."""
    metadata, spec = volcano_job.get("metadata", {}), volcano_job.get("spec", {})
    name, namespace = metadata.get("name", ""), metadata.get("namespace", "default")
    for task in spec.get("tasks", []):
        template = copy.deepcopy(task.get("template", {}))
        own_name = f"{name}-{task.get('name', '')}-0"
        inner = template.get("metadata", {})
        marks = {
            "volcano.sh/job-name": name,
            "volcano.sh/task-index": "0",
        }
        pod = {"hostname": own_name, "subdomain": name, "schedulerName": spec.get("schedulerName", "volcano")}
        yield {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                **inner,
                "name": own_name,
                "namespace": namespace,
                "labels": {**inner.get("labels", {}), **marks},
                "annotations": {**inner.get("annotations", {}), "volcano.sh/job-version": "0"},
            },
            "spec": {**template.get("spec", {}), **pod},
        }


def _is_volcano(one: Object) -> bool:
    return one.get("kind") == "Job" and str(one.get("apiVersion", "")).startswith("batch.volcano.sh/")
