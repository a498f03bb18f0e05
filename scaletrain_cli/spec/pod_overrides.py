"""cluster.kubernetes.pod_overrides: what a user adds to the pods of a run, and what only the launcher may set.

The overrides are a part of a pod template, as for kubectl: ``{spec: {runtimeClassName: nvidia}}``. Refused here is what
would break a run. Fields and types are compared with those of Kubernetes when a run is rendered, and by the API server.
"""

import json
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

# Variables that the template or a controller sets: a second entry of the same name would be refused, or override.
OWN_VARIABLES = frozenset(
    "MASTER_ADDR MASTER_PORT NODE_RANK SCALETRAIN_NODE_RANK SCALETRAIN_GANG SCALETRAIN_WORKLOAD SCALETRAIN_NODE_NAME "
    "SCALETRAIN_POD VC_TASK_INDEX VK_TASK_INDEX".split()
)
_AGENT = r"spec\.containers\[node\]"  # the container of the node agent
_OWN_MARKS = (
    r"([^=]*\.)?(scaletrain\.dev|jobset\.sigs\.k8s\.io|batch\.kubernetes\.io|trainer\.kubeflow\.org)/.*",
    r"app\.kubernetes\.io/(name|managed-by|instance)",
    r"job-name|controller-uid|volcano\.sh/(task-index|job-version|job-name)",
    r"kueue\.x-k8s\.io/(queue-name|priority-class|podset-.*)",
)
_KEY = "has a key of its own: set cluster.kubernetes."
_LEFT = "must be null, which leaves it to the cluster; a number has the key cluster.kubernetes."
_DEVICES = "is requested by the launcher: see cluster.gpus_per_node, kubernetes.gpu_resource and rdma_resource."
# The keys of what the agent's container requests, in the pods of the run and in those that prepare its data.
_OF_RUN = {"cpu": "cpus_per_node or cpu_limit", "memory": "memory_per_node", "ephemeral-storage": "ephemeral_storage"}
_OF_PREPARATION = {"cpu": "preparation.cpus or cpu_limit"} | {
    name: f"preparation.{name.replace('-', '_')}" for name in ("memory", "ephemeral-storage")
}
# What would break a run: patterns of a place with its value, as spec.containers[NAME].env[NAME].value="1", and why.
_REFUSED = {
    rf"(metadata|spec|metadata\.(labels|annotations)|spec\.(containers|volumes)|{_AGENT}(\.(env|volumeMounts|"
    r"resources(\.\w+)?))?)=null": "would remove what the launcher sets. Name single entries.",
    r"(metadata|spec|metadata\.(labels|annotations))=.*": "must be a mapping.",
    r"(?!metadata\b|spec\b).*": "is no part of a pod template. Use metadata (labels, annotations) or spec.",
    r"metadata\.(?!(labels|annotations)\b).*": "is set by the launcher. Use labels or annotations.",
    rf"metadata\.(labels|annotations)\.({'|'.join(_OWN_MARKS)})": "is set by the launcher or by a controller.",
    r'metadata\.(labels|annotations)\.[^=]*=(?!"|null).*': "must be text. Put it in quotes.",
    r".*\.\$[^.=]*": "is no field. Directives of kubectl are not supported; null removes a field.",
    r"spec\.(containers|initContainers|volumes|tolerations)(\..*|=(?!null).*)": "must be a list.",
    rf"(spec\.(volumes|initContainers)|{_AGENT}\.(env|volumeMounts))\[\d+\](=.*)?": "must be a mapping with its name.",
    r"spec\.restartPolicy": "must stay Never: pods restart as a whole gang.",
    r"spec\.terminationGracePeriodSeconds": "has a key of its own: set cluster.grace_seconds.",
    r"spec\.activeDeadlineSeconds": f"{_KEY}active_deadline.",
    r"spec\.(hostname|subdomain|setHostnameAsFQDN|hostnameOverride)": "is the address by which the pods meet.",
    r"spec\.nodeName": "would put all pods on one node. Use nodeSelector or affinity.",
    r"spec\.schedulingGroup": f"{_KEY}native_gang.",
    r"spec\.ephemeralContainers": "cannot be set when a pod is created. kubectl debug adds them.",
    r"spec\.(hostPID|shareProcessNamespace)": "is not possible: the agent must be process 1, to end all ranks.",
    r"spec\.hostNetwork": f"{_KEY}host_network.",
    r"spec\.priority(ClassName)?": f"{_KEY}pod_priority.",
    r"spec\.serviceAccount(Name)?": f"{_KEY}service_account.",
    r"spec\.imagePullSecrets": f"{_KEY}pull_secrets.",
    r"spec\.resources": f"{_KEY}cpus_per_node, cpu_limit, memory_per_node or ephemeral_storage.",
    rf"(spec|{_AGENT})\.securityContext\.runAs(User|Group)=(?!null).*": f"{_LEFT}run_as_user.",
    r"spec\.securityContext\.fsGroup=(?!null).*": f"{_LEFT}fs_group.",
    rf"(spec|{_AGENT})\.securityContext\.runAsNonRoot=(?!true).*": "must be true: the files of a run are not of root.",
    r"spec\.volumes\[(shm|documents|hub|runs|volume-\d+)\]": "is a volume of the launcher. Use another name.",
    r"spec\.containers\[(?!node\])[^\]]*\]": "must have the name node, the container of the agent: pods would not end "
    "before others do. A side-car is one of initContainers with restartPolicy: Always.",
    r"spec\.initContainers\[node\]": "has the name of the container of the agent. Use another name.",
    rf"{_AGENT}\.(command|args)": "starts the agent, which starts the ranks. A program of your own is code.command.",
    rf"{_AGENT}\.image": f"{_KEY}image.",
    rf"{_AGENT}\.imagePullPolicy": f"{_KEY}image_pull_policy.",
    rf"{_AGENT}\.(lifecycle|livenessProbe|startupProbe|restartPolicy(Rules)?)": "is not possible: the agent decides "
    "when a pod ends, and needs the whole grace period to save.",
    rf"{_AGENT}\.terminationMessage(Path|Policy)": "is where status and explain read why a pod ended.",
    rf"{_AGENT}\.env\[({'|'.join(OWN_VARIABLES)}|(LOCAL_)?RANK|(LOCAL_)?WORLD_SIZE)\]": "is set by the launcher.",
}


