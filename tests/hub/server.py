"""A stand-in for the Hugging Face Hub on this machine, which speaks as much of its HTTP API as huggingface_hub uses.

Repositories with commits, branches, gated and private ones, tokens, redirects of large files (LFS) to a second address,
byte ranges; and faults: an answer that is cut, other bytes than promised, a server that does not answer.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

_API = re.compile(r"/api/(models|datasets)/(.+?)(?:/(?:revision|tree)/([^/]+))?")
_RESOLVE = re.compile(r"/(datasets/)?((?:[^/]+/)?[^/]+)/resolve/([^/]+)/(.+)")
_LARGE = (".safetensors", ".parquet", ".bin")


@dataclass
class Repo:
    """``commits``: files by commit, the newest last. ``branches``: commits by name."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    gated: bool = False
    private: bool = False


@dataclass
class Request:
    """One request, and the number of bytes of content in its answer.

    In the log before the client has what it counts: a test reads the log as soon as the client is done.
    """

    method: str
    path: str
    status: int
    range: str | None
    token: str | None
    sent: int = 0


class Hub:
    """The server; use it as a context manager. ``log`` holds all requests."""

    def __init__(self) -> None:
        self.repos: dict[tuple[str, str], Repo] = {}
        self.tokens: set[str] = {"hf_good"}
        self.log: list[Request] = []
        self.cut: dict[str, int] = {}  # by file name: bytes after which the next answer ends, once
        self.corrupt: set[str] = set()  # file names whose content has one wrong byte
        self.status: int | None = None  # answer everything with this
        self.ranges = True
        self.delay_seconds = 0.0  # before each chunk of a large file
        self.chunk_bytes = 1 << 16
        self.pause = threading.Event()  # large files wait until it is set
        self.pause.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.pause.set()
        self._server.shutdown()
        self._server.server_close()

    def add(
        self, name: str, files: Mapping[str, bytes], *, kind: str = "model", branch: str = "main", **options: bool
    ) -> str:
        """Add a commit with these files to a branch, and return its hash."""
        repo = self.repos.setdefault((kind, name), Repo())
        for option, value in options.items():
            setattr(repo, option, value)
        content = json.dumps({path: hashlib.sha256(data).hexdigest() for path, data in sorted(files.items())})
        commit = hashlib.sha1(f"{name}{kind}{len(repo.commits)}{content}".encode()).hexdigest()
        repo.commits[commit] = dict(files)
        repo.branches[branch] = commit
        return commit

    def downloads(self, name: str) -> list[Request]:
        return [one for one in self.log if one.method == "GET" and one.path.endswith("/" + name) and one.sent]


def is_large(path: str) -> bool:
    return path.endswith(_LARGE)


