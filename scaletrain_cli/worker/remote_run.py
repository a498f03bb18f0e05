"""The run directory in pod 0, for the agents and ranks of pods without a shared volume: its files over HTTP.

``launch.backends.kubernetes.run_server`` answers. Each request has a code that only processes with the gang's key can
compute, of all that it states and sends. Nothing is encrypted, and answers have no code, as the traffic of the
collectives has none.
"""

import errno
import hashlib
import hmac
import http.client
import io
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import FileDigest
from scaletrain_cli.rundir.documents import parse_json
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.worker.checkpoint_commit import SupersededAttemptError

VARIABLE = "SCALETRAIN_RUN_SERVER"  # of the ranks: what for_environment() returns
POD_HEADER, CODE_HEADER = "X-Scaletrain-Pod", "X-Scaletrain-Code"
OFFSET_HEADER, DIGEST_HEADER = "X-Scaletrain-Offset", "X-Scaletrain-SHA-256"
SIGNED_HEADERS = (POD_HEADER, "Range", OFFSET_HEADER, "Content-Length", DIGEST_HEADER)
SUPERSEDED = 409
# Between tries. A rank waits for about five minutes: training goes on while it saves.
PAUSES = (1.0, 5.0, 15.0, 30.0, 60.0, 90.0, 90.0)
_SECONDS = 60.0  # without an answer
_STORE_SECONDS = 1800.0  # until a file of a checkpoint is on the disk of pod 0
_BLOCK_BYTES = 1 << 20
_READ_AHEAD_BYTES = 1 << 16  # most headers of shards
T = TypeVar("T")


class PodZeroLostError(ConnectionError):
    """Pod 0 does not answer."""


def request_code(key: bytes, method: str, path: str, headers: Mapping[str, str]) -> str:
    """Return the code of a request, which covers the ``SIGNED_HEADERS``, and by the digest its content."""
    words = (method, path, *(headers.get(name) or "" for name in SIGNED_HEADERS))
    return hmac.new(key, "\n".join(words).encode(), hashlib.sha256).hexdigest()


