"""Checkpoints in a mirror: ``checkpoints/0001/step-00000500-3f2a9c0d1b4e/``, the manifest last.

The name has the generation of its owner, the step, and a hash of the files' hashes: another save of the same step is
another folder. A folder without ``manifest.json`` is not a checkpoint, and deleting begins with it.
"""

import hashlib
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from scaletrain_cli.mirror.claims import Claim
from scaletrain_cli.mirror.stores import LocalFileError, MirrorError, MirrorStore, Stored, Throttle
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.checkpoints import (
    MANIFEST,
    Checkpoint,
    Defect,
    FileDigest,
    checkpoint_path,
    has_all_files,
    parse_manifest,
    read_checkpoint,
)
from scaletrain_cli.safe_files import replace_file

FOLDER = "checkpoints"
_NAME = re.compile(rf"({FOLDER}/(\d{{4,}})/step-(\d{{8,}})-([0-9a-f]{{12}}))/(.+)")
FILES_AT_ONCE = 4


@dataclass(frozen=True)
class MirroredFolder:
    """A folder of the mirror. ``files``: by their names in it; it is a checkpoint if the manifest is among them."""

    name: str
    generation: int
    step: int
    identity: str
    files: dict[str, Stored] = field(default_factory=dict)

    @property
    def is_committed(self) -> bool:
        return MANIFEST in self.files


def identity_of(files: dict[str, FileDigest] | Iterable[tuple[str, FileDigest]]) -> str:
    """Return the part of a folder's name that tells saves of one step apart."""
    pairs = sorted(dict(files).items())
    text = "".join(f"{name}\n{digest.size}\n{digest.sha256}\n" for name, digest in pairs)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def list_folders(store: MirrorStore) -> list[MirroredFolder]:
    """Return all folders, by step and generation, also those without a manifest."""
    by_name: dict[str, MirroredFolder] = {}
    for name, stored in store.list(FOLDER).items():
        if match := _NAME.fullmatch(name):
            folder = by_name.setdefault(match[1], MirroredFolder(match[1], int(match[2]), int(match[3]), match[4]))
            folder.files[match[5]] = stored
    return sorted(by_name.values(), key=lambda folder: (folder.step, folder.generation, folder.identity))


def in_line(folders: Iterable[MirroredFolder], claims: Sequence[Claim]) -> list[MirroredFolder]:
    """Return the committed checkpoints that belong to the run, the oldest first.

    Not those of a step after the one from which a later owner has continued: that owner trains these steps again.
    """
    lineage = []
    for folder in folders:
        later = [claim.from_step for claim in claims if claim.generation > folder.generation]
        if folder.is_committed and all(step is None or folder.step <= step for step in later):
            lineage.append(folder)
    return lineage


def upload_checkpoint(
    store: MirrorStore,
    checkpoint: Checkpoint,
    generation: int,
    throttle: Throttle,
    before_commit: Callable[[], None] = lambda: None,
) -> MirroredFolder:
    """Copy a checkpoint, verify each stored file, and write the manifest; return the folder in the mirror.

    Files that an earlier process has stored are kept. ``before_commit`` is called when all files are stored; what it
    raises leaves no checkpoint. Raises LocalFileError if a file here is damaged or missing, and errors of the store.
    """
    manifest = _manifest(checkpoint)
    identity = identity_of(dict(checkpoint.files))
    folder = MirroredFolder(
        f"{FOLDER}/{generation:04d}/{checkpoint_path(Path(), checkpoint.step).name}-{identity}",
        generation,
        checkpoint.step,
        identity,
    )
    if not has_all_files(checkpoint):
        raise LocalFileError(Reason("mirror.files-not-here", {"checkpoint": checkpoint.path.name}))
    there = store.list(folder.name)

    def copy(name: str) -> None:
        target, path, digest = f"{folder.name}/{name}", checkpoint.path / name, checkpoint.files[name]
        stored = there.get(target)
        if stored is None or not store.holds(target, stored, path, digest):
            store.upload(target, path, digest, throttle)

    largest_first = sorted(checkpoint.files, key=lambda name: -checkpoint.files[name].size)
    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="mirror") as pool:
        copies = [pool.submit(copy, name) for name in largest_first]
        try:
            for upload in copies:
                upload.result()
        except BaseException:
            for upload in copies:
                upload.cancel()
            raise
    before_commit()
    store.write(f"{folder.name}/{MANIFEST}", manifest)
    folder.files.update(
        {name: Stored(digest.size) for name, digest in checkpoint.files.items()} | {MANIFEST: Stored(len(manifest))}
    )
    return folder


