"""Run commands on a login node with the ssh client of this machine, its configuration and its keys.

One connection serves all commands of a few minutes (ControlMaster), so that a second factor is asked for once. A path
of the user's configuration for it is left as it is. The files that a verb needs there are packed and sent before it.

`scaletrain cluster setup` installs this package there: one request sends a wheel of this installation and a shell
script. Each set of files, extras and Python gets a virtual environment of its own, which never changes: jobs in the
queue name its Python. A link names that of the last call.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import io
import json
import os
import secrets
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from scaletrain_cli import __version__
from scaletrain_cli.errors import SchedulerError, SchedulerSilentError, UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.project_files import FOLDERS, project_file
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home, make_folder, make_private_folder
from scaletrain_cli.sent_run import ON_LOGIN_NODE, SENT_CLUSTERS, SENT_SPEC
from scaletrain_cli.spec.clusters_file import Cluster, LoginNode
from scaletrain_cli.spec.loading import STDIN
from scaletrain_cli.spec.source import Source, parse_yaml

if TYPE_CHECKING:
    from scaletrain_cli.launch.code import Snapshot

_SSH_FAILED = 255  # exit code of ssh for its own errors
NOT_FOUND = 127  # of a shell, for a command that does not exist
_LONGEST_SOCKET = 107  # bytes of a Unix socket's path
_SOCKET_NAME = 40 + 1 + 16  # %C, and the suffix while ssh creates it
_ALIVE = ("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
_SHARED_FOR_SECONDS = 600
FOLDER_OF_SETUP = "~/.local/share/scaletrain"
COMMAND_OF_SETUP = f"{FOLDER_OF_SETUP}/scaletrain"


def shell_path(path: str) -> str:
    """Return a path of the login node as one word of its shell; a ``~`` in front is the home folder there."""
    if path == "~":
        return '"$HOME"'
    return f'"$HOME"/{shlex.quote(path[2:])}' if path.startswith("~/") else shlex.quote(path)


def scaletrain_command(node: LoginNode, words: Sequence[str], variables: Mapping[str, str] | None = None) -> str:
    """Return the shell command of a verb on the login node; ``words`` and the values of ``variables`` are quoted."""
    settings = {ON_LOGIN_NODE: shlex.quote(f"{__version__} {node.cluster}"), **(variables or {})}
    if node.runs is not None:
        settings["SCALETRAIN_RUNS"] = shell_path(node.runs)
    return " ".join([*(f"{name}={value}" for name, value in settings.items()), _command_there(node), *words])


def _command_there(node: LoginNode) -> str:
    if node.scaletrain is not None:
        return shell_path(node.scaletrain)
    return f'"$(command -v {shell_path(COMMAND_OF_SETUP)} || echo scaletrain)"'


def run_interactively(node: LoginNode, script: str, *, of_command: bool = False) -> int:
    """Run a shell script on the login node with the streams of this process, and return its exit code.

    It gets a terminal there if all three streams are one here. ``of_command``: the exit code is that of the user's
    command, and may be any. Otherwise raises SchedulerSilentError if the connection failed or was cut, so that it is
    not known what the script did, and SchedulerError if ScaleTrain is not installed there.
    """
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    code = subprocess.run(command_of(node, script, "-t" if terminal else "-T")).returncode
    if of_command:
        return code if code >= 0 else 128 - code
    if code == _SSH_FAILED:
        raise SchedulerSilentError(Reason("login_node.cut", {"host": node.ssh}))
    if code == NOT_FOUND:
        raise not_installed(node)
    return code if code >= 0 else 128 - code


def output_of(node: LoginNode, script: str, sent: bytes = b"") -> str:
    """Return what a shell script prints on the login node; ``sent`` is its standard input. Raises SchedulerError."""
    # A file, not a pipe: the shared connection stays in the background and would keep a pipe open.
    with tempfile.TemporaryFile() as errors:
        command = command_of(node, script, "-T")
        done = subprocess.run(command, input=sent, stdout=subprocess.PIPE, stderr=errors)
        errors.seek(0)
        said = " ".join(errors.read().decode(errors="replace").split())[-500:]
    if done.returncode == NOT_FOUND:
        raise not_installed(node)
    if done.returncode:
        code = "login_node.unreachable" if done.returncode == _SSH_FAILED else "login_node.failed"
        raise SchedulerError(Reason(code, {"host": node.ssh, "said": said, "exit_code": done.returncode}))
    return done.stdout.decode(errors="replace")


def not_installed(node: LoginNode) -> SchedulerError:
    """Return the error for a login node without ScaleTrain."""
    params = {"host": node.ssh, "command": node.scaletrain or "scaletrain", "cluster": node.cluster}
    return SchedulerError(Reason("login_node.not-installed", params))


def command_of(node: LoginNode, script: str, terminal: str) -> list[str]:
    # The login shell of the user may be csh, which takes neither a line end nor ! within quotes.
    letters = base64.b64encode(os.fsencode(script)).decode()
    there = f"exec sh -c 'eval \"$(echo {letters} | base64 -d || echo exit 126)\"'"
    return ["ssh", terminal, *_ALIVE, *_sharing(node), "--", node.ssh, there]


@functools.cache
def _sharing(node: LoginNode) -> list[str]:
    """Return the options that share one connection; none if the user's configuration names a path for it.

    Raises UsageError without an ssh client.
    """
    try:
        shown = subprocess.run(["ssh", "-G", "--", node.ssh], capture_output=True, text=True, errors="replace")
    except FileNotFoundError as error:
        raise UsageError(Reason("login_node.no-ssh", {"host": node.ssh})) from error
    settings = dict(line.split(" ", 1) for line in shown.stdout.splitlines() if " " in line)
    folder = _socket_folder()
    if settings.get("controlpath", "none") != "none" or folder is None:
        return []
    control = ("ControlMaster=auto", f"ControlPersist={_SHARED_FOR_SECONDS}", f'ControlPath="{folder}/%C"')
    return [word for setting in control for word in ("-o", setting)]


def _socket_folder() -> Path | None:
    """Return a private folder for the sockets of shared connections; None if there is none with a short path."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    cache = os.environ.get("XDG_CACHE_HOME") or str(expand_home("~/.cache"))
    folder = Path(runtime, "scaletrain-ssh") if runtime else Path(cache, "scaletrain", "ssh")
    is_long = len(os.fsencode(folder)) + 1 + _SOCKET_NAME > _LONGEST_SOCKET
    if is_long or {"%", '"'} & set(str(folder)) or not folder.is_absolute():
        return None
    try:
        make_folder(folder.parent)
        make_private_folder(folder)
    except OSError:
        return None
    return folder


