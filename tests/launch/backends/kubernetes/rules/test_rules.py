"""Each rule finds its violation, at its path and nowhere else."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from tests.launch.backends.kubernetes.rendering import child_job, rendered_recipe
from tests.launch.backends.kubernetes.rules.objects import problems

GONE = object()
JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
NODE = f"{POD}.containers.0"
RULES = "spec.failurePolicy.rules"
TASK_POD = "spec.tasks.0.template.spec"

# The path in the JobSet, the value to set (None removes it), and a part of the expected problem.
JOBSET = {
    "an action that does not exist": (f"{RULES}.0.action", "FailJobset", "must be one of FailJobSet"),
    "a dash in the name of a rule": (f"{RULES}.1.name", "host-maintenance", "letters, digits"),
    "two rules of one name": (f"{RULES}.1.name", "final_exit_code", "name of two entries"),
    "a reason that does not exist": (f"{RULES}.0.onJobFailureReasons.0", "PodFailed", "must be one of"),
    "a pattern that is none": (f"{RULES}.0.onJobFailureMessagePatterns.0", "exit code (2|3", "regular expression"),
    "a pattern that only Python has": (f"{RULES}.0.onJobFailureMessagePatterns.0", "(?<=code )2", "regular expression"),
    "a target that does not exist": (f"{RULES}.0.targetReplicatedJobs.0", "workers", "names no replicated job"),
    "a strategy behind a gate": ("spec.failurePolicy.restartStrategy", "InPlaceRestart", "feature gate"),
    "a strategy that does not exist": ("spec.failurePolicy.restartStrategy", "Blocking", "must be one of"),
    "restarts below nothing": ("spec.failurePolicy.maxRestarts", -1, "between 0 and"),
    "an operator that does not exist": ("spec.successPolicy.operator", "Every", "must be one of"),
    "a subdomain with a dot": ("spec.network.subdomain", "a.b", "dashes"),
    "a completion mode that does not exist": (f"{JOB}.completionMode", "Idx", "must be one of Indexed"),
    "no completions": (f"{JOB}.completions", GONE, "is needed"),
    "pods that start later": (f"{JOB}.parallelism", 8, "must equal completions"),
    "a backoff below nothing": (f"{JOB}.backoffLimit", -1, "not negative"),
    "a replacement before the end": (f"{JOB}.podReplacementPolicy", "TerminatingOrFailed", "must be Failed"),
    "a replacement that does not exist": (f"{JOB}.podReplacementPolicy", "Never", "must be one of"),
    "success named as a failure": (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.values", [0, 2], "is success"),
    "codes out of order": (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.values", [3, 2], "ascending"),
    "no codes": (f"{JOB}.podFailurePolicy.rules.1.onExitCodes.values", [], "1 to 255"),
    "an operator of codes that does not exist": (
        f"{JOB}.podFailurePolicy.rules.1.onExitCodes.operator",
        "Is",
        "one of",
    ),
    "a container that does not exist": (
        f"{JOB}.podFailurePolicy.rules.1.onExitCodes.containerName",
        "main",
        "names no",
    ),
    "an action of pods that does not exist": (
        f"{JOB}.podFailurePolicy.rules.0.action",
        "Fail",
        "must be one of FailJob",
    ),
    "a rule without a condition": (f"{JOB}.podFailurePolicy.rules.0.onPodConditions", GONE, "must have either"),
    "a status that is no word": (f"{JOB}.podFailurePolicy.rules.0.onPodConditions.0.status", "true", "must be one of"),
    "a failing index without its limit": (
        f"{JOB}.podFailurePolicy.rules.0.action",
        "FailIndex",
        "backoffLimitPerIndex",
    ),
    "a pod that starts again by itself": (f"{POD}.restartPolicy", "OnFailure", "must be Never"),
    "a restart policy that does not exist": (f"{POD}.restartPolicy", "never", "must be Never or OnFailure"),
    "a quantity in words": (f"{NODE}.resources.limits.memory", "eight", "must be a quantity"),
    "a quantity with a blank": (f"{NODE}.resources.requests.memory", "8 Gi", "must be a quantity"),
    "a quantity of the spec's own": (f"{NODE}.resources.requests.memory", "80GB", "must be a quantity"),
    "less than nothing": (f"{NODE}.resources.requests.memory", "-1Gi", "not negative"),
    "fewer GPUs asked for than limited to": (f"{NODE}.resources.requests.nvidia~com/gpu", "4", "must equal the limit"),
    "GPUs without a limit": (f"{NODE}.resources.limits.nvidia~com/gpu", GONE, "must equal the limit"),
    "half a GPU": (f"{NODE}.resources.limits.nvidia~com/gpu", "8500m", "must"),
    "more asked for than allowed": (f"{NODE}.resources.requests.memory", "9Pi", "must not exceed the limit"),
    "a resource without a domain": (f"{NODE}.resources.limits.gpu", "8", "is no resource"),
    "a mount of nothing": (f"{NODE}.volumeMounts.0.name", "shmem", "names no volume"),
    "two mounts in one place": (f"{NODE}.volumeMounts.1.mountPath", "/dev/shm", "mountPath of two entries"),
    "a mount at no path": (f"{NODE}.volumeMounts.0.mountPath", "dev/shm", "must be absolute"),
    "a way out of the volume": (f"{NODE}.volumeMounts.2.subPath", "../other", "relative path"),
    "a container's name": (f"{NODE}.name", "Node", "lower-case"),
    "no image": (f"{NODE}.image", "", "must name an image"),
    "a pull policy that does not exist": (f"{NODE}.imagePullPolicy", "always", "must be one of"),
    "a misspelt capability": (f"{NODE}.securityContext.capabilities.add", ["IPC_LOKC"], "no capability"),
    "a variable twice": (f"{NODE}.env.1.name", "SCALETRAIN_NODE_RANK", "name of two entries"),
    "a variable without a name": (f"{NODE}.env.1.name", "A B", "environment variable"),
    "a number for a variable": (f"{NODE}.env.6.value", 29500, "must be text"),
    "a value and its source": (f"{NODE}.env.0.value", "0", "beside valueFrom"),
    "a field that pods do not have": (f"{NODE}.env.2.valueFrom.fieldRef.fieldPath", "spec.node", "no field of a pod"),
    "a secret without a key": (f"{NODE}.env.0.valueFrom", {"secretKeyRef": {"name": "s"}}, "must name a key"),
    "a volume of two kinds": (f"{POD}.volumes.0.hostPath", {"path": "/"}, "must have one source"),
    "a volume of no kind": (f"{POD}.volumes.0.emptyDir", GONE, "must have one source"),
    "a medium that does not exist": (f"{POD}.volumes.0.emptyDir.medium", "memory", "must be Memory"),
    "a size in words": (f"{POD}.volumes.0.emptyDir.sizeLimit", "64GB", "must be a quantity"),
    "a claim's name": (f"{POD}.volumes.2.persistentVolumeClaim.claimName", "My_Claim", "lower-case"),
    "a volume nobody mounts": (f"{POD}.volumes.2.name", "other", "is mounted by no container"),
    "a ConfigMap that is not sent": (f"{POD}.volumes.1.configMap.name", "other", "names no ConfigMap"),
    "a document that is not sent": (f"{POD}.volumes.1.configMap.items.0.key", "run.yaml", "is no key"),
    "an effect that does not exist": (f"{POD}.tolerations.0.effect", "NoStart", "must be one of"),
    "an operator of a toleration": (f"{POD}.tolerations.0.operator", "exists", "must be one of"),
    "a value that exists": (f"{POD}.tolerations.0.value", "true", "must be left out"),
    "seconds without an eviction": (f"{POD}.tolerations.0.tolerationSeconds", 5, "NoExecute alone"),
    "root after all": (f"{POD}.securityContext.runAsUser", 0, "must not be root"),
    "a profile that does not exist": (f"{POD}.securityContext.seccompProfile.type", "Default", "must be one of"),
    "a policy of groups": (f"{POD}.securityContext.fsGroupChangePolicy", "Mismatch", "must be one of"),
    "a host's network without its names": (f"{POD}.hostNetwork", True, "ClusterFirstWithHostNet"),
    "no time to leave": (f"{POD}.terminationGracePeriodSeconds", 0, "above 0"),
    "a group that is not sent": (f"{POD}.schedulingGroup", {"podGroupName": "g"}, "names no PodGroup"),
    "a label's value": (f"{JOB}.template.metadata.labels.team", "a b", "dashes"),
    "a label's key": (f"{JOB}.template.metadata.labels.a b", "x", "no valid key"),
    "a selector's value": (f"{POD}.nodeSelector", {"rack": "a b"}, "dashes"),
    "an annotation that is no text": ("metadata.annotations.scaletrain~dev/revision", 0, "must be text"),
    "a name in capitals": ("metadata.name", "Demo", "lower-case"),
    "a name that no Service can have": ("metadata.name", "7b-s1", "a letter first"),
    "a name that is too long for pods": ("metadata.name", "a" * 48, "makes pod names of"),
    "another namespace": ("metadata.namespace", "other", "must be one for all objects"),
}
VOLCANO = {
    "an action that does not exist": ("spec.policies.0.action", "FailJob", "must be one of"),
    "more pods than there are": ("spec.minAvailable", 17, "between 1 and the 16 pods"),
    "success as a code": ("spec.policies.0.exitCode", 0, "is success"),
    "a code twice": ("spec.policies.1.exitCode", 2, "exitCode of two entries"),
    "a code beside an event": ("spec.policies.0.event", "PodFailed", "either events or an exitCode"),
    "retries that mean three": ("spec.maxRetry", 0, "default of 3"),
    "a plugin that does not exist": ("spec.plugins.service", [], "must be one of"),
    "a scheduler without gangs": ("spec.schedulerName", "default-scheduler", "must be volcano"),
    "a task's pods": ("spec.tasks.0.minAvailable", 17, "must not exceed replicas"),
    "a crash nobody hears of": (f"{TASK_POD}.restartPolicy", "OnFailure", "must be Never"),
    "fewer GPUs asked for": (f"{TASK_POD}.containers.0.resources.requests.nvidia~com/gpu", "1", "must equal the limit"),
    "a mount of nothing": (f"{TASK_POD}.containers.0.volumeMounts.0.name", "shmem", "names no volume"),
    "a name that no Service can have": ("metadata.name", "7b-s1", "a letter first"),
    "a name that is too long for pods": ("metadata.name", "a" * 60, "makes pod names of"),
}


def changed(one: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy with one value changed; `~` in a key stands for a dot."""
    made = copy.deepcopy(one)
    *parents, last = (int(part) if part.isdigit() else part.replace("~", ".") for part in path.split("."))
    place: Any = made
    for part in parents:
        place = place[part] if isinstance(part, int) else place.setdefault(part, {})
    if value is GONE:
        del place[last]
    else:
        place[last] = copy.deepcopy(value)
    return made


