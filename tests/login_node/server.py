"""An OpenSSH server on the loopback interface, and an ssh client that reaches it as ``login.site``. No tests here."""

import contextlib
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.ports import reserved_port
from tests.waiting import wait_until

PROJECT = Path(__file__).parent.parent.parent
REAL_COMMAND = f'#!/bin/sh\nexport PYTHONPATH={PROJECT}\nexec {sys.executable} -m scaletrain_cli "$@"\n'


@contextlib.contextmanager
def ssh_server(sshd: str, folder: Path, environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Serve with keys in ``folder/ssh`` and the client ``folder/bin/ssh``, both of which exist at the beginning.

    ``environment``: NAME=VALUE of each command there, with blanks in between.
    """
    keys = folder / "ssh"
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    shutil.copy(keys / "user.pub", keys / "authorized_keys")
    port = reserved_port()
    (keys / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {keys}/host\nAuthorizedKeysFile {keys}/authorized_keys\n"
        f"StrictModes no\nUsePAM no\nPasswordAuthentication no\nPidFile none\nSetEnv {environment}\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    with (keys / "log").open("wb") as log:
        server = subprocess.Popen([sshd, "-D", "-e", "-f", keys / "sshd_config"], stderr=log)
    (keys / "config").write_text(
        f"Host login.site\n  HostName 127.0.0.1\n  Port {port}\n  IdentityFile {keys}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {keys}/known_hosts\n  StrictHostKeyChecking accept-new\n"
    )
    # The client reads ~/.ssh of the password database, whatever HOME is.
    (folder / "bin" / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {keys}/config "$@"\n')
    (folder / "bin" / "ssh").chmod(0o755)
    try:
        wait_until(lambda: _answers(port), "sshd listens")
        yield server
    finally:
        server.terminate()
        server.wait()


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port)):
            return True
    except OSError:
        return False