_FOLDER = '"${XDG_CACHE_HOME:-$HOME/.cache}"/scaletrain/sent'
_CLUSTERS, _CODE, _SECRETS, _SPEC = "clusters.json", "code", "secrets.sh", "spec"


@dataclass(frozen=True)
class Bundle:
    """Files by path below the folder of the bundle, and those of the code of the run ``run_id``.

    ``spec``: the path of the spec in it; ``spec_shown``: its path on this machine, for errors.
    """

    run_id: str
    files: Mapping[str, bytes]
    code: Mapping[str, bytes] = field(default_factory=dict)
    spec: str = ""
    spec_shown: str = ""
    token: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def folder(self) -> str:
        """The folder on the login node, as a word of its shell."""
        return f"{_FOLDER}/{self.token}"

    @property
    def code_folder(self) -> str:
        """The folder of the code on the login node, as a word of its shell."""
        return f"{_FOLDER}/{_CODE}/{shlex.quote(self.run_id)}"


def make_bundle(
    run_id: str,
    cluster: Cluster,
    *,
    spec: tuple[Path, bytes] | None = None,
    overrides: Sequence[str] = (),
    snapshot: Snapshot | None = None,
    values: Mapping[str, str] | None = None,
) -> Bundle:
    """Return the files for a verb. ``spec``: the path and the text of the file; ``values``: of its secrets, by name.

    Raises UsageError for a config.json of ``hf_config`` that is not below the current folder.
    """
    known: dict[str, Any] = {"clusters": {cluster.name: cluster.entries}}
    files = {_CLUSTERS: json.dumps(known | ({} if cluster.above else {"default": cluster.name})).encode()}
    spec_path = ""
    if spec is not None:
        file, text = spec
        spec_path = f"{_SPEC}/{'spec.yaml' if str(file) == '-' else file.name}"
        files |= {f"{_SPEC}/{path}": data for path, data in _configs(file, text, overrides).items()}
        files[spec_path] = text
    if values:
        files[_SECRETS] = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in values.items()).encode()
    code = {}
    if snapshot is not None:
        from scaletrain_cli.launch.code import pack_snapshot

        code = pack_snapshot(snapshot)
    return Bundle(
        run_id, files, code, spec_path, "" if spec is None else STDIN if str(spec[0]) == "-" else str(spec[0])
    )


