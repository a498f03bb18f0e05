"""cluster.kubernetes: namespace, queue, volumes and pod settings of a run in a Kubernetes cluster.

Values that the API server would reject late, or not at all, are rejected here. Settings that only a submission needs
(an image, a volume) may be missing, since planning does not use them.
"""

import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from scaletrain_cli.spec.pod_overrides import hidden_path, items_of, override_problems
from scaletrain_cli.spec.quantities import (
    AutoBytes,
    AutoWhole,
    EnvName,
    Matching,
    PositiveBytes,
    PositiveSeconds,
    Seconds,
    Text,
    Whole,
)
from scaletrain_cli.spec.section import LEFT_OUT, BackendSection, Section, used_when, where_not

_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_DIGEST = r"@sha256:[0-9a-f]{64}"
# Capitals are allowed in hosts only, and a host has a dot or a port: kubelets reject REGISTRY/name.
_HOST = r"([A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+(:[0-9]{1,5})?|[A-Za-z0-9-]+:[0-9]{1,5})"
_REPOSITORY = rf"({_HOST}/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
_IMAGE = re.compile(rf"(?P<name>{_REPOSITORY})(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}}))?(?P<digest>{_DIGEST})?")

_LONGEST_TTL_SECONDS = 3650 * 86400.0  # 32 bits hold 24855 days
# Mount paths of the launcher; no volume of the user may hide them.
_OWN_PATHS = ("/dev/shm", "/etc/scaletrain")


def _image(value: Any) -> str:
    match = _IMAGE.fullmatch(value) if isinstance(value, str) and len(value) <= 1024 else None
    if match is None:
        raise PydanticCustomError("image", "must be an image reference, such as registry/name@sha256:<64 digits>")
    if match["digest"] is None and match["tag"] in (None, "latest"):
        raise PydanticCustomError("image", "must have a digest (name@sha256:...), or a tag other than latest")
    return match[0]


def _path(value: Any) -> str:
    parts = value.split("/") if isinstance(value, str) else []
    if not parts or parts[0] or not any(parts) or ".." in parts or re.search(r"[:\x00-\x1f\x7f]", value):
        raise PydanticCustomError("mount_path", "must be an absolute path other than /, without colons or ..")
    return "/" + "/".join(part for part in parts if part not in ("", "."))


def _sub_path(value: Any) -> str:
    parts = value.split("/") if isinstance(value, str) else []
    if not any(parts) or not parts[0] or ".." in parts or re.search(r"[\x00-\x1f\x7f]", value):
        raise PydanticCustomError("sub_path", "must be a relative path inside the volume")
    return str(value)


_STRING = {"type": "string"}
PodOverrides = Annotated[dict[str, Any], WithJsonSchema({"type": "object", "properties": {"metadata": {}, "spec": {}}})]
# Names of one object: of kinds that become part of a host name, and of other kinds.
LabelName = Annotated[str, Matching(_LABEL, 63, "must be a Kubernetes name of lower-case letters, digits and dashes")]
ObjectName = Annotated[
    str, Matching(_SUBDOMAIN, 253, "must be a Kubernetes name of lower-case letters, digits, dots and dashes")
]
LabelKey = Annotated[
    str, Matching(rf"({_SUBDOMAIN}/)?{_QUALIFIED}", 317, "must be a label key, such as topology.io/rack")
]
LabelValue = Annotated[
    str, Matching(rf"({_QUALIFIED})?", 63, "must be a label value of letters, digits, dots, dashes and _")
]
ResourceName = Annotated[
    str,
    Matching(
        rf"{_SUBDOMAIN}/{_QUALIFIED}", 317, "must be the resource name of a device plugin, such as nvidia.com/gpu"
    ),
]
SecretKey = Annotated[
    str, Matching(r"[-._a-zA-Z0-9]+", 253, "must be a key of a Secret: letters, digits, dots, dashes and _")
]
Image = Annotated[str, PlainValidator(_image), WithJsonSchema(_STRING)]
MountPath = Annotated[str, PlainValidator(_path), WithJsonSchema(_STRING)]
SubPath = Annotated[str, PlainValidator(_sub_path), WithJsonSchema(_STRING)]
# Where an archive can be written as well as read.
CodeStore = Annotated[
    str,
    Matching(
        r"(s3|gs|az)://[^/\s?#@:]+(/[^\s?#]*)?", 1024, "must be a place in object storage, such as s3://bucket/code"
    ),
]
# 0 is root, which pods must not run as.
UserId = Annotated[int, Field(strict=True, ge=1, le=2**31 - 1)]


