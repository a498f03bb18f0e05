"""A run as a JobSet, a TrainJob with its TrainingRuntime, or a Volcano Job: one gang, one pod per node. Pure.

Also the objects that controllers create from these. The API server accepts a JobSet with a pod template that is invalid
for a Job; the job then never starts, and only an event shows why. The dry run before a submission validates them.

Volcano counts every restart of a job against maxRetry, evictions included, and cannot exclude them. So if the run may
be preempted without limit, maxRetry has no limit either, and pod 0 counts the restarts.
"""

import base64
import copy
import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from scaletrain_cli.errors import ExitCode
from scaletrain_cli.launch.backends.kubernetes.api_kinds import CONFIG_MAP, JOB, JOB_SET, POD, RUNTIME, Object
from scaletrain_cli.launch.backends.kubernetes.names import NODE, PRIORITY_LABEL, QUEUE_LABEL, Workload
from scaletrain_cli.spec import RunSpec

MOST_RESTARTS = 1_000_000  # far below the limit of a 32-bit integer
# A retry does not fix any of these.
FINAL_CODES = (ExitCode.USAGE, ExitCode.INFEASIBLE, ExitCode.DO_NOT_REQUEUE)
_EXCLUSIVE_TOPOLOGY = "alpha.jobset.sigs.k8s.io/exclusive-topology"


