"""Names of files and folders that are being written: they show which process writes them, so that others leave them.

Results are written under such a name and renamed when they are whole. A draft whose owner is dead can be removed; the
draft of a living process never is.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from scaletrain_cli.safe_files import create_file, make_folder

OWNER_DIGITS = 16
_DRAFT = re.compile(rf"\..+\.([0-9a-f]{{{OWNER_DIGITS}}})-[0-9a-f]{{8}}\.draft")

_owner = secrets.token_hex(OWNER_DIGITS // 2)


def new_owner() -> str:
    return secrets.token_hex(OWNER_DIGITS // 2)


def own_drafts_as(owner: str) -> None:
    """Write the drafts of this process in the name of ``owner``."""
    global _owner
    _owner = owner


def draft_of(path: Path) -> Path:
    """Return a new name beside ``path`` under which its content is written."""
    return path.with_name(f".{path.name}.{_owner}-{secrets.token_hex(4)}.draft")


def remove_drafts(folder: Path, is_dead: Callable[[str], bool]) -> None:
    """Remove the drafts below a folder whose owner ``is_dead``; those of other users stay."""
    for parent, folders, files in os.walk(folder):
        for name in [*folders, *files]:
            if (match := _DRAFT.fullmatch(name)) is None:
                continue
            path = Path(parent, name)
            with contextlib.suppress(OSError):
                if path.lstat().st_uid == os.geteuid() and is_dead(match[1]):
                    if name in folders:
                        folders.remove(name)
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()


@contextlib.contextmanager
def folder_written_whole(folder: Path) -> Iterator[Path]:
    """Yield a new folder that becomes ``folder`` at the end, unless another process was faster, with the same bytes.

    Raises OSError.
    """
    draft = draft_of(folder)
    make_folder(draft, exist_ok=False)
    try:
        yield draft
        try:
            draft.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_whole(path: Path, data: str) -> None:
    """Write a file, whole or not at all; its folder is made. Raises OSError."""
    make_folder(path.parent, parents=True)
    draft = draft_of(path)
    create_file(draft, data)
    os.replace(draft, path)
