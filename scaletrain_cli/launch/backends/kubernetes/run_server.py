"""Pod 0 serves its run directory to the other pods of a gang without a shared volume; see ``worker.remote_run``.

They read checkpoints and the records of attempts, replace or append to records of their own, and write the files of
their ranks to the staging folder of a checkpoint, which rank 0 commits. Nothing else can be read or written.
"""

import contextlib
import errno
import hashlib
import hmac
import json
import logging
import os
import re
import socket
import sys
import threading
import time
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

from scaletrain_cli.rundir.journal import append_whole_lines
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import closing_descriptor, make_folder, open_to_append, open_to_read, replace_file
from scaletrain_cli.worker.checkpoint_commit import HashingWriter
from scaletrain_cli.worker.remote_run import (
    CODE_HEADER,
    DIGEST_HEADER,
    OFFSET_HEADER,
    POD_HEADER,
    SIGNED_HEADERS,
    SUPERSEDED,
    error_document,
    request_code,
)

_STRANGER_SECONDS, _SECONDS = 10.0, 600.0  # for the next bytes of a connection, until it has sent a code, and then
_BLOCK_BYTES = 1 << 20
_POLL_SECONDS = 0.1
_NOT_SERVED, _OTHER_BYTES = "not served", "other bytes arrived than were sent"
logger = logging.getLogger(__name__)
_NAME = r"(?!\.)[\w.+=@-]+"
_READ = re.compile(rf"(?:attempts/\d{{4,}}/(?:{_NAME}/)?|checkpoints/step-\d{{8,}}/){_NAME}|events\.jsonl")
_RECORD = re.compile(rf"attempts/\d{{4,}}/(?!attempt\.json)(?:{_NAME}/)?{_NAME}")  # that another pod may write
_STAGED = re.compile(rf"checkpoints/attempt-(\d{{4,}})\.tmp/step-\d{{8,}}/{_NAME}")
# What agents tell each other by files of an attempt.
RECORDS = ("*", "nodes/*", "failures/*", "hub/*")
CONTROL = ("cancelled", "stop", "superseded.json")  # of the run: no further attempt may start


class RunServer:
    """Serves ``run`` at ``port`` (0: a free one) in threads of this process, from its creation on. Raises OSError."""

    def __init__(self, run: RunDir, port: int, key: bytes) -> None:
        self.run, self.key = run, key
        self.fetched: dict[tuple[str, str], int] = {}  # time of change (ns) of what a pod has read last, by its path
        self._appended: dict[tuple[str, str], int] = {}
        self._lock = threading.Lock()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        kind = type("Server", (ThreadingHTTPServer,), {"address_family": family, "handle_error": _log_error})
        self._server = kind(("", port), type("Handler", (_Handler,), {"served": self}), bind_and_activate=False)
        if both:
            self._server.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._server.request_queue_size = 1024
        self._server.server_bind()
        self._server.server_activate()
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_SECONDS,), name="run-server", daemon=True
        )
        self._thread.start()

    def wait_for_readers(self, name: str, pods: Collection[int], seconds: float) -> bool:
        """Wait until each of the pods has read the present record ``name`` of the newest attempt.

        Return whether all have in ``seconds``.
        """
        path, until = self.run.attempt(max(self.run.attempts())) / name, time.monotonic() + seconds
        relative = path.relative_to(self.run.path).as_posix()
        while not all(self.fetched.get((str(pod), relative)) == path.stat().st_mtime_ns for pod in pods):
            if time.monotonic() >= until:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def __enter__(self) -> "RunServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def append(self, pod: str, name: str, offset: int, content: bytes) -> None:
        """Append to a file what a pod has from ``offset`` on, without what an earlier request has appended."""
        with self._lock:
            known = self._appended.get((pod, name), offset)
            new = content[max(0, known - offset) :]
            if new and name == self.run.events.name:
                append_whole_lines(self.run.events, new)
            elif new:
                make_folder((self.run.path / name).parent)
                with closing_descriptor(open_to_append(self.run.path / name)) as descriptor:
                    os.write(descriptor, new)
            self._appended[pod, name] = max(known, offset + len(content))

    def records(self, attempt: int) -> dict[str, list[int]]:
        """Return time of change (ns) and size of the records of ``attempt`` and later ones, by relative path."""
        records = {}
        folders = [self.run.attempt(number) for number in self.run.attempts() if number >= attempt]
        paths = [path for folder in folders for pattern in RECORDS for path in folder.glob(pattern)]
        for path in (*paths, *(self.run.path / name for name in CONTROL)):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.is_file() and not path.name.startswith("."):
                    records[path.relative_to(self.run.path).as_posix()] = [status.st_mtime_ns, status.st_size]
        return records


