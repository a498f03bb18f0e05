"""`scaletrain list`: all runs, newest first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from scaletrain_cli.cli.options import AsJson
from scaletrain_cli.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from scaletrain_cli.launch.status import RunStatus
    from scaletrain_cli.rundir.paths import RunDir

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(
    limit: Annotated[
        int, typer.Option("--limit", "-n", metavar="N", min=0, help="How many of the newest; 0 for all.")
    ] = 20,
    sweep: Annotated[
        str | None, typer.Option("--sweep", metavar="NAME", help="Only the runs of this sweep; else those of all.")
    ] = None,
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state",
            metavar="STATE",
            help="Only runs in this state, as in running; also active or over; repeatable.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the runs under the runs root ($SCALETRAIN_RUNS, your clusters.yaml, or ./runs), newest first."""
    from scaletrain_cli.launch.status import run_statuses
    from scaletrain_cli.rundir.paths import list_runs, runs_root
    from scaletrain_cli.rundir.sweeps import find_sweep

    chosen = list_runs() if sweep is None else find_sweep(sweep).runs
    runs = sorted(chosen, key=lambda run: run.record.stat().st_mtime, reverse=True)
    shown = runs[:limit] if limit else runs
    found = list(zip(shown, run_statuses(shown), strict=True))
    if as_json:
        from scaletrain_cli.ui.json import print_json

        rows = [_row(run, status) for run, status in found]
        print_json({"runs_root": str(runs_root()), "runs": rows, "not_shown": len(runs) - len(shown)})
        return
    from scaletrain_cli.ui.messages import say

    if not runs:
        say(f"no runs under {runs_root()}; `scaletrain submit SPEC` starts one.")
        return
    from scaletrain_cli.ui.run_list import show_runs

    show_runs(found)
    if len(shown) < len(runs):
        say(f"and {len(runs) - len(shown)} older; --limit 0 shows them all")


def _row(run: RunDir, status: RunStatus | UsageError) -> dict[str, Any]:
    if isinstance(status, UsageError):
        return {"run_id": run.run_id, "state": "damaged", "error": status.to_json()}
    return status.to_json()
