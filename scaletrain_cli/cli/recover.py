"""`scaletrain recover`: resume runs whose jobs were lost, once or again and again."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.options import AsJson, OnLoginNode, pause, run_argument, seconds_of
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.paths import find_runs
from scaletrain_cli.text import seconds_text, visible
from scaletrain_cli.ui.console import say, warn
from scaletrain_cli.ui.json import print_json
from scaletrain_cli.unexpected import known_error

if TYPE_CHECKING:
    from scaletrain_cli.launch.recover import Recovery

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    runs: Annotated[
        list[str] | None,
        run_argument("Run ids, run directories, or sweeps (default: all your runs that set restarts.lost)."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Look again after this time, until Ctrl-C; for cron, leave it out."),
    ] = None,
    cluster: OnLoginNode = None,
    as_json: AsJson = False,
) -> None:
    """Resume runs whose jobs were lost, where their spec asks for it with restarts.lost.

    A job is lost if a node failed without a requeue, if another user or the site deleted it, or if its nodes did not
    match the plan (code 5) as often as restarts.node allows. A run that you cancelled is never resumed. The first
    resume comes a minute after the loss, each further one after twice the time. Prints the ids of the runs that it
    resumes.
    """
    from scaletrain_cli.launch.recover import own_runs, recover_runs
    from scaletrain_cli.rundir.record import require_own_run

    if every is not None and as_json:
        raise UsageError("--every cannot be combined with --json. Call it again and again instead.")
    seconds = None if every is None else seconds_of("--every", every)
    if seconds is not None and seconds < 1:  # each look asks the scheduler about each run
        raise UsageError(f"--every {every}: must be at least 1s, such as 5m. Leave it out to look once.")
    while True:
        try:
            chosen = find_runs(runs) if runs else own_runs()
        except OSError as error:  # the file system of the runs root may fail for a moment
            if seconds is None:
                raise
            warn(str(known_error(error, "recover")))
            chosen = []
        for run in chosen if runs else ():
            require_own_run(run, trust_owner=False, remedy="Let its owner run this command")
        done = recover_runs(chosen, (lambda recovery: None) if as_json else _show)
        if as_json:
            print_json(done.to_json())
        else:
            for name, unknown in done.errors.items():
                warn(f"{name}: {unknown}")
        if seconds is None:
            break
        pause(seconds)
    if done.errors:
        raise typer.Exit(int(next(iter(done.errors.values())).exit_code))
    if any(recovery.state == "refused" for recovery in done.found):
        raise typer.Exit(int(ExitCode.CRASHED))


def _show(recovery: Recovery) -> None:
    name, number = recovery.run.run_id, f"{recovery.number} of {recovery.allowed}"
    if recovery.state == "resumed":
        say(f"{name}: resume {number} as job {recovery.job_id}; {recovery.why}")
        typer.echo(visible(name))
    elif recovery.state == "waiting":
        left = max(0.0, (recovery.after or 0.0) - time.time())
        say(f"{name}: resume {number} follows in {seconds_text(left)}; {recovery.why}")
    elif recovery.state == "used-up":
        used_up = f"restarts.lost = {recovery.allowed} is used up"
        say(f"{name}: {used_up}; `scaletrain resume {name}` continues it; {recovery.why}")
    else:
        warn(f"{name} is lost and cannot be resumed: {recovery.why}")