class RunsVolumeSpec(Section):
    """The volume (a claim with ReadWriteMany) that holds the runs root of the pods.

    ``per_pod``: in place of a claim, a volume that is deleted with its pod; several nodes need checkpoint.mirror.
    """

    claim: ObjectName | None = None
    path: MountPath = "/runs"
    sub_path: SubPath | None = None
    per_pod: bool = Field(default=False, description="a volume of each pod in place of a claim")


class VolumeSpec(Section):
    """A further claim that every pod mounts."""

    claim: ObjectName
    path: MountPath
    read_only: bool = False
    sub_path: SubPath | None = None


class SecretSpec(Section):
    """One key of a Secret object, which must be in the run's namespace."""

    secret: ObjectName
    key: SecretKey


class TolerationSpec(Section):
    """A taint that pods tolerate, for ``seconds`` with NoExecute. Without a key: every taint."""

    key: LabelKey | None = None
    operator: Literal["Exists", "Equal"] = "Exists"
    value: LabelValue | None = None
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    seconds: Seconds | None = None

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if (self.operator == "Equal") != (self.value is not None):
            yield "value", "is required with operator: Equal, and not allowed otherwise."
        if self.key is None and self.operator == "Equal":
            yield "key", "is required with operator: Equal."
        if self.seconds is not None and self.effect != "NoExecute":
            yield "seconds", "requires effect: NoExecute."


DEFAULT_NAMESPACE = "default"  # of a kubeconfig's context that names none


class KubernetesPreparationSpec(Section):
    """The pods that prepare the data of a run on CPU nodes. What is not set here is as for the run."""

    cpus: Annotated[int, Field(strict=True, ge=1, le=1024)] = Field(
        default=4, description="cores and worker processes of each pod"
    )
    memory: PositiveBytes = Field(default=8 * 2**30, description="of each pod: request and limit")
    tasks: Annotated[int, Field(strict=True, ge=1, le=64)] = Field(default=1, description="pods that share the work")
    ephemeral_storage: PositiveBytes | None = Field(default=None, description="of each pod: request and limit")
    queue: LabelName | None = Field(default=None, description="a Kueue LocalQueue; null: Kueue does not admit the pods")
    node_selector: dict[LabelKey, LabelValue] | None = Field(
        default=None, description="labels of CPU nodes; null: cluster.kubernetes.node_selector"
    )
    tolerations: tuple[TolerationSpec, ...] | None = Field(
        default=None, description="null: cluster.kubernetes.tolerations; none is added for GPU nodes"
    )
    pod_overrides: PodOverrides | None = Field(
        default=None, description="null: cluster.kubernetes.pod_overrides without the resources of the run"
    )


class TopologySpec(Section):
    """The required distance between nodes. ``key`` is the node label of a rack or block.

    ``required``, ``preferred`` and ``unconstrained`` are Kueue's, or Volcano's hard and soft with ``key`` as the tier;
    ``exclusive`` is JobSet's: no other job in the domain of the run.
    """

    kind: Literal["required", "preferred", "unconstrained", "exclusive"]
    key: LabelKey | None = None


_WITH_RDMA = used_when(where_not("cluster.kubernetes.rdma_resource", None))


