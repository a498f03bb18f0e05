"""`scaletrain report`: one HTML page of a run, of several runs beside each other, or of a sweep."""

from pathlib import Path
from typing import Annotated

import typer

from scaletrain_cli.cli.options import AsJson, require_replaceable, run_argument
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import RunDir, Sweep, find_run_or_newest, find_run_or_sweep, find_sweep
from scaletrain_cli.safe_files import replace_file
from scaletrain_cli.ui.json import print_json

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(
    runs: Annotated[
        list[str] | None,
        run_argument(
            "Run ids, run directories, or a sweep; several runs are compared (default: the newest run).", "RUN..."
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page to this file.")
    ] = None,
    sweep: Annotated[str | None, typer.Option(metavar="NAME", help="Report the runs of this sweep.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a report of runs as one HTML page without outside references: -o FILE.

    Curves with attempts and rollbacks, goodput, planned and measured figures, nodes, diagnosis, spec and events; of
    several runs, their figures and curves beside each other; of a sweep, parameters and best points. Reads the run
    directories and writes only FILE. --json prints the figures.
    """
    from scaletrain_cli.report.comparison_sections import page, read_report
    from scaletrain_cli.ui.console import say

    if output is None and not as_json:
        raise UsageError(Reason("report.no-output"))
    if output is not None:
        require_replaceable("--output", output)
    if runs and sweep is not None:
        raise UsageError(Reason("report.runs-or-sweep"))
    subjects: list[RunDir | Sweep] = [find_sweep(sweep)] if sweep is not None else [*map(find_run_or_sweep, runs or ())]
    subjects = subjects or [find_run_or_newest(None)]
    sweeps = [subject for subject in subjects if isinstance(subject, Sweep)]
    if sweeps and len(subjects) > 1:
        raise UsageError(Reason("report.one-sweep", {"sweep": sweeps[0].name}))
    members = sweeps[0].runs if sweeps else [subject for subject in subjects if not isinstance(subject, Sweep)]
    report = read_report(list(dict.fromkeys(members)), sweeps[0] if sweeps else None)
    if output is not None:
        replace_file(output, page(report), public=True)
        say(f"wrote {output}")
    if as_json:
        print_json(report)
