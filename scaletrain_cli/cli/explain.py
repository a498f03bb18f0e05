"""`scaletrain explain`: why a run waits, or why it ended, and what to do."""

from __future__ import annotations

from scaletrain_cli.cli.options import AsJson, RunName
from scaletrain_cli.errors import ExitCode

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(run: RunName, as_json: AsJson = False) -> None:
    """Say why a run waits, or why its last attempt ended: the evidence first, then what to do.

    Reads the run directory and asks the scheduler. Works where the scheduler has forgotten the job, or is silent.
    """
    from scaletrain_cli.launch.explain import explain
    from scaletrain_cli.rundir.paths import find_run

    explanation = explain(find_run(run))
    if as_json:
        from scaletrain_cli.ui.json import print_json

        print_json(explanation.to_json())
        return
    from scaletrain_cli.ui.explain import show_explanation

    show_explanation(explanation)