def send(node: LoginNode, bundle: Bundle) -> None:
    """Place the files on the login node. Raises SchedulerError, also if it has no ScaleTrain."""
    place, code = bundle.folder, bundle.code_folder
    unpacked = {f"here/{path}": data for path, data in bundle.files.items()}
    unpacked |= {f"{_CODE}/{path}": data for path, data in bundle.code.items()}
    steps = [
        "umask 077",
        f"mkdir -p {_FOLDER}/{_CODE}",
        # What commands that never began have left behind. The code has a folder of its own, named after the run, for a
        # day: a repeated submission names the same path, and is recognized as the same run.
        f"find {_FOLDER} {_FOLDER}/{_CODE} -mindepth 1 -maxdepth 1 ! -name {_CODE} -mtime +0 -exec rm -rf {{}} +",
        f"mkdir -p {place}.new",
        f"tar -xf - -C {place}.new",
        f"mv {place}.new/here {place}",
    ]
    if bundle.code:  # the same code stays as it is: a verb whose connection was cut may be reading it
        new = f"{place}.new/{_CODE}"
        steps.append(f"(diff -rq {new} {code} >/dev/null 2>&1 || (rm -rf {code} && mv {new} {code}))")
    steps += [f"rm -rf {place}.new", f"(command -v {_command_there(node)} >/dev/null || exit {NOT_FOUND})"]
    failed = f"{{ code=$?; rm -rf {place} {place}.new; exit $code; }}"
    output_of(node, f"{' && '.join(steps)} || {failed}", tar_of(unpacked))


def script_of(node: LoginNode, words: Sequence[str], bundle: Bundle | None = None) -> str:
    """Return the shell script that runs a verb in the working folder of the login node; ``words`` are quoted.

    With the files of a bundle, which it removes at its end.
    """
    folder = f"cd {shell_path(node.folder)} || exit 2"
    if bundle is None:  # in place of the shell, which Ctrl-C would end with a signal, as if the connection were cut
        return f"{folder}\nexec env {scaletrain_command(node, words)}"
    place = bundle.folder
    values = f"{place}/{_SECRETS}"
    variables = {SENT_CLUSTERS: f"{place}/{_CLUSTERS}", SENT_SPEC: shlex.quote(bundle.spec_shown)}
    return "\n".join(
        (
            f"trap {shlex.quote(f'rm -rf {place}')} EXIT",
            "trap 'exit 129' HUP; trap 'exit 130' INT; trap 'exit 143' TERM",
            f"if [ -f {values} ]; then . {values}; rm -f {values}; fi",
            folder,
            scaletrain_command(node, words, variables),
        )
    )


def _configs(file: Path, text: bytes, overrides: Sequence[str]) -> dict[str, bytes]:
    """Return each config.json that the spec names, by its path relative to the current folder."""
    model = parse_yaml(text.decode("utf-8-sig"), Source(str(file))).get("model")
    sections = [model, model.get("text_config")] if isinstance(model, dict) else []
    named = [section.get("hf_config") for section in sections if isinstance(section, dict)]
    given = (override.partition("=") for override in overrides)
    named += [
        value.strip() for key, _, value in given if key.strip() in ("model.hf_config", "model.text_config.hf_config")
    ]
    configs = {}
    for path in named:
        if not isinstance(path, str) or is_reference(path):
            continue
        if path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts:
            raise UsageError(Reason("login_node.config-outside", {"path": path, "folder": os.getcwd()}))
        configs[str(PurePosixPath(path))] = Path(path).read_bytes()
    return configs


