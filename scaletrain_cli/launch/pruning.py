"""Deleting checkpoints by hand: only of a run that nothing trains, and never what it would go on from."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from scaletrain_cli.errors import ScaletrainError, UsageError
from scaletrain_cli.launch.scheduler import Scheduler, scheduler_for
from scaletrain_cli.launch.submission import read_submission, submit_lock
from scaletrain_cli.rundir.committing import delete
from scaletrain_cli.rundir.inventory import Pruning, plan_pruning
from scaletrain_cli.rundir.paths import RunDir
from scaletrain_cli.rundir.record import checkpoint_folder, read_record


@contextmanager
def pruning(
    run: RunDir, keep: int | None, keep_every: int | None, scheduler: Scheduler | None = None
) -> Iterator[Pruning]:
    """What may be deleted, while nobody can resume the run. None in either argument: as the run's spec has it.

    Raises UsageError for a run that may be active, ScaletrainError where no checkpoint verifies.
    """
    with submit_lock(run):
        record, submission = read_record(run), read_submission(run)
        name = submission.scheduler if submission else record.spec.cluster.scheduler
        if (scheduler or scheduler_for(name)).job(run, record).may_be_active:
            raise UsageError(
                f"{run.run_id} is still active, or was started on a host that must be asked: it prunes by itself. "
                f"Set checkpoint.keep, or wait for its end."
            )
        own = record.spec.checkpoint
        every = own.keep_every if keep_every is None else keep_every
        found = plan_pruning(checkpoint_folder(run, record.spec), own.keep if keep is None else keep, every)
        if found is None:
            raise ScaletrainError(
                f"no checkpoint of {run.run_id} verifies, so none was deleted. "
                f"`scaletrain checkpoint verify {run.run_id}` says what is wrong with each."
            )
        yield found


def carry_out(found: Pruning) -> None:
    """Delete what pruning() has found, within it."""
    for checkpoint in found.doomed:
        delete(checkpoint.path)
