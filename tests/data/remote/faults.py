"""An HTTP proxy that passes requests to one server, and breaks those that a test chooses."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

SLOW_DOWN = b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
FULL = b"<?xml version='1.0'?><Error><Code>XMinioStorageFull</Code><Message>Storage is full.</Message></Error>"
DENIED = b"<?xml version='1.0'?><Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"


@dataclass(frozen=True)
class Request:
    """One request: ``number`` counts from 1, ``range`` is the header, empty if there is none."""

    number: int
    method: str
    path: str
    range: str


@dataclass
class FaultyProxy:
    """``fault``: returns the name of a fault for a request, or None.

    Faults: slow-down (503), full (507), denied (403), reset (of the connection, within the body), short (body ends
    early), delay (0.3 s), changed (one byte of the body differs), changed-upload (one byte that the server gets).
    """

    server: str
    fault: Callable[[Request], str | None] = lambda request: None
    seen: list[Request] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    url: str = ""

    def __enter__(self) -> FaultyProxy:
        proxy, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                with lock:
                    ranges = self.headers.get("Range", "")
                    request = Request(len(proxy.seen) + 1, self.command, self.path, ranges)
                    proxy.seen.append(request)
                    fault = proxy.fault(request)
                    if fault:
                        proxy.broken.append(fault)
                proxy._answer(self, fault)

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):  # of a client that was killed
                    super().handle()

            do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()

    def _answer(self, handler: BaseHTTPRequestHandler, fault: str | None) -> None:
        length = int(handler.headers.get("Content-Length", 0))
        body = handler.rfile.read(length)
        if fault == "delay":
            time.sleep(0.3)
        if fault == "changed-upload" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        errors = {"slow-down": (503, SLOW_DOWN), "full": (507, FULL), "denied": (403, DENIED)}
        if fault in errors:
            self._send(handler, errors[fault][0], [("Content-Type", "application/xml")], errors[fault][1])
            return
        connection = http.client.HTTPConnection(self.server.removeprefix("http://"))
        try:
            connection.putrequest(handler.command, handler.path, skip_host=True, skip_accept_encoding=True)
            for name, value in handler.headers.items():
                connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            content = response.read()
            headers = [(name, value) for name, value in response.getheaders() if name.lower() not in _OF_A_HOP]
            length_of_head = response.getheader("Content-Length") if handler.command == "HEAD" else None
        finally:
            connection.close()
        if fault == "changed" and content:
            middle = len(content) // 2
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        self._send(handler, response.status, headers, content, length_of_head, fault)

    @staticmethod
    def _send(
        handler: BaseHTTPRequestHandler,
        status: int,
        headers: list[tuple[str, str]],
        content: bytes,
        length: str | None = None,
        fault: str | None = None,
    ) -> None:
        handler.send_response(status)
        for name, value in headers:
            handler.send_header(name, value)
        handler.send_header("Content-Length", length or str(len(content)))
        handler.end_headers()
        if handler.command == "HEAD":
            return
        whole = fault not in ("short", "reset")
        handler.wfile.write(content if whole else content[: len(content) // 2])
        handler.wfile.flush()
        if fault == "reset":  # RST, not FIN
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if not whole:
            handler.close_connection = True


_OF_A_HOP = ("content-length", "connection", "transfer-encoding", "server", "date", "keep-alive")
