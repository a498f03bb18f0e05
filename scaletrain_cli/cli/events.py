"""`scaletrain events`: the events of a run, one per line."""

import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from scaletrain_cli.cli.elsewhere import switch_if_reachable
from scaletrain_cli.cli.options import AsJson, RunOrNewest, pause
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import find_run_or_newest
from scaletrain_cli.ui.console import say, show_events
from scaletrain_cli.ui.json import print_json, stream_json

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)
_LOOK_EVERY_SECONDS = 0.5
_ASK_EVERY_SECONDS = 3.0


def command(
    run: RunOrNewest = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Show new events until the run has ended.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the events of a run: submissions, starts, checkpoints, findings, signals, rollbacks, ends of attempts.

    With --json the events are those of events.jsonl; with --follow, one JSON object per line.
    """
    from scaletrain_cli.rundir.journal import read_events
    from scaletrain_cli.rundir.record import read_record

    run_dir = find_run_or_newest(run)
    read_record(run_dir)
    if not follow:
        events = read_events(run_dir)
        if as_json:
            print_json({"run_id": run_dir.run_id, "events": events})
        elif events:
            show_events(events)
        else:
            say(f"{run_dir.run_id} has no events yet.")
        return
    from scaletrain_cli.launch.status import is_over, run_status

    shown: list[dict[str, Any]] = []
    asked = 0.0
    while True:
        over = False
        if time.monotonic() - asked >= _ASK_EVERY_SECONDS or not asked:
            status = run_status(run_dir)
            switch_if_reachable(status, len(shown))
            asked, over = time.monotonic(), is_over(run_dir, status)
        events = read_events(run_dir)  # read after the state, so that the last events of an ended run are included
        new = _not_in(events, shown)
        if as_json:
            for event in new:
                stream_json(event)
        else:
            show_events(new)
        shown += new
        if over:
            break
        pause(_LOOK_EVERY_SECONDS)
    if as_json:
        print_json({"run_id": run_dir.run_id})


def _not_in(events: Sequence[dict[str, Any]], shown: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the events that were not shown. Clocks differ, so that a new one may come before those that were."""
    if list(events[: len(shown)]) == list(shown):
        return list(events[len(shown) :])
    left, new = list(shown), []
    for event in events:
        if event in left:
            left.remove(event)
        else:
            new.append(event)
    return new
