"""<runs root>/datasets/: prepared data that every user of a runs root may read, each folder changed by its owner only.

Data that another user has prepared are used if this user can read them and they are whole, and otherwise prepared again
under a separate name. The lock of one user never blocks another user.

A run records one entry per source, for the settings that decide its dataset. A source that the run reads already keeps
its dataset when another one is added, and when its files are touched, moved or deleted.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.hub.cache import path_in_cache
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.documents import read_document, undamaged_document, write_document
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.safe_files import (
    locked,
    make_folder,
    make_shared_folder,
    other_owner,
    process_umask,
    unwritable,
    user_name,
)
from scaletrain_cli.spec import LlavaSpec, RunSpec
from scaletrain_cli.spec.data import SETTINGS_OF_ROWS
from scaletrain_cli.spec.evaluation import ZERO_SHOT
from scaletrain_cli.spec.losses import LOSSES_OF
from scaletrain_cli.spec.sources import SourceSpec

DATASET = "dataset.json"
_PRIVATE = 0o700
_LARGEST_DESCRIPTION = 1 << 26  # bytes; 200 for each shard
_MOST_NAMES = 10  # of one user for the same data, in a folder in which another user takes names
_LOOK_SECONDS, _STALE_SECONDS = 5.0, 600.0
logger = logging.getLogger(__name__)


def place_of(datasets: Path, key: str, open_data: Callable[[Path], object] = lambda folder: None) -> Path:
    """Return the folder of the data with this key in the folder of all datasets: this user's, unless another user has
    prepared data that can be read. ``open_data`` raises an error if it cannot open the data of a folder.
    """
    folder = datasets / key
    if not _is_free(folder) and is_readable(folder):
        try:
            if (folder / DATASET).stat().st_size > _LARGEST_DESCRIPTION or read_document(folder / DATASET) is None:
                raise ValueError(f"{DATASET} is not a JSON object of this program")
            open_data(folder)
        except (ScaletrainError, OSError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            _say_unusable(folder, str(error))
        else:
            return folder
    return _own_folder(datasets, key)


@functools.cache  # a process asks for the place more than once
def _say_unusable(folder: Path, why: str) -> None:
    logger.warning("not used: %s, made by %s, is damaged (%s)", folder, owner_of_dataset(folder), why)


def steps_folder(datasets: Path) -> Path:
    """Return the folder of the results of this user's preparations that come before tokens."""
    return _own_folder(datasets, ".steps")


def tokenizers_folder(datasets: Path) -> Path:
    """Return the folder of the tokenizers that this user's preparations have trained: datasets are named after them."""
    return _own_folder(datasets, ".tokenizers")


