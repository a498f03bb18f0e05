"""A real OpenSSH server on the loopback interface as the login node of a cluster, with a home folder of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import forked
from tests.conftest import in_ci
from tests.ports import reserved_port
from tests.waiting import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PROJECT = Path(__file__).parent.parent.parent


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


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    if SSHD is None:
        reason = "no sshd; on Debian: apt-get install openssh-server"
        (pytest.fail if in_ci() else pytest.skip)(reason)
    for folder in ("ssh", "bin", "config", "here", "home"):
        (tmp_path / folder).mkdir()
    keys, home, runs = tmp_path / "ssh", tmp_path / "home", tmp_path / "runs-there"
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    shutil.copy(keys / "user.pub", keys / "authorized_keys")
    port = reserved_port()
    environment = f"HOME={home} SCALETRAIN_TEST_SITE=1 XDG_CONFIG_HOME={home}/config XDG_STATE_HOME={home}/state"
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized_keys\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\nSetEnv {environment}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with (keys / "log").open("wb") as log:
        server = subprocess.Popen([SSHD, "-D", "-e", "-f", keys / "sshd_config"], stderr=log)
    (keys / "config").write_text(
        f"Host login.site\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {keys}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {keys}/known_hosts\n  StrictHostKeyChecking accept-new\n"
    )
    # The client reads ~/.ssh of the password database, whatever HOME is.
    (tmp_path / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/config "$@"\n')
    (home / "scaletrain").write_text(
        f'#!/bin/sh\nexport PYTHONPATH={PROJECT}\nexec {sys.executable} -m scaletrain_cli "$@"\n'
    )
    for program in (tmp_path / "bin" / "ssh", home / "scaletrain"):
        program.chmod(0o755)
    (tmp_path / "config" / "scaletrain").mkdir()
    (tmp_path / "config" / "scaletrain" / "clusters.yaml").write_text(
        f"clusters:\n  site:\n    host: {{ssh: login.site, scaletrain: ~/scaletrain, runs: {runs}}}\n"
        "    scheduler: local\n"
    )
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    sockets = tempfile.mkdtemp(prefix="scaletrain-")  # the path of a socket must be short
    monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)
    monkeypatch.setenv("PYTHONPATH", str(PROJECT))
    monkeypatch.setenv("SCALETRAIN_RUNS", str(tmp_path / "runs-here"))
    try:
        wait_until(lambda: _answers(port), "sshd listens")
        yield Site(home, runs, tmp_path / "here", server)
    finally:
        end = ["ssh", "-O", "exit", "-o", f"ControlPath={sockets}/scaletrain-ssh/%C", "login.site"]
        subprocess.run(end, capture_output=True)
        server.terminate()
        server.wait()
        shutil.rmtree(sockets)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)):
            return True
    except OSError:
        return False
