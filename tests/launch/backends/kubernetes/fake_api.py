"""A fake API server over HTTP on 127.0.0.1 that stores objects, for tests of how the launcher calls and reads one.

It validates nothing, runs no controller, and is no evidence of how a real server behaves. Its answers (a Status, a page
of a list, a log with times) have the structure of real ones. It has one webhook, Trainer's, which requires that the
runtime of a TrainJob exists.

It has the part of the garbage collector that matters to a cancel: objects that an object owns are deleted after it in
the background, and before it in the foreground. A TrainJob whose TrainingRuntime is deleted first is never deleted,
since the webhook refuses the change that removes the finalizer; a second, background deletion removes that finalizer.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

Object = dict[str, Any]
_QUEUE = "kueue.x-k8s.io/queue-name"
_PATH = re.compile(r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>[^/]+)(?P<rest>/.*)?")
_GROUP = re.compile(r"/apis/([^/]+)")
_INSTALLED = {
    "jobset.x-k8s.io/v1alpha2": ("jobsets",),
    "kueue.x-k8s.io/v1beta2": ("workloads", "localqueues", "clusterqueues", "topologies"),
    "batch.volcano.sh/v1alpha1": ("jobs",),
    "trainer.kubeflow.org/v1alpha1": ("trainjobs", "trainingruntimes"),
    "scheduling.volcano.sh/v1beta1": ("queues", "podgroups"),
    "scheduling.k8s.io/v1": ("priorityclasses",),
    "scheduling.k8s.io/v1alpha2": ("podgroups",),
    "storage.k8s.io/v1": ("csidrivers",),
    "batch/v1": ("jobs",),
}


class FakeApi:
    """State and settings of the server; tests change both while it runs."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str, str], Object] = {}  # (group, plural, namespace, name)
        self.installed = dict(_INSTALLED)
        self.logs: dict[str, list[str]] = {}
        self.living: set[str] = set()  # pods whose followed log stays open
        self.refusals: dict[tuple[str, str], tuple[int, Object]] = {}  # (verb, resource) -> status, body
        self.calls: set[tuple[str, str, str]] = set()  # (verb, group, resource)
        self.asked: list[str] = []  # every method and path with its query
        self.deletions: list[tuple[str, Object]] = []
        self.lost: dict[
            tuple[str, str], int
        ] = {}  # (verb, resource) -> number of answers that are lost after the request is applied
        self.after_lost: dict[tuple[str, str], tuple[int, Object]] = {}  # refusals after the next lost answer
        self.in_queues = {"jobsets", "trainjobs", "jobs"}  # kinds that Kueue's webhook suspends in a dry run
        self.strict = False  # whether each kind must be installed, and not only the version of its group
        self.later: dict[tuple[str, str], tuple[int, Object]] = {}  # refusals that replace one after it was given
        self.page: int | None = None
        self.silent_pods: set[str] = set()  # their kubelet does not answer
        self.dead_pods: set[str] = set()  # their node never answers, and the server waits for it
        self.over = threading.Event()
        self.stale = 0  # how often the webhook does not yet find an existing runtime
        self._made = 0

    def put(self, plural: str, body: Object, group: str = "", namespace: str = "ml") -> Object:
        """Store an object as if a controller had created it."""
        self._made += 1
        metadata = body.setdefault("metadata", {})
        metadata.setdefault("uid", f"uid-{self._made}")
        metadata.setdefault("creationTimestamp", "2026-11-21T10:00:00Z")
        self.objects[(group, plural, namespace, metadata["name"])] = body
        return body

    def forget(self, *plurals: str) -> None:
        """Remove all objects of these kinds as controllers do in the end."""
        self.objects = {key: body for key, body in self.objects.items() if key[1] not in plurals}

    def all(self, plural: str) -> list[Object]:
        return [body for (_, kind, _, _), body in self.objects.items() if kind == plural]

    def forbid(self, verb: str, resource: str, group: str = "") -> None:
        """Refuse requests as RBAC does."""
        message = (
            f'{resource} is forbidden: User "kim" cannot {verb} resource "{resource}" in API group "{group}" '
            'in the namespace "ml"'
        )
        self.refusals[(verb, resource)] = (403, status(403, "Forbidden", message))


