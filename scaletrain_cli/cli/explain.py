"""`scaletrain explain`: why a run waits, was requeued or ended, and what to do."""

from scaletrain_cli.cli.options import AsJson, RunOrNewest
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import find_run_or_newest
from scaletrain_cli.ui.json import print_json

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(run: RunOrNewest = None, as_json: AsJson = False) -> None:
    """Explain why a run is pending, or why its last attempt ended: the evidence, then what to do.

    Reads the run directory and queries the scheduler; also works if the scheduler has forgotten the job or does not
    answer.
    """
    from scaletrain_cli.launch.explain import explain

    explanation = explain(find_run_or_newest(run))
    if as_json:
        print_json(explanation.to_json())
        return
    from scaletrain_cli.ui.status import show_explanation

    show_explanation(explanation)
