"""The checkpoints in a folder, and which of them are valid. Read-only.

A checkpoint is valid if ``step-N/manifest.json`` is for step N and every file that it lists has the recorded size and
hash. "Latest" is computed, never a pointer file. Checkpoints of an adapter lack the frozen weights: they
name the files that the run read, with their digests. The inventory of a folder also has what is incomplete or damaged.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Literal

from scaletrain_cli.errors import UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.documents import DamagedError, entries, parse_json, read_content, read_document
from scaletrain_cli.safe_files import open_to_read

MANIFEST = "manifest.json"
STATE_FILE = "state.json"  # state that is the same on every rank: the step, the loss scale, the state of the guard
_STEP = re.compile(r"step-(\d{8,})")
_HASH_BLOCK_BYTES = 1 << 20
_VERIFYING_THREADS = 4


@dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 of one file of a checkpoint."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Defect:
    """The defect of a checkpoint or of one of its files.

    ``damaged``: its content is not what was written. ``unreadable``: this node could not read it; another node, or a
    later try, may. ``misnamed``: the folder contains the checkpoint of another step, after a copy or a rename.
    """

    kind: Literal["damaged", "unreadable", "misnamed"]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint as its manifest states it; ``verify`` compares its files with it."""

    path: Path
    step: int
    world_size: int
    clean: bool
    attempt: int
    files: Mapping[str, FileDigest]

    @property
    def size_bytes(self) -> int:
        return sum(file.size for file in self.files.values())


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the folder of the committed checkpoint of ``step``."""
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """Return the committed checkpoints by step, as their manifests state them; no file is read."""
    return [read for path in committed_folders(folder) if isinstance(read := read_checkpoint(path), Checkpoint)]


def find_defects(checkpoint: Checkpoint, names: Collection[str] | None = None) -> dict[str, Defect]:
    """Read the files (all, or ``names``) and return the defect of each; empty if every byte is as written."""
    from concurrent.futures import ThreadPoolExecutor  # loads logging and more, which most commands do not need

    chosen = sorted(checkpoint.files if names is None else names)
    with ThreadPoolExecutor(_VERIFYING_THREADS) as threads:  # hashing and reading release the interpreter lock
        defects = threads.map(lambda name: _defect_of(checkpoint.path / name, checkpoint.files[name]), chosen)
        return {name: defect for name, defect in zip(chosen, defects, strict=True) if defect is not None}


def verify(checkpoint: Checkpoint, names: Collection[str] | None = None) -> list[str]:
    """Return the defects of the files (all, or ``names``), one line each; an unreadable file is a defect."""
    return [f"{name}: {defect}" for name, defect in find_defects(checkpoint, names).items()]


def has_all_files(checkpoint: Checkpoint) -> bool:
    """Return whether each file is there and has the recorded size. Files that cannot be looked up now count as there.

    Reads no content.
    """
    for name, expected in checkpoint.files.items():
        try:
            status = (checkpoint.path / name).stat()
        except OSError as error:
            if _os_defect(error).kind == "damaged":
                return False
            continue
        if status.st_size != expected.size:
            return False
    return True


def latest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Return the latest valid checkpoint, and the defects of each later one that was skipped."""
    passed_over: list[str] = []
    for path in reversed(committed_folders(folder)):
        checkpoint = read_checkpoint(path)
        problems = verify(checkpoint) if isinstance(checkpoint, Checkpoint) else [str(checkpoint)]
        if isinstance(checkpoint, Checkpoint) and not problems:
            return checkpoint, passed_over
        passed_over += [f"{path.name}/{problem}" for problem in problems]
    return None, passed_over


def checkpoints_to_prune(
    folder: Path, keep: int, keep_every: int | None = None, also_kept: Collection[int] = ()
) -> list[Checkpoint]:
    """Return the checkpoints that retention does not keep, oldest first.

    Retention keeps the ``keep`` latest, the latest clean one, the steps ``also_kept``, and multiples of ``keep_every``.
    """
    committed = list_checkpoints(folder)
    kept = committed[-keep:]
    newest_clean = next((c for c in reversed(committed) if c.clean), None)
    kept_for_good = [
        c for c in committed if c.step in also_kept or (keep_every is not None and c.step % keep_every == 0)
    ]
    return [c for c in committed if c not in kept and c is not newest_clean and c not in kept_for_good]


def committed_folders(folder: Path) -> list[Path]:
    """Return the folders with the name of a committed step, oldest first, regardless of their content."""
    by_step = {int(match[1]): entry for entry in entries(folder) if (match := _STEP.fullmatch(entry.name))}
    return [path for step in sorted(by_step) if (path := by_step[step]) == checkpoint_path(folder, step)]