def status(code: int, reason: str, message: str, **details: Any) -> Object:
    """Return the body of a refusal."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}
    return {**body, "message": message, "details": details}


class _Server(ThreadingHTTPServer):
    """Ends its connections with itself: their threads would stay, and could get signals that tests send."""

    daemon_threads = True

    def __init__(self, api: FakeApi) -> None:
        super().__init__(("127.0.0.1", 0), type("Handler", (_Handler,), {"api": api}))
        self._accepted: list[socket.socket] = []

    def get_request(self) -> tuple[socket.socket, Any]:
        accepted = super().get_request()
        self._accepted.append(accepted[0])
        return accepted

    def server_close(self) -> None:
        for connection in self._accepted:
            with suppress(OSError):  # closed by its thread
                connection.shutdown(socket.SHUT_RDWR)
        super().server_close()


@contextmanager
def serve(api: FakeApi) -> Iterator[str]:
    """Run the server and yield its URL."""
    server = _Server(api)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        api.living.clear()
        api.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


def write_kubeconfig(path: Path, url: str, context: str = "test") -> Path:
    """Write a kubeconfig whose only context is this server, and return its path."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": context,
        "clusters": [{"name": "c", "cluster": {"server": url}}],
        "users": [{"name": "kim", "user": {"token": "not-a-secret"}}],
        "contexts": [{"name": context, "context": {"cluster": "c", "user": "kim"}}],
    }
    path.write_text(json.dumps(config), encoding="utf-8")
    return path


