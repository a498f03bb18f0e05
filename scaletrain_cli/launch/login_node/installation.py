"""Install this package on the login node of a cluster, for `scaletrain cluster setup`.

One request sends a wheel of this installation and a shell script. Each set of files, extras and Python gets a virtual
environment of its own, which never changes: jobs in the queue name its Python. A link names that of the last call.
"""

import base64
import hashlib
import io
import shlex
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from scaletrain_cli import __version__
from scaletrain_cli.errors import SchedulerError, UsageError
from scaletrain_cli.launch.login_node.ssh import FOLDER_OF_SETUP, output_of, shell_path, tar_of
from scaletrain_cli.project_files import FOLDERS, project_file
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.clusters_file import LoginNode

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
