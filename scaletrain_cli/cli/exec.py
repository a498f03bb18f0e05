"""`scaletrain exec`: run a command on a node of a running run."""

from typing import Annotated

import typer

from scaletrain_cli.cli.options import OneNode, OneRank, RunName
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.rundir.paths import find_run

EXIT_CODES = (ExitCode.DONE, ExitCode.CRASHED, ExitCode.USAGE, ExitCode.SCHEDULER)


def command(
    run: RunName,
    words: Annotated[list[str], typer.Argument(metavar="COMMAND", help="Command and its arguments, after --.")],
    node: OneNode = None,
    rank: OneRank = None,
) -> int:
    """Run a command on a node of a running run: `scaletrain exec RUN -- nvidia-smi`.

    It has the environment of the ranks: their Python, variables, devices and code. Standard input, output and signals
    such as Ctrl-C are passed on. The exit code is that of the command; before it starts 2 or 4, as below.
    """
    from scaletrain_cli.launch.node_session import node_of_run, run_on_node

    run_dir = find_run(run)
    record, place = node_of_run(run_dir, node, rank)
    return run_on_node(run_dir, record, place, words, rank=rank)