class KubernetesSpec(BackendSection):
    """Namespace, queue, image, volumes and pod settings of a job in a Kubernetes cluster.

    ``queue`` and ``priority`` are Kueue's LocalQueue and WorkloadPriorityClass, or Volcano's queue and the job's
    PriorityClass; ``pod_priority`` is the PriorityClass of the pods.
    """

    starting_text: ClassVar[str] = """\
  kubernetes:
    # namespace: ml  # default: that of your kubeconfig's context
    # queue: team-a  # a Kueue LocalQueue; without one, the pods of a run are not scheduled as a gang
    # priority: training-normal  # a WorkloadPriorityClass
    # image: registry.example/scaletrain:TAG  # required by submit, preferably by digest
    runs: {claim: runs}  # a ReadWriteMany PersistentVolumeClaim for checkpoints and logs
    # rdma_resource: rdma/hca_shared_devices_a  # resource name of the network's device plugin
    # secrets: {WANDB_API_KEY: {secret: wandb, key: api-key}}  # each a key of a Secret

"""

    starting_note: ClassVar[str] = (
        "set your queue and image in the lines below `kubernetes:`; the namespace is that of your kubeconfig's context"
    )

    namespace: LabelName | None = Field(
        default=None, description="null: that of the kubeconfig's context, else default; stays that of a run"
    )
    context: Text | None = Field(default=None, description="context of the kubeconfig; null: the current one")
    backend: Literal["jobset", "volcano", "trainjob"] = "jobset"
    queue: LabelName | None = None
    priority: ObjectName | None = None
    pod_priority: ObjectName | None = None
    image: Image | None = Field(default=None, description="image with this package, preferably by digest")
    image_pull_policy: Literal["auto", "Always", "IfNotPresent", "Never"] = "auto"
    pull_secrets: tuple[ObjectName, ...] = ()
    service_account: ObjectName | None = None
    runs: RunsVolumeSpec = LEFT_OUT
    code_store: CodeStore | None = Field(
        default=None, description="object storage for code that no ConfigMap can hold, e.g. s3://bucket/code"
    )
    volumes: tuple[VolumeSpec, ...] = ()
    gpu_resource: ResourceName = "nvidia.com/gpu"
    rdma_resource: ResourceName | None = Field(default=None, description="e.g. rdma/hca_shared_devices_a")
    rdma_count: Annotated[Whole, _WITH_RDMA] = Field(default=1, description="number of rdma_resource per node")
    ipc_lock: Annotated[bool, _WITH_RDMA] = Field(
        default=True, description="add the capability IPC_LOCK; has no effect for a container that is not root"
    )
    cpus_per_node: AutoWhole = "auto"
    cpu_limit: Literal["auto", "requested", "none"] = Field(
        default="auto",
        description="requested: the cores that a pod requests are its limit, too; auto: if the spec sets their number",
    )
    memory_per_node: AutoBytes = "auto"
    ephemeral_storage: PositiveBytes | None = None
    shm_size: AutoBytes = "auto"
    gpu_product: LabelValue | None = Field(default=None, description="node label nvidia.com/gpu.product")
    node_selector: dict[LabelKey, LabelValue] = {}
    tolerations: tuple[TolerationSpec, ...] = ()
    preparation: KubernetesPreparationSpec = LEFT_OUT
    spot_taint: Literal["auto", "gke", "eks", "karpenter", "aks", "none"] = Field(
        default="auto", description="provider whose taint of spot nodes is tolerated with spot: true; auto: all"
    )
    not_ready_seconds: Seconds = 60.0
    topology: TopologySpec | None = None
    native_gang: Literal["none", "auto", "v1alpha2"] = Field(
        default="none",
        description="auto: a PodGroup for the gang scheduler of Kubernetes 1.36 or 1.37, in the version that is served",
    )
    ttl_seconds_after_finished: Seconds | None = 7 * 86400.0
    active_deadline: PositiveSeconds | None = Field(
        default=None, description="time limit of one attempt; then the job fails"
    )
    secrets: dict[EnvName, SecretSpec] = {}
    run_as_user: UserId = 1000
    fs_group: UserId | None = 1000
    host_network: bool = False
    pod_overrides: PodOverrides = Field(
        default={}, description="a part of a pod template, merged into the pods of the run and of its preparation"
    )

    def inconsistencies(self) -> Iterator[tuple[str, str]]:
        if self.priority is not None and self.queue is None and self.backend != "volcano":
            yield "priority", "requires queue, a Kueue queue. Without Kueue, use pod_priority."
        if self.gpu_product is not None and self.kueue:
            yield "gpu_product", "is not allowed with a Kueue queue, whose ResourceFlavor selects the nodes."
        if self.gpu_product is not None and "nvidia.com/gpu.product" in self.node_selector:
            yield "gpu_product", "is also in node_selector; remove one of them."
        if self.rdma_resource == self.gpu_resource:
            yield (
                "rdma_resource",
                "must differ from gpu_resource. Use the resource name of the network's device plugin.",
            )
        if self.ttl_seconds_after_finished is not None and self.ttl_seconds_after_finished > _LONGEST_TTL_SECONDS:
            yield "ttl_seconds_after_finished", "must be at most 3650d. Use null to keep the objects."
        if self.native_gang != "none" and (self.backend != "jobset" or self.queue is not None):
            yield (
                "native_gang",
                "requires backend: jobset without a queue; Kueue and Volcano schedule gangs themselves.",
            )
        if self.active_deadline is not None and self.backend == "volcano":
            yield "active_deadline", "is not supported with backend: volcano."
        if self.shm_size != "auto" and self.memory_per_node != "auto" and self.shm_size >= self.memory_per_node:
            yield "shm_size", f"must be below memory_per_node = {self.memory_per_node}, which includes it."
        yield from self._about_topology()
        yield from self._about_volumes()
        for section, given in (("", self.tolerations), ("preparation.", self.preparation.tolerations or ())):
            for index, toleration in enumerate(given):
                for key, message in toleration.inconsistencies():
                    yield f"{section}tolerations.{index}.{key}", message

    @property
    def all_overrides(self) -> dict[str, dict[str, Any]]:
        """The overrides of the pods of the run, and of those of its preparation, by their key."""
        own = self.preparation.pod_overrides or {}
        return {"pod_overrides": self.pod_overrides, "preparation.pod_overrides": own}

    @property
    def used_namespace(self) -> str:
        """The namespace of the objects: of a recorded run ``namespace``, which is then set, else ``default``."""
        return self.namespace or DEFAULT_NAMESPACE

    @property
    def summary(self) -> str:
        given = {"namespace": self.namespace, "queue": self.queue, "context": self.context}
        return "".join(f", {what} {value}" for what, value in given.items() if value is not None)

    def unseen_place(self, folder: Path, path: str) -> str:
        return "in the pods"  # which have their own file systems

    @property
    def host_memory_per_node(self) -> float | None:
        return None if self.memory_per_node == "auto" else self.memory_per_node

    @property
    def gpu_kind(self) -> str:
        return self.gpu_resource

    @property
    def cores_per_node(self) -> int | None:
        return None if self.cpus_per_node == "auto" else self.cpus_per_node

    def run_inconsistencies(self, *, env: Collection[str], secret_env: Collection[str]) -> Iterator[tuple[str, str]]:
        """Yield the names of ``secret_env`` without a Secret, and those that are also in ``env``."""
        if unknown := sorted(set(secret_env) - self.secrets.keys()):
            yield (
                "secret_env",
                f"{', '.join(unknown)} must also be in cluster.kubernetes.secrets: pods read secrets from Secret "
                f"objects only. Add cluster.kubernetes.secrets.{unknown[0]}: {{secret: NAME, key: KEY}}.",
            )
        if both := sorted(set(env) & self.secrets.keys()):
            yield (
                "cluster.kubernetes.secrets",
                f"{', '.join(both)} is also in env, where its value is visible; remove it from env.",
            )
        for section, overrides in self.all_overrides.items():
            for name, key in items_of(overrides, "env").items():
                if name in env or name in self.secrets:
                    where = "env" if name in env else "cluster.kubernetes.secrets"
                    yield f"cluster.kubernetes.{section}.{key}", f"is also in {where}; remove one of them."

    @property
    def kueue(self) -> bool:
        """Return True if Kueue admits the job."""
        return self.queue is not None and self.backend != "volcano"

    @property
    def image_is_pinned(self) -> bool:
        """Return True if the image is named by digest; a tag may later refer to another image."""
        return self.image is not None and "@" in self.image

    def _about_topology(self) -> Iterator[tuple[str, str]]:
        if self.topology is None:
            return
        kind, key = self.topology.kind, self.topology.key
        if (kind == "unconstrained") == (key is not None):
            yield "topology.key", "is required, except with kind: unconstrained, where it is not allowed."
        if kind == "exclusive" and (self.backend != "jobset" or self.queue is not None):
            yield "topology.kind", "requires backend: jobset without a queue. With Kueue, use required."
        elif kind != "exclusive" and self.backend != "volcano" and self.queue is None:
            yield "topology.kind", "requires a Kueue queue. Set queue, or use exclusive."
        elif kind == "unconstrained" and self.backend == "volcano":
            yield "topology.kind", "must be required or preferred with backend: volcano."

    def _about_volumes(self) -> Iterator[tuple[str, str]]:
        if self.runs.per_pod and self.runs.claim is not None:
            yield "runs.per_pod", "is not allowed with runs.claim. Remove one of them."
        if self.runs.per_pod and self.runs.sub_path is not None:
            yield "runs.sub_path", "requires runs.claim: a volume of the pod is empty."
        devices = [resource for resource in (self.gpu_resource, self.rdma_resource) if resource is not None]
        taken = dict.fromkeys(_OWN_PATHS, "used by the launcher")
        mounts = {"runs.path": self.runs.path}
        mounts |= {f"volumes.{index}.path": volume.path for index, volume in enumerate(self.volumes)}
        for key, path in mounts.items():
            if hides := hidden_path(path, taken):
                yield key, hides
            taken[path] = key
        for section, overrides in self.all_overrides.items():
            problems = override_problems(
                overrides,
                devices,
                taken,
                volcano=self.backend == "volcano",
                preparation=section.startswith("preparation."),
            )
            for key, message in problems:
                yield f"{section}.{key}", message