@dataclass(frozen=True)
class RemoteRun:
    """The directory ``run`` as pod 0 has it. Every method raises OSError; paths are those of this pod's directory.

    ``pod``: the number of this one. ``pauses``: before each further try of a request that was not answered.
    """

    run: RunDir
    address: str
    port: int
    pod: int
    key: bytes = field(repr=False)
    pauses: Sequence[float] = PAUSES
    seconds: float = _SECONDS

    @classmethod
    def from_environment(cls, run: RunDir, environment: Mapping[str, str] = os.environ) -> "RemoteRun | None":
        """Return the directory that this process must use; None if its own one is that of the run."""
        if not (text := environment.get(VARIABLE)):
            return None
        address, port, pod, key = text.split()
        return cls(run, address, int(port), int(pod), bytes.fromhex(key))

    def for_environment(self) -> str:
        return f"{self.address} {self.port} {self.pod} {self.key.hex()}"

    def open(self, path: Path) -> io.BufferedReader:
        """Open a file to read parts of it."""
        return io.BufferedReader(_RemoteFile(self, path), _READ_AHEAD_BYTES)

    def read(self, path: Path) -> bytes:
        return self._answer("GET", self.name(path))

    def listing(self, attempt: int) -> dict[str, list[int]]:
        """Return time of change (ns) and size of the records of this attempt and later ones, by relative path."""
        return dict(parse_json(self._answer("GET", f"?attempt={attempt}")))

    def replace(self, path: Path, content: bytes) -> None:
        """Write a whole file."""
        self._answer("PUT", self.name(path), [content])

    def append(self, path: Path, offset: int, content: bytes) -> None:
        """Append what this pod's file has from ``offset`` on; what an earlier call has sent is not appended again."""
        self._answer("POST", self.name(path), [content], offset=offset)

    def store(self, path: Path, parts: Sequence[memoryview]) -> FileDigest:
        """Write a file of a checkpoint in its staging folder, and return its digest.

        Raises SupersededAttemptError once a later attempt has begun.
        """
        self._answer("PUT", self.name(path), parts, seconds=_STORE_SECONDS)
        return FileDigest(sum(map(len, parts)), _digest(parts))

    def name(self, path: Path) -> str:
        return path.relative_to(self.run.path).as_posix()

    def connect(self, seconds: float) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.address, self.port, timeout=seconds)

    def request(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        name: str,
        headers: Mapping[str, str],
        body: Iterable[memoryview] | None = None,
    ) -> http.client.HTTPResponse:
        """Send a request and return its answer, whose content is still to be read. Raises what the answer says."""
        path, signed = "/" + quote(name, safe="/?="), {**headers, POD_HEADER: str(self.pod)}
        code = request_code(self.key, method, path, signed)
        connection.request(method, path, body, signed | {CODE_HEADER: code})
        answer = connection.getresponse()
        if answer.status not in (http.client.OK, http.client.PARTIAL_CONTENT):
            raise _error(answer.status, answer.read(), name)
        return answer

    def again(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns, which is tried again while pod 0 does not answer. Raises PodZeroLostError."""
        for pause in (*self.pauses, None):
            try:
                return work()
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, _StatedError):
                    raise OSError(error.errno, error.strerror, error.filename) from None
                if pause is None:
                    raise PodZeroLostError(errno.ECONNRESET, f"pod 0 does not answer: {error}") from error
            time.sleep(pause)
        raise AssertionError("not reached")

    def _answer(
        self, method: str, name: str, parts: Sequence[bytes | memoryview] = (), offset: int = 0, seconds: float = 0.0
    ) -> bytes:
        """Return the content of the answer to a request."""
        headers = {}
        if method != "GET":
            headers = {"Content-Length": str(sum(map(len, parts))), DIGEST_HEADER: _digest(parts)}
            headers |= {OFFSET_HEADER: str(offset)}

        def ask() -> bytes:
            connection = self.connect(seconds or self.seconds)
            try:
                return self.request(connection, method, name, headers, _blocks(parts) if headers else None).read()
            finally:
                connection.close()

        return self.again(ask)


class _RemoteFile(io.RawIOBase):
    """A file in pod 0, of which each read is a request for that part."""

    def __init__(self, remote: RemoteRun, path: Path) -> None:
        self._remote, self._name, self._place = remote, remote.name(path), 0
        self._connection = remote.connect(remote.seconds)
        self._size = remote.again(lambda: self._ask("HEAD", bytearray()))

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(0, self._size - self._place)]
        if view:
            self._remote.again(lambda: self._ask("GET", view))
            self._place += len(view)
        return len(view)

    def close(self) -> None:
        self._connection.close()
        super().close()

    def _ask(self, method: str, view: bytearray | memoryview) -> int:
        """Fill ``view`` from the present place, and return the bytes that the answer states."""
        extent = {"Range": f"bytes={self._place}-{self._place + len(view) - 1}"} if view else {}
        try:
            answer = self._remote.request(self._connection, method, self._name, extent)
            size, filled = int(answer.headers["Content-Length"]), 0
            while filled < len(view) and (count := answer.readinto(memoryview(view)[filled:])):
                filled += count
            if filled < len(view) or answer.read(1):
                raise http.client.IncompleteRead(b"", len(view) - filled)
            return size
        except BaseException:
            self._connection.close()  # the next request opens it again
            raise


class _StatedError(OSError):
    """An error of pod 0, as it has answered."""


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _blocks(parts: Iterable[bytes | memoryview]) -> Iterable[memoryview]:
    """Yield what is sent in blocks: the timeout is that of each."""
    for part in parts:
        flat = memoryview(part).cast("B")
        for start in range(0, len(flat), _BLOCK_BYTES):
            yield flat[start : start + _BLOCK_BYTES]


def _error(status: int, content: bytes, name: str) -> Exception:
    try:
        said = parse_json(content)
        number, text = int(said["errno"]), str(said["error"])
    except (ValueError, KeyError, TypeError):
        number, text = errno.EIO, f"pod 0 answered {status}"
    if status == SUPERSEDED:
        return SupersededAttemptError(Reason("engine.attempt-superseded", {"attempt": text}))
    return _StatedError(number, text, name)


def error_document(number: int | None, text: str) -> bytes:
    """Return the content of an answer to a request that failed with this error of the operating system."""
    return json.dumps({"errno": number or errno.EIO, "error": text}).encode()


def address_of(host: str, port: int) -> str:
    """Return the address of pod 0, which it keeps as long as its gang: no later request needs the name server."""
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
