"""`scaletrain resume`: why it ended, what it goes on from, what that loses; then a new submission."""

from __future__ import annotations

from typing import Annotated

import typer

from scaletrain_cli.cli.options import AsJson, RunName, Yes
from scaletrain_cli.errors import ExitCode

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    run: RunName,
    from_scratch: Annotated[
        bool, typer.Option("--from-scratch", help="Train anew where no checkpoint can be loaded any more.")
    ] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Continue a run from its newest sound checkpoint, with fresh restart budgets.

    Says why the last attempt ended, which checkpoint it takes, how many steps are trained again and which damaged
    checkpoints it passed over. Prints the run id on stdout.
    """
    from scaletrain_cli.cli.confirmation import confirm
    from scaletrain_cli.cli.submit import useful_commands
    from scaletrain_cli.launch.resumption import inspect_resume, resume
    from scaletrain_cli.rundir.paths import find_run
    from scaletrain_cli.ui.messages import say, suggest
    from scaletrain_cli.ui.resume_view import resume_json, show_resume

    found = find_run(run)
    report = inspect_resume(found)
    if not as_json:
        show_resume(found.run_id, report)
    if not (report.finished or report.active):
        confirm("Resume?", yes)
    submission = resume(found, from_scratch=from_scratch).submission
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json(resume_json(found, report) | {"scheduler": submission.scheduler, "job_id": submission.job_id})
        return
    say(f"resumed: job {submission.job_id} in {found.path}")
    suggest(useful_commands(found.run_id, found.path))
    typer.echo(found.run_id)
