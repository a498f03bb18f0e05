"""Who a run belongs to, and whether this user may change it. Asked before anything is sent, signalled or deleted.

A run directory names processes to signal, jobs to cancel, folders to prune and programs to start, so acting on one
that somebody else made means doing what that user wrote into it.
"""

from __future__ import annotations

import os

from scaletrain_cli.errors import UsageError
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import checkpoint_folder
from scaletrain_cli.safe_files import other_owner, require_own, require_writable, user_name
from scaletrain_cli.spec import RunSpec


def require_own_run(run: RunDir, *, trust_owner: bool, remedy: str) -> None:
    """Raise UsageError where the run directory or its record belongs to another user who is not to be trusted."""
    for path in (run.path, run.record):
        require_own(path, "the run", trust=trust_owner, remedy=remedy)


def require_own_checkpoints(run: RunDir, spec: RunSpec, *, trust_owner: bool) -> None:
    """Raise UsageError where another user has made the folder of this run's checkpoints: what is in it is loaded.

    On Kubernetes the pods make it, as a user of their own.
    """
    folder = checkpoint_folder(run, spec)
    if spec.cluster.scheduler != "kubernetes" and os.path.lexists(folder):
        require_own(folder, "the checkpoint folder", trust=trust_owner, remedy="Use another --run-id or checkpoint.dir")


def require_changeable(run: RunDir, purpose: str) -> None:
    """Raise UsageError, saying what to do, where this user cannot write to the run directory and its journal."""
    require_writable(run.path, purpose)
    if run.events.exists() and not os.access(run.events, os.W_OK, effective_ids=True):
        raise UsageError(
            f"{purpose}: {run.events} cannot be written to by {user_name(os.geteuid())}; it belongs to "
            f"{user_name(run.events.lstat().st_uid)}. Ask that user to do it."
        )


def require_cancellable(run: RunDir, *, trust_owner: bool) -> None:
    """Raise UsageError where this user must not, or cannot, stop the run: before anything is signalled or sent."""
    require_own_run(run, trust_owner=trust_owner, remedy="Ask that user to cancel it")
    require_changeable(run, f"{run.run_id} cannot be cancelled")


def owner_note(run: RunDir) -> str | None:
    """Return a sentence that names the owner of somebody else's run; None for one's own."""
    uid = other_owner(run.path)
    return None if uid is None else f"{run.run_id} belongs to {user_name(uid)}"
