"""`scaletrain watch`: a living view of a run in the terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from scaletrain_cli.cli.elsewhere import switch_if_reachable
from scaletrain_cli.cli.options import AsJson, RunOrNewest, pause
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import RunDir, find_run_or_newest
from scaletrain_cli.ui.json import print_json, stream_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.view import RunView

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)
_LOOK_SECONDS = 0.5
_LINE_SECONDS = 10.0  # between two lines of a run that only trains


def command(
    run: RunOrNewest = None,
    once: Annotated[bool, typer.Option("--once", help="Print the overview once and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Watch a run: progress, time and money left, curves, speed beside the plan, memory, nodes, events, findings.

    Keys: q quits, 1 to 7 choose a page, ? shows all keys. Works for queued and ended runs. Without a terminal, or with
    TERM=dumb, it prints a line when something changes, until the run has ended. With --json it prints the answer of
    `scaletrain status --json` as one line per change; with --once one answer.
    """
    from scaletrain_cli.ui.watch.terminal import is_capable

    run_dir = find_run_or_newest(run)
    if once:
        from scaletrain_cli.launch.view import read_view

        view = read_view(run_dir)
        if as_json:
            print_json(_document(view))
        else:
            from scaletrain_cli.ui.watch.pages import show_overview

            show_overview(view)
    elif is_capable() and not as_json:
        from scaletrain_cli.launch.view import Reading
        from scaletrain_cli.ui.watch.screen import DRAW_SECONDS, watch_screen

        with Reading(run_dir, DRAW_SECONDS) as reading:
            watch_screen(reading, lambda view: switch_if_reachable(view.status))
    else:
        _follow(run_dir, as_json)


def _follow(run: RunDir, as_json: bool) -> None:
    """Write a line for each change of state, events, findings or step; a step alone for people every 10 seconds."""
    from scaletrain_cli.launch.view import ViewReader
    from scaletrain_cli.ui.watch.pages import show_change

    reader, before, printed = ViewReader(run), None, float("-inf")
    while True:
        view = reader.read()
        switch_if_reachable(view.status)
        is_due = as_json or time.monotonic() - printed >= _LINE_SECONDS
        if before is None or view.is_over or _mark(view, steps=is_due) != _mark(before, steps=is_due):
            if as_json:
                stream_json(_document(view))
            else:
                show_change(view, before)
            before, printed = view, time.monotonic()
        if view.is_over:
            break
        pause(_LOOK_SECONDS)
    if as_json:
        print_json({"run_id": run.run_id})


def _mark(view: RunView, *, steps: bool = True) -> tuple[object, ...]:
    """Return what differs between two views that are shown apart."""
    status = view.status
    findings = tuple(finding.code for finding in view.diagnosis.findings)
    return (status.state, status.attempt, str(status.reason), len(view.events), findings, status.step if steps else 0)


def _document(view: RunView) -> dict[str, object]:
    return {**view.to_json(), "schema": "scaletrain.watch/v1", "is_over": view.is_over}
