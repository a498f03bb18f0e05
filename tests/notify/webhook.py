"""A real HTTP server on this machine that receives notifications. No tests here."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Webhook:
    """Answers each POST with the next of ``answers`` (status, headers), then with 200; ``hang`` answers nothing."""

    def __init__(self, *answers: tuple[int, dict[str, str]] | str) -> None:
        self.answers = list(answers)
        self.received: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.released = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.received.append(json.loads(body))
                outer.headers.append(dict(self.headers))
                answer = outer.answers.pop(0) if outer.answers else (200, {})
                if isinstance(answer, str):
                    outer.released.wait()
                    return
                status, headers = answer
                self.send_response(status)
                for name, value in {**headers, "Content-Length": "2"}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/services/T0/B0/opaque-part-of-the-url"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    @property
    def ids(self) -> list[str]:
        return [headers["Idempotency-Key"] for headers in self.headers]

    def close(self) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
