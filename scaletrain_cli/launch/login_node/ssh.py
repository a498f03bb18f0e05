"""Run commands on a login node with the ssh client of this machine, its configuration and its keys.

One connection serves all commands of a few minutes (ControlMaster), so that a second factor is asked for once. A path
of the user's configuration for it is left as it is.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError, SchedulerSilentError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, make_folder, make_private_folder
from scaletrain_cli.sent_command import ON_LOGIN_NODE
from scaletrain_cli.spec.clusters_file import LoginNode

_SSH_FAILED = 255  # exit code of ssh for its own errors
_NOT_FOUND = 127  # of a shell, for a command that does not exist
_LONGEST_SOCKET = 107  # bytes of a Unix socket's path
_SOCKET_NAME = 40 + 1 + 16  # %C, and the suffix while ssh creates it
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_SHARED_FOR_SECONDS = 600


def shell_path(path: str) -> str:
    """Return a path of the login node as one word of its shell; a ``~`` in front is the home folder there."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def scaletrain_command(node: LoginNode, words: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Return the shell command of a verb on the login node; ``words`` and the values of ``variables`` are quoted."""
    settings = {ON_LOGIN_NODE: "1", **(variables or {})}
    if node.runs is not None:
        settings["SCALETRAIN_RUNS"] = shell_path(node.runs)
    return " ".join([*(f"{name}={value}" for name, value in settings.items()), shell_path(node.scaletrain), *words])


def run_interactively(node: LoginNode, script: str, *, of_command: bool = False) -> int:
    """Run a shell script on the login node with the streams of this process, and return its exit code.

    It gets a terminal there if all three streams are one here. ``of_command``: the exit code is that of the user's
    command, and may be any. Otherwise raises SchedulerSilentError if the connection failed or was cut, so that it is
    not known what the script did, and SchedulerError if ScaleTrain is not installed there.
    """
    terminal = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    code = subprocess.run(_command(node, script, "-t" if terminal else "-T")).returncode
    if of_command:
        return code if code >= 0 else 128 - code
    if code == _SSH_FAILED:
        raise SchedulerSilentError(Reason("login_node.cut", {"host": node.ssh}))
    if code == _NOT_FOUND:
        raise _not_installed(node)
    return code if code >= 0 else 128 - code


def output_of(node: LoginNode, script: str, sent: bytes = b"") -> str:
    """Return what a shell script prints on the login node; ``sent`` is its standard input. Raises SchedulerError."""
    # A file, not a pipe: the shared connection stays in the background and would keep a pipe open.
    with tempfile.TemporaryFile() as errors:
        command = _command(node, script, "-T")
        done = subprocess.run(command, input=sent, stdout=subprocess.PIPE, stderr=errors)
        errors.seek(0)
        said = " ".join(errors.read().decode(errors="replace").split())[-500:]
    if done.returncode == _NOT_FOUND:
        raise _not_installed(node)
    if done.returncode:
        code = "login_node.unreachable" if done.returncode == _SSH_FAILED else "login_node.failed"
        raise SchedulerError(Reason(code, {"host": node.ssh, "said": said, "exit_code": done.returncode}))
    return done.stdout.decode(errors="replace")


def _not_installed(node: LoginNode) -> SchedulerError:
    params = {"host": node.ssh, "command": node.scaletrain, "cluster": node.cluster}
    return SchedulerError(Reason("login_node.not-installed", params))


def _command(node: LoginNode, script: str, terminal: str) -> list[str]:
    # sh, since the login shell of the user may be another one.
    return ["ssh", terminal, *_ALIVE, *_sharing(node), "--", node.ssh, f"exec sh -c {shlex.quote(script)}"]


def _sharing(node: LoginNode) -> list[str]:
    """Return the options that share one connection; none if the user's configuration names a path for it."""
    shown = subprocess.run(["ssh", "-G", "--", node.ssh], capture_output=True, text=True)
    settings = dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)
    folder = _socket_folder()
    if settings.get("controlpath", "none") != "none" or folder is None:
        return []
    control = ("ControlMaster=auto", f"ControlPersist={_SHARED_FOR_SECONDS}", f"ControlPath={folder}/%C")
    return [word for setting in control for word in ("-o", setting)]


def _socket_folder() -> Path | None:
    """Return a private folder for the sockets of shared connections; None if there is none with a short path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or str(expand_home("~/.cache"))
    folder = Path(runtime, "scaletrain-ssh") if runtime else Path(cache, "scaletrain", "ssh")
    if len(os.fsencode(folder)) + 1 + _SOCKET_NAME > _LONGEST_SOCKET or "%" in str(folder) or not folder.is_absolute():
        return None
    try:
        make_folder(folder.parent)
        make_private_folder(folder)
    except OSError:
        return None
    return folder
