"""What a cluster has, and for a scenario that needs more, the reason why it cannot run here."""

from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

import pytest

from scaletrain_cli.launch.backends.kubernetes.api_kinds import BACKENDS
from tests.kubernetes_cluster.server import Object, RefusedError, Server
from tests.kubernetes_cluster.settings import Settings

Pods = Literal["real", "acted", "none"]
KUEUE = "kueue.x-k8s.io"
# Of container runtimes that run no container, as nodes report them.
_SIMULATED = ("fake", "kwok")


@dataclass(frozen=True)
class Offers:
    """``served``: resources with their versions, by API group. ``pods``: how pods run. ``nodes``: ready ones."""

    settings: Settings
    served: dict[str, dict[str, str]]
    pods: Pods
    nodes: tuple[Object, ...]
    may: Callable[[str, str, str], bool] = field(repr=False)

    def need_backend(self, backend: str) -> None:
        kind = BACKENDS[backend]
        if kind.plural not in self.served[kind.group]:
            pytest.skip(f"the cluster does not serve {kind.name} ({kind.group})")
        if backend == "trainjob":
            self.need_backend("jobset")

    def need_kueue(self) -> None:
        if "clusterqueues" not in self.served[KUEUE]:
            pytest.skip("the cluster has no Kueue")
        for resource in ("clusterqueues", "resourceflavors", "workloadpriorityclasses"):
            self.need_right("create", KUEUE, resource)

    def kueue(self, plural: str) -> str:
        """Return a resource of Kueue with its group and version."""
        return f"{self.served[KUEUE][plural]}/{plural}"

    def need_pods(self) -> None:
        """Skip unless pods can be made to end."""
        if self.pods == "none":
            pytest.skip("the kubelets are simulated; SCALETRAIN_K8S_PODS=acted if they read fake/exit")

    def need_image(self) -> str:
        """Return the image of pods that train."""
        if self.settings.image is None:
            pytest.skip("SCALETRAIN_K8S_IMAGE names no image of k8s/Containerfile, in which pods could train")
        return self.settings.image

    def need_gpus(self) -> None:
        if not any(amount(node, "nvidia.com/gpu") for node in self.nodes):
            pytest.skip("no node has nvidia.com/gpu")

    def need_disruption(self) -> None:
        if not self.settings.disrupt:
            pytest.skip("it would disturb nodes of the cluster; SCALETRAIN_K8S_DISRUPT=1 permits it")
        if len(self.nodes) < 3:
            pytest.skip(f"it takes a node away from a gang of two, and the cluster has {len(self.nodes)} ready nodes")

    def need_silence(self) -> None:
        self.need_disruption()
        if self.pods != "acted" and self.settings.silence is None:
            pytest.skip("SCALETRAIN_K8S_SILENCE names no command that stops a node, such as `docker pause {}`")

    def need_right(self, verb: str, group: str, resource: str) -> None:
        if not self.may(verb, group, resource):
            pytest.skip(f"the user of the kubeconfig may not {verb} {resource}")


def offers_of(server: Server, settings: Settings) -> Offers:
    """Ask the cluster."""
    nodes = [node for node in server.list("nodes") if is_ready(node) and not node["spec"].get("unschedulable")]
    simulated = any(_runtime(node).startswith(_SIMULATED) for node in nodes)
    pods: Pods = "none" if simulated else "real"
    if settings.pods != "auto":
        pods = settings.pods
    groups = {KUEUE, *(kind.group for kind in BACKENDS.values())}

    def may(verb: str, group: str, resource: str) -> bool:
        asked = {"verb": verb, "group": group, "resource": resource}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectAccessReview"}
        where = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
        try:
            answer = server.request("POST", where, {**review, "spec": {"resourceAttributes": asked}})
        except RefusedError:
            return False
        return bool(answer["status"]["allowed"])

    return Offers(settings, {group: server.serves(group) for group in groups}, pods, tuple(nodes), may)


def is_ready(node: Object) -> bool:
    conditions = node.get("status", {}).get("conditions", [])
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def amount(node: Object, resource: str) -> Fraction:
    """Return the allocatable amount of a countable resource."""
    return Fraction(node["status"].get("allocatable", {}).get(resource, "0"))


def _runtime(node: Object) -> str:
    return str(node["status"].get("nodeInfo", {}).get("containerRuntimeVersion", ""))
