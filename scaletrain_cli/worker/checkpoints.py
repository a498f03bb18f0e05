"""The checkpoint API of a running attempt, for training programs that write their own files. No torch."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from scaletrain_cli.rundir.checkpoints import (
    Checkpoint,
    FileDigest,
    checkpoint_path,
    checkpoints_to_prune,
    latest_valid,
)
from scaletrain_cli.worker.checkpoint_commit import (
    HashingWriter,
    adopt_folder,
    commit_checkpoint,
    digest_file,
    open_attempt,
    remove_checkpoint,
    scratch_folder,
    stage_checkpoint,
    staging_path,
)


class StagedCheckpoint:
    """The files of one rank in a checkpoint that is not committed yet; ``digests``: those of durable files.

    File names are relative to ``folder``, with / between folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.digests: dict[str, FileDigest] = {}

    @contextlib.contextmanager
    def file(self, name: str) -> Iterator[HashingWriter]:
        """Yield a file object for ``torch.save`` and the like: it hashes what is written, and is fsynced on exit.

        Raises OSError.
        """
        writer = HashingWriter(self.folder / name)
        yield writer
        self.digests[name] = writer.close()

    def add(self, name: str) -> None:
        """Make a file that is already in the folder durable and hash it. Raises OSError."""
        self.digests[name] = digest_file(self.folder / name)

    def names(self) -> list[str]:
        """Return the names of all files in the folder, also in folders below it."""
        found = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        return sorted(path.relative_to(self.folder).as_posix() for path in found)


class Checkpoints:
    """The checkpoint folder of a run, as one attempt uses it.

    Every call that writes raises SupersededAttemptError once a later attempt has begun.
    """

    def __init__(
        self, folder: Path, attempt: int, world_size: int, *, keep: int = 3, keep_every: int | None = None
    ) -> None:
        self.folder, self.attempt, self.world_size = folder, attempt, world_size
        self._keep, self._keep_every = keep, keep_every

    def latest(self) -> Checkpoint | None:
        """Return the latest valid checkpoint; None if there is none. Reads and verifies all of its bytes."""
        return latest_valid(self.folder)[0]

    def open(self) -> None:
        """Make this attempt the only writer. Call once, on one rank, before any save. Raises OSError."""
        open_attempt(self.folder, self.attempt)

    def folder_of(self, step: int) -> Path:
        """Return the folder of the committed checkpoint of ``step``, for ranks that did not call latest()."""
        return checkpoint_path(self.folder, step)

    def stage(self, step: int) -> StagedCheckpoint:
        """Begin the checkpoint of ``step``. Call on every rank that writes to it. Raises OSError."""
        return StagedCheckpoint(stage_checkpoint(self.folder, self.attempt, step))

    def staged(self, step: int) -> StagedCheckpoint:
        """Return the checkpoint of ``step`` that another rank has staged or adopted."""
        return StagedCheckpoint(staging_path(self.folder, self.attempt, step))

    def scratch(self) -> Path:
        """Return a folder of this attempt for files of a library; the next attempt removes it. Raises OSError."""
        return scratch_folder(self.folder, self.attempt)

    def adopt(self, step: int, folder: Path) -> StagedCheckpoint:
        """Take ``folder``, which a library wrote below ``scratch()``, as the files of the checkpoint of ``step``.

        Call on one rank, after all ranks have written. Then ``add`` each of ``names()``, on any ranks, and commit.
        """
        return StagedCheckpoint(adopt_folder(self.folder, self.attempt, step, folder))

    def commit(self, step: int, files: Mapping[str, FileDigest], *, clean: bool = True) -> Checkpoint:
        """Commit the staged files as a checkpoint, and delete checkpoints that retention does not keep. Raises OSError.

        Call on one rank, after all ranks' files are durable, with the digests of all. ``clean``: training was healthy
        up to here, so a rollback may use this checkpoint.
        """
        path = commit_checkpoint(
            self.folder, step, files, world_size=self.world_size, clean=clean, attempt=self.attempt
        )
        for old in checkpoints_to_prune(self.folder, self._keep, self._keep_every):
            remove_checkpoint(old.path, self.attempt)
        return Checkpoint(path, step, self.world_size, clean, self.attempt, files)