def said(backend: str, path: str, value: Any) -> list[str]:
    *others, workload = rendered_recipe("llama-70b-spot", f"cluster.kubernetes.backend={backend}").objects
    assert problems([*others, workload]) == ()
    return [str(problem) for problem in problems([*others, changed(workload, path, value)])]


@pytest.mark.parametrize("case", JOBSET)
def test_a_jobset_with(case: str) -> None:
    path, value, message = JOBSET[case]
    found = said("jobset", path, value)
    assert any(message in one for one in found), found
    assert all(one.startswith(("JobSet/", "ConfigMap/")) for one in found)


@pytest.mark.parametrize("case", VOLCANO)
def test_a_volcano_job_with(case: str) -> None:
    path, value, message = VOLCANO[case]
    found = said("volcano", path, value)
    assert any(message in one for one in found), found


def test_a_trainjob_is_validated_by_its_derived_jobset() -> None:
    config_map, runtime, trainjob = rendered_recipe("llama-70b-spot", "cluster.kubernetes.backend=trainjob").objects
    assert problems([config_map, runtime, trainjob]) == ()
    alone = problems([config_map, trainjob])
    assert ["names no runtime" in str(problem) for problem in alone] == [True]
    broken = changed(runtime, "spec.template.spec.failurePolicy.rules.0.action", "Stop")
    assert any("must be one of FailJobSet" in str(problem) for problem in problems([config_map, broken, trainjob]))
    unlabelled = changed(runtime, "spec.template.spec.replicatedJobs.0.template.metadata.labels", {})
    assert any("trainjob-ancestor-step" in str(problem) for problem in problems([config_map, unlabelled, trainjob]))


