"""The pod template of a run, the same for every kind of workload: its container, volumes, security and placement. Pure.

Secrets are in it by reference only. `$` in every value is doubled, because the kubelet expands `$(NAME)`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from scaletrain_cli.hub.cache import CACHE_VARIABLES
from scaletrain_cli.launch.backends.kubernetes.names import MASTER_PORT, NODE, Workload
from scaletrain_cli.launch.backends.kubernetes.pod_overrides import merged, without_containers, without_resources
from scaletrain_cli.own_processes import absolute_paths, python_words
from scaletrain_cli.plan.result import RunPlan
from scaletrain_cli.plan.vision.image_feed import reader_bytes
from scaletrain_cli.spec import RunSpec
from scaletrain_cli.spec.hub_files import hub_uses
from scaletrain_cli.spec.kubernetes import TolerationSpec
from scaletrain_cli.spec.loader_processes import cores_per_rank
from scaletrain_cli.spec.pod_overrides import OWN_VARIABLES

_MIB, _GIB = 2**20, 2**30
# Host memory of a GPU rank: the interpreter with torch and CUDA, pinned buffers, NCCL's proxies, the data loader.
_GPU_RANK_BYTES = 8 * _GIB
_CPU_RANK_BYTES = 3 * _GIB // 2  # the interpreter with torch; its tensors are in the plan
_AGENT_BYTES = _GIB
_SHM_BASE_BYTES = _GIB
_SHM_RANK_BYTES = _GIB  # NCCL's rings between the GPUs of a node take some hundred MB; a container has 64 MB by default


def pod_resources(spec: RunSpec, plan: RunPlan) -> dict[str, dict[str, str]]:
    """Return ``requests`` and ``limits`` of the container."""
    kubernetes, cluster = spec.cluster.kubernetes, spec.cluster
    devices = {}
    if cluster.gpu != "cpu":
        devices[kubernetes.gpu_resource] = str(cluster.gpus_per_node)
    if kubernetes.rdma_resource is not None:
        devices[kubernetes.rdma_resource] = str(kubernetes.rdma_count)
    return _resources(spec, str(cores_per_node(spec)), memory_bytes(spec, plan), kubernetes.ephemeral_storage, devices)


def _resources(
    spec: RunSpec, cores: str, memory: int, storage: int | None, devices: Mapping[str, str] | None = None
) -> dict[str, dict[str, str]]:
    """Return ``requests`` and ``limits`` of the container of any pod of a run; ``memory``, ``storage``: bytes."""
    whole = {"memory": quantity(memory)}
    if storage is not None:
        whole["ephemeral-storage"] = quantity(storage)
    whole |= devices or {}
    limit = {"cpu": cores} if _limits_cores(spec) else {}
    return {"requests": {"cpu": cores, **whole}, "limits": {**limit, **whole}}


def _limits_cores(spec: RunSpec) -> bool:
    """Return whether the cores that a pod requests are a limit, too: of all pods of a run, which have one namespace.

    Cores that the spec sets are: the pod is then Guaranteed, the last that a node evicts. A default must not throttle
    the pod.
    """
    kubernetes = spec.cluster.kubernetes
    if kubernetes.cpu_limit == "auto":
        return kubernetes.cpus_per_node != "auto" or spec.cluster.cpus_per_gpu != "auto"
    return kubernetes.cpu_limit == "requested"


def cores_per_node(spec: RunSpec) -> int:
    """Return ``cpus_per_node``, else ``cluster.cpus_per_gpu`` per rank, else a number that every node has."""
    cluster, given = spec.cluster, spec.cluster.kubernetes.cpus_per_node
    return cores_per_rank(spec) * cluster.gpus_per_node if given == "auto" else given


def shm_bytes(spec: RunSpec, plan: RunPlan) -> int:
    """Return the size of /dev/shm in bytes: 1 GiB, 1 GiB for each rank, and the copies of ``checkpoint.in_memory``."""
    given, copies = spec.cluster.kubernetes.shm_size, plan.durability.memory_copy_bytes_per_node
    return given if given != "auto" else _SHM_BASE_BYTES + _SHM_RANK_BYTES * spec.cluster.gpus_per_node + copies


def memory_bytes(spec: RunSpec, plan: RunPlan) -> int:
    """Return the pod's memory in bytes: the plan's copy of checkpoints and offloaded state, /dev/shm, and each process.

    On CPUs, what the plan calls the device's memory is the node's too.
    """
    given, ranks = spec.cluster.kubernetes.memory_per_node, spec.cluster.gpus_per_node
    if given != "auto":
        return given
    rank = plan.memory.host + (_CPU_RANK_BYTES + plan.memory.peak if spec.cluster.gpu == "cpu" else _GPU_RANK_BYTES)
    rank += reader_bytes(spec, plan.layout)
    whole = plan.durability.copy_bytes_per_node + shm_bytes(spec, plan) + _AGENT_BYTES + ranks * rank
    return -(-whole // _GIB) * _GIB


def quantity(size_bytes: int) -> str:
    """Return bytes rounded up to whole Mi, in the largest unit that divides them, as the API server writes them."""
    amount, units = -(-size_bytes // _MIB), ["Mi", "Gi", "Ti", "Pi"]
    while amount % 1024 == 0 and len(units) > 1:
        amount //= 1024
        units.pop(0)
    return f"{amount}{units[0]}"


GPU_PRODUCT_LABEL = "nvidia.com/gpu.product"  # from GPU feature discovery of the GPU Operator
# The taints of spot nodes. GKE and AKS set theirs; on EKS and with Karpenter the node pool defines it (these are the
# ones in their documentation); `spot` is from k8s/overlays/kueue/kueue.yaml.
_SPOT_TAINTS = {
    "gke": "cloud.google.com/gke-spot",
    "aks": "kubernetes.azure.com/scalesetpriority",
    "karpenter": "karpenter.sh/capacity-type",
    "eks": "eks.amazonaws.com/capacityType",
}
_OWN_SPOT_TAINT = "spot"
_NODE_UNHEALTHY = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
_KUEUE_TOPOLOGY = "kueue.x-k8s.io/podset-{}-topology"
# Autoscalers move pods to free nodes, but moving one pod restarts the whole gang.
UNMOVABLE = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}


def tolerations(spec: RunSpec) -> list[dict[str, Any]]:
    """Return the tolerations of GPU nodes, of spot nodes if the run uses them, and of unhealthy nodes for a time."""
    cluster, kubernetes = spec.cluster, spec.cluster.kubernetes
    taints: list[str] = []
    if cluster.gpu != "cpu":
        of_nvidia = kubernetes.gpu_resource.startswith("nvidia.com/")  # MIG slices are on the same nodes
        taints.append("nvidia.com/gpu" if of_nvidia else kubernetes.gpu_resource)
    if cluster.spot and kubernetes.spot_taint != "none":
        chosen = _SPOT_TAINTS if kubernetes.spot_taint == "auto" else [kubernetes.spot_taint]
        taints += [*(_SPOT_TAINTS[provider] for provider in chosen), _OWN_SPOT_TAINT]
    tolerations: list[dict[str, Any]] = [{"key": key, "operator": "Exists", "effect": "NoSchedule"} for key in taints]
    # Instead of the default of 300 s, during which the gang of a lost node would not restart.
    seconds = math.ceil(kubernetes.not_ready_seconds)
    tolerations += [
        {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": seconds}
        for key in _NODE_UNHEALTHY
    ]
    return [*tolerations, *map(_own_toleration, kubernetes.tolerations)]


def _own_toleration(own: TolerationSpec) -> dict[str, Any]:
    given = {"key": own.key, "operator": own.operator, "value": own.value, "effect": own.effect}
    toleration: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return toleration | ({} if own.seconds is None else {"tolerationSeconds": math.ceil(own.seconds)})


def _avoiding(affinity: dict[str, Any], avoid: Sequence[str]) -> dict[str, Any]:
    """Return the affinity without these nodes, by label as well as by name: Kueue's placement reads labels only.

    A node must match one of the terms, so each of them excludes the nodes.
    """
    by_label = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": list(avoid)}
    by_name = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in avoid]  # one value each
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    of_nodes = affinity.get("nodeAffinity", {})
    terms = of_nodes.get(required, {}).get("nodeSelectorTerms") or [{}]
    excluding = [merged(term, {"matchExpressions": [by_label], "matchFields": by_name}) for term in terms]
    return {**affinity, "nodeAffinity": {**of_nodes, required: {"nodeSelectorTerms": excluding}}}


DOCUMENTS_PATH = "/etc/scaletrain/run"
HUB_PATH = "/var/cache/huggingface"  # of the pod, unless env names another place, such as a mounted volume
AGENT_MODULE = "scaletrain_cli.launch.backends.kubernetes.pod_agent"
# After the ranks' grace period: 30 s for ranks that hang in the kernel, 45 s for pod 0's decision, 5 s to exit.
AGENT_SECONDS = 80

_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_GANG = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
# The sources of the pod's index, and of the id of its gang, which changes with each restart.
_FIELDS = {
    "jobset": (_INDEX, _GANG),
    "trainjob": (_INDEX, _GANG),
    "volcano": ("metadata.labels['volcano.sh/task-index']", "metadata.annotations['volcano.sh/job-version']"),
}


def pod_template(
    spec: RunSpec, plan: RunPlan, workload: Workload, documents: Mapping[str, str | bytes], avoid: Sequence[str] = ()
) -> dict[str, Any]:
    """Return ``metadata`` and ``spec`` of every pod. ``avoid``: names of nodes to exclude."""
    kubernetes = spec.cluster.kubernetes
    volumes = list(_volumes(spec, workload.config_map, documents, shm_bytes(spec, plan)))
    grace_seconds = math.ceil(spec.cluster.grace_seconds) + AGENT_SECONDS  # from SIGTERM to SIGKILL
    pod = _pod(spec, _container(spec, plan, workload), volumes, tolerations(spec), grace_seconds)
    if kubernetes.pod_priority is not None:
        pod["priorityClassName"] = kubernetes.pod_priority
    product = {} if kubernetes.gpu_product is None else {GPU_PRODUCT_LABEL: kubernetes.gpu_product}
    if selected := {**product, **kubernetes.node_selector}:
        pod["nodeSelector"] = selected
    if kubernetes.host_network:
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    if kubernetes.native_gang != "none":
        pod["schedulingGroup"] = {"podGroupName": workload.name}
    annotations = workload.annotations
    if kubernetes.topology is not None and kubernetes.kueue:
        annotations[_KUEUE_TOPOLOGY.format(kubernetes.topology.kind)] = kubernetes.topology.key or "true"
    annotations |= UNMOVABLE
    template = {"metadata": {"labels": workload.labels, "annotations": annotations}, "spec": pod}
    template = merged(template, kubernetes.pod_overrides)
    if avoid:
        template["spec"]["affinity"] = _avoiding(template["spec"].get("affinity", {}), avoid)
    return template


def _pod(
    spec: RunSpec, container: dict[str, Any], volumes: Sequence[Any], tolerated: Sequence[Any], seconds: float
) -> dict[str, Any]:
    """Return what the ``spec`` of every kind of pod has: one container with the image and the rights of the run.

    ``seconds``: from SIGTERM to SIGKILL.
    """
    kubernetes = spec.cluster.kubernetes
    given = kubernetes.image_pull_policy
    pinned = "IfNotPresent" if kubernetes.image_is_pinned else "Always"
    named: dict[str, Any] = {
        "name": NODE,
        "image": kubernetes.image,
        "imagePullPolicy": pinned if given == "auto" else given,
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": seconds,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # variables for every Service of the namespace slow the start down
        "securityContext": _pod_security(spec),
        "containers": [named | container | {"terminationMessagePolicy": "FallbackToLogsOnError"}],
        "volumes": volumes,
    }
    if tolerated:
        pod["tolerations"] = tolerated
    if kubernetes.service_account is not None:
        pod["serviceAccountName"] = kubernetes.service_account
    if kubernetes.pull_secrets:
        pod["imagePullSecrets"] = [{"name": name} for name in kubernetes.pull_secrets]
    return pod


PREPARATION_MODULE = "scaletrain_cli.launch.backends.kubernetes.preparation_pod"
PREPARATION_DOCUMENT = "preparation.json"
_PREPARATION_GRACE_SECONDS = 60  # what is being written is removed


def preparation_template(
    spec: RunSpec, config_map: str, labels: Mapping[str, str], annotations: Mapping[str, str]
) -> dict[str, Any]:
    """Return ``metadata`` and ``spec`` of the pods that prepare the data: as those of the run, without its devices.

    They have no toleration of the GPU nodes' taint, and no priority class of the run.
    """
    kubernetes, settings = spec.cluster.kubernetes, spec.cluster.kubernetes.preparation
    own = kubernetes.tolerations if settings.tolerations is None else settings.tolerations
    words = ("--documents", DOCUMENTS_PATH, "--runs-root", kubernetes.runs.path, "--workers", str(settings.cpus))
    container: dict[str, Any] = {
        "command": ["python", *python_words(PREPARATION_MODULE)],
        "args": [escaped(word) for word in words],
        "env": list(_given_environment(spec)),
        "resources": _resources(spec, str(settings.cpus), settings.memory, settings.ephemeral_storage),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": list(_mounts(spec)),
    }
    volumes = list(_volumes(spec, config_map, (PREPARATION_DOCUMENT,), settings.memory // 2))
    pod = _pod(spec, container, volumes, [*map(_own_toleration, own)], _PREPARATION_GRACE_SECONDS)
    selector = kubernetes.node_selector if settings.node_selector is None else settings.node_selector
    if selector:
        pod["nodeSelector"] = dict(selector)
    overrides = settings.pod_overrides
    if overrides is None:
        overrides = without_resources(kubernetes.pod_overrides)
    return merged({"metadata": {"labels": dict(labels), "annotations": dict(annotations)}, "spec": pod}, overrides)


_VIEW_RESOURCES = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}}
_VIEW_GRACE_SECONDS = 5


def view_template(
    spec: RunSpec, words: Sequence[str], labels: Mapping[str, str], annotations: Mapping[str, str], nodes: Sequence[str]
) -> dict[str, Any]:
    """Return ``metadata`` and ``spec`` of a pod that shows a run: it can read the volumes, and change nothing.

    It has no device, Secret or variable of the run. ``nodes``: those that have the image; others are possible.
    """
    kubernetes = spec.cluster.kubernetes
    container: dict[str, Any] = {
        "command": [escaped(word) for word in words],
        "resources": _resources(spec, "1", 2 * _GIB, None) if _limits_cores(spec) else _VIEW_RESOURCES,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [mount | {"readOnly": True} for mount in _volume_mounts(spec)],
    }
    volumes = [{"name": name, "persistentVolumeClaim": {"claimName": claim}} for claim, name in _claims(spec).items()]
    pod = _pod(spec, container, volumes, tolerations(spec), _VIEW_GRACE_SECONDS)
    if kubernetes.node_selector:
        pod["nodeSelector"] = dict(kubernetes.node_selector)
    if nodes:
        terms = [{"key": "kubernetes.io/hostname", "operator": "In", "values": list(nodes)}]
        preferred = [{"weight": 100, "preference": {"matchExpressions": terms}}]
        pod["affinity"] = {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}}
    template = {"metadata": {"labels": dict(labels), "annotations": dict(annotations)}, "spec": pod}
    return merged(template, without_containers(kubernetes.pod_overrides))


def escaped(value: str) -> str:
    """Return the text such that the kubelet's expansion of ``$(NAME)`` yields ``value``."""
    return value.replace("$", "$$")


