"""The files of a source of the spec, in a fixed order."""

from __future__ import annotations

from pathlib import Path

from scaletrain_cli.data.sources.local_files import local_file, parts_of
from scaletrain_cli.data.sources.records import SourceFile
from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec.corpus_files import PYTHON_STDLIB, find_text, format_by_name, unreadable_among
from scaletrain_cli.spec.sources import SourceSpec


def source_files(section: SourceSpec, folder: Path = Path(), key: str = "data.source") -> tuple[SourceFile, ...]:
    """Return the files of a source; relative paths are below ``folder``. ``key``: of its path in the spec.

    Raises UsageError if there are none, or if one cannot be read.
    """
    found = find_text(section.path, folder, section.format, key).files
    files = [(path, *_format(path, section)) for path in found]
    read = [each for path, kind, _ in files for each in parts_of(path, kind)]
    if section.path != PYTHON_STDLIB and (problem := unreadable_among(tuple(read))):
        raise UsageError(
            Reason("engine.data-source-unreadable", {"key": key, "source": section.path, "problem": problem})
        )
    return tuple(local_file(path, kind, compression) for path, kind, compression in files)


def _format(path: Path, section: SourceSpec) -> tuple[str, str]:
    if section.path == PYTHON_STDLIB:
        return "code", ""
    return format_by_name(path.name, section.format)