def update_manifest(store: MirrorStore, folder: MirroredFolder, checkpoint: Checkpoint) -> None:
    """Write the manifest again, which training has marked clean since."""
    store.write(f"{folder.name}/{MANIFEST}", _manifest(checkpoint))


def delete_folder(store: MirrorStore, folder: MirroredFolder) -> None:
    """Delete a checkpoint, the manifest first, so that a partly deleted one is not a checkpoint."""
    if folder.is_committed:
        store.delete(f"{folder.name}/{MANIFEST}")
    for name in folder.files:
        if name != MANIFEST:
            store.delete(f"{folder.name}/{name}")


def read_mirrored(store: MirrorStore, folder: MirroredFolder) -> Checkpoint | Defect:
    """Return the checkpoint as its manifest in the mirror states it, or its defect. Reads no other file."""
    content = store.read(f"{folder.name}/{MANIFEST}")
    if content is None:
        return Defect("damaged", f"{folder.name}/{MANIFEST}: missing")
    checkpoint = parse_manifest(content, checkpoint_path(Path(), folder.step))
    if isinstance(checkpoint, Checkpoint) and identity_of(dict(checkpoint.files)) != folder.identity:
        return Defect("damaged", f"{folder.name}/{MANIFEST}: is the manifest of other files")
    return checkpoint


def folders_to_delete(
    folders: Sequence[MirroredFolder],
    claims: Sequence[Claim],
    keep: int,
    keep_every: int | None,
    invalid: Collection[int] = (),
) -> list[MirroredFolder]:
    """Return what retention does not keep: the ``keep`` newest, multiples of ``keep_every``, and never the newest one.

    Also folders that no process will complete: those of earlier owners without a manifest or outside the line.
    ``invalid``: steps whose checkpoints are kept only if there is no other.
    """
    line = in_line(folders, claims)
    line = [folder for folder in line if folder.step not in invalid] or line
    newest: dict[int, MirroredFolder] = {folder.step: folder for folder in line}  # of a step the last owner's
    recent = sorted(newest)[-max(1, keep) :]
    kept = [folder for step, folder in newest.items() if step in recent or (keep_every and step % keep_every == 0)]
    return [folder for folder in folders if folder not in kept]


def _manifest(checkpoint: Checkpoint) -> bytes:
    """Return the manifest as it is now, which must still be that of the checkpoint. Raises LocalFileError."""
    current = read_checkpoint(checkpoint.path)
    if not isinstance(current, Checkpoint) or current.files != checkpoint.files:
        raise LocalFileError(Reason("mirror.local-file-missing", {"file": str(checkpoint.path / MANIFEST)}))
    return (checkpoint.path / MANIFEST).read_bytes()


def download_checkpoint(
    store: MirrorStore,
    folder: MirroredFolder,
    checkpoint: Checkpoint,
    target: Path,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Write a checkpoint to the folder ``target``, each file verified, the manifest last.

    Raises MirrorError if a file is missing or damaged; files that were received remain for another try.
    """
    manifest = store.read(f"{folder.name}/{MANIFEST}")
    if manifest is None:
        raise MirrorError(Reason("mirror.damaged", {"file": f"{store.place}/{folder.name}/{MANIFEST}", "reads": 1}))

    def fetch(name: str) -> None:
        store.download(f"{folder.name}/{name}", target / name, checkpoint.files[name], on_bytes)

    with ThreadPoolExecutor(FILES_AT_ONCE, thread_name_prefix="mirror") as pool:
        for download in [pool.submit(fetch, name) for name in checkpoint.files]:
            download.result()
    replace_file(target / MANIFEST, manifest)
