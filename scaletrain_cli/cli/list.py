"""`scaletrain list`: runs under the runs root, newest first."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from scaletrain_cli.cli.elsewhere import name_clusters
from scaletrain_cli.cli.options import AsJson, OnLoginNode, completer, seconds_of
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.rundir.paths import RunDir, find_sweep, list_runs, runs_root, submitted_at
from scaletrain_cli.text import counted, did_you_mean
from scaletrain_cli.ui.console import say
from scaletrain_cli.ui.json import print_json

if TYPE_CHECKING:
    from scaletrain_cli.launch.run_status import RunStatus

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def state_groups() -> dict[str, frozenset[str]]:
    """Return the states selected by each value of --state."""
    from scaletrain_cli.launch.run_status import DAMAGED, OVER, RunState

    states = frozenset((*get_args(RunState), DAMAGED))
    return {
        "active": states - {*OVER, DAMAGED},
        "over": frozenset(OVER),
        **{name: frozenset((name,)) for name in states},
    }


complete_state = completer(lambda: sorted(state_groups()))


def command(
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=0, help="Maximum number of runs to show; 0 shows all.")
    ] = 20,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="Show only the runs of this sweep.")] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATE",
            help="Show only runs in this state, e.g. running; also active or over; repeatable.",
            autocompletion=complete_state,
        ),
    ] = None,
    cluster: OnLoginNode = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Show only runs that were submitted in the last TIME, e.g. 12h or 2d."),
    ] = None,
    mine: Annotated[bool, typer.Option("--mine", help="Show only your own runs.")] = False,
    as_json: AsJson = False,
) -> None:
    """List the runs under the runs root ($SCALETRAIN_RUNS, your clusters.yaml, or ./runs), newest first.

    States: queued, running, suspended, ending, preempted, finished, failed, cancelled, ended-idle, unknown,
    damaged.
    """
    from scaletrain_cli.launch.status import run_statuses, runs_in_states

    states = _states(state or ())
    chosen = list_runs() if sweep is None else find_sweep(sweep).runs
    earliest = float("-inf") if since is None else time.time() - seconds_of("--since", since)
    submitted = {run: submitted_at(run) for run in chosen}
    newest_first = sorted(chosen, key=lambda run: submitted[run], reverse=True)
    runs = [run for run in newest_first if submitted[run] > earliest and not (mine and _is_of_another(run))]
    fitting = runs if states is None else runs_in_states(runs, states)
    shown = fitting[:limit] if limit else fitting
    left = len(fitting) - len(shown)
    # A run that was removed since it was listed has no row.
    existing = [
        (run, status) for run, status in zip(shown, run_statuses(shown), strict=True) if os.path.lexists(run.path)
    ]
    if as_json:
        rows = [_row(run, status) for run, status in existing]
        print_json({"runs_root": str(runs_root()), "runs": rows, "not_shown": left})
        return
    if not runs and submitted:
        chosen_by = [*([f"was submitted in the last {since}"] if since else []), *(["is yours"] if mine else [])]
        say(f"none of the {counted(len(submitted), 'run')} under {runs_root()} {' and '.join(chosen_by)}.")
    elif not runs:
        say(f"no runs under {runs_root()}. Run `scaletrain submit SPEC` to start one.")
    elif not existing:
        say(f"none of the {counted(len(runs), 'run')} under {runs_root()} is {' or '.join(state or ())}.")
    else:
        from scaletrain_cli.ui.tables import show_runs

        show_runs([(run, submitted[run], status, _eta_seconds(run, status)) for run, status in existing])
        if left:
            say(f"{counted(left, 'older run')} not shown; --limit 0 shows all")
    name_clusters("list")


def _is_of_another(run: RunDir) -> bool:
    """Return whether the record belongs to another user; root's runs are root's only."""
    try:
        return run.record.stat().st_uid != os.geteuid()
    except OSError:  # deleted in the meantime
        return True


def _states(given: Sequence[str]) -> frozenset[str] | None:
    """Return the states selected by --state, or None without the option. Raises UsageError."""
    if not given:
        return None
    groups = state_groups()
    if unknown := [name for name in given if name not in groups]:
        remedy = f"{did_you_mean(unknown[0], groups)}Use {', '.join(sorted(groups))}."
        raise UsageError(f"--state {unknown[0]}: unknown state.", remedy=remedy)
    return frozenset().union(*(groups[name] for name in given))


def _row(run: RunDir, status: RunStatus | UsageError) -> dict[str, Any]:
    from scaletrain_cli.launch.run_status import DAMAGED

    if isinstance(status, UsageError):
        return {"run_id": run.run_id, "state": DAMAGED, "error": status.to_json()}
    return status.to_json() | {"eta_seconds": _eta_seconds(run, status)}


def _eta_seconds(run: RunDir, status: RunStatus | UsageError) -> float | None:
    from scaletrain_cli.launch.status import eta_seconds

    with contextlib.suppress(UsageError):  # damaged since its status was read
        return None if isinstance(status, UsageError) else eta_seconds(run, status)
    return None