def _container(spec: RunSpec, plan: RunPlan, workload: Workload) -> dict[str, Any]:
    kubernetes = spec.cluster.kubernetes
    capabilities: dict[str, Any] = {"drop": ["ALL"]}
    if kubernetes.rdma_resource is not None and kubernetes.ipc_lock:
        capabilities["add"] = ["IPC_LOCK"]
    return {
        # Exec form: the agent is PID 1 and receives SIGTERM itself.
        "command": ["python", *python_words(AGENT_MODULE)],
        "args": [escaped(word) for word in ("--documents", DOCUMENTS_PATH, "--runs-root", kubernetes.runs.path)],
        "env": list(_environment(spec, workload)),
        "resources": pod_resources(spec, plan),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": capabilities},
        "volumeMounts": list(_mounts(spec)),
    }


def _environment(spec: RunSpec, workload: Workload) -> Iterator[dict[str, Any]]:
    rank, gang = _FIELDS[workload.backend]
    yield _from_field("SCALETRAIN_NODE_RANK", rank)
    yield _from_field("SCALETRAIN_GANG", gang)
    yield _from_field("SCALETRAIN_NODE_NAME", "spec.nodeName")
    yield _from_field("SCALETRAIN_POD", "metadata.name")
    yield {"name": "SCALETRAIN_WORKLOAD", "value": workload.id}
    yield {"name": "MASTER_ADDR", "value": workload.master_address}
    yield {"name": "MASTER_PORT", "value": str(MASTER_PORT)}
    yield from _given_environment(spec)