class _Handler(BaseHTTPRequestHandler):
    api: FakeApi
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one packet: the client would wait 40 ms between two

    def do_GET(self) -> None:
        if self.path == "/version":
            self._answer(200, {"gitVersion": "v1.36.2"})
            return
        if match := _GROUP.fullmatch(urlsplit(self.path).path):
            self.api.asked.append(f"GET {self.path}")
            self._group(match[1])
            return
        group, plural, namespace, name, part, query = self._where()
        if plural == "":
            version = urlsplit(self.path).path.removeprefix("/apis/").removeprefix("/api/")
            kinds = self.api.installed.get(version)
            if kinds is None:
                self._not_served()
            else:
                self._answer(200, {"resources": [{"name": kind} for kind in kinds]})
            return
        verb = "get" if name else "list"
        if self._refused(verb, group, f"{plural}/{part}" if part else plural):
            return
        if part == "log":
            self._log(name, query)
        elif name:
            found = self.api.objects.get((group, plural, namespace, name))
            self._answer(200, found) if found else self._missing(plural, name)
        else:
            self._list(group, plural, namespace, query)

    def _group(self, name: str) -> None:
        """Answer with the versions of a group, in the order in which they are installed."""
        refusal = self.api.refusals.get(("get", f"/apis/{name}"))
        versions = [each.partition("/")[2] for each in self.api.installed if each.partition("/")[0] == name]
        if refusal is not None:
            self._answer(*refusal)
        elif not versions:
            self._not_served()
        else:
            found = [{"groupVersion": f"{name}/{version}", "version": version} for version in versions]
            body = {"kind": "APIGroup", "apiVersion": "v1", "name": name, "versions": found}
            self._answer(200, {**body, "preferredVersion": found[0]})

    def do_PATCH(self) -> None:
        group, plural, namespace, name, _, query = self._where()
        body, key = self._body(), (group, plural, namespace, name)
        there = self.api.objects.get(key)
        is_apply = "apply-patch" in self.headers["Content-Type"]
        if is_apply and there is None and self._refused("create", group, plural):
            return
        if self._refused("patch", group, plural):
            return
        if there is None and not is_apply:
            self._missing(plural, name)
            return
        if there is None and plural == "trainjobs" and not self._sees_runtime(namespace, body):
            self._answer(403, status(403, "Forbidden", _NO_RUNTIME.format(**body["spec"]["runtimeRef"])))
            return
        merged = _merged(there or {}, body)
        if there is not None and there.get("immutable") and any(merged.get(part) != there.get(part) for part in _DATA):
            self._answer(422, status(422, "Invalid", "data: Forbidden: field is immutable when `immutable` is set"))
            return
        if query.get("dryRun") == "All":
            if _QUEUE in merged["metadata"].get("labels", {}) and plural in self.api.in_queues:
                merged = {**merged, "spec": {**merged["spec"], "suspend": True}}
            self._answer(200, merged)
            return
        made = self.api.put(plural, merged, group, namespace)
        if not self._loses("create" if there is None else "patch", plural):
            self._answer(200, made)

    def do_DELETE(self) -> None:
        group, plural, namespace, name, _, _ = self._where()
        options = self._body()
        if self._refused("delete", group, plural):
            return
        there = self.api.objects.get((group, plural, namespace, name))
        if there is None:
            self._missing(plural, name)
            return
        wanted = options.get("preconditions", {}).get("uid")
        if wanted and wanted != there["metadata"]["uid"]:
            self._answer(409, status(409, "Conflict", "the UID in the precondition does not match"))
            return
        if "All" in options.get("dryRun", ()):
            self._answer(200, there)
            return
        self.api.deletions.append((f"{plural}/{name}", options))
        self._remove(group, plural, namespace, there, background=options.get("propagationPolicy") == "Background")
        if not self._loses("delete", plural):
            self._answer(200, {"kind": "Status", "status": "Success"})

    def _remove(self, group: str, plural: str, namespace: str, there: Object, *, background: bool) -> None:
        metadata = there["metadata"]
        owned = [
            (key, body)
            for key, body in self.api.objects.items()
            if any(owner.get("uid") == metadata["uid"] for owner in body["metadata"].get("ownerReferences", ()))
        ]
        pods = [pod for pod in self.api.all("pods") if pod["metadata"]["labels"].get(_INSTANCE) == metadata["name"]]
        if plural == "pods":
            pods = []
        for pod in pods:  # they have their grace period; the test deletes them
            pod["metadata"]["deletionTimestamp"] = _DELETED
        if not background:
            for key, _ in owned:
                self.api.objects.pop(key, None)
            stuck = plural == "trainjobs" and any(key[1] == "trainingruntimes" for key, _ in owned)
            if pods or stuck or "deletionTimestamp" in metadata:
                metadata["deletionTimestamp"] = _DELETED
                return
        self.api.objects.pop((group, plural, namespace, metadata["name"]), None)
        for key, body in owned:
            if key in self.api.objects:
                self._remove(*key[:3], body, background=True)

    def _loses(self, verb: str, resource: str) -> bool:
        """Answer 504, as a gateway does, if the test has set such answers."""
        left = self.api.lost.get((verb, resource), 0)
        if left:
            self.api.lost[(verb, resource)] = left - 1
            self.api.refusals |= self.api.after_lost
            self._answer(504, status(504, "Timeout", "the server was unable to return a response in the time allotted"))
        return left > 0

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _where(self) -> tuple[str, str, str, str, str, dict[str, str]]:
        """Return group, plural, namespace, name, subresource and query of the request."""
        self.api.asked.append(f"{self.command} {self.path}")
        url = urlsplit(self.path)
        match = _PATH.fullmatch(url.path)
        assert match is not None, self.path
        parts = [unquote(part) for part in (match["rest"] or "").split("/") if part]
        namespace = ""
        if len(parts) > 2 and parts[0] == "namespaces":
            namespace, parts = parts[1], parts[2:]
        plural, name, part = (*parts, "", "", "")[:3]
        query = {key: values[0] for key, values in parse_qs(url.query).items()}
        return match["group"] or "", plural, namespace, name, part, query

    def _refused(self, verb: str, group: str, resource: str) -> bool:
        self.api.calls.add((verb, group, resource))
        refusal = self.api.refusals.get((verb, resource))
        version = urlsplit(self.path).path.split("/")[3] if group else ""
        served = self.api.installed.get(f"{group}/{version}")
        if refusal is None and group and (served is None or (self.api.strict and resource not in served)):
            self._not_served()
            return True
        if refusal is not None:
            self.api.refusals[(verb, resource)] = self.api.later.get((verb, resource), refusal)
            self._answer(*refusal)
        return refusal is not None

    def _sees_runtime(self, namespace: str, trainjob: Object) -> bool:
        """Validate as Trainer's webhook: with a cache, which lags behind and does not contain objects of a dry run."""
        key = ("trainer.kubeflow.org", "trainingruntimes", namespace, trainjob["spec"]["runtimeRef"]["name"])
        self.api.stale, is_stale = max(0, self.api.stale - 1), self.api.stale > 0
        return key in self.api.objects and not is_stale

    def _list(self, group: str, plural: str, namespace: str, query: dict[str, str]) -> None:
        found = [
            body
            for (of, kind, where, _), body in sorted(self.api.objects.items())
            if (of, kind) == (group, plural) and namespace in ("", where) and _selected(body, query)
        ]
        start = int(query.get("continue", "0"))
        size = self.api.page or len(found)
        more = str(start + size) if start + size < len(found) else ""
        self._answer(200, {"metadata": {"continue": more}, "items": found[start : start + size]})

    def _log(self, pod: str, query: dict[str, str]) -> None:
        if "container" not in query:
            self._answer(400, status(400, "BadRequest", "a container name must be specified"))
            return
        if pod in self.api.silent_pods:
            self._answer(500, status(500, "InternalError", "Get https://10.0.0.1:10250: no route to host"))
            return
        if pod in self.api.dead_pods:
            self.api.over.wait()
        lines = self.api.logs.get(pod, [])
        since = query.get("sinceTime", "")[:19]
        sent = [line for line in lines if line[:19] >= since]
        if "tailLines" in query:
            sent = sent[-int(query["tailLines"]) :]
        if query.get("follow") != "true":
            self._send(200, "".join(f"{line}\n" for line in sent).encode(), "text/plain")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        count = len(lines)
        try:
            self._chunk(sent)
            while pod in self.api.living or count < len(self.api.logs[pod]):
                new, count = self.api.logs[pod][count:], len(self.api.logs[pod])
                self._chunk(new)
                time.sleep(0.01)
            self.wfile.write(b"0\r\n\r\n")
        except OSError:  # the client that followed has disconnected
            self.close_connection = True

    def _chunk(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        if data:
            self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
            self.wfile.flush()

    def _body(self) -> Object:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        return json.loads(data) if data else {}

    def _missing(self, plural: str, name: str) -> None:
        self._answer(404, status(404, "NotFound", f'{plural} "{name}" not found', name=name, kind=plural))

    def _not_served(self) -> None:
        self._send(404, b"404 page not found\n", "text/plain")

    def _answer(self, code: int, body: Object) -> None:
        self._send(code, json.dumps(body).encode(), "application/json")

    def _send(self, code: int, data: bytes, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


_DATA = ("data", "binaryData")
_INSTANCE = "app.kubernetes.io/instance"
_DELETED = "2026-11-21T10:10:00Z"
_NO_RUNTIME = (
    'admission webhook "validator.trainjob.trainer.kubeflow.org" denied the request: spec.runtimeRef: Invalid value: '
    '{{"name":"{name}","apiGroup":"{apiGroup}","kind":"{kind}"}}: {kind}.{apiGroup} "{name}" not found: specified '
    "trainingRuntime must be created before the TrainJob is created"
)


def _selected(body: Object, query: dict[str, str]) -> bool:
    labels = body["metadata"].get("labels", {})
    wanted = dict(part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part)
    wanted_fields = [part for part in query.get("fieldSelector", "").split(",") if part]
    if any(part == f"status.phase!={body.get('status', {}).get('phase')}" for part in wanted_fields):
        return False
    fields = dict(part.split("=", 1) for part in wanted_fields if "!=" not in part)
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _field(body, key) == value for key, value in fields.items()
    )


def _field(body: Object, path: str) -> Any:
    found: Any = body
    for part in path.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def _merged(old: Any, new: Any) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        both = {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
        return {key: value for key, value in both.items() if value is not None}
    return new
