"""Delete runs that have ended. An interrupted deletion leaves either a complete run or none.

Objects in the cluster are deleted first, then checkpoints outside the run directory, one by one. The run directory is
then renamed atomically to a hidden name and emptied: a run is either listed and complete, or gone.
"""

import contextlib
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from scaletrain_cli.errors import ScaletrainError, SchedulerError, UsageError
from scaletrain_cli.launch.attempts import newest_checkpoint_step
from scaletrain_cli.launch.backends.registry import backend_for
from scaletrain_cli.launch.job import Job, scheduler_of_job
from scaletrain_cli.launch.status import run_status
from scaletrain_cli.launch.submit import submit_lock
from scaletrain_cli.reasons import Reason, recorded
from scaletrain_cli.rundir.checkpoints import Pruning, committed_folders, plan_pruning, take_inventory
from scaletrain_cli.rundir.evaluations import steps_to_keep
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import RunRecord, checkpoint_folder, read_record, require_own_run
from scaletrain_cli.worker.checkpoint_commit import delete_checkpoint


@contextmanager
def pruning(run: RunDir, keep: int | None, keep_every: int | None, *, dry_run: bool = False) -> Iterator[Pruning]:
    """Yield the checkpoints that may be deleted, and keep the run from being resumed meanwhile unless ``dry_run``.

    ``keep`` and ``keep_every``: None means the setting of the spec.

    Raises UsageError for a run that may be active, ScaletrainError where no checkpoint verifies.
    """
    with contextlib.nullcontext() if dry_run else submit_lock(run):
        record = read_record(run)
        if backend_for(scheduler_of_job(run, record)).job(run, record).may_be_active:
            raise UsageError(Reason("runs.prune-active", {"run": run.run_id}))
        own = record.spec.checkpoint
        every = own.keep_every if keep_every is None else keep_every
        folder = checkpoint_folder(run, record.spec)
        also_kept = steps_to_keep(run, folder, keep_best=own.keep_best, mirror_to=own.mirror.to)
        plan = plan_pruning(folder, own.keep if keep is None else keep, every, also_kept)
        if plan is None:
            none = "none-valid" if committed_folders(folder) else "nothing"
            raise ScaletrainError(Reason(f"runs.prune-{none}", {"run": run.run_id, "folder": str(folder)}))
        yield plan


_LEFT = ".removed-"  # followed by the run id: a run directory that is being deleted, or whose deletion failed
_LEFT_NAME = re.compile(r"\.removed-.+-[0-9a-f]{8}")
_DRAFT_NAME = re.compile(r"\.[A-Za-z0-9].*\.[0-9a-f]{8}")  # in which create_run() makes a run directory
_DRAFT_SECONDS = 7 * 86400.0  # no checkpoint is copied for so long: the process was killed


@dataclass(frozen=True)
class Removal:
    """One run that may be deleted. ``checkpoints``: their folder if it is outside the run directory, else None.

    ``bytes``: the size that the removal frees; ``kept_bytes``: the size of checkpoints that are kept.
    """

    run: RunDir
    state: str
    bytes: int
    newest_checkpoint: int | None
    checkpoints: Path | None
    kept_bytes: int
    identity: tuple[int, int]  # of the run directory: a folder that takes its name later is not deleted

    @property
    def run_id(self) -> str:
        return self.run.run_id


def plan_removal(run: RunDir, *, with_checkpoints: bool) -> Removal:
    """Return what would be deleted. Raises UsageError or SchedulerError if the run must be kept."""
    if run.path.is_symlink():
        raise UsageError(Reason("runs.is-link", {"folder": str(run.path)}))
    require_own_run(run, trust_owner=False, remedy="Ask that user to delete it")
    record = read_record(run)
    _require_over(run, record)
    folder = checkpoint_folder(run, record.spec)
    outside = folder if folder != run.checkpoints and os.path.lexists(folder) else None
    if outside is not None and with_checkpoints:
        status = outside.lstat()
        if not stat.S_ISDIR(status.st_mode) or not outside.is_absolute():
            raise UsageError(Reason("runs.no-checkpoint-folder", {"folder": str(outside)}))
        if status.st_uid not in (os.geteuid(), 0):
            raise UsageError(Reason("runs.checkpoints-of-other-user", {"folder": str(outside)}))
    stored = 0 if outside is None else tree_bytes(outside)
    return Removal(
        run=run,
        state=run_status(run).state,
        bytes=tree_bytes(run.path) + (stored if with_checkpoints else 0),
        newest_checkpoint=newest_checkpoint_step(run, record.spec),
        checkpoints=outside,
        kept_bytes=0 if with_checkpoints else stored,
        identity=_identity(run.path),
    )