def _given_environment(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Yield the variables that the spec names, and the place of the hub's cache."""
    if _has_hub_volume(spec):
        yield {"name": "HF_HOME", "value": HUB_PATH}
    for name, value in absolute_paths(spec.env).items():  # for the agents; the ranks get theirs from the record
        if name not in OWN_VARIABLES:
            yield {"name": name, "value": escaped(value)}
    for name, secret in spec.cluster.kubernetes.secrets.items():
        yield {"name": name, "valueFrom": {"secretKeyRef": {"name": secret.secret, "key": secret.key}}}


def _from_field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _pod_security(spec: RunSpec) -> dict[str, Any]:
    kubernetes = spec.cluster.kubernetes
    context: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": kubernetes.run_as_user,
        "runAsGroup": kubernetes.run_as_user,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if kubernetes.fs_group is not None:
        # Without this policy the kubelet changes the group of every file of the volume at every start.
        context |= {"fsGroup": kubernetes.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    return context


def _claims(spec: RunSpec) -> dict[str, str]:
    """Return volume names by claim: a claim that is mounted twice is one volume."""
    claims = [spec.cluster.kubernetes.runs.claim or "", *(volume.claim for volume in spec.cluster.kubernetes.volumes)]
    return {claim: "runs" if not index else f"volume-{index}" for index, claim in enumerate(dict.fromkeys(claims))}


def _volumes(spec: RunSpec, config_map: str, documents: Iterable[str], shm: int) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": quantity(shm)}}
    items = [{"key": name, "path": name} for name in sorted(documents)]
    yield {"name": "documents", "configMap": {"name": config_map, "items": items}}
    if _has_hub_volume(spec):
        yield {"name": "hub", "emptyDir": {}}
    for claim, name in _claims(spec).items():
        yield {"name": name, "persistentVolumeClaim": {"claimName": claim}} if claim else {"name": name, "emptyDir": {}}


def _mounts(spec: RunSpec) -> Iterator[dict[str, Any]]:
    yield {"name": "shm", "mountPath": "/dev/shm"}
    yield {"name": "documents", "mountPath": DOCUMENTS_PATH, "readOnly": True}
    if _has_hub_volume(spec):
        yield {"name": "hub", "mountPath": HUB_PATH}
    yield from _volume_mounts(spec)


def _volume_mounts(spec: RunSpec) -> Iterator[dict[str, Any]]:
    """Yield the mounts of the volume of the runs and of those that the spec names."""
    kubernetes, names = spec.cluster.kubernetes, _claims(spec)
    yield {"name": "runs", "mountPath": kubernetes.runs.path, **_below(kubernetes.runs.sub_path)}
    for volume in kubernetes.volumes:
        mount = {"name": names[volume.claim], "mountPath": volume.path, **_below(volume.sub_path)}
        yield mount | ({"readOnly": True} if volume.read_only else {})


def _has_hub_volume(spec: RunSpec) -> bool:
    """Return whether files of the Hugging Face Hub go to a volume of the pod: env names no other cache."""
    return bool(hub_uses(spec)) and not CACHE_VARIABLES & spec.env.keys()


def _below(sub_path: str | None) -> dict[str, str]:
    return {} if sub_path is None else {"subPath": sub_path}