def read_checkpoint(path: Path) -> Checkpoint | Defect:
    """Return the checkpoint as its manifest states it, or the defect of the manifest."""
    try:
        content = read_content(path / MANIFEST)
    except DamagedError as error:
        cause = error.__cause__
        if isinstance(cause, OSError):
            return _os_defect(cause, f"{MANIFEST}: ")
        return Defect("damaged", f"{MANIFEST}: {cause}")
    if content is None:
        return Defect("damaged", f"{MANIFEST}: missing (the deletion was interrupted, or the file was lost)")
    return parse_manifest(content, path)


def parse_manifest(content: bytes, path: Path) -> Checkpoint | Defect:
    """Return the checkpoint in the folder ``path`` as its manifest states it, or the defect of the manifest."""
    try:
        data = parse_json(content)
        stated = data.pop("sha256")
        if stated != manifest_hash(data):
            return Defect("damaged", f"{MANIFEST}: content does not match the recorded hash")
        files = {name: FileDigest(**digest) for name, digest in data["files"].items() if _is_inside(name)}
        if len(files) != len(data["files"]):
            return Defect("damaged", f"{MANIFEST}: names files outside its folder")
        numbers = [data["step"], data["world_size"], data["attempt"], *(file.size for file in files.values())]
        if any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError("not the counts of a checkpoint")
        checkpoint = Checkpoint(path, data["step"], data["world_size"], data["clean"], data["attempt"], files)
        own_name = checkpoint_path(path.parent, checkpoint.step).name
    except (ValueError, KeyError, TypeError, AttributeError):
        return Defect("damaged", f"{MANIFEST}: not the manifest of a checkpoint")
    if own_name != path.name:
        return Defect(
            "misnamed",
            f"{MANIFEST}: is the manifest of step {checkpoint.step}. Rename the folder to {own_name} or delete it",
        )
    return checkpoint


def read_client_state(path: Path) -> dict[str, Any] | None:
    """Return what the training loop has stated of a checkpoint, such as its data; None if it cannot be read."""
    try:
        client = (read_document(path / STATE_FILE) or {}).get("client")
    except DamagedError:
        return None
    return client if isinstance(client, dict) else None