def test_a_pod_group_is_the_whole_gang() -> None:
    config_map, group, jobset = rendered_recipe("llama-70b-spot", "cluster.kubernetes.native_gang=v1alpha2").objects
    assert problems([config_map, group, jobset]) == ()
    fewer = changed(group, "spec.schedulingPolicy.gang.minCount", 15)
    assert ["must be the 16 pods" in str(problem) for problem in problems([config_map, fewer, jobset])] == [True]
    strange = changed(group, "metadata.name", "other")
    assert any("group of no pod" in str(problem) for problem in problems([config_map, strange, jobset]))


def test_a_config_map_has_a_largest_size_and_valid_keys() -> None:
    config_map, jobset = rendered_recipe("llama-70b-spot").objects
    large = changed(config_map, "data", {"run.json": "x" * 2**20})
    assert any("must not exceed 1048576" in str(problem) for problem in problems([large, jobset]))
    strange = changed(config_map, "data", {"run.json": "{}", "a/b": ""})
    assert any("data.a/b" in str(problem) for problem in problems([strange, jobset]))


def test_a_problem_of_a_template_is_also_one_of_the_derived_job() -> None:
    (jobset,) = [one for one in rendered_recipe("llama-70b-spot").objects if one["kind"] == "JobSet"]
    job = child_job(changed(jobset, f"{NODE}.resources.limits.nvidia~com/gpu", "4"))
    assert "spec.template.spec.containers[0].resources.requests.nvidia.com/gpu" in [
        each.key for each in problems([job])
    ]
