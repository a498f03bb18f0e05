"""<runs root>/datasets/: prepared data that every user of a runs root may read, each folder changed by its owner only.

Data that another user has prepared are used if this user can read them, and otherwise prepared again under a separate
name. The lock of one user never blocks another user.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.safe_files import (
    locked,
    make_folder,
    make_shared_folder,
    other_owner,
    process_umask,
    unwritable,
    user_name,
)

DATASET = "dataset.json"
_PRIVATE = 0o700


def dataset_place(root: Path, key: str) -> Path:
    """Return the folder of the data with this key: the shared one if this user can read it, else a separate one per
    user.
    """
    return place_of(root / "datasets", key)


def place_of(datasets: Path, key: str) -> Path:
    """Return the folder of the data with this key in the folder of all datasets, as dataset_place()."""
    folder = datasets / key
    if _is_free(folder) or is_readable(folder):
        return folder
    return folder.with_name(f"{key}-{os.geteuid()}")


def steps_folder(datasets: Path) -> Path:
    """Return the folder of the results of this user's preparations that come before tokens."""
    return _own_folder(datasets, ".steps")


def tokenizers_folder(datasets: Path) -> Path:
    """Return the folder of the tokenizers that this user's preparations have trained: datasets are named after them."""
    return _own_folder(datasets, ".tokenizers")


def _own_folder(datasets: Path, name: str) -> Path:
    folder = datasets / name
    return folder if _is_free(folder) else folder.with_name(f"{name}-{os.geteuid()}")


def _is_free(folder: Path) -> bool:
    """Return whether nobody else owns a folder, root neither, so that this user can write to it or create it."""
    try:
        return folder.lstat().st_uid == os.geteuid() and other_owner(folder) is None
    except FileNotFoundError:
        return True


def require_own_place(folder: Path) -> None:
    """Raise UsageError if another user owns the folder that this user's results would be written to."""
    if (uid := other_owner(folder)) is not None:
        raise UsageError(Reason("data.folder-of-another-user", {"folder": str(folder), "owner": user_name(uid)}))


def is_readable(folder: Path) -> bool:
    """Return whether this user can read all files of a prepared dataset, and the folders of its shards."""
    with contextlib.suppress(OSError):
        found = list(folder.iterdir())
        return (folder / DATASET).is_file() and all(
            os.access(path, os.R_OK | os.X_OK if path.is_dir() else os.R_OK, effective_ids=True) for path in found
        )
    return False


def owner_of_dataset(folder: Path) -> str | None:
    """Return the name of another user who prepared it; None for this user or root."""
    uid = other_owner(folder)
    return None if uid is None else user_name(uid)


def require_writable_datasets(root: Path) -> None:
    """Raise UsageError with a remedy if this user cannot prepare data below the runs root."""
    folder = root / "datasets"
    for path in (root, folder):
        if os.path.lexists(path) and not os.access(path, os.W_OK | os.X_OK, effective_ids=True):
            raise UsageError(f"data cannot be prepared: {unwritable(path)}")


def shared_root_notes(root: Path, *, prepares: bool) -> list[Reason]:
    """Return warnings for a submitter about a root that others write to; ``prepares``: the run may prepare data."""
    notes = []
    with contextlib.suppress(OSError):
        mode = root.stat().st_mode
        if mode & 0o002 and not mode & 0o1000:
            notes.append(Reason("launch.runs-root-unprotected", {"folder": str(root)}))
    try:
        if prepares:
            require_writable_datasets(root)
    except UsageError as error:
        notes.append(Reason("launch.no-new-datasets", {"cause": error.reason or recorded(error.message)}))
    return notes


def built(folder: Path, build: Callable[[Path], None]) -> Path:
    """Build the data of a folder with ``build(staging)`` unless they exist; return the folder. Raises UsageError."""
    if (folder / DATASET).is_file():
        return folder
    try:
        with building(folder) as staging:
            if staging is not None:
                build(staging)
    except PermissionError as error:
        params = {"folder": str(folder), "path": str(error.filename), "error": error.strerror or str(error)}
        raise UsageError(Reason("engine.dataset-unwritable", params)) from error
    return folder


def make_datasets_folder(root: Path) -> Path:
    """Return the folder of all datasets of a runs root, which is created if necessary.

    Raises UsageError where this user cannot write there, and OSError.
    """
    folder = root / "datasets"
    require_writable_datasets(root)
    make_folder(root, mode=0o777)
    make_shared_folder(folder)
    require_writable_datasets(root)
    return folder


@contextlib.contextmanager
def building(folder: Path) -> Iterator[Path | None]:
    """Yield an empty folder that becomes ``folder`` at the end; None if ``folder`` exists already.

    One process of a user builds at a time. Raises UsageError where nothing can be written there, and OSError.
    """
    make_datasets_folder(folder.parent.parent)
    with locked(folder.parent / f".{folder.name}.{os.geteuid()}.lock"):
        if is_readable(folder):
            yield None
            return
        _remove_leftovers(folder)
        staging = folder.with_name(f".{folder.name}.{os.urandom(8).hex()}.tmp")
        make_folder(staging, mode=_PRIVATE, exist_ok=False)
        try:
            yield staging
            open_to_readers(staging)
            with contextlib.suppress(OSError):
                staging.rename(folder)
            if not is_readable(folder):
                raise UsageError(
                    f"the prepared data cannot be stored: {folder} exists and is not a dataset that "
                    f"{user_name(os.geteuid())} can read. Remove it, or ask its owner to remove it."
                )
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def open_to_readers(dataset: Path) -> None:
    """Give read access to all users who may read the folder of all datasets, less the umask."""
    about = dataset.parent.stat().st_mode
    umask = process_umask()
    for path in (*dataset.rglob("*"), dataset):
        execute = 0o011 if path.is_dir() else 0
        with contextlib.suppress(FileNotFoundError):  # another process of this user was writing it
            path.chmod((0o700 if path.is_dir() else 0o600) | about & (0o044 | execute) & ~umask)


def _remove_leftovers(folder: Path) -> None:
    """Remove leftovers of killed builds of this user; the caller holds the lock."""
    for path in folder.parent.glob(f".{folder.name}.*.tmp"):
        with contextlib.suppress(OSError):
            if path.lstat().st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
