"""The API server of the current context, as its administrator sees it: objects as plain dicts."""

import contextlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Object = dict[str, Any]
MERGE = "application/merge-patch+json"
_REQUEST_SECONDS = 60.0

# API groups of the resources that the suite uses; the other resources are in v1.
_GROUPS = {
    "jobs": "batch/v1",
    "jobsets": "jobset.x-k8s.io/v1alpha2",
    "trainjobs": "trainer.kubeflow.org/v1alpha1",
    "trainingruntimes": "trainer.kubeflow.org/v1alpha1",
    "vcjobs": "batch.volcano.sh/v1alpha1",
    "roles": "rbac.authorization.k8s.io/v1",
    "rolebindings": "rbac.authorization.k8s.io/v1",
    "clusterroles": "rbac.authorization.k8s.io/v1",
    "clusterrolebindings": "rbac.authorization.k8s.io/v1",
}
_PLURALS = {"vcjobs": "jobs"}


class RefusedError(Exception):
    """A request that the server refused. ``status`` is the HTTP status."""

    def __init__(self, method: str, path: str, status: int, said: str) -> None:
        super().__init__(f"{method} {path}: {status} {said}")
        self.status = status


class Upstream:
    """Requests with the credentials of a kubeconfig's current context."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], groups: tuple[str, ...] = ()
    ) -> Any:
        """Return the urllib3 response, whose body is not read yet. ``groups``: of the impersonated user."""
        from urllib3 import HTTPHeaderDict

        sent = HTTPHeaderDict(headers)
        for setting in self._client.configuration.auth_settings().values():
            if setting["value"]:
                sent[setting["key"]] = setting["value"]
        for group in groups:
            sent.add("Impersonate-Group", group)
        url, how = self._client.configuration.host + path, {"preload_content": False, "retries": False}
        pool = self._client.rest_client.pool_manager
        return pool.request(method, url, body=body, headers=sent, timeout=_REQUEST_SECONDS, **how)


@dataclass(frozen=True)
class Server:
    """Requests as the administrator. Raises RefusedError."""

    upstream: Upstream
    client: Any  # the official client's ApiClient, for exec

    def request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Object:
        data = None if body is None else json.dumps(body).encode()
        response = self.upstream.send(method, path, data, {"Content-Type": content_type, "Accept": "application/json"})
        text = response.read()
        response.release_conn()
        try:
            answer = json.loads(text)
        except ValueError:
            answer = {"message": text[:300].decode(errors="replace")}
        if response.status >= 400:
            raise RefusedError(method, path, response.status, str(answer.get("message", "")))
        return dict(answer)

    def get(self, resource: str, name: str, namespace: str = "") -> Object | None:
        """Return an object; None if it does not exist."""
        try:
            return self.request("GET", path(resource, namespace, name))
        except RefusedError as error:
            if error.status == 404:
                return None
            raise

    def list(self, resource: str, namespace: str = "", labels: str = "") -> list[Object]:
        """Return the objects that match the labels; none if the resource is not served."""
        from urllib.parse import quote

        query = f"?labelSelector={quote(labels)}" if labels else ""
        try:
            return list(self.request("GET", path(resource, namespace) + query).get("items", []))
        except RefusedError as error:
            if error.status == 404:
                return []
            raise

    def create(self, resource: str, body: Object, namespace: str = "") -> Object:
        """Create an object. A webhook that does not answer yet is asked again for half a minute."""
        deadline = time.monotonic() + 30
        while True:
            try:
                return self.request("POST", path(resource, namespace), body)
            except RefusedError as error:
                if error.status < 500 or time.monotonic() > deadline:
                    raise
            time.sleep(1)

    def patch(self, resource: str, name: str, body: Object, namespace: str = "", part: str = "") -> Object:
        """Merge ``body`` into an object, or into a part of it, such as ``status``."""
        where = path(resource, namespace, name) + (f"/{part}" if part else "")
        return self.request("PATCH", where, body, MERGE)

    def delete(self, resource: str, name: str, namespace: str = "", **options: Any) -> None:
        """Delete an object if it exists. ``options``: fields of DeleteOptions."""
        with contextlib.suppress(_MissingError):
            try:
                self.request("DELETE", path(resource, namespace, name), {"propagationPolicy": "Background", **options})
            except RefusedError as error:
                if error.status != 404:
                    raise
                raise _MissingError from error

    def evict(self, pod: str, namespace: str) -> None:
        """Evict a pod, as a drain does."""
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": namespace}}
        self.request("POST", path("pods", namespace, pod) + "/eviction", body)

    def serves(self, group: str) -> dict[str, str]:
        """Return the resources of an API group with the newest served version of each; none if it is not served."""
        try:
            versions = self.request("GET", f"/apis/{group}")["versions"]
        except RefusedError as error:
            if error.status == 404:
                return {}
            raise
        found: dict[str, str] = {}
        for version in versions:  # the server's order: the preferred, newest first
            for resource in self.request("GET", f"/apis/{version['groupVersion']}").get("resources", []):
                found.setdefault(resource["name"], version["groupVersion"])
        return found


class _MissingError(Exception):
    """The object does not exist."""


def path(resource: str, namespace: str = "", name: str = "") -> str:
    """Return the path of a resource, ``pods`` or with its group and version, ``kueue.x-k8s.io/v1beta2/workloads``."""
    group, _, plural = resource.rpartition("/")
    group = group or _GROUPS.get(resource, "v1")
    root = "/api/v1" if group == "v1" else f"/apis/{group}"
    within = f"/namespaces/{namespace}" if namespace else ""
    return f"{root}{within}/{_PLURALS.get(plural, plural)}" + (f"/{name}" if name else "")


def connect(kubeconfig: str | None) -> Server:
    """Return the server of the current context. Raises an error of the client without a usable kubeconfig."""
    from kubernetes import client, config

    settings = client.Configuration()
    settings.retries = False
    config.load_kube_config(kubeconfig, client_configuration=settings, persist_config=False)
    api = client.ApiClient(settings)
    return Server(Upstream(api), api)