def _log_error(server: object, request: object, client_address: object) -> None:
    """Log what ended a connection, such as one that sends no HTTP."""
    logger.info("a connection from %s ended: %s", client_address, sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    """One connection. ``served``: set by the class that RunServer makes."""

    protocol_version = "HTTP/1.1"
    timeout = _STRANGER_SECONDS
    served: RunServer

    def do_HEAD(self) -> None:
        self._read(with_content=False)

    def do_GET(self) -> None:
        self._read(with_content=True)

    def do_PUT(self) -> None:
        self._write()

    def do_POST(self) -> None:
        self._write()

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: each pod asks once a second."""

    @property
    def _name(self) -> str:
        return unquote(self.path.removeprefix("/"))

    def _is_allowed(self) -> bool:
        signed = {name: self.headers.get(name, "") for name in SIGNED_HEADERS}
        expected = request_code(self.served.key, self.command, self.path, signed)
        if hmac.compare_digest(expected.encode(), self.headers.get(CODE_HEADER, "").encode()):
            self.connection.settimeout(_SECONDS)
            return True
        self.close_connection = True  # what it sends is not read
        self._answer(403, b"{}")
        return False

    def _read(self, *, with_content: bool) -> None:
        if not self._is_allowed():
            return
        wanted = self.headers.get("Range", "")
        if (attempt := self._name.removeprefix("?attempt=")).isdecimal():
            self._answer(200, json.dumps(self.served.records(int(attempt))).encode())
            return
        if not (_READ.fullmatch(self._name) or self._name in CONTROL):
            self._answer(404, error_document(errno.ENOENT, _NOT_SERVED))
            return
        try:
            file = open_to_read(self.served.run.path / self._name)
        except OSError as error:
            self._answer(404, error_document(error.errno, error.strerror or str(error)))
            return
        with file:
            status = os.fstat(file.fileno())
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = (int(first), int(last) + 1) if wanted else (0, status.st_size)
            self.send_response(206 if wanted else 200)
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            try:
                if with_content and start < stop:
                    self.connection.sendfile(file, start, stop - start)
                    if stop == status.st_size:
                        self.served.fetched[self.headers.get(POD_HEADER, ""), self._name] = status.st_mtime_ns
            except OSError:  # the reader finds out that bytes are missing
                self.close_connection = True

    def _write(self) -> None:
        if not self._is_allowed():
            return
        self._left = int(self.headers["Content-Length"])
        path, pod = self.served.run.path / self._name, self.headers[POD_HEADER]
        status, answer = 200, b"{}"
        try:
            if staged := _STAGED.fullmatch(self._name):
                self._stage(path)
            elif self.command == "POST" and (self._name == "events.jsonl" or _RECORD.fullmatch(self._name)):
                self.served.append(pod, self._name, int(self.headers[OFFSET_HEADER]), self._content())
            elif self.command == "PUT" and _RECORD.fullmatch(self._name):
                content = self._content()
                make_folder(path.parent)
                replace_file(path, content)
            else:
                status, answer = 404, error_document(errno.EPERM, _NOT_SERVED)
        except OSError as error:
            status, answer = 507, error_document(error.errno, error.strerror or str(error))
            if staged is not None and isinstance(error, FileNotFoundError):
                status, answer = SUPERSEDED, error_document(error.errno, str(int(staged[1])))
        # The sender reads no answer before it has sent all.
        while self._left and (block := self.rfile.read(min(self._left, _BLOCK_BYTES))):
            self._left -= len(block)
        self._answer(status, answer)

    def _content(self) -> bytes:
        content = self.rfile.read(self._left)
        self._left -= len(content)
        if hashlib.sha256(content).hexdigest() != self.headers[DIGEST_HEADER]:
            raise OSError(errno.EIO, _OTHER_BYTES)
        return content

    def _stage(self, path: Path) -> None:
        """Write a file of a checkpoint. FileNotFoundError: a later attempt has begun.

        It comes into its folder when it is whole: a request that the sender has given up may end after the next one.
        """
        make_folder(path.parent, parents=False)
        draft = path.parent.with_name(f"{path.name}.{os.urandom(8).hex()}")
        try:
            writer = HashingWriter(draft)
            try:
                while self._left and (block := self.rfile.read(min(self._left, _BLOCK_BYTES))):
                    self._left -= len(block)
                    writer.write(block)
            finally:
                digest = writer.close()
            if digest.sha256 != self.headers[DIGEST_HEADER]:
                raise OSError(errno.EIO, _OTHER_BYTES)
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)

    def _answer(self, status: int, content: bytes) -> None:
        with contextlib.suppress(ConnectionError):
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)
