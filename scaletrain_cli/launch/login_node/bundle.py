"""Pack the files that a verb needs on the login node: spec, config.json of the model, cluster entries, code, secrets.

ssh puts them into a private folder of the user there, which the shell script of the verb removes. The code has a folder
of its own, named after the run and removed a day later: a repeated submission names the same path, and is recognized as
the same run.
"""

from __future__ import annotations

import io
import json
import secrets
import shlex
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from scaletrain_cli.errors import UsageError
from scaletrain_cli.hub.reference import is_reference
from scaletrain_cli.launch.code import Snapshot, pack_snapshot
from scaletrain_cli.launch.login_node.ssh import output_of, scaletrain_command, shell_path
from scaletrain_cli.reasons import Reason
from scaletrain_cli.sent_command import SENT_CLUSTERS, SENT_SPEC
from scaletrain_cli.spec.clusters_file import Cluster, LoginNode
from scaletrain_cli.spec.loading import STDIN
from scaletrain_cli.spec.source import Source, parse_yaml

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

    @property
    def spec_word(self) -> str:
        """The path of the spec on the login node, as a word of its shell."""
        return f"{self.folder}/{shlex.quote(self.spec)}"

    @property
    def code_word(self) -> str:
        """The setting ``code.path=FOLDER`` for the code in the bundle, as a word of the login node's shell."""
        return f"code.path={self.code_folder}"


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

    Raises UsageError for a config.json of ``hf_config`` that is not below the folder of the spec.
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
    code = {} if snapshot is None else pack_snapshot(snapshot)
    return Bundle(
        run_id, files, code, spec_path, "" if spec is None else STDIN if str(spec[0]) == "-" else str(spec[0])
    )


def send(node: LoginNode, bundle: Bundle) -> str:
    """Place the files on the login node and return the version of ScaleTrain there. Raises SchedulerError."""
    place, code = bundle.folder, bundle.code_folder
    unpacked = {f"here/{path}": data for path, data in bundle.files.items()}
    unpacked |= {f"{_CODE}/{path}": data for path, data in bundle.code.items()}
    steps = [
        "umask 077",
        f"mkdir -p {_FOLDER}/{_CODE}",
        # What commands that never began have left behind.
        f"find {_FOLDER} {_FOLDER}/{_CODE} -mindepth 1 -maxdepth 1 ! -name {_CODE} -mtime +0 -exec rm -rf {{}} +",
        f"mkdir -p {place}.new",
        f"tar -xf - -C {place}.new",
        f"mv {place}.new/here {place}",
    ]
    if bundle.code:
        steps += [f"rm -rf {code}", f"mv {place}.new/{_CODE} {code}"]
    steps += [f"rm -rf {place}.new", scaletrain_command(node, ["--version"])]
    failed = f"{{ code=$?; rm -rf {place} {place}.new; exit $code; }}"
    return output_of(node, f"{' && '.join(steps)} || {failed}", _tar(unpacked)).strip().removeprefix("scaletrain ")


def remove(node: LoginNode, bundle: Bundle) -> None:
    """Remove the files of a verb that may not have begun. Raises SchedulerError."""
    output_of(node, f"rm -rf {bundle.folder}")


def script_of(node: LoginNode, words: Sequence[str], bundle: Bundle | None = None) -> str:
    """Return the shell script that runs a verb in the working folder of the login node; ``words`` are quoted.

    With the files of a bundle, which it removes at its end.
    """
    folder = f"cd {shell_path(node.folder)} || exit 2"
    if bundle is None:
        return f"{folder}\n{scaletrain_command(node, words)}"
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
    """Return each config.json that the spec names, by its path relative to the folder of the spec."""
    model = parse_yaml(text.decode("utf-8-sig"), Source(str(file))).get("model")
    sections = [model, model.get("text_config")] if isinstance(model, dict) else []
    named = [section.get("hf_config") for section in sections if isinstance(section, dict)]
    given = (override.partition("=") for override in overrides)
    named += [
        value.strip() for key, _, value in given if key.strip() in ("model.hf_config", "model.text_config.hf_config")
    ]
    found = {}
    for path in named:
        if not isinstance(path, str) or is_reference(path):
            continue
        if path.startswith(("/", "~")) or ".." in PurePosixPath(path).parts:
            raise UsageError(Reason("login_node.config-outside", {"path": path, "folder": str(file.parent)}))
        found[str(PurePosixPath(path))] = (file.parent / path).read_bytes()
    return found


def _tar(files: Mapping[str, bytes]) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        for path, data in files.items():
            entry = tarfile.TarInfo(path)
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