def manifest_hash(manifest: Mapping[str, object]) -> str:
    """Return the hash of the manifest's own content, which shows a flipped bit in ``step`` or ``clean``."""
    return hashlib.sha256(json.dumps(dict(manifest), sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _defect_of(path: Path, expected: FileDigest) -> Defect | None:
    try:
        with open_to_read(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected.size:
                return Defect("damaged", f"{size} bytes instead of {expected.size}")
            if _file_hash(file) != expected.sha256:
                return Defect("damaged", "content does not match the recorded hash")
            return None
    except OSError as error:
        return _os_defect(error)


def _os_defect(error: OSError, where: str = "") -> Defect:
    """Return ``damaged`` for a missing file, which is missing on every node; others may be local."""
    is_missing = isinstance(error, FileNotFoundError | IsADirectoryError | NotADirectoryError)
    everywhere = is_missing or error.errno == errno.ELOOP
    return Defect("damaged" if everywhere else "unreadable", f"{where}{error.strerror or error}")


def _is_inside(name: str) -> bool:
    path = PurePosixPath(name)
    os.fsencode(name)  # raises UnicodeError, a ValueError, for characters that no file name has
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name


def file_digest(path: Path) -> FileDigest:
    """Return size and hash of a file, which is read whole. Raises OSError."""
    with open_to_read(path) as file:
        return FileDigest(os.fstat(file.fileno()).st_size, _file_hash(file))


def _file_hash(file: BinaryIO) -> str:
    digest = hashlib.sha256()
    while block := file.read(_HASH_BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# A file of the cache of the Hugging Face Hub is a link to one that is called by its hash.
_HASH = re.compile(r"[0-9a-f]{64}")

Digests = Mapping[str, FileDigest]


def weight_files(folder: Path) -> list[str]:
    """Return the names of the files with the weights in a folder. Raises UsageError if they cannot be read."""
    try:
        if not (folder / _INDEX).exists():
            (folder / _SINGLE).stat()
            return [_SINGLE]
        return [_INDEX, *sorted(set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values()))]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(folder, error) from error


def digests_of(folder: Path, names: Sequence[str]) -> dict[str, FileDigest]:
    """Return sizes and hashes of files; every byte is read, except in the cache of the hub. Raises UsageError."""
    digests: dict[str, FileDigest] = {}
    for name in names:
        path = folder / name
        try:
            target = path.resolve(strict=True)
            if path.is_symlink() and _HASH.fullmatch(target.name):
                digests[name] = FileDigest(target.stat().st_size, target.name)
            else:
                digests[name] = file_digest(path)
        except OSError as error:
            raise _unreadable(folder, error) from error
    return digests


def to_document(folder: Path, digests: Digests) -> dict[str, Any]:
    """Return the identity as JSON values, for the state of a checkpoint."""
    return {"folder": str(folder), "files": {name: asdict(digest) for name, digest in sorted(digests.items())}}


def check_same_base(checkpoint: str, saved: Mapping[str, Any] | None, folder: Path, digests: Digests) -> None:
    """Raise UsageError unless the files are those that the checkpoint was trained on."""
    if saved is None:
        return
    recorded = {name: FileDigest(**digest) for name, digest in saved["files"].items()}
    for name in sorted(recorded.keys() | digests.keys()):
        if recorded.get(name) != digests.get(name):
            params = {"checkpoint": checkpoint, "folder": str(folder), "file": name, "saved": str(saved["folder"])}
            raise UsageError(Reason("engine.base-weights-differ", params))


def read_base(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return the identity that a checkpoint recorded; None if it stores all weights itself. Raises OSError."""
    if STATE_FILE not in checkpoint.files:  # that of another program
        return None
    state = json.loads((checkpoint.path / STATE_FILE).read_text(encoding="utf-8"))
    base: dict[str, Any] | None = state.get("base")
    return base


def check_base_of(checkpoint: Checkpoint, folder: Path) -> None:
    """Raise UsageError if weights that the checkpoint does not store are missing from ``folder``, or are others."""
    if (saved := read_base(checkpoint)) is not None:
        check_same_base(checkpoint.path.name, saved, folder, digests_of(folder, weight_files(folder)))


def _unreadable(folder: Path, error: Exception) -> UsageError:
    return UsageError(Reason("engine.base-weights-unreadable", {"folder": str(folder), "error": str(error)}))


_FOLDER = re.compile(r"(damaged-|misnamed-)?step-(\d{8,})(?:\.\d+)?")
_ATTEMPT = re.compile(r"attempt-\d{4,}\.tmp")
_MOST_THREADS = 8


@dataclass(frozen=True)
class Entry:
    """One folder. ``problem``: the defect found in names and sizes, empty for none; ``written``: in Unix seconds."""

    path: Path
    step: int
    written: float
    checkpoint: Checkpoint | None
    problem: str = ""


@dataclass(frozen=True)
class Pruning:
    """The checkpoints to delete, and the latest valid one, which is never deleted."""

    to_delete: tuple[Checkpoint, ...]
    newest: Checkpoint


def take_inventory(folder: Path) -> list[Entry]:
    """Return the entries by step, oldest first. Reads manifests and sizes only."""
    inventory = [entry for path in entries(folder) for entry in _entries_at(path)]
    return sorted(inventory, key=lambda entry: (entry.step, entry.path.name))


def verify_files(checkpoint: Checkpoint, on_file: Callable[[str, int], None] = lambda name, size: None) -> list[str]:
    """Verify several files at a time; return the problems. ``on_file`` is called with each file and its bytes."""
    from concurrent.futures import ThreadPoolExecutor, as_completed

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool:
        names = {pool.submit(verify, checkpoint, [name]): name for name in checkpoint.files}
        problems = {}
        for done in as_completed(names):
            problems[names[done]] = done.result()
            on_file(names[done], checkpoint.files[names[done]].size)
    return [problem for name in checkpoint.files for problem in problems[name]]


def plan_pruning(folder: Path, keep: int, keep_every: int | None, also_kept: Collection[int] = ()) -> Pruning | None:
    """Return what pruning deletes; None if no checkpoint is valid, because any of them may still be repaired."""
    newest, _ = latest_valid(folder)
    if newest is None:
        return None
    to_delete = checkpoints_to_prune(folder, keep, keep_every, also_kept)
    return Pruning(tuple(one for one in to_delete if one.step != newest.step), newest)


def _entries_at(path: Path) -> Iterator[Entry]:
    if _ATTEMPT.fullmatch(path.name):
        with contextlib.suppress(DamagedError):
            for inner in entries(path):
                if match := _FOLDER.fullmatch(inner.name):
                    yield Entry(inner, int(match[2]), _written(inner), None, f"incomplete, in {path.name}")
    elif match := _FOLDER.fullmatch(path.name):
        read = read_checkpoint(path)
        checkpoint = read if isinstance(read, Checkpoint) else None
        problem = _missing(checkpoint) if checkpoint is not None else str(read)
        yield Entry(path, int(match[2]), _written(path), checkpoint, _SET_ASIDE.get(match[1], problem))


def _written(path: Path) -> float:
    """Return the modification time of the manifest, else of the folder; 0 if neither is readable."""
    for place in (path / MANIFEST, path):
        with contextlib.suppress(OSError):
            return place.lstat().st_mtime
    return 0.0


_SET_ASIDE = {
    "damaged-": "moved aside as damaged; you can delete it",
    "misnamed-": "moved aside: it had the name of another step; rename or delete it",
}


def _missing(checkpoint: Checkpoint) -> str:
    """Return the first file that is missing or does not have the size in the manifest."""
    for name, expected in checkpoint.files.items():
        try:
            size = (checkpoint.path / name).stat().st_size
        except OSError as error:
            return f"{name}: {error.strerror or error}"
        if size != expected.size:
            return f"{name}: {size} bytes instead of {expected.size}"
    return ""
