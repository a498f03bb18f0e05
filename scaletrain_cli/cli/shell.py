"""`scaletrain shell`: an interactive shell on a node of a running run."""

import sys
from typing import Annotated

import typer

from scaletrain_cli.cli.options import OneNode, OneRank, RunName
from scaletrain_cli.errors import ExitCode, UsageError
from scaletrain_cli.reasons import Reason
from scaletrain_cli.rundir.paths import find_run
from scaletrain_cli.ui.console import say

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    run: RunName,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[COMMAND]", help="Run this in the terminal in place of a shell, after --, e.g. -- htop."
        ),
    ] = None,
    node: OneNode = None,
    rank: OneRank = None,
) -> int:
    """Open a shell on a node of a running run, in the environment of the ranks: their Python, variables and code.

    It is $SHELL of the ranks' environment, else bash or sh. The run goes on; when it ends, so does the shell. The exit
    code is that of the shell; before it starts 2 or 4, as below.
    """
    from scaletrain_cli.launch.node_session import node_of_run, open_shell

    run_dir = find_run(run)
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(Reason("launch.session-no-terminal", {"run": run_dir.run_id}))
    record, place = node_of_run(run_dir, node, rank)
    say(f"on {place.name} of {run_dir.run_id}; `exit` or Ctrl-D ends the shell")
    return open_shell(run_dir, record, place, words or (), rank=rank)