def blob_id(data: bytes) -> str:
    """Return git's hash of a file."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob_id(data)}
    if is_large(path):
        digest = hashlib.sha256(data).hexdigest()
        entry["lfs"] = {"size": len(data), "sha256": digest, "pointerSize": 134}
    return entry


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": blob_id(data)}
    if is_large(path):
        entry["lfs"] = {"size": len(data), "oid": hashlib.sha256(data).hexdigest(), "pointerSize": 134}
    return entry


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            given = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
            if hub.status is not None:
                return self._error(hub.status, "", path, given)
            if path.startswith("/cdn/"):
                return self._content(path, given)
            api, file = _API.fullmatch(path), _RESOLVE.fullmatch(path)
            if api is not None:
                kind, name, revision = api[1].removesuffix("s"), api[2], api[3] or "main"
            elif file is not None:
                kind, name, revision = "dataset" if file[1] else "model", file[2], file[3]
            else:
                return self._error(404, "", path, given)
            repo = hub.repos.get((kind, name))
            if given is not None and given not in hub.tokens:
                return self._error(401, "", path, given, "Invalid credentials in Authorization header")
            if repo is None or (repo.private and given is None):
                return self._error(404 if given else 401, "RepoNotFound", path, given)
            commit = repo.branches.get(revision, revision)
            if commit not in repo.commits:
                return self._error(404, "RevisionNotFound", path, given)
            files = repo.commits[commit]
            if file is None and f"/tree/{revision}" in path:
                return self._send(json.dumps([_entry(*each) for each in files.items()]).encode(), path, given)
            if file is None:
                siblings = [_sibling(path, data) for path, data in files.items()]
                about = {"id": name, "sha": commit, "gated": "auto" if repo.gated else False, "private": repo.private}
                return self._send(json.dumps({**about, "siblings": siblings, "tags": []}).encode(), path, given)
            if repo.gated and (given is None or not given.endswith("accepted")):
                return self._error(401 if given is None else 403, "GatedRepo", path, given)
            if file[4] not in files:
                return self._error(404, "EntryNotFound", path, given, commit=commit)
            data = files[file[4]]
            headers = {"X-Repo-Commit": commit, "ETag": f'"{blob_id(data)}"'}
            if is_large(file[4]):
                digest = hashlib.sha256(data).hexdigest()
                headers |= {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"'}
                host = f"http://localhost:{hub._server.server_port}"  # another origin: it must not get the token
                headers["Location"] = f"{host}/cdn/{digest}/{file[4]}"
                return self._send(b"", path, given, 302, headers)
            return self._send(data, path, given, 200, headers)

        def _content(self, path: str, given: str | None) -> None:
            _, _, digest, name = path.split("/", 3)
            for repo in hub.repos.values():
                for files in repo.commits.values():
                    data = files.get(name)
                    if data is not None and hashlib.sha256(data).hexdigest() == digest:
                        return self._send(data, path, given, 200, {"ETag": f'"{digest}"'})
            return self._error(404, "", path, given)

        def _send(
            self, data: bytes, path: str, given: str | None, status: int = 200, headers: Mapping[str, str] | None = None
        ) -> None:
            name = path.rpartition("/")[2]
            wanted = self.headers.get("Range")
            if name in hub.corrupt and data:
                data = data[:-1] + bytes([data[-1] ^ 1])
            total = len(data)
            if wanted is not None and hub.ranges and status == 200:
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                end = min(int(last), total - 1) if last else total - 1
                if int(first) >= total:
                    return self._error(416, "", path, given)
                data, status = data[int(first) : end + 1], 206
            self.send_response(status)
            for key, value in (headers or {}).items():
                self.send_header(key, value)
            if status == 206:
                self.send_header("Content-Range", f"bytes {first}-{end}/{total}")
            self.send_header("Content-Length", str(len(data)))
            request = Request(self.command, path, status, wanted, given)
            hub.log.append(request)
            self.end_headers()
            if self.command == "GET":
                self._write(data, name, request)

        def _write(self, data: bytes, name: str, request: Request) -> None:
            limit = hub.cut.pop(name, None) if data else None
            while (sent := request.sent) < len(data):
                if request.path.startswith("/cdn/"):
                    hub.pause.wait()
                    if hub.delay_seconds:
                        threading.Event().wait(hub.delay_seconds)
                end = min(len(data), sent + hub.chunk_bytes)
                if limit is not None and end >= limit:
                    request.sent = limit
                    self.wfile.write(data[sent:limit])
                    self.wfile.flush()
                    self.close_connection = True
                    self.connection.close()
                    return
                request.sent = end
                try:
                    self.wfile.write(data[sent:end])
                except OSError:
                    request.sent = sent
                    return

        def _error(
            self, status: int, code: str, path: str, given: str | None, message: str = "", commit: str = ""
        ) -> None:
            body = json.dumps({"error": message or code}).encode()
            self.send_response(status)
            for key, value in (("X-Error-Code", code), ("X-Error-Message", message), ("X-Repo-Commit", commit)):
                if value:
                    self.send_header(key, value)
            self.send_header("Content-Length", str(len(body)))
            hub.log.append(Request(self.command, path, status, self.headers.get("Range"), given))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

    return Handler
