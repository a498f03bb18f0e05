"""What someone who submits a run to Kubernetes should know and no field of an object can say. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from scaletrain_cli.launch.kubernetes.pod import OWN_VARIABLES
from scaletrain_cli.spec import RunSpec

# A spot node on GKE has 30 s in all, and the kubelet leaves pods that are not the system's about half of them.
_GKE_SPOT_SECONDS = 15
_CORPUS = "python-stdlib"  # comes with every image


def notes(spec: RunSpec) -> Iterator[str]:
    """One sentence or two each, the key that is meant first."""
    kubernetes = spec.cluster.kubernetes
    if kubernetes.image is not None and not kubernetes.image_is_pinned:
        yield (
            f"cluster.kubernetes.image = {kubernetes.image}: a tag can come to mean another image between two attempts "
            "of one run, or between its pods. Name it by digest."
        )
    if kubernetes.rdma_resource is not None and kubernetes.ipc_lock:
        yield (
            "cluster.kubernetes.ipc_lock: Linux gives IPC_LOCK to root alone, and these pods are not root. RDMA needs "
            "LimitMEMLOCK=infinity in containerd's unit on the nodes; without it NCCL falls back to TCP, and only its "
            "log says so. A namespace with the restricted pod security refuses it: set ipc_lock: false there."
        )
    elif kubernetes.rdma_resource is not None:
        yield (
            "cluster.kubernetes.rdma_resource: needs LimitMEMLOCK=infinity in containerd's unit on the nodes; without "
            "it NCCL falls back to TCP, and only its log says so."
        )
    if kubernetes.host_network:
        yield (
            "cluster.kubernetes.host_network: the pods use ports of their nodes, so no other run may share a node; a "
            "namespace with the baseline pod security refuses them."
        )
    yield from _about_files(spec)
    yield from _about_gangs(spec)
    yield from _about_leaving(spec)
    if ignored := sorted(OWN_VARIABLES & spec.env.keys()):
        yield f"env: {', '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} set by the launcher and ignored here."


def _about_files(spec: RunSpec) -> Iterator[str]:
    """Paths that mean something else in a pod than here, or nothing."""
    kubernetes = spec.cluster.kubernetes
    mounted = [kubernetes.runs.path, *(volume.path for volume in kubernetes.volumes)]
    paths = {
        "data.source": None if spec.data.source == _CORPUS else spec.data.source,
        "data.tokenizer.path": spec.data.tokenizer.path,
        "model.weights": getattr(spec.model, "weights", None),
        "checkpoint.dir": None if spec.checkpoint.dir == "auto" else spec.checkpoint.dir,
    }
    for key, path in paths.items():
        if path is None:
            continue
        if not PurePosixPath(path).is_absolute():
            yield (
                f"{key} = {path}: pods look for it in the working folder of the image, not in this one. Give an "
                f"absolute path on a volume: {', '.join(mounted)}."
            )
        elif not any(PurePosixPath(path).is_relative_to(folder) for folder in mounted):
            yield (
                f"{key} = {path}: no volume is mounted there, so it must be in the image. These are: "
                f"{', '.join(mounted)} (cluster.kubernetes.runs and volumes)."
            )


def _about_gangs(spec: RunSpec) -> Iterator[str]:
    kubernetes, nodes = spec.cluster.kubernetes, spec.cluster.nodes
    if kubernetes.native_gang != "none":
        yield (
            "cluster.kubernetes.native_gang: needs Kubernetes 1.36 with the feature gates GenericWorkload and "
            "GangScheduling and --runtime-config=scheduling.k8s.io/v1alpha2=true; later versions have other shapes."
        )
    elif kubernetes.backend != "volcano" and kubernetes.queue is None and nodes > 1:
        yield (
            f"cluster.kubernetes.queue: without one nothing keeps {nodes} pods together. Two runs can each hold a part "
            "of their nodes and wait for the other's for ever. Name a queue of Kueue, or use backend: volcano."
        )
    if kubernetes.backend == "trainjob" and kubernetes.ttl_seconds_after_finished is not None:
        yield "cluster.kubernetes.ttl_seconds_after_finished: the JobSet and its pods go; Trainer keeps the TrainJob."


def _about_leaving(spec: RunSpec) -> Iterator[str]:
    cluster, kubernetes = spec.cluster, spec.cluster.kubernetes
    on_gke = kubernetes.spot_taint in ("auto", "gke")
    if cluster.spot and on_gke and cluster.grace_seconds > _GKE_SPOT_SECONDS:
        yield (
            f"cluster.grace_seconds = {cluster.grace_seconds:g}: a spot node of GKE gives a pod at most about "
            f"{_GKE_SPOT_SECONDS} s. A checkpoint that takes longer is lost there; save more often instead."
        )
    if kubernetes.backend == "volcano" and spec.restarts.preemption == "unlimited":
        yield (
            "cluster.kubernetes.backend: Volcano counts evictions as retries and cannot leave them out. Because "
            "restarts.preemption = unlimited its maxRetry is set out of reach; the budgets for nodes and crashes are "
            "kept by the run itself."
        )
    elif kubernetes.backend == "volcano":
        yield (
            "cluster.kubernetes.backend: Volcano counts evictions as retries. Its maxRetry is the sum of all budgets "
            "of restarts; which of them a restart is charged to, the run itself decides."
        )