def override_problems(
    overrides: Mapping[str, Any],
    devices: Iterable[str],
    paths: Mapping[str, str],
    *,
    volcano: bool,
    preparation: bool = False,
) -> Iterator[tuple[str, str]]:
    """Yield the key of each part that would break a run, and why. ``devices``: resources that the launcher requests.

    ``paths``: those where it mounts volumes, each with its key. ``preparation``: of the pods that prepare the data.
    """
    names = "|".join(map(re.escape, devices))
    why_none = "is not for pods that prepare data, which run on CPU nodes." if preparation else _DEVICES
    refused = _REFUSED | {rf"spec\.(c|initC)ontainers\[.*\]\.resources\.\w+\.({names})": why_none}
    for name, own in (_OF_PREPARATION if preparation else _OF_RUN).items():
        refused[rf"{_AGENT}\.resources\.\w+\.{name}"] = f"{_KEY}{own}."
    if volcano:
        refused[r"spec\.schedulerName"] = "must stay volcano with backend: volcano, which schedules the gang."
    done = ""
    for key, place, value in _walk(overrides):
        why = next(
            (why for pattern, why in refused.items() if re.fullmatch(rf"({pattern})(=.*)?", place, re.DOTALL)), None
        )
        if why is not None and not f"{key}.".startswith(f"{done}."):
            done = key
            yield key, why
        is_mount = re.fullmatch(rf"{_AGENT}\.volumeMounts\[.*\]\.mountPath=.*", place, re.DOTALL)
        if is_mount and (hides := hidden_path(posixpath.normpath(str(value)), paths)):
            yield key, hides


def hidden_path(path: str, taken: Mapping[str, str]) -> str | None:
    """Return what is wrong with a mount at ``path`` beside those at ``taken`` (each with its key), or None."""
    for other, what in taken.items():
        if f"{path}/".startswith(f"{other}/") or f"{other}/".startswith(f"{path}/"):
            return f"must not contain, be inside or equal {other}, which is {what}."
    return None


def items_of(overrides: Mapping[str, Any], field: str) -> dict[str, str]:
    """Return the names of the items of a list of the agent's container (variables, mount paths), each with its key."""
    matches = ((key, re.fullmatch(rf"{_AGENT}\.{field}\[(.*)\]", place)) for key, place, _ in _walk(overrides))
    return {match[1]: key for key, match in matches if match is not None}


def _walk(value: Any, key: str = "", place: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield the key, the place as in _REFUSED, and the value of everything in the overrides."""
    if isinstance(value, Mapping | list | tuple):
        if key:
            yield key, place, value
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for name, inner in items:
            of_list = inner if isinstance(inner, Mapping) and isinstance(name, int) else {}
            named = of_list.get("mountPath", of_list.get("name", name))
            inside = f"{place}[{named}]" if isinstance(name, int) else f"{place}.{name}".lstrip(".")
            yield from _walk(inner, f"{key}.{name}".lstrip("."), inside)
    else:
        yield key, f"{place}={json.dumps(value, default=str)}", value