def tar_of(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive with the files, by their paths."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


# On many login nodes python3 is that of the system and too old, and a later one is beside it.
_PYTHONS = ("python3", "python3.13", "python3.12", "python3.11", "python3.10")
_FAILURES = {40: "no-python", 41: "not-writable", 42: "not-installable", 255: "setup-cut"}
_FULL = ("No space left", "quota exceeded")  # of pip, whose exit code is the same for everything
# A cut connection does not end the script: the next call waits for the lock, and then finds what this one has made.
_SCRIPT = """umask 022
unset PYTHONPATH PYTHONHOME
home={home}
place="$home"/{name}
for python in {pythons}; do
    command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' && break
    seen="$seen $python $(command -v "$python" >/dev/null && "$python" --version 2>&1)"
    python=
done
[ -n "$python" ] || {{ echo "found:$seen" >&2; exit 40; }}
mkdir -p "$home" && touch "$home/lock" || exit 41
exec 9>"$home/lock"
command -v flock >/dev/null && flock 9
if [ ! -e "$place/complete" ]; then
    rm -rf "$place" && mkdir "$place" && tar -xf - -C "$place" || exit 41
    "$python" -m venv "$place" >&2 || exit 40
    "$place/bin/python" -m pip install --quiet --no-input --disable-pip-version-check \\
        -c "$place/constraints.txt" "$place"/{wheel} >&2 || exit 42
    "$place/bin/scaletrain" --version >/dev/null || exit 42
    touch "$place/complete" || exit 41
    new=new
fi
ln -sfn {name}/bin/scaletrain "$home/new" && mv -f "$home/new" "$home/scaletrain" || exit 41
echo "$new"
"""


def make_wheel() -> tuple[str, bytes, str]:
    """Return the name and the content of a wheel of this installation, and the hashes of its files.

    Raises UsageError if pip did not install it.
    """
    try:
        installed = distribution("scaletrain")
    except PackageNotFoundError as error:
        raise UsageError(Reason("login_node.not-a-package")) from error
    package, info = Path(__file__).parents[2], f"scaletrain-{installed.version}.dist-info"
    folders = {"scaletrain_cli": package}
    folders |= {f"scaletrain_cli/project/{name}": project_file(name) for name in ("recipes", *FOLDERS)}
    files = {
        f"{name}/{path.relative_to(folder).as_posix()}": path.read_bytes()
        for name, folder in folders.items()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    files["scaletrain_cli/project/constraints.txt"] = project_file("constraints.txt").read_bytes()
    for name in ("METADATA", "entry_points.txt", "licenses/LICENSE"):
        files[f"{info}/{name}"] = (installed.read_text(name) or "").encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: scaletrain\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    record, packed = f"{info}/RECORD,,\n", io.BytesIO()
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = record.encode()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in files.items():
            archive.writestr(path, data)
    return f"scaletrain-{installed.version}-py3-none-any.whl", packed.getvalue(), record


def install(node: LoginNode, extras: Sequence[str], python: str | None = None) -> bool:
    """Install this package with ``extras`` on the login node; return False if it is there already.

    ``python``: the command or path of a Python there. Raises SchedulerError with what failed there.
    """
    wheel, content, files = make_wheel()
    digest = hashlib.sha256(repr((files, sorted(extras), python)).encode()).hexdigest()
    script = _SCRIPT.format(
        home=shell_path(FOLDER_OF_SETUP),
        name=f"{__version__}-{digest[:12]}",
        pythons=shell_path(python) if python is not None else " ".join(_PYTHONS),
        wheel=shlex.quote(wheel + (f"[{','.join(extras)}]" if extras else "")),
    )
    sent = {wheel: content, "constraints.txt": project_file("constraints.txt").read_bytes()}
    try:
        return bool(output_of(node, script, tar_of(sent)).strip())
    except SchedulerError as error:
        params = dict(error.reason.params) if error.reason is not None else {}
        code = _FAILURES.get(params.get("exit_code", 0))
        if code is None:
            raise
        if any(word in params["said"] for word in _FULL):
            code = "not-writable"
        params |= {"cluster": node.cluster, "folder": FOLDER_OF_SETUP}
        raise SchedulerError(Reason(f"login_node.{code}", params)) from error
