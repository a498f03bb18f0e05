"""A proxy on the loopback between the commands under test and the API server.

It lets a command act as any user (by impersonation), answers requests wrongly on demand, and replaces the container of
a run by a small stand-in that ends when the test says so. Everything else passes as it is.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.kubernetes_cluster.server import Upstream

# Ends with 75 on SIGTERM, as a run that has saved, and else with the code that the test writes.
STAND_IN = 'trap "exit 75" TERM; while [ ! -s /dev/shm/exit ]; do sleep 0.2; done; exit $(cat /dev/shm/exit)'
_CONTAINER = "node"
_DROPPED = {"host", "connection", "content-length", "authorization", "accept-encoding", "transfer-encoding"}


@dataclass(frozen=True)
class User:
    """A person; None as name is the administrator of the kubeconfig."""

    name: str | None = None
    groups: tuple[str, ...] = ()


@dataclass
class Fault:
    """A wrong answer to requests whose method and path match, ``times`` times; None: always.

    ``applied``: the server does the work, and only its answer is replaced. ``status`` None cuts the connection.
    ``after``: another fault that must have been taken first.
    """

    method: str
    path: str
    status: int | None
    applied: bool = False
    times: int | None = None
    after: Fault | None = None
    seen: int = field(default=0)

    def takes(self, method: str, path: str) -> bool:
        if (self.times is not None and self.seen >= self.times) or (self.after is not None and not self.after.seen):
            return False
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        self.seen += 1
        return True


class Proxy:
    """The proxy of one test session. ``image``: of the stand-in pods; None leaves the containers as they are."""

    def __init__(self, upstream: Upstream, folder: Path) -> None:
        self.upstream, self.folder = upstream, folder
        self.faults: list[Fault] = []
        self.users: dict[str, User] = {}
        self.image: str | None = None
        self.lock = threading.Lock()
        proxy = self

        class Handler(_Handler):
            owner = proxy

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def kubeconfig(self, user: User, namespace: str) -> Path:
        """Return the kubeconfig of a user, whose requests go through this proxy."""
        key = user.name or "admin"
        self.users[key] = user
        server = f"http://127.0.0.1:{self._http.server_address[1]}/as/{key}"
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "proxy", "cluster": {"server": server}}],
            "users": [{"name": key, "user": {"token": "of-the-proxy"}}],
            "contexts": [{"name": "suite", "context": {"cluster": "proxy", "user": key, "namespace": namespace}}],
            "current-context": "suite",
        }
        path = self.folder / f"{key}.kubeconfig"
        path.write_text(json.dumps(document))
        return path

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Iterator[None]:
        """Answer wrongly within the block."""
        self.faults = list(faults)
        try:
            yield
        finally:
            self.faults = []

    def fault_for(self, method: str, path: str) -> Fault | None:
        with self.lock:
            return next((fault for fault in self.faults if fault.takes(method, path)), None)

    def rewritten(self, body: bytes) -> bytes:
        """Return a request body with stand-in containers."""
        if self.image is None or b'"containers"' not in body:
            return body
        document = json.loads(body)
        _stand_in(document, self.image)
        return json.dumps(document).encode()


def _stand_in(item: Any, image: str) -> None:
    if isinstance(item, list):
        for each in item:
            _stand_in(each, image)
    if not isinstance(item, dict):
        return
    for container in item.get("containers", ()):
        if isinstance(container, dict) and container.get("name") == _CONTAINER:
            container |= {"image": image, "imagePullPolicy": "IfNotPresent", "command": ["sh", "-c", STAND_IN]}
            container.pop("args", None)
    for each in item.values():
        _stand_in(each, image)


class _Handler(BaseHTTPRequestHandler):
    owner: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        pass

    def _pass(self) -> None:
        _, _, key, *rest = self.path.split("/", 3)
        target = "/" + "/".join(rest)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)) or None
        method = str(self.command)
        fault = self.owner.fault_for(method, target)
        if fault is not None and not fault.applied:
            return self._wrong(fault)
        user = self.owner.users[key]
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _DROPPED}
        if user.name is not None:
            headers["Impersonate-User"] = user.name
        sent = None if body is None else self.owner.rewritten(body)
        answer = self.owner.upstream.send(method, target, sent, headers, user.groups)
        if fault is not None:
            answer.read()
            answer.release_conn()
            return self._wrong(fault)
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.headers.get("Content-Type", "application/json"))
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for part in answer.stream(1 << 16):  # also of a followed log, as it comes
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
        self.wfile.write(b"0\r\n\r\n")
        answer.release_conn()
        return None

    def _wrong(self, fault: Fault) -> None:
        if fault.status is None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
            return
        text = json.dumps({"kind": "Status", "apiVersion": "v1", "code": fault.status, "message": "made by the suite"})
        data = text.encode()
        self.send_response(fault.status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if fault.status == 429:
            self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _pass