def remove(removal: Removal, *, with_checkpoints: bool) -> list[str]:
    """Delete the run; return the names of the objects that were deleted in its cluster.

    Raises UsageError or SchedulerError, with nothing changed, if it was resumed meanwhile, and ScaletrainError if not
    everything could be deleted: its message names what is left.
    """
    run = removal.run
    with submit_lock(run):  # prevents a resume meanwhile
        record = read_record(run)
        _require_over(run, record)
        objects = backend_for(record.spec.cluster.scheduler).remove_ended(run, record)
        if removal.checkpoints is not None and with_checkpoints:
            _remove_checkpoints(removal.checkpoints)
        doomed = run.path.with_name(f"{_LEFT}{run.run_id}-{secrets.token_hex(4)}")
        run.path.rename(doomed)
        if _identity(doomed) != removal.identity:
            doomed.rename(run.path)
            raise UsageError(Reason("runs.replaced", {"folder": str(run.path)}))
    try:
        shutil.rmtree(doomed)
    except OSError as error:
        shutil.rmtree(doomed, ignore_errors=True)  # the rest of it
        if os.path.lexists(doomed):
            params = {"run": run.run_id, "file": error.filename, "said": error.strerror or str(error)}
            why = Reason("runs.files-left", params | {"folder": str(doomed)})
            raise ScaletrainError(why, file=str(doomed)) from error
    return objects


def remove_leftovers(root: Path) -> None:
    """Delete the remains of this user's interrupted removals and submissions below a runs root."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(root):
            status = entry.stat(follow_symlinks=False)
            is_draft = _DRAFT_NAME.fullmatch(entry.name) and time.time() - status.st_mtime > _DRAFT_SECONDS
            is_left = stat.S_ISDIR(status.st_mode) and (is_draft or _LEFT_NAME.fullmatch(entry.name))
            if is_left and status.st_uid == os.geteuid():
                shutil.rmtree(entry.path, ignore_errors=True)


def tree_bytes(folder: Path) -> int:
    """Return the bytes that a folder occupies on disk; links are not followed, unreadable parts are not counted."""
    total, seen = 0, set()
    for parent, folders, files in os.walk(folder, followlinks=False):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    total += status.st_blocks * 512
    return total


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.lstat()
    return status.st_dev, status.st_ino


def _require_over(run: RunDir, record: RunRecord) -> None:
    try:
        job: Job = backend_for(scheduler_of_job(run, record)).job(run, record)
    except SchedulerError as error:
        cause = error.reason or recorded(error.message.rstrip("."))
        params = {"run": run.run_id, "cause": cause, "folder": str(run.path)}
        raise SchedulerError(Reason("runs.state-unknown", params)) from error
    if job.is_active:
        raise UsageError(Reason("runs.active", {"run": run.run_id, "state": job.state}))
    if job.may_be_active:
        raise UsageError(Reason("runs.maybe-active", {"run": run.run_id, "detail": job.why}))


def _remove_checkpoints(folder: Path) -> None:
    """Delete the checkpoints in a folder, then the folder if it is empty."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid not in (os.geteuid(), 0):
            raise UsageError(Reason("runs.checkpoints-of-other-user", {"folder": str(folder)}))
        here = Path(f"/proc/self/fd/{descriptor}")  # this folder, even if another one takes its name meanwhile
        for entry in take_inventory(here):
            if not entry.path.is_symlink():
                delete_checkpoint(entry.path)
        left = [entry.path.name for entry in take_inventory(here)]
    finally:
        os.close(descriptor)
    if left:
        raise ScaletrainError(Reason("runs.checkpoints-left", {"names": left, "folder": str(folder)}))
    with contextlib.suppress(OSError):  # it contains something that is not a checkpoint
        folder.rmdir()
