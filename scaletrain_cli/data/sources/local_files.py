"""Files of this machine: their size, and whether a file is still the one that was listed."""

import os
from collections.abc import Iterable
from pathlib import Path

from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason


def local_file(path: Path, kind: str, compression: str = "") -> SourceFile:
    """Return a file of this machine with its size and its state. Raises OSError."""
    found = [each.stat() for each in parts_of(path, kind)]
    size = sum(each.st_size for each in found)
    return SourceFile(os.path.abspath(path), size, kind, compression, state=_state(found))


def parts_of(path: Path, kind: str) -> tuple[Path, ...]:
    """Return the files that one file of a source consists of: two for Megatron-LM."""
    return (path.with_suffix(".idx"), path.with_suffix(".bin")) if kind == "megatron" else (path,)


def paths_of(file: SourceFile) -> tuple[Path, ...]:
    """Return the paths of a local file: .idx and .bin of a Megatron-LM set, else one."""
    return parts_of(Path(file.path), file.kind)


def _state(found: Iterable[os.stat_result]) -> str:
    """Return what changes with every write to the files.

    It includes the inode change time, which programs cannot set, unlike the modification time; not the device, which
    differs between machines that mount the same file system.
    """
    return " ".join(f"{each.st_ino}-{each.st_size}-{each.st_mtime_ns}-{each.st_ctime_ns}" for each in found)


def require_unchanged(file: SourceFile) -> None:
    """Raise UsageError if a file is not the one that was listed. A file whose state is not known is not compared."""
    if not file.state:
        return
    try:
        same = _state(path.stat() for path in paths_of(file)) == file.state
    except OSError as error:
        params = {"path": file.path, "error": error.strerror or str(error)}
        raise UsageError(Reason("data.file-gone", params), file=file.path) from error
    if not same:
        raise UsageError(Reason("data.file-changed", {"path": file.path}), file=file.path)
