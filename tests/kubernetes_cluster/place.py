"""The namespace of one test session, its volumes, and everything else that the suite creates and removes."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from tests.kubernetes_cluster.offers import Offers
from tests.kubernetes_cluster.server import Object, Server

CLAIM = "runs"
_Answer = TypeVar("_Answer")
_PART = {"app.kubernetes.io/part-of": "scaletrain-test-suite"}
_MANAGED = {"app.kubernetes.io/managed-by": "scaletrain"}  # a namespace has ConfigMaps of its own
_CLEANUP_SECONDS = 180.0


@dataclass
class Place:
    """``suffix``: random, in the names of objects that belong to no namespace. ``created``: these, in order."""

    server: Server
    offers: Offers
    suffix: str
    created: list[tuple[str, str]] = field(default_factory=list)

    @property
    def namespace(self) -> str:
        return f"scaletrain-{self.suffix}"

    def create(self, resource: str, body: Object) -> Object:
        """Create an object in the namespace."""
        marked = {**body, "metadata": {"labels": _PART, **body["metadata"], "namespace": self.namespace}}
        return self.server.create(resource, marked, self.namespace)

    def create_outside(self, resource: str, body: Object) -> Object:
        """Create an object that belongs to no namespace; it is deleted at the end of the session."""
        self.created.append((resource, body["metadata"]["name"]))
        return self.server.create(resource, {**body, "metadata": {"labels": _PART, **body["metadata"]}})

    def claim(self, name: str, mode: str = "ReadWriteMany", storage_class: str | None = None) -> None:
        """Create a claim: of the storage class that is given or set, else with a volume on the disk of the nodes."""
        chosen = storage_class or self.offers.settings.storage_class
        spec: Object = {"accessModes": [mode], "resources": {"requests": {"storage": "1Gi"}}}
        if chosen is None:
            volume = f"scaletrain-{self.suffix}-{name}"
            host = {"path": f"/var/tmp/{volume}", "type": "DirectoryOrCreate"}
            body = {
                "accessModes": [mode],
                "capacity": {"storage": "1Gi"},
                "storageClassName": "",
                "persistentVolumeReclaimPolicy": "Retain",
                "claimRef": {"namespace": self.namespace, "name": name},
                "hostPath": host,
            }
            self.create_outside("persistentvolumes", _object("v1", "PersistentVolume", volume, spec=body))
            spec |= {"storageClassName": "", "volumeName": volume}
        else:
            spec["storageClassName"] = chosen
        self.create("persistentvolumeclaims", _object("v1", "PersistentVolumeClaim", name, spec=spec))

    def make_writable(self, claim: str) -> None:
        """Let every user write to a volume on the disk of the nodes, which the kubelet leaves to root."""
        if self.offers.settings.storage_class is not None or self.offers.pods != "real":
            return
        pod = _object("v1", "Pod", f"open-{claim}")
        mount = {"name": "volume", "mountPath": "/volume"}
        image, words = self.offers.settings.small_image, ["chmod", "0777", "/volume"]
        pod["spec"] = {
            "restartPolicy": "Never",
            "containers": [{"name": "open", "image": image, "command": words, "volumeMounts": [mount]}],
            "volumes": [{"name": "volume", "persistentVolumeClaim": {"claimName": claim}}],
        }
        self.create("pods", pod)
        name = pod["metadata"]["name"]

        def ended() -> str | None:
            phase = str((self.server.get("pods", name, self.namespace) or {}).get("status", {}).get("phase"))
            return phase if phase in ("Succeeded", "Failed") else None

        assert wait_for(ended, f"pod {name} has ended") == "Succeeded"
        self.server.delete("pods", name, self.namespace)

    def names(self) -> set[str]:
        """Return ``resource/name`` of everything in the namespace that a run could leave behind."""
        found = ["jobsets", "trainjobs", "trainingruntimes", "vcjobs", "jobs", "pods", "services", "configmaps"]
        if "workloads" in self.offers.served["kueue.x-k8s.io"]:
            found.append(self.offers.kueue("workloads"))
        return {
            f"{resource.rpartition('/')[2]}/{item['metadata']['name']}"
            for resource in found
            for item in self.server.list(resource, self.namespace)
            if resource != "configmaps" or _MANAGED.items() <= item["metadata"].get("labels", {}).items()
        }

    def remove(self) -> None:
        """Delete everything. Raises AssertionError if the namespace still exists after minutes."""
        try:
            self.empty()
        finally:
            self.server.delete("namespaces", self.namespace)
            for resource, name in reversed(self.created):
                self.server.delete(resource, name)
        wait_for(lambda: self.server.get("namespaces", self.namespace) is None, "it is removed", _CLEANUP_SECONDS)

    def empty(self) -> None:
        """Delete all runs in the namespace, and their pods without a grace period."""
        for resource in ("trainjobs", "jobsets", "vcjobs", "jobs"):
            for item in self.server.list(resource, self.namespace):
                self.server.delete(resource, item["metadata"]["name"], self.namespace)

        def gone() -> bool:
            for pod in self.server.list("pods", self.namespace):
                self.server.delete("pods", pod["metadata"]["name"], self.namespace, gracePeriodSeconds=0)
            for resource in ("trainingruntimes", "configmaps"):
                for item in self.server.list(resource, self.namespace):
                    if _MANAGED.items() <= item["metadata"].get("labels", {}).items():
                        self.server.delete(resource, item["metadata"]["name"], self.namespace)
            return not self.names()

        deadline = time.monotonic() + _CLEANUP_SECONDS
        while not gone():
            assert time.monotonic() < deadline, f"still in the namespace: {sorted(self.names())}"
            time.sleep(0.5)

    @classmethod
    @contextlib.contextmanager
    def made(cls, server: Server, offers: Offers) -> Iterator[Place]:
        """Create the namespace and the claim of the runs; remove everything at the end of the block."""
        place = cls(server, offers, secrets.token_hex(3))
        try:
            server.create("namespaces", _object("v1", "Namespace", place.namespace))
            place.claim(CLAIM)
            place.make_writable(CLAIM)
            yield place
        finally:
            place.remove()


def _object(api_version: str, kind: str, name: str, **more: Object) -> Object:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **more}


def wait_for(ready: Callable[[], _Answer], what: str, seconds: float = 120.0) -> _Answer:
    """Ask until the answer is true; return it. Raises AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (answer := ready()):
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.5)
    return answer
