"""The files of a source of the spec, in a fixed order."""

import contextlib
from collections import Counter
from pathlib import Path

from scaletrain_cli.data.sources.places import find_file, list_files, naming_key
from scaletrain_cli.data.sources.records import SourceFile, local_file, parts_of
from scaletrain_cli.data.sources.stores import is_remote
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.safe_files import expand_home
from scaletrain_cli.spec.corpus_files import (
    PYTHON_STDLIB,
    chosen_text,
    find_text,
    format_by_name,
    read_split,
    suffixes_of,
    unreadable_among,
)
from scaletrain_cli.spec.sources import SourceSpec


def source_files(
    section: SourceSpec,
    folder: Path = Path(),
    key: str = "data.source",
    seconds: float | None = None,
    *,
    checked: bool = True,
    evaluation: bool = False,
    left_out: Counter[str] | None = None,
) -> tuple[SourceFile, ...]:
    """Return the files of a source; relative paths are below ``folder``. ``key``: of its path in the spec.

    ``checked``: that this user can read each file; otherwise only that it is there, with one call for each.
    ``evaluation``: which split of a folder is read, as of find_files(). ``left_out``: gets the number of files of a
    folder that are not read, by what they are. ``seconds``: after which a request to a remote store is not repeated;
    None for the deadline of the environment.

    Raises UsageError if there are none, or if one cannot be read; for a remote source also UnavailableError.
    """
    if is_remote(section.path):
        return _remote(section, key, seconds, evaluation, left_out)
    listed = find_text(section.path, folder, section.format, key, evaluation=evaluation)
    paths = listed.files
    if left_out is not None:
        left_out.update(listed.not_read)
    if section.path == PYTHON_STDLIB:
        return tuple(local_file(path, "code") for path in paths)
    files = [(path, *format_by_name(path.name, section.format)) for path in paths]
    if not checked:
        with contextlib.suppress(OSError):
            return tuple(local_file(path, kind, compression) for path, kind, compression in files)
    read = tuple(part for path, kind, _ in files for part in parts_of(path, kind))
    if problem := unreadable_among(read, folder / expand_home(section.path)):
        raise _unreadable(key, section.path, problem)
    return tuple(local_file(path, kind, compression) for path, kind, compression in files)


def _remote(
    section: SourceSpec, key: str, seconds: float | None, evaluation: bool, left_out: Counter[str] | None
) -> tuple[SourceFile, ...]:
    with naming_key(key):
        listed = {file.path: file for file in list_files(section.path, seconds)}
    in_folder = section.path not in listed and not set("*?[") & set(section.path)
    if not (chosen := chosen_text(list(listed), section.format, in_folder=in_folder)):
        raise _unreadable(key, section.path, f"has no {', '.join(suffixes_of(section.format))} file")
    if in_folder:
        chosen, of_splits = read_split(chosen, section.path, evaluation=evaluation)
        if left_out is not None:
            left_out.update(of_splits)
    files = []
    for path in chosen:
        kind, compression = format_by_name(path, section.format)
        names = (path, f"{path.removesuffix('.idx')}.bin") if kind == "megatron" else (path,)
        parts = [listed.get(name) or find_file(name, seconds) for name in names]
        etag = " ".join(part.etag for part in parts)
        files.append(SourceFile(path, sum(part.size for part in parts), kind, compression, etag))
    return tuple(files)


def _unreadable(key: str, path: str, problem: str) -> UsageError:
    return UsageError(Reason("engine.data-source-unreadable", {"key": key, "source": path, "problem": problem}))