def jobset(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """Return the workload object around a pod template."""
    topology, exclusive = spec.cluster.kubernetes.topology, {}
    if topology is not None and topology.kind == "exclusive":
        exclusive = {_EXCLUSIVE_TOPOLOGY: topology.key or ""}  # reserves the domain for this JobSet
    metadata = metadata_of(spec, workload, queue_labels(spec), exclusive)
    return workload.kind.object(metadata, jobset_spec(spec, workload, template))


def jobset_spec(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """Return the spec that a JobSet and Trainer's runtime share."""
    ttl = spec.cluster.kubernetes.ttl_seconds_after_finished
    return {
        # The Service has the JobSet's name. Pods must resolve before they are ready: they wait for each other.
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
    """Return the labels that name Kueue's queue and priority class."""
    kubernetes = spec.cluster.kubernetes
    if not kubernetes.kueue or kubernetes.queue is None:
        return {}
    return {QUEUE_LABEL: kubernetes.queue, **({PRIORITY_LABEL: kubernetes.priority} if kubernetes.priority else {})}


def charged_restarts(spec: RunSpec) -> int:
    """Return how often a gang may fail in total; the agent of pod 0 decides which budget a failure is charged to."""
    restarts = spec.restarts
    return min(restarts.node + restarts.crash + restarts.oom, MOST_RESTARTS)


def failure_policy(spec: RunSpec) -> dict[str, Any]:
    """Return the JobSet's rules: the first that matches decides, and a failure that matches none is charged."""
    final = "|".join(str(int(code)) for code in FINAL_CODES)
    free = "FailJobSet" if spec.restarts.preemption == 0 else "RestartJobSetAndIgnoreMaxRestarts"
    return {
        "maxRestarts": charged_restarts(spec),
        # No new pod while an old one runs: two gangs must not overlap.
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
        # Only after the old pod has ended: otherwise two pods of one rank could write at once.
        "podReplacementPolicy": "Failed",
        **({} if deadline is None else {"activeDeadlineSeconds": math.ceil(deadline)}),
        "podFailurePolicy": {
            # In this order: an evicted pod may also have an exit code, but the eviction is the cause.
            "rules": [
                {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                on_codes(FINAL_CODES),
                on_codes([ExitCode.PREEMPTED]),
            ]
        },
        "template": template,
    }


def on_codes(codes: Iterable[ExitCode]) -> dict[str, Any]:
    """Return the rule of a Job that fails it at these exit codes of a pod."""
    values = sorted(map(int, codes))
    return {"action": "FailJob", "onExitCodes": {"containerName": NODE, "operator": "In", "values": values}}


# Trainer finds the replicated job with the training nodes by this label.
_ANCESTOR = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def training_runtime(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """Return the runtime, which has the name of its only TrainJob and must exist first."""
    inner = jobset_spec(spec, workload, template)
    metadata = inner["replicatedJobs"][0]["template"]["metadata"]
    metadata["labels"] = metadata["labels"] | _ANCESTOR
    marks = {"labels": workload.labels, "annotations": workload.annotations}
    runtime = {"mlPolicy": {"numNodes": spec.cluster.nodes}, "template": {"metadata": marks, "spec": inner}}
    return RUNTIME.object(metadata_of(spec, workload), runtime)


def trainjob(spec: RunSpec, workload: Workload) -> dict[str, Any]:
    """Return the TrainJob. Kueue reads its labels, not those of the JobSet that Trainer creates."""
    job = {
        "runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": RUNTIME.name, "name": workload.name},
        "trainer": {"numNodes": spec.cluster.nodes},
    }
    return workload.kind.object(metadata_of(spec, workload, queue_labels(spec)), job)


def metadata_of(
    spec: RunSpec, workload: Workload, labels: Mapping[str, str] = {}, annotations: Mapping[str, str] = {}
) -> dict[str, Any]:
    """Return the metadata of an object of a run, with more labels and annotations."""
    return {
        "name": workload.name,
        "namespace": spec.cluster.kubernetes.used_namespace,
        "labels": {**workload.labels, **labels},
        "annotations": {**workload.annotations, **annotations},
    }


def config_map(metadata: Object, texts: Mapping[str, str], files: Mapping[str, bytes] = {}) -> Object:
    """Return a ConfigMap, which nothing can change."""
    binary = {name: base64.b64encode(content).decode() for name, content in files.items()}
    named: Object = {"apiVersion": CONFIG_MAP.api_version, "kind": CONFIG_MAP.name, "metadata": metadata}
    return named | {"immutable": True, "data": dict(texts), **({"binaryData": binary} if binary else {})}


_MODES = {"required": "hard", "preferred": "soft"}


def volcano_job(spec: RunSpec, workload: Workload, template: dict[str, Any]) -> dict[str, Any]:
    """Return the workload object around a pod template."""
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
        job["networkTopology"] = {"mode": _MODES[kubernetes.topology.kind], "highestTierName": kubernetes.topology.key}
    return workload.kind.object(metadata_of(spec, workload), job)


def max_retry(spec: RunSpec) -> int:
    """Return maxRetry: the allowed restarts and one more, as Volcano fails the job at this count. 0 would mean 3."""
    preemptions = spec.restarts.preemption
    return MOST_RESTARTS if preemptions == "unlimited" else min(charged_restarts(spec) + preemptions + 1, MOST_RESTARTS)


# ---- the objects that controllers create for a workload, for the dry run ----


def children(objects: Iterable[Object]) -> list[Object]:
    """Return the JobSets of TrainJobs, the Jobs of JobSets, and the first pod of each."""
    known = list(objects)
    derived: list[Object] = []
    for one in known:
        if one.get("kind") == "TrainJob":
            runtime = next((other for other in known if other.get("kind") == "TrainingRuntime"), None)
            derived += [child_jobset(runtime, one)] if runtime is not None else []
        elif one.get("kind") == "Job" and str(one.get("apiVersion", "")).startswith("batch.volcano.sh/"):
            derived += child_pods(one)
    jobs = [child for one in (*known, *derived) if one.get("kind") == "JobSet" for child in child_jobs(one)]
    return [*derived, *jobs, *map(child_pod, jobs)]


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
        own = {"name": own_name, "namespace": namespace, **job["metadata"]}
        yield JOB.object(own, {**job["spec"], "suspend": bool(spec.get("suspend", False))})


def child_pod(job: Object) -> Object:
    """Return the first pod of an Indexed batch/v1 Job, with ``xxxxx`` for its random letters.

    The namespace's security level, limits and priority classes apply to pods, not to Jobs.
    """
    metadata = job["metadata"]
    template = copy.deepcopy(job["spec"]["template"])
    inner, first = template.get("metadata", {}), f"{metadata['name']}-0"
    index = {"batch.kubernetes.io/job-completion-index": "0"}
    own = {
        **inner,
        "name": f"{first}-xxxxx",
        "namespace": metadata["namespace"],
        "labels": {**inner.get("labels", {}), **index, "batch.kubernetes.io/job-name": metadata["name"]},
        "annotations": {**inner.get("annotations", {}), **index},
    }
    return POD.object(own, {**template.get("spec", {}), "hostname": first})


def child_jobset(runtime: Object, trainjob: Object) -> Object:
    """Return the JobSet that Kubeflow Trainer creates for a TrainJob and its runtime."""
    metadata, nodes = trainjob.get("metadata", {}), trainjob.get("spec", {}).get("trainer", {}).get("numNodes")
    template = copy.deepcopy(runtime.get("spec", {}).get("template", {}))
    if nodes is not None:
        for replicated in template.get("spec", {}).get("replicatedJobs", []):
            replicated["replicas"] = 1
            replicated["template"]["spec"] |= {"parallelism": nodes, "completions": nodes}
    named = {"name": metadata.get("name", ""), "namespace": metadata.get("namespace", "default")}
    return JOB_SET.object({**template.get("metadata", {}), **named}, template.get("spec", {}))


def child_pods(volcano_job: Object) -> Iterator[Object]:
    """Yield the first pod of every task of a Volcano Job."""
    metadata, spec = volcano_job.get("metadata", {}), volcano_job.get("spec", {})
    name, namespace = metadata.get("name", ""), metadata.get("namespace", "default")
    for task in spec.get("tasks", []):
        template = copy.deepcopy(task.get("template", {}))
        own_name = f"{name}-{task.get('name', '')}-0"
        inner = template.get("metadata", {})
        marks = {"volcano.sh/job-name": name, "volcano.sh/task-index": "0"}
        pod = {"hostname": own_name, "subdomain": name, "schedulerName": spec.get("schedulerName", "volcano")}
        own = {
            **inner,
            "name": own_name,
            "namespace": namespace,
            "labels": {**inner.get("labels", {}), **marks},
            "annotations": {**inner.get("annotations", {}), "volcano.sh/job-version": "0"},
        }
        yield POD.object(own, {**template.get("spec", {}), **pod})
