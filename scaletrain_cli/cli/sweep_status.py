"""`scaletrain status SWEEP` and `scaletrain cancel SWEEP`: what these verbs do where they are given a whole sweep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from scaletrain_cli.errors import ExitCode, Problem, SchedulerError, UsageError

if TYPE_CHECKING:
    from scaletrain_cli.launch.sweep_status import SweepStatus
    from scaletrain_cli.rundir.sweeps import Sweep

_TIMED_OUT = 124  # as timeout(1)
_POLL_SECONDS = 2.0
_POLL_SECONDS_PER_RUN = 0.2  # of hundreds, each of which is a question to the controller


def show_status_of_sweep(sweep: Sweep, wait_seconds: float | None, as_json: bool) -> int:
    """Returns the exit code: with a wait 0 where all runs have finished, 124 where not all ended in time."""
    from scaletrain_cli.launch.sweep_status import exit_code_of_all, look_at

    if wait_seconds is None:
        status, code = look_at(sweep), int(ExitCode.DONE)
    else:
        status, in_time = _wait(sweep, wait_seconds)
        code = exit_code_of_all(status.members) if in_time else _TIMED_OUT
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json(status.to_json())
    else:
        from scaletrain_cli.ui.sweep import show_sweep

        show_sweep(status)
    return code


def cancel_sweep(sweep: Sweep, *, force: bool, trust_owner: bool, yes: bool, as_json: bool) -> None:
    """Asks once for all. Raises SchedulerError, after the others were told, where a run could not be."""
    from scaletrain_cli.cli.options import confirm
    from scaletrain_cli.launch.sweep_status import OVER, cancel_members, look_at
    from scaletrain_cli.ui.console import say

    status = look_at(sweep)
    members, states = status.members, status.states_in_words
    schedulers = {member.status.scheduler for member in members if member.status is not None}
    if force and schedulers - {"kubernetes"}:
        raise UsageError(f"--force removes pods, and {sweep.name} is on {', '.join(sorted(schedulers))}.")
    living = [member for member in members if member.state not in OVER]
    if not living:
        say(f"no run of the sweep {sweep.name} is running ({states}). Nothing was done.")
        _answer(as_json, sweep, (), ())
        return
    which = f"all {len(members)}" if len(living) == len(members) else f"{len(living)} of the {len(members)}"
    confirm(f"Stop {which} runs of the sweep {sweep.name} ({states})?", yes)
    done = cancel_members(members, force=force, trust_owner=trust_owner)
    _answer(as_json, sweep, done.cancelled, [name for name, _ in done.refused])
    if done.cancelled:
        one = len(done.cancelled) == 1
        over = f"; {len(done.over)} were over before" if done.over else ""
        say(
            f"cancelled {len(done.cancelled)} runs of the sweep {sweep.name}{over}; "
            f"what was running was asked to save and stop. `scaletrain resume {done.cancelled[0]}` continues "
            f"{'it' if one else 'the first of them'}."
        )
    if done.refused:
        problems = tuple(Problem(name, "", why) for name, why in done.refused)
        raise SchedulerError(f"{len(problems)} runs of the sweep {sweep.name} could not be cancelled", problems)


def _answer(as_json: bool, sweep: Sweep, cancelled: Sequence[str], refused: Sequence[str]) -> None:
    if as_json:
        from scaletrain_cli.ui.json import print_json

        told = {"sweep": sweep.name, "cancelled": list(cancelled), "refused": list(refused)}
        print_json({"schema": "scaletrain.cancel-sweep/v1"} | told)


def _wait(sweep: Sweep, seconds: float) -> tuple[SweepStatus, bool]:
    """How it stands in the end, and whether that was in time."""
    from scaletrain_cli.launch.sweep_status import look_again, look_at
    from scaletrain_cli.ui.live import StatusLine

    deadline, status = time.monotonic() + seconds, look_at(sweep)
    with StatusLine() as line:
        while True:
            over, runs = sum(member.is_over or member.status is None for member in status.members), len(sweep.runs)
            if over == runs:
                return status, True
            if time.monotonic() >= deadline:
                return status, False
            line.show(f"{over}/{runs} over", over, runs, status.states_in_words)
            pause = max(_POLL_SECONDS, _POLL_SECONDS_PER_RUN * (runs - over))
            time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
            status = look_again(status)
