"""Each rule finds its violation."""

import copy
from typing import Any

import pytest

from tests.launch.backends.kubernetes.rendering import rendered_recipe
from tests.launch.backends.kubernetes.rules import problems

GONE = object()
JOB = "spec.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
NODE = f"{POD}.containers.0"
MEMORY, GPUS = f"{NODE}.resources.requests.memory", f"{NODE}.resources.%s.nvidia~com/gpu"

# The path in the workload, the value to set, and a part of the expected problem.
JOBSET = {
    "pods that start later": (f"{JOB}.parallelism", 8, "must equal completions"),
    "a quantity in words": (f"{NODE}.resources.limits.memory", "eight", "must be a quantity"),
    "a quantity with a blank": (MEMORY, "8 Gi", "must be a quantity"),
    "a quantity of the spec's own": (MEMORY, "80GB", "must be a quantity"),
    "less than nothing": (MEMORY, "-1Gi", "not negative"),
    "fewer GPUs requested than the limit": (GPUS % "requests", "4", "equal the limit"),
    "GPUs without a limit": (GPUS % "limits", GONE, "have a limit"),
    "half a GPU": (GPUS % "limits", "8500m", "must be whole"),
    "more requested than the limit": (MEMORY, "9Pi", "must not exceed the limit"),
    "a resource without a domain": (f"{NODE}.resources.limits.gpu", "8", "is no resource"),
    "a mount of nothing": (f"{NODE}.volumeMounts.0.name", "shmem", "names no volume"),
    "two mounts in one place": (f"{NODE}.volumeMounts.1.mountPath", "/dev/shm", "/dev/shm twice"),
    "a mount at no path": (f"{NODE}.volumeMounts.0.mountPath", "dev/shm", "must be absolute"),
    "a path that leaves the volume": (f"{NODE}.volumeMounts.2.subPath", "../other", "relative path"),
    "no image": (f"{NODE}.image", "", "image must not be empty"),
    "a variable twice": (f"{NODE}.env.1.name", "SCALETRAIN_NODE_RANK", "SCALETRAIN_NODE_RANK twice"),
    "a variable with a blank": (f"{NODE}.env.1.name", "A B", "no name of a variable"),
    "a secret without a key": (f"{NODE}.env.0.valueFrom", {"secretKeyRef": {"name": "s"}}, "must name a key"),
    "a volume of two kinds": (f"{POD}.volumes.0.hostPath", {"path": "/"}, "must have one source"),
    "a volume of no kind": (f"{POD}.volumes.0.emptyDir", GONE, "must have one source"),
    "two volumes of one name": (f"{POD}.volumes.1.name", "shm", "volumes has shm twice"),
    "two containers of one name": (
        f"{POD}.initContainers",
        [{"name": "node", "image": "a"}],
        "containers has node twice",
    ),
    "a size in words": (f"{POD}.volumes.0.emptyDir.sizeLimit", "64GB", "must be a quantity"),
    "a claim's name": (f"{POD}.volumes.2.persistentVolumeClaim.claimName", "My_Claim", "lower-case"),
    "a volume that is not mounted": (f"{POD}.volumes.2.name", "other", "is mounted by no container"),
    "a ConfigMap that is not sent": (f"{POD}.volumes.1.configMap.name", "other", "names no ConfigMap"),
    "a document that is not sent": (f"{POD}.volumes.1.configMap.items.0.key", "run.yaml", "is no key"),
    "an effect that does not exist": (f"{POD}.tolerations.0.effect", "NoStart", "no effect NoStart"),
    "an operator that does not exist": (f"{POD}.tolerations.0.operator", "exists", "no operator exists"),
    "a value with Exists": (f"{POD}.tolerations.0.value", "true", "must be left out"),
    "no key without Exists": (f"{POD}.tolerations.0", {"operator": "Equal"}, "Exists without a key"),
    "seconds without an eviction": (f"{POD}.tolerations.0.tolerationSeconds", 5, "NoExecute alone"),
    "root beside runAsNonRoot": (f"{POD}.securityContext.runAsUser", 0, "must not be root"),
    "a host's network without its names": (f"{POD}.hostNetwork", True, "ClusterFirstWithHostNet"),
    "no grace period": (f"{POD}.terminationGracePeriodSeconds", 0, "above 0"),
    "a group that is not sent": (f"{POD}.schedulingGroup", {"podGroupName": "g"}, "names no PodGroup"),
    "an account in capitals": (f"{POD}.serviceAccountName", "Run", "lower-case"),
    "a label's value": (f"{JOB}.template.metadata.labels.team", "a b", "dashes"),
    "a label's key": (f"{JOB}.template.metadata.labels.a b", "x", "no valid key"),
    "a selector's value": (f"{POD}.nodeSelector", {"rack": "a b"}, "dashes"),
    "an annotation that is no text": ("metadata.annotations.scaletrain~dev/revision", 0, "must be text"),
    "annotations of 256 KiB": ("metadata.annotations.a", "x" * 2**18, "must not exceed 262144"),
    "a name in capitals": ("metadata.name", "Demo", "lower-case"),
    "another namespace": ("metadata.namespace", "other", "another object has another one"),
}
VOLCANO = {
    "fewer pods than the gang": ("spec.minAvailable", 15, "must be the 16 pods"),
    "retries that mean three": ("spec.maxRetry", 0, "default of 3"),
    "a mount of nothing": ("spec.tasks.0.template.spec.containers.0.volumeMounts.0.name", "shmem", "names no volume"),
}
NATIVE_GANG = "cluster.kubernetes.native_gang=v1alpha2"


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


@pytest.mark.parametrize(
    ("option", "place", "path", "value", "message"),
    [
        *(pytest.param("cluster.spot=true", -1, *row, id=f"jobset-{name}") for name, row in JOBSET.items()),
        *(
            pytest.param("cluster.kubernetes.backend=volcano", -1, *row, id=f"volcano-{name}")
            for name, row in VOLCANO.items()
        ),
        (NATIVE_GANG, 1, "spec.schedulingPolicy.gang.minCount", 15, "must be the pods of the gang: {16}"),
        (NATIVE_GANG, 1, "metadata.name", "other", "names no PodGroup"),
        ("cluster.spot=true", 0, "data.run~json", "x" * 2**20, "must not exceed 1048576"),
        ("cluster.spot=true", 0, "data.a/b", "", "data.a/b is no valid key"),
    ],
)
def test_a_rule_finds_its_violation(option: str, place: int, path: str, value: Any, message: str) -> None:
    objects = list(rendered_recipe("llama-70b-spot", option).objects)
    assert problems(objects) == []
    objects[place] = changed(objects[place], path, value)
    found = problems(objects)
    assert any(message in problem for problem in found), found
