"""The user's code on a node: unpacked for this attempt, or already in a folder, and verified byte by byte.

No rank starts with code that has changed since the submission, in the run directory, in an image or on disk.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import shutil
import stat
import tarfile
import zlib
from collections.abc import Mapping
from pathlib import Path

from scaletrain_cli.errors import UsageError, WrongNodesError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.code import CodeRecord, code_file, differences, hash_of, paths_in
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord
from scaletrain_cli.safe_files import expand_home, make_folder, open_new


def unpacked_folder(run: RunDir, attempt: int, node_rank: int, environment: Mapping[str, str]) -> Path:
    """Return the folder of an attempt's code on this node, below the folder for temporary files."""
    parent = Path(environment.get("TMPDIR") or "/tmp").absolute()
    root = hashlib.sha256(os.fsencode(run.path)).hexdigest()[:8]  # a run below another root may have the same name
    return parent / f"scaletrain-code-{run.run_id}-{root}" / f"attempt-{attempt:04d}-node-{node_rank:04d}"


def place_code(run: RunDir, record: RunRecord, folder: Path) -> Path | None:
    """Return the folder with the code of the run's program: ``folder``, created anew, or ``code.on_nodes``; else None.

    Raises UsageError if the code differs from the submitted one, WrongNodesError if this node cannot read or store it.
    """
    code = record.code
    if code is None or not record.spec.code.own_program:  # only recorded; the built-in engine imports none of it
        return None
    expected = _listing(run, code)
    there = record.spec.code.on_nodes
    if there is None:
        _unpack(code_file(run, code, "tar.gz"), folder)
    place = folder if there is None else Path(there)
    differing = differences(place, expected)
    if differing:
        params = {"folder": str(place), "code": code.name, "files": list(differing)}
        raise UsageError(Reason("node.code-differs-in-image" if there else "node.code-differs", params))
    return place


def left_in_code(run: RunDir, record: RunRecord, folder: Path) -> list[str]:
    """Return the files that a program has written to ``folder``, which is removed at the end of the attempt."""
    if record.code is None or record.spec.code.command is None or not folder.is_dir():
        return []
    kept = paths_in(_listing(run, record.code))
    names = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in names if name not in kept and "__pycache__" not in name.split("/"))


def code_environment(record: RunRecord, place: Path, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that make a rank import from ``place`` first, not from the submitter's working tree."""
    tree = os.path.normpath(Path(record.working_folder, expand_home(record.spec.code.path or ".")))
    paths = [os.path.normpath(place / record.spec.code.import_root)]
    for entry in filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)):
        meant = os.path.normpath(Path(record.working_folder, entry))
        inside = Path(meant).is_relative_to(tree)
        paths.append(os.path.normpath(place / os.path.relpath(meant, tree)) if inside else meant)
    return {"PYTHONPATH": os.pathsep.join(paths), "SCALETRAIN_CODE": str(place)}


def _listing(run: RunDir, code: CodeRecord) -> str:
    path = code_file(run, code, "sha256")
    try:
        text = path.read_bytes().decode("utf-8", "surrogateescape")
    except OSError as error:
        raise WrongNodesError(Reason("node.code-list-unreadable", {"error": str(error)})) from error
    if hash_of(text) != code.sha256:
        raise UsageError(Reason("node.code-list-differs", {"path": str(path)}))
    return text


def _make_own(folder: Path) -> None:
    """Create an empty folder in a parent that is private to this user. Raises WrongNodesError and OSError."""
    parent = folder.parent
    make_folder(parent, mode=0o700)
    found = parent.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise WrongNodesError(Reason("node.code-folder-not-private", {"folder": str(parent)}))
    shutil.rmtree(folder, ignore_errors=True)  # left by an agent that was killed
    make_folder(folder, exist_ok=False)


def _unpack(archive: Path, folder: Path) -> None:
    try:
        _make_own(folder)
        with tarfile.open(archive, "r:gz") as packed:
            for entry in packed:  # regular files only; each is verified afterwards
                path = folder / entry.name
                if entry.isfile() and path.resolve().is_relative_to(folder.resolve()):
                    make_folder(path.parent)
                    content = packed.extractfile(entry)
                    assert content is not None, "a regular file has content"
                    with open_new(path) as file:
                        shutil.copyfileobj(content, file)
                    path.chmod(entry.mode & 0o755)
    except (tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UsageError(Reason("node.code-archive-differs", {"path": str(archive), "error": str(error)})) from error
    except OSError as error:
        raise WrongNodesError(Reason("node.code-not-unpacked", {"path": str(archive), "error": str(error)})) from error