def _own_folder(datasets: Path, name: str) -> Path:
    """Return the first of some names at which no other user has made anything; the last one if all are taken."""
    own = f"{name}-{os.geteuid()}"
    names = [datasets / folder for folder in (name, own, *(f"{own}-{number}" for number in range(2, _MOST_NAMES)))]
    return next(filter(_is_free, names), names[-1])


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
    """Return whether a prepared dataset has files and folders of shards alone, which this user can read."""
    with contextlib.suppress(OSError):
        folders = {path: path.is_dir() for path in folder.iterdir()}
        return (folder / DATASET).is_file() and all(
            (is_folder or path.is_file())
            and os.access(path, os.R_OK | os.X_OK if is_folder else os.R_OK, effective_ids=True)
            for path, is_folder in folders.items()
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
    with contextlib.ExitStack() as held:
        alone = _is_alone(folder, held)
        if is_readable(folder):
            yield None
            return
        if alone:
            for draft in _own_drafts(folder):  # of builds that were killed
                shutil.rmtree(draft, ignore_errors=True)
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


def _is_alone(folder: Path, held: contextlib.ExitStack) -> bool:
    """Wait for a process of this user that builds the folder, for as long as it writes; return whether none does.

    Without the lock, which another user may have made unusable, the data are only prepared more than once.
    """
    lock = folder.parent / f".{folder.name}.{os.geteuid()}.lock"
    last, since = None, time.monotonic()
    while time.monotonic() - since < _STALE_SECONDS:
        with contextlib.ExitStack() as attempt:
            try:
                if attempt.enter_context(locked(lock, wait_seconds=_LOOK_SECONDS)):
                    held.push(attempt.pop_all())
                    return True
            except PermissionError as error:
                logger.warning("prepared without a lock: %s", error)
                return False
        if last is None:
            logger.warning("another process of yours prepares %s; waiting for it", folder)
        try:
            written = [path.lstat().st_mtime for draft in _own_drafts(folder) for path in (draft, *draft.rglob("*"))]
        except FileNotFoundError:  # it renames or removes something at present
            written = [time.time()]
        if (latest := max(written, default=0.0)) != last:
            last, since = latest, time.monotonic()
    logger.warning(
        "the process that prepares %s has written nothing for %.0f s; preparing it here", folder, _STALE_SECONDS
    )
    return False


def _own_drafts(folder: Path) -> list[Path]:
    """Return the folders in which this user builds the folder, or has built it until a kill."""
    drafts = folder.parent.glob(f".{folder.name}.*.tmp")
    return [draft for draft in drafts if other_owner(draft) is None and draft.exists()]


NAME = "datasets.json"
_SCHEMA = "scaletrain.run-datasets/v1"
_OF_TEXT = {"tokenizer", "on_bad", "validation_split"}
_OF_ROWS = {"tokenizer", "validation_split", "chat_template"} | SETTINGS_OF_ROWS

Entry = dict[str, Any]


def datasets_file(run: RunDir) -> Path:
    """Return the file in which a run records its datasets."""
    return run.path / "preparation" / NAME


def entries_of(spec: RunSpec, runs_root: Path, folders: Mapping[str, Path]) -> list[Entry]:
    """Return entries for the datasets of the sources of a spec, by name. A dataset that cannot be read has none."""
    entries = []
    for name, key in _settings_keys(spec).items():
        if (folder := folders.get(name)) is not None and (identity := _identity(folder)) is not None:
            datasets = (runs_root / "datasets").absolute()
            entries.append(
                {
                    "source": name,
                    "settings": key,
                    # relative to the folder of all datasets, so that both may be moved
                    "folder": folder.name if folder.absolute().parent == datasets else str(folder.absolute()),
                    **identity,
                }
            )
    return entries


def read_entries(file: Path) -> list[Entry]:
    """Return what is recorded; empty if there is no file, or if it is damaged."""
    recorded = (undamaged_document(file) or {}).get("datasets")
    return [entry for entry in recorded if isinstance(entry, dict)] if isinstance(recorded, list) else []


def record_datasets(file: Path, entries: Iterable[Entry]) -> None:
    """Record datasets beside those of other sources and settings. Raises OSError."""
    before = read_entries(file)
    merged = {entry.get("settings"): entry for entry in [*before, *entries]}
    if list(merged.values()) != before:
        make_folder(file.parent, parents=True)
        write_document(file, {"schema": _SCHEMA, "datasets": list(merged.values())})


def recorded_folders(spec: RunSpec, runs_root: Path, entries: Iterable[Entry]) -> tuple[dict[str, Path], list[Path]]:
    """Return the recorded datasets by the names of the sources of a spec, and those that are gone or were replaced."""
    known = {entry.get("settings"): entry for entry in entries}
    folders, gone = {}, []
    for name, key in _settings_keys(spec).items():
        if (entry := known.get(key)) is None:
            continue
        folder = runs_root / "datasets" / str(entry.get("folder"))  # an absolute path replaces the first part
        same = _identity(folder) == {name: entry.get(name) for name in ("fingerprint", "seal")}
        if same and is_readable(folder):
            folders[name] = folder
        else:
            gone.append(folder)
    return folders, gone


def _settings_keys(spec: RunSpec) -> dict[str, str]:
    """Return a hash of the settings of each dataset of a run, by its name."""
    hashes = {section.name: _settings_key(spec, section) for section in spec.data.all_sources}
    zero_shot = spec.evaluation.zero_shot
    if zero_shot is not None and spec.evaluation.every:
        path = path_in_cache(zero_shot.source) or zero_shot.source
        hashes[ZERO_SHOT] = _hashed([ZERO_SHOT, path, zero_shot.classes, spec.data.on_bad])
    return hashes


def _settings_key(spec: RunSpec, section: SourceSpec) -> str:
    """Return a hash of all settings that decide the dataset of a source, without those of other sources.

    The name of the source is not among them, nor is its share of the samples.
    """
    data = spec.data
    identity: list[Any] = [section.path, section.format, section.field]
    if spec.training.objective == "causal_lm":
        identity.append(data.model_dump(mode="json", include=_OF_TEXT))
        steps = [step for step in data.prepare if step.only is None or section.name in step.only]
        identity.append([step.model_dump(mode="json", exclude={"only"}) for step in steps])
    elif spec.training.objective in LOSSES_OF:
        identity[0] = path_in_cache(section.path) or section.path  # nodes may have caches of the hub at other places
        identity += [spec.training.objective, spec.training.loss.of(spec.training.objective)]
        identity.append(data.model_dump(mode="json", include={"format", "on_bad", "validation_split"}))
        identity.append(data.images.model_dump(mode="json", include={"fields", "classes"}))
        if section.fields is not None:
            identity.append(section.fields.model_dump(mode="json"))
    else:
        identity += [spec.training.objective, spec.language_model.seq_len, section.validation_path]
        identity.append(data.model_dump(mode="json", include=_OF_ROWS))
        if isinstance(spec.model, LlavaSpec):
            identity += [data.images.folder, spec.model.image_token_index, spec.model.tokens_per_image]
    return _hashed(identity)


def _hashed(identity: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]


def _identity(folder: Path) -> dict[str, Any] | None:
    """Return what dataset.json says about the content of a dataset; None if there is none that can be read."""
    document = undamaged_document(folder / DATASET)
    return None if document is None else {name: document.get(name) for name in ("fingerprint", "seal")}
