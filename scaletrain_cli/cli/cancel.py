"""`scaletrain cancel`: stop a run, or all runs of a sweep; running attempts save a checkpoint first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, TrustOwner, Yes, confirm, run_argument, run_to_change
from scaletrain_cli.errors import ExitCode, Problem, SchedulerError, UsageError
from scaletrain_cli.rundir.paths import Sweep, find_run_or_sweep
from scaletrain_cli.text import counted, listed
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.run_status import RunStatus

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    run: Annotated[
        str | None,
        run_argument(
            "Run id, unique prefix of a run id, run directory, or sweep (all of its runs). Default: the newest "
            "run, once confirmed."
        ),
    ] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Kubernetes: also delete pods of unreachable nodes. Use only if these nodes are powered off.",
        ),
    ] = False,
    trust_owner: TrustOwner = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a run. A running attempt saves a checkpoint first; `scaletrain resume` can continue the run later.

    For a sweep, cancel every run that has not ended, after one confirmation. If one cannot be cancelled, the others
    still are.
    """
    from scaletrain_cli.launch.cancel import cancel, require_cancel

    named = find_run_or_sweep(run_to_change(run, yes))
    if isinstance(named, Sweep):
        _cancel_sweep(named, force=force, trust_owner=trust_owner, yes=yes, as_json=as_json)
        return
    status = require_cancel(named, force=force, trust_owner=trust_owner)
    if status.state in _ENDS:
        say(f"{named.run_id} is not running: it {_ENDS[status.state]}. Nothing was done.")
        if as_json:
            print_json({"run_id": named.run_id, "state": status.state, "cancelled": False, "removed": []})
        return
    step = f"step {status.step} of {status.total_steps}" if status.step_seen else "its step was not seen"
    confirm(f"Cancel {named.run_id} ({status.state}, {step})?", yes)
    removed = cancel(named, force=force, trust_owner=trust_owner, seen=status).removed
    if force:
        say(f"removed {', '.join(removed)}" if removed else "there was nothing left to remove.")
    if as_json:  # with the state before the cancellation
        print_json({"run_id": named.run_id, "state": status.state, "cancelled": True, "removed": list(removed)})
    say(f"{_done(status)}. `scaletrain resume {named.run_id}` continues it.")


def _done(status: RunStatus) -> str:
    """Return what cancel did, by the state of the job. A save is reported by `status` once it is on disk."""
    from scaletrain_cli.spec.backend_traits import backend_traits

    newest = status.last_checkpoint_step
    kept = "it has no checkpoint" if status.files_seen else "its checkpoints were not seen"
    kept = kept if newest is None else f"its newest checkpoint is of step {newest}"
    shared = backend_traits(status.scheduler).shared_run_directory
    if not shared and status.job.may_be_active and newest is None and not status.attempt:
        gone = f"`scaletrain status {status.run_id}` shows when its pods are gone"  # their volume is not seen here
        return f"{status.run_id} was asked to save and stop; {gone}"
    if status.job.state == "queued":
        return f"cancelled {status.run_id}, which was queued; {kept}"
    if status.job.may_be_active:
        asked = "resumed and asked to save and stop" if status.job.state == "suspended" else "asked to save and stop"
        return (
            f"{status.run_id} was {asked}; now {kept}, and `scaletrain status {status.run_id}` shows the one it saves"
        )
    return f"cancelled {status.run_id}; {kept}"


_ENDS = {
    "finished": "has finished",
    "failed": "has failed",
    "cancelled": "was already cancelled",
    "ended-idle": "was already ended, as it did nothing",
}


def _cancel_sweep(sweep: Sweep, *, force: bool, trust_owner: bool, yes: bool, as_json: bool) -> None:
    """Cancel every active run of a sweep after one confirmation.

    Raises SchedulerError, after cancelling the others, if the scheduler rejected a run.
    """
    from scaletrain_cli.launch.backends.registry import backend_for
    from scaletrain_cli.launch.run_status import OVER
    from scaletrain_cli.launch.sweep import cancel_members, sweep_status

    status = sweep_status(sweep)
    members, states = status.members, status.states_in_words
    schedulers = {member.status.scheduler for member in members if member.status is not None}
    unable = [backend_for(name).traits.display_name for name in sorted(schedulers) if not backend_for(name).can_force]
    if force and unable:
        raise UsageError(
            f"--force has no effect on {listed(unable)}, where the sweep {sweep.name} runs.",
            remedy="Remove the option.",
        )
    living = [member for member in members if member.state not in OVER]
    if not living:
        say(f"no run of the sweep {sweep.name} is running ({states}). Nothing was done.")
        _answer_sweep(as_json, sweep, (), ())
        return
    which = f"all {len(members)}" if len(living) == len(members) else f"{len(living)} of the {len(members)}"
    confirm(f"Cancel {which} runs of the sweep {sweep.name} ({states})?", yes)
    done = cancel_members(members, force=force, trust_owner=trust_owner)
    _answer_sweep(as_json, sweep, done.cancelled, [name for name, _ in done.refused])
    if done.cancelled:
        one = len(done.cancelled) == 1
        over = f"; {len(done.over)} had already ended" if done.over else ""
        say(
            f"cancelled {counted(len(done.cancelled), 'run')} of the sweep {sweep.name}{over}; "
            f"those that were running save a checkpoint and stop. `scaletrain resume {done.cancelled[0]}` continues "
            f"{'it' if one else 'the first of them'}."
        )
    if done.refused:
        problems = tuple(Problem(name, "", why) for name, why in done.refused)
        raise SchedulerError(
            f"{counted(len(problems), 'run')} of the sweep {sweep.name} could not be cancelled", problems
        )


def _answer_sweep(as_json: bool, sweep: Sweep, cancelled: Sequence[str], refused: Sequence[str]) -> None:
    if as_json:
        details = {"sweep": sweep.name, "cancelled": list(cancelled), "refused": list(refused)}
        print_json({"schema": "scaletrain.cancel-sweep/v1"} | details)
