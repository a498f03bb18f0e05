"""`scaletrain rm`: delete runs that have ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrain_cli.cli.options import AsJson, Yes, can_ask, confirm, run_argument
from scaletrain_cli.errors import ExitCode, Problem, ScaletrainError, UsageError
from scaletrain_cli.rundir.paths import find_runs, runs_root
from scaletrain_cli.text import bytes_text, counted, visible
from scaletrain_cli.ui.console import say, warn
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.remove import Removal

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    runs: Annotated[
        list[str], run_argument("Run ids, unique prefixes of run ids, run directories, or sweeps (all of their runs).")
    ],
    checkpoints: Annotated[
        bool, typer.Option("--checkpoints", help="Also delete checkpoints in checkpoint.dir (default: keep them).")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be deleted without deleting anything.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs that have ended: run directory, logs, checkpoints in it, and objects of the job left in the cluster.

    Deletes nothing if one of the runs is active or belongs to another user. Asks for confirmation once; without a
    terminal, --yes is required. Datasets, code shared with other runs and Weights & Biases data are kept.
    """
    from scaletrain_cli.launch.remove import plan_removal, remove, remove_leftovers

    removals = [plan_removal(run, with_checkpoints=checkpoints) for run in find_runs(runs)]
    for one in removals:
        step = "no checkpoint" if one.newest_checkpoint is None else f"newest checkpoint step {one.newest_checkpoint}"
        say(f"{one.run_id}: {one.state}, {step}, {bytes_text(one.bytes)}")
        if one.checkpoints is not None and not checkpoints:
            warn(
                f"checkpoints in {one.checkpoints} are kept ({bytes_text(one.kept_bytes)}); --checkpoints deletes them"
            )
    total = sum(one.bytes for one in removals)
    if dry_run:
        _answer(as_json, removals, dry_run=True)
        say(f"{counted(len(removals), 'run')} would be deleted, {bytes_text(total)}")
        return
    if not yes and not can_ask():
        raise UsageError("cannot ask for confirmation without a terminal.", remedy="Add --yes to delete the runs.")
    confirm(f"Delete {counted(len(removals), 'run')}, {bytes_text(total)}? This cannot be undone.", yes)
    done: list[Removal] = []
    failed: list[tuple[str, ScaletrainError]] = []
    for one in removals:
        try:
            objects = remove(one, with_checkpoints=checkpoints)
        except ScaletrainError as error:
            failed.append((one.run_id, error))
            continue
        done.append(one)
        if objects:
            say(f"deleted {', '.join(objects)} in the cluster of {one.run_id}")
    remove_leftovers(runs_root())
    _answer(as_json, done, dry_run=False)
    if done:
        say(f"deleted {counted(len(done), 'run')}, {bytes_text(sum(one.bytes for one in done))}")
    if len(failed) == 1:
        raise failed[0][1]
    if failed:
        worst = max((error for _, error in failed), key=lambda error: error.exit_code)
        worst.message = f"{len(failed)} runs were not deleted"
        worst.problems = tuple(Problem(name, "", str(error)) for name, error in failed)
        raise worst


def _answer(as_json: bool, removals: list[Removal], *, dry_run: bool) -> None:
    if not as_json:
        for one in removals:
            typer.echo(visible(one.run_id))
        return
    rows: list[dict[str, Any]] = [
        {
            "run_id": one.run_id,
            "run_dir": str(one.run.path),
            "state": one.state,
            "bytes": one.bytes,
            "newest_checkpoint_step": one.newest_checkpoint,
            "checkpoints_left": None if one.checkpoints is None or not one.kept_bytes else str(one.checkpoints),
        }
        for one in removals
    ]
    print_json({"dry_run": dry_run, "deleted": rows})
