"""A real OpenSSH server on the loopback interface as the login node of a cluster, with a home folder of its own."""

import contextlib
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests import forked
from tests.conftest import in_ci
from tests.login_node.server import PROJECT, ssh_server

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
# Passes its words, variables, folder and open files to the tests, whose fork becomes the command line.
FORKED_COMMAND = """#!{python} -SE
import os, pickle, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tests:
    tests.connect({address!r})
    socket.send_fds(tests, [pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))], [0, 1, 2])
    os._exit(tests.recv(1)[0])
"""


@dataclass(frozen=True)
class Site:
    """The login node: ``home`` is its home folder, ``runs`` its runs root; ``here`` is the laptop's working folder."""

    home: Path
    runs: Path
    here: Path
    server: subprocess.Popen[bytes]

    def scaletrain(self, *words: str, sent: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command line on the laptop."""
        return forked.scaletrain(*words, folder=self.here, sent=sent or "")

    def cut(self) -> None:
        """Cut all connections, as a network does: the server's processes of them end at once."""
        for child in psutil.Process(self.server.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    if SSHD is None:
        reason = "no sshd; on Debian: apt-get install openssh-server"
        (pytest.fail if in_ci() else pytest.skip)(reason)
    for folder in ("ssh", "bin", "config", "here", "home"):
        (tmp_path / folder).mkdir()
    home, runs = tmp_path / "home", tmp_path / "runs-there"
    sockets = tempfile.mkdtemp(prefix="scaletrain-")  # the path of a socket must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    address = f"{sockets}/commands"
    (home / "scaletrain").write_text(FORKED_COMMAND.format(python=sys.executable, address=address))
    (home / "scaletrain").chmod(0o755)
    (tmp_path / "config" / "scaletrain").mkdir()
    (tmp_path / "config" / "scaletrain" / "clusters.yaml").write_text(
        f"clusters:\n  site:\n    host: {{ssh: login.site, scaletrain: ~/scaletrain, runs: {runs}}}\n"
        "    scheduler: local\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "runs-here"))
    commands, serving = _listen(address)
    environment = f"HOME={home} SCALETRAIN_TEST_SITE=1 XDG_CONFIG_HOME={home}/config XDG_STATE_HOME={home}/state"
    try:
        with ssh_server(SSHD, tmp_path, environment) as server:
            yield Site(home, runs, tmp_path / "here", server)
            end = ["ssh", "-O", "exit", "-o", f"ControlPath={sockets}/scaletrain-ssh/%C", "login.site"]
            subprocess.run(end, capture_output=True)
    finally:
        commands.shutdown(socket.SHUT_RDWR)  # wakes the thread, which a close does not
        serving.join()
        commands.close()
        shutil.rmtree(sockets)


def _listen(address: str) -> tuple[socket.socket, threading.Thread]:
    """Answer FORKED_COMMAND until the socket is shut down; return it, and the thread."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(address)
    listener.listen()

    def serve() -> None:
        with contextlib.suppress(OSError):  # it is shut down
            while True:
                threading.Thread(target=_run, args=(listener.accept()[0],), daemon=True).start()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return listener, thread


def _run(client: socket.socket) -> None:
    data, files, *_ = socket.recv_fds(client, 1 << 20, 3)
    words, environment, folder = pickle.loads(data)
    environment |= {"PYTHONPATH": str(PROJECT), forked.FORKS_PYTHON: ""}
    streams = dict(zip(("stdin", "stdout", "stderr"), files, strict=True))
    process = forked.Forked("tests.login_node.there", words, environment, folder=Path(folder), **streams)
    for file in files:
        os.close(file)
    while process.poll() is None:
        if select.select([client], [], [], 0.02)[0]:  # the client sends nothing more, so it has ended
            process.send_signal(signal.SIGHUP)  # as from sshd's session, of which the process is no member
            break
    process.communicate()
    with contextlib.suppress(OSError):  # nobody waits for it any more
        client.send(bytes([process.wait() & 255]))
    client.close()
